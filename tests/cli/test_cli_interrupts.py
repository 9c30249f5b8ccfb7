"""Ctrl-C and SIGTERM, once or impatiently, during imports or a trial: what was found is kept, one line says so, exit code 130."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flashtune.cli.interrupts import Interrupts, interruptible
from flashtune.db.store import Store

HERE = Path(__file__).parents[1] / "support"
WORDS = [
    "search",
    "--gpu-name",
    "a100",
    "--d",
    "16",
    "--n",
    "64,128",
    "--full",
    "--dtype",
    "fp32",
    "--heads",
    "2",
    "--predict",
    "--jobs",
    "1",
    "--sampler",
    "random",
    "--until",
    "0",
]


def start(folder: Path, *, code: str = "", limit: int | None = None, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A search of two problems in a session of its own, as a shell starts a foreground command; it stays in the trial after `limit`."""
    main = ["-c", code] if code else [str(HERE / "quick_search.py")]
    where = {**os.environ, "FLASHTUNE_CACHE": str(folder / "cache"), "FLASHTUNE_TEST_LIMIT": str(folder / f"limit{limit}")}
    if limit is not None:
        (folder / f"limit{limit}").write_text(str(limit))
    where["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    # What a shell starts in the background has SIGINT ignored, and would pass that on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, *main, *WORDS, "--trials", "12", "--seed", "1", "--db", str(folder / "x.sqlite")],
            env=where,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def until_told(folder: Path, trials: int) -> None:
    """Wait until so many trials are in the study."""
    import sqlite3

    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            with sqlite3.connect(f"file:{folder}/cache/studies.sqlite?mode=ro", uri=True) as studies:
                [told] = studies.execute("SELECT count(*) FROM trial_user_attributes WHERE key = 'outcome'").fetchone()
            if told >= trials:
                return
        except sqlite3.Error:
            pass
        time.sleep(0.05)
    raise AssertionError("the search doesn't get on")


def rows(folder: Path) -> list[int]:
    """The trials of each run that was saved."""
    with Store.open(folder / "x.sqlite", writable=False) as store:
        return [len(result.outcomes) for result in store.results()]


@pytest.mark.parametrize(
    ("signals", "group", "finalizer"),
    [
        ([signal.SIGTERM], False, True),
        ([signal.SIGINT, signal.SIGINT, signal.SIGINT], True, False),
    ],
    ids=["in a finalizer", "impatient"],
)
def test_an_interrupted_problem_keeps_its_rows_and_the_same_command_goes_on(
    tmp_path: Path, signals: list[int], group: bool, finalizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTUNE_TEST_FINALIZER", "1" if finalizer else "")
    first = start(tmp_path, limit=15)
    until_told(tmp_path, 15)
    for number in signals:
        (os.killpg if group else os.kill)(first.pid, number)
    said = first.communicate(timeout=600)[1]
    assert first.returncode == 130, said
    assert said.splitlines()[-1] == "flashtune: interrupted; results are kept, and the same command resumes from here"
    assert "Traceback" not in said and "Aborted" not in said
    [whole, part] = rows(tmp_path)
    # Trials that were being kept when the signal came may be in the study alone.
    assert whole == 12 and 1 <= part < 12
    second = start(tmp_path)
    assert "n64-d16-fp32-full: done before (12 of 48 candidates tried)" in second.communicate(timeout=600)[1]
    assert second.returncode == 0
    assert rows(tmp_path) == [12, part, 12]
    with Store.open(tmp_path / "x.sqlite", writable=False) as store:
        fates = {outcome.variant_id: outcome.fate for result in store.results() for outcome in result.outcomes}
        assert all(fates[o.variant_id] is o.fate for result in store.results() for o in result.outcomes), "no trial died with the search"
        assert {str(fate) for fate in fates.values()} <= {"correct", "compile"}
        assert all("died" not in o.reason for result in store.results() for o in result.outcomes)


IMPORTING = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            {do}
sys.meta_path.insert(0, Interrupt())
from flashtune.cli.main import main
main(prog_name="flashtune")
"""
SIGNAL = "os.kill(os.getpid(), signal.SIGINT)"
SWALLOWED = f"""
            try:
                {SIGNAL}
            except BaseException:
                raise ImportError("half imported") from None"""


@pytest.mark.parametrize(
    ("name", "do"),
    [("flashtune.cli.search", SIGNAL), ("optuna", SWALLOWED)],
    ids=["plain", "swallowed"],
)
def test_an_interrupt_during_the_imports_is_an_interrupt(tmp_path: Path, name: str, do: str) -> None:
    child = start(tmp_path, code=IMPORTING.format(name=name, do=do))
    said = child.communicate(timeout=600)[1]
    assert child.returncode == 130, said
    assert len(said.strip().splitlines()) == 1 and said.startswith("flashtune: interrupted")


def test_the_message_comes_after_the_live_display(tmp_path: Path) -> None:
    mine, terminal = pty.openpty()
    child = start(tmp_path, limit=2, stderr=terminal)
    os.close(terminal)
    until_told(tmp_path, 2)
    child.send_signal(signal.SIGINT)
    said = b""
    try:
        while more := os.read(mine, 65536):
            said += more
    except OSError:
        # The other end is closed.
        pass
    os.close(mine)
    assert child.wait(600) == 130
    _, _, after = said.rpartition(b"\x1b[?25h")
    assert b"flashtune: interrupted; results are kept" in after, "the cursor is shown again when the display has ended"


def test_only_what_follows_at_once_is_the_same_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.1, 12.9, 14.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    interrupts = Interrupts()
    assert not interrupts.came
    with pytest.raises(KeyboardInterrupt):
        interrupts(signal.SIGINT, None)
    interrupts(signal.SIGTERM, None)
    interrupts(signal.SIGINT, None)
    assert interrupts.came
    with pytest.raises(KeyboardInterrupt):
        interrupts(signal.SIGINT, None)


class Finalized:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        # Where Python handles it.
        time.sleep(0)


def test_an_interruption_that_a_finalizer_swallows_is_raised_after_it() -> None:
    def swallowed() -> None:
        Finalized()
        threading.Event().wait(30)

    with pytest.raises(KeyboardInterrupt), interruptible(Interrupts()):
        swallowed()


def test_what_else_a_finalizer_swallows_is_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    before = signal.getsignal(signal.SIGALRM)

    class Broken:
        def __del__(self) -> None:
            raise ValueError

    with interruptible(Interrupts()):
        Broken()
    Broken()
    assert len(told) == 2
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_signal_that_is_ignored_stays_ignored_and_handlers_come_back() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.getsignal(signal.SIGTERM)
    try:
        with interruptible(Interrupts()):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert isinstance(signal.getsignal(signal.SIGTERM), Interrupts)
        assert signal.getsignal(signal.SIGTERM) is before[1]
    finally:
        signal.signal(signal.SIGINT, before[0])
