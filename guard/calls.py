"""Compare what serves the listed calls by tensors, and every launch of theirs, with what was frozen: `python guard/calls.py`."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import frozen

TORCH = "2.13."
"""PyTorch whose traces of functions, and whose own faults that calls evade, the frozen calls have."""
FEW = 101
"""Every so many-th call is made by `--sample`."""


@contextmanager
def own_process() -> Iterator[None]:
    """Settings before PyTorch is imported: no GPU is seen, and the user's own results and kernels have no say."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "CUDA_VISIBLE_DEVICES": "",
            "FLASHTUNE_CACHE": folder,
            "FLASHTUNE_OWN_DB": f"{folder}/own.sqlite",
            "FLASHTUNE_DB": "",
            "FLASHTUNE_UNMEASURED": "",
        }
        os.environ.pop("TRITON_INTERPRET", None)
        yield


def current(every: int = 1) -> dict[str, Any]:
    """Entries of every so many-th call today."""
    # Imported here, since PyTorch reads its environment when it is imported.
    from call_list import calls
    from driven_calls import entry
    from pretended import pretend

    machine = pretend()
    return {asked.name: entry(machine, **asked.arguments()) for asked in list(calls())[::every]}


def sample() -> int:
    """Print the differences of a sample, which takes some seconds."""
    kept, found = frozen.read("calls"), current(FEW)
    print(*frozen.differences({name: one for name, one in kept.items() if name in found}, found), sep="\n", end="")
    print(f"{len(kept)} frozen, {len(found)} asked", file=sys.stderr)
    return int(any(kept.get(name) != one for name, one in found.items()))


if __name__ == "__main__":
    with own_process():
        sys.exit(sample() if "--sample" in sys.argv else frozen.main("calls", __doc__, lambda new: current()))
