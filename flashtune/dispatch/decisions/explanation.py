"""Explanation of a choice: what runs a call, and the reasons, as data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem, ProblemKey
from flashtune.core.records.results import Source
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.plans.misprediction import Misprediction
from flashtune.dispatch.policy.choose import Choice, Kind
from flashtune.dispatch.policy.offers import Offer
from flashtune.dispatch.providers.libraries import PROVIDERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Choice of what runs a call, and its reason.

    Times are in microseconds, and those of a record are of its own problem.

    Attributes:
        kind: how the choice was made, such as "exact" or "framework" (PyTorch); `rank` in flashtune.dispatch.policy.choose defines it.
        reason: the choice in a sentence, which is also `str()` of the explanation.
        gpu: slug of the GPU.
        key: key of the call's own record; None if no record can apply (float64, tensors on the CPU).
        template: family of the kernel; None if PyTorch runs the call.
        variant_id: id of the kernel, as `flashtune show --kernel` takes it; None likewise.
        config: config of the kernel; None likewise.
        source: "measured" or "predicted"; None where no record was used.
        origin: database of the record.
        record_key: key of the record.
        median_us: time of the record's kernel.
        framework_us: PyTorch's time in the record's run.
        ended_by: reason why the record's search stopped, as in `flashtune show --json`.
        candidates: how many candidates that search had, tried or not; None where that wasn't kept.
        refused: a line for each record or family that came earlier and was passed over.
        differences: if the record is of another key, what differs: its value for that of the call (`d=128 for 80`).
        estimated_loss: always None (reserved).
        backward: explanation of the gradients; None if PyTorch computes them.
        twin: config of the fallback kernel, for a kernel whose softmax may be mispredicted.
        misled_programs: how often programs of such kernels mispredicted so far.
        went_over: 1 after the switch to the fallback kernel, else 0.
        twin_serves: True once the fallback kernel runs such calls, until the process ends.
        provider: name of PyTorch's backend or the library that runs the call, if `kind` is "provider".
        providers: all implementations that a caller may name, with their times.
    """

    kind: Kind
    reason: str
    gpu: str
    key: ProblemKey | None = None
    template: str | None = None
    variant_id: str | None = None
    config: Config | None = None
    source: Source | None = None
    origin: str | None = None
    record_key: ProblemKey | None = None
    median_us: float | None = None
    framework_us: float | None = None
    ended_by: str | None = None
    candidates: int | None = None
    refused: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    estimated_loss: float | None = None
    backward: "Explanation | None" = None
    twin: Config | None = None
    misled_programs: int = 0
    went_over: int = 0
    twin_serves: bool = False
    provider: str | None = None
    providers: tuple[Offer, ...] = ()

    def __str__(self) -> str:
        return self.reason

    def remembering(self, state: Misprediction | None) -> "Explanation":
        """Copy with the counts of such calls and their latch."""
        if state is None:
            return self
        reason = self.reason + "; its softmax was mispredicted, so its fallback kernel runs the call" * state.latched
        programs = state.mispredicted.value
        return replace(self, reason=reason, misled_programs=programs, went_over=int(state.latched), twin_serves=state.latched)


def explained(choice: Choice, problem: Problem, target: Target, refused: Sequence[str], *, interpreted: bool = False) -> Explanation:
    """Explanation of a choice and of those passed over before it; `interpreted` is True where Triton's interpreter runs it."""
    variant, reason = choice.variant, choice.note
    if choice.provider is not None:
        reason = f"{PROVIDERS[choice.provider].title} runs the call: {reason}"
    if variant is not None and not interpreted and target.arch.isdigit() and (why := kernels.uncompiled(variant, target.arch)) is not None:
        reason += f"; {why}, so Triton compiles it at the first call"
    if choice.kind == "framework" and choice.record is None and refused:
        reason += f" ({refused[0]})"
    if interpreted:
        reason += ", in Triton's interpreter"
    return explanation_by(choice._replace(note=reason), problem, "cpu" if interpreted else target.slug, refused)


def explanation_by(choice: Choice, problem: Problem | None, gpu: str, refused: Sequence[str] = ()) -> Explanation:
    """Explanation of a choice by its own reason."""
    record, variant, said = choice.record, choice.variant, dict[str, Any]()
    if record is not None:
        said = {"source": record.outcome.source, "origin": record.origin, "record_key": record.key}
        said |= {"median_us": record.median_us, "framework_us": record.framework_us}
        if record.ending is not None:
            said |= {"ended_by": record.ending.reason, "candidates": record.ending.candidates}
    return Explanation(
        kind=choice.kind,
        reason=choice.note,
        gpu=gpu,
        key=None if problem is None or gpu == "cpu" else problem.key(gpu),
        template=None if variant is None else variant.template,
        variant_id=None if variant is None else variant.id,
        config=choice.config,
        refused=tuple(refused),
        differences=choice.differences,
        twin=choice.fallback,
        provider=choice.provider,
        **said,
    )
