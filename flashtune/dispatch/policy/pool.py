"""Records that may serve problems of one kind, the nearest first."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from flashtune.core.config import Config, KernelSpec
from flashtune.core.nearness import octaves
from flashtune.core.problem import Problem, ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target, targets
from flashtune.db.preference import by_key, preference, raced_for_same_bits
from flashtune.dispatch.policy import losses
from flashtune.dispatch.policy.losses import comparable, kind_of, kinds_apart, torch_runs_alike
from flashtune.templates.family import ConstraintCache, Family, Refit

Rows = Mapping[ProblemKey, Sequence[TuningRecord]]
"""Records of each key, the best first; an implementation may read those of a key on access."""

REFERENCES = 3
"""Number of records that inform about PyTorch's time, from leaving records out (benchmarks/run.py stand_in)."""

_Answer = TypeVar("_Answer")


class Pool:
    """Records that may serve problems of one kind on a GPU, sorted as far as sizes don't matter.

    Keys are sorted first, and the records of one are looked at when its turn comes: hardly any call looks beyond the nearest.
    """

    __slots__ = ("_cached", "_constraints", "_families", "_features", "_known", "_places", "_refits", "_rows", "_target", "_varying")

    def __init__(self, key: ProblemKey, target: Target, records: Rows | Sequence[TuningRecord], families: Mapping[str, Family]) -> None:
        """`key` is that of any problem of the kind."""
        kind = kind_of(key)
        self._target, self._families, self._features = target, families, key.features
        self._refits: dict[tuple[str, Config, KernelSpec], Refit] = {}
        self._constraints: dict[KernelSpec, ConstraintCache] = {}
        self._cached: dict[tuple[int, KernelSpec], tuple[TuningRecord, Any]] = {}
        self._varying = frozenset(name for name, family in families.items() if not family.repeatable)
        self._rows = _by_key(records) if isinstance(records, Sequence) else records
        self._known: dict[ProblemKey, list[_Entry]] = {}
        self._places = {
            known: (kinds_apart(kind_of(known), kind) + self._gpu(known), losses.places(known))
            for known in self._rows
            if comparable(known, key) and _alike(known.gpu, target)
        }

    def exact(self, key: ProblemKey, suited: frozenset[str]) -> list[TuningRecord]:
        """Records of exactly this key, the preferred one first.

        Where a `suited` family isn't repeatable, records of searches for repeatable kernels come last: those weren't compared with PyTorch
        and, in a layer of their own, with none of the faster kernels.
        """
        same = self._of(key)
        return [entry.record for entry in (sorted(same, key=lambda entry: entry.same_bits) if suited & self._varying else same)]

    def near(self, key: ProblemKey, suited: frozenset[str]) -> Iterator[tuple[float, TuningRecord]]:
        """Records of other keys for which all `suited` families were tried, with their distances, the nearest first; of one key as in
        `exact`."""
        n, n_q, heads, work = losses.places(key)
        may_vary = bool(suited & self._varying)
        found = [
            (
                apart
                + abs(places[0] - n)
                + abs(places[1] - n_q)
                + abs(places[2] - heads)
                + abs(places[3] - work)
                + losses.UNALIGNED_BIAS * (losses.unaligned(other) != losses.unaligned(key)),
                other,
            )
            for other, (apart, places) in self._places.items()
            if other != key
        ]
        for apart, others in _nearest_first(found):
            entries = (entry for other in others for entry in self._of(other) if suited <= entry.tried)
            for entry in sorted(entries, key=lambda entry: (entry.ties[0], may_vary and entry.same_bits, *entry.ties[1:])):
                yield apart, entry.record

    def reference_records(self, problem: Problem, key: ProblemKey) -> list[TuningRecord]:
        """Measured records that best inform about PyTorch's time for a problem, REFERENCES at most, of any config."""
        found = [(apart, other) for other in self._places if (apart := losses.torch_distance(other, key)) < math.inf]
        found_records: list[TuningRecord] = []
        for _, others in _nearest_first(found):
            for other in others:
                entries = [entry for entry in self._of(other) if _informs(entry.record, problem)]
                found_records += [min(entries, key=lambda entry: entry.ties).record] if entries else []
            if len(found_records) >= REFERENCES:
                break
        return found_records[:REFERENCES]

    @property
    def lengths(self) -> frozenset[int]:
        """Numbers of keys of its records."""
        return frozenset(key.n for key in self._places)

    def refit(self, family: Family, config: Config, spec: KernelSpec) -> Refit:
        """Cached `Family.refit` on the pool's GPU, which is slow."""
        known = (family.name, config, spec)
        if known not in self._refits:
            checked = self._constraints.setdefault(spec, ConstraintCache(spec, self._target))
            self._refits[known] = family.refit(config, spec, self._target, checked)
        return self._refits[known]

    def cached(self, record: TuningRecord, spec: KernelSpec, answer: Callable[[], _Answer]) -> _Answer:
        """Cached result of `answer` for a record and a kernel."""
        known = self._cached.get((id(record), spec))
        if known is None:
            # A reference to the record keeps its id unique.
            known = self._cached[id(record), spec] = (record, answer())
        found: _Answer = known[1]
        return found

    def _of(self, key: ProblemKey) -> list["_Entry"]:
        """Records of a key, sorted as ties are."""
        if key not in self._places:
            return []
        if key not in self._known:
            records = self._rows[key]
            places = _places(records)
            entries = [
                _Entry(
                    record=record,
                    ties=(key.features != self._features, *_ties(record, places.get(id(record), 0))),
                    tried=_tried(record, self._target, self._families),
                    same_bits=raced_for_same_bits(record, repeatable=record.outcome.template not in self._varying),
                )
                for record in records
            ]
            self._known[key] = sorted(entries, key=lambda entry: entry.ties)
        return self._known[key]

    def _gpu(self, key: ProblemKey) -> float:
        if key.gpu == self._target.slug:
            return 0.0
        other = losses.OTHER_GPU_OF_GRADIENTS if key.direction == "bwd" else losses.OTHER_GPU
        return other + octaves(targets()[key.gpu].sms, self._target.sms)


def _nearest_first(found: list[tuple[float, ProblemKey]]) -> Iterator[tuple[float, list[ProblemKey]]]:
    """Keys by distance, those of equal distance together."""
    found.sort(key=lambda one: one[0])
    for apart, same in itertools.groupby(found, key=lambda one: one[0]):
        yield apart, [key for _, key in same]


def _by_key(records: Iterable[TuningRecord]) -> Rows:
    found: dict[ProblemKey, list[TuningRecord]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record)
    return found


def _informs(record: TuningRecord, problem: Problem) -> bool:
    """True for a record that was measured beside PyTorch, which took the same path as for `problem`."""
    outcome = record.outcome
    timed = outcome.source == "measured" and outcome.measurement is not None and 0.0 < record.median_us < math.inf
    return timed and record.framework_us is not None and torch_runs_alike(record.problem, problem)


class _Entry(NamedTuple):
    """Record of a pool: its sort key among ties, the families that were tried, and True if its search allowed repeatable kernels alone."""

    record: TuningRecord
    ties: tuple[object, ...]
    tried: frozenset[str]
    same_bits: bool


def _ties(record: TuningRecord, place: int) -> tuple[object, ...]:
    """Sort key of records at equal distance; `place` counts the records of its key that are preferred to it."""
    other, outcome = record.key, record.outcome
    time_us = outcome.measurement.median_us if outcome.measurement is not None else math.inf
    sizes = (-other.n, -other.n_q, -other.bh_bucket)
    return (place, record.origin == "shipped", *sizes, time_us, outcome.variant_id, other.gpu, record.origin, outcome.config.as_json())


def group_of(key: ProblemKey) -> tuple[object, ...]:
    """Key shared by problems with one `Pool`: all of the key but the sizes."""
    return key.gpu, kind_of(key)


def _tried(record: TuningRecord, target: Target, families: Mapping[str, Family]) -> frozenset[str]:
    """Families that a search of this record's problem tries."""
    problem, spec = record.problem, record.problem.spec()
    return frozenset(name for name, family in families.items() if family.refusal(problem, spec, target) is None)


def _places(records: Iterable[TuningRecord]) -> dict[int, int]:
    """Number of records of its key that are preferred to each record that has a time, by its id()."""
    found: dict[int, int] = {}
    for known in by_key(record for record in records if record.outcome.measurement is not None).values():
        ranks = [preference(record) for record in known]
        found |= {id(record): ranks.index(rank) for record, rank in zip(known, ranks, strict=True)}
    return found


def _alike(gpu: str, target: Target) -> bool:
    """True for this GPU or another of its architecture."""
    known = targets().get(gpu)
    return gpu == target.slug or (known is not None and known.arch == target.arch)
