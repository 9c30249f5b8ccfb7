"""Pictures of the site as SVG text: masks, diagrams, and rates over lengths. Text and lines take the page's colour, light or dark."""

import html
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

CELL = 4
"""Side in pixels of one pair of a mask."""


def mask_picture(seen: Sequence[Sequence[bool]], title: str) -> str:
    """Picture of a mask: a row for each query, from the top, and a column for each key; filled where the query sees the key."""
    size = CELL * len(seen)
    runs = []
    for y, row in enumerate(seen):
        for found in re.finditer("1+", "".join("1" if pair else "0" for pair in row)):
            runs.append(f"M{CELL * found.start()} {CELL * y}h{CELL * len(found[0])}v{CELL}h-{CELL * len(found[0])}z")
    frame = f'<rect width="{size}" height="{size}" class="frame"/>'
    return _svg(size, size, f'{frame}<path d="{"".join(runs)}" class="seen"/>', title, "mask")


class Line(NamedTuple):
    """A line of a chart: its name, its class in the site's style sheet, and its rate at each length."""

    name: str
    kind: str
    rates: Sequence[float]


def chart(title: str, lengths: Sequence[int], lines: Sequence[Line]) -> str:
    """Rates in TFLOP/s over lengths, which double; a phone shows it at its own size."""
    width, height, left, right, top, bottom = 380, 280, 50, 92, 30, 40
    highest = 200 * -(-max(max(line.rates) for line in lines) // 200)

    def x(place: int) -> float:
        return left + (width - left - right) * place / (len(lengths) - 1)

    def y(rate: float) -> float:
        return height - bottom - (height - top - bottom) * rate / highest

    parts = [f'<text x="{left}" y="16" class="title">{html.escape(title)}</text>']
    middle = (top + height - bottom) / 2
    parts.append(f'<text x="12" y="{middle}" transform="rotate(-90 12 {middle})" class="middle">TFLOP/s (higher is better)</text>')
    for rate in range(0, int(highest) + 1, 200):
        parts.append(f'<path d="M{left} {y(rate):.1f}H{width - right}" class="grid"/>')
        parts.append(f'<text x="{left - 6}" y="{y(rate) + 4:.1f}" class="end">{rate}</text>')
    for place, length in enumerate(lengths):
        parts.append(f'<text x="{x(place):.1f}" y="{height - bottom + 18}" class="middle">{_short(length)}</text>')
    parts.append(f'<text x="{(left + width - right) / 2}" y="{height - 4}" class="middle">sequence length N</text>')
    for line, at in zip(lines, _apart([y(line.rates[-1]) for line in lines], 15), strict=True):
        points = " ".join(f"{x(place):.1f},{y(rate):.1f}" for place, rate in enumerate(line.rates))
        parts.append(f'<polyline points="{points}" class="line {line.kind}"/>')
        parts.append(f'<text x="{width - right + 8}" y="{at + 4:.1f}" class="name {line.kind}">{html.escape(line.name)}</text>')
    return _svg(width, height, "".join(parts), title, "chart")


def _short(length: int) -> str:
    return str(length) if length < 1024 else f"{length // 1024}k"


def _apart(places: Sequence[float], least: float) -> list[float]:
    """The places moved down until no two are closer than `least`."""
    found: dict[int, float] = {}
    last = float("-inf")
    for index in sorted(range(len(places)), key=lambda index: places[index]):
        last = found[index] = max(places[index], last + least)
    return [found[index] for index in range(len(places))]


class Edge(NamedTuple):
    """An arrow of a diagram; `dashed` ones don't decide where nodes lie."""

    start: str
    end: str
    label: str
    dashed: bool


NODE = re.compile(r'\s*(\w+)(?:\[\((.+?)\)\]|\["(.+?)"\]|\[(.+?)\]|\{(.+?)\})?\s*')
ARROW = re.compile(r"-->(?:\|(?P<plain>[^|]+)\|)?|-\.->(?:\|(?P<dashed>[^|]+)\|)?|-\.\s*(?P<within>.+?)\s*\.->")


def read(text: str) -> tuple[dict[str, str], list[Edge]]:
    """Labels of the nodes and arrows of a flowchart in Mermaid's language, of which this reads what the pages use; raises ValueError."""
    labels: dict[str, str] = {}
    edges = []
    for line in text.strip().splitlines()[1:]:
        place, before, arrow = 0, None, None
        while place < len(line):
            found = NODE.match(line, place)
            if found is None:
                raise ValueError(f"no node begins here: {line[place:]!r}")
            name, label = found[1], next((given for given in found.groups()[1:] if given), None)
            labels[name] = label or labels.get(name, name)
            if before is not None and arrow is not None:
                said = next((given for given in arrow.groupdict().values() if given), "")
                edges.append(Edge(before, name, said, arrow[0].startswith("-.")))
            before, place = name, found.end()
            arrow = ARROW.match(line, place)
            if arrow is None and place < len(line):
                raise ValueError(f"no arrow begins here: {line[place:]!r}")
            place = arrow.end() if arrow else place
    return labels, edges


def ranks(labels: Mapping[str, str], edges: Sequence[Edge]) -> dict[str, int]:
    """Rows of the nodes: each lies below all that lead to it by plain arrows; dashed ones place what nothing else does, and never lead down
    from a node that the text names later."""
    placed, order = {edge.end for edge in edges if not edge.dashed}, list(labels)
    deciding = [e for e in edges if not e.dashed or (e.end not in placed and order.index(e.start) < order.index(e.end))]
    found = dict.fromkeys(labels, 0)
    for _ in labels:
        for edge in deciding:
            found[edge.end] = max(found[edge.end], found[edge.start] + 1)
    return found


WIDTH, GAP, ROW, LETTER, LEADING = 460, 34, 24, 7.0, 17


def diagram(text: str) -> str:
    """A flowchart as a picture, from the top down: arrows to the next row are straight, others pass at the sides."""
    labels, edges = read(text)
    rank = ranks(labels, edges)
    rows = [[name for name in labels if rank[name] == row] for row in range(max(rank.values()) + 1)]
    lines = {
        name: textwrap.wrap(html.unescape(label), 44 // len(rows[rank[name]]), break_long_words=False) for name, label in labels.items()
    }
    middle: dict[str, float] = {}
    top: dict[int, float] = {}
    tall = {row: ROW + LEADING * (max(len(lines[name]) for name in names) - 1) for row, names in enumerate(rows)}
    place = 8.0
    half = {name: max(map(len, lines[name])) * LETTER / 2 + 12 for name in labels}
    for row, names in enumerate(rows):
        top[row], place = place, place + tall[row] + GAP
        x = (WIDTH - sum(2 * half[name] for name in names) - GAP * (len(names) - 1)) / 2
        for name in names:
            middle[name] = x + half[name]
            x += 2 * half[name] + GAP
    boxes, words = [], []
    for name in labels:
        row = rank[name]
        box = f'x="{middle[name] - half[name]:.0f}" y="{top[row]:.0f}" width="{2 * half[name]:.0f}" height="{tall[row]:.0f}"'
        boxes.append(f'<rect {box} rx="4" class="node"/>')
        first = top[row] + tall[row] / 2 - LEADING * (len(lines[name]) - 1) / 2 + 4.5
        words += [
            f'<text x="{middle[name]:.0f}" y="{first + LEADING * index:.1f}" class="middle">{html.escape(line)}</text>'
            for index, line in enumerate(lines[name])
        ]
    arrows = []
    for edge in edges:
        down = rank[edge.end] - rank[edge.start]
        if down == 1:
            x, y = middle[edge.start], top[rank[edge.start]] + tall[rank[edge.start]]
            to_x, to_y = middle[edge.end], top[rank[edge.end]]
            path, at = f"M{x:.0f} {y:.0f}L{to_x:.0f} {to_y:.0f}", ((x + to_x) / 2, (y + to_y) / 2 + 4)
        else:
            # Arrows over several rows pass on the left, those back up on the right.
            side = -1 if down > 0 else 1
            x, y = middle[edge.start] + side * half[edge.start], top[rank[edge.start]] + tall[rank[edge.start]] / 2
            to_x, to_y = middle[edge.end] + side * half[edge.end], top[rank[edge.end]] + tall[rank[edge.end]] / 2
            far = (min(x, to_x) if side < 0 else max(x, to_x)) + side * (24 + 16 * min(abs(down), 5))
            path, at = f"M{x:.0f} {y:.0f}C{far:.0f} {y:.0f} {far:.0f} {to_y:.0f} {to_x:.0f} {to_y:.0f}", (far - side * 16, (y + to_y) / 2)
        arrows.append(f'<path d="{path}" class="arrow{" dashed" if edge.dashed else ""}" marker-end="url(#head)"/>')
        if edge.label:
            words.append(f'<text x="{at[0]:.0f}" y="{at[1]:.0f}" class="middle label">{html.escape(edge.label)}</text>')
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="head"/></marker></defs>'
    )
    return _svg(WIDTH, int(place - GAP + 8), head + "".join(arrows) + "".join(boxes) + "".join(words), "diagram", "diagram")


def _svg(width: int, height: int, content: str, title: str, kind: str) -> str:
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{html.escape(title)}</title>{content}</svg>'
    )
