"""Pages of commands: paragraphs, tables and pictures as one HTML file that loads no other, for light and dark screens of any width.

Pictures are SVG whose widths are shares of the page and whose texts keep their size, so that a phone shows them whole.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

COLOURS = 8
"""Colours of a page, which series take in turn."""
INSET = 6.0
"""Per cent of a picture's width, and pixels of its height, that its points keep from the edges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Table of text cells: words in the first column and in those of `words`, figures in the others.

    Cells of `loud` stand out; so does in each row that of the column which its last cell names. On a phone a `stacked` table is a list.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    words: tuple[str, ...] = ()
    loud: tuple[str, ...] = ()
    stacked: bool = False

    def kind(self, row: tuple[str, ...], place: int) -> str:
        """Classes of the cell at a place of a row."""
        column, cell = self.columns[place], row[place]
        found = {"loud": cell in self.loud, "best": row[-1] == column, "none": cell in ("-", ""), "text": column in self.words}
        return " ".join(name for name, holds in found.items() if holds)


class Row(NamedTuple):
    """Line of a picture of bars: a heading, or a name with its value and the share of the longest bar, in per cent."""

    y: int
    name: str
    value: str | None = None
    share: float = 0.0
    colour: int = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Picture of horizontal bars in groups, each with a heading (or an empty one); names of `ours` have a colour of their own."""

    title: str
    groups: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    ours: str = "tuned"
    note: str = ""

    def rows(self) -> Iterator[Row]:
        """Lines from the top down; bars of all groups are in one scale."""
        longest, y = max((value for _, bars in self.groups for _, value in bars), default=0.0) or 1.0, 18
        for heading, bars in self.groups:
            if heading:
                yield Row(y, heading)
                y += 24
            for name, value in bars:
                yield Row(y, name, f"{value:,.1f}", round(100 * value / longest, 2), 0 if name == self.ours else 7)
                y += 34
            y += 8

    @property
    def height(self) -> int:
        """Pixels."""
        return max((row.y for row in self.rows()), default=0) + 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points (x, y, what they are) with one colour and a radius in pixels, or a `line` through them."""

    name: str
    points: Sequence[tuple[float, float, str]]
    line: bool = False
    radius: float = 4.0


class Mark(NamedTuple):
    """Place of a point, in per cent from the left and pixels from the top, its colour, what it is, and its radius in pixels."""

    x: float
    y: float
    colour: int
    what: str
    radius: float


class Segment(NamedTuple):
    """Ends of a part of a line, as in `Mark`, and its colour."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: int


class Drawn(NamedTuple):
    """Points and lines in their places, and ticks as (place, text)."""

    marks: list[Mark]
    lines: list[Segment]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Picture of series in one plane; axes with `log` have equal steps for equal ratios, which all their values above 0 take."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = True
    height: int = 300
    note: str = ""

    def drawn(self) -> Drawn:
        """The points of all series, placed by their common ranges."""
        every = [point for one in self.series for point in one.points]
        x_axis, y_axis = Axis.of([x for x, *_ in every], log=self.log_x), Axis.of([y for _, y, _ in every], log=self.log_y)
        across, down = 100 - 2 * INSET, self.height - 30.0

        def x_of(value: float) -> float:
            return round(INSET + across * x_axis.share(value), 2)

        def y_of(value: float) -> float:
            return round(self.height - INSET - (down - INSET) * y_axis.share(value), 1)

        marks, lines = [], []
        for place, one in enumerate(self.series):
            placed = [Mark(x_of(x), y_of(y), place % COLOURS, what, one.radius) for x, y, what in one.points]
            if one.line:
                lines += [Segment(*a[:2], *b[:2], place % COLOURS) for a, b in pairwise(placed)]
            else:
                marks += placed
        x_ticks, y_ticks = ([(of(value), f"{value:,g}") for value in axis.ticks()] for of, axis in ((x_of, x_axis), (y_of, y_axis)))
        return Drawn(marks, lines, x_ticks, y_ticks)


class Axis(NamedTuple):
    """Range of values along one side of a picture."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, values: Sequence[float], *, log: bool) -> "Axis":
        """The range of these values, never empty; a linear one begins at 0."""
        if not values:
            return cls(1.0, 10.0, True) if log else cls(0.0, 1.0, False)
        low, high = (min(values), max(values)) if log else (min(0.0, *values), max(values))
        if low < high:
            return cls(low, high, log)
        return cls(low / 2, high * 2, True) if log else cls(low, low + 1.0, False)

    def share(self, value: float) -> float:
        """The value's place from 0 to 1."""
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return (at - low) / (high - low)

    def ticks(self) -> list[float]:
        """A few round values within the range; both its ends where there are hardly any."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            wide = len(powers) > 3
            found = [factor * 10.0**power for power in powers for factor in ((1,) if wide else (1, 2, 5))]
        else:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
            step *= next(factor for factor in (1, 2, 5, 10, 20) if (self.high - self.low) / (step * factor) <= 6)
            found = [step * count for count in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        inside = [float(f"{value:.6g}") for value in found if self.low <= value <= self.high]
        return inside if len(inside) > 1 else [float(f"{value:.3g}") for value in (self.low, self.high)]


def origin(provenance: Mapping[str, Any]) -> str:
    """Command, GPU, versions and date of a provenance's JSON, in lines."""
    versions = ", ".join(f"{name} {provenance[name]}" for name in ("flashtune", "torch", "triton", "driver") if provenance[name])
    facts = {"Command": provenance["command"], "GPU": provenance["gpu_name"], "Versions": versions, "Date": provenance["created_at"]}
    return "\n".join(f"{name}: {value}" for name, value in facts.items() if value)


def page(title: str, parts: Iterable[str | Table | Bars | Points], written: str) -> str:
    """Page of these parts, at whose end is written where it comes from. All texts are escaped."""
    # Imported here: a command without a page doesn't need it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(loader=PackageLoader("flashtune.bench", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return made.get_template("page.html.jinja").render(title=title, parts=list(parts), written=written).lstrip()
