"""A database for a GPU that isn't there: candidates are compiled for it, checked in Triton's interpreter and ranked by a cost model."""

import tempfile
from pathlib import Path

from flashtune import dispatch
from flashtune.cli.main import main
from flashtune.core.problems.problem import Features, Problem


def prepare(database: Path) -> None:
    """Search for an A100 and print what would run calls there."""
    # In a shell: flashtune search --gpu-name a100 --d 64 --n 1024 --causal --dtype bf16 --predict --trials 2 --db tuned.sqlite
    # Two trials are enough for an example; the default is 60.
    words = "--d 64 --n 1024 --causal --dtype bf16 --heads 12 --batch 4 --predict --trials 2 --seed 1"
    main(["search", "--gpu-name", "a100", *words.split(), "--db", str(database)], standalone_mode=False)

    # Whoever has an A100 can lay it under their calls. Predicted rows say so, and any measured one goes before them.
    problem = Problem(batch=4, heads=12, kv_heads=12, n_q=1024, n_kv=1024, d=64, d_v=64, dtype="bf16", features=Features(causal=True))
    with dispatch.use(database, alone=True, unmeasured=True):
        print(dispatch.explain_problem(problem, "a100").reason)


if __name__ == "__main__":  # a search's worker processes import this file
    prepare(Path(tempfile.mkdtemp()) / "tuned.sqlite")
