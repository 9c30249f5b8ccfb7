"""Choices for packed sequences: the order in which records and defaults serve, by the rules of `choose.Ranking`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from flashtune.core.nearness import FEATURE, distance
from flashtune.core.problem import Problem, ProblemKey
from flashtune.core.results import Source, TuningRecord
from flashtune.core.target import Target
from flashtune.dispatch.choose import Choice, Fit, Kind, Pool, Ranking, Refusal
from flashtune.templates.family import Family

MOST_RECORDS = 64
"""Records of a step that are looked at for one that serves."""

PACKED: dict[Kind, str] = {
    "exact": "a record of packed sequences like these",
    "predicted": "a predicted record of packed sequences like these, which were not measured",
    "near_n": "the nearest record of packed sequences",
    "near_gpu": "the nearest record of packed sequences",
    "stand_in": "packed sequences take the config of the nearest dense record",
    "default": "packed sequences take the config of the family",
}
"""Reasons for choices of packed sequences."""

Records = Callable[[Problem], Pool | Sequence[TuningRecord]]
"""Records that may serve problems like one."""


def rank_packed(
    problem: Problem, target: Target, records: Records, families: Mapping[str, Family], *, unmeasured: bool = False
) -> Iterator[Choice | Refusal]:
    """Ways to serve packed sequences, best first, each by one record: one of packed sequences nearer than any dense one can be, the nearest
    dense one, and a predicted one of the key where `unmeasured` ones may serve; then the families' defaults, and PyTorch."""
    spec, key = problem.spec(), problem.key(target.slug)
    able = {name: family for name, family in families.items() if family.refusal(problem, spec, target) is None}
    steps: list[tuple[Problem, Source, Callable[[TuningRecord], bool]]] = [
        (problem, "measured", lambda record: distance(record.key, key) < FEATURE),
        (dense_of(problem), "measured", lambda record: True),
        (problem, "predicted", lambda record: record.key == key),
    ]
    for like, source, allowed in steps[: 2 + unmeasured]:
        place = like.key(target.slug)
        ranking = Ranking(problem, target, key, _pool(records(like), place, target, able), able)
        if (fit := first(ranking, place, source, allowed)) is not None:
            choice = ranking.by(fit, "", alike=like is problem)
            yield choice._replace(note=PACKED[choice.kind])
    for family in able.values():
        yield ranking.default(family, family.default(spec, target), PACKED["default"])
    why = f"no kernel takes {problem.label()}, so each sequence is a call of its own"
    yield Choice(kind="framework", spec=spec, note=why)


def first(ranking: Ranking, like: ProblemKey, source: Source, allowed: Callable[[TuningRecord], bool]) -> Fit | None:
    """The nearest of the `allowed` records of problems like a key that serves."""
    every = chain(ranking.pool.exact(like, frozenset()), ranking.pool.near(like, frozenset()))
    fits = map(ranking.fit, islice((one for one in every if one.outcome.source == source and allowed(one)), MOST_RECORDS))
    return next((fit for fit in fits if isinstance(fit, Fit)), None)


def dense_of(problem: Problem) -> Problem:
    """A dense problem as large as the longest of packed sequences."""
    assert problem.lengths is not None, "packed sequences have lengths"
    longest, features = problem.lengths.longest, replace(problem.features, packed=False)
    return replace(problem, n_q=max(1, problem.n_q * longest // problem.n_kv), n_kv=longest, features=features, lengths=None)


def _pool(records: Pool | Sequence[TuningRecord], key: ProblemKey, target: Target, families: Mapping[str, Family]) -> Pool:
    return records if isinstance(records, Pool) else Pool(key, target, records, families)
