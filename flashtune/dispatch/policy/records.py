"""Records that may serve problems of one kind, the nearest first."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flashtune.core.gpu.target import Target, targets
from flashtune.core.problems.config import Config, KernelSpec, Variant
from flashtune.core.problems.dtypes import ITEMSIZE, OTHER_16_BITS
from flashtune.core.problems.problem import DECODE_ROWS, Features, ProblemKey, wide_heads
from flashtune.core.records.nearness import OTHER_16_BIT_DTYPE, coordinates, features_apart, mods_in, page_in, sms_apart
from flashtune.core.records.results import Outcome, TuningRecord
from flashtune.core.system.errors import InputError
from flashtune.db.preference import Findings, by_key, claimed, preference, raced_for_same_bits, refutation
from flashtune.templates.expected import likely
from flashtune.templates.family import ConstraintCache, Family, Refit

Rows = Mapping[ProblemKey, Sequence[TuningRecord]]
"""Records of each key, the best first; an implementation may read those of a key on access."""

_Answer = TypeVar("_Answer")


def valid_config(family: Family, outcome: Outcome) -> Config | None:
    """An outcome's config; None where it has other axes or values than today's, as of a version before or after this one."""
    try:
        family.validate(outcome.config)
    except InputError:
        return None
    return outcome.config


class Pool:
    """Records that may serve problems of one kind (`group_of`) on a GPU.

    Keys are sorted first, and the records of one are looked at when its turn comes: hardly any call looks beyond the nearest.
    """

    def __init__(
        self,
        key: ProblemKey,
        target: Target,
        records: Rows | Sequence[TuningRecord],
        families: Mapping[str, Family],
        findings: Findings | None = None,
    ) -> None:
        """`key` is that of any problem of the kind, `findings` are kernels that failed since they were measured."""
        self._findings = findings or {}
        self._target, self._families, self._features = target, families, key.features
        self._refits: dict[tuple[str, Config, KernelSpec], Refit] = {}
        self._constraints: dict[KernelSpec, ConstraintCache] = {}
        self._cached: dict[tuple[int, KernelSpec], tuple[TuningRecord | Family, Any]] = {}
        self._varying = frozenset(name for name, family in families.items() if not family.repeatable)
        self._rows = _rows(records) if isinstance(records, Sequence) else records
        self._known: dict[ProblemKey, list[_Entry]] = {}
        self._tried: dict[int, frozenset[str]] = {}
        self.keys = [one for one in self._rows if comparable(one, key) and _alike(one.gpu, target)]
        self._places = np.array([coordinates(one) for one in self.keys]).reshape(len(self.keys), len(coordinates(key)))
        self._apart = np.array([self._kinds(one, key) for one in self.keys])
        self._unaligned = np.array([unaligned(one) for one in self.keys], dtype=bool)
        self._wide = np.array([wide_heads(one.d, one.d_v) for one in self.keys], dtype=bool)

    def exact(self, key: ProblemKey, suited: frozenset[str]) -> list[TuningRecord]:
        """Records of exactly this key, the preferred one first.

        Where a `suited` family isn't repeatable, records of searches for repeatable kernels come last: those weren't compared with PyTorch
        and, in a layer of their own, with none of the faster kernels.
        """
        same = self._of(key) if key in self._rows and _alike(key.gpu, self._target) else []
        return [entry.record for entry in (sorted(same, key=lambda entry: entry.same_bits) if suited & self._varying else same)]

    def near(self, key: ProblemKey, suited: frozenset[str], *, any_width: bool = False) -> Iterator[TuningRecord]:
        """Records of other keys for which all `suited` families were tried, the nearest first; of one key as in `exact`.

        Wide heads have tiles of their own, so that only with `any_width` records of others are among those of wide ones, and the other way
        round. Those whose bias is read with the call's alignment precede the others.
        """
        if not self.keys:
            return
        may_vary = bool(suited & self._varying)
        apart = self._apart + np.abs(self._places - coordinates(key)).sum(1)
        otherwise = self._unaligned != unaligned(key)
        order = np.lexsort((apart, otherwise))
        order = order.tolist() if any_width else order[self._wide[order] == wide_heads(key.d, key.d_v)].tolist()
        for _, same in itertools.groupby(order, key=lambda place: (otherwise[place], apart[place])):
            entries = (
                entry
                for place in same
                if self.keys[place] != key
                for entry in self._of(self.keys[place])
                if self._has_tried(entry.record, suited)
            )
            for entry in sorted(entries, key=lambda entry: (entry.ties[0], may_vary and entry.same_bits, *entry.ties[1:])):
                yield entry.record

    def near_or_exact(self, key: ProblemKey) -> Iterator[TuningRecord]:
        """Measured records, those of exactly this key first."""
        found = itertools.chain(self.exact(key, frozenset()), self.near(key, frozenset()))
        return (record for record in found if record.outcome.source == "measured" and 0.0 < record.median_us < math.inf)

    def best_of(self, key: ProblemKey, allowed: Callable[[TuningRecord], bool]) -> TuningRecord | None:
        """The preferred one of the `allowed` records of a key."""
        return next((entry.record for entry in self._of(key) if allowed(entry.record)), None)

    def refutation(self, family: Family, config: Config, spec: KernelSpec, record: TuningRecord | None) -> str:
        """Cause of a later failure on this GPU of the kernel to which a record (None: a default) leads; empty where there is none."""
        if not self._findings:
            return ""
        return refutation(self._findings, self._target.slug, Variant(template=family.name, spec=spec, config=config).id, record)

    @property
    def lengths(self) -> frozenset[int]:
        """Numbers of keys of its records."""
        return frozenset(key.n for key in self.keys)

    def refit(self, family: Family, config: Config, spec: KernelSpec) -> Refit:
        """Cached `Family.refit` on the pool's GPU, which is slow."""
        known = (family.name, config, spec)
        if known not in self._refits:
            checked = self._constraints.setdefault(spec, ConstraintCache(spec, self._target))
            self._refits[known] = family.refit(config, spec, self._target, checked)
        return self._refits[known]

    def cached(self, of: TuningRecord | Family, spec: KernelSpec, answer: Callable[[], _Answer]) -> _Answer:
        """Cached result of `answer` for a record, or a family without one, and a kernel."""
        known = self._cached.get((id(of), spec))
        if known is None:
            # A reference to the record keeps its id unique.
            known = self._cached[id(of), spec] = (of, answer())
        found: _Answer = known[1]
        return found

    def _of(self, key: ProblemKey) -> list["_Entry"]:
        """Records of a key, sorted as ties are."""
        if key not in self._known:
            # Candidates of strangers don't serve before they have raced.
            records = [record for record in self._rows[key] if not claimed(record)]
            places = _ranks(records)
            entries = [
                _Entry(
                    record=record,
                    ties=(key.features != self._features, *_ties(record, places.get(id(record), 0))),
                    same_bits=raced_for_same_bits(record, repeatable=record.outcome.template not in self._varying),
                )
                for record in records
            ]
            self._known[key] = sorted(entries, key=lambda entry: entry.ties)
        return self._known[key]

    def _has_tried(self, record: TuningRecord, suited: frozenset[str]) -> bool:
        """True if the search of one of its records tried all `suited` families; which it did is slow to tell, and often not needed."""
        if suited and id(record) not in self._tried:
            self._tried[id(record)] = _tried(record, self._target, self._families)
        return not suited or suited <= self._tried[id(record)]

    def _kinds(self, theirs: ProblemKey, ours: ProblemKey) -> float:
        """Distance of two comparable keys but for their sizes."""
        gpu = 0.0 if theirs.gpu == self._target.slug else sms_apart(targets()[theirs.gpu].sms, self._target.sms)
        return gpu + OTHER_16_BIT_DTYPE * (theirs.dtype != ours.dtype) + features_apart(theirs.features, ours.features)


class _Entry(NamedTuple):
    """Record of a pool: its sort key among ties, and True if its search allowed repeatable kernels alone."""

    record: TuningRecord
    ties: tuple[object, ...]
    same_bits: bool


def group_of(key: ProblemKey) -> tuple[object, ...]:
    """Key shared by problems with one `Pool`."""
    return key.gpu, key.direction, key.n_q <= DECODE_ROWS, key.dtype, key.features


def comparable(theirs: ProblemKey, ours: ProblemKey) -> bool:
    """True where a record of one may serve the other: one pass, both packed or neither, both over pages or neither, both decode steps or
    neither, the same functions, element types of one size."""
    if (page_in(theirs.features) > 0) != (page_in(ours.features) > 0):
        return False
    types = theirs.dtype == ours.dtype or OTHER_16_BITS.get(theirs.dtype) == ours.dtype
    if theirs.direction != ours.direction or (theirs.spread > 0) != (ours.spread > 0) or mods_in(theirs.features) != mods_in(ours.features):
        return False
    return types and (theirs.n_q <= DECODE_ROWS) == (ours.n_q <= DECODE_ROWS)


def unaligned(key: ProblemKey) -> bool:
    """True where a bias has rows of no multiple of 16 bytes, which TMA doesn't accept: they are read at less than a third of the rate."""
    return '"mask":"bias"' in key.features and key.n * ITEMSIZE[key.dtype] % 16 != 0


def same_features(theirs: ProblemKey, ours: ProblemKey) -> bool:
    """True where features are equal but for the diagonal's alignment, which moves the band but compiles to the same code."""
    return theirs.features == ours.features or _but_for_alignment(theirs.features) == _but_for_alignment(ours.features)


@lru_cache(maxsize=4096)
def _but_for_alignment(features: str) -> dict[str, object]:
    return {name: value for name, value in json.loads(features).items() if name != "alignment"}


def differences(record: TuningRecord, ours: ProblemKey) -> tuple[str, ...]:
    """Differences, theirs for ours: `d=128 for 80`."""
    theirs = record.key
    words = [("n", theirs.n, ours.n), ("n_q", theirs.n_q, ours.n_q), ("batch*heads bucket", theirs.bh_bucket, ours.bh_bucket)]
    words = [("d", theirs.d, ours.d), ("d_v", theirs.d_v, ours.d_v), ("heads to a key head", theirs.gqa_ratio, ours.gqa_ratio), *words]
    words.append(("longest over mean", theirs.spread, ours.spread))
    found = [f"{name}={mine} for {wanted}" for name, mine, wanted in words if mine != wanted]
    if theirs.dtype != ours.dtype:
        found.insert(0, f"{theirs.dtype} for {ours.dtype}")
    if theirs.features != ours.features:
        mine, wanted = (Features.from_json(json.loads(key.features)).label() for key in (theirs, ours))
        found.insert(0, f"{mine} for {wanted}")
    return tuple(found)


def time_of(record: TuningRecord) -> str:
    """Time of a record's kernel in words: as it was measured, or the likely range of a predicted one."""
    if record.outcome.source == "measured":
        return f"{record.median_us:.1f} us"
    return str(likely(record.outcome.template, record.key.direction, record.median_us))


def _rows(records: Iterable[TuningRecord]) -> Rows:
    found: dict[ProblemKey, list[TuningRecord]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record)
    return found


def _ties(record: TuningRecord, place: int) -> tuple[object, ...]:
    """Sort key of records at equal distance; `place` counts the records of its key that are preferred to it."""
    other, outcome = record.key, record.outcome
    sizes = (-other.n, -other.n_q, -other.bh_bucket)
    us = outcome.measurement.median_us if outcome.measurement is not None else math.inf
    return (place, record.origin == "shipped", *sizes, us, outcome.variant_id, other.gpu, record.origin, outcome.config.as_json())


def _tried(record: TuningRecord, target: Target, families: Mapping[str, Family]) -> frozenset[str]:
    """Families that a search of this record's problem tries."""
    problem, spec = record.problem, record.problem.spec()
    return frozenset(name for name, family in families.items() if family.refusal(problem, spec, target) is None)


def _ranks(records: Iterable[TuningRecord]) -> dict[int, int]:
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
