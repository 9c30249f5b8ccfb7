"""Bounded reads of untrusted files, and atomic writes."""

import json
import os
import secrets
import stat
from contextlib import suppress
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
    # The file's own name may be too long to extend.
    aside = path.with_name(f".flashtune-{secrets.token_hex(8)}.new")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(content)
            if mode is not None:
                os.fchmod(file.fileno(), mode)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
