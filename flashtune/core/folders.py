"""The folder for what a search remembers between commands: the user's alone, or a private one that goes when the process ends."""

import os
import stat
import tempfile
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
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} can't be written"


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="flashtune-")
