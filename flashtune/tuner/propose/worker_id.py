"""Worker ids of processes that claim work, from which others on the same machine can see whether they are alive."""

import os
import secrets
from pathlib import Path


def name() -> str:
    """Unique worker id: this process's, with a token, since one process may search twice."""
    return "/".join((_machine(), str(os.getpid()), _started(os.getpid()) or "", secrets.token_hex(4)))


def lives_here(who: str) -> bool | None:
    """True while the worker's process is running; None where only its heartbeat can show that.

    None stands for a process on another machine (or in another container), and for another search of this very process.
    """
    machine, _, rest = who.partition("/")
    parts = rest.split("/")
    if machine != _machine() or not machine or len(parts) != 3 or not parts[0].isdigit():
        return None
    if int(parts[0]) == os.getpid() and parts[1] == _started(os.getpid()):
        return None
    return _started(int(parts[0])) == parts[1]


def _machine() -> str:
    """Id of this boot of this machine and its namespace of process ids; empty where the system provides none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}+{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Start time of a process, in the kernel's ticks; None where there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Fields 3 and 22 of proc(5); states Z and X have ended and wait to be collected.
    return None if fields[0] in "ZX" else fields[19]
