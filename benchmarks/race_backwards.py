"""The backward problems that race_again.py races: those that no row is of, beside plain ones with features and of other head sizes."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from forward_cells import TOKENS, problem_of
from race_twins import measured
from race_work import Work
from searches import shipped

from flashtune.core.config import Config, Value
from flashtune.core.models import models
from flashtune.core.nearness import nearest
from flashtune.core.problem import Features, Problem
from flashtune.core.results import SearchResult
from flashtune.core.target import Target
from flashtune.templates import families, family
from flashtune.templates.family import Family
from flashtune.tuner.propose.space import Candidate

CAUSAL = Features(causal=True)
PLAIN_LENGTHS = (4096, 1024, 16384, 512, 2048)
REPEATABLE = "flash_bwd_hopper_split"
"""The family of deterministic calls and of heads above 128 columns."""

TRAINED = (
    Features(mask="bool"),
    Features(mask="bias"),
    Features(dropout=True),
    Features(causal=True, mask="bool"),
    Features(causal=True, dropout=True),
    Features(causal=True, window=(1024, 0)),
    Features(causal=True, softcap=True),
    Features(causal=True, alibi=True),
    Features(causal=True, sinks=True),
    Features(causal=True, window=(1024, 0), sinks=True),
    Features(causal=True, window=(1024, 0), softcap=True),
    Features(mask="bool", dropout=True),
    Features(mask="bias", dbias=True),
    Features(causal=True, mask="bias", dbias=True),
    Features(causal=True, alibi=True, dslopes=True),
)
"""Features of the backward problems that `--backward` races, beside plain and causal ones."""


def backwards_of(results: Sequence[SearchResult], target: Target) -> Work:
    """Backward problems that have no raced result yet, and the first starts of a family for each; those of repeatable kernels, which
    deterministic calls ask for, beside the others' rows.

    Lengths are the outer loop, so that a kernel is compiled once and found compiled for all others.
    """
    known = {(r.problem.key(target.slug), r.outcomes[0].template) for r in results if r.outcomes and r.problem.direction == "bwd"}
    plain = Features(), CAUSAL
    atomic = [problem_of(d, n, features) for n in PLAIN_LENGTHS for d in (128, 64) for features in plain]
    atomic += [problem_of(d, n, features, dtype="fp16") for n in (4096, 1024) for d in (128, 64) for features in plain]
    atomic += [problem_of(128, n, CAUSAL, sharing=4) for n in PLAIN_LENGTHS[:3]]
    atomic += [problem_of(d, n, features) for n in (4096, 1024) for d in (128, 64) for features in TRAINED]
    split = [problem_of(256, n, features) for n in PLAIN_LENGTHS for features in plain]
    split += [problem_of(256, 4096, features, dtype="fp16") for features in plain]
    split += [problem_of(256, 4096, CAUSAL, sharing=4), *(problem_of(256, 4096, features) for features in (*TRAINED[:7], TRAINED[-3]))]
    split += [problem_of(d, n, features) for n in PLAIN_LENGTHS[:3] for d in (128, 64) for features in plain]
    split += [problem_of(d, 4096, features) for d in (128, 64) for features in (*TRAINED[:5], *TRAINED[-3:])]
    found = []
    for name, problems in (("flash_bwd_hopper", atomic), (REPEATABLE, split)):
        kind = family(name)
        for problem in (replace(problem, direction="bwd") for problem in problems):
            starts = kind.starts(problem.spec(), target)
            # Heads side by side matter to short triangles alone.
            chosen = starts[:3] + starts[len(starts) // 2 :][:1]
            if (problem.key(target.slug), name) not in known:
                found.append((problem, [Candidate(family=kind, config=config) for config in chosen]))
    return sorted(found, key=lambda item: PLAIN_LENGTHS.index(item[0].n_kv))


TRAINED_SIZES = ((80, 80), (96, 96), (72, 72), (192, 192), (160, 160), (192, 128), (40, 40), (112, 112))
"""Head sizes of `--backward-sizes`, those of most models first."""

SMALL_TRAINED = ((32, 32), (16, 16), (64, 128))
"""Others, of vision models' windows, of proteins' pairs, and with wider values."""

PLAIN_TRAINED = ((64, 64), (128, 128), (256, 256))
"""Those that have rows of every length but a short one."""


def backwards_of_sizes(results: Sequence[SearchResult], target: Target, *, most: int) -> Work:
    """Backwards of head sizes that no row is of, of heads that many share, and of short sequences: four of the best of rows of the same
    spec, those of the nearest lengths first, whatever GPU they are of, then `most` starts. A kernel is compiled once for all lengths."""
    stored = [result for result in results if result.problem.direction == "bwd"]
    known = {result.problem.key(target.slug) for result in stored if result.gpu == target.slug}
    problems = [(d, d_v, n, features, 1) for n in (4096, 1024) for d, d_v in TRAINED_SIZES for features in (Features(), CAUSAL)]
    problems += [(d, d, n, CAUSAL, 4) for n in (4096, 1024) for d in (80, 96, 64, 192)]
    problems += [(d, d, n, features, 8) for n in (4096, 1024) for d in (64, 128) for features in (Features(), CAUSAL)]
    problems += [(d, d, 4096, Features(causal=True, window=(300, 0)), 1) for d in (128, 96, 64)]
    problems += [(d, d_v, 256, features, 1) for d, d_v in (*PLAIN_TRAINED, *TRAINED_SIZES) for features in (Features(), CAUSAL)]
    featured = TRAINED[4], TRAINED[2], TRAINED[5], TRAINED[0], TRAINED[1], TRAINED[7], TRAINED[6]
    problems += [(d, d, 4096, features, 1) for features in featured for d in (80, 96)]
    problems += [(d, d_v, 4096, features, 1) for features in (TRAINED[4], TRAINED[2]) for d, d_v in TRAINED_SIZES[3:6]]
    problems += [(d, d_v, n, features, 1) for n in (1024, 256, 4096) for d, d_v in SMALL_TRAINED for features in (Features(), CAUSAL)]
    problems += [(32, 32, n, features, 1) for n in (1024, 256) for features in (TRAINED[0], TRAINED[1], TRAINED[2], TRAINED[12])]
    found: Work = []
    for d, d_v, n, features, sharing in problems:
        # As many heads as are whole groups; of small ones, which an oracle takes long for, no more than their models have.
        heads, batch = (2048 // d // sharing * sharing, TOKENS // n) if d > 32 else (32, TOKENS // n // 4)
        sizes = {"batch": batch, "heads": heads, "kv_heads": heads // sharing, "n_q": n, "n_kv": n, "d": d, "d_v": d_v}
        problem = Problem(**sizes, dtype="bf16", features=features, direction="bwd").seen()
        # The first is the fastest that serves calls which ask for no repeatable bits.
        kinds = (kind for kind in families().values() if kind.direction == "bwd" and kind.supports(problem.spec(), target) is None)
        kind = next(kinds, None)
        if kind is not None and problem.key(target.slug) not in known:
            same = [result for result in stored if result.problem.spec() == problem.spec()]
            same.sort(key=lambda result: abs(math.log2(result.problem.n_kv / n)))
            best = [outcome for result in same for outcome in measured([result])[:2] if outcome.template == kind.name]
            near = dict.fromkeys(kind.completed(outcome.config) for outcome in best)
            valid = [config for config in near if kind.violated(config, problem.spec(), target) is None]
            starts = kind.starts(problem.spec(), target)[:most]
            found.append((problem, [Candidate(family=kind, config=config) for config in dict.fromkeys([*valid[:4], *starts])]))
    return found


TRAINED_LENGTHS = (2048, 1024, 4096)
"""Of one sequence of a model, those of most fine-tuning first."""


def one_sequence() -> Iterator[Problem]:
    """Backwards of one sequence of every model that has as many queries as keys, each once."""
    seen = set()
    for n in TRAINED_LENGTHS:
        for attention in (attention for model in models().values() for attention in model.attentions if attention.n_q is None):
            problem = attention.problem(n=n if attention.causal else min(attention.n), dtype="bf16", batch=1, direction="bwd")
            key = problem.key("any")
            if key not in seen:
                seen.add(key)
                yield problem.seen()


OWN_KEYS = (512, 1024, 2048, 256)
"""Of rows that might do with sums that are programs' own."""

FEW_KEYS: dict[tuple[int, int], list[tuple[int, Features]]] = {
    (77, 77): [(64, CAUSAL), (64, Features(mask="bool")), (64, Features()), (128, CAUSAL), (80, CAUSAL)],
    (128, 128): [
        *((d, features) for d in (64, 128) for features in (Features(), CAUSAL, Features(mask="bool"), Features(dropout=True))),
        (64, Features(mask="bool", dropout=True)),
        (64, Features(mask="bias")),
        (96, Features()),
    ],
    (4096, 77): [*((d, Features()) for d in (64, 40, 80, 128, 72)), (64, Features(mask="bool"))],
    (64, 64): [(32, Features(mask="bias")), (32, Features(mask="bias", dbias=True)), (32, Features()), (64, Features())],
    (1024, 77): [(64, Features()), (80, Features())],
}
"""Of queries and keys, head sizes and features: captions, sentences, patches under captions, windows of patches, fewer patches."""


def few_keys() -> Iterator[Problem]:
    """Backwards of some 8,192 queries of all batches or more, whose keys a tile has."""
    for (n_q, n_kv), kinds in FEW_KEYS.items():
        for d, features in kinds:
            heads, batch = (2048 // d, max(TOKENS // n_q // 2, 4)) if d > 32 else (32, TOKENS // n_q // 2)
            sizes = {"batch": batch, "heads": heads, "kv_heads": heads, "n_q": n_q, "n_kv": n_kv, "d": d, "d_v": d}
            yield Problem(**sizes, dtype="bf16", features=features, direction="bwd").seen()


def of_divided(results: Sequence[SearchResult], target: Target, *, most: int) -> Work:
    """Backwards of one sequence whose tiles of keys are too few for the GPU: with queries divided, then the first without."""
    return _of_resized(one_sequence(), {"divided_queries": True}, {"divided_queries": False}, results, target, most)


def of_own_sums(results: Sequence[SearchResult], target: Target, *, most: int) -> Work:
    """Rows of up to OWN_KEYS keys: their `most` best configs with sums of dQ that are programs' own, whether these are thought to pay or
    not, and then as they are. Then backwards whose keys a tile has, and that no row is of, as `of_divided` takes them."""
    found: Work = []
    kind = family("flash_bwd_hopper")
    for result in sorted(results, key=lambda result: OWN_KEYS.index(result.problem.n_kv) if result.problem.n_kv in OWN_KEYS else 9):
        problem = result.problem
        few_heads = 2 * problem.batch * problem.kv_heads < target.sms
        if result.gpu != target.slug or problem.direction != "bwd" or problem.n_kv > max(OWN_KEYS) or few_heads:
            continue
        spec = problem.spec()
        stored = dict.fromkeys(kind.completed(one.config) for one in measured([result]) if one.template == kind.name)
        usual = [config for config in stored if config["dq_sums"] != "own" and not config["divided_queries"]]
        near = [kind.refitted(config.replace(dq_sums="own", persistent=True), spec, target) for config in usual]
        own = dict.fromkeys(config for config in near if config is not None and config["dq_sums"] == "own")
        if own:
            racing = [*list(own)[:most], *usual[: most // 2]]
            found.append((problem, [Candidate(family=kind, config=config) for config in racing]))
    return found + _of_resized(few_keys(), {"dq_sums": "own"}, {"dq_sums": "registers"}, results, target, most)


def _of_resized(
    problems: Iterable[Problem],
    wanted: Mapping[str, Value],
    usual: Mapping[str, Value],
    results: Sequence[SearchResult],
    target: Target,
    most: int,
) -> Work:
    """Those that no row is of and that `Family.resized` gives the `wanted` values: the `most` best of the nearest rows with these, then the
    first of them with the `usual` ones."""
    known = {result.problem.key(target.slug) for result in results if result.gpu == target.slug}
    found: Work = []
    for problem in problems:
        spec = problem.spec()
        kinds = [kind for kind in families().values() if kind.direction == "bwd" and kind.supports(spec, target) is None]
        if not kinds or problem.key(target.slug) in known:
            continue
        configs = _near_configs(problem, kinds[0], target)[:most] or kinds[0].starts(spec, target)[:most]
        resized = [kinds[0].resized(config, problem, target) for config in configs]
        resized = [config for config in resized if wanted.items() <= config.as_dict().items()]
        if resized:
            racing = dict.fromkeys([*resized, configs[0].replace(**usual)])
            found.append((problem, [Candidate(family=kinds[0], config=config) for config in racing]))
    return found


def _near_configs(problem: Problem, kind: Family, target: Target) -> list[Config]:
    """What the nearest rows stand with for a problem, the nearest first, each once."""
    found: dict[Config, None] = {}
    for _, record in nearest(problem.key(target.slug), shipped()):
        if record.outcome.template == kind.name:
            moved = kind.refitted(kind.completed(record.outcome.config), problem.spec(), target)
            if moved is not None:
                found[moved] = None
    return list(found)
