"""Study of one problem: a sampler in memory, and the outcomes of its proposals in a storage, from where an interrupted search resumes."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import islice
from typing import Any

import optuna
from optuna.trial import TrialState, create_trial

from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import (
    PROVIDERS,
    Baseline,
    CompileFacts,
    Conditions,
    Ending,
    Fate,
    Measurement,
    Outcome,
    Provenance,
    SearchResult,
)
from flashtune.templates.rendering import sources_hash
from flashtune.tuner.propose.sampling import CandidateSampler, sampler_of
from flashtune.tuner.propose.space import Array, Candidate, SearchSpace
from flashtune.tuner.propose.storage import StoredStudy

_OUTCOME, _QUEUED, _DECISION = "outcome", "queued", "decision"
"""Names of user attributes, which Optuna's tools show."""


def outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    """Outcome as plain values, which `outcome_from_json` reads back."""
    return {**asdict(outcome), "config": outcome.config.as_dict()}


def outcome_from_json(fields: dict[str, Any]) -> Outcome:
    """Outcome of the values of `outcome_as_json`."""
    times = {name: Measurement(**fields[name]) if fields.get(name) else None for name in ("measurement", "trial")}
    facts = CompileFacts(**fields["facts"]) if fields["facts"] else None
    return Outcome(**{**fields, **times, "facts": facts, "config": Config.of(fields["config"]), "fate": Fate(fields["fate"])})


class Study:
    """Proposes candidates of one problem, and stores an outcome in one transaction.

    Whoever holds the problem's claim is alone with it. `plan` is part of the stored study's name; `by` replaces the sampler that is named
    `sampler`. With a seed and `known` (see `ask`), an interrupted search ends with the same trials as an uninterrupted one.
    """

    def __init__(
        self,
        space: SearchSpace,
        problem: Problem,
        *,
        sampler: str,
        seed: int | None,
        source: str,
        storage: optuna.storages.BaseStorage,
        plan: str = "",
        by: CandidateSampler | None = None,
    ) -> None:
        self._space = space
        self.sampler = by or sampler_of(sampler, space, problem, seed=seed)
        label = f"{space.target.slug}-{problem.label()}-b{problem.batch}h{problem.heads}-{source}-{sampler}-{seed}"
        self._stored = StoredStudy(storage, "-".join(filter(None, (label, fingerprint(space, problem), plan))))
        self._queued: list[Candidate] | None = None
        self._begun: dict[Candidate, datetime] = {}
        self.pending: list[Candidate] = []
        self.outcomes: dict[Candidate, Outcome] = {}
        """Outcomes by candidate, in the order in which they were stored."""
        for trial in self._stored.trials():
            if (fields := trial.user_attrs.get(_OUTCOME)) is not None:
                outcome = outcome_from_json(fields)
                if (candidate := self._candidate(outcome.template, outcome.config)) is not None:
                    self.outcomes.setdefault(candidate, outcome)

    def _candidate(self, template: str, config: Config) -> Candidate | None:
        family = self._space.families.get(template)
        return None if family is None else Candidate(family=family, config=config)

    @property
    def claimed(self) -> int:
        """Number of candidates that were tried or are being tried."""
        return len(self.outcomes) + len(self.pending)

    def enqueue(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Queue these to be tried first, except those of families that the space leaves out; returns the queue.

        The first queue is stored and takes the place of later ones, which may know more, so that an interrupted search repeats itself.
        """
        stored = self._stored.attribute(_QUEUED)
        if stored is None:
            stored = [[candidate.family.name, candidate.config.as_dict()] for candidate in candidates]
            self._stored.set_attribute(_QUEUED, stored)
        found = (self._candidate(template, Config.of(config)) for template, config in stored)
        self._queued = [candidate for candidate in found if candidate is not None]
        return self._queued

    def ask(self, count: int, *, limit: int | None = None, known: int | None = None) -> list[Candidate]:
        """Up to `count` candidates that nobody tried yet or is trying; fewer, or none, when the space or the `limit` of all is exhausted.

        Only the first `known` outcomes inform the proposal, all by default. Configs that break a constraint cost no trial.
        """
        found: list[Candidate] = []
        tried = [*self.outcomes, *self.pending]
        while len(found) < count and (limit is None or len(tried) < limit):
            one = next((candidate for candidate in self._queued or () if candidate not in tried), None)
            if one is None:
                observed = dict(islice(self._observed().items(), known))
                one = next(iter(self.sampler.propose(1, observed, tried[len(observed) :])), None)
            if one is None:
                break
            found.append(one)
            tried.append(one)
        self.pending += found
        return found

    def begin(self, candidate: Candidate) -> None:
        """Count the duration of a candidate's trial, which Optuna's tools show, from here."""
        self._begun[candidate] = datetime.now()

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Store the outcome of a candidate of `ask`."""
        value = _value(outcome)
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        trial = create_trial(state=state, value=value, user_attrs={_OUTCOME: outcome_as_json(outcome)})
        trial.datetime_start = self._begun.pop(candidate, trial.datetime_start)
        self._stored.add(trial)
        self.pending.remove(candidate)
        self.outcomes[candidate] = outcome

    def predicted_next(self, count: int) -> list[Candidate]:
        """Predicted next proposals of the sampler; the next outcome may change them."""
        return self.sampler.propose(count, self._observed(), self.pending)

    def left_to_gain(self) -> float:
        """Greatest expected improvement of one untried candidate, as a share of the best time (see `CandidateSampler`)."""
        return self.sampler.left_to_gain(self._observed(), self.pending)

    def regrets(self) -> Array | None:
        """Samples of the best candidate's regret against all others, as shares (see `CandidateSampler`); None where unknown."""
        return self.sampler.regrets(self._observed())

    def _observed(self) -> dict[Candidate, float | None]:
        return {candidate: _value(outcome) for candidate, outcome in self.outcomes.items()}

    def decide(self, result: SearchResult) -> None:
        """Store the end of the search: outcomes that the closing race changed, baseline, provenance and reason."""
        observed = {outcome.variant_id: outcome for outcome in self.outcomes.values()}
        raced = [outcome_as_json(outcome) for outcome in result.outcomes if outcome != observed.get(outcome.variant_id)]
        baseline = asdict(result.baseline) if result.baseline else None
        ending = asdict(result.ending) if result.ending else None
        decision = {"raced": raced, "baseline": baseline, "provenance": result.provenance.as_json(), "ending": ending}
        self._stored.set_attribute(_DECISION, decision)

    def decided(self, problem: Problem) -> SearchResult | None:
        """Stored result of a search that reached its end; None before that."""
        kept = self._stored.attribute(_DECISION)
        if kept is None:
            return None
        raced = {outcome.variant_id: outcome for outcome in map(outcome_from_json, kept["raced"])}
        baseline, provenance = kept["baseline"], kept["provenance"]
        conditions = Conditions(**provenance["conditions"]) if provenance["conditions"] else None
        return SearchResult(
            gpu=self._space.target.slug,
            problem=problem,
            outcomes=(
                *(raced.get(outcome.variant_id, outcome) for outcome in self.outcomes.values()),
                *(outcome for outcome in raced.values() if outcome.template in PROVIDERS),
            ),
            provenance=Provenance(**{**provenance, "conditions": conditions}),
            baseline=Baseline(**{**baseline, "measurement": Measurement(**baseline["measurement"])}) if baseline else None,
            ending=Ending(**ending) if (ending := kept.get("ending")) else None,
        )


def _value(outcome: Outcome) -> float | None:
    return outcome.measurement.median_us if outcome.fate.timed and outcome.measurement else None


def fingerprint(space: SearchSpace, problem: Problem) -> str:
    """Hash of everything that would make earlier trials another experiment."""
    axes = {name: [(axis.name, axis.values) for axis in family.axes] for name, family in space.families.items()}
    hashes = sorted(sources_hash(family.template_file) for family in space.families.values())
    return hashlib.sha256(repr((problem, sorted(axes.items()), hashes)).encode()).hexdigest()[:12]
