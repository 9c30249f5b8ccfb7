"""Databases in layers: scoped, stacked, removed, per thread or for all; plans are kept for each stack and never served under another."""

import asyncio
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path

import pretended_gpu as pretended
import pytest
import torch
from db_faults import fork
from forked import python
from pretended_gpu import Machine, Q, attend, config_of, save

from flashtune import dispatch
from flashtune.core.pytorch import devices
from flashtune.core.records.results import Provenance
from flashtune.core.system.errors import DatabaseError, InputError
from flashtune.db.library import Library
from flashtune.dispatch.state import context
from flashtune.dispatch.state.context import Memo

machine = pretended.machine


@pytest.fixture
def models(tmp_path: Path, machine: Machine) -> Iterator[tuple[Path, Path]]:
    """Two models' databases with rows of the same key, of other kernels."""
    save(tmp_path / "a.sqlite", config=config_of(block_m=32, block_n=32))
    save(tmp_path / "b.sqlite", config=config_of(block_m=128))
    yield tmp_path / "a.sqlite", tmp_path / "b.sqlite"
    dispatch.reload()


def origin() -> str:
    found = dispatch.explain(Q, Q, Q, is_causal=True).origin
    return Path(found or "none").stem


def launched(machine: Machine) -> int:
    attend()
    return machine.launched[-1].config.number("BLOCK_M")


def test_two_models_in_one_process_are_each_served_their_own_rows(models: tuple[Path, Path], machine: Machine) -> None:
    for _ in range(3):
        for path, block_m in zip(models, (32, 128), strict=True):
            with dispatch.use(path):
                assert (launched(machine), origin()) == (block_m, path.stem)
    assert len(machine.loaded) == 2, "each is loaded once"
    attend()
    assert origin() == "none", "nothing of theirs serves outside"


def test_layers_stack_and_any_of_them_can_be_removed(models: tuple[Path, Path], own_database: Path) -> None:
    save(own_database)
    dispatch.reload()
    assert origin() == "overlay"
    lower = dispatch.use(models[0])
    upper = dispatch.use(models[1])
    assert origin() == "b"
    lower.remove()
    lower.remove()
    assert origin() == "b"
    with dispatch.use(models[0]) as again:
        assert origin() == "a"
        again.remove()
        assert origin() == "b"
    upper.remove()
    assert origin() == "overlay"
    with pytest.raises(RuntimeError, match="in the middle"), dispatch.use(models[0]):
        raise RuntimeError("in the middle")
    assert origin() == "overlay"


def test_alone_hides_what_lies_below(models: tuple[Path, Path], own_database: Path, tmp_path: Path) -> None:
    save(own_database)
    save(tmp_path / "other.sqlite", gpu="a100")
    dispatch.reload()
    with dispatch.use(models[0]), dispatch.use(tmp_path / "other.sqlite"):
        assert origin() == "a"
        with dispatch.use(tmp_path / "other.sqlite", alone=True):
            assert origin() == "none"
            with dispatch.use(models[1]):
                assert origin() == "b"


def test_a_threads_layers_are_its_own_and_everywhere_is_for_all(models: tuple[Path, Path]) -> None:
    ready, checked = threading.Barrier(2, timeout=600), threading.Barrier(2, timeout=600)
    seen: list[str] = []

    def work() -> None:
        with dispatch.use(models[1]):
            attend()
            ready.wait()
            checked.wait()
            seen.append(origin())
        seen.append(origin())

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    assert origin() == "none"
    everywhere = dispatch.use(models[0], everywhere=True)
    assert origin() == "a"
    checked.wait()
    thread.join()
    assert seen == ["b", "a"], "a thread's own lies over what is for all"
    everywhere.remove()
    assert origin() == "none"


def test_what_changes_for_all_reaches_threads_that_have_layers_of_their_own(
    models: tuple[Path, Path],
    tmp_path: Path,
    machine: Machine,
) -> None:
    save(tmp_path / "other.sqlite", gpu="a100")
    turns = [threading.Barrier(2, timeout=600) for _ in range(4)]
    seen: list[int] = []

    def work() -> None:
        with dispatch.use(tmp_path / "other.sqlite"):
            for before, after in (turns[:2], turns[2:]):
                before.wait()
                seen.append(launched(machine))
                after.wait()

    thread = threading.Thread(target=work)
    with dispatch.use(models[0], everywhere=True):
        thread.start()
        turns[0].wait()
        turns[1].wait()
        with dispatch.use(models[1], everywhere=True):
            turns[2].wait()
            turns[3].wait()
    thread.join()
    assert seen == [32, 128]


def test_threads_that_used_layers_end_and_so_does_their_process() -> None:
    """A value that a thread leaves in torch's own storage for threads waits for the interpreter's lock at its end, and may end it all."""
    script = """
import threading
from flashtune import dispatch

def work(keep):
    found = dispatch.use(unmeasured=True)
    if not keep:
        found.remove()

for keep in [True, False] * 20:
    thread = threading.Thread(target=work, args=(keep,))
    thread.start()
    thread.join()
"""
    for _ in range(2):
        python(script)


def test_tasks_of_one_thread_are_each_served_by_their_own(models: tuple[Path, Path]) -> None:
    """Layers that each task lays while others wait, and removes again, are for itself alone; every task has those of where it was made."""

    async def task(path: Path | None) -> list[str]:
        seen = []
        for _ in range(3):
            with nullcontext() if path is None else dispatch.use(path):
                await asyncio.sleep(0)
                attend()
                seen.append(origin())
            await asyncio.sleep(0)
            seen.append(origin())
        return seen

    async def all_at_once() -> list[list[str]]:
        with dispatch.use(models[1]):
            inner = asyncio.create_task(task(None))
        return [*await asyncio.gather(*(task(path) for path in (*models, None))), await inner]

    assert asyncio.run(all_at_once()) == [["a", "none"] * 3, ["b", "none"] * 3, ["none"] * 6, ["b"] * 6]
    assert origin() == "none"


def test_a_task_that_never_ends_or_is_cancelled_leaves_no_layer_to_others(models: tuple[Path, Path]) -> None:
    async def forgetful() -> None:
        dispatch.use(models[0])
        await asyncio.sleep(3600)

    async def others() -> list[str]:
        waiting = [asyncio.create_task(forgetful()) for _ in range(3)]
        await asyncio.sleep(0)
        seen = [origin()]
        waiting[0].cancel()
        await asyncio.wait(waiting, timeout=0.01)
        everywhere = dispatch.use(models[1], everywhere=True)
        seen.append(await asyncio.create_task(asyncio.to_thread(origin)))
        everywhere.remove()
        return [*seen, origin()]

    assert asyncio.run(others()) == ["none", "b", "none"]
    assert origin() == "none"


def test_a_thread_that_runs_in_a_copy_of_the_context_has_its_layers(models: tuple[Path, Path]) -> None:
    async def asked() -> list[str]:
        with dispatch.use(models[0]) as used:
            loop = asyncio.get_running_loop()
            seen = [await asyncio.to_thread(origin), await loop.run_in_executor(None, origin)]
            copied = copy_context()
            dispatch.reload()
            seen.append(copied.run(origin))
            copied.run(used.remove)
            return [*seen, copied.run(origin), origin()]

    assert asyncio.run(asked()) == ["a", "none", "a", "none", "a"]


def test_a_forked_process_waits_for_no_lock_of_a_thread_that_it_doesnt_have() -> None:
    """As a data loader's worker, while a thread of the parent compiles."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with context.current().lock, context._lock:
            held.set()
            done.wait(600)

    def work() -> None:
        with context._lock, context.current().lock:
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(600)
        child = fork.Process(target=work)
        child.start()
        child.join()
        assert child.exitcode == 0
    finally:
        done.set()
        thread.join()


def test_another_threads_layer_cannot_be_removed_from_here(models: tuple[Path, Path]) -> None:
    used: list[context.Use] = []
    thread = threading.Thread(target=lambda: used.append(dispatch.use(models[0])))
    thread.start()
    thread.join()
    with pytest.raises(InputError, match="another thread or task"):
        used[0].remove()


def test_reload_keeps_layers_and_reads_them_anew(models: tuple[Path, Path], tmp_path: Path) -> None:
    own = tmp_path / "fresh.sqlite"
    save(own, gpu="a100")
    with dispatch.use(models[0]), dispatch.use(own):
        assert origin() == "a"
        save(own)
        assert origin() == "a", "records are read once"
        dispatch.reload()
        assert origin() == "fresh"
    dispatch.reload(models[1])
    assert origin() == "b"
    with dispatch.use(models[0]):
        assert origin() == "a"
    dispatch.reload()
    assert origin() == "none"


def replaced(path: Path, other: Path) -> None:
    os.replace(other, path)


def removed_and_made_anew(path: Path, other: Path) -> None:
    content = other.read_bytes()
    path.unlink()
    path.write_bytes(content)


def written_in_place(path: Path, other: Path) -> None:
    save(path, framework_us=400.0, config=config_of(block_m=128))


@pytest.mark.parametrize("change", [replaced, removed_and_made_anew, written_in_place])
@pytest.mark.parametrize("url", [False, True])
def test_a_database_is_read_as_it_is_whenever_it_is_used(
    change: Callable[[Path, Path], None], url: bool, models: tuple[Path, Path], machine: Machine
) -> None:
    path, other = models
    name = f"sqlite:///{path}" if url else path
    with dispatch.use(name):
        assert launched(machine) == 32
        change(path, other)
        assert launched(machine) == 32, "a layer's plans don't change under a model"
        for _ in range(2):
            with dispatch.use(name):
                assert launched(machine) == 128
        assert launched(machine) == 32
        dispatch.reload()
        assert launched(machine) == 128
    with dispatch.use(name, everywhere=True):
        assert launched(machine) == 128


def test_plans_are_kept_for_each_stack_and_found_without_a_decision(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for path in models:
        with dispatch.use(path):
            attend()
    monkeypatch.setattr("flashtune.dispatch.api._first_call", None)
    for path in models:
        with dispatch.use(path):
            attend()


def test_a_pinned_kernel_serves_over_all_layers(models: tuple[Path, Path]) -> None:
    with dispatch.use(models[0]):
        attend()
        memo = Memo()
        with context.serving(memo):
            attend()
            assert context.current() is memo and len(memo.plans) == 1
        assert origin() == "a" and context.current() is not memo


@pytest.mark.parametrize("everywhere", [False, True])
def test_what_cannot_be_used_is_said_at_once_and_changes_nothing(everywhere: bool, tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "text.sqlite").write_text("no database " * 20)
    for path in (tmp_path / "missing.sqlite", tmp_path / "text.sqlite"):
        with pytest.raises(DatabaseError, match=path.name):
            dispatch.use(path, everywhere=everywhere)
    with pytest.raises(InputError, match="nothing to use"):
        dispatch.use(everywhere=everywhere)
    with pytest.raises(InputError, match="by its path or URL, not 5"):
        dispatch.use(5, everywhere=everywhere)  # type: ignore[arg-type]
    assert origin() == "none"


def test_no_more_stacks_are_remembered_than_that(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "MOST_MEMOS", 2)
    outer = dispatch.use(models[0])
    for alone in (False, True, False):
        with dispatch.use(models[1], alone=alone):
            assert origin() == "b"
            assert len(context._memos) <= 2
    assert origin() == "a"
    assert torch.is_tensor(attend())
    outer.remove()


def test_rows_from_another_machine_are_warned_of_once_for_each_database(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(devices, "here", lambda index: devices.Here(triton="3.6.0", driver="580.1", gpu_name="NVIDIA H200"))
    given = Provenance(flashtune="0", torch="2", triton="3.5.1", driver="575.57", gpu_name="NVIDIA H200")
    with dispatch.use(models[0]):
        memo = context.current()
        [record] = [row for row in Library.over([models[0]]).winners() if row.origin == str(models[0])]
        theirs = replace(record, provenance=given)
        others = [
            theirs,
            replace(theirs, provenance=replace(given, driver="570.0")),
            replace(theirs, origin="shipped"),
            replace(theirs, origin="b", provenance=replace(given, triton="3.6.0", driver="")),
        ]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for row in others:
                memo.warn_of_elsewhere(row, gpu)
    [said] = [str(one.message) for one in warned]
    assert "a.sqlite were measured elsewhere: Triton 3.5.1 (here 3.6.0), driver 575.57 (here 580.1);" in said


def test_layers_of_threads_that_ended_are_forgotten(models: tuple[Path, Path]) -> None:
    laid: list[weakref.ref[context.Stack]] = []

    def work() -> None:
        dispatch.use(models[0])
        laid.append(weakref.ref(context.STACK.get()))

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert [one() for one in laid] == [None] * 3 and origin() == "none"
