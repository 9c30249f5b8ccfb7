"""Optuna samplers over a space's valid candidates, which they enumerate."""

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

Observed = Mapping[Candidate, float | None]
"""Observed times in microseconds of the candidates that were tried; None for one that failed."""

_STARTUP_TRIALS = 12
"""Random trials before TPE's model is used, in addition to the starts."""
_STARTS, _BY_COST = 3, 5
"""Numbers of hand-written starts, and of the cost model's fastest, among the initial candidates of `gp`."""
_WORTH = 0.1
"""Largest predicted log slowdown over the cost model's fastest at which a start is tried; the model's error is rarely larger."""
_ALIKE = 1e-3
"""Predicted times closer than this count as equal, and one such candidate is enough among the initial ones."""
_DRAWS = 256
"""Surrogate samples averaged by an expected regret."""


class CandidateSampler(optuna.samplers.BaseSampler):
    """Proposes untried valid candidates of a space, the `starts` first; subclasses choose the others.

    With a seed, a proposal depends on the observed and pending candidates alone.
    """

    def __init__(self, space: SearchSpace, problem: Problem, *, seed: int | None, starts: Sequence[Candidate] | None = None) -> None:
        self._space, self._problem, self._seed = space, problem, seed
        self._starts = list(space.starts() if starts is None else starts)
        self._of_trial: dict[int, Candidate] = {}

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

    def expected_regret(self, observed: Observed, pending: Collection[Candidate] = ()) -> float:
        """Expected slowdown of the best observed time against the best of all candidates, as a share; infinite where unknown."""
        return math.inf

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        raise NotImplementedError

    def _rng(self, number: int) -> random.Random:
        # A seed per proposal, so that an interrupted search repeats the proposals of an uninterrupted one.
        return random.Random() if self._seed is None else random.Random(derived(self._seed, number))

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All axes of all families; a proposal has those of its own family."""
        names = list(self._space.families)
        return {key: kind for family in self._space.families.values() for key, kind in distributions(family, names).items()}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """Parameters of one proposal, from the study's trials; none where every candidate was tried."""
        observed: dict[Candidate, float | None] = {}
        pending: list[Candidate] = []
        for other in study.get_trials(deepcopy=False):
            if other.number != trial.number and (candidate := self._candidate(other)) is not None:
                if other.state.is_finished():
                    observed[candidate] = other.value if other.state is TrialState.COMPLETE else None
                else:
                    pending.append(candidate)
        self._heed(study, trial)
        return next((parameters(candidate) for candidate in self.propose(1, observed, pending)), {})

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution) -> Any:
        """Raise ValueError: no parameter is sampled by itself."""
        raise ValueError(f"{param_name} is no axis of the candidate that was proposed")

    def _heed(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Hook for samplers that query another one."""

    def _candidate(self, trial: FrozenTrial) -> Candidate | None:
        if trial.number not in self._of_trial:
            candidate = candidate_of(self._space, trial.params)
            if candidate is None:
                return None
            self._of_trial[trial.number] = candidate
        return self._of_trial[trial.number]


class InOrder(CandidateSampler):
    """Exhaustive sampler: all candidates in their fixed order, after the starts."""

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        return free[0]


class Evenly(CandidateSampler):
    """Random sampler: every valid candidate is equally likely."""

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        return rng.choice(free)


class NearTpe(CandidateSampler):
    """TPE sampler: the free candidate that is nearest to the proposal of Optuna's TPE."""

    def __init__(self, space: SearchSpace, problem: Problem, *, seed: int | None, starts: Sequence[Candidate] | None = None) -> None:
        super().__init__(space, problem, seed=seed, starts=starts)
        self._sampled: dict[str, Any] = {}

    def _heed(self, study: optuna.Study, trial: FrozenTrial) -> None:
        seed = None if self._seed is None else derived(self._seed, trial.number)
        with warnings.catch_warnings():
            # `group` keeps each family's axes in one model; Optuna calls it experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            tpe = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS, multivariate=True, group=True, constant_liar=True)
        sampled = tpe.sample_relative(study, trial, tpe.infer_relative_search_space(study, trial))
        # TPE leaves out parameters with a single value.
        only = {"template": next(iter(self._space.families))} if sampled and len(self._space.families) == 1 else {}
        self._sampled = {**only, **sampled}

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        sampled = candidate_of(self._space, self._sampled)
        if sampled is None:
            return rng.choice(free)
        own = [place for place in free if self.pool.families[place] == sampled.family.name] or free
        differ = [self._steps(self.pool.candidates[place], sampled) for place in own]
        return rng.choice([place for place, steps in zip(own, differ, strict=True) if steps == min(differ)])

    def _steps(self, candidate: Candidate, sampled: Candidate) -> int:
        """Distance of two configs, in places on their axes."""
        mine, other = candidate.config.as_dict(), sampled.config.as_dict()
        apart = 0
        for axis in candidate.family.axes:
            if axis.name in other and mine[axis.name] != other[axis.name]:
                apart += abs(axis.values.index(mine[axis.name]) - axis.values.index(other[axis.name])) if axis.name in mine else 1
        return apart


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
        # scikit-learn takes a second to import; only searches that use it should pay for that.
        from flashtune.tuner.propose.surrogate import Surrogate

        return Surrogate(self.pool)

    def left_to_gain(self, observed: Observed, pending: Collection[Candidate] = ()) -> float:
        """See `CandidateSampler`; pending candidates count as tried."""
        if not (free := self._free([*observed, *pending])):
            return 0.0
        if (best := self._learn(observed, pending)) is None:
            return math.inf
        return float(self._improvement(free, best).max())

    def expected_regret(self, observed: Observed, pending: Collection[Candidate] = ()) -> float:
        """See `CandidateSampler`: the mean over samples of the surrogate."""
        if (best := self._learn(observed, ())) is None:
            return math.inf
        if not (free := self._free(observed)):
            return 0.0
        improvement = self._improvement(free, best)
        worth = [free[place] for place in np.argsort(-improvement, kind="stable")[:_DRAWS]]
        least = self._surrogate.samples(worth, _DRAWS).min(axis=0)
        return float(np.expm1(np.maximum(best - least, 0.0)).mean())

    def _choose(self, free: list[int], observed: Observed, pending: Sequence[Candidate], rng: random.Random) -> int:
        best = self._learn(observed, pending)
        if best is None:
            return min(free, key=lambda place: self.pool.log_times[place])
        return free[int(np.argmax(self._improvement(free, best)))]

    def _learn(self, observed: Observed, pending: Collection[Candidate]) -> float | None:
        """Fit the surrogate; returns the least observed or expected log time, or None where nothing was timed."""
        timed = [math.log(time) for time in observed.values() if time]
        if not timed:
            return None
        place = self.pool.place
        # A failed candidate counts like the slowest.
        times = {place[candidate]: math.log(time) if time else max(timed) for candidate, time in observed.items() if candidate in place}
        under_way = [place[candidate] for candidate in pending if candidate in place]
        self._surrogate.learn(times, under_way)
        expected = self._surrogate.expected(under_way)[0] if under_way else np.array([])
        return float(min([*timed, *expected]))

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


KINDS: dict[Sampler, type[CandidateSampler]] = {"gp": ByExpectedImprovement, "tpe": NearTpe, "random": Evenly, "exhaustive": InOrder}
"""Sampler classes by name."""


def derived(seed: int, number: int) -> int:
    """Seed of the `number`-th candidate."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4])


def parameters(candidate: Candidate) -> dict[str, Any]:
    """Parameters of an Optuna trial for a candidate."""
    name = candidate.family.name
    return {"template": name, **{f"{name}.{axis}": value for axis, value in candidate.config.items}}


def candidate_of(space: SearchSpace, values: Mapping[str, Any]) -> Candidate | None:
    """Candidate of an Optuna trial's parameters; None where the space lacks the family, or there is none."""
    family = space.families.get(values.get("template", ""))
    if family is None:
        return None
    prefix = f"{family.name}."
    return Candidate(family=family, config=Config.of({k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}))


def distributions(family: Family, names: list[str]) -> dict[str, CategoricalDistribution]:
    """Optuna's distributions of a family's axes, and of the family's name among `names`."""
    axes = {f"{family.name}.{axis.name}": CategoricalDistribution(axis.values) for axis in family.axes}
    return {"template": CategoricalDistribution(names), **axes}
