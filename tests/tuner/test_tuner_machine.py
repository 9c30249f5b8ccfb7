"""Which GPUs of a machine measure: by number, by index, or all of them, each of the kind that was asked for."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtune.core.gpu import target
from flashtune.core.gpu.target import find_target
from flashtune.core.system.errors import EnvironmentProblem, FlashtuneError, InputError
from flashtune.tuner import machine
from flashtune.tuner.machine import LocalGpu, cores, devices_of, driver_facts, gpu_names, local_gpu, provenance

H200 = find_target("h200")
ONE = "NVIDIA H200, 580.1, 1980 MHz, 700.00 W"


@pytest.fixture(autouse=True)
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A driver's tool that fails, until a test says what it prints, and no driver; the real ones, if there are any, are out of reach."""
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\nexit 9\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "_driver_names", lambda: None)
    driver_facts.cache_clear()
    yield path
    driver_facts.cache_clear()
    target._know_cards_here.cache_clear()


class Driver:
    """A process's view of NVIDIA's driver: its version, some GPUs, and what starting it says."""

    def __init__(self, version: int, names: tuple[str, ...], status: int = 0) -> None:
        self.version, self.names, self.status = version, names, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDriverGetVersion(self, place: Any) -> int:
        place._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, place: Any) -> int:
        place._obj.value = len(self.names)
        return 0

    def cuDeviceGet(self, place: Any, index: int) -> int:
        place._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
        name.value = self.names[device.value].encode()[: length - 1]
        return 0

    def cuDeviceGetAttribute(self, place: Any, attribute: int, device: Any) -> int:
        return 999


TWO = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize(
    ("driver", "built_for", "expected"),
    [
        (Driver(13000, TWO), 13, TWO),
        (Driver(13020, TWO), 12, TWO),
        (Driver(13000, ()), 13, ()),
        # What follows is for torch to say, whatever the driver and its tool have.
        (Driver(12080, TWO), 13, None),
        (Driver(13000, TWO), None, None),
        (Driver(13000, TWO, status=999), 13, None),
        (None, 13, None),
    ],
)
def test_the_driver_says_the_gpus_where_torch_would_say_the_same(
    driver: Driver | None, built_for: int | None, expected: tuple[str, ...] | None, tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", opened)
    monkeypatch.setattr(machine, "_built_for", lambda: built_for)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "torch's own")
    tool.write_text(f"#!/bin/sh\necho '{ONE}'\n")
    assert gpu_names() == (("torch's own",) if expected is None else expected)
    assert local_gpu() == (LocalGpu(name=gpu_names()[0], target=None if expected is None else H200) if gpu_names() else None)


def test_what_torch_was_built_for_is_read_without_importing_it() -> None:
    assert machine._built_for() == (None if torch.version.cuda is None else int(torch.version.cuda.partition(".")[0]))


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two H200 and an A100."""
    names = ("NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("said", ["exec sleep 60", "echo 'No devices were found'", f"echo '{ONE}'; exit 9", "echo 'GPU 0: unknown error'"])
def test_a_tool_without_an_answer_says_nothing(said: str, tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in said:
        monkeypatch.setattr(machine, "ANSWER_S", 0.2)
    tool.write_text(f"#!/bin/sh\n{said}\n")
    assert driver_facts() == ()
    made = provenance(command="c", seed=1, measured=True)
    assert (made.gpu_name, made.driver, made.clocks) == ("NVIDIA H200", "", ""), "what torch says is known"


@pytest.mark.usefixtures("three")
def test_a_record_says_what_the_drivers_tool_said_of_the_gpu_that_torch_takes(tool: Path) -> None:
    """The tool counts by the bus, torch the fastest first."""
    tool.write_text(f"#!/bin/sh\necho 'NVIDIA A100-SXM4-80GB, 580.1, 1410 MHz, 400.00 W'\necho '{ONE}'\n")
    made = provenance(command="c", seed=1, measured=True)
    assert (made.gpu_name, made.driver, made.clocks) == ("NVIDIA H200", "580.1", "clocks.max.sm 1980 MHz, power.limit 700.00 W")
    assert provenance(command="c", seed=1, measured=False).gpu_name == ""


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(("which", "expected"), [("1", ()), ("2", ("0", "1")), ("0,1", ("0", "1")), ("1,0,1", ("1", "0")), ("1,1", ("1",))])
def test_a_number_and_indices_name_gpus(which: str, expected: tuple[str, ...]) -> None:
    assert devices_of(which, H200) == expected


@pytest.mark.usefixtures("three")
def test_gpus_keep_the_names_that_a_job_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc,7")
    assert devices_of("0,1", H200) == ("5", "GPU-abc")


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("which", "error", "words"),
    [
        ("all", EnvironmentProblem, "GPU 2 of this machine is NVIDIA A100"),
        ("4", InputError, "GPU 3, and this machine has 3"),
        ("99999999999999", InputError, "GPU 3, and this machine has 3"),
        ("0,9", InputError, "GPU 9"),
        ("0", InputError, "names no GPUs"),
        ("every", InputError, "names no GPUs"),
        ("9" * 5000, InputError, "names no GPUs"),
        ("0,", InputError, "names no GPUs"),
    ],
)
def test_gpus_that_cant_measure_are_refused_in_one_line(which: str, error: type[FlashtuneError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        devices_of(which, H200)
    assert "\n" not in str(caught.value)


def test_all_gpus_of_one_kind_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    assert devices_of("all", H200) == ("0", "1")


def test_cores_are_those_that_a_job_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == 32
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1
