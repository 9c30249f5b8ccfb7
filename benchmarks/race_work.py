"""What race_again.py races beside the rows of this GPU: another GPU's rows here, and attentions of models that no row is of."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from forward_cells import TOKENS
from forward_report import LONG
from searches import first_candidates, shipped
from tune import wanting

from flashtune.core.problem import Features, Problem
from flashtune.core.results import SearchResult
from flashtune.core.target import Target
from flashtune.dispatch.policy import choose, torch_has
from flashtune.templates import families
from flashtune.tuner.space import Candidate

Candidates = list[Candidate] | Callable[[], list[Candidate]]
"""Those that race for a problem, or what finds them, which takes a while, in the process that checks them."""

Work = list[tuple[Problem, Candidates]]
"""Problems with their candidates."""

PLAIN_SIZES = (64, 128, 256)
"""Head sizes of plain problems in their order."""


def importance(problem: Problem) -> tuple[int, int]:
    """What sorts problems, those first that most calls are near to: plain ones in bf16 by head size, then in fp16, decoding, plain
    gradients, and all else."""
    p, f = problem, problem.features.as_json().keys() - {"causal"}
    plain = not f and p.d == p.d_v and p.d in PLAIN_SIZES and p.gqa_ratio == 1 and p.n_q == p.n_kv
    place = PLAIN_SIZES.index(p.d) if p.d in PLAIN_SIZES else len(PLAIN_SIZES)
    if p.n_q == 1:
        return 2, place
    if p.direction == "bwd":
        return (3 if plain else 5), place
    if plain and p.dtype in ("bf16", "fp16"):
        return (0 if p.dtype == "bf16" else 1), place
    return 4, place


def of_another_gpu(
    results: Sequence[SearchResult], gpu: str, target: Target, candidates_of: Callable[[SearchResult], list[Candidate]]
) -> Work:
    """The problems of another GPU's rows that have no row of this one, the most important first, with what was best there."""
    known = {result.problem.key(target.slug) for result in results if result.gpu == target.slug}
    theirs = [result for result in results if result.gpu == gpu and result.problem.key(target.slug) not in known]
    return [(result.problem, candidates_of(result)) for result in sorted(theirs, key=lambda result: importance(result.problem))]


def of_models(target: Target, *, most: int, seed: int) -> Work:
    """Attentions of models that have no row, with LONG keys and queries or more or where torch serves, and their decoding steps: those of
    most worth first (`tune.wanting`), then those whose stand-ins gained least over the framework. What races is what a search of each
    would try first."""
    records, known = shipped(), families()
    found: list[tuple[float, float, Problem]] = []
    for problem, worth in wanting(records=records):
        choice = choose(problem, target, records, known, framework_serves=torch_has(problem))
        if problem.n_q == 1 or min(problem.n_q, problem.n_kv) >= LONG or choice.family is None:
            row = choice.record
            gain = 1.0 if row is None or row.relative_time is None else 1 / row.relative_time
            found.append((-round(worth, 2), gain, problem))
    found.sort(key=lambda one: one[:2])
    return [(problem, partial(first_candidates, problem, target, count=most, seed=seed)) for *_, problem in found]


SIZES = ((40, 40), (72, 72), (80, 80), (96, 96), (192, 128), (160, 160), (192, 192), (112, 112))
"""Head sizes of K and of V that models have beside those of plain cells."""

WINDOW, MASK = Features(causal=True, window=(1024, 0)), Features(mask="bool")


def of_sizes(target: Target, results: Sequence[SearchResult], *, most: int, seed: int) -> Work:
    """Problems of other head sizes that have no row: full and causal at two lengths, then with a window and with a mask, then decoding."""
    known = {result.problem.key(target.slug) for result in results}
    plain = [(n, features) for n in (4096, 1024) for features in (Features(), Features(causal=True))]
    wanted = [_of_size(d, d_v, n, features) for n, features in [*plain, (4096, WINDOW), (2048, MASK)] for d, d_v in SIZES]
    steps = [(d, d_v, sharing) for d, d_v in ((192, 128), (96, 96), (64, 64), (128, 128)) for sharing in (1, 4)]
    wanted += [
        replace(_of_size(d, d_v, n, Features()), batch=8, heads=32, kv_heads=32 // sharing, n_q=1)
        for d, d_v, sharing in steps
        for n in (512, 4096)
    ]
    return [(p, partial(first_candidates, p, target, count=most, seed=seed)) for p in wanted if p.key(target.slug) not in known]


def _of_size(d: int, d_v: int, n: int, features: Features) -> Problem:
    """As many tokens as plain cells have, in 16 heads."""
    return Problem(batch=TOKENS // n, heads=16, kv_heads=16, n_q=n, n_kv=n, d=d, d_v=d_v, dtype="bf16", features=features)
