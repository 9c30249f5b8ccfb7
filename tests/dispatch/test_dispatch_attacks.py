"""Damaged overlays, strangers' records and packed files: every call is served, and none waits for what they make possible."""

import gzip
import lzma
import os
import random
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import db_samples as samples
import pretended_gpu as pretended
import pytest
from pretended_gpu import Machine, assert_right, attend, save
from test_core_binaries import PLAIN

from flashtune import dispatch
from flashtune.core.code.archive import Archive, Group, archive_bytes
from flashtune.core.code.binaries import Manifest
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Value
from flashtune.core.records.results import Outcome, TuningRecord
from flashtune.core.system.errors import DatabaseError, EnvironmentProblem
from flashtune.db import inspection, records
from flashtune.dispatch.policy import choose as choices
from flashtune.dispatch.policy.choose import Pool, Refusal, rank
from flashtune.templates import families, family
from flashtune.templates.family import MOST_REFITTED, ConstraintCache, Family

machine = pretended.machine
CORRUPTIONS = int(os.environ.get("FLASHTUNE_TEST_CORRUPTIONS", "40"))
"""How many damaged overlays calls are served over."""
H200 = find_target("h200")


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One flipped bit, some bytes, or an end that is missing."""
    found = bytearray(content)
    match rng.randrange(4):
        case 0:
            start = rng.randrange(len(found))
            found[start : start + rng.randrange(1, 5000)] = rng.randbytes(rng.randrange(1, 5000))
        case 1:
            del found[rng.randrange(len(found)) :]
        case _:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


@pytest.mark.parametrize("whole", [True, False])
def test_calls_are_served_whatever_became_of_the_overlay(
    machine: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(inspection, "QUIET_SECONDS", 0.0)
    if not whole:
        for name in ("READ_WHOLE", "CHECKED_BYTES"):
            monkeypatch.setattr(records, name, 0)
    for block_m in (32, 64, 128):
        save(own_database, config=pretended.config_of(block_m=block_m))
    content, rng, left_out = own_database.read_bytes(), random.Random(20261127), 0
    for _ in range(CORRUPTIONS // 2):
        own_database.write_bytes(damaged(content, rng))
        dispatch.reload()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert_right(attend())
            attend()
        said = [str(one.message) for one in caught if "overlay database is left out" in str(one.message)]
        assert len(said) <= 1 and all(str(own_database) in one for one in said)
        left_out += len(said)
    assert left_out >= CORRUPTIONS // 10


def test_what_was_named_is_an_error_where_it_is_damaged(
    machine: Machine, tmp_path: Path, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.sqlite")
    content = (tmp_path / "a.sqlite").read_bytes()
    (tmp_path / "a.sqlite").write_bytes(content[:8192] + b"\xff" * (len(content) - 8192))
    with pytest.raises(DatabaseError, match=r"a\.sqlite"):
        dispatch.use(tmp_path / "a.sqlite")
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "a.sqlite"))
    dispatch.reload()
    with pytest.raises(DatabaseError, match=r"a\.sqlite"):
        attend()


# --- records of other kernels -----------------------------------------------------------------------------------------------------

HOPPER = family("flash_fwd_hopper")
SMALL, LARGE = (samples.problem(n, d=d, d_v=d, kv_heads=16) for n, d in ((2048, 40), (512, 256)))


def test_no_more_axes_change_than_that_and_no_more_work_is_done() -> None:
    rng, checked = random.Random(7), ConstraintCache(LARGE.spec(), H200)
    for config in rng.sample(list(HOPPER.configs(SMALL.spec(), H200)), 12):
        moved, looked = HOPPER.refit(config, LARGE.spec(), H200, checked)
        assert moved is None or sum(moved[axis] != config[axis] for axis in moved) <= MOST_REFITTED
        assert HOPPER.refit(config, LARGE.spec(), H200, ConstraintCache(LARGE.spec(), H200)) == (moved, looked)
        assert looked < 20_000


def test_many_configs_that_have_to_change_much_take_a_decision_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "MOST_LOOKED", 20_000)
    checked, looked = ConstraintCache(LARGE.spec(), H200), []
    refit = Family.refit
    monkeypatch.setattr(Family, "refit", lambda *words: looked.append(found := refit(*words)) or found)
    configs = random.Random(7).sample(list(HOPPER.configs(SMALL.spec(), H200)), 300)
    # Those that fit nowhere first: a decision goes on to the next of them.
    configs = sorted(configs[:40], key=lambda config: refit(HOPPER, config, LARGE.spec(), H200, checked).config is not None) + configs[40:]
    records = [stored(samples.outcome(f"{n:016x}", 900.0 + n, template=HOPPER.name, config=one)) for n, one in enumerate(configs)]
    pool = Pool(LARGE.key("h200"), H200, records, families())
    first = list(rank(LARGE, H200, pool, families()))
    assert len(looked) < len(configs) and sum(one.looked for one in looked) < 20_000 + 20_000
    passed = [one for one in first if isinstance(one, Refusal) and "isn't tried" in one.reason]
    assert len(passed) > 200
    looked.clear()
    assert list(rank(LARGE, H200, pool, families())) == first and not looked


def stored(outcome: Outcome, gpu: str = "h200") -> TuningRecord:
    found = samples.result(outcome, framework_us=1000.0, gpu=gpu, of=SMALL)
    return TuningRecord(
        key=SMALL.key(gpu), problem=SMALL, outcome=outcome, provenance=found.provenance, baseline=found.baseline, origin="a stranger's"
    )


def unfit(template: str, gpu: str) -> TuningRecord:
    """A record of a kernel that its GPU can't run."""
    made = family(template)
    spaces = (
        [config.replace(BLOCK_M=m, BLOCK_N=n) for m in values(made, "BLOCK_M") for n in values(made, "BLOCK_N")]
        for config in made.tried_first(SMALL.spec(), H200)
    )
    config = next(one for same in spaces for one in same if made.unfit(one, SMALL.spec(), find_target(gpu)) is not None)
    return stored(samples.outcome("aaaa000000000001", 900.0, template=template, config=config), gpu)


def values(made: Family, name: str) -> tuple[Value, ...]:
    return next(axis.values for axis in made.axes if axis.name == name)


@pytest.mark.parametrize(("template", "gpu"), [("flash_fwd_hopper", "h100"), ("flash_fwd_hopper", "h100-pcie"), ("flash_fwd", "h100")])
def test_a_record_is_checked_on_its_own_gpu_before_it_is_moved(template: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = unfit(template, gpu)
    monkeypatch.setattr(Family, "refit", lambda *words: pytest.fail("it is moved nowhere"))
    for problem in (LARGE, replace(SMALL, dtype="fp16")):
        [first, *_] = rank(problem, H200, [record], families())
        assert isinstance(first, Refusal) and first.invalid


# --- packed files -----------------------------------------------------------------------------------------------------------------


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def of_code(folder: Path) -> Manifest:
    (folder / PLAIN.file).write_bytes(gzip.compress(bytes(200 << 20), 1))
    return Manifest(variant_id="0123456789abcdef", binaries=(PLAIN,), folder=folder)


def of_a_group(folder: Path) -> Manifest:
    group = lzma.compress(bytes(200 << 20), preset=0)
    content, sha256 = archive_bytes([group])
    (folder / "sm90.kernels").write_bytes(content)
    archive = Archive(path=folder / "sm90.kernels", sha256=sha256, groups=(Group(len(group), 4096),))
    return Manifest(variant_id="0123456789abcdef", binaries=(), archive=archive)


def of_a_large_file(folder: Path) -> Manifest:
    with (folder / PLAIN.file).open("wb") as file:
        file.write(gzip.compress(b"code")[:-8])
        file.truncate(1 << 32)
    return Manifest(variant_id="0123456789abcdef", binaries=(PLAIN,), folder=folder)


@pytest.mark.parametrize("attack", [of_code, of_a_group, of_a_large_file])
def test_packed_code_fills_no_memory(tmp_path: Path, attack: Callable[[Path], Manifest]) -> None:
    found = attack(tmp_path)
    with little_memory(), pytest.raises(EnvironmentProblem, match="machine code"):
        found.code(replace(PLAIN, file="0/64/1024") if found.archive else PLAIN)
