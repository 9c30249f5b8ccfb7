"""`make search`: the main job in a few minutes, for this machine's GPU, or predicted for an A100 where there is none.

Everything stays in the repository's .cache folder, so that a first try leaves no rows in the user's own database. Further arguments
are passed on to `flashtune search`.
"""

import os
import shlex
import sys
from pathlib import Path

from flashtune.tuner.machine import local_gpu

CACHE = Path(__file__).resolve().parent.parent / ".cache"
FALLBACK = "a100"


def command() -> list[str]:
    """The arguments of `flashtune` that this machine runs."""
    gpu = local_gpu()
    known = gpu.target if gpu is not None else None
    name = known.slug if known is not None else FALLBACK
    # On a GPU that the table lacks nothing could be measured for the one that is named.
    predict = ["--predict"] if gpu is not None and known is None else []
    limits = ["--n", "1024,4096,16384", "--dtype", "bf16", "--trials", "16", "--budget", "150s", "--seed", "0"]
    database = os.path.relpath(CACHE / f"{name}.sqlite")
    return ["search", "--gpu-name", name, "--d", "64", *limits, "--db", database, *predict, *sys.argv[1:]]


def main() -> None:
    """Say what is run, and become it."""
    words = command()
    os.environ["FLASHTUNE_CACHE"] = str(CACHE)
    CACHE.mkdir(exist_ok=True)
    print(shlex.join(["flashtune", *words]), flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "flashtune.cli.main", *words])


if __name__ == "__main__":
    main()
