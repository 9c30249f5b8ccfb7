"""Requalification of stored records on this GPU: each key's winner, its runners-up and PyTorch race again, the worst suspects first.

What a record says may not hold after another driver, Triton, PyTorch or card. A key costs some seconds: nothing is searched.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flashtune.core.problem import Problem, ProblemKey
from flashtune.core.results import REQUALIFIED, Ending, Fate, Outcome, Provenance, SearchResult, TuningRecord
from flashtune.core.target import Target
from flashtune.templates import family, written_here
from flashtune.templates.rendering import text_hash
from flashtune.tuner.propose.space import Candidate, record_of
from flashtune.tuner.replies import Failed, Raced
from flashtune.tuner.search.evaluation import Evaluation
from flashtune.tuner.timing.racing import ranked

RUNNERS_UP = 3
"""Most kernels of a key that race beside its winner."""

RACE_S = 0.6
"""Seconds of timing of a key's race."""

WITHIN = 0.05
"""Change of a record's time over PyTorch's up to which the record is confirmed; from one process to the next ratios differ by 2 %."""

Verdict = Literal["confirmed", "updated", "demoted", "failed"]
"""A record's ratio holds; it doesn't, or another kernel is faster by more than a tie; PyTorch is faster; nothing could be timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requalified:
    """A record with its verdict: the ratios of its kernel's time to PyTorch's as stored and as found, the new result to save in the place
    of the old, or the reason why there is none."""

    record: TuningRecord
    verdict: Verdict
    was: float | None
    found: float | None = None
    result: SearchResult | None = None
    reason: str = ""


def elsewhere(record: TuningRecord, here: Provenance) -> tuple[str, ...]:
    """Parts of a record's surroundings that differ from these: torch, triton, driver, card."""
    parts = {"torch": "torch", "triton": "triton", "driver": "driver", "card": "gpu_name"}
    return tuple(word for word, name in parts.items() if getattr(record.provenance, name) != getattr(here, name))


def worst_first(records: Sequence[TuningRecord], here: Provenance) -> list[TuningRecord]:
    """Records in the order of suspicion: surroundings that differ, doubts about their race, the spread of their times, age."""

    def trust(record: TuningRecord) -> tuple[object, ...]:
        conditions, time = record.provenance.conditions, record.outcome.measurement
        doubts = len(conditions.doubts) - conditions.power_limited if conditions else 1
        return -len(elsewhere(record, here)), -doubts, -(time.noise if time else 1.0), record.provenance.created_at

    return sorted(records, key=trust)


def requalified(
    records: Sequence[TuningRecord],
    stored: Mapping[ProblemKey, Sequence[SearchResult]],
    target: Target,
    here: Provenance,
    evaluation: Callable[[Problem], Evaluation],
) -> Iterator[Requalified]:
    """The measured records' verdicts on `target`, worst suspects first; `stored` are all results of each key, for runners-up."""
    measured = [one for one in records if one.outcome.source == "measured" and written_here(one.problem.spec())]
    for record in worst_first(measured, here):
        racing = _racing(record, stored.get(record.key, ()), target)
        if not racing:
            yield Requalified(record=record, verdict="failed", was=record.relative_time, reason="its config breaks a constraint of today")
            continue
        timing = evaluation(record.problem)
        try:
            yield _judged(record, racing, timing, here)
        finally:
            timing.close()


def _racing(record: TuningRecord, results: Sequence[SearchResult], target: Target) -> dict[Candidate, Outcome]:
    """The winner and the best others of its key that are valid today, with their stored outcomes."""
    others = [o for result in results for o in result.outcomes if o.fate is Fate.CORRECT and o.measurement is not None]
    others.sort(key=lambda o: (o.rank or 99, o.measurement.median_us if o.measurement else 0.0))
    found: dict[Candidate, Outcome] = {}
    spec = record.problem.spec()
    for outcome in [record.outcome, *([record.fallback] if record.fallback else []), *others]:
        chosen = family(outcome.template)
        config = chosen.completed(outcome.config)
        if chosen.supports(spec, target) is None and chosen.violated(config, spec, target) is None and len(found) <= RUNNERS_UP:
            found.setdefault(Candidate(family=chosen, config=config), outcome)
    first = next(iter(found.values()), None)
    return found if first is record.outcome else {}


def _judged(record: TuningRecord, racing: Mapping[Candidate, Outcome], timing: Evaluation, here: Provenance) -> Requalified:
    """The verdict of a race of these on the GPU; kernels that are wrong or fail there don't take part."""
    was = record.relative_time
    right: dict[Candidate, Outcome] = {}
    first_reason = ""
    for candidate, outcome in racing.items():
        reply = timing.evaluate(candidate, outcome.facts, None)  # type: ignore[arg-type]
        if isinstance(reply, Failed):
            first_reason = first_reason or f"{reply.fate}: {reply.reason}"
        else:
            variant = candidate.variant(record.problem.spec())
            right[candidate] = replace(
                outcome,
                variant_id=variant.id,
                template_hash=text_hash(candidate.family, variant),
                config=candidate.config,
                max_error=reply.error,
                trial=reply.time,
                measurement=reply.time,
            )
    raced, conditions = timing.race(list(right)) if right else (None, None)
    if not isinstance(raced, Raced) or raced.baseline is None:
        why = raced.reason if isinstance(raced, Failed) else first_reason or "PyTorch could not be timed beside it"
        return Requalified(record=record, verdict="failed", was=was, reason=why)
    called = timing.call(list(right))
    timed = []
    for place, (candidate, outcome) in enumerate(right.items()):
        call_us = called.times[place] if called is not None else None
        timed.append((candidate, replace(outcome, measurement=raced.times[place], finalist=True, call_us=call_us, rank=None)))
    baseline = replace(raced.baseline, call_us=called.pytorch if called is not None else None)
    order = ranked(timed, behind=raced.standing.behind, known=next(iter(racing)))
    outcomes = tuple(replace(dict(timed)[candidate], rank=rank) for rank, candidate in enumerate(order, start=1))
    result = SearchResult(
        gpu=record.key.gpu,
        problem=record.problem,
        outcomes=outcomes,
        provenance=replace(here, conditions=conditions),
        baseline=baseline,
        ending=Ending(reason=REQUALIFIED),
    )
    return _compared(record, result, order[0] == next(iter(racing)), first_reason)


def _compared(record: TuningRecord, result: SearchResult, same: bool, reason: str) -> Requalified:
    """The verdict of a new result: `same` where the stored winner is still first."""
    new = record_of(result)
    assert new is not None, "something was timed"
    was, found = record.relative_time, new.relative_time
    assert found is not None, "PyTorch raced"
    verdict: Verdict = "confirmed"
    if found > 1.0:
        verdict = "demoted"
    elif not same or was is None or abs(found / was - 1.0) > WITHIN:
        verdict = "updated"
    return Requalified(record=record, verdict=verdict, was=was, found=found, result=result, reason=reason)
