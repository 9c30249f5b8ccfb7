"""Options `--score-mod` and `--mask-mod`: a mask and a score as code, by the user's own files and names."""

from collections.abc import Callable

import click

from flashtune.core.problems.problem import Problem

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

FUNCTIONS: tuple[Decorator, ...] = tuple(
    click.option(f"--{what}-mod", metavar="FILE.py:NAME", help=f"A {what} as code: this function of this file, which is imported.")
    for what in ("score", "mask")
)


def with_functions(problem: Problem, score_mod: str | None, mask_mod: str | None) -> Problem:
    """The problem with the hash of these functions, if there are any; raises InputError for what can't be traced."""
    if score_mod is None and mask_mod is None:
        return problem
    from flashtune.templates.mods.known import Named
    from flashtune.tuner import functions

    return functions.with_functions(problem, Named(score_mod or "", mask_mod or ""))


def register_functions(score_mod: str | None, mask_mod: str | None) -> None:
    """Trace these functions, if there are any, so that this process finds them by their hashes; raises InputError for what can't be."""
    if score_mod or mask_mod:
        from flashtune.templates.mods.known import Named
        from flashtune.tuner.functions import register

        register([Named(score_mod or "", mask_mod or "")])
