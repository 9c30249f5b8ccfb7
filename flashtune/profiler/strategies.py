"""Four strategies of attention at one shape, with bytes and operations of each. Two are exact, two approximate."""

from dataclasses import dataclass, replace

from flashtune.core.errors import InputError
from flashtune.core.problem import Problem
from flashtune.profiler.accounting import Elementwise, Step, fused_step, projection_steps, standard_steps, total

DEFAULT_WINDOW = 128
DEFAULT_RANK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Strategy of attention; its steps run one after another."""

    name: str
    what: str
    exact: bool
    steps: tuple[Step, ...]

    @property
    def whole(self) -> Step:
        """All its steps as one."""
        return total(self.name, self.steps)


def windowed(problem: Problem, window: int) -> Problem:
    """The problem with a window of `window` keys on either side of each query."""
    return replace(problem, features=replace(problem.features, window=(window, window)))


def low_rank(problem: Problem, rank: int) -> Problem:
    """The attention after K and V were projected from N to `rank` rows."""
    return replace(problem, n_kv=rank)


def at_length(problem: Problem, n: int) -> Problem:
    """The problem with `n` keys; the number of queries follows where it was equal, and stays otherwise (decoding)."""
    return replace(problem, n_q=n if problem.n_q == problem.n_kv else problem.n_q, n_kv=n)


def check_rank(rank: int | None, n: int) -> int:
    """The checked rank, by default the smaller of `DEFAULT_RANK` and N; raises InputError outside 1 to N."""
    if rank is None:
        return min(DEFAULT_RANK, n)
    if not 1 <= rank <= n:
        raise InputError(f"--rank must be between 1 and N, not {rank} with N={n}: it is the number of keys that K is projected to")
    return rank


def check_window(window: int) -> int:
    """The checked window; raises InputError where it is negative."""
    if window < 0:
        raise InputError(f"--window must be 0 or more, not {window}: it is the number of keys that a query sees on either side")
    return window


def strategies(problem: Problem, elementwise: Elementwise, window: int, rank: int) -> tuple[Strategy, ...]:
    """Strategies standard, fused, window and low_rank of a full or causal problem.

    Causal problems have no low_rank, since projected keys have no positions, and backwards none, since projections need gradients, too.
    """
    found = (
        Strategy(name="standard", what="one kernel per step", exact=True, steps=standard_steps(problem, elementwise)),
        Strategy(name="fused", what="one kernel, S stays on the chip", exact=True, steps=(fused_step(problem),)),
        Strategy(
            name="window",
            what=f"fused, {window} keys on either side of each query",
            exact=window >= problem.n_kv - 1,
            steps=(fused_step(windowed(problem, window), "window"),),
        ),
        Strategy(
            name="low_rank",
            what=f"K and V projected from {problem.n_kv} to {rank} rows, then fused",
            exact=False,
            steps=(*projection_steps(problem, rank), fused_step(low_rank(problem, rank), "low_rank_attention")),
        ),
    )
    return found[:3] if problem.features.causal or problem.direction == "bwd" else found
