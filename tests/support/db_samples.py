"""Problems and search results for the database's tests; also run as a script, as one of several processes that write at once."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flashtune.core.problems.config import Config
from flashtune.core.problems.lengths import Lengths
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import (
    Baseline,
    CompileFacts,
    Conditions,
    Ending,
    Fate,
    Measurement,
    Outcome,
    Provenance,
    SearchResult,
    Source,
)
from flashtune.db.store import Store

PROBLEM = Problem(batch=2, heads=16, kv_heads=4, n_q=1024, n_kv=1024, d=64, d_v=64, dtype="bf16", features=Features(causal=True))
PROVENANCE = Provenance(
    flashtune="0.1.0",
    torch="2.11.0",
    triton="3.6.0",
    driver="575.57",
    gpu_name="NVIDIA H200",
    clocks="clocks.sm 1980 MHz",
    command="flashtune search --gpu-name h200 --d 64",
    seed=7,
    created_at="2026-11-21T10:00:00+00:00",
)


def problem(n: int = 1024, **changes: object) -> Problem:
    return replace(PROBLEM, **{"n_q": n, "n_kv": n, **changes})


def times(median_us: float) -> Measurement:
    return Measurement(median_us=median_us, q10_us=0.9 * median_us, q90_us=1.2 * median_us, min_us=0.8 * median_us, samples=50)


def outcome(variant_id: str, median_us: float | None = 100.0, *, source: Source = "measured", **changes: object) -> Outcome:
    """A correct outcome; one that failed to compile where `median_us` is None."""
    if median_us is None:
        made = Outcome(
            template="flash_fwd",
            template_hash="0123456789abcdef",
            variant_id=variant_id,
            config=Config.of(BLOCK_M=256, BLOCK_N=128, num_warps=8),
            fate=Fate.COMPILE,
            source=source,
            reason="ptxas: out of registers",
        )
    else:
        made = Outcome(
            template="flash_fwd",
            template_hash="0123456789abcdef",
            variant_id=variant_id,
            config=Config.of(BLOCK_M=128, BLOCK_N=64, num_warps=4, persistent=True, order="linear"),
            fate=Fate.CORRECT,
            source=source,
            measurement=times(median_us) if source == "measured" else Measurement.predicted(median_us),
            facts=CompileFacts(registers=168, spills=0, shared_bytes=98304, threads=128, tensor_core_ops=32),
            max_error=0.25,
        )
    return replace(made, **changes)


def result(
    *outcomes: Outcome,
    framework_us: float | None = 120.0,
    gpu: str = "h200",
    of: Problem = PROBLEM,
    created_at: str = PROVENANCE.created_at,
) -> SearchResult:
    return SearchResult(
        gpu=gpu,
        problem=of,
        outcomes=outcomes,
        provenance=replace(PROVENANCE, created_at=created_at),
        baseline=Baseline(backend="cudnn", measurement=times(framework_us)) if framework_us else None,
    )


FIXTURE_RESULTS = (
    result(
        outcome("aaaa000000000001", 100.0, finalist=True, rank=1),
        outcome("aaaa000000000002", 99.5, finalist=True, rank=2),
        outcome("aaaa000000000003", None),
    ),
    result(
        outcome("bbbb000000000001", 50.0, source="predicted"),
        framework_us=None,
        gpu="a100",
        of=problem(2048, d=128, d_v=64, dtype="fp16", features=Features(window=(100, 7), alignment="bottom_right", dropout=True)),
    ),
)
"""A measured and a predicted result."""

CONDITIONS = Conditions(
    samples=60, sm_clock_mhz=1755, memory_clock_mhz=3201, power_w=640.5, temperature_c=61, throttled_by="SwPowerCap", other_processes=0
)
RACED_RESULTS = (
    replace(
        result(
            outcome("cccc000000000001", 80.0, finalist=True, rank=1, trial=times(81.0), call_us=85.5),
            outcome("cccc000000000002", 90.0),
            of=problem(4096),
        ),
        provenance=replace(PROVENANCE, conditions=CONDITIONS),
        baseline=Baseline(backend="cudnn", measurement=times(120.0), call_us=130.25),
    ),
    result(outcome("dddd000000000001", 70.0, source="predicted", fate=Fate.UNCHECKED, max_error=None), framework_us=None, of=problem(8192)),
)
"""A result of a race with its conditions, and a prediction that nothing checked."""

ENDED_RESULTS = (
    replace(
        result(
            outcome("eeee000000000001", 60.0, finalist=True, rank=1, trial=times(63.0)),
            outcome("eeee000000000002", 64.0, trial=times(64.0)),
            of=problem(16384),
        ),
        ending=Ending(reason="patience", regret=0.00125),
    ),
)
"""A result with the reason why its trials ended. No GPU takes so little, so it is kept, but nothing serves by it."""

PACKED_RESULTS = (
    result(
        outcome("ffff000000000001", 300.0, finalist=True, rank=1),
        of=problem(1000, batch=16, features=Features(causal=True, packed=True), lengths=Lengths(law="lognormal", longest=3800)),
    ),
)

KEPT_RESULTS = (*FIXTURE_RESULTS, *RACED_RESULTS, *ENDED_RESULTS, *PACKED_RESULTS)
"""What tests/fixtures/db/v0005.sqlite holds, and later ones begin with. Never change it."""


COUNTED_RESULTS = tuple(replace(one, ending=Ending(reason="gain", regret=0.0, candidates=2616)) for one in FIXTURE_RESULTS[:1])
"""A result whose search's candidates were counted."""

KEPT_SINCE = {"0005": KEPT_RESULTS, "0006": (*KEPT_RESULTS, *COUNTED_RESULTS)}
"""What tests/fixtures/db/vNNNN.sqlite hold, by schema version; no such file is ever written again."""


def write(path: Path, results: tuple[SearchResult, ...] = FIXTURE_RESULTS) -> Path:
    with Store.open(path, writable=True) as store:
        for one in results:
            store.save(one)
    return path


def numbered(writer: int, run: int, trials: int = 5) -> SearchResult:
    """The `run`-th result of a writer, recognisable by its variant ids and complete only with all its trials."""
    outcomes = [outcome(f"{writer:04x}{run:04x}{trial:08x}", 100.0 + trial) for trial in range(trials)]
    return result(*outcomes, of=problem(1024 * (1 + run % 3)))


def identity(one: SearchResult) -> str:
    return one.outcomes[0].variant_id[:8]


def main(words: list[str]) -> None:
    """`PATH WRITER RUNS`: save so many results, and say each time that one was kept."""
    path, writer, runs = words[0], int(words[1]), int(words[2])
    announce: Callable[[str], object] = sys.stdout.write
    with Store.open(path, writable=True) as store:
        for run in range(runs):
            store.save(numbered(writer, run))
            announce(f"{run}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
