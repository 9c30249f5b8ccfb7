"""Settings of a stack of layers: its databases with the states of their files, and options."""

import os
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from flashtune.core.system.errors import InputError
from flashtune.dispatch.state.frozen import Frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a stack of layers: `databases` (paths or URLs, the topmost first) over the user's own results and the shipped ones, or
    `alone`. `seen` are the states of their files when they were put in force: a file that changed has other plans.

    `unmeasured` allows kernels without measurements on the GPU's architecture (None: FLASHTUNE_UNMEASURED decides). `confirm` measures
    keys that have no measured record at their first call (flashtune.dispatch.decisions.confirming). A `plan` decides in place of records.
    """

    databases: tuple[str, ...] = ()
    seen: tuple[Hashable, ...] = ()
    alone: bool = False
    unmeasured: bool | None = None
    confirm: bool = False
    plan: Frozen | None = None


def located(database: str | Path | None) -> str | None:
    """Absolute path of a database, or its URL unchanged."""
    if database is None:
        return None
    if not isinstance(database, str | os.PathLike):
        raise InputError(f"a database is named by its path or URL, not {database!r}")
    text = os.fspath(database)
    return text if isinstance(database, str) and "://" in text else os.path.abspath(os.path.expanduser(text))


def seen_of(database: str | None) -> Hashable:
    """State of a database's file, which changes with each write; the same for every server."""
    if database is None:
        return None
    # The import is slow, and for a layer without a database it isn't needed.
    from flashtune.db.library import state_of

    return state_of(database)
