"""Passwords are neither stored nor printed, in whatever form a command line holds them."""

import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import db_samples as samples
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flashtune.cli.main import main
from flashtune.core.results import Provenance
from flashtune.core.secrets import command_line, mask_command_line, mask_secrets
from flashtune.db.store import Store

SECRET = "hunter2-hunter2"

FORMS = {
    "two words": ["--db", f"postgresql+psycopg://u:{SECRET}@host:5432/tuned"],
    "one word": [f"--storage=postgresql://u:{SECRET}@host/studies"],
    "the environment": [f"FLASHTUNE_DB=mysql+pymysql://u:{SECRET}@host/tuned", "flashtune", "search"],
    "no user": ["--db", f"postgresql://:{SECRET}@host/tuned"],
    "an option of the URL": ["--db", f"postgresql://host/tuned?user=u&password={SECRET}&connect_timeout=3"],
    "the first option of the URL": ["--db", f"postgresql://host/tuned?sslpassword={SECRET}"],
    "an @ inside": ["--db", f"postgresql://u:a@{SECRET}@host/tuned"],
    "a slash inside": ["--db", f"postgresql://u:a/{SECRET}@host/tuned"],
    "a blank inside": ["--db", f"postgresql://u:a {SECRET} b@host/tuned"],
    "a blank in an option": ["--db", f"postgresql://host/tuned?password=a {SECRET}"],
    "one slash too few": ["--storage", f"postgresql:/u:{SECRET}@host/tuned"],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_stored_command_has_no_password_and_keeps_the_rest(form: str) -> None:
    typed = ["flashtune", "search", "--gpu-name", "a100", *FORMS[form], "--n", "512"]
    for command in (command_line(typed), Provenance(flashtune="", torch="", triton="", command=shlex.join(typed)).command):
        assert SECRET not in command
        words = shlex.split(command)
        assert len(words) == len(typed)
        assert [word for word in words if "***" not in word] == [word for word in typed if SECRET not in word]
        [masked] = [word for word in words if "***" in word]
        assert "host" in masked


@given(st.text())
def test_a_text_without_a_url_is_left_as_it_is(text: str) -> None:
    if ":/" not in text and "?" not in text and "&" not in text and ";" not in text:
        assert mask_secrets(text) == mask_command_line(text) == text


def test_urls_without_a_password_are_left_as_they_are() -> None:
    for text in (
        "flashtune search --db postgresql://u@host/tuned?connect_timeout=3 --n '512'",
        "sqlite:////home/me@work/x.sqlite",
        "a 'cut",
    ):
        assert mask_command_line(text) == text


LONG = 200_000
SLOW = {
    "one word": "M" * LONG,
    "question marks": "?" * LONG,
    "names of options": "?pass" * (LONG // 5) + "@",
    "beginnings of URLs": "@ " + "x:/y:" * (LONG // 5),
    "slashes": "x:" + "/" * LONG,
    "semicolons": ";a=b" * (LONG // 4),
}


@pytest.mark.parametrize("text", SLOW)
def test_long_texts_are_masked_in_time_that_grows_as_they_do(text: str) -> None:
    """In a process with a limit of processor time that only a square of the length reaches."""
    masking = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n"
        "from flashtune.core.secrets import mask_command_line, mask_secrets\n"
        "import sys; text = sys.stdin.read(); mask_secrets(text); mask_command_line(text + '@')"
    )
    assert subprocess.run([sys.executable, "-c", masking], input=SLOW[text], text=True).returncode == 0


@pytest.mark.parametrize("winners_only", [True, False])
def test_rows_of_earlier_versions_are_exported_masked(tmp_path: Path, winners_only: bool) -> None:
    """Earlier versions kept what was typed."""
    typed = shlex.join(["flashtune", "search", *FORMS["two words"], "--d", "64"])
    path = samples.write(tmp_path / "old.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE provenance SET command = ?", (typed,))
    connection.close()
    assert SECRET.encode() in path.read_bytes()
    with Store.open(path, writable=False) as store:
        assert all(SECRET not in record.provenance.command for record in store.records())
        store.export(tmp_path / "shipped.sqlite", winners_only=winners_only)
    assert SECRET.encode() not in (tmp_path / "shipped.sqlite").read_bytes()
    with Store.open(tmp_path / "shipped.sqlite", writable=False) as store:
        assert store.records()[0].provenance.command == "flashtune search --db 'postgresql+psycopg://u:***@host:5432/tuned' --d 64"


SEARCH = ("search", "--gpu-name", "a100", "--d", "64", "--n", "512", "--trials", "1", "--predict")

LEAKS = {
    "a storage without a driver": (*SEARCH, "--storage", f"oracle+nothing://u:{SECRET}@127.0.0.1/x"),
    "a storage that is no URL": (*SEARCH, "--storage", f"postgresql:/u:{SECRET}@127.0.0.1/x"),
    "a storage with a wrong port": (*SEARCH, "--storage", f"postgresql+psycopg://u:{SECRET}@127.0.0.1:port/x"),
    "a storage that isn't there": (*SEARCH, "--storage", f"postgresql+psycopg://u:{SECRET}@127.0.0.1:1/x"),
    "a storage with a password as option": (*SEARCH, "--storage", f"postgresql+psycopg://127.0.0.1:1/x?user=u&password={SECRET}"),
    "a database that isn't there": ("show", "--db", f"postgresql+psycopg://u:{SECRET}@127.0.0.1:1/x"),
    "a database with a password as option": ("show", "--db", f"postgresql+psycopg://127.0.0.1:1/x?user=u&password={SECRET}"),
    "a database with a wrong option": ("show", "--db", f"postgresql+psycopg://127.0.0.1:1/x?password={SECRET}&nothing=3"),
    "a database without a driver": ("show", "--db", f"oracle+nothing://u:{SECRET}@127.0.0.1/x"),
    "a SQLite URL with options": ("show", "--db", f"sqlite:///x.sqlite?password={SECRET}"),
    "a URL in the wrong place": ("show", f"postgresql+psycopg://u:{SECRET}@127.0.0.1:1/x"),
    "doctor": ("doctor", "--json"),
}


@pytest.mark.parametrize("case", LEAKS)
def test_no_error_prints_a_password(case: str, tmp_path: Path) -> None:
    where = {"FLASHTUNE_OWN_DB": str(tmp_path / "x.sqlite")}
    if case == "doctor":
        where = {"FLASHTUNE_OWN_DB": f"postgresql+psycopg://u:{SECRET}@127.0.0.1:1/x"}
    result = CliRunner(env=where).invoke(main, list(LEAKS[case]))
    assert result.exit_code != 0
    assert isinstance(result.exception, SystemExit), result.exception
    assert SECRET not in result.output
    if case != "doctor":
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
