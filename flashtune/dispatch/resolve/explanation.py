"""Explanation of a choice: the kernel that serves, its record, and the reasons against others."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashtune.core.config import Config, Variant
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.problem import Problem, ProblemKey
from flashtune.core.results import Source
from flashtune.core.shipped_kernels import PACKAGE, distribution, lacks_archive
from flashtune.core.target import Target
from flashtune.dispatch.choose import Choice, Kind, Refusal
from flashtune.dispatch.launch import kernels
from flashtune.dispatch.plans.misprediction import Misprediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Kernel that serves a call, and the reasons.

    `kind` is the step of the policy (flashtune.dispatch.choose.rank) that served and `reason` says it in a sentence. `template`,
    `variant_id` and `config` are None where PyTorch serves. `source`, `origin`, `record_key` and the record's times (of its own problem, in
    microseconds) are None where no record led there; `key` is None where no record can apply to the call (float64, CPU tensors). `refused`
    has a line for each better-placed record or family that was passed over.

    Where the record is of another key, `differences` lists theirs for ours (`d=128 for 80`). `estimated_loss`, the share of time that the
    kernel loses against a search of its own, is None: no estimate of it is calibrated. `backward` explains
    the gradients of a call that needs them, where kernels compute them; where it is None, PyTorch's own attention does.

    `twin` is the config of the fallback kernel for mispredicted softmax of one with a frozen row max, None where none is known. For calls
    like this one so far, `misled_programs` counts mispredicting programs; once they were too many `twin_serves` is True and `went_over` 1:
    the fallback kernel serves until the process ends.
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

    def remembering(self, state: Misprediction | None) -> "Explanation":
        """Copy with the counts of such calls and their latch."""
        if state is None:
            return self
        reason = self.reason + "; its softmax was mispredicted, so that its fallback kernel serves" * state.latched
        programs = state.mispredicted.value
        return replace(self, reason=reason, misled_programs=programs, went_over=int(state.latched), twin_serves=state.latched)


def explained(
    choice: Choice, problem: Problem, target: Target, refused: Sequence[str], variant: Variant | None = None, *, interpreted: bool = False
) -> Explanation:
    """Explanation of a choice and of those passed over before it; `interpreted` is True where Triton's interpreter runs it."""
    record, reason = choice.record, choice.note
    if variant is not None and not interpreted and target.arch.isdigit() and (why := _uncompiled(variant, target)) is not None:
        reason += f"; {why}, so Triton compiles it at the first call"
    if choice.kind == "framework" and record is None and refused:
        reason += f" ({refused[0]})"
    if interpreted:
        reason += ", in Triton's interpreter"
    return Explanation(
        kind=choice.kind,
        reason=reason,
        gpu="cpu" if interpreted else target.slug,
        key=None if interpreted else problem.key(target.slug),
        template=None if variant is None else variant.template,
        variant_id=None if variant is None else variant.id,
        config=choice.config,
        source=None if record is None else record.outcome.source,
        origin=None if record is None else record.origin,
        record_key=None if record is None else record.key,
        median_us=None if record is None else record.median_us,
        framework_us=None if record is None else record.framework_us,
        refused=tuple(refused),
        differences=choice.differences,
        twin=choice.fallback,
    )


def _uncompiled(variant: Variant, target: Target) -> str | None:
    """Reason why this variant has no machine code here; None where it has."""
    try:
        if kernels.manifest(variant, target.arch) is not None:
            return None
        if lacks_archive(PACKAGE, variant.id, target.arch):
            return f"its machine code is in {distribution(target.arch)}, which isn't installed"
    except EnvironmentProblem as error:
        return str(error)
    return "there is no machine code of it"


def described(refusal: Refusal) -> str:
    """A refusal as a line."""
    record = refusal.record
    if record is None:
        return refusal.reason
    key = record.key
    return f"record of {record.origin or 'a database'} (gpu {key.gpu}, n {key.n}, d {key.d}, {key.dtype}): {refusal.reason}"
