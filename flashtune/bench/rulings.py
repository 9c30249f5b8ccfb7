"""Rulings of `flashtune referee` on each shape, and the JSON file that it continues; everything in that is checked when it is read.

Importing this needs no PyTorch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashtune.core.problems.problem import Problem
from flashtune.core.records.calls import entry_of, problem_of_entry
from flashtune.core.records.checked import NAME_LENGTH, TEXT_LENGTH, Row, RowError, tidy
from flashtune.core.records.results import PROVIDERS, Fate, Measurement
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.core.system.files import read_json, write_whole
from flashtune.templates.mods.known import NAMED
from flashtune.tuner.replies import Failed, Judged

FORMAT = 1

MOST_BYTES = 1 << 24
"""Bytes of the largest file that is read; a shape takes some 4000."""

NAMES = ("flashtune", "torch", *PROVIDERS)
"""Who is judged: whoever dispatch chooses, PyTorch's own choice, and providers."""

VERDICTS = ("right", "wrong", "refused", "failed", "undecided")
"""Verdicts of `Ruling`; decision 0016 has what makes each."""

_WORDS = {Fate.CORRECT: "right", Fate.CORRECTNESS: "wrong", Fate.CONSTRAINT: "refused"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """The verdict on a provider for a shape, with the versions that decide it: its largest error over the tolerance and the time of its
    whole calls where it is right, the reason where it isn't; `undecided` where the machine was at fault."""

    verdict: str
    versions: Mapping[str, str]
    reason: str = ""
    error: float | None = None
    time: Measurement | None = None

    @classmethod
    def of(cls, reply: Judged | Failed, versions: Mapping[str, str]) -> "Ruling":
        """The ruling by a child's reply."""
        if isinstance(reply, Failed) and reply.inconclusive and reply.fate is not Fate.TIMEOUT:
            return cls(verdict="undecided", versions=versions, reason=tidy(reply.reason))
        verdict = _WORDS.get(reply.fate, "failed") if isinstance(reply, Judged) else "failed"
        return cls(verdict=verdict, versions=versions, reason=tidy(reply.reason), error=reply.error if verdict == "right" else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruled:
    """A shape with its rulings by name; `untimed` says why who is right has no times."""

    problem: Problem
    seed: int
    rulings: Mapping[str, Ruling]
    judged_at: str = ""
    untimed: str = ""

    @property
    def title(self) -> str:
        """The shape in words for tables: functions by their names."""
        p = self.problem
        named = NAMED.get(p.features.mods)
        label = p.label() if named is None else p.label().replace(f"mods-{p.features.mods}", "+".join(filter(None, map(_function, named))))
        return f"{label} b{p.batch}h{p.heads}"

    def stands(self, names: Sequence[str], versions: Mapping[str, Mapping[str, str]], seed: int) -> bool:
        """True where all of these were judged with these versions."""
        known = [self.rulings.get(name) for name in names]
        return seed == self.seed and all(
            one is not None and one.verdict != "undecided" and one.versions == versions[name]
            for name, one in zip(names, known, strict=True)
        )

    @property
    def undecided(self) -> list[str]:
        """Those on whom the machine left no verdict."""
        return [name for name, one in self.rulings.items() if one.verdict == "undecided"]

    @property
    def fastest(self) -> str | None:
        """Who is right and has the lowest median."""
        times = {name: one.time.median_us for name, one in self.rulings.items() if one.time is not None}
        return min(times, key=lambda name: times[name], default=None)


def _function(text: str) -> str:
    """A function's name of `FILE.py:NAME`."""
    return text.rpartition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All shapes judged on one GPU, by `provenance` of the latest run: command, GPU, versions, date."""

    gpu: str
    provenance: Mapping[str, Any]
    ruled: Sequence[Ruled] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        """The document of `--json` and of the file."""
        return {"format": FORMAT, "gpu": self.gpu, "provenance": dict(self.provenance), "rows": [_entry(one) for one in self.ruled]}

    def write(self, path: Path) -> None:
        """Write the file atomically; raises EnvironmentProblem where it can't be written."""
        try:
            write_whole(path, (json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n").encode())
        except OSError as error:
            raise EnvironmentProblem(
                f"{path} can't be written ({error.strerror}): name a file in a folder that can be written to"
            ) from error

    def versions(self) -> dict[str, str]:
        """Every version that decided a ruling, by its part."""
        return {name: version for one in self.ruled for ruling in one.rulings.values() for name, version in ruling.versions.items()}


def now() -> str:
    """This moment, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read(path: Path, gpu: str) -> list[Ruled]:
    """The shapes of an earlier run's file, none where there is no file; raises InputError where it isn't one of this GPU."""
    remedy = "name another file, which is left as it is"
    try:
        found = read_json(path, MOST_BYTES)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(f"--out {path} can't be continued ({error}): {remedy}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("rows"), list):
        raise InputError(f"--out {path} is no file of the referee (it lacks the format {FORMAT} or a list of rows): {remedy}")
    if found.get("gpu") != gpu:
        raise InputError(f"--out {path} has results of another GPU than {gpu}: {remedy}")
    ruled = []
    for place, one in enumerate(found["rows"], start=1):
        try:
            ruled.append(_ruled(one))
        except (InputError, RowError) as error:
            raise InputError(f"--out {path} is damaged (row {place}: {error}): {remedy}") from error
    return ruled


def _entry(one: Ruled) -> dict[str, Any]:
    return {
        "shape": one.title,
        "problem": entry_of(one.problem),
        "seed": one.seed,
        "judged_at": one.judged_at,
        "fastest": one.fastest,
        "untimed": one.untimed,
        "providers": {name: _ruling_entry(ruling) for name, ruling in one.rulings.items()},
    }


def _ruling_entry(ruling: Ruling) -> dict[str, Any]:
    time = (
        None
        if ruling.time is None
        else {name: value if name == "samples" else round(value, 3) for name, value in asdict(ruling.time).items()}
    )
    return {
        "verdict": ruling.verdict,
        "reason": ruling.reason,
        "error": ruling.error,
        "time": time,
        "versions": dict(ruling.versions),
    }


def _ruled(found: Any) -> Ruled:
    """A row of the file; raises InputError or RowError for one that `_entry` would not write."""
    row = _row("row", found, ("problem", "seed", "judged_at", "untimed", "providers"))
    named = row.values["providers"]
    if not isinstance(named, dict) or not named.keys() <= set(NAMES):
        raise RowError("providers", "aren't an object of the names of providers")
    return Ruled(
        problem=problem_of_entry(row.values["problem"]),
        seed=row.integer("seed", 0),
        rulings={name: _ruling(one) for name, one in named.items()},
        judged_at=row.text("judged_at", limit=NAME_LENGTH),
        untimed=row.text("untimed", limit=TEXT_LENGTH, empty=True),
    )


def _ruling(found: Any) -> Ruling:
    row = _row("ruling", found, ("verdict", "reason", "error", "time", "versions"))
    versions = row.values["versions"]
    if not isinstance(versions, dict):
        raise RowError("versions", "aren't an object")
    return Ruling(
        verdict=row.one_of("verdict", VERDICTS),
        versions={name: Row(versions).text(name, limit=NAME_LENGTH) for name in versions},
        reason=row.text("reason", limit=TEXT_LENGTH, empty=True),
        error=None if row.missing("error") else row.real("error", zero=True),
        time=None if row.missing("time") else _time(row.values["time"]),
    )


def _time(found: Any) -> Measurement:
    names = ("median_us", "q10_us", "q90_us", "min_us")
    row = _row("time", found, (*names, "samples"))
    return Measurement(**{name: row.real(name) for name in names}, samples=row.integer("samples", 1))


def _row(what: str, found: Any, names: Sequence[str]) -> Row:
    """An object with at least these names; raises RowError for another value."""
    if not isinstance(found, dict) or not found.keys() >= set(names):
        raise RowError(what, f"is no object of {', '.join(names)}")
    return Row(found)
