"""Configs for packed sequences: of their own records, of dense ones, or families' defaults, and the reasons."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from flashtune.core.config import Config, Variant, settles
from flashtune.core.nearness import FEATURE, distance
from flashtune.core.problem import Problem
from flashtune.core.results import Outcome, TuningRecord
from flashtune.core.target import Target
from flashtune.dispatch.choose import Kind
from flashtune.dispatch.context import Memo
from flashtune.dispatch.kernels import variant as variant_of
from flashtune.dispatch.records import Pool, differences, valid_config
from flashtune.dispatch.resolve import Explanation, said_of
from flashtune.templates import families
from flashtune.templates.family import Family

MOST_RECORDS = 64
"""Records of a kind that are looked at for one whose config fits packed sequences."""


class Chosen(NamedTuple):
    """A family with a config and the record that gave it, None for the family's default; `fallback` is the config of the kernel that serves
    where the softmax is mispredicted, where the record's search measured one."""

    family: Family
    config: Config
    record: TuningRecord | None = None
    fallback: Config | None = None


def configs_of(memo: Memo, problem: Problem, target: Target, *, tuned: bool) -> Iterator[Chosen]:
    """Families with configs: of a record of packed sequences nearer than any dense one can be, of the nearest dense record, moved to what
    packed sequences allow, of a predicted record of the key where unmeasured ones are allowed, then their defaults."""
    spec = problem.spec()
    able = {name: one for name, one in families().items() if one.refusal(problem, spec, target) is None}
    likes = [(problem, "measured"), (dense_of(problem), "measured"), *[(problem, "predicted")] * memo.unmeasured]
    for like, source in likes if tuned else ():
        key = like.key(target.slug)
        pool = memo.pool(key, target)
        predicted = (one for one in pool.exact(key, frozenset()) if one.outcome.source == "predicted")
        for record in itertools.islice(pool.near_or_exact(key) if source == "measured" else predicted, MOST_RECORDS):
            if like is problem and distance(record.key, key) >= FEATURE:
                break
            family = able.get(record.outcome.template)
            if family is None or (config := _moved(pool, family, record, record.outcome, problem, target)) is None:
                continue
            other = record.fallback if settles(config) else None
            fallback = None if other is None else _moved(pool, family, record, other, problem, target)
            yield Chosen(family, config, record, None if fallback is None or settles(fallback) else fallback)
            break
    for family in able.values():
        yield Chosen(family, family.default(spec, target))


def _moved(pool: Pool, family: Family, record: TuningRecord, outcome: Outcome, problem: Problem, target: Target) -> Config | None:
    """The config of an outcome of a record, moved to what a problem allows; None where it can't be."""
    spec = problem.spec()
    if outcome.template != family.name or (tuned := valid_config(family, outcome)) is None:
        return None
    config = pool.refit(family, tuned, spec).config
    if config is None:
        return None
    resized = family.resized(config, problem, target)
    config = resized if family.violated(resized, spec, target) is None else config
    return None if pool.refutation(family, config, spec, record) else config


def dense_of(problem: Problem) -> Problem:
    """A dense problem as large as the longest of packed sequences."""
    assert problem.lengths is not None, "packed sequences have lengths"
    longest, features = problem.lengths.longest, replace(problem.features, packed=False)
    return replace(problem, n_q=max(1, problem.n_q * longest // problem.n_kv), n_kv=longest, features=features, lengths=None)


def explained_sequences(memo: Memo, problem: Problem, target: Target) -> Explanation:
    """Explanation for a problem of packed sequences, by the records alone."""
    for chosen in configs_of(memo, problem, target, tuned=True):
        variant = variant_of(chosen.family, problem.spec(), chosen.config)
        return explanation(problem, target.slug, variant, chosen.record, chosen.fallback)
    return Explanation(
        kind="framework", reason=f"no kernel takes {problem.label()}, so each sequence is a call of its own", gpu=target.slug
    )


def explanation(problem: Problem, gpu: str, variant: Variant, record: TuningRecord | None, fallback: Config | None = None) -> Explanation:
    """Explanation of a kernel with a record's config, or its family's default."""
    key = problem.key(gpu)
    kind: Kind = "default"
    reason, apart = "packed sequences take the config of the family", tuple[str, ...]()
    if record is not None and record.key.spread:
        kind = "exact" if record.key == key else "near_n" if record.key.gpu == gpu else "near_gpu"
        reason = "a record of packed sequences like these" if kind == "exact" else "the nearest record of packed sequences"
        apart = differences(record, key)
    elif record is not None:
        kind, reason, apart = "stand_in", "packed sequences take the config of the nearest dense record", ("packed=False for True",)
    return Explanation(
        kind=kind,
        reason=reason,
        gpu=gpu,
        key=None if gpu == "cpu" else key,
        template=variant.template,
        variant_id=variant.id,
        config=variant.config,
        differences=apart,
        twin=fallback,
        **said_of(record),
    )
