"""Requalification of stored records on this GPU: each key's winner, its runners-up and PyTorch race again, the worst suspects first.

What a record says may not hold after another driver, Triton, PyTorch or card. A key costs some seconds: nothing is searched, and the next
records' kernels are compiled while one is timed.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.problem import Problem, ProblemKey
from flashtune.core.records.results import (
    PROVIDERS,
    REQUALIFIED,
    CompileFacts,
    Ending,
    Fate,
    Outcome,
    Provenance,
    SearchResult,
    TuningRecord,
)
from flashtune.core.records.versions import known_by, suspicion
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.db.preference import claimed, made
from flashtune.templates import family, written_here
from flashtune.templates.rendering import text_hash
from flashtune.tuner.propose.space import Candidate, record_of
from flashtune.tuner.replies import Failed, Spent, Timed
from flashtune.tuner.search.closing import closed, providers_alone
from flashtune.tuner.search.evaluation import Evaluation

RUNNERS_UP = 3
"""Most kernels of a key that race beside its winner."""

RACE_S = 0.6
"""Seconds of timing of a key's race."""

WITHIN = 0.05
"""Change of a record's time over PyTorch's up to which the record is confirmed; from one process to the next ratios differ by 2 %."""

WITHIN_WINNER = 0.1
"""Largest slowdown of a runner-up against the fastest of its own run, as a share: slower ones hardly become the fastest."""

AHEAD = 3
"""Records whose kernels are compiled while one is timed."""

SURROUNDINGS = {"torch": "torch", "triton": "triton", "driver": "driver", "card": "gpu_name"}
"""Parts of a record's surroundings by which it is from elsewhere, and their names in `Provenance`."""

Verdict = Literal["confirmed", "updated", "demoted", "failed", "undecided"]
"""A record's ratio holds; it doesn't, or another kernel is faster by more than a tie; PyTorch is faster; its kernel doesn't compile, fails,
is wrong or breaks a constraint, and no other was timed; or the machine's fault left no verdict, so that the record stays."""

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requalified:
    """A record with its verdict: the ratios of its kernel's time to PyTorch's as stored and as found, the new result to save, which takes
    the place of the old where it has a winner, and the reason why one wasn't timed."""

    record: TuningRecord
    verdict: Verdict
    was: float | None
    found: float | None = None
    result: SearchResult | None = None
    reason: str = ""


def elsewhere(record: TuningRecord, here: Provenance) -> tuple[str, ...]:
    """Parts of a record's surroundings that differ from these, words of `SURROUNDINGS`."""
    return tuple(word for word, name in SURROUNDINGS.items() if getattr(record.provenance, name) != getattr(here, name))


def suspects(record: TuningRecord) -> tuple[str, ...]:
    """Verdicts on a record's providers that were made with other versions than those installed here, one with each provider's name."""
    if not record.providers:
        return ()
    # Imports PyTorch, which other records don't need.
    from flashtune.core.pytorch import devices

    return tuple(why for one in record.providers if (why := suspicion(record, one, devices.versions_of(one.template))))


def worst_first(records: Sequence[TuningRecord], here: Provenance) -> list[TuningRecord]:
    """Records in the order of suspicion: a stranger's, surroundings and versions of providers that differ, doubts about their race, the
    spread of their times, age."""

    def trust(record: TuningRecord) -> tuple[object, ...]:
        conditions, time = record.provenance.conditions, record.outcome.measurement
        doubts = len(conditions.doubts) - conditions.power_limited if conditions else 1
        away = len(elsewhere(record, here)) + len(suspects(record))
        return not claimed(record), -away, -doubts, -(time.noise if time else 1.0), made(record)

    return sorted(records, key=trust)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A record whose kernels are being compiled: candidates to race and failures by now, the record's own kernel first, and providers
    that were wrong in earlier runs."""

    record: TuningRecord
    racing: Mapping[Candidate, Outcome]
    failed: Sequence[Outcome]
    wrong: Sequence[Outcome]
    timing: Evaluation

    def kept(self, found: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """Stored verdicts on wrong providers that these don't replace, since they are of other versions, or nothing was found of them."""
        judged = {(one.template, one.config) for one in found}
        return tuple(one for one in self.wrong if (one.template, one.config) not in judged)


def requalified(
    records: Sequence[TuningRecord],
    stored: Mapping[ProblemKey, Sequence[SearchResult]],
    target: Target,
    here: Provenance,
    evaluation: Callable[[Problem], Evaluation],
    enough: Callable[[], bool] = lambda: False,
) -> Iterator[Requalified]:
    """The measured records' verdicts on `target`, the worst suspects first, those of one kernel spec together; `stored` are all results of
    each key, for runners-up. None is begun once `enough` is True."""
    by_spec: dict[KernelSpec, list[TuningRecord]] = {}
    measured = [one for one in records if one.outcome.source == "measured" and written_here(one.problem.spec())]
    for record in worst_first(measured, here):
        by_spec.setdefault(record.problem.spec(), []).append(record)
    # The checks of one spec have the same small oracles.
    waiting = deque(record for same in by_spec.values() for record in same)
    ahead: deque[_Entry] = deque()
    while (waiting or ahead) and not enough():
        while waiting and len(ahead) <= AHEAD:
            ahead.append(_begun(waiting.popleft(), stored, target, here, evaluation))
        entry = ahead.popleft()
        try:
            yield _judged(entry, here)
        except EnvironmentProblem as error:
            yield Requalified(record=entry.record, verdict="undecided", was=entry.record.relative_time, reason=str(error))
        finally:
            entry.timing.close()


def _begun(
    record: TuningRecord,
    stored: Mapping[ProblemKey, Sequence[SearchResult]],
    target: Target,
    here: Provenance,
    evaluation: Callable[[Problem], Evaluation],
) -> _Entry:
    """A record with the best others of its key, which are being compiled; those that are invalid today have failed."""
    racing: dict[Candidate, Outcome] = {}
    failed: list[Outcome] = []
    facts: dict[Candidate, CompileFacts | None] = {}
    spec = record.problem.spec()
    for outcome, triton in _contenders(record, stored.get(record.key, ())):
        candidate = _candidate(outcome, spec, target)
        if isinstance(candidate, str):
            # Others that are invalid don't serve anyway.
            failed += [_failure(outcome, Fate.CONSTRAINT, candidate)] * (outcome is record.outcome)
        elif len(racing) <= RUNNERS_UP and candidate not in racing:
            racing[candidate] = outcome
            # Known facts by the installed Triton allow machine code to be taken from the package or the cache.
            facts[candidate] = outcome.facts if triton == here.triton else None
    timing = evaluation(record.problem)
    timing.compile(facts)
    wrong = [
        replace(one, config=known_by(one.config, torch=run.torch, triton=run.triton, driver=run.driver))
        for result in stored.get(record.key, ())
        for one in result.outcomes
        if (run := result.provenance) and one.template in PROVIDERS and one.fate is Fate.CORRECTNESS
    ]
    return _Entry(record=record, racing=racing, failed=failed, wrong=list(dict.fromkeys(wrong)), timing=timing)


def _contenders(record: TuningRecord, results: Sequence[SearchResult]) -> list[tuple[Outcome, str]]:
    """The record's kernel, those beside it, and the others of its key by their distance to the fastest of their run, with the Triton that
    compiled them."""
    behind: list[tuple[float, Outcome, str]] = []
    for result in results:
        timed = [o for o in result.outcomes if o.fate is Fate.CORRECT and o.measurement is not None and o.template not in PROVIDERS]
        # Clocks drift between trials, so that those of the closing race have a scale of their own.
        for final in (True, False):
            times = {place: o.measurement.median_us for place, o in enumerate(timed) if o.finalist is final and o.measurement}
            most_us = (1 + WITHIN_WINNER) * min(times.values(), default=0.0)
            behind += [(us / most_us, timed[place], result.provenance.triton) for place, us in times.items() if us <= most_us]
    behind.sort(key=lambda one: (one[0], one[1].variant_id))
    own = [one for one in (record.outcome, record.fallback, record.in_graphs) if one is not None and one.template not in PROVIDERS]
    return [(outcome, record.provenance.triton) for outcome in own] + [(outcome, triton) for _, outcome, triton in behind]


def _candidate(outcome: Outcome, spec: KernelSpec, target: Target) -> Candidate | str:
    """An outcome's kernel by today's templates, or the reason why there is none."""
    try:
        chosen = family(outcome.template)
        chosen.validate(outcome.config)
    except InputError as error:
        return str(error)
    return chosen.unfit(outcome.config, spec, target) or Candidate(family=chosen, config=outcome.config)


def _failure(outcome: Outcome, fate: Fate, reason: str, error: float | None = None) -> Outcome:
    """A stored outcome whose kernel failed now."""
    untimed = {"measurement": None, "trial": None, "call_us": None, "rank": None, "finalist": False}
    return replace(outcome, fate=fate, reason=reason, max_error=error, **untimed)  # type: ignore[arg-type]


def _judged(entry: _Entry, here: Provenance) -> Requalified:
    """The verdict of a race of these on the GPU; kernels that are wrong or fail there don't take part. Of a record without a kernel
    providers are checked and timed beside PyTorch again."""
    record, timing = entry.record, entry.timing
    failed, right = list(entry.failed), dict[Candidate, Outcome]()
    reason = f"{failed[0].fate}: {failed[0].reason}" if failed else ""

    def undecided(why: str, result: SearchResult | None = None) -> Requalified:
        return Requalified(record=record, verdict="undecided", was=record.relative_time, result=result, reason=why)

    timing.prepare()
    for candidate, outcome in entry.racing.items():
        reply, found = _timed(candidate, outcome, record, timing)
        if not isinstance(reply, Failed):
            right[candidate] = found
            # The tool that watches the GPU takes as long to start as a check.
            timing.expect_race()
            continue
        reason = reason or f"{reply.fate}: {reply.reason}"
        if not reply.inconclusive:
            failed.append(_failure(found, reply.fate, reply.reason, reply.error))
        elif outcome is record.outcome:
            return undecided(f"no verdict on its kernel: {reply.reason}")
    known = next((candidate for candidate, outcome in entry.racing.items() if outcome is record.outcome), None)
    provider = record.outcome.template if record.outcome.template in PROVIDERS else None
    closing = providers_alone(timing, record.problem, Spent()) if provider else closed(timing, record.problem, right, Spent(), known=known)
    result = SearchResult(
        gpu=record.key.gpu,
        problem=record.problem,
        outcomes=(*failed, *closing.providers, *entry.kept(closing.providers)),
        provenance=replace(here, conditions=closing.conditions),
        ending=Ending(reason=REQUALIFIED),
    )
    timed = replace(result, outcomes=(*closing.outcomes.values(), *result.outcomes), baseline=closing.baseline)
    if provider is not None:
        if closing.baseline is None:
            return undecided(f"its run had no kernel, and whole calls of {provider} could not be timed")
        reason = next((f"{provider}: {one.fate}: {one.reason}" for one in closing.providers if one.template == provider and one.reason), "")
    if closing.baseline is not None and timed.best is not None:
        same = timed.best.template == provider if provider else next(iter(closing.outcomes)) == known
        return _compared(record, timed, same, reason)
    if known not in right:
        return Requalified(record=record, verdict="failed", was=record.relative_time, result=result, reason=reason)
    why = closing.failed.reason if closing.failed is not None else "PyTorch could not be timed beside it"
    # Other kernels that failed still don't serve.
    return undecided(f"no verdict on its kernel: {why}", result if failed else None)


def _timed(candidate: Candidate, outcome: Outcome, record: TuningRecord, timing: Evaluation) -> tuple[Timed | Failed, Outcome]:
    """Reply of a kernel's compiler, check and trial, and its outcome by them."""
    compiled = timing.compiled(candidate)
    variant = candidate.variant(record.problem.spec())
    found = replace(outcome, variant_id=variant.id, template_hash=text_hash(candidate.family, variant), config=candidate.config)
    if isinstance(compiled, Failed):
        return compiled, found
    if compiled is not None:
        found = replace(found, facts=compiled.facts)
    reply = timing.evaluate(candidate, found.facts, None)  # type: ignore[arg-type]
    if isinstance(reply, Failed):
        return reply, found
    return reply, replace(found, max_error=reply.error, trial=reply.time, measurement=reply.time, call_us=None, rank=None)


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
