"""Explanation of a choice: who serves a call, and the reasons, as data."""

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
    """Kernel that serves a call, and the reasons.

    `kind` is the step of the policy (flashtune.dispatch.policy.choose.rank) that served and `reason` says it in a sentence. `template`,
    `variant_id` and `config` are None where PyTorch serves. `source`, `origin`, `record_key` and the record's times (of its own problem, in
    microseconds) are None where no record led there; `key` is None where no record can apply to the call (float64, CPU tensors). `refused`
    has a line for each better-placed record or family that was passed over.

    Where the record is of another key, `differences` lists theirs for ours (`d=128 for 80`). `estimated_loss`, the share of time that the
    kernel loses against a search of its own, is None: no estimate of it is calibrated. `backward` explains
    the gradients of a call that needs them, where kernels compute them; where it is None, PyTorch's own attention does.

    `twin` is the config of the fallback kernel for mispredicted softmax of one with a frozen row max, None where none is known. For calls
    like this one so far, `misled_programs` counts mispredicting programs; once they were too many `twin_serves` is True and `went_over` 1:
    the fallback kernel serves until the process ends.

    `provider` is the name of the provider that serves (`kind` is "provider"), None elsewhere; `providers` are all implementations that a
    caller may name, with their times.
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
        reason = self.reason + "; its softmax was mispredicted, so that its fallback kernel serves" * state.latched
        programs = state.mispredicted.value
        return replace(self, reason=reason, misled_programs=programs, went_over=int(state.latched), twin_serves=state.latched)


def explained(choice: Choice, problem: Problem, target: Target, refused: Sequence[str], *, interpreted: bool = False) -> Explanation:
    """Explanation of a choice and of those passed over before it; `interpreted` is True where Triton's interpreter runs it."""
    variant, reason = choice.variant, choice.note
    if choice.provider is not None:
        reason = f"{PROVIDERS[choice.provider].title} serves: {reason}"
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
