"""Optuna samplers that propose what a space allows: they choose among its valid candidates, which they enumerate."""

import hashlib
import math
import random
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.templates.family import Family
from flashtune.tuner.propose.candidates import Array, Candidates
from flashtune.tuner.propose.space import Candidate, SearchSpace

if TYPE_CHECKING:
    from flashtune.tuner.propose.surrogate import Surrogate

Sampler = Literal["gp", "tpe", "random", "exhaustive"]

Told = Mapping[Candidate, float | None]
"""Times in microseconds of the candidates that were tried; None for one that failed."""

_STARTUP_TRIALS = 12
"""Random trials before TPE's model speaks, beside the starts."""
_STARTS, _BY_COST = 3, 5
"""How many of the hand-written starts, and of the cost model's first, a search by Gaussian process begins with."""
_WORTH = 0.1
"""A start that the cost model holds to be slower than its first by more than this (the logarithm) isn't tried for being one: it rarely errs
by more."""
_ALIKE = 1e-3
"""Predicted times that differ by less are one to the cost model, and one of such candidates is enough to begin with."""
_DRAWS = 256
"""Draws of the surrogate that an expected regret is the mean of."""


class CandidateSampler(optuna.samplers.BaseSampler):
    """Proposes valid candidates of a space that nobody tried, the `starts` first; what follows is a subclass's.

    With a seed, a proposal depends on what is told and pending alone.
    """

    def __init__(self, space: SearchSpace, problem: Problem, *, seed: int | None, starts: Sequence[Candidate] | None = None) -> None:
        self._space, self._problem, self._seed = space, problem, seed
        self._starts = list(space.starts() if starts is None else starts)
        self._of_trial: dict[int, Candidate] = {}

    @cached_property
    def pool(self) -> Candidates:
        """What is proposed from."""
        return Candidates(self._space, self._problem, self._starts)

    @cached_property
    def opening(self) -> list[Candidate]:
        """What is proposed before anything else."""
        return self._starts

    def warm_up(self) -> None:
        """Do beforehand what a first proposal by what was told would take seconds for."""

    def propose(self, count: int, told: Told, pending: Collection[Candidate]) -> list[Candidate]:
        """Up to `count` candidates that are neither told nor pending; fewer where no others are left."""
        found: list[Candidate] = []
        known = {*told, *pending}
        while len(found) < count:
            one = next((candidate for candidate in self.opening if candidate not in known), None)
            if one is None:
                if not (free := self._free(known)):
                    break
                one = self.pool.candidates[self._choose(free, told, [*pending, *found], self._rng(len(known)))]
            found.append(one)
            known.add(one)
        return found

    def _free(self, known: Collection[Candidate]) -> list[int]:
        """The places of all others."""
        taken = {self.pool.place.get(candidate) for candidate in known}
        return [place for place in range(len(self.pool)) if place not in taken]

    def left_to_gain(self, told: Told, pending: Collection[Candidate] = ()) -> float:
        """The greatest improvement that is expected of one untried candidate, as a share of the best time; infinite where nobody knows."""
        return math.inf

    def expected_regret(self, told: Told, pending: Collection[Candidate] = ()) -> float:
        """How much slower the best told time is than the best of all candidates, expected, as a share; infinite where nobody knows."""
        return math.inf

    def _choose(self, free: list[int], told: Told, pending: Sequence[Candidate], rng: random.Random) -> int:
        raise NotImplementedError

    def _rng(self, number: int) -> random.Random:
        # A seed for each proposal, so that those after an interruption are those without it.
        return random.Random() if self._seed is None else random.Random(derived(self._seed, number))

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All axes of all families; a proposal has those of its own family."""
        names = list(self._space.families)
        return {key: kind for family in self._space.families.values() for key, kind in distributions(family, names).items()}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """The parameters of one proposal, by what the study's trials say; none where every candidate was tried."""
        told: dict[Candidate, float | None] = {}
        pending: list[Candidate] = []
        for other in study.get_trials(deepcopy=False):
            if other.number != trial.number and (candidate := self._candidate(other)) is not None:
                if other.state.is_finished():
                    told[candidate] = other.value if other.state is TrialState.COMPLETE else None
                else:
                    pending.append(candidate)
        self._heed(study, trial)
        return next((parameters(candidate) for candidate in self.propose(1, told, pending)), {})

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """Nothing is sampled for itself; raises ValueError."""
        raise ValueError(f"{param_name} is no axis of the candidate that was proposed")

    def _heed(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """For samplers that ask another one."""

    def _candidate(self, trial: FrozenTrial) -> Candidate | None:
        if trial.number not in self._of_trial:
            candidate = candidate_of(self._space, trial.params)
            if candidate is None:
                return None
            self._of_trial[trial.number] = candidate
        return self._of_trial[trial.number]


class InOrder(CandidateSampler):
    """All candidates in their fixed order, after the starts."""

    def _choose(self, free: list[int], told: Told, pending: Sequence[Candidate], rng: random.Random) -> int:
        return free[0]


class Evenly(CandidateSampler):
    """Any valid candidate is as likely as another."""

    def _choose(self, free: list[int], told: Told, pending: Sequence[Candidate], rng: random.Random) -> int:
        return rng.choice(free)


class NearTpe(CandidateSampler):
    """The free candidate that is nearest to what Optuna's TPE draws."""

    def __init__(self, space: SearchSpace, problem: Problem, *, seed: int | None, starts: Sequence[Candidate] | None = None) -> None:
        super().__init__(space, problem, seed=seed, starts=starts)
        self._drawn: dict[str, Any] = {}

    def _heed(self, study: optuna.Study, trial: FrozenTrial) -> None:
        seed = None if self._seed is None else derived(self._seed, trial.number)
        with warnings.catch_warnings():
            # `group` keeps each family's axes in one model; Optuna calls it experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS, multivariate=True, group=True, constant_liar=True)
        drawn = tpe.sample_relative(study, trial, tpe.infer_relative_search_space(study, trial))
        # TPE leaves out what has one value only.
        only = {"template": next(iter(self._space.families))} if drawn and len(self._space.families) == 1 else {}
        self._drawn = {**only, **drawn}

    def _choose(self, free: list[int], told: Told, pending: Sequence[Candidate], rng: random.Random) -> int:
        drawn = candidate_of(self._space, self._drawn)
        if drawn is None:
            return rng.choice(free)
        own = [place for place in free if self.pool.families[place] == drawn.family.name] or free
        differ = [self._steps(self.pool.candidates[place], drawn) for place in own]
        return rng.choice([place for place, steps in zip(own, differ, strict=True) if steps == min(differ)])

    def _steps(self, candidate: Candidate, drawn: Candidate) -> int:
        """How many places of their axes two configs lie apart."""
        mine, other = candidate.config.as_dict(), drawn.config.as_dict()
        apart = 0
        for axis in candidate.family.axes:
            if axis.name in other and mine[axis.name] != other[axis.name]:
                apart += abs(axis.values.index(mine[axis.name]) - axis.values.index(other[axis.name])) if axis.name in mine else 1
        return apart


class ByExpectedImprovement(CandidateSampler):
    """The candidate with the greatest expected improvement (Jones, Schonlau, Welch, 1998) under the cost model and its learned error.

    It begins with the cost model's first (of those that are one to it a hand-written start, if there is one), with starts of the family
    that it prefers, and with one candidate of every other family. Candidates under way count as if they had the times that are expected of
    them (Ginsbourger, Le Riche, Carraro, 2010).
    """

    @cached_property
    def opening(self) -> list[Candidate]:
        """The cost model's first and the starts by turns, then one of every other family."""
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
        # scikit-learn takes a second to import, which only searches that ask it should pay.
        from flashtune.tuner.propose.surrogate import Surrogate

        return Surrogate(self.pool)

    def left_to_gain(self, told: Told, pending: Collection[Candidate] = ()) -> float:
        """See `CandidateSampler`; candidates under way are taken to have been tried."""
        if not (free := self._free([*told, *pending])):
            return 0.0
        if (best := self._learn(told, pending)) is None:
            return math.inf
        return float(self._improvement(free, best).max())

    def expected_regret(self, told: Told, pending: Collection[Candidate] = ()) -> float:
        """See `CandidateSampler`: the mean over draws of what the surrogate holds for possible."""
        if (best := self._learn(told, ())) is None:
            return math.inf
        if not (free := self._free(told)):
            return 0.0
        improvement = self._improvement(free, best)
        worth = [free[place] for place in np.argsort(-improvement, kind="stable")[:_DRAWS]]
        least = self._surrogate.draws(worth, _DRAWS).min(axis=0)
        return float(np.expm1(np.maximum(best - least, 0.0)).mean())

    def _choose(self, free: list[int], told: Told, pending: Sequence[Candidate], rng: random.Random) -> int:
        best = self._learn(told, pending)
        if best is None:
            return min(free, key=lambda place: self.pool.log_times[place])
        return free[int(np.argmax(self._improvement(free, best)))]

    def _learn(self, told: Told, pending: Collection[Candidate]) -> float | None:
        """Tell the surrogate; the least log time that is told or expected of what is pending, or None where nothing was timed."""
        timed = [math.log(time) for time in told.values() if time]
        if not timed:
            return None
        place = self.pool.place
        # What failed is worth as little as the slowest.
        times = {place[candidate]: math.log(time) if time else max(timed) for candidate, time in told.items() if candidate in place}
        under_way = [place[candidate] for candidate in pending if candidate in place]
        self._surrogate.learn(times, under_way)
        expected = self._surrogate.expected(under_way)[0] if under_way else np.array([])
        return float(min([*timed, *expected]))

    def _improvement(self, places: Sequence[int], best: float) -> Array:
        """By how much each is expected to be faster than the best, as a share of its time."""
        # Imported with the surrogate, where it is wanted.
        from scipy.special import ndtr

        mean, deviation = self._surrogate.expected(places)
        deviation = np.maximum(deviation, 1e-9)
        gain = best - mean
        score = gain / deviation
        density = np.exp(-0.5 * score**2) / math.sqrt(2 * math.pi)
        return np.asarray(gain * ndtr(score) + deviation * density)


def import_surrogate() -> None:
    """What the `gp` sampler imports when it is asked by what was told, imported beforehand."""
    import scipy.special  # noqa: F401

    import flashtune.tuner.propose.surrogate  # noqa: F401


KINDS: dict[Sampler, type[CandidateSampler]] = {"gp": ByExpectedImprovement, "tpe": NearTpe, "random": Evenly, "exhaustive": InOrder}
"""Every sampler by its name."""


def derived(seed: int, number: int) -> int:
    """A seed of its own for the `number`-th candidate."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4])


def parameters(candidate: Candidate) -> dict[str, Any]:
    """A candidate as an Optuna trial's parameters."""
    name = candidate.family.name
    return {"template": name, **{f"{name}.{axis}": value for axis, value in candidate.config.items}}


def candidate_of(space: SearchSpace, values: Mapping[str, Any]) -> Candidate | None:
    """The inverse of `parameters`; None where the space lacks the family, or there is none."""
    family = space.families.get(values.get("template", ""))
    if family is None:
        return None
    prefix = f"{family.name}."
    return Candidate(family=family, config=Config.of({k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}))


def distributions(family: Family, names: list[str]) -> dict[str, CategoricalDistribution]:
    """The axes of a family, and which family it is among `names`, as Optuna's distributions."""
    axes = {f"{family.name}.{axis.name}": CategoricalDistribution(axis.values) for axis in family.axes}
    return {"template": CategoricalDistribution(names), **axes}
