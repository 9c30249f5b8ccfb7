"""Profile of a problem on a target: counted, compared with the roofline, and measured where the GPU is present."""

from dataclasses import dataclass
from typing import Any, Literal

import flashtune
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.profiler.accounting import Elementwise, Step, tensor_bytes
from flashtune.profiler.measured import Measured, StrategyRun
from flashtune.profiler.roofline import Bound, crossover, floor, peak_tflops, serial
from flashtune.profiler.strategies import Strategy, strategies

SCHEMA = "flashtune-profile-1"
"""Version of the JSON: fields may be added, never renamed or removed."""

ChosenBy = Literal["name", "device", "default"]
"""Reason for the target: it was named, it is this machine's GPU, or neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A step, or several consecutive ones as one, with its floor on the target."""

    step: Step
    floor_us: float
    bound: Bound

    def as_json(self) -> dict[str, Any]:
        """JSON object of the step."""
        names = ("name", "read_bytes", "write_bytes", "score_bytes", "flops", "matmul_flops", "exps", "intensity")
        return {name: getattr(self.step, name) for name in names} | {"bound": self.bound, "floor_us": self.floor_us}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Profile of a plain problem on a target: counts, floors, and measurements where the GPU is present.

    Raises InputError where the target has no matrix products in the problem's dtype.
    """

    problem: Problem
    target: Target
    chosen_by: ChosenBy
    elementwise: Elementwise
    window: int
    rank: int
    measured: Measured | None = None
    not_measured: str = ""
    """Reason why `measured` is None."""

    def __post_init__(self) -> None:
        peak_tflops(self.target, self.problem.dtype)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Strategies, the standard pipeline and the fused kernel first."""
        return strategies(self.problem, self.elementwise, self.window, self.rank)

    @property
    def tensors(self) -> dict[str, int]:
        """Bytes of Q, K, V, S and O."""
        return tensor_bytes(self.problem)

    @property
    def steps(self) -> tuple[Row, ...]:
        """The standard pipeline, step by step."""
        return tuple(self._row((step,), step) for step in self.strategies[0].steps)

    @property
    def fused(self) -> Row:
        """The fused kernel."""
        return self.row(self.strategies[1])

    @property
    def standard(self) -> Row:
        """The standard pipeline as a whole; its bound is the unit that sets most of its time."""
        return self.row(self.strategies[0])

    @property
    def crossover(self) -> float:
        """Operations per byte where the target's memory and matrix units balance."""
        return crossover(self.target, self.problem.dtype)

    @property
    def peak_tflops(self) -> float:
        """The target's peak for matrix products of this dtype."""
        return peak_tflops(self.target, self.problem.dtype)

    def row(self, strategy: Strategy) -> Row:
        """A strategy as a whole."""
        return self._row(strategy.steps, strategy.whole)

    def run_of(self, strategy: Strategy) -> StrategyRun | None:
        """Measurement of a strategy, or None."""
        runs = self.measured.strategies if self.measured else ()
        return next((run for run in runs if run.name == strategy.name), None)

    def _row(self, steps: tuple[Step, ...], whole: Step) -> Row:
        time_us, bound = serial(tuple(floor(step, self.target, self.problem.dtype) for step in steps))
        return Row(step=whole, floor_us=time_us, bound=bound)

    def as_json(self) -> dict[str, Any]:
        """JSON object of `flashtune profile --json`."""
        p, target = self.problem, self.target
        return {
            "schema": SCHEMA,
            "flashtune": flashtune.__version__,
            "problem": {
                "batch": p.batch,
                "heads": p.heads,
                "n": p.n_kv,
                "n_q": p.n_q,
                "kv_heads": p.kv_heads,
                "causal": p.features.causal,
                "direction": p.direction,
                "d": p.d,
                "dtype": p.dtype,
                "elementwise": self.elementwise,
                "window": self.window,
                "rank": self.rank,
            },
            "target": {
                "slug": target.slug,
                "name": target.name,
                "chosen_by": self.chosen_by,
                "peak_tflops": self.peak_tflops,
                "vector_tflops": target.peak_tflops["fp32"],
                "bandwidth_gbs": target.bandwidth_gbs,
                "exp_per_second": target.exp_per_second,
                "crossover": self.crossover,
            },
            "tensors": self.tensors,
            "steps": [row.as_json() for row in self.steps],
            "standard": {**self.standard.as_json(), "score_share": self.standard.step.score_share},
            "fused": self.fused.as_json(),
            "strategies": [self._strategy_json(strategy) for strategy in self.strategies],
            "measured": self.measured.as_json() if self.measured else None,
            "not_measured": self.not_measured or None,
        }

    def _strategy_json(self, strategy: Strategy) -> dict[str, Any]:
        run = self.run_of(strategy)
        row = self.row(strategy).as_json()
        measured = run.as_json() if run else {}
        names = ("time_us", "q10_us", "q90_us", "samples", "relative_error")
        return {**row, "what": strategy.what, "exact": strategy.exact, **{name: measured.get(name) for name in names}}
