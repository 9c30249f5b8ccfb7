"""Which decoding steps race_again.py races with `--steps`: each head size and sharing of keys, few heads over many keys and the reverse."""

from functools import partial
from itertools import cycle

from race_work import Work, first_to_race
from random_shapes import HEAD_SIZES

from flashtune.core.problem import Problem
from flashtune.core.results import SearchResult
from flashtune.core.target import Target

SHARING = (4, 1, 2, 8)
"""Query heads to a key head, the most common first."""

SIZES = (
    ((256, 768), (384, 512), (640, 1024)),
    ((1024, 320), (1536, 224), (2048, 144)),
    ((4096, 96), (6144, 72), (10240, 40)),
)
"""Keys, and key heads in all batches: a pair of each kind in turn."""


def step_shapes() -> list[Problem]:
    """Steps in bf16, three of each head size and sharing."""
    turns = [cycle(kind) for kind in SIZES]
    found = []
    for sharing in SHARING:
        for turn in turns:
            for d, d_v in HEAD_SIZES:
                n, heads = next(turn)
                found.append(Problem(batch=heads // 8, heads=8 * sharing, kv_heads=8, n_q=1, n_kv=n, d=d, d_v=d_v, dtype="bf16"))
    return found


def of_steps(target: Target, results: list[SearchResult], *, most: int, seed: int) -> Work:
    """Those without a row, with what a search of each would try first."""
    known = {result.problem.key(target.slug) for result in results}
    shapes = [problem for problem in step_shapes() if problem.key(target.slug) not in known]
    return [(problem, partial(first_to_race, problem, target, most=most, seed=seed)) for problem in shapes]
