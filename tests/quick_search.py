"""`python tests/quick_search.py WORDS`: the command line with the planted families and stand-ins for the compiler and the interpreter.

FLASHTUNE_TEST_SECONDS is how long a candidate takes to compile.
"""

import os
import time

from jinja2 import ChoiceLoader
from planted import planted_family, planted_templates, quick_compile, quick_interpret

from flashtune import templates
from flashtune.cli.main import main
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates import rendering
from flashtune.tuner import tasks
from flashtune.tuner.replies import Compiled, Failed
from flashtune.tuner.tasks import Source


def slow_compile(source: Source, problem: Problem, target: Target) -> Compiled | Failed:
    time.sleep(float(os.environ.get("FLASHTUNE_TEST_SECONDS", "0")))
    return quick_compile(source, problem, target)


def plant() -> None:
    """Put the planted families in place of the real ones."""
    environment = rendering.environment()
    environment.loader = ChoiceLoader([planted_templates(), environment.loader])
    right, broken = planted_family("right", 40, paths=False), planted_family("broken", 8, paths=False)
    known = {right.name: right, broken.name: broken}
    templates.families = lambda: known
    templates.family = known.__getitem__
    tasks.compile_candidate, tasks.interpret_candidate = slow_compile, quick_interpret


if __name__ == "__main__":
    plant()
    main(prog_name="flashtune")
