"""Samplers over the valid candidates of a space, which they enumerate: our own, and Optuna's TPE."""

import hashlib
import math
import random
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial

from flashtune.core.problems.problem import Problem
from flashtune.core.system.errors import InputError
from flashtune.tuner.propose.space import Array, Candidate, Candidates, SearchSpace

if TYPE_CHECKING:
    from flashtune.tuner.propose.surrogate import Surrogate

Observed = Mapping[Candidate, float | None]
"""Observed times in microseconds of the candidates that were tried; None for one that failed."""

_STARTS, _BY_COST = 3, 5
"""Numbers of hand-written starts, and of the cost model's fastest, among the initial candidates of `gp`."""
_WORTH = 0.1
"""Largest predicted log slowdown over the cost model's fastest at which a start is tried; the model's error is rarely larger."""
_ALIKE = 1e-3
"""Predicted times closer than this count as equal, and one such candidate is enough among the initial ones."""
_DRAWS = 256
"""Surrogate samples averaged by an expected regret."""


class CandidateSampler:
    """Proposes untried valid candidates of a space, the `starts` first; subclasses choose the others.

    With a seed, a proposal of `gp`, `random` and `exhaustive` depends on the observed and pending candidates alone.
    """

    def __init__(self, space: SearchSpace, problem: Problem, *, seed: int | None, starts: Sequence[Candidate] | None = None) -> None:
        self._space, self._problem, self._seed = space, problem, seed
        self._starts = list(space.starts() if starts is None else starts)

    @cached_property
    def pool(self) -> Candidates:
        """Candidates that are proposed from."""
        return Candidates(self._space, self._problem, self._starts)

    @cached_property
    def initial_candidates(self) -> list[Candidate]:
        """Initial candidates, in the order of proposing."""
        return self._starts

    def warm_up(self) -> None:
        """Do the slow preparations of the first proposal from observations ahead of it."""

    def propose(self, count: int, observed: Observed, pending: Collection[Candidate]) -> list[Candidate]:
        """Up to `count` candidates that are neither observed nor pending; fewer where no others are left."""
        found: list[Candidate] = []
        tried = {*observed, *pending}
        while len(found) < count:
            one = next((candidate for candidate in self.initial_candidates if candidate not in tried), None)
            if one is None:
                if not (free := self._free(tried)):
                    break
                one = self.pool.candidates[self._choose(free, observed, [*pending, *found], self._rng(len(tried)))]
            found.append(one)
            tried.add(one)
        return found

    def _free(self, tried: Collection[Candidate]) -> list[int]:
        """Places of all candidates but these."""
        taken = {self.pool.place.get(candidate) for candidate in tried}
        return [place for place in range(len(self.pool)) if place not in taken]

    def left_to_gain(self, observed: Observed, pending: Collection[Candidate] = ()) -> float:
        """Greatest expected improvement of one untried candidate, as a share of the best time; infinite where unknown."""
        return math.inf

    def regrets(self, observed: Observed) -> Array | None:
        """Samples of the regret, the slowdown of the best observed candidate against the best of all, as shares; None where unknown."""
        return None

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        raise NotImplementedError

    def _rng(self, number: int) -> random.Random:
        # A seed per proposal, so that an interrupted search repeats the proposals of an uninterrupted one.
        return random.Random() if self._seed is None else random.Random(derived(self._seed, number))


class InOrder(CandidateSampler):
    """Exhaustive sampler: all candidates in their fixed order, after the starts."""

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        return free[0]


class Evenly(CandidateSampler):
    """Random sampler: every valid candidate is equally likely."""

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        return rng.choice(free)


class ByTpe(CandidateSampler):
    """Sampler of Optuna's TPE: the untried candidate nearest to each point that it proposes.

    A point has a number for each column of `Candidates.features`, within the range of all candidates. It is told the time of the candidate
    that was tried in its place.
    """

    def __init__(self, space: SearchSpace, problem: Problem, *, seed: int | None, starts: Sequence[Candidate] | None = None) -> None:
        super().__init__(space, problem, seed=seed, starts=starts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            # For several pending trials, and axes that depend on each other.
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        self.study = optuna.create_study(direction="minimize", sampler=sampler)
        self._asked: dict[Candidate, optuna.Trial] = {}
        self._told: set[Candidate] = set()

    @cached_property
    def _ranges(self) -> dict[str, FloatDistribution]:
        lows, highs = self.pool.features.min(axis=0), self.pool.features.max(axis=0)
        return {
            f"{place} {name}": FloatDistribution(float(low), float(high))
            for place, (name, low, high) in enumerate(zip(self.pool.columns, lows, highs, strict=True))
        }

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        for candidate, time_us in observed.items():
            if candidate not in self._told:
                self._tell(candidate, time_us)
        trial = self.study.ask(dict(self._ranges))
        point = np.array([trial.params[name] for name in self._ranges])
        place = free[int(np.argmin(np.square(self.pool.features[free] - point).sum(axis=1)))]
        self._asked[self.pool.candidates[place]] = trial
        return place

    def _tell(self, candidate: Candidate, time_us: float | None) -> None:
        """Tell a candidate's time under the point that it was tried for, or its own if it wasn't proposed here."""
        self._told.add(candidate)
        state = TrialState.COMPLETE if time_us else TrialState.FAIL
        value = time_us or None
        if (trial := self._asked.pop(candidate, None)) is not None:
            self.study.tell(trial, value, state)
        elif (place := self.pool.place.get(candidate)) is not None:
            own = dict(zip(self._ranges, self.pool.features[place].tolist(), strict=True))
            self.study.add_trial(create_trial(state=state, value=value, params=own, distributions=dict(self._ranges)))


class ByExpectedImprovement(CandidateSampler):
    """Sampler of the candidate with the greatest expected improvement (Jones, Schonlau, Welch, 1998) under the cost model and its learned
    error.

    The initial candidates are the cost model's fastest (a hand-written start among equals), starts of the family that it prefers, and one
    candidate of every other family. Pending candidates count as if they had their expected times (Ginsbourger, Le Riche, Carraro, 2010).
    """

    @cached_property
    def initial_candidates(self) -> list[Candidate]:
        """Cost model's fastest and the starts alternately, then one candidate of every other family."""
        pool, times = self.pool, self.pool.log_times
        by_cost = [int(place) for place in np.argsort(times, kind="stable")]
        if not by_cost:
            return []
        written = sorted((pool.place[candidate] for candidate in self._starts), key=lambda place: times[place])
        preferred = pool.families[by_cost[0]]
        alike: dict[tuple[str, int], int] = {}
        for place in [*written, *by_cost]:
            alike.setdefault((pool.families[place], round(times[place] / _ALIKE)), place)
        unlike = sorted(alike.values(), key=lambda place: times[place])
        first, worth = unlike[:_BY_COST], times[by_cost[0]] + _WORTH
        starts = [p for p in unlike[_BY_COST:] if p in set(written) and pool.families[p] == preferred and times[p] <= worth][:_STARTS]
        turns = [place for pair in zip(first, starts, strict=False) for place in pair]
        chosen = list(dict.fromkeys([*turns, *first, *starts]))
        for family in self._space.families:
            others = [place for place in [*written, *by_cost] if pool.families[place] == family]
            if others and not any(pool.families[place] == family for place in chosen):
                chosen.append(others[0])
        return [pool.candidates[place] for place in chosen]

    def warm_up(self) -> None:
        """See `CandidateSampler`."""
        if len(self.pool):
            self._improvement([0], 0.0)

    @cached_property
    def _surrogate(self) -> "Surrogate":
        # scipy's modules take a moment to import; only searches that use it should pay for that.
        from flashtune.tuner.propose.surrogate import Surrogate

        return Surrogate(self.pool)

    def left_to_gain(self, observed: Observed, pending: Collection[Candidate] = ()) -> float:
        """See `CandidateSampler`; pending candidates count as tried."""
        if not (free := self._free([*observed, *pending])):
            return 0.0
        if (best := self._learn(observed, pending)) is None:
            return math.inf
        return float(self._improvement(free, best).max())

    def regrets(self, observed: Observed) -> Array | None:
        """See `CandidateSampler`: by joint samples of the candidates that are likely to matter."""
        if (best := self._learn(observed, ())) is None:
            return None
        tried = [self.pool.place[candidate] for candidate, time in observed.items() if time and candidate in self.pool.place]
        if not (free := self._free(observed)) or not tried:
            return np.zeros(1)
        improvement = self._improvement(free, best)
        worth = [free[place] for place in np.argsort(-improvement, kind="stable")[:_DRAWS]]
        pick = tried[int(np.argmin(self._surrogate.expected(tried)[0]))]
        sampled = self._surrogate.samples([pick, *worth], _DRAWS)
        return np.asarray(np.expm1(sampled[0] - sampled.min(axis=0)))

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        best = self._learn(observed, pending)
        if best is None:
            return min(free, key=lambda place: self.pool.log_times[place])
        return free[int(np.argmax(self._improvement(free, best)))]

    def _learn(self, observed: Observed, pending: Collection[Candidate]) -> float | None:
        """Fit the surrogate; returns the least expected log time of a tried or pending candidate, or None where nothing was timed.

        An observed time itself may be lucky.
        """
        timed = [math.log(time) for time in observed.values() if time]
        if not timed:
            return None
        place = self.pool.place
        # A failed candidate counts like the slowest.
        times = {place[candidate]: math.log(time) if time else max(timed) for candidate, time in observed.items() if candidate in place}
        under_way = [place[candidate] for candidate in pending if candidate in place]
        self._surrogate.learn(times, under_way)
        known = [*(place[candidate] for candidate, time in observed.items() if time and candidate in place), *under_way]
        return float(self._surrogate.expected(known)[0].min()) if known else min(timed)

    def _improvement(self, places: Sequence[int], best: float) -> Array:
        """Expected improvement of each over the best, as a share of its time."""
        # Imported with the surrogate, only where it is used.
        from scipy.special import ndtr

        mean, deviation = self._surrogate.expected(places)
        deviation = np.maximum(deviation, 1e-9)
        gain = best - mean
        score = gain / deviation
        density = np.exp(-0.5 * score**2) / math.sqrt(2 * math.pi)
        return np.asarray(gain * ndtr(score) + deviation * density)


def import_surrogate() -> None:
    """Import the modules of the `gp` sampler's model ahead of its first use."""
    import scipy.special  # noqa: F401

    import flashtune.tuner.propose.surrogate  # noqa: F401


OWN: dict[str, type[CandidateSampler]] = {"gp": ByExpectedImprovement, "tpe": ByTpe, "random": Evenly, "exhaustive": InOrder}
"""Samplers by their short names; `tpe` is Optuna's TPESampler."""


def sampler_of(
    name: str, space: SearchSpace, problem: Problem, *, seed: int | None, starts: Sequence[Candidate] | None = None
) -> CandidateSampler:
    """The sampler of a name in OWN; raises InputError for any other name."""
    if name not in OWN:
        raise InputError(f"unknown sampler {name!r}: use one of {', '.join(OWN)}")
    return OWN[name](space, problem, seed=seed, starts=starts)


def derived(seed: int, number: int) -> int:
    """Seed of the `number`-th candidate."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4])
