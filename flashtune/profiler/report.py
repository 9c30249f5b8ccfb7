"""Plots of a profile as files: one self-contained HTML report, or one figure as PNG or SVG."""

from pathlib import Path

import flashtune
from flashtune.profiler.paths import write_whole
from flashtune.profiler.summary import Profile
from flashtune.profiler.tables import counted_tables, heading, measured_tables, shape, target_line, verdict

CAPTIONS = {
    "bytes": "Bytes that each step moves between the GPU's memory and its cores. The fused kernel never writes S.",
    "time": "Time of each step, and of whole attentions where they were measured.",
    "roofline": "Left of the crossover the memory is too slow to feed the matrix units: those steps can't reach the peak.",
    "latency": "Growth of time with sequence length at fixed batch, heads and head size.",
    "ratio": "The same as a ratio, since the two curves nearly coincide.",
}

STYLE = """
:root { --page: #f6f7f9; --card: #ffffff; --ink: #374151; --strong: #111827; --muted: #6b7280; --line: #e5e7eb; --head: #eef0f3; }
@media (prefers-color-scheme: dark) {
  :root { --page: #111418; --card: #1b2027; --ink: #d1d5db; --strong: #f3f4f6; --muted: #9ca3af; --line: #374151; --head: #262d36; }
}
html { color-scheme: light dark; }
body { margin: 0; background: var(--page); color: var(--strong); font: 15px/1.5 system-ui, "DejaVu Sans", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 48px; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 32px 0 8px; }
.lead { color: var(--ink); margin: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 22px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.tile b { display: block; font-size: 25px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { fill: var(--strong); }
figcaption { color: var(--ink); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; background: var(--card); font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { background: var(--head); }
tr.sum td { font-weight: 600; }
.note { color: var(--muted); font-size: 13px; margin: 6px 0 0; }
"""


def write(profile: Profile, path: Path) -> None:
    """Write the report or figure, by `path`'s ending.

    Needs matplotlib (`paths.require_matplotlib`); raises InputError where the file can't be written.
    """
    from flashtune.profiler import plots

    kind = path.suffix.lower()
    data = html_of(profile).encode() if kind == ".html" else plots.figure_of(profile, kind.removeprefix("."))
    write_whole(path, data)


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>flashtune profile: {{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<main>
<h1>Where attention's time and bytes go</h1>
{% for line in lead %}
<p class="lead">{{ line }}</p>
{% endfor %}
<div class="tiles">
{%- for figure, words in tiles %}<div class="tile"><b>{{ figure }}</b>{{ words }}</div>{% endfor -%}
</div>
<p>{{ verdict }}</p>
<div class="plots">
{% for figure in figures %}
<figure id="{{ figure.name }}">{{ figure.svg }}<figcaption>{{ figure.caption }}</figcaption></figure>
{% endfor %}
</div>
{% for table in tables %}

<h2>{{ table.title }}</h2>
<div class="scroll"><table><tr>{% for column in table.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in table.rows %}
<tr{% if loop.revindex <= table.summary_rows %} class=sum{% endif %}>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% if table.note %}
<p class="note">{{ table.note }}</p>
{% endif %}
{% endfor %}
{% for sentence in left_out %}
<p class="note">Left out: {{ sentence }}.</p>
{% endfor %}
<p class="note">1 MiB = 2^20 bytes, 1 MB = 10^6 bytes. Written by {{ origin }}.</p>
</main>
</body>
</html>
"""


def html_of(profile: Profile) -> str:
    """HTML report: plots and tables in one file that loads no other."""
    # Imported here: a profile without a report needs neither.
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    from flashtune.profiler import plots

    measured = profile.measured
    origin = f"flashtune {flashtune.__version__}"
    if measured:
        p = measured.provenance
        versions = f"torch {p.torch}, triton {p.triton}, driver {p.driver or 'unknown'}, {p.clocks or 'clocks unknown'}, {p.created_at}"
        status = f"Measured on {measured.device}: medians, L2 flushed before each launch."
        origin = f"{origin}; {versions}"
    else:
        status = f"Nothing was measured: {profile.not_measured}. Times are floors: lower bounds by the target's datasheet."
    # Everything in the page is escaped except the plots, whose texts matplotlib and `plots` have escaped.
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return page.from_string(PAGE).render(
        title=f"{shape(profile)} on {profile.target.slug}",
        style=Markup(STYLE),
        lead=[heading(profile), target_line(profile), status],
        tiles=_tiles(profile),
        verdict=" ".join(verdict(profile)),
        figures=[{"name": name, "svg": Markup(plots.svg_of(profile, name)), "caption": CAPTIONS[name]} for name in plots.DRAWINGS],
        tables=[*counted_tables(profile), *(measured_tables(profile, measured) if measured else ())],
        left_out=measured.skipped if measured else (),
        origin=origin,
    )


def _tiles(profile: Profile) -> list[tuple[str, str]]:
    """Value and caption of each tile at the top."""
    standard, fused = profile.standard, profile.fused
    tiles = [
        (f"{standard.step.score_share:.1%}", "of the standard pipeline's traffic is S"),
        (f"{standard.step.bytes / fused.step.bytes:.1f}x", "fewer bytes in one fused kernel"),
        (f"{standard.floor_us / fused.floor_us:.1f}x", f"lower floor when fused, on {profile.target.slug}"),
    ]
    eager, tuned = (profile.measured.kind(name) if profile.measured else None for name in ("eager", "tuned"))
    if tuned:
        tiles.append((f"{tuned.tflops:.0f} TFLOP/s", f"tuned kernel, {tuned.tflops / profile.peak_tflops:.0%} of peak"))
    else:
        tiles.append((fused.bound, "bounds the fused kernel"))
    if eager and tuned:
        tiles.append((f"{eager.time_us / tuned.time_us:.1f}x", "faster than eager, measured"))
    return tiles
