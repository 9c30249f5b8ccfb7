"""Passwords are neither stored nor printed, in whatever form a command line holds them."""

import json
import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import db_samples as samples
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from flashtune.cli.main import main
from flashtune.core.records.results import Provenance
from flashtune.core.system.secrets import command_line, mask_command_line, mask_secrets, mask_url
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
    "an @ in the user's name": ["--storage", f"postgresql+psycopg://my@server:{SECRET}@host/tuned"],
    "quotes in the user's name": ["--storage", f"postgresql+psycopg://my'own\"server:{SECRET}@host/tuned"],
    "a blank in the user's name": ["--storage", f"postgresql+psycopg://my server:{SECRET}@host/tuned"],
    "an encoded option": ["--db", f"postgresql://host/tuned?connect_timeout=3&%70ass%77ord={SECRET}"],
    "a semicolon in an option": ["--db", f"postgresql://host/tuned?password=a;{SECRET}"],
    "quotes in an option": ["--db", f"postgresql://host/tuned?password='{SECRET}'{SECRET}"],
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


MARKS = st.text(alphabet=":/@?&=%;'\"[]+., \n-a1", max_size=8)
USERS = st.text(alphabet=st.characters(exclude_characters=":/", codec="utf-8"), max_size=8)
KEYS = st.sampled_from(["password", "sslpassword", "passwd", "PWD", "client_secret", "token"])


def secrets_of(text: str) -> list[str]:
    """Passwords that SQLAlchemy reads in a URL; none where it refuses the text."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        return []
    named = [value for name, value in url.query.items() if re.search("pass|pwd|secret|token", name, re.IGNORECASE)]
    return [url.password or "", *(one for value in named for one in ([value] if isinstance(value, str) else value))]


@given(st.sampled_from(["", "u", "my@server", "host"]), MARKS, MARKS, MARKS)
@example("", ":1/", "", " ")
@example("u", ":", "1/", " ")
def test_what_sqlalchemy_reads_as_a_password_is_masked_in_any_text_that_parses_as_a_url(
    user: str, before: str, within: str, after: str
) -> None:
    url = f"postgresql+psycopg://{user}{before}:{within}{SECRET}{after}@host/tuned"
    secrets = secrets_of(url)
    if any(SECRET in one for one in secrets):
        assert SECRET not in mask_url(url) and SECRET not in mask_url(f"--storage={url}")
        assert SECRET not in command_line(["flashtune", "search", "--storage", url])
        # Within a sentence, a password that begins as a port may be one.
        if not re.match(r"\d", secrets[0]):
            assert SECRET not in mask_secrets(url) and SECRET not in mask_secrets(f"no server at {url!r} (it is away): ask me")


@given(USERS, st.text(max_size=6), st.text(max_size=6), st.data())
def test_passwords_of_any_user_and_under_any_spelling_of_an_option_are_masked(
    user: str, before: str, after: str, data: st.DataObject
) -> None:
    if "@" not in before + after:
        before = "" if re.match(r"\d", before) else before
        url = f"postgresql://{user}:{before}{SECRET}{after}@host:5432/tuned"
        assert SECRET in secrets_of(url)[0]
        assert SECRET not in mask_url(url) and SECRET not in mask_secrets(f"'{url}' can't be used")
    key = "".join(f"%{ord(mark):02x}" if data.draw(st.booleans()) else mark for mark in data.draw(KEYS))
    url = f"postgresql://host/tuned?a=b&{key}={quote(before)}{SECRET}{quote(after)}&c=d"
    assert SECRET in secrets_of(url)[1]
    assert SECRET not in mask_url(url) and mask_url(url).endswith("=***&c=d")
    assert SECRET not in mask_secrets(f"'{url}' can't be used")


def test_masking_twice_changes_nothing_and_a_sentence_keeps_its_end() -> None:
    for url in (f"postgresql://my@server:{SECRET}@host/tuned", f"postgresql://host:5432/tuned?password={SECRET}"):
        said = f"{mask_url(url)} can't be used ('{url}'): role \"me@host\" is unknown"
        assert (
            mask_secrets(said)
            == mask_secrets(mask_secrets(said))
            == f"{mask_url(url)} can't be used ('{mask_url(url)}'): " + ('role "me@host" is unknown')
        )


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
    "ports": "x://y:1/ " * (LONG // 9) + "@",
    "ports of one word": "x://y:1/" * (LONG // 8) + "@",
    "users": "x://" * (LONG // 4) + "@",
    "marks of an option": "?password=" + ";" * LONG,
    "beginnings of URLs": "@ " + "x:/y:" * (LONG // 5),
    "slashes": "x:" + "/" * LONG,
    "semicolons": ";a=b" * (LONG // 4),
}


def test_long_texts_are_masked_in_time_that_grows_as_they_do() -> None:
    """In a process with a limit of processor time for each, counted from the last, that only a square of the length reaches."""
    masking = (
        "from flashtune.core.system.secrets import mask_command_line, mask_secrets\n"
        "import json, resource, sys, time\n"
        "for name, text in json.load(sys.stdin).items():\n"
        "    print(name, flush=True)\n"
        "    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 20, resource.RLIM_INFINITY))\n"
        "    mask_secrets(text); mask_command_line(text + '@')"
    )
    done = subprocess.run([sys.executable, "-c", masking], input=json.dumps(SLOW), stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines() == list(SLOW) and done.returncode == 0, done.stdout


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
    "a storage of a managed server": (*SEARCH, "--storage", f"postgresql+psycopg://my@server:{SECRET}@127.0.0.1:1/x"),
    "a storage with an encoded option": (*SEARCH, "--storage", f"postgresql+psycopg://127.0.0.1:1/x?user=u&%70assword=a {SECRET}"),
    "a path that was to be a URL": ("show", "--db", f"postgresql:/my 'own' server:a {SECRET}@127.0.0.1/x"),
    "a database of a managed server": ("show", "--db", f"postgresql+psycopg://my@server:{SECRET}@127.0.0.1:1/x"),
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
