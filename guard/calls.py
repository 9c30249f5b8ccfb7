"""Compare what serves the listed calls by tensors, and every launch of theirs, with what was frozen: `python guard/calls.py`.

`--sample` makes few of them, and `--only WORDS` those with these words in their names.
"""

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


def current(every: int = 1, words: str = "") -> dict[str, Any]:
    """Entries of every so many-th call of those with these words in their names."""
    # Imported here, since PyTorch reads its environment when it is imported.
    from call_list import calls
    from driven_calls import entry
    from pretended import pretend

    machine = pretend()
    return {asked.name: entry(machine, **asked.arguments()) for asked in list(calls())[::every] if words in asked.name}


def some(found: dict[str, Any]) -> int:
    """Print how some calls differ from the frozen ones."""
    kept = frozen.read("calls")
    changed = frozen.differences({name: kept[name] for name in found if name in kept}, found)
    print(f"calls: {len(found)} of {len(kept)} entries, {len(changed)} changed", *changed[: frozen.MOST_SHOWN], sep="\n")
    return bool(changed)


def main() -> int:
    """The command: all calls, or some."""
    if "--sample" in sys.argv:
        return some(current(FEW))
    if "--only" in sys.argv:
        return some(current(words=" ".join(sys.argv[sys.argv.index("--only") + 1 :])))
    return frozen.main("calls", __doc__, lambda new: current())


if __name__ == "__main__":
    with own_process():
        sys.exit(main())
