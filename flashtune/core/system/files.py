"""Bounded reads of untrusted files, and atomic writes."""

import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DEEPEST = 32
"""Greatest nesting of JSON that is read; flashtune's own has fewer than ten levels."""


def read_bounded(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; raises OSError, or ValueError if it is larger or no regular file."""
    # Opening a pipe without a writer would block.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def head(path: Path, most: int) -> bytes:
    """Up to `most` bytes of the beginning of a file; empty where there is none, and for a pipe or a device."""
    try:
        # Opening a pipe without a writer would block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(most) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except FileNotFoundError:
        return b""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; raises ValueError for invalid or too deeply nested text."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [found]
    for _ in range(DEEPEST):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _containers(outer)]
        if not level:
            return found
    raise ValueError("it is nested too deeply")


def read_json(path: Path, most: int) -> Any:
    """The value of a JSON file of at most `most` bytes; raises as `read_bounded` and `parse_json` do."""
    return parse_json(read_bounded(path, most))


def _containers(outer: dict[str, Any] | list[Any]) -> list[Any]:
    return [inner for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, dict | list)]


def write_whole(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Write `content` to `path` atomically, so that readers never see half a file; a link there is replaced, never followed.

    Raises OSError and then leaves the folder unchanged. The file has the permissions `mode`, by default those of any new file.
    """
    with aside_of(path) as aside:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(content)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
        os.replace(aside, path)


@contextmanager
def aside_of(path: Path) -> Iterator[Path]:
    """A free name beside `path` for a file, a database or a folder that will be renamed to it; what is there at the end is removed.

    What writers left in the folder that were killed is removed first, unless another one writes in it.
    """
    # The file's own name may be too long to extend.
    aside = path.with_name(f".flashtune-{secrets.token_hex(8)}.new")
    lock = _writing_in(path.parent)
    try:
        yield aside
    finally:
        _remove(aside)
        if lock is not None:
            os.close(lock)


_ASIDE = re.compile(r"\.flashtune-[0-9a-f]{16}\.new(-journal|-wal|-shm)?")
"""Names of `aside_of`, and of what SQLite writes beside one."""

_PAUSES = 100
"""Most times that a writer waits 10 ms for another that cleans the folder."""


def _writing_in(folder: Path) -> int | None:
    """A shared lock on a folder, to be closed, after its leftovers were removed; None where locks don't work there.

    The lock is the folder's, since closing any descriptor of a database ends the locks that SQLite has on it.
    """
    lock = None
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        leftovers = [folder / name for name in os.listdir(folder) if _ASIDE.fullmatch(name)]
        if leftovers and _locked(lock, fcntl.LOCK_EX):
            # Nobody writes here, so nobody needs them.
            for leftover in leftovers:
                _remove(leftover)
        for _ in range(_PAUSES):
            if _locked(lock, fcntl.LOCK_SH):
                break
            time.sleep(0.01)
    except OSError:
        if lock is not None:
            os.close(lock)
        return None
    return lock


def _locked(descriptor: int, kind: int) -> bool:
    """True if the lock was free."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(aside: Path) -> None:
    """Remove a file or folder, and what SQLite left beside it; what can't be removed stays."""
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
        return
    for suffix in ("", "-journal", "-wal", "-shm"):
        with suppress(OSError):
            aside.with_name(aside.name + suffix).unlink()
