"""Profile of a problem on a target as one JSON document, which the text, the report and `--json` show alike.

Counts and floors are here; `steps.measure` adds measurements on the GPU.
"""

from dataclasses import dataclass
from typing import Any, Literal

import flashtune
from flashtune.bench.accounting import Elementwise, Roofline, Step, Strategy, strategies, tensor_bytes, total
from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem

SCHEMA = "flashtune-profile-1"
"""Version of the document: fields may be added, never renamed or removed."""

ChosenBy = Literal["name", "device", "default"]
"""Reason for the target: it was named, it is this machine's GPU, or neither."""

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Plain problem to profile on a target; `rank` and `window` are those of the approximate strategies.

    `not_measured` is the reason why nothing can be measured on this machine, or empty. Raises InputError where the target has no matrix
    products in the problem's dtype.
    """

    problem: Problem
    target: Target
    chosen_by: ChosenBy
    elementwise: Elementwise
    window: int
    rank: int
    not_measured: str = ""

    def __post_init__(self) -> None:
        _ = self.roofline

    @property
    def roofline(self) -> Roofline:
        """The target's roofline for the problem's dtype."""
        return Roofline(self.target, self.problem.dtype)

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Strategies, the standard pipeline and the fused kernel first."""
        return strategies(self.problem, self.elementwise, self.window, self.rank)

    def document(self) -> Document:
        """The document without measurements: bytes in bytes, times in microseconds."""
        p, target, roofline = self.problem, self.target, self.roofline
        standard, fused = self.strategies[:2]
        whole = self._row("standard", *standard.steps)
        unmeasured = dict.fromkeys(("time_us", "q10_us", "q90_us", "samples", "relative_error"))
        return {
            "schema": SCHEMA,
            "flashtune": flashtune.__version__,
            "problem": {
                **{name: getattr(p, name) for name in ("batch", "heads", "kv_heads", "n_q", "d", "dtype", "direction")},
                **{"n": p.n_kv, "causal": p.features.causal, "elementwise": self.elementwise, "window": self.window, "rank": self.rank},
                **{"law": p.lengths and p.lengths.law, "longest": p.lengths and p.lengths.longest},
            },
            "target": {
                **{name: getattr(target, name) for name in ("slug", "name", "bandwidth_gbs", "exp_per_second")},
                **{name: getattr(roofline, name) for name in ("peak_tflops", "crossover")},
                **{"vector_tflops": target.peak_tflops["fp32"], "chosen_by": self.chosen_by},
            },
            "tensors": tensor_bytes(p),
            "steps": [self._row(step.name, step) for step in standard.steps],
            "standard": {**whole, "score_share": total("standard", standard.steps).score_share},
            "fused": self._row("fused", *fused.steps),
            "strategies": [
                {**self._row(one.name, *one.steps), "what": one.what, "exact": one.exact, **unmeasured} for one in self.strategies
            ],
            "measured": None,
            "not_measured": self.not_measured or None,
        }

    def _row(self, name: str, *steps: Step) -> Document:
        """JSON object of consecutive steps as one, with their floor."""
        whole = total(name, steps)
        floor_us, bound = self.roofline.floor(*steps)
        counts = ("name", "read_bytes", "write_bytes", "score_bytes", "flops", "matmul_flops", "exps", "intensity")
        return {count: getattr(whole, count) for count in counts} | {"bound": bound, "floor_us": floor_us}
