"""What race_again.py races beside the rows of this GPU: another GPU's rows here, and attentions of models that no row is of."""

from collections.abc import Callable, Sequence
from functools import partial

from forward_report import LONG
from searches import first_candidates, shipped
from tune import wanting

from flashtune.core.problem import Problem
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
    """Attentions of models that have no row, with LONG keys and queries or more, and their decoding steps: those of most worth first
    (`tune.wanting`), then those whose stand-ins gained least over the framework. What races is what a search of each would try first."""
    records, known = shipped(), families()
    found: list[tuple[float, float, Problem]] = []
    for problem, worth in wanting(records=records):
        if problem.n_q == 1 or min(problem.n_q, problem.n_kv) >= LONG:
            row = choose(problem, target, records, known, framework_serves=torch_has(problem)).record
            gain = 1.0 if row is None or row.relative_time is None else 1 / row.relative_time
            found.append((-round(worth, 2), gain, problem))
    found.sort(key=lambda one: one[:2])
    return [(problem, partial(first_candidates, problem, target, count=most, seed=seed)) for *_, problem in found]
