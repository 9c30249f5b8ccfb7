"""`python tests/support/quick_search.py WORDS`: the commands with planted families and stand-ins for the compiler and the interpreter.

FLASHTUNE_TEST_SECONDS is how long a trial takes, of a candidate that compiled.
FLASHTUNE_TEST_TRIALS names a file that gets a line for each such trial.
FLASHTUNE_TEST_LIMIT names a file with a number: while it is there, this process makes no more such trials than that and doesn't end, so
that what a test does to it comes in time on a machine of any speed.
FLASHTUNE_TEST_FINALIZER, where it is set, has the process spend that time in finalizers, where Python drops what a signal raises.
"""

import os
import time
from pathlib import Path

from jinja2 import ChoiceLoader
from planted import planted_family, planted_templates
from stand_ins import quick_compile, quick_interpret

from flashtune import templates
from flashtune.cli.main import main
from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts
from flashtune.templates import rendering
from flashtune.tuner.children import start, tasks
from flashtune.tuner.propose.claims import Claims
from flashtune.tuner.search import evaluation

_predict_us, _finish = evaluation.predict_us, Claims.finish
_tried = 0


def limit() -> float:
    """How many trials this process may make; infinity where nobody says."""
    try:
        return float(Path(os.environ["FLASHTUNE_TEST_LIMIT"]).read_text())
    except (KeyError, FileNotFoundError):
        return float("inf")


class Finalized:
    """Waits when it is let go."""

    def __del__(self) -> None:
        time.sleep(0.5)


def wait() -> None:
    """A moment."""
    if os.environ.get("FLASHTUNE_TEST_FINALIZER"):
        Finalized()
    time.sleep(0.02)


def slowly(config: Config, facts: CompileFacts, problem: Problem, target: Target) -> float:
    """In place of the cost model: with a trial's time, in the process that an interrupt reaches."""
    global _tried
    while _tried >= limit():
        wait()
    _tried += 1
    time.sleep(float(os.environ.get("FLASHTUNE_TEST_SECONDS", "0")))
    if "FLASHTUNE_TEST_TRIALS" in os.environ:
        with Path(os.environ["FLASHTUNE_TEST_TRIALS"]).open("a") as file:
            file.write(f"{problem.label()} {config.items}\n")
    return _predict_us(config, facts, problem, target)


def in_the_end(self: Claims) -> None:
    while limit() < float("inf"):
        wait()
    _finish(self)


def plant() -> None:
    """Put the planted families in place of the real ones."""
    # The stand-ins need no torch.
    start.PRELOADED[:] = ["flashtune.tuner.children.tasks"]
    environment = rendering.environment()
    assert environment.loader is not None
    environment.loader = ChoiceLoader([planted_templates(), environment.loader])
    right, broken = planted_family("right", 40, paths=False), planted_family("broken", 8, paths=False)
    known = {right.name: right, broken.name: broken}
    templates.families = lambda: known
    templates.family = known.__getitem__
    tasks.compile_candidate, tasks.interpret_candidate = quick_compile, quick_interpret
    evaluation.predict_us = slowly
    Claims.finish = in_the_end  # type: ignore[method-assign]


if __name__ == "__main__":
    # Or child processes would import this script.
    del __file__
    plant()
    main(prog_name="flashtune")
