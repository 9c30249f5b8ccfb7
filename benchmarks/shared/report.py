"""Report on forward cells: ratios, the verdict on errors, tables and JSON. Nothing here needs a GPU."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.shared.cells import RANDOM, Cell, Group
from benchmarks.shared.children import NO_TIME
from benchmarks.shared.peers import COPY_BYTES, OURS, OWN, Checked, Error
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Measurement
from flashtune.tuner.verify.distributions import PRESENT

FEATURES = "features, best peer"
"""Summary's name of the feature cells' ratios."""

WORSE = 2.0
"""Largest ratio of our error to PyTorch's that passes."""

MODELS, STEPS = "models' prefill", "models' decoding"
"""Summary's names of models' ratios to their best peers: prefill from LONG keys on, and steps."""
LONG = 512

NO_PEERS = (OURS, OWN, "copy", RANDOM)

SCORES, SAME = "scores, cudnn", "scores, random numbers"
"""Summary's names of the ratios on adversarial scores: to cuDNN, and to our own rate on random numbers."""

LEAST_SAME = 0.95
"""The least share of its rate on random numbers that a kernel should keep."""

LSE_FLOOR = 2.0**-20
"""LSEs that are as close as this, over 1 + |LSE|, are right whatever PyTorch's error is: float32's own rounding, a few times."""

FIGURES: dict[Group, tuple[str, int]] = {
    "decode": ("TB/s of K+V", 2),
    "small": ("us", 1),
    "models": ("us", 1),
    "unprepared": ("us", 1),
}
"""Unit and decimals of a group's table: rates of what limits it, times where that is latency. All others show TFLOP/s."""


def sizes_of(problem: Problem) -> dict[str, Any]:
    """A problem's sizes and type, as rows of results have them."""
    return {name: getattr(problem, name) for name in ("batch", "heads", "kv_heads", "n_q", "n_kv", "d", "d_v", "dtype")}


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of one or more positive values."""
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of a cell; `failed` says why it ended early (empty when it didn't)."""

    cell: Cell
    checked: Checked = field(default_factory=Checked)
    times: dict[str, Measurement] = field(default_factory=dict)
    failed: str = ""

    @property
    def wrong(self) -> str:
        """Reason that our error is too large, or empty: more than twice PyTorch's, or the tolerance where no peer computes the same."""
        errors = self.checked.errors
        ours = errors.get(OURS)
        if ours is None:
            return ""
        theirs = [error for name, error in errors.items() if name != OURS and math.isfinite(error.max_abs)]
        if not theirs:
            return "" if ours.tolerances <= 1 else f"{ours.tolerances:.3g} times the tolerance"
        for name in ("max_abs", "relative_norm"):
            least = min(getattr(error, name) for error in theirs)
            # Written so that NaN is wrong.
            if not getattr(ours, name) <= WORSE * least:
                return f"{name} is {getattr(ours, name):.3g}, PyTorch's {least:.3g}"
        lses = [error.lse for error in theirs if error.lse is not None]
        if ours.lse is not None and lses and not ours.lse <= max(WORSE * min(lses), LSE_FLOOR):
            return f"the LSE's error is {ours.lse:.3g}, PyTorch's {min(lses):.3g}"
        return ""

    @property
    def remark(self) -> str:
        """Failure or wrong result of the cell, empty where it has neither."""
        if self.failed:
            return f"FAILED: {self.failed}"
        return f"WRONG: {self.wrong}" if self.wrong else ""

    def ratio(self, name: str) -> float | None:
        """Our speed over that of the peer `name`."""
        return self.times[name].median_us / self.times[OURS].median_us if name in self.times else None

    @property
    def best_peer(self) -> str | None:
        """The fastest peer of the run."""
        peers = [name for name in self.times if name not in NO_PEERS]
        return min(peers, key=lambda name: self.times[name].median_us, default=None)

    @property
    def best_ratio(self) -> float | None:
        """Our speed over the fastest peer's."""
        return self.ratio(self.best_peer or "")

    def rate(self, name: str) -> float | None:
        """TFLOP/s; for decode, and for the copy, TB/s."""
        if name not in self.times:
            return None
        if name == "copy":
            return 2 * COPY_BYTES / self.times[name].median_us / 1e6
        work = self.cell.kv_bytes if self.cell.group == "decode" else self.cell.problem.flops()
        return work / self.times[name].median_us / 1e6

    def figure(self, name: str) -> float | None:
        """A table's figure (see `FIGURES`): microseconds, or the rate."""
        if FIGURES.get(self.cell.group, ("", 0))[0] == "us":
            return self.times[name].median_us if name in self.times else None
        return self.rate(name)

    def as_json(self) -> dict[str, Any]:
        """Everything, raw quantiles included; figures that aren't finite become null."""
        p = self.cell.problem
        return {
            "group": self.cell.group,
            "case": self.cell.case,
            "problem": sizes_of(p),
            "features": p.features.as_json(),
            "scores": self.cell.scores,
            "served": {
                **{name: getattr(self.checked, name) for name in ("kind", "template", "variant", "reason", "twin")},
                "config": None if self.checked.config is None else self.checked.config.as_dict(),
            },
            "times": {name: asdict(time) for name, time in self.times.items()},
            "rates": {name: self.rate(name) for name in self.times},
            "ratio_to": {name: self.ratio(name) for name in self.times if name not in NO_PEERS},
            "best_peer": self.best_peer,
            "ratio_to_fa4": self.ratio("fa4"),
            "errors": {name: _finite(error) for name, error in self.checked.errors.items()},
            "notes": self.checked.notes,
            "failed": self.failed,
            "wrong": self.wrong,
        }


def _finite(error: Error) -> dict[str, float | None]:
    return {name: value if value is not None and math.isfinite(value) else None for name, value in asdict(error).items()}


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The least and the geometric mean of the plain cells' ratios, by peer, and of the other cells' to their best peers."""
    ways: dict[str, tuple[Group, Callable[[Row], float | None]]] = {
        "cudnn": ("plain", lambda row: row.ratio("cudnn")),
        "best peer": ("plain", lambda row: row.best_ratio),
        "FlashAttention-4": ("plain", lambda row: row.ratio("fa4")),
        FEATURES: ("features", lambda row: row.best_ratio),
        MODELS: ("models", lambda row: row.best_ratio if row.cell.problem.n_q > 1 and row.cell.problem.n_kv >= LONG else None),
        SCORES: ("scores", lambda row: row.ratio("cudnn")),
        SAME: ("scores", lambda row: row.ratio(RANDOM)),
        STEPS: ("models", lambda row: row.best_ratio if row.cell.problem.n_q == 1 else None),
    }
    found = {name: [way(row) for row in rows if row.cell.group == group and row.times] for name, (group, way) in ways.items()}
    ratios = {name: [ratio for ratio in every if ratio is not None] for name, every in found.items()}
    return {name: {"min": min(r), "geometric_mean": geometric_mean(r), "cells": len(r)} for name, r in ratios.items() if r}


def tables(rows: Sequence[Row]) -> str:
    """Tables by group, summaries of their ratios, cells slower than a peer, and peers that didn't run with the reason."""
    parts = []
    for group in dict.fromkeys(row.cell.group for row in rows):
        mine = [row for row in rows if row.cell.group == group]
        parts.append(_by_scores(mine) if group == "scores" else _table(mine))
    parts.append("\n".join(_summary_line(name, found) for name, found in summary(rows).items()))
    slower = [f"{row.cell.name}: {row.best_ratio:.2f} of {row.best_peer}" for row in rows if (row.best_ratio or 1.0) < 1.0]
    parts.append("\n".join(["slower than a peer:", *slower] if slower else []))
    lost = [f"{row.cell.name}: {same:.2f}" for row in rows if (same := row.ratio(RANDOM)) is not None and same < LEAST_SAME]
    parts.append("\n".join([f"below {LEAST_SAME:g} of the rate on random numbers:", *lost] if lost else []))
    notes = [f"{row.cell.name}: {name}: {why}" for row in rows for name, why in row.checked.notes.items()]
    parts.append("\n".join(["not timed:", *notes] if notes else []))
    return "\n\n".join(part for part in parts if part)


def _summary_line(name: str, found: dict[str, float]) -> str:
    what = f"plain, ours / {name}"
    if name in (SCORES, SAME):
        what = name.replace(", ", ", ours / ")
    if name in (FEATURES, MODELS, STEPS):
        what = f"{name.removesuffix(', best peer')}, ours / best peer"
    return f"{what}: min {found['min']:.2f}, geometric mean {found['geometric_mean']:.2f} over {found['cells']:.0f} cells"


def _table(rows: list[Row]) -> str:
    """One group: figures of everything, our speed over the peers', and errors (ours, then the least of the peers')."""
    group = rows[0].cell.group
    decode = group == "decode"
    unit, digits = FIGURES.get(group, ("TFLOP/s", 0))
    names = list(dict.fromkeys(name for row in rows for name in row.times))
    headings = [unit, "served by", *names, "/cudnn", "/best peer"]
    headings += ["of copy"] if decode else ["/FA4"] if group == "plain" else []
    lines = [[*headings, "max error", "norm error", ""]]
    for row in rows:
        figures = {name: row.figure(name) for name in names}
        cells = [row.cell.name, f"{row.checked.kind} {row.checked.template or ''}".strip()]
        cells += [_number(figures[name], digits) for name in names]
        cells += [_number(row.ratio("cudnn")), _number(row.best_ratio) + (f" {row.best_peer}" if row.best_peer else "")]
        if decode:
            ours, copy = figures.get(OURS), figures.get("copy")
            cells.append(f"{ours / copy:.0%}" if ours and copy else "")
        elif group == "plain":
            cells.append(_number(row.ratio("fa4")))
        lines.append([*cells, _errors(row, "max_abs"), _errors(row, "relative_norm"), row.remark])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _by_scores(rows: list[Row]) -> str:
    """A table for each kind of figure: a line for each shape, a column for each distribution of scores."""

    def over(row: Row, name: str) -> float | None:
        """Our error over cuDNN's."""
        found = [getattr(row.checked.errors[who], name, None) for who in (OURS, "cudnn") if who in row.checked.errors]
        if len(found) < 2 or None in found:
            return None
        ours, theirs = found
        return ours / theirs if theirs else 0.0 if not ours else math.inf

    figures: dict[str, Callable[[Row], float | None]] = {
        "rate over cuDNN's": lambda row: row.ratio("cudnn"),
        "rate over the fastest peer's": lambda row: row.best_ratio,
        "rate over our own on random numbers": lambda row: row.ratio(RANDOM),
        "largest error over cuDNN's": lambda row: over(row, "max_abs"),
        "norm of the error over cuDNN's": lambda row: over(row, "relative_norm"),
        "LSE's largest error over cuDNN's": lambda row: over(row, "lse"),
    }
    columns = [name for name in PRESENT if any(row.cell.scores == name for row in rows)]
    shapes = dict.fromkeys(_shape(row.cell) for row in rows)
    parts = []
    for what, figure in figures.items():
        found = {(_shape(row.cell), row.cell.scores): _number(figure(row)) for row in rows}
        lines = [[what, *columns], *([shape, *(found.get((shape, name), "") for name in columns)] for shape in shapes)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        parts.append("\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines))
    remarks = [f"{row.cell.name}: {row.remark}" for row in rows if row.remark and row.failed != NO_TIME]
    if late := sum(row.failed == NO_TIME for row in rows):
        remarks.append(f"{late} of {len(rows)} {NO_TIME}")
    return "\n\n".join([*parts, *(["\n".join(remarks)] if remarks else [])])


def _shape(cell: Cell) -> str:
    return f"{cell.case.removesuffix(cell.scores).strip()} D={cell.problem.d} N={cell.problem.n_kv}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _errors(row: Row, name: str) -> str:
    ours = row.checked.errors.get(OURS)
    theirs = [getattr(error, name) for peer, error in row.checked.errors.items() if peer != OURS]
    if ours is None:
        return ""
    return f"{getattr(ours, name):.1e}" + (f" ({min(theirs):.1e})" if theirs else "")
