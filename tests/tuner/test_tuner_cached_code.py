"""A search takes machine code that is at hand in place of the compiler, where it is of the very text."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from flashtune.core.code.compiled import from_compiled
from flashtune.core.gpu.target import find_target
from flashtune.core.records.results import TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.templates import family
from flashtune.tuner.children import compile, tasks
from flashtune.tuner.publish.machine_code import Order, build
from flashtune.tuner.publish.winners import variant_for
from flashtune.tuner.replies import Compiled, Failed

pytestmark = pytest.mark.skipif(triton.__version__ != "3.6.0", reason="shipped code was compiled by Triton 3.6.0")

H200 = find_target("h200")


@pytest.fixture(scope="module")
def row() -> TuningRecord:
    """Of a kernel that loads by tensor maps."""
    found = (row for row in Library.of(shipped_path()).winners() if row.outcome.template == "flash_fwd_hopper" and row.problem.d == 64)
    return next(found)


@pytest.fixture(scope="module")
def source(row: TuningRecord) -> tasks.Source:
    return tasks.Source.of(family(row.outcome.template), variant_for(row))


@pytest.fixture(autouse=True)
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was compiled before, and nothing can be."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("a compiler was wanted")

    monkeypatch.setattr(CUDABackend, "add_stages", refuse)
    monkeypatch.setenv("FLASHTUNE_CACHE", str(tmp_path / "own"))
    triton_knobs: Any = knobs
    with triton_knobs.cache.scope():
        triton_knobs.cache.dir = str(tmp_path / "triton")
        yield


def kernels_of(source: tasks.Source, row: TuningRecord, stem: str) -> list[tuple[str, Any]]:
    manifest = compile.machine_code_of(source.variant_id, source.text, H200)
    return compile.compiled_kernels(source.text, stem, row.problem, H200, manifest)


def test_what_the_jit_finds_is_what_was_shipped(source: tasks.Source, row: TuningRecord) -> None:
    manifest = compile.machine_code_of(source.variant_id, source.text, H200)
    assert manifest is not None
    for name, compiled in kernels_of(source, row, "first"):
        [binary] = manifest.of(name)
        described, code = from_compiled(compiled, specialization=binary.specialization, file=binary.file)
        assert any(parameter.tensor_map for parameter in described.parameters)
        # What code of any size takes for granted is less than what the JIT knows of one call.
        assert replace(described, conditions=()) == replace(binary, conditions=()) and set(binary.conditions) <= set(described.conditions)
        assert code == manifest.code(binary)
    # A process that starts later, or the GPU's own, finds it without the manifest.
    assert compile.compiled_kernels(source.text, "second", row.problem, H200)


def test_a_trial_is_spared_the_compiler_where_its_facts_are_known(source: tasks.Source, row: TuningRecord) -> None:
    facts, changed = row.outcome.facts, replace(source, text=source.text + "\n")
    assert facts is not None
    for wanted, known in ((changed, facts), (source, None)):
        failed = tasks.compile_candidate(wanted, row.problem, H200, known)
        assert isinstance(failed, Failed) and "a compiler was wanted" in failed.reason, "code of another text, or of unknown facts, is none"
    assert tasks.compile_candidate(source, row.problem, H200, facts) == Compiled(facts=facts)
    # What was taken stays in Triton's cache, where a search finds it that knows no facts of it.
    later = tasks.compile_candidate(source, row.problem, H200)
    assert isinstance(later, Compiled) and later.facts.tensor_core_ops > 0
    assert replace(later.facts, tensor_core_ops=facts.tensor_core_ops) == facts


def test_a_winner_is_kept_from_what_is_at_hand(source: tasks.Source, row: TuningRecord) -> None:
    order = Order(text=source.text, stem=source.stem, variant_id=source.variant_id, spec=row.problem.spec(), target=H200)
    shipped = compile.machine_code_of(source.variant_id, source.text, H200)
    assert shipped is not None
    assert build(order, fresh=False).codes == tuple(shipped.code(binary) for binary in shipped.binaries)


def test_other_texts_gpus_and_versions_have_none(source: tasks.Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile.machine_code_of(source.variant_id, source.text + " ", H200) is None
    assert compile.machine_code_of("0" * 16, source.text, H200) is None
    assert all(compile.machine_code_of(source.variant_id, source.text, find_target(gpu)) is None for gpu in ("a100", "mi300x"))
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    assert compile.machine_code_of(source.variant_id, source.text, H200) is None


def test_code_that_takes_more_for_granted_or_other_arguments_is_not_taken(source: tasks.Source, row: TuningRecord) -> None:
    manifest = compile.machine_code_of(source.variant_id, source.text, H200)
    assert manifest is not None
    [(name, compiled)] = kernels_of(source, row, "third")
    [binary] = manifest.of(name)
    number = next(one for one in binary.parameters if one.kind == "i32")
    for rule, value in (("multiple_of", 4096), ("equals", 1)):
        more = binary.conditions[0]._replace(rule=rule, name=number.name, position=number.position, value=value)
        assert compile.fitting(compiled.src, [replace(binary, conditions=(*binary.conditions, more))]) is None
    assert compile.fitting(compiled.src, [binary]) is binary
    assert compile.fitting(compiled.src, [replace(binary, parameters=binary.parameters[1:]), binary]) is binary
