"""Options that several commands share, their types, and what their values stand for."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import click
from click.shell_completion import CompletionItem

from flashtune.cli.functions import Decorator
from flashtune.core.gpu.target import Target, find_target, targets
from flashtune.core.problems.dtypes import DTYPES, parse_dtype
from flashtune.core.problems.problem import LARGEST_HEAD
from flashtune.core.records.models import models
from flashtune.core.system.errors import InputError

LONGEST = 1 << 24
"""Longest sequence that options accept, in tokens."""


class _Whole(click.IntRange):
    """A whole number in a range; click's own name of the type sounds as if ranges could be given."""

    name = "whole number"


SIZE, HEAD_SIZE = _Whole(1, LONGEST), _Whole(1, LARGEST_HEAD)


class Known(click.ParamType[str]):
    """Text with shell completion of known words, which commas may separate; commands check it themselves."""

    def __init__(self, name: str, known: Callable[[], Iterable[str]]) -> None:
        self.name, self._known = name, known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text as it is."""
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Known words that begin with the typed ones."""
        before, comma, begun = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{word}") for word in self._known() if word.startswith(begun)]


def _templates() -> Iterable[str]:
    from flashtune.templates import every_family

    return every_family()


GPU = Known("gpu", targets)
DTYPE = Known("dtype", lambda: DTYPES)
TEMPLATE = Known("template", _templates)
MODEL = Known("model", models)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines instead of a table.")


def db_option_beside(others: str) -> Decorator:
    """The option of a command that reads one database in place of others."""
    return click.option("--db", "location", metavar="PATH|URL", help=f"Only this database, in place of {others}.")


db_option = db_option_beside("your own and the shipped one")


class ListCommand(click.Command):
    """Command whose repeatable options also take several values at once: `--n 512 1024` is `--n 512 --n 1024`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat the option's name before each further value."""
        repeatable = {name for param in self.params if isinstance(param, click.Option) and param.multiple for name in param.opts}
        spelled: list[str] = []
        current, fresh = None, True
        for word in args:
            if word.startswith("-") and not word.lstrip("-").replace(",", "").isdigit():
                current = word if word in repeatable else None
                fresh = True
            elif current is not None:
                spelled += [] if fresh else [current]
                fresh = False
            spelled.append(word)
        return super().parse_args(ctx, spelled)


FILTERS = {
    "gpu_name": click.option("--gpu-name", type=GPU, metavar="NAME", help="Only records of this GPU."),
    "d": click.option("--d", type=HEAD_SIZE, help="Only this head size."),
    "n": click.option("--n", type=SIZE, help="Only this sequence length."),
    "dtype": click.option("--dtype", type=DTYPE, help="Only this element type."),
}


def record_filters(*names: str) -> Decorator:
    """Decorator with these options of `FILTERS`, passed to the command as `filters` of a database's records."""

    def gathered(kwargs: dict[str, Any]) -> dict[str, Any]:
        gpu, d, n, dtype = (kwargs.pop(name, None) for name in FILTERS)
        slug, parsed = None if gpu is None else find_target(gpu).slug, None if dtype is None else parse_dtype(dtype)
        return {"filters": {"gpu": slug, "d": d, "n": n, "dtype": parsed}}

    return grouped([FILTERS[name] for name in names], gathered)


def grouped(options: Sequence[Decorator], gather: Callable[[dict[str, Any]], dict[str, Any]]) -> Decorator:
    """Decorator with all `options`, whose values `gather` removes from a command's and replaces by its own."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def gathered(**kwargs: Any) -> None:
            command(**gather(kwargs), **kwargs)

        decorated: Callable[..., None] = gathered
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def gpu_of(name: str | None) -> Target:
    """The GPU of this name, or without a name the one in this machine; raises InputError where there is none."""
    if name is not None:
        return find_target(name)
    from flashtune.tuner.machine import local_gpu

    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise InputError("this machine has no GPU that flashtune knows: name one with --gpu-name")
    return gpu.target


def using(location: str | None) -> AbstractContextManager[object]:
    """Context in which dispatch reads the database at `location` alone, or without one those in use."""
    if location is None:
        return nullcontext()
    from flashtune.dispatch import use

    return use(location, alone=True)


def share_of(option: str, text: str) -> float:
    """Share in [0, 1) written as `0.5%` or `0.005`; raises InputError for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else 1.0
    if not share < 1:
        raise InputError(f"{option} {text!r} is no share of a time: write 0.5% or 0.005")
    return share


def seconds_of(text: str) -> float:
    """Seconds of `90s`, `10m`, `1.5h` or a plain number; raises InputError for other texts."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|)", text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise InputError(f"--budget {text!r} is no time: write 90s, 10m or 1h")
    return float(found[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[found[2]]
