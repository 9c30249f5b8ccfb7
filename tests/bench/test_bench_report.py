"""The report: text that fits its terminal, and files that are what they say."""

import importlib.util
import re
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from commands import flashtune
from matplotlib import image
from pages import checked

from flashtune.bench.profiling import Profile
from flashtune.bench.report import chart
from flashtune.bench.report import html as html_of
from flashtune.cli.profile import print_report
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Provenance
from flashtune.core.system.errors import EnvironmentProblem


def counted(batch: int = 1, n: int = 1024, d: int = 64, target: str = "v100") -> dict[str, Any]:
    problem = Problem(batch=batch, heads=12, kv_heads=12, n_q=n, n_kv=n, d=d, d_v=d, dtype="fp16")
    return Profile(
        problem=problem,
        target=find_target(target),
        chosen_by="name",
        elementwise="separate",
        window=128,
        rank=min(n, 64),
        not_measured="no <GPU> here",
    ).document()


def with_figures() -> dict[str, Any]:
    """A measured profile with made-up times: what is tested is how it is shown."""
    found = counted()

    def timed(name: str, us: float, tflops: float = 50.0) -> dict[str, Any]:
        return {"name": name, "time_us": us, "q10_us": us, "q90_us": us, "samples": 9, "tflops": tflops, "tbs": 0.5}

    products = {"qk": 40.0, "scale_mask": 0.0, "softmax": 0.0, "dropout": 0.0, "pv": 42.0}
    kinds = {"eager": 290.0, "framework": 61.0, "tuned": 55.0}
    sizes = (256, 512, 1024, 2048, 4096)
    measured = {
        "device": "Tesla <V100>",
        "provenance": Provenance(flashtune="0", torch="2", triton="3", driver="580").as_json(),
        "steps": [{**timed(name, 60.0, tflops), "share": 0.2} for name, tflops in products.items()],
        "attention": [timed(name, us) for name, us in kinds.items()],
        "served_by": "a test",
        "scaling": [
            {"name": name, "points": [{"n": n, "time_us": us * (n / 1024) ** 2} for n in sizes], "exponent": 2.0}
            for name, us in {**kinds, "projections": 20.0}.items()
        ],
        "layer": {"projections_us": 20.0, "mlp_us": 35.0, "attention": {name: {"time_us": us, "share": 0.5} for name, us in kinds.items()}},
        "skipped": ["nothing & nobody"],
    }
    times = {"standard": 290.0, "fused": 55.0, "window": 19.0, "low_rank": 14.0}
    strategies = [{**row, "time_us": times[row["name"]], "relative_error": 1e-3} for row in found["strategies"]]
    return {**found, "measured": measured, "strategies": strategies, "not_measured": None}


both = pytest.mark.parametrize("found", [counted(), with_figures()], ids=["counted", "measured"])


@both
def test_the_page_is_well_formed_self_contained_and_escaped(found: dict[str, Any]) -> None:
    text = checked(html_of(found))
    assert text.count("<svg") == 2
    assert "<GPU>" not in text and "<V100>" not in text and "nothing & nobody" not in text
    assert "crossover 124.4 FLOP/byte" in text and text.count("<h2>") == (5 if found["measured"] is None else 9)


@both
def test_the_chart_has_a_roofline_and_times_and_says_if_nothing_was_measured(found: dict[str, Any]) -> None:
    root = ElementTree.fromstring(chart(found, "svg").decode())
    words = " ".join(text for element in root.iter() if (text := element.text))
    for title in ("Roofline", "Time by step", "crossover 124.4 FLOP/byte"):
        assert title in words
    assert ("not measured" in words) == (found["measured"] is None)
    assert ("tuned" in words) == (found["measured"] is not None)
    pixels = image.imread(BytesIO(chart(found, "png")))
    height, width = pixels.shape[:2]
    assert width > 1500 and height > 600
    for half in (pixels[:, : width // 2], pixels[:, width // 2 :]):
        assert 0.01 < np.mean(half[..., :3].min(-1) < 0.99) < 0.9


def test_the_same_profile_gives_the_same_bytes() -> None:
    for file_format in ("png", "svg"):
        assert chart(with_figures(), file_format) == chart(with_figures(), file_format)


@pytest.mark.parametrize(("batch", "n", "d"), [(1, 1, 1), (64, 131072, 256)])
def test_huge_and_tiny_problems_can_be_drawn(batch: int, n: int, d: int) -> None:
    assert chart(counted(batch, n, d, "mi300x"), "svg").startswith(b"<?xml")


PROFILE = ("profile", "--n", "256", "--d", "64", "--gpu-name", "v100")


def test_the_command_writes_every_kind_of_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.html", "a.png", "a.SVG")]
    options = [word for path in files for word in ("--plot", str(path))]
    result = flashtune(*PROFILE, *options)
    assert result.exit_code == 0, result.output
    assert [path.read_bytes()[:5] for path in files] == [b"<!DOC", b"\x89PNG\r", b"<?xml"]
    assert sorted(tmp_path.iterdir()) == sorted(files), "no temporary file stays behind"


def test_a_missing_matplotlib_is_one_sentence_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else found(name))
    result = flashtune(*PROFILE, "--plot", str(tmp_path / "a.png"))
    assert result.exit_code == EnvironmentProblem.exit_code
    remedy = "write .html, or pip install 'flashtune[plot]'"
    assert result.stderr == f"flashtune: --plot {tmp_path / 'a.png'} needs matplotlib, which is not installed: {remedy}\n"
    assert flashtune(*PROFILE, "--plot", str(tmp_path / "a.html")).exit_code == 0, "pages need none"


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("<!DOCTYPE html>old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("os.replace", full)
    result = flashtune(*PROFILE, "--plot", str(path))
    assert result.exit_code == 4 and "can't be read or written (No space left on device)" in result.stderr
    assert path.read_text() == "<!DOCTYPE html>old" and list(tmp_path.iterdir()) == [path]


@both
@pytest.mark.parametrize("width", [60, 80, 200])
def test_text_fits_a_terminal_of_any_width(found: dict[str, Any], width: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(found, width=width)
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= width
    # Names, floors and, of latencies, the largest N are what no width takes away.
    for word in ("scale_mask", "low_rank", "floor us", "bound", *(("4096   exponent",) if found["measured"] else ())):
        assert word in shown
    assert not re.search(r"\d…", shown), "a figure is whole or not there"
