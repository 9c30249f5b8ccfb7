"""The closing races of a problem: its final candidates and PyTorch are timed together, whole calls decide where they differ, and all are
ranked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import Problem, wide_heads
from flashtune.core.records.results import Baseline, Conditions, Fate, Measurement, Outcome
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Called, Failed, Raced, Spent
from flashtune.tuner.search.evaluation import Evaluation
from flashtune.tuner.timing.racing import fallback_ahead, first_by_calls, ranked, to_call


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Final candidates' outcomes, the winner first; the times of other providers, and PyTorch's; `failed` where there was no race."""

    outcomes: Mapping[Candidate, Outcome]
    providers: tuple[Outcome, ...] = ()
    baseline: Baseline | None = None
    conditions: Conditions | None = None
    failed: Failed | None = None


def closed(
    evaluation: Evaluation,
    problem: Problem,
    finalists: Mapping[Candidate, Outcome],
    spent: Spent,
    *,
    known: Candidate | None,
    picked: Callable[[Closing], None] | None = None,
) -> Closing:
    """Race of correct final candidates, with their ranks; `known` is the stored record's, which wins ties. `picked` gets the winner before
    PyTorch and other providers, which may compile for seconds and don't change it, are timed; without it PyTorch races with all."""
    if not finalists and wide_heads(problem.d, problem.d_v):
        return providers_alone(evaluation, problem, spent)
    outcomes, candidates = dict(finalists), list(finalists)
    wide = max(problem.d, problem.d_v)
    with spent.on("race"):
        raced, conditions = evaluation.race(candidates, pytorch=picked is None) if candidates else (None, None)
    baseline, behind = None, None
    if isinstance(raced, Raced):
        baseline, behind = raced.baseline, raced.behind
        for candidate, measurement in zip(candidates, raced.times, strict=True):
            outcomes[candidate] = replace(outcomes[candidate], measurement=measurement, finalist=True)
    medians = {candidate: time_of(outcomes[candidate]).median_us for candidate in candidates}
    ranks = fallback_ahead(ranked(list(outcomes.items()), behind=behind, known=known), medians, wide)
    timed = to_call(ranks)
    with spent.on("whole calls"):
        called = evaluation.call(timed) if isinstance(raced, Raced) else None
    if called is not None:
        for candidate, call_us in zip(timed, called.times, strict=False):
            outcomes[candidate] = replace(outcomes[candidate], call_us=call_us)
        ranks.insert(0, ranks.pop(ranks.index(timed[first_by_calls(called.times)])))
        ranks = fallback_ahead(ranks, medians, wide)
    closing = Closing(
        outcomes={candidate: replace(outcomes[candidate], rank=rank) for rank, candidate in enumerate(ranks, start=1)},
        baseline=baseline,
        conditions=conditions,
        failed=raced if isinstance(raced, Failed) else None,
    )
    if picked is not None and isinstance(raced, Raced):
        picked(closing)
        with spent.on("pytorch"):
            closing = replace(closing, baseline=_beside_winner(evaluation, ranks[0], time_of(outcomes[ranks[0]])))
    first_us = outcomes[ranks[0]].call_us if ranks else None
    if closing.baseline is None or first_us is None:
        return closing
    with spent.on("other providers"):
        beside = evaluation.call(ranks[:1], beside=True)
    if beside is None:
        return closing
    # In the scale of the winner's calls before: clocks drift, ratios within a run don't.
    scale = first_us / beside.times[0]
    pytorch_us = None if beside.pytorch is None else scale * beside.pytorch.median_us
    return replace(closing, providers=verdicts(beside, problem, scale=scale), baseline=replace(closing.baseline, call_us=pytorch_us))


def _beside_winner(evaluation: Evaluation, winner: Candidate, time: Measurement) -> Baseline | None:
    """PyTorch's time from a race with the winner, in the scale of its `time` before; None where PyTorch lacks the problem or fails."""
    raced, _ = evaluation.race([winner], pytorch=True)
    if not isinstance(raced, Raced) or raced.baseline is None:
        return None
    return replace(raced.baseline, measurement=raced.baseline.measurement.scaled(time.median_us / raced.times[0].median_us))


def providers_alone(evaluation: Evaluation, problem: Problem, spent: Spent) -> Closing:
    """Whole calls of the other providers and PyTorch, of a problem that no kernel takes; nothing where PyTorch can't be timed."""
    with spent.on("whole calls"):
        called = evaluation.call([], beside=True)
    if called is None or called.pytorch is None:
        return Closing(outcomes={})
    baseline = Baseline(backend=called.backend, measurement=called.pytorch, call_us=called.pytorch.median_us)
    return Closing(outcomes={}, providers=verdicts(called, problem), baseline=baseline)


def time_of(outcome: Outcome) -> Measurement:
    """Time of an outcome that has one."""
    assert outcome.measurement is not None, "only outcomes with a time are ranked"
    return outcome.measurement


def verdicts(called: Called, problem: Problem, *, scale: float = 1.0) -> tuple[Outcome, ...]:
    """Outcomes of the other providers, their times multiplied by `scale`; one that is right and wasn't timed, since it is PyTorch's own
    choice, has none."""
    return tuple(
        Outcome.of_provider(
            *(name, Variant(template=name, spec=problem.spec(), config=Config.of()).id, one.time and one.time.scaled(scale)),
            versions=one.versions,
            fate=one.fate,
            reason=one.reason,
            max_error=one.error,
        )
        for name, one in called.providers.items()
        if one.time is not None or one.fate is not Fate.CORRECT
    )
