"""Trace of a search: what its seconds went to, with FLASHTUNE_TRACE=1."""

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger("flashtune.search")


def trace_times() -> None:
    """Log of each problem's seconds to standard error where FLASHTUNE_TRACE=1, with the milliseconds since the command's start."""
    if os.environ.get("FLASHTUNE_TRACE") == "1" and not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(relativeCreated)d ms: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)


def process_age_s() -> float:
    """Seconds since this process was started, Python's own start included; 0 where the system doesn't tell."""
    try:
        # Field 22 of proc(5): ticks from boot to start.
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
