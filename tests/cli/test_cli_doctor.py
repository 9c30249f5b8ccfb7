"""`flashtune doctor`: a call is made, versions that nobody ran are named, and remedies are commands that work."""

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import flashtune

from flashtune.core.code import shipped as shipped_kernels
from flashtune.core.system import versions

ROOT = Path(__file__).parents[2]


def checks() -> dict[str, Any]:
    result = flashtune("doctor", "--json")
    found = json.loads(result.stdout)
    assert found["ok"] is (result.exit_code == 0)
    return {check["name"]: check for check in found["checks"]}


def test_a_call_that_fails_is_a_finding_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks()["calls"]["ok"]

    def fails(*_: Any, **__: Any) -> None:
        raise AttributeError("'builtin_function_or_method' object\nhas no attribute")

    with monkeypatch.context() as patch:
        patch.setattr("flashtune.dispatch.attention", fails)
        told = checks()["calls"]
    assert not told["ok"] and told["found"] == (
        "dispatch.attention fails: AttributeError: 'builtin_function_or_method' object has no attribute"
    )
    monkeypatch.delattr("flashtune.dispatch")
    monkeypatch.setitem(sys.modules, "flashtune.dispatch", None)
    told = checks()["calls"]
    assert not told["ok"] and "ModuleNotFoundError" in told["found"] and told["remedy"]


@pytest.mark.parametrize(
    ("torch", "triton", "said", "ok"),
    [
        ("2.13.0+cpu", "3.6.0", None, True),
        ("2.99.1", "3.6.0", r"wasn't run with torch 2\.99\.1, of which 2\.10, .*, 2\.15 were run", True),
        ("2.15.0a0+git1", "3.99.0", r"wasn't run with triton 3\.99\.0, of which 3\.6, ", True),
        ("2.99.1", "4.0.0", r"torch 2\.99\.1, of which .* and triton 4\.0\.0, of which", True),
        ("2.9.1", "3.5.1", r"torch 2\.9\.1, older than 2\.10", False),
        ("2.13.0", "3.5.1", r"triton 3\.5\.1, older than 3\.6", False),
    ],
)
def test_versions_outside_the_table_are_named(torch: str, triton: str, said: str | None, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "python", lambda: "3.11")
    usual = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"torch": torch, "triton": triton}.get(name) or usual(name))
    found = checks()["packages"]
    assert found["ok"] is ok and bool(found["remedy"]) is not ok
    if said is None:
        assert "wasn't run" not in found["found"]
    else:
        assert re.search(said, found["found"]), found["found"]


def test_a_python_outside_the_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "python", lambda: "3.99")
    assert re.search(r"wasn't run with Python 3\.99, of which 3\.11.* were run", checks()["packages"]["found"])


@pytest.mark.parametrize("away", [False, True])
def test_a_folder_of_kernels_is_advised_and_no_extra_that_no_index_has(away: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shipped_kernels, "shipped_archive", lambda *_: None)
    if away:
        monkeypatch.setattr("flashtune.__file__", str(tmp_path / "flashtune" / "__init__.py"))
    told = checks()["machine code"]["found"]
    advised = told.rpartition("pip install ")[2]
    assert advised == ("/path/to/flashtune/kernels/sm90" if away else str(ROOT / "kernels" / "sm90")), told


def test_the_table_is_in_order_and_its_lowest_are_the_bounds() -> None:
    found = [versions.minor(run.torch) for run in versions.RUNS]
    assert found == sorted(found)
    assert versions.minor(versions.RUNS[0].torch) == versions.minor(versions.LOWEST["torch"])
    assert min(versions.minor(run.triton) for run in versions.RUNS) == versions.minor(versions.LOWEST["triton"])
