"""Rows for tests of the policy: records of families that are made up, of any problem, GPU and time."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Baseline, Fate, Measurement, Outcome, Provenance, Source, TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.decisions.explanation import explained
from flashtune.dispatch.policy import choose as policy
from flashtune.dispatch.policy.choose import Choice
from flashtune.templates import families
from flashtune.templates.family import Axis, Constraint, Family
from flashtune.templates.learned.residual import Residual

H200, H100, A100 = find_target("h200"), find_target("h100"), find_target("a100")
PROBLEM = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
# With all steps: kernels that nothing was measured of serve by request alone.
choose, rank = partial(policy.choose, unmeasured=True), partial(policy.rank, unmeasured=True)


def family(name: str, *, unsupported: str | None = None, most_rows: int | None = None) -> Family:
    return Family(
        name=name,
        axes=(Axis(name="BLOCK_M", values=(32, 64, 128), why="rows"), Axis(name="SHARED", values=(0, 200_000), why="bytes")),
        constraints=(
            Constraint(
                name="shared_fits",
                holds=lambda config, spec, target: config.number("SHARED") <= target.shared_bytes_per_block,
                why="the blocks fit into shared memory",
            ),
        ),
        refuses=lambda spec, target: unsupported,
        tried_first=lambda spec, target: [Config.of(BLOCK_M=32, SHARED=0)],
        interpretable=True,
        suits=lambda problem, target: None if most_rows is None or problem.n_q <= most_rows else f"{problem.n_q} rows are too many",
    )


FAMILIES = {"first": family("first"), "second": family("second")}


def record(
    problem: Problem = PROBLEM,
    gpu: Target | str = H200,
    *,
    source: Source = "measured",
    time_us: float = 100.0,
    framework_us: float | None = None,
    template: str = "first",
    config: Config | None = None,
    variant_id: str = "a" * 16,
    origin: str = "shipped",
    fate: Fate = Fate.CORRECT,
) -> TuningRecord:
    baseline = None if framework_us is None else Baseline(backend="cudnn", measurement=Measurement.of([framework_us]))
    return TuningRecord(
        key=problem.key(gpu if isinstance(gpu, str) else gpu.slug),
        problem=problem,
        outcome=Outcome(
            template=template,
            template_hash="0" * 16,
            variant_id=variant_id,
            config=config or Config.of(BLOCK_M=128, SHARED=0),
            fate=fate,
            source=source,
            measurement=Measurement.of([time_us]) if fate is Fate.CORRECT else None,
        ),
        provenance=Provenance(flashtune="0", torch="2", triton="3"),
        baseline=baseline,
        origin=origin,
    )


def sized(n: int, *, n_q: int | None = None, batch: int = 4) -> Problem:
    return replace(PROBLEM, n_kv=n, n_q=n_q or n, batch=batch)


HOPPER = families()["flash_fwd_hopper"]


def tiled(problem: Problem, rows: int, keys: int = 128, **axes: Any) -> TuningRecord:
    """A row of the Hopper family with tiles of this size."""
    config = HOPPER.default(problem.spec(), H200).replace(BLOCK_M=rows, BLOCK_N=keys, tiles="one", order="fixed", **axes)
    return record(problem, template=HOPPER.name, config=config)


@pytest.fixture
def nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model alone."""
    monkeypatch.setattr(Residual, "of", lambda self, problem, configs, target, **words: [0.0] * len(configs))


def reason_of(choice: Choice, problem: Problem) -> str:
    """Explanation of a kernel that serves."""
    assert choice.family is not None and choice.config is not None
    return explained(choice, problem, H200, ()).reason


def of(batch: int, heads: int, n: int, d: int, **changes: Any) -> Problem:
    return replace(PROBLEM, batch=batch, heads=heads, kv_heads=heads, n_q=n, n_kv=n, d=d, d_v=d, **changes)


SHIPPED = Library.of(shipped_path()).records()


def decoding(batch: int, n: int) -> Problem:
    return Problem(batch=batch, heads=32, kv_heads=8, n_q=1, n_kv=n, d=128, d_v=128, dtype="bf16")
