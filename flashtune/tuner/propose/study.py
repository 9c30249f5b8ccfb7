"""Study of one problem: an Optuna sampler over a record that outlives the process and that many processes share."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import optuna
from optuna.trial import TrialState

from flashtune.core.config import Config
from flashtune.core.problem import Problem
from flashtune.core.results import Baseline, CompileFacts, Conditions, Ending, Fate, Measurement, Outcome, Provenance, SearchResult
from flashtune.templates.rendering import sources_hash
from flashtune.tuner.propose.record import Entry, Record, key_of, newest_unfinished
from flashtune.tuner.propose.sampling import KINDS, CandidateSampler, Sampler, candidate_of, distributions, parameters
from flashtune.tuner.propose.space import Candidate, SearchSpace


def outcome_to_json(outcome: Outcome) -> str:
    """One line of JSON that `outcome_from_json` reads back."""
    return json.dumps({**asdict(outcome), "config": outcome.config.as_dict()})


def outcome_from_json(text: str) -> Outcome:
    """Outcome of a line of `outcome_to_json`."""
    fields: dict[str, Any] = json.loads(text)
    fields["config"] = Config.of(fields["config"])
    fields["fate"] = Fate(fields["fate"])
    for name in ("measurement", "trial"):
        fields[name] = Measurement(**fields[name]) if fields.get(name) else None
    fields["facts"] = CompileFacts(**fields["facts"]) if fields["facts"] else None
    return Outcome(**fields)


class Study:
    """Proposes and claims candidates of one problem, and stores their outcomes.

    All state is in the record of that name, from which any number of processes (after an interruption, or at the same time) continue: no
    candidate is claimed by two of them. With a seed, proposals depend on the record alone, so that an interrupted search ends with the same
    trials as an uninterrupted one. `by` replaces the sampler that is named `sampler`, and `opened` opens the record elsewhere than in this
    process.
    """

    def __init__(
        self,
        space: SearchSpace,
        problem: Problem,
        *,
        sampler: Sampler,
        seed: int | None,
        source: str,
        storage: optuna.storages.BaseStorage,
        plan: str = "",
        by: CandidateSampler | None = None,
        opened: Callable[[str], Record] | None = None,
    ) -> None:
        self._space = space
        self.sampler = by or KINDS[sampler](space, problem, seed=seed)
        label = f"{space.target.slug}-{problem.label()}-b{problem.batch}h{problem.heads}-{source}-{sampler}-{seed}"
        self._record = (opened or partial(Record, storage))("-".join(filter(None, (label, fingerprint(space, problem), plan))))
        self._record.describe(
            {
                "gpu": space.target.slug,
                **{name: getattr(problem, name) for name in ("batch", "heads", "kv_heads", "n_q", "d", "d_v", "dtype", "direction")},
                "n": problem.n_kv,
                "features": problem.features.label(),
                "source": source,
                "sampler": sampler,
                "seed": seed,
            }
        )
        self._distributions = {
            name: kind for family in space.families.values() for name, kind in distributions(family, list(space.families)).items()
        }
        self._entries: dict[str, Entry] = {}
        self._candidates: dict[str, Candidate] = {}
        self._enqueued: list[Candidate] = []
        # Sampling happens in memory, where a trial costs no transactions.
        self._model = optuna.create_study(direction="minimize", sampler=self.sampler)
        self._in_model: dict[str, int] = {}
        self.outcomes: dict[Candidate, Outcome] = {}
        self.refresh()

    @property
    def claimed(self) -> int:
        """Number of candidates that any process has tried or is trying."""
        return sum(not self._entries[key].free for key in self._candidates)

    @property
    def elsewhere(self) -> int:
        """Number of candidates that other processes are trying."""
        return sum(entry.taken and not entry.mine for entry in self._entries.values())

    def refresh(self) -> None:
        """Take over the outcomes of an earlier or another process."""
        before, self._entries = self._entries, self._record.entries()
        for key, entry in self._entries.items():
            if entry is before.get(key):
                continue
            candidate = self._candidates.get(key) or candidate_of(self._space, entry.params)
            if candidate is None:
                continue
            self._candidates[key] = candidate
            if not entry.free:
                self._try_in_model(key)
            if entry.outcome is not None and candidate not in self.outcomes:
                self.outcomes[candidate] = outcome_from_json(entry.outcome)
                self._end_in_model(key, self.outcomes[candidate])

    def in_order(self) -> dict[Candidate, Outcome]:
        """All outcomes, in the order of first claims, which is the same in every process."""
        candidates = (self._candidates[key] for key in self._entries if key in self._candidates)
        return {candidate: self.outcomes[candidate] for candidate in candidates if candidate in self.outcomes}

    def enqueue(self, candidates: list[Candidate]) -> None:
        """Queue these to be tried first, except those of families that the space leaves out."""
        self._enqueued += [candidate for candidate in candidates if candidate.family.name in self._space.families]

    def ask(self, count: int, *, limit: int | None = None) -> list[Candidate]:
        """Claim up to `count` candidates that nobody tried yet or is trying; fewer, or none, when the space is exhausted.

        No more than `limit` are claimed in the whole study. Configs that break a constraint cost no trial.
        """
        self.refresh()
        found: list[Candidate] = []
        while len(found) < count:
            room = count - len(found)
            wanted = self._wanted(room if limit is None else min(room, limit - self.claimed))
            if not wanted:
                break
            for candidate in wanted.values():
                self._record.claim(parameters(candidate), distributions(candidate.family, list(self._space.families)))
            self.refresh()
            found += self._kept(wanted, limit)
        return found

    def _wanted(self, count: int) -> dict[str, Candidate]:
        """Candidates to claim, by their keys; abandoned ones first."""
        free = (key for key in self._candidates if self._entries[key].free)
        wanted = {key: self._candidates[key] for key in islice(free, max(0, count))}
        for key in wanted:
            self._try_in_model(key)
        while len(wanted) < count and (found := self._next(wanted)) is not None:
            key, candidate = found
            wanted[key] = candidate
        return wanted

    def _next(self, wanted: dict[str, Candidate]) -> tuple[str, Candidate] | None:
        """New candidate: a queued one, or the sampler's proposal; None where the whole space was tried."""
        while self._enqueued:
            queued = self._enqueued.pop(0)
            key = key_of(parameters(queued))
            if key not in self._entries and key not in wanted:
                self._try_in_model(key, queued)
                return key, queued
        trial = self._model.ask()
        for name in trial.relative_params:
            trial.suggest_categorical(name, self._distributions[name].choices)
        candidate = candidate_of(self._space, trial.params)
        if candidate is None:
            self._model.tell(trial, state=TrialState.FAIL)
            return None
        key = key_of(trial.params)
        self._in_model[key] = trial.number
        return key, candidate

    def _kept(self, wanted: dict[str, Candidate], limit: int | None) -> list[Candidate]:
        """Candidates of `wanted` that this process was the first to claim, within the limit."""
        claims = [key for key in self._candidates if not self._entries[key].free]
        within = set(sorted(claims, key=lambda key: self._entries[key].claim)[:limit])
        kept = []
        for key, candidate in wanted.items():
            if self._entries[key].mine and key in within:
                kept.append(candidate)
            else:
                self._record.give_back(key)
        return kept

    def begin(self, candidate: Candidate) -> None:
        """Mark a candidate of `ask` as running; its trial's duration counts from here."""
        self._record.begin(key_of(parameters(candidate)))

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Store the outcome of a candidate of `ask`."""
        key = key_of(parameters(candidate))
        facts = {name: getattr(outcome.facts, name) for name in ("registers", "spills", "shared_bytes")} if outcome.facts else {}
        reason = {"reason": outcome.reason} if outcome.reason else {}
        self._record.settle(key, outcome_to_json(outcome), _value(outcome), {"fate": str(outcome.fate), **reason, **facts})
        self.outcomes[candidate] = outcome
        self._end_in_model(key, outcome)

    def predicted_next(self, count: int) -> list[Candidate]:
        """Predicted next proposals of the sampler, unclaimed; the next outcome may change them."""
        return self.sampler.propose(count, self._observed(), self.pending)

    def left_to_gain(self) -> float:
        """Greatest expected improvement of one untried candidate, as a share of the best time (see `CandidateSampler`)."""
        return self.sampler.left_to_gain(self._observed(), self.pending)

    def expected_regret(self) -> float:
        """Expected slowdown of the best time so far against the best of all candidates, as a share (see `CandidateSampler`)."""
        return self.sampler.expected_regret(self._observed(), self.pending)

    def _observed(self) -> dict[Candidate, float | None]:
        return {candidate: _value(outcome) for candidate, outcome in self.outcomes.items()}

    @property
    def pending(self) -> list[Candidate]:
        """Candidates that any process is trying."""
        return [candidate for key, candidate in self._candidates.items() if self._entries[key].taken and candidate not in self.outcomes]

    def leave(self) -> None:
        """Release the claims without an outcome; other processes, or the next run, may take them."""
        self._record.leave()

    def may_decide(self) -> bool:
        """True where this process, and no other, is to choose the winner."""
        return self._record.may_decide()

    def decide(self, result: SearchResult) -> None:
        """Store the end of the search: outcomes that the closing race changed, baseline, provenance and reason."""
        observed = {outcome.variant_id: outcome for outcome in self.outcomes.values()}
        raced = [outcome_to_json(outcome) for outcome in result.outcomes if outcome != observed.get(outcome.variant_id)]
        baseline = asdict(result.baseline) if result.baseline else None
        ending = asdict(result.ending) if result.ending else None
        self._record.decide({"raced": raced, "baseline": baseline, "provenance": result.provenance.as_json(), "ending": ending})

    def decided(self, problem: Problem) -> SearchResult | None:
        """Stored result of a search that reached its end; None before that."""
        kept = self._record.decision()
        if kept is None:
            return None
        self.refresh()
        raced = {outcome.variant_id: outcome for outcome in map(outcome_from_json, kept["raced"])}
        baseline, provenance = kept["baseline"], kept["provenance"]
        conditions = Conditions(**provenance["conditions"]) if provenance["conditions"] else None
        return SearchResult(
            gpu=self._space.target.slug,
            problem=problem,
            outcomes=tuple(raced.get(outcome.variant_id, outcome) for outcome in self.in_order().values()),
            provenance=Provenance(**{**provenance, "conditions": conditions}),
            baseline=Baseline(**{**baseline, "measurement": Measurement(**baseline["measurement"])}) if baseline else None,
            ending=Ending(**kept["ending"]) if kept.get("ending") else None,
        )

    def _try_in_model(self, key: str, candidate: Candidate | None = None) -> None:
        """Add a candidate that is being tried to the sampler's study."""
        if key in self._in_model:
            return
        candidate = candidate or self._candidates[key]
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=parameters(candidate),
            distributions=dict(distributions(candidate.family, list(self._space.families))),
        )
        self._model.add_trial(trial)
        self._in_model[key] = len(self._model.get_trials(deepcopy=False)) - 1

    def _end_in_model(self, key: str, outcome: Outcome) -> None:
        if key not in self._in_model:
            return
        value = _value(outcome)
        self._model.tell(self._in_model[key], value, state=TrialState.FAIL if value is None else TrialState.COMPLETE)


class Plan:
    """Run of a command's plan; `suffix` is part of the names of its studies.

    It is the newest unfinished run, or else a new one. Processes that start the same plan at the same time get the same run.
    """

    def __init__(self, storage: optuna.storages.BaseStorage, words: Sequence[object]) -> None:
        plan = hashlib.sha256(repr(words).encode()).hexdigest()[:12]
        self._record, run = newest_unfinished(storage, f"plan-{plan}")
        self.suffix = f"{plan}-{run}"

    def finish(self) -> None:
        """Mark the run as finished: the same command starts a new one from now on."""
        self._record.finish()


def _value(outcome: Outcome) -> float | None:
    return outcome.measurement.median_us if outcome.fate.timed and outcome.measurement else None


def fingerprint(space: SearchSpace, problem: Problem) -> str:
    """Hash of everything that would make earlier trials another experiment."""
    axes = {name: [(axis.name, axis.values) for axis in family.axes] for name, family in space.families.items()}
    hashes = sorted(sources_hash(family.template_file) for family in space.families.values())
    return hashlib.sha256(repr((problem, sorted(axes.items()), hashes)).encode()).hexdigest()[:12]
