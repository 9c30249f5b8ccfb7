"""The pictures: files that are what they say, and a report that a real browser renders."""

import base64
import html.parser
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import click
import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib import image

from flashtune.cli.main import main
from flashtune.cli.profile_text import render
from flashtune.core.errors import EnvironmentProblem, InputError
from flashtune.core.problem import Problem
from flashtune.core.results import Measurement, Provenance
from flashtune.core.target import find_target
from flashtune.profiler import plots, report
from flashtune.profiler.accounting import fused_step, standard_steps, total
from flashtune.profiler.measured import Layer, Measured, Series, StrategyRun, Timed
from flashtune.profiler.paths import write_whole
from flashtune.profiler.summary import Profile

DRAWINGS = ("bytes", "time", "roofline", "latency", "ratio")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    # A browser that calls home waits for answers that never come on a machine without a network.
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDTH, HEIGHT = 1280, 3200


def counted() -> Profile:
    problem = Problem(batch=1, heads=12, kv_heads=12, n_q=1024, n_kv=1024, d=64, d_v=64, dtype="fp16")
    return Profile(
        problem=problem,
        target=find_target("v100"),
        chosen_by="name",
        elementwise="fused",
        window=128,
        rank=64,
        not_measured="no <GPU> here",
    )


def with_figures() -> Profile:
    """A measured profile with made-up times: what is tested is how it is shown."""
    found = counted()
    steps = tuple(
        Timed(name=step.name, measurement=Measurement.of([us, us + 1]), matmul_flops=step.matmul_flops, bytes=step.bytes)
        for step, us in zip(standard_steps(found.problem, "separate"), (40, 70, 65, 90, 42), strict=True)
    )
    fused, standard = fused_step(found.problem), total("eager", standard_steps(found.problem, "separate"))
    kinds = tuple(
        Timed(name=name, measurement=Measurement.of([us]), matmul_flops=step.matmul_flops, bytes=step.bytes)
        for name, us, step in (("eager", 290.0, standard), ("framework", 61.0, fused), ("tuned", 55.0, fused))
    )
    scaling = tuple(
        Series(name=name, points=tuple((n, us * (n / 1024) ** power) for n in (256, 512, 1024, 2048, 4096)))
        for name, us, power in (("eager", 290.0, 2.0), ("framework", 61.0, 1.9), ("tuned", 55.0, 1.95), ("projections", 20.0, 1.0))
    )
    runs = tuple(
        StrategyRun(name=name, measurement=Measurement.of([us]), relative_error=error)
        for name, us, error in (("standard", 290.0, 1e-3), ("fused", 55.0, 1e-3), ("window", 19.0, 1.2), ("low_rank", 14.0, 0.9))
    )
    return replace(
        found,
        not_measured="",
        measured=Measured(
            device="Tesla <V100>",
            provenance=Provenance(flashtune="0", torch="2", triton="3", driver="580"),
            steps=steps,
            kinds=kinds,
            served_by="a test",
            scaling=scaling,
            layer=Layer(projections_us=20, mlp_us=35, attention_us={kind.name: kind.time_us for kind in kinds}),
            strategies=runs,
            skipped=("nothing & nobody",),
        ),
    )


both = pytest.mark.parametrize("found", [counted(), with_figures()], ids=["counted", "measured"])


@cache
def _html(measured: bool) -> str:
    return report.html_of(with_figures() if measured else counted())


def html_of(found: Profile) -> str:
    """The report of one of `both`, drawn once."""
    return _html(found.measured is not None)


@cache
def _drawing(measured: bool, name: str) -> str:
    return plots.svg_of(with_figures() if measured else counted(), name)


def drawing_of(found: Profile, name: str) -> str:
    """A drawing of one of `both`, drawn once."""
    return _drawing(found.measured is not None, name)


def browser() -> str | None:
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


@pytest.fixture
def chromium() -> str:
    """A real browser; a machine without one skips, CI may not."""
    path = browser()
    if path is None:
        assert os.environ.get("CI", "").lower() not in ("1", "true"), "CI must have a browser: install chromium"
        pytest.skip("no browser on this machine: install chromium to check that the report renders")
    return path


def open_in(chromium: str, page: Path, *flags: str) -> str:
    command = [chromium, *FLAGS, f"--user-data-dir={page.parent / 'browser'}", f"--window-size={WIDTH},{HEIGHT}", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


PROBE = """<script>
const figures = [...document.querySelectorAll('figure')].map(figure => {
  const svg = figure.querySelector('svg'), box = svg.getBoundingClientRect();
  const shapes = [...svg.querySelectorAll('path, use')].filter(shape => { const b = shape.getBBox(); return b.width + b.height > 0; });
  const texts = [...svg.querySelectorAll('text')].filter(text => text.getBBox().width > 0).map(text => text.textContent);
  return { id: figure.id, x: box.x, y: box.y, width: box.width, height: box.height, shapes: shapes.length, texts };
});
const loaded = performance.getEntriesByType('resource').length;
document.body.insertAdjacentHTML('beforeend', '<pre id="probe">' + btoa(unescape(encodeURIComponent(JSON.stringify({ figures, loaded,
  overflow: document.documentElement.scrollWidth > window.innerWidth })))) + '</pre>');
</script>"""


@both
def test_a_browser_renders_every_plot_of_the_report(found: Profile, chromium: str, tmp_path: Path) -> None:
    """Each drawing has a place on the page, shapes and texts of its own, and many colours in a screenshot."""
    page, probed, shot = tmp_path / "report.html", tmp_path / "probed.html", tmp_path / "shot.png"
    page.write_text(html_of(found))
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    dump = re.search(r'<pre id="probe">([A-Za-z0-9+/=]+)</pre>', open_in(chromium, probed, "--virtual-time-budget=5000", "--dump-dom"))
    assert dump is not None, "the page's script did not run"
    seen = json.loads(base64.b64decode(dump[1]))
    assert seen["loaded"] == 0, "a self-contained report loads nothing"
    assert not seen["overflow"]
    assert [figure["id"] for figure in seen["figures"]] == list(DRAWINGS)
    open_in(chromium, page, f"--screenshot={shot}")
    pixels = (image.imread(shot)[..., :3] * 255).astype(np.uint32)
    for figure in seen["figures"]:
        assert figure["width"] > 400 and figure["height"] > 250
        assert figure["shapes"] >= 15 and len(figure["texts"]) >= 10
        x, y, width, height = (round(figure[name]) for name in ("x", "y", "width", "height"))
        region = pixels[y : y + height, x : x + width]
        assert region.shape[:2] == (height, width), "the drawing lies outside the screenshot"
        packed = region[..., 0] << 16 | region[..., 1] << 8 | region[..., 2]
        ink = np.mean(packed != 0xFFFFFF)
        assert 0.02 < ink < 0.9, f"{figure['id']}: {ink:.1%} of the drawing is not white"
        assert len(np.unique(packed)) > 20
    texts = {figure["id"]: " ".join(figure["texts"]) for figure in seen["figures"]}
    assert "elementwise" in texts["bytes"] and "48.00 MiB" in texts["bytes"]
    assert "crossover 124.4 FLOP/byte" in texts["roofline"]
    assert ("eager" in texts["latency"]) == (found.measured is not None)


def test_the_browser_test_would_see_a_report_without_its_drawings(chromium: str, tmp_path: Path) -> None:
    """The probe is no rubber stamp: hide the drawings and it counts none."""
    page = tmp_path / "broken.html"
    text = html_of(counted()).replace("figure svg { display: block;", "figure svg { display: none;")
    page.write_text(text.replace("</body>", PROBE + "</body>"))
    dump = re.search(r'<pre id="probe">([A-Za-z0-9+/=]+)</pre>', open_in(chromium, page, "--virtual-time-budget=5000", "--dump-dom"))
    assert dump is not None
    assert all(figure["width"] == 0 for figure in json.loads(base64.b64decode(dump[1]))["figures"])


class Page(html.parser.HTMLParser):
    """Balanced tags, ids, and whatever the page would load."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        words = dict(attrs)
        self.ids += [words["id"] or ""] if "id" in words else []
        self.loads += [words[name] or "" for name in ("src", "href", "xlink:href") if name in words]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@both
def test_the_report_is_well_formed_self_contained_and_escaped(found: Profile) -> None:
    text = html_of(found)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids)), "drawings on one page must not share ids"
    assert all(target.startswith("#") for target in page.loads)
    assert "<script" not in text and "@import" not in text and "url(http" not in text
    assert "<GPU>" not in text and "<V100>" not in text and "nothing & nobody" not in text


@both
@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_has_tips_and_a_text_for_those_who_cant_see_it(found: Profile, name: str) -> None:
    root = ElementTree.fromstring(drawing_of(found, name).replace("xlink:href", "href"))
    tips = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(tips) >= 4 and len(tips) == len(set(tips)) and all(re.search(r"\d", tip) for tip in tips)
    assert root.get("role") == "img" and all(tip in (root.get("aria-label") or "") for tip in tips)


@both
def test_a_report_follows_the_readers_theme(found: Profile) -> None:
    """Every neutral colour is the page's own, and the page has each of them twice: for a light and for a dark screen."""
    text = html_of(found)
    style, drawings = text[text.index("<style>") : text.index("</style>")], text[text.index('<div class="plots">') :]
    assert not [colour for colour in plots.THEMED if colour in drawings]
    used = set(re.findall(r"var\((--\w+)\)", text))
    light, dark = style.split("prefers-color-scheme: dark")
    assert used and all(f"{name}:" in light and f"{name}:" in dark for name in used)


def test_the_ratio_of_two_latencies_stands_on_its_own() -> None:
    text = drawing_of(with_figures(), "ratio")
    # 61 us over 55 us at N = 1024; powers of 1.9 and 1.95 bring them together.
    assert "PyTorch / tuned at N = 1024: 1.11" in text and "PyTorch / tuned at N = 4096: 1.03" in text


def test_the_same_profile_gives_the_same_bytes() -> None:
    assert report.html_of(with_figures()) == html_of(with_figures())
    assert plots.figure_of(counted(), "png") == plots.figure_of(counted(), "png")


@both
def test_png_and_svg_hold_all_drawings(found: Profile, tmp_path: Path) -> None:
    report.write(found, tmp_path / "figure.png")
    pixels = image.imread(tmp_path / "figure.png")
    height, width = pixels.shape[:2]
    assert width > 1500 and height > 1000
    for rows, columns in (
        (slice(h, h + height // 3), slice(w, w + width // 2)) for h in range(0, height - 2, height // 3) for w in (0, width // 2)
    ):
        assert 0.02 < np.mean(pixels[rows, columns, :3].min(-1) < 0.99) < 0.9
    report.write(found, tmp_path / "figure.SVG")
    root = ElementTree.parse(tmp_path / "figure.SVG").getroot()
    assert root.tag.endswith("svg")
    words = " ".join(text for element in root.iter() if (text := element.text))
    for title in ("Bytes by step", "Time by step", "Roofline", "Latency against N", "over"):
        assert title in words


@both
@pytest.mark.parametrize("name", DRAWINGS)
def test_no_drawing_claims_to_be_measured_when_it_is_not(found: Profile, name: str) -> None:
    text = drawing_of(found, name)
    if name != "bytes":
        assert ("not measured" in text) == (found.measured is None)


def test_the_command_writes_every_kind_of_picture(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.html", "a.png", "a.svg")]
    options = [word for path in files for word in ("--plot", str(path))]
    result = CliRunner().invoke(main, ["profile", "--n", "256", "--d", "64", "--gpu-name", "v100", *options])
    assert result.exit_code == 0, result.output
    assert [path.read_bytes()[:5] for path in files] == [b"<!DOC", b"\x89PNG\r", b"<?xml"]
    assert sorted(tmp_path.iterdir()) == sorted(files), "no temporary file stays behind"


def test_huge_and_tiny_problems_can_be_drawn() -> None:
    for batch, n, d in ((1, 1, 1), (64, 131072, 256)):
        problem = Problem(batch=batch, heads=64, kv_heads=64, n_q=n, n_kv=n, d=d, d_v=d, dtype="fp32")
        found = Profile(
            problem=problem, target=find_target("mi300x"), chosen_by="name", elementwise="separate", window=0, rank=1, not_measured="no GPU"
        )
        assert plots.figure_of(found, "svg").startswith(b"<?xml")


def test_a_missing_matplotlib_is_one_sentence_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["profile", "--gpu-name", "v100", "--plot", str(tmp_path / "a.png")])
    assert result.exit_code == EnvironmentProblem.exit_code
    assert result.stderr == "flashtune: --plot needs matplotlib, which is not installed: pip install 'flashtune[plot]'\n"


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(InputError, match="can't be written: No space left on device"):
        write_whole(path, b"new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("width", [50, 60, 80])
def test_measured_tables_fit_a_terminal_of_any_width(width: int) -> None:
    text = render(with_figures(), width=width)
    assert max(len(click.unstyle(line)) for line in text.splitlines()) <= width
    assert "4096  exponent" in text, "of latencies the largest N stay longest"
