"""JSON file of the attention problems that a model called: `dispatch.save_calls` writes it, `flashtune search --calls` reads it.

Such a file may come from another machine, so everything in it is checked.
"""

import fcntl
import json
import os
import stat
from collections.abc import Hashable, Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from flashtune.core.problems.lengths import Lengths, spread
from flashtune.core.problems.problem import DECODE_ROWS, DIRECTIONS, Features, Problem, next_power_of_two
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.core.system.files import parse_json, write_whole
from flashtune.core.system.words import shown

FORMAT = 1

LENGTHS = 4
"""Lengths per octave that are kept of calls that are no decoding steps."""

MOST_BYTES = 1 << 22
"""Bytes of the largest file that is read or written; a thinned call takes 110 to 150 bytes."""

_FIELDS = tuple(field.name for field in fields(Problem) if field.name != "lengths")
_SIZES = tuple(name for name in _FIELDS if name not in ("dtype", "features", "direction"))


def thinned(problems: Iterable[Problem]) -> list[Problem]:
    """The problems that are worth a search each, in an order that doesn't depend on the order of calls.

    Of problems with one key of the database (`Problem.key`) the one with the most heads in all batches stays. Of those that differ in
    lengths alone, in the same octaves of queries and keys (up to a power of two), the `LENGTHS` longest stay, and of decoding steps
    (up to `DECODE_ROWS` queries, whose number counts as it is) the longest: a sequence that grows has a problem at each token. Thinning
    two lists first doesn't change the result of thinning them together.
    """
    largest: dict[tuple[Hashable, int, int], Problem] = {}
    for problem in problems:
        key = kind_of(problem), problem.n_q, problem.n_kv
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


def kind_of(problem: Problem) -> Hashable:
    """The parts of a problem's key but its lengths; cheaper than the key itself, which is text in part."""
    features, lengths = problem.features, problem.lengths
    if features.window is not None:
        left, right = (side and next_power_of_two(side) for side in features.window)
        features = replace(features, window=(left, right))
    features = replace(features, page=next_power_of_two(features.page)) if features.page else features
    crowd = next_power_of_two(problem.batch * problem.heads)
    uneven = 0 if lengths is None else spread(lengths.longest, problem.batch, problem.batch * problem.n_kv)
    return problem.direction, problem.dtype, features, problem.d, problem.d_v, problem.gqa_ratio, crowd, uneven


def _extent(problem: Problem) -> tuple[Any, ...]:
    """The order of problems: by lengths, then by everything else that may differ."""
    return problem.n_kv, problem.n_q, problem.batch * problem.heads, problem.heads, repr((problem.features, problem.lengths))


def read(path: Path) -> list[Problem]:
    """The problems in a file, each once; raises InputError where it is missing or no file of calls, and EnvironmentProblem where it
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
    """Add these problems to those in a file, thinned.

    A lock of the file keeps concurrent processes from losing each other's problems, and readers never see half a file. Raises
    InputError where the file is none of calls, and EnvironmentProblem where it can't be written.
    """
    try:
        # The new file would replace a link, so the link is resolved first.
        path = Path(os.path.realpath(path))
        while not _added(path, problems):
            pass
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"{path} can't be written ({_cause(error)}): name a file in a folder that can be written to") from error


def _cause(error: OSError | ValueError) -> str:
    """The system's message about a path, or Python's about an impossible one."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _added(path: Path, problems: Iterable[Problem]) -> bool:
    """True if the problems were added; False where another process replaced the file while this one waited for its lock."""
    with path.open("a+b") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is no regular file: name another")
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if not os.path.samestat(status, path.stat()):
                return False
        except FileNotFoundError:
            return False
        file.seek(0)
        text = file.read(MOST_BYTES + 1)
        # An empty file was just created, here or by a process that ended before it wrote.
        known = _parsed(text, path) if text else []
        text = _text(thinned([*known, *problems])).encode()
        if len(text) > MOST_BYTES:
            raise InputError(f"{path} would have more than {MOST_BYTES} bytes with these calls, so it stays as it is: name another file")
        write_whole(path, text, mode=stat.S_IMODE(status.st_mode))
    return True


def _text(problems: Iterable[Problem]) -> str:
    """The file's text, a line for each problem."""
    lines = [json.dumps(entry_of(one)) for one in problems]
    return f'{{\n"format": {FORMAT},\n"calls": [' + ",".join(f"\n{line}" for line in lines) + "\n]\n}\n"


def entry_of(problem: Problem) -> dict[str, Any]:
    """A problem as an object; only those of packed sequences have lengths."""
    found = {name: getattr(problem, name) for name in _FIELDS} | {"features": problem.features.as_json()}
    return found if problem.lengths is None else {**found, "lengths": asdict(problem.lengths)}


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
        raise InputError(f"{path} has the format {shown(found['format'])}, and this flashtune knows {FORMAT}: save the calls with this one")
    problems: dict[Problem, None] = {}
    for place, one in enumerate(found["calls"], 1):
        try:
            problems[problem_of_entry(one)] = None
        except InputError as error:
            raise InputError(f"call {place} of {path} is invalid ({error}): save the calls again, or remove it") from error
    return list(problems)


def problem_of_entry(found: Any) -> Problem:
    """One entry; raises InputError for one that `_text` would not write."""
    if not isinstance(found, dict) or found.keys() - {"lengths"} != set(_FIELDS):
        raise InputError(f"it is {shown(found)}, not an object of {', '.join(_FIELDS)}")
    for name in _SIZES:
        if type(found[name]) is not int:
            raise InputError(f"{name} is {shown(found[name])}, not an integer")
    for name in ("dtype", "direction"):
        if not isinstance(found[name], str):
            raise InputError(f"{name} is {shown(found[name])}, not a string")
    if not isinstance(found["features"], dict):
        raise InputError(f"features are {shown(found['features'])}, not an object")
    return Problem(**{**found, "features": Features.from_json(found["features"]), "lengths": _lengths(found.get("lengths"))})


def _lengths(found: Any) -> Lengths | None:
    """The lengths of an entry; None where it has none."""
    if found is None:
        return None
    names = {field.name for field in fields(Lengths)}
    if not isinstance(found, dict) or found.keys() != names or not isinstance(found["law"], str) or type(found["longest"]) is not int:
        raise InputError(f"lengths are {shown(found)}, not an object of a law and the longest")
    return Lengths(**found)
