"""Measurements on a GPU as plain values: made by `timing`, shown by the command line and the report."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

from flashtune.core.results import Measurement, Provenance

FITTED_POINTS = 3
"""Number of the largest N that an exponent is fitted to: at small N launch overhead and idle SMs dominate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A measured time with its matrix operations and counted bytes."""

    name: str
    measurement: Measurement
    matmul_flops: int
    bytes: int

    @property
    def time_us(self) -> float:
        """The median, in microseconds."""
        return self.measurement.median_us

    @property
    def tflops(self) -> float:
        """10^12 matrix operations per second."""
        return self.matmul_flops / self.time_us / 1e6

    @property
    def tbs(self) -> float:
        """10^12 counted bytes per second."""
        return self.bytes / self.time_us / 1e6

    def as_json(self) -> dict[str, Any]:
        """Name, time, quantiles, TFLOP/s and TB/s."""
        return {**_times(self.name, self.measurement), "tflops": self.tflops, "tbs": self.tbs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Latency against N at fixed batch, heads and D: (N, microseconds), ascending in N."""

    name: str
    points: tuple[tuple[int, float], ...]

    @property
    def exponent(self) -> float | None:
        """Exponent p of time ~ N^p, fitted by least squares to logarithms at the largest N; None below `FITTED_POINTS` points."""
        if len(self.points) < FITTED_POINTS:
            return None
        sizes, times = ([math.log(number) for number in numbers] for numbers in zip(*self.points[-FITTED_POINTS:], strict=True))
        return statistics.linear_regression(sizes, times).slope

    def as_json(self) -> dict[str, Any]:
        """Name, points and the fitted exponent."""
        return {"name": self.name, "points": [{"n": n, "time_us": us} for n, us in self.points], "exponent": self.exponent}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One transformer layer with model width H D, in microseconds: projections (Q, K, V and output), MLP (4x), attention by kind."""

    projections_us: float
    mlp_us: float
    attention_us: dict[str, float]

    def share(self, kind: str) -> float:
        """Attention's share of the layer's time with this kind of attention, 0 to 1 (norms and residuals are not counted)."""
        attention = self.attention_us[kind]
        return attention / (attention + self.projections_us + self.mlp_us)

    def as_json(self) -> dict[str, Any]:
        """Times and, by kind, attention's share."""
        return {
            "projections_us": self.projections_us,
            "mlp_us": self.mlp_us,
            "attention": {kind: {"time_us": us, "share": self.share(kind)} for kind, us in self.attention_us.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRun:
    """Measured strategy: its time and ||x - exact|| / ||exact|| over sampled rows, on random inputs."""

    name: str
    measurement: Measurement
    relative_error: float

    def as_json(self) -> dict[str, Any]:
        """Name, time and its quantiles, and the error."""
        return {**_times(self.name, self.measurement), "relative_error": self.relative_error}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one run; `skipped` has a sentence with the reason for each that was left out.

    `kinds` are whole attentions: eager (PyTorch's operations one by one), framework (PyTorch's fused attention) and tuned
    (the kernel that flashtune.dispatch chooses, described by `served_by`).
    """

    device: str
    provenance: Provenance
    steps: tuple[Timed, ...]
    kinds: tuple[Timed, ...]
    served_by: str
    scaling: tuple[Series, ...]
    layer: Layer | None
    strategies: tuple[StrategyRun, ...]
    skipped: tuple[str, ...]

    @property
    def steps_us(self) -> float:
        """Sum of the times of the separately timed steps."""
        return sum(step.time_us for step in self.steps)

    def kind(self, name: str) -> Timed | None:
        """Whole attention of this name, or None where it was not measured."""
        return next((kind for kind in self.kinds if kind.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """The `measured` object of `flashtune profile --json`."""
        return {
            "device": self.device,
            "provenance": self.provenance.as_json(),
            "steps": [{**step.as_json(), "share": step.time_us / self.steps_us} for step in self.steps],
            "attention": [kind.as_json() for kind in self.kinds],
            "served_by": self.served_by,
            "scaling": [series.as_json() for series in self.scaling],
            "layer": self.layer.as_json() if self.layer else None,
            "skipped": list(self.skipped),
        }


def _times(name: str, m: Measurement) -> dict[str, Any]:
    return {"name": name, "time_us": m.median_us, "q10_us": m.q10_us, "q90_us": m.q90_us, "samples": m.samples}
