"""Which GPUs of a machine measure: by number, by index, or all of them, each of the kind that was asked for."""

import os

import pytest
import torch

from flashtune.core.errors import EnvironmentProblem, FlashtuneError, InputError
from flashtune.core.target import find_target
from flashtune.tuner.machine import cores, devices_of

H200 = find_target("h200")


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two H200 and an A100."""
    names = ("NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


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
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_of("all", H200) == ("0", "1")


def test_cores_are_those_that_a_job_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == 32
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1
