"""Which GPUs of a machine measure: by number, by index, or all of them, each of the kind that was asked for."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashtune.core.errors import EnvironmentProblem, FlashtuneError, InputError
from flashtune.core.target import find_target
from flashtune.tuner import machine
from flashtune.tuner.machine import LocalGpu, cores, devices_of, driver_facts, gpu_names, local_gpu, provenance

H200 = find_target("h200")
ONE = "NVIDIA H200, 580.1, 1980 MHz, 700.00 W, Disabled"
SLICED = ONE.replace("Disabled", "Enabled")
OTHER = ONE.replace("H200", "A100")


@pytest.fixture(autouse=True)
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A driver's tool that fails, until a test says what it prints; the real one, if there is any, is out of reach."""
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\nexit 9\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver_facts.cache_clear()
    yield path
    driver_facts.cache_clear()


@pytest.mark.parametrize(
    ("lines", "visible", "version", "count"),
    [
        ([ONE, ONE], None, "2.11.0", 2),
        ([ONE, ONE], "1", "2.11.0+cu128", 1),
        ([ONE, ONE], "1,0", "2.11.0", 2),
        # What follows is for torch to say.
        ([ONE, ONE], "0,2", "2.11.0", None),
        ([ONE, ONE], "GPU-abc", "2.11.0", None),
        ([ONE, ONE], "", "2.11.0", None),
        ([ONE, OTHER], None, "2.11.0", None),
        ([ONE, SLICED], None, "2.11.0", None),
        ([ONE], None, "2.11.0+cpu", None),
        ([ONE], None, "2.11.0+rocm6.4", None),
        ([], None, "2.11.0", None),
    ],
)
def test_the_drivers_tool_says_the_gpus_where_torch_would_say_the_same(
    lines: list[str], visible: str | None, version: str, count: int | None, tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    monkeypatch.setattr(machine, "_version", lambda package: version)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "torch's own")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_names() == (("torch's own",) if count is None else ("NVIDIA H200",) * count)
    assert local_gpu() == LocalGpu(name=gpu_names()[0], target=None if count is None else H200)


def test_a_record_says_what_the_drivers_tool_said(tool: Path) -> None:
    tool.write_text(f"#!/bin/sh\necho '{ONE}'\n")
    made = provenance(command="c", seed=1, measured=True)
    assert (made.gpu_name, made.driver, made.clocks) == ("NVIDIA H200", "580.1", "clocks.max.sm 1980 MHz, power.limit 700.00 W")
    assert provenance(command="c", seed=1, measured=False).gpu_name == ""


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two H200 and an A100."""
    names = ("NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)


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
        ("0,9", InputError, "GPU 9"),
        ("0", InputError, "names no GPUs"),
        ("every", InputError, "names no GPUs"),
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
