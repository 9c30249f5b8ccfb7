"""Kernels that refuse or fail, and rows that are never rendered: the next serves, and what is no kernel's fault is raised."""

import errno
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretended_gpu
import pytest
import torch
from interpreting import interpreted
from pretended_gpu import PROBLEM, Machine, Q, assert_right, attend, config_of, save
from triton.runtime.errors import OutOfResources

from flashtune import dispatch
from flashtune.core.problems.config import Variant
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.state import context
from flashtune.templates import families
from flashtune.templates.family import Family

machine = pretended_gpu.machine


@pytest.mark.parametrize("way", ["dense", "packed", "functions", "packed functions"])
def test_kernels_that_do_not_compile_give_way_in_every_way_in(way: str) -> None:
    report = interpreted("interpret_failures", *(f"{way}: {directions}" for directions in ("fwd", "bwd", "fwd bwd")))
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) == 3


def test_faults_pass_and_what_is_no_kernels_fault_is_raised_in_every_way_in() -> None:
    report = interpreted("interpret_failures")
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) == 4


def test_a_kernel_that_fails_is_warned_of_once_and_the_next_serves_from_then_on(machine: Machine, own_database: Path) -> None:
    exact = save(own_database)
    near = save(own_database, replace(PROBLEM, n_q=64, n_kv=64), config=config_of(block_m=128))
    machine.fails[exact.id] = OutOfResources(300_000, 232_448, "shared memory")
    with pytest.warns(RuntimeWarning, match="flash_fwd with BLOCK_M=64.* failed on cpu .*out of resource: shared memory"):
        assert_right(attend())
    served = machine.launched[-1]
    assert served not in (exact, near), "after a failure only the defaults are tried"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_right(attend())
        assert_right(attend(scale=0.25))
    assert [variant.id for variant in machine.launched].count(exact.id) == 1
    explained = dispatch.explain(Q, Q, Q, is_causal=True)
    assert explained.kind == "default" and any("out of resource" in line for line in explained.refused)


def test_when_every_kernel_fails_the_framework_serves(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(family: Family, variant: Variant) -> Any:
        raise OSError("No space left on device")

    monkeypatch.setattr(kernels, "load", load)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert_right(attend())
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "framework"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.ENOTDIR])
def test_a_fault_of_the_machine_is_no_kernels_and_passes(
    machine: Machine, own_database: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning for all kernels, with cause and remedy; once it is over, the kernel serves."""
    exact = save(own_database)
    timers: list[tuple[float, Callable[[], None]]] = []

    def timer(seconds: float, call: Callable[[], None]) -> Any:
        timers.append((seconds, call))
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(kernels, "Timer", timer)

    def fails(family: Family, variant: Variant) -> Any:
        raise OSError(code, os.strerror(code), f"/home/user/.triton/cache/{variant.id}")

    monkeypatch.setattr(kernels, "load", fails)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert_right(attend())
        assert_right(attend(scale=0.25))
    [message] = [str(one.message) for one in warned]
    assert message.startswith(f"flashtune: no kernel can be compiled here ({os.strerror(code)}): free some space")
    assert any(os.strerror(code) in line for line in dispatch.explain(Q, Q, Q, is_causal=True).refused)
    monkeypatch.setattr(kernels, "load", machine.load)
    assert_right(attend())
    assert machine.launched == [], "nothing is tried at once"
    [(seconds, retry)] = timers
    assert seconds == kernels.RETRY_S
    retry()
    assert_right(attend())
    assert [variant.id for variant in machine.launched] == [exact.id]
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "exact"


def test_a_fault_of_the_machine_while_triton_compiles_at_the_launch_passes_too(machine: Machine, own_database: Path) -> None:
    exact = save(own_database)
    machine.fails[exact.id] = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/user/.triton/cache")
    with pytest.warns(RuntimeWarning, match="no kernel can be compiled here"):
        assert_right(attend())
    machine.fails.clear()
    context.current().kernels.retry()
    assert_right(attend())
    assert machine.launched[-1].id == exact.id


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: an illegal memory access"), KeyboardInterrupt()]
)
def test_what_is_no_kernels_fault_is_raised(machine: Machine, own_database: Path, error: BaseException) -> None:
    machine.fails[save(own_database).id] = error
    for _ in range(2):
        with pytest.raises(type(error)):
            attend()
    assert len(machine.launched) == 2


def test_a_family_that_does_not_take_the_strides_is_passed_over(machine: Machine, own_database: Path) -> None:
    save(own_database)
    machine.refuses = {"flash_fwd"}
    others = set(families()) - machine.refuses
    assert_right(attend())
    assert {variant.template for variant in machine.launched} <= others
    explained = dispatch.explain(Q, Q, Q, is_causal=True)
    assert any("flash_fwd" in line and "strides" in line for line in explained.refused)
    machine.refuses = set(families())
    dispatch.reload()
    assert_right(attend())
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "framework"


def test_where_a_tuned_kernel_does_not_take_the_strides_its_familys_default_may(machine: Machine, own_database: Path) -> None:
    tuned = save(own_database)
    machine.refuses = {tuned.id}
    assert_right(attend())
    assert [(variant.template, variant.id == tuned.id) for variant in machine.launched] == [("flash_fwd", False)]


def test_a_row_outside_the_declared_space_is_never_rendered(machine: Machine, own_database: Path) -> None:
    """A hand-edited database can make a choice fall through, nothing more."""
    save(own_database, config=config_of().replace(BLOCK_M=48))
    with pytest.warns(RuntimeWarning, match="BLOCK_M=48 is outside the declared space.*search it again or delete the record"):
        assert_right(attend())
    assert all(variant.config["BLOCK_M"] != 48 for variant in machine.loaded)
    explained = dispatch.explain(Q, Q, Q, is_causal=True)
    assert explained.kind == "default" and "BLOCK_M=48" in explained.refused[0]


def test_where_the_framework_was_faster_it_serves_unless_it_lacks_the_feature(machine: Machine, own_database: Path) -> None:
    variant = save(own_database, framework_us=50.0)
    explained = dispatch.explain(Q, Q, Q, is_causal=True)
    assert explained.kind == "framework" and "PyTorch was faster: 50.0 us" in explained.reason
    assert (explained.source, explained.origin, explained.template) == ("measured", "overlay", None)
    assert_right(attend())
    assert machine.launched == []
    out, _ = dispatch.attention(Q, Q, Q, is_causal=True, return_lse=True)
    assert machine.launched == [variant]
    assert_right(out)
