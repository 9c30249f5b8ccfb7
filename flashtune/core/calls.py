"""The attention problems that a model called, in a file of JSON: `dispatch.save_calls` writes it, `flashtune search --calls` reads it.

Such a file may come from elsewhere, so it is data: everything in it is checked.
"""

import fcntl
import json
import os
import stat
from collections.abc import Hashable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flashtune.core.errors import EnvironmentProblem, InputError
from flashtune.core.files import parse_json, write_whole
from flashtune.core.problem import DECODE_ROWS, DIRECTIONS, Features, Problem, next_power_of_two

FORMAT = 1

LENGTHS = 4
"""So many lengths of an octave are kept of calls that are no decoding steps."""

MOST_BYTES = 1 << 22
"""No larger file is read or written: thinned calls take some 110 to 150 bytes each."""

_FIELDS = tuple(field.name for field in fields(Problem))
_SIZES = tuple(name for name in _FIELDS if name not in ("dtype", "features", "direction"))


def thinned(problems: Iterable[Problem]) -> list[Problem]:
    """Those that are worth a search each, in an order that doesn't hang on how they were met.

    Of problems with one key of the database (`Problem.key`) the one with the most heads in all batches stays. Of those that differ in
    lengths alone, in the same octaves of queries and keys (up to a power of two), the `LENGTHS` longest stay, and of decoding steps
    (up to `DECODE_ROWS` queries, whose number counts as it is) the longest: a sequence that grows has a problem at each token. What is
    left of two lists together is the same whether they were thinned before or not.
    """
    largest: dict[tuple[Hashable, int, int], Problem] = {}
    for problem in problems:
        key = _kind(problem), problem.n_q, problem.n_kv
        other = largest.setdefault(key, problem)
        if other is not problem:
            largest[key] = max(other, problem, key=_extent)
    alike: dict[tuple[Hashable, int, int], list[Problem]] = {}
    for (kind, n_q, n_kv), problem in largest.items():
        rows = n_q if n_q <= DECODE_ROWS else next_power_of_two(n_q)
        alike.setdefault((kind, rows, next_power_of_two(n_kv)), []).append(problem)
    kept: list[Problem] = []
    for (_, rows, _), some in alike.items():
        kept += sorted(some, key=_extent)[-(1 if rows <= DECODE_ROWS else LENGTHS) :]
    return sorted(kept, key=lambda one: (DIRECTIONS.index(one.direction), one.d, one.d_v, one.dtype, one.gqa_ratio, _extent(one)))


def _kind(problem: Problem) -> Hashable:
    """What of a problem's key isn't a length. The key itself is text in part, which takes its time where there are many."""
    features = problem.features
    if features.window is not None:
        left, right = (side and next_power_of_two(side) for side in features.window)
        features = replace(features, window=(left, right))
    crowd = next_power_of_two(problem.batch * problem.heads)
    return problem.direction, problem.dtype, features, problem.d, problem.d_v, problem.gqa_ratio, crowd


def _extent(problem: Problem) -> tuple[Any, ...]:
    """Orders problems by their lengths, and those of equal lengths by all else that may tell them apart."""
    return problem.n_kv, problem.n_q, problem.batch * problem.heads, problem.heads, repr(problem.features)


def read(path: Path) -> list[Problem]:
    """The problems in a file, each once; raises InputError where there is none, or it is no file of calls, and EnvironmentProblem where it
    can't be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        hint = "call dispatch.save_calls in the process that runs the model, or run it with FLASHTUNE_CALLS naming this file"
        raise InputError(f"there is no file {path}: {hint}") from error
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} can't be read ({_cause(error)}): name a file that dispatch.save_calls wrote") from error
    return _parsed(text, path)


def add(path: Path, problems: Iterable[Problem]) -> None:
    """Put these problems into a file, beside those that it holds, thinned.

    Who adds holds a lock of the file meanwhile, so that processes lose nothing of each other's, and nobody sees half a file. Raises
    InputError where the file is none of calls, and EnvironmentProblem where it can't be written.
    """
    try:
        # Not beside a link to it: what is put in the file's place would replace the link.
        path = Path(os.path.realpath(path))
        while not _added(path, problems):
            pass
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} can't be written ({_cause(error)}): name a file in a folder that can be written to") from error


def _cause(error: OSError | ValueError) -> str:
    """What the system says of a path, or Python of one that no system takes."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _added(path: Path, problems: Iterable[Problem]) -> bool:
    """Whether they were; not where another process has put a new file in the place of the one that this one waited for."""
    with path.open("a+b") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is no file that could hold calls: name another")
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if not os.path.samestat(status, path.stat()):
                return False
        except FileNotFoundError:
            return False
        file.seek(0)
        text = file.read(MOST_BYTES + 1)
        # An empty one was just made, here or by who died before there was more in it.
        known = _parsed(text, path) if text else []
        text = _text(thinned([*known, *problems])).encode()
        if len(text) > MOST_BYTES:
            raise InputError(f"{path} would have more than {MOST_BYTES} bytes with these calls, so it stays as it is: name another file")
        write_whole(path, text, mode=stat.S_IMODE(status.st_mode))
    return True


def _text(problems: Iterable[Problem]) -> str:
    """The file's text, a line for each problem."""
    lines = [json.dumps({**{name: getattr(one, name) for name in _FIELDS}, "features": one.features.as_json()}) for one in problems]
    return f'{{\n"format": {FORMAT},\n"calls": [' + ",".join(f"\n{line}" for line in lines) + "\n]\n}\n"


def _parsed(text: bytes, path: Path) -> list[Problem]:
    """The problems of a file's text."""
    remedy = "name a file that dispatch.save_calls wrote"
    if len(text) > MOST_BYTES:
        raise InputError(f"{path} is no file of calls (it has more than {MOST_BYTES} bytes): {remedy}")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InputError(f"{path} is no file of calls ({error}): {remedy}") from error
    if not isinstance(found, dict) or "format" not in found or not isinstance(found.get("calls"), list):
        raise InputError(f"{path} is no file of calls (it lacks a format or a list of calls): {remedy}")
    if type(found["format"]) is not int or found["format"] != FORMAT:
        raise InputError(
            f"{path} has the format {_shown(found['format'])}, and this flashtune knows {FORMAT}: save the calls with this one"
        )
    problems: dict[Problem, None] = {}
    for place, one in enumerate(found["calls"], 1):
        try:
            problems[_problem(one)] = None
        except InputError as error:
            raise InputError(f"call {place} of {path} makes no sense ({error}): save the calls again, or remove it") from error
    return list(problems)


def _problem(found: Any) -> Problem:
    """One entry; raises InputError for one that `_text` would not write."""
    if not isinstance(found, dict) or found.keys() != set(_FIELDS):
        raise InputError(f"it is {_shown(found)}, and has to have {', '.join(_FIELDS)} alone")
    for name in _SIZES:
        if type(found[name]) is not int:
            raise InputError(f"{name} is {_shown(found[name])}, which is no size")
    for name in ("dtype", "direction"):
        if not isinstance(found[name], str):
            raise InputError(f"{name} is {_shown(found[name])}, which is no name")
    if not isinstance(found["features"], dict):
        raise InputError(f"features are {_shown(found['features'])}, which name none")
    return Problem(**{**found, "features": Features.from_json(found["features"])})


def _shown(value: object) -> str:
    """A value as messages show it: cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
