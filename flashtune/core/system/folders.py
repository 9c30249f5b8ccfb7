"""Writable cache folders of flashtune and of Triton, or a temporary one of this process where theirs can't be
written."""

import errno
import os
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """`FLASHTUNE_CACHE`, or the user's cache directory; a temporary folder of this process where that can't be used (see `refused`)."""
    wanted = wanted_cache_dir()
    return wanted if refused(wanted) is None else Path(_temporary().name)


def wanted_cache_dir() -> Path:
    """The folder that `cache_dir` uses if it can."""
    return Path(os.path.expanduser(os.environ.get("FLASHTUNE_CACHE") or platformdirs.user_cache_dir("flashtune")))


def refused(folder: Path) -> str | None:
    """The reason why `folder` can't be used; None where it is writable, this user's, and closed to other writers.

    It is created where it is missing. A folder of this user's that others could write to is closed to them, unless it is shared by
    design, as the system's temporary folder is (root's own).
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid():
            return f"{folder} belongs to another user"
        if status.st_mode & stat.S_ISVTX and status.st_mode & stat.S_IWOTH:
            return f"{folder} is shared by all users"
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            folder.chmod(stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    except OSError as error:
        return f"{folder} can't be used ({error.strerror})"
    return unwritable(folder)


ROOM = 1 << 20
"""Bytes that a folder must have room for: a kernel in all stages of its compilation takes a few hundred thousand."""


def unwritable(folder: Path) -> str | None:
    """The reason why `folder`, created where it is missing, can't be written; None where it can. A probe is written, since permission
    bits mean nothing to root, on a read-only file system, or on a full disk."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            if probe.write(bytes(ROOM)) < ROOM:
                return f"{folder} can't be written ({os.strerror(errno.ENOSPC)})"
    except OSError as error:
        why = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror
        return f"{folder} can't be written ({why})"
    return None


def let_triton_write() -> None:
    """Point Triton's cache at a temporary folder of this process where its own can't be written, with one warning; raises
    OSError where that can't be written either."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    wanted = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    why = unwritable(wanted)
    if why is None:
        return
    try:
        private = Path(_temporary().name) / "triton"
    except OSError as error:
        raise OSError(errno.EROFS, f"{why}, and no temporary folder can be made ({error.strerror})") from None
    if (other := unwritable(private)) is not None:
        raise OSError(errno.EROFS, f"{why}, and {other}")
    # Triton reads this variable for each kernel, and child processes inherit it.
    os.environ["TRITON_CACHE_DIR"] = str(private)
    said = f"flashtune: {why}, so Triton's kernels are kept in {private} until this process ends"
    warnings.warn(f"{said}: point TRITON_CACHE_DIR at a folder that can be written", RuntimeWarning, stacklevel=2)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="flashtune-")
