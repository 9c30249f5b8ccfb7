"""Folders that can be written: for what a search remembers between commands, and for Triton; a private one, which goes when the process
ends, where theirs can't be."""

import errno
import os
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """`FLASHTUNE_CACHE`, or the user's cache directory; a temporary folder of this process where that one is refused (see `refused`)."""
    wanted = wanted_cache_dir()
    return wanted if refused(wanted) is None else Path(_temporary().name)


def wanted_cache_dir() -> Path:
    """The folder that `cache_dir` uses if it can."""
    return Path(os.path.expanduser(os.environ.get("FLASHTUNE_CACHE") or platformdirs.user_cache_dir("flashtune")))


def refused(folder: Path) -> str | None:
    """Why `folder` can't be used, None where it can: it can be written, belongs to this user, and is closed to other writers.

    It is created where it is missing; one of this user's that others could write to is closed to them, but for one that is made to be
    shared, as the system's temporary folder is: that one is root's, too.
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
"""Bytes that a folder must have room for: a kernel in all stages of its compilation takes some hundred thousand."""


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written to `folder`, which is created where it is missing; None where it can. Found out by writing: permission
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
    """Point Triton's cache at a private folder of this process and its children where its own can't be written, with one warning; raises
    OSError where there is none either."""
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
    # Triton reads it anew for each kernel, and so do children.
    os.environ["TRITON_CACHE_DIR"] = str(private)
    said = f"flashtune: {why}, so Triton's kernels are kept in {private} until this process ends"
    warnings.warn(f"{said}: point TRITON_CACHE_DIR at a folder that can be written", RuntimeWarning, stacklevel=2)


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="flashtune-")
