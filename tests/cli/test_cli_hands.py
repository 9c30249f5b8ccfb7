"""Commands as people type them: suggestions, completion, odd destinations, sizes beyond all bounds, closed outputs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from commands import flashtune

from flashtune import dispatch
from flashtune.cli import doctor
from flashtune.cli.main import main
from flashtune.core.problems.problem import Features, Problem
from flashtune.db.library import shipped_path
from flashtune.templates import every_family

CAUSAL = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))


def test_the_package_runs_as_a_module() -> None:
    told = subprocess.run([sys.executable, "-m", "flashtune", "--version"], capture_output=True, text=True, timeout=600)
    assert (told.returncode, told.stdout.split()[0]) == (0, "flashtune,"), told.stderr


@pytest.mark.parametrize(("typed", "meant"), [("serach", "search"), ("shwo", "show"), ("export-", "export"), ("profil", "profile")])
def test_a_mistyped_command_is_told_what_was_meant(typed: str, meant: str) -> None:
    result = flashtune(typed, "--json")
    assert result.exit_code == 2
    assert f"{typed!r}" in result.stderr and f"did you mean {meant}?" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_command_like_no_other_gets_no_suggestion() -> None:
    assert "did you mean" not in flashtune("xyzzy").stderr


def completions(*words: str) -> list[str]:
    """Completions that a shell is offered for the last word."""
    found = ShellComplete(main, {}, "flashtune", "_FLASHTUNE_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value for item in found]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sea",), ["search"]),
        (("search", "--gpu-name", "a10"), ["a100", "a100-40gb", "a10"]),
        (("show", "--gpu-name", "h2"), ["h200"]),
        (("explain", "--gpu-name", "h2"), ["h200"]),
        (("profile", "--gpu-name", "h2"), ["h200"]),
        (("search", "--dtype", "fp"), ["fp16", "fp32", "fp8"]),
        (("search", "--dtype", "bf16,fp1"), ["bf16,fp16"]),
        (("show", "--dtype", "b"), ["bf16"]),
        (("search", "--template", "flash_fwd_h"), ["flash_fwd_hopper", "flash_fwd_hopper_wide", "flash_fwd_hopper_paged"]),
    ],
)
def test_a_shell_completes_gpus_dtypes_and_templates(words: tuple[str, ...], expected: list[str]) -> None:
    assert completions(*words) == expected


SIZES = ("--batch", "--heads", "--kv-heads", "--n-q", "--d-v", "--window", "--n", "--d")


@pytest.mark.parametrize("option", SIZES)
@pytest.mark.parametrize("size", ["99999999999999999999", "2147483648"])
def test_a_size_beyond_all_bounds_is_refused_before_anything_runs(tmp_path: Path, option: str, size: str) -> None:
    words = {"--gpu-name": "a100", "--d": "64", "--n": "512", "--trials": "1", "--db": str(tmp_path / "x.sqlite"), option: size}
    result = flashtune("search", *(word for pair in words.items() for word in pair))
    assert result.exit_code == 2, result.output
    assert option in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_heads_times_batch_is_bounded_too(tmp_path: Path) -> None:
    words = ("--gpu-name", "a100", "--d", "64", "--n", "512", "--batch", "2000000", "--heads", "2000", "--db", str(tmp_path / "x.sqlite"))
    result = flashtune("search", *words)
    assert result.exit_code == 2 and "--batch" in result.stderr and "--heads" in result.stderr, result.output
    assert list(tmp_path.iterdir()) == []


def test_an_export_goes_where_its_destination_says(tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for destination, path in (
        ("~/x.sqlite", "x.sqlite"),
        ("sqlite:///y.sqlite", "y.sqlite"),
        (f"sqlite:///{tmp_path}/z.sqlite", "z.sqlite"),
    ):
        result = flashtune("export", destination, "--db", str(database), "--json")
        assert result.exit_code == 0, (result.output, result.exception)
        told = json.loads(result.stdout)
        assert (told["rows"], told["bytes"]) == (1, (tmp_path / path).stat().st_size)
        assert Path(told["path"]).resolve() == tmp_path / path
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in", "x.sqlite", "y.sqlite", "z.sqlite"]
    assert flashtune("export", str(tmp_path), "--db", str(database)).exit_code == 3


def test_a_file_that_exists_is_replaced_only_with_the_option_that_the_refusal_names(tmp_path: Path, database: Path) -> None:
    taken = tmp_path / "taken.sqlite"
    shutil.copy(database, taken)
    for words in (("export", str(taken), "--db", str(database)), ("merge", str(database), "--out", str(taken))):
        refused = flashtune(*words)
        assert refused.exit_code == 3 and refused.stderr.endswith("exists already: choose another path, or replace it with --force\n")
        assert flashtune(*words, "--force").exit_code == 0


def test_db_is_one_database_in_every_command_that_reads_one(database: Path) -> None:
    """`explain`, too: what the shipped rows would serve isn't what this database would."""
    words = ("--gpu-name", "h200", "--d", "128", "--n", "4096", "--causal", "--json")
    kinds = []
    for where in (("--db", str(database)), ()):
        dispatch.reload()
        kinds.append(json.loads(flashtune("explain", *words, *where).stdout)["kind"])
    dispatch.reload()
    assert kinds == ["stand_in", "exact"]
    flashtune("explain", *words, "--db", str(database))
    assert dispatch.explain_problem(CAUSAL, "h200").origin == "shipped", "no later call of the process is served from there"
    commands = [main.get_command(click.Context(main), name) for name in ("explain", "show", "verify", "generate", "export")]
    helps = {p.help for found in commands if found for p in found.params if isinstance(p, click.Option) and p.name == "location"}
    assert all(text and text.startswith("Only this database, in place of ") for text in helps)


def test_a_closed_output_is_no_traceback() -> None:
    script = f"exec {sys.executable} -m flashtune show --db {shipped_path()} --limit 3 >&-"
    told = subprocess.run(["sh", "-c", script], stderr=subprocess.PIPE, text=True, timeout=600)
    assert told.returncode in (0, 4) and told.stderr == "", told.stderr


BROKEN = ("_versions", "_calls", "_gpu", "_compiler", "_ptxas", "_cache", "_databases")


@pytest.mark.parametrize("part", BROKEN)
def test_doctor_reports_a_check_that_breaks_and_makes_the_others(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise RuntimeError("planted\nfault")

    monkeypatch.setattr(doctor, part, breaks)
    result = flashtune("doctor", "--json")
    assert result.exit_code == 4, result.output
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    broken = [check for check in found.values() if "planted fault" in check["found"]]
    assert broken and not broken[0]["ok"] and broken[0]["remedy"]
    assert len(found) >= len(BROKEN) - 1


@pytest.mark.parametrize("location", ["a\0b", "x" * 5000, "mysql://nowhere/x", "://", "/proc/self/mem", "postgresql://u:secret@/x"])
def test_doctor_survives_any_place_for_the_overlay(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtune.db.library.overlay_path", lambda: location)
    result = flashtune("doctor")
    assert result.exit_code in (0, 4) and (result.exception is None or isinstance(result.exception, SystemExit)), result.exception
    assert "secret" not in result.output


def test_completion_knows_every_template() -> None:
    assert set(completions("search", "--template", "")) == set(every_family())
    assert os.environ.get("_FLASHTUNE_COMPLETE") is None
