"""Rendered kernels are imported from their text alone: nothing that lies on a disk is taken for it."""

import inspect
import linecache
import os
import py_compile
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashtune.core.code.modules import load_source

TEXT = "def answer():\n    # how a kernel reads\n    return 42\n"
LOAD = "import sys; from flashtune.core.code.modules import load_source; print(load_source(sys.argv[1], 'kernel').answer())"


def loaded(cache: Path, **where: str) -> str:
    """Answer of the module of `TEXT` in a process of its own."""
    words = [sys.executable, "-c", LOAD, TEXT]
    environment = {**os.environ, "FLASHTUNE_CACHE": str(cache), **where}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=True).stdout.strip()


def planted(cache: Path) -> Path:
    """The file that an earlier version kept this text in."""
    name = load_source(TEXT, "kernel").__name__
    folder = cache / "kernels"
    folder.mkdir(parents=True)
    return folder / f"{name}.py"


def test_bytecode_that_another_planted_never_runs(tmp_path: Path) -> None:
    path = planted(tmp_path)
    path.write_text(TEXT.replace("42", "666"))
    # Unchecked bytecode is taken for the file's whatever the file says.
    py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True)
    path.write_text(TEXT)
    assert loaded(tmp_path) == "42"


def test_a_file_that_is_not_utf8_disturbs_nothing(tmp_path: Path) -> None:
    planted(tmp_path).write_bytes(b"\xff\xfe\x80 not a text")
    assert loaded(tmp_path) == "42"


def test_importing_writes_nothing_to_disk(tmp_path: Path) -> None:
    """Not even where the cache can't be used: each kernel left a folder under the system's temporary one."""
    (tmp_path / "cache").write_text("a file, not a folder")
    (tmp_path / "scratch").mkdir()
    assert loaded(tmp_path / "cache", TMPDIR=str(tmp_path / "scratch")) == "42"
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_source_of_a_function_is_its_text_whatever_lies_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_source(TEXT, "kernel")
    monkeypatch.chdir(tmp_path)
    Path(Path(module.answer.__code__.co_filename).name).write_text("def answer():\n    return 666\n")
    for forget in (lambda: None, linecache.clearcache, linecache.checkcache):
        forget()
        assert inspect.getsource(module.answer) == TEXT
        assert inspect.getsource(module) == TEXT


def test_equal_text_is_one_module_and_other_text_another() -> None:
    assert load_source(TEXT, "kernel") is load_source(TEXT, "kernel")
    assert load_source(TEXT.replace("42", "43"), "kernel").answer() == 43


def test_text_that_fails_leaves_no_half_module_behind() -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_source("x = 1 / 0\n", "broken")
    assert not [name for name in sys.modules if name.startswith("flashtune_rendered_broken")]


SLOW = "import sys\nbegun, go = sys.modules['gate_of_a_test']\nbegun.set()\ngo.wait()\nanswer = 42\n"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Event of the text `SLOW` that began, and the one that lets it end."""
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "gate_of_a_test", (begun, go))
    yield begun, go
    go.set()
    for name in [name for name in sys.modules if name.startswith("flashtune_rendered_slow")]:
        del sys.modules[name]


def test_no_thread_sees_a_module_that_another_one_is_still_running(slow: tuple[threading.Event, threading.Event]) -> None:
    begun, go = slow
    seen: list[object] = []

    def load() -> None:
        seen.append(getattr(load_source(SLOW, "slow"), "answer", "half a module"))

    threads = [threading.Thread(target=load) for _ in range(3)]
    threads[0].start()
    assert begun.wait(600)
    for thread in threads[1:]:
        thread.start()
        thread.join(0.2)
    assert seen == []
    go.set()
    for thread in threads:
        thread.join()
    assert seen == [42] * 3


FORKED = """
import os, sys, threading
from flashtune.core.code.modules import load_source
begun, go = sys.modules["gate_of_a_test"] = threading.Event(), threading.Event()
thread = threading.Thread(target=load_source, args=(sys.argv[1], "slow"))
thread.start()
begun.wait()
if not (child := os.fork()):
    go.set()
    os._exit(load_source(sys.argv[1], "slow").answer)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go.set()
"""


def test_a_forked_child_runs_anew_what_a_thread_of_its_parent_had_begun() -> None:
    words = [sys.executable, "-c", FORKED, SLOW]
    assert subprocess.run(words, capture_output=True, text=True, timeout=600, check=True).stdout.strip() == "42"
