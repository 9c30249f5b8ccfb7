"""The memory of a search: an Optuna study in a database, so that a search can be stopped, resumed and shared by many workers."""

import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Literal, get_args

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.results import CompileFacts, Fate, Measurement, Outcome
from flashtune.templates.family import Family
from flashtune.templates.rendering import sources_hash
from flashtune.tuner.space import Candidate, SearchSpace

Sampler = Literal["tpe", "random", "exhaustive"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)

_OUTCOME = "outcome"
_FINISHED = "finished"
_STARTUP_TRIALS = 12
"""Random trials before TPE's model speaks, beside the enqueued ones."""


def outcome_to_json(outcome: Outcome) -> str:
    """One line of JSON that `outcome_from_json` reads back."""
    return json.dumps({**asdict(outcome), "config": outcome.config.as_dict()})


def outcome_from_json(text: str) -> Outcome:
    """The inverse of `outcome_to_json`."""
    row: dict[str, Any] = json.loads(text)
    row["config"] = Config.of(row["config"])
    row["fate"] = Fate(row["fate"])
    for name in ("measurement", "trial"):
        row[name] = Measurement(**row[name]) if row.get(name) else None
    row["facts"] = CompileFacts(**row["facts"]) if row["facts"] else None
    return Outcome(**row)


class Study:
    """Asks Optuna for candidates of one problem and tells it their outcomes.

    A study that was interrupted is found again by the problem, the space, the sampler and the seed; one that was finished is not, so
    that the same command searches anew.
    """

    def __init__(
        self, space: SearchSpace, problem: Problem, *, sampler: Sampler, seed: int | None, source: str, storage: optuna.storages.BaseStorage
    ) -> None:
        self._space, self._sampler = space, sampler
        self._unseen: Iterator[Candidate] = space.every()
        self._waiting: list[Candidate] = []
        label = f"{space.target.slug}-{problem.label()}-b{problem.batch}h{problem.heads}-{source}-{sampler}-{seed}"
        self._record = _open(storage, f"{label}-{_fingerprint(space, problem)}")
        # Sampling happens in memory: most draws break a constraint, and each would cost a dozen transactions.
        self._study = optuna.create_study(sampler=_optuna_sampler(sampler, seed), direction="minimize")
        self._open: dict[Candidate, optuna.Trial] = {}
        self._asked: set[Candidate] = set()
        self.outcomes: dict[Candidate, Outcome] = {}
        self._read = 0
        self.refresh()

    def refresh(self) -> None:
        """Take over what an earlier or another worker of this study has found."""
        trials = self._record.get_trials(deepcopy=False)
        for trial in trials[self._read :]:
            candidate = self._candidate(trial.params)
            if candidate is not None and candidate not in self.outcomes and candidate not in self._asked:
                self.outcomes[candidate] = outcome_from_json(trial.user_attrs[_OUTCOME])
                self._study.add_trial(trial)
        self._read = len(trials)

    def enqueue(self, candidates: list[Candidate]) -> None:
        """Try these first, but for those of families that the space leaves out."""
        self._waiting += [candidate for candidate in candidates if candidate.family.name in self._space.families]

    def ask(self, count: int) -> list[Candidate]:
        """Up to `count` candidates that nobody tried yet; fewer, or none, when the space is exhausted.

        Configs that break a constraint are told to Optuna as failed, and cost no trial.
        """
        found: list[Candidate] = []
        while self._waiting and len(found) < count:
            found += self._fresh(self._waiting.pop(0))
        if self._sampler != "exhaustive":
            found += self._sampled(count - len(found))
        # What sampling didn't fill (a small space, nearly used up) is taken in order.
        while len(found) < count and (following := next(self._unseen, None)) is not None:
            found += self._fresh(following)
        return found

    def _fresh(self, candidate: Candidate) -> list[Candidate]:
        """The candidate, unless it was asked for or tried before; it counts as asked for from now on."""
        if candidate in self.outcomes or candidate in self._asked:
            return []
        self._asked.add(candidate)
        return [candidate]

    def _sampled(self, count: int) -> list[Candidate]:
        found: list[Candidate] = []
        for _ in range(50 * count):
            if len(found) == count:
                break
            trial = self._study.ask()
            family = self._space.families[trial.suggest_categorical("template", list(self._space.families))]
            values: dict[str, Any] = {a.name: trial.suggest_categorical(f"{family.name}.{a.name}", a.values) for a in family.axes}
            candidate = Candidate(family=family, config=Config.of(values))
            if family.violated(candidate.config, self._space.spec, self._space.target) is None and self._fresh(candidate):
                found.append(candidate)
                self._open[candidate] = trial
            elif (known := self.outcomes.get(candidate)) is not None and known.measurement is not None:
                self._study.tell(trial, known.measurement.median_us)
            else:
                self._study.tell(trial, state=TrialState.FAIL)
        return found

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Keep what became of a candidate that `ask` gave."""
        self.outcomes[candidate] = outcome
        value = outcome.measurement.median_us if outcome.fate.timed and outcome.measurement else None
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        finished = optuna.trial.create_trial(
            params=_parameters(candidate),
            distributions=_distributions(candidate.family, list(self._space.families)),
            value=value,
            state=state,
            user_attrs={_OUTCOME: outcome_to_json(outcome)},
        )
        self._record.add_trial(finished)
        trial = self._open.pop(candidate, None)
        if trial is None:
            self._study.add_trial(finished)
        else:
            self._study.tell(trial, value, state=state)

    def finish(self) -> None:
        """Mark the study as done: the next search of the same problem starts a new one."""
        self._record.set_user_attr(_FINISHED, True)

    def _candidate(self, parameters: dict[str, Any]) -> Candidate | None:
        family = self._space.families.get(parameters.get("template", ""))
        if family is None:
            return None
        prefix = f"{family.name}."
        values = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
        return Candidate(family=family, config=Config.of(values))


def _parameters(candidate: Candidate) -> dict[str, Any]:
    name = candidate.family.name
    return {"template": name, **{f"{name}.{axis}": value for axis, value in candidate.config.items}}


def _distributions(family: Family, names: list[str]) -> dict[str, BaseDistribution]:
    axes = {f"{family.name}.{axis.name}": CategoricalDistribution(axis.values) for axis in family.axes}
    return {"template": CategoricalDistribution(names), **axes}


def _fingerprint(space: SearchSpace, problem: Problem) -> str:
    """Changes with anything that would make earlier trials another experiment."""
    axes = {name: [(axis.name, axis.values) for axis in family.axes] for name, family in space.families.items()}
    hashes = sorted(sources_hash(family.template_file) for family in space.families.values())
    return hashlib.sha256(repr((problem, sorted(axes.items()), hashes)).encode()).hexdigest()[:12]


def _optuna_sampler(sampler: Sampler, seed: int | None) -> optuna.samplers.BaseSampler:
    if sampler == "tpe":
        with warnings.catch_warnings():
            # `group` keeps each family's axes in one model; Optuna calls it experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=_STARTUP_TRIALS, multivariate=True, group=True, constant_liar=True
            )
    return optuna.samplers.RandomSampler(seed=seed)


def _open(storage: optuna.storages.BaseStorage, name: str) -> optuna.Study:
    """The newest study of this name, or the next one where that is finished."""
    for generation in range(1, 1_000_000):
        study = optuna.create_study(storage=storage, study_name=f"{name}-{generation}", direction="minimize", load_if_exists=True)
        if not study.user_attrs.get(_FINISHED):
            return study
    raise AssertionError("a million searches of one problem")
