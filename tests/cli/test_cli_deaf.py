"""Real signals where Python can't hear them, or where what was begun goes on: every command ends soon and says one line."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1] / "support"
FOREVER_S = 3600
"""So long takes what a signal has to end."""
END_S = 300.0
"""So long may the end take on whichever machine; it is two seconds on an idle one."""


@contextmanager
def started(folder: Path, code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A script in a session of its own, in which `forever` makes the file `ready` and doesn't return."""
    script = folder / "script.py"
    script.write_text(
        f"""
import os, signal, sqlite3, sys, time
from pathlib import Path

def forever(*arguments, **words):
    Path({str(folder / "ready")!r}).touch()
    time.sleep({FOREVER_S})

{code}
"""
    )
    environment = {**os.environ, "FLASHTUNE_CACHE": str(folder / "cache"), "FLASHTUNE_OWN_DB": str(folder / "own.sqlite")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        child = subprocess.Popen(
            [sys.executable, str(script), *words],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + END_S
        while not (folder / "ready").exists():
            assert child.poll() is None and time.monotonic() < deadline, "it didn't begin"
            time.sleep(0.02)
        yield child
    finally:
        child.kill()
        child.communicate()


def interrupted(child: subprocess.Popen[str], number: int, *, group: bool = False) -> str:
    """Output at a command's end, after a signal, to all of its group or to itself alone."""
    (os.killpg if group else os.kill)(child.pid, number)
    said = child.communicate(timeout=END_S)[1]
    assert child.returncode == 130, said
    assert said.splitlines()[-1].startswith("flashtune: interrupted") and "Traceback" not in said, said
    return said


def gone(group: int) -> bool:
    """True if nobody of a group of processes is left, by and by."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT)
DEAF = {
    "waiting for a lock of SQLite": "sqlite3.connect({database!r}, timeout=3600, isolation_level=None).execute('BEGIN IMMEDIATE')",
    "computing in C": "__import__('hashlib').pbkdf2_hmac('sha256', b'', b'', (1 << 31) - 1)",
    "while signals are held back": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM]); time.sleep(3600)",
}


@pytest.mark.parametrize(("deaf", "number"), list(zip(DEAF.values(), SIGNALS, strict=False)), ids=DEAF)
def test_a_command_ends_where_its_main_thread_hears_no_signal(deaf: str, number: int, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    code = f"""
from flashtune.cli.interrupts import Interrupts, interruptible
with interruptible(Interrupts()):
    Path({str(tmp_path / "ready")!r}).touch()
    {deaf.format(database=str(path))}
"""
    with started(tmp_path, code) as child:
        time.sleep(0.1)
        assert interrupted(child, number) == "flashtune: interrupted\n"
    holder.close()


def test_the_server_of_children_keeps_no_pipe_of_a_command_open(tmp_path: Path) -> None:
    """It imports torch for seconds after a command that was ended without notice."""
    code = """
from multiprocessing import forkserver
from flashtune.tuner.children.start import serving
if __name__ == "__main__":
    with serving():
        place = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/fd/")
        while {os.readlink(place / number) for number in "12"} != {os.devnull}:
            time.sleep(0.01)
    forever()
"""
    with started(tmp_path, code):
        pass


def test_a_signal_after_the_message_changes_nothing(tmp_path: Path) -> None:
    code = f"""
import atexit
from flashtune.cli import search
search.choose_source = forever
@atexit.register
def leave():
    Path({str(tmp_path / "leaving")!r}).touch()
    time.sleep(0.5)
if __name__ == '__main__':
    from flashtune.cli.main import main
    main(prog_name='flashtune')
"""
    words = ["search", "--gpu-name", "a100", "--d", "16", "--n", "64", "--trials", "2", "--predict", "--db", str(tmp_path / "x.sqlite")]
    with started(tmp_path, code, *words) as child:
        child.send_signal(signal.SIGINT)
        while not (tmp_path / "leaving").exists():
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=END_S)[1]
    assert (child.returncode, said) == (130, "flashtune: interrupted; results are kept, and the same command resumes from here\n")


COMMANDS = {
    "generate, while a kernel is compiled": (
        "from flashtune.tuner.publish import machine_code; machine_code._attempt = forever",
        "generate",
    ),
    "verify, while a kernel is checked": ("from flashtune.tuner.children import tasks; tasks.interpret_candidate = forever", "verify"),
    "merge, while it reads": ("from flashtune.db.library import Library; Library.winners = forever", "merge"),
}


@pytest.mark.parametrize(("stage", "number"), list(zip(COMMANDS.values(), SIGNALS, strict=False)), ids=COMMANDS)
def test_a_command_waits_for_nothing_that_it_has_begun(stage: tuple[str, str], number: int, tmp_path: Path, database: Path) -> None:
    patch, command = stage
    out = tmp_path / "out"
    out.mkdir()
    words = {
        "generate": ["--db", str(database), "--out", str(out / "kernels"), "--jobs", "2"],
        "verify": ["--db", str(database)],
        "merge": [str(database), "--out", str(out / "x.sqlite")],
    }[command]
    code = f"{patch}\nif __name__ == '__main__':\n    from flashtune.cli.main import main\n    main(prog_name='flashtune')"
    with started(tmp_path, code, command, *words) as child:
        # Ctrl-C reaches all of the group, `kill` the command alone.
        interrupted(child, number, group=number == signal.SIGINT)
        assert gone(child.pid), "somebody of its group is left"
    assert list(out.iterdir()) == []
