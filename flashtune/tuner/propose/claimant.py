"""Names for processes that claim work, which others on the same machine can tell the living from the dead by."""

import os
import secrets
from pathlib import Path


def name() -> str:
    """A name that no other claimant has: this process's, and a token, since one process may search twice."""
    return "/".join((_machine(), str(os.getpid()), _started(os.getpid()) or "", secrets.token_hex(4)))


def lives_here(who: str) -> bool | None:
    """Whether a claimant's process is running; None where only its beat can tell.

    So it is for a process on another machine (or in another container), and for another search of this very process.
    """
    machine, _, rest = who.partition("/")
    parts = rest.split("/")
    if machine != _machine() or not machine or len(parts) != 3 or not parts[0].isdigit():
        return None
    if int(parts[0]) == os.getpid() and parts[1] == _started(os.getpid()):
        return None
    return _started(int(parts[0])) == parts[1]


def _machine() -> str:
    """This boot of this machine and its space of process ids; empty where the system doesn't tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}+{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; None where there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Fields 3 and 22 of proc(5); Z and X have ended and wait to be collected.
    return None if fields[0] in "ZX" else fields[19]
