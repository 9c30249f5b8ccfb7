"""From a request to plans: walks the policy's ranking, loads kernels and says what was passed over and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from flashtune.core.config import Variant
from flashtune.core.errors import FlashtuneError
from flashtune.core.launching import launcher
from flashtune.core.problem import Problem
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target
from flashtune.dispatch import devices, kernels
from flashtune.dispatch.explanation import Explanation
from flashtune.dispatch.memo import Memo, Plan
from flashtune.dispatch.plans import FrameworkPlan, kernel_plan
from flashtune.dispatch.policy import Choice, Refusal, rank
from flashtune.dispatch.request import Request
from flashtune.templates import families
from flashtune.templates.family import Family

_DRIVER_ERRORS = ("CUDA error", "HIP error", "Triton Error [")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that may serve, with its explanation; `variant` is None where it is the framework's."""

    plan: Plan
    explanation: Explanation
    variant: Variant | None = None


def candidates(
    memo: Memo,
    request: Request,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    torch_only: str | None,
) -> Iterator[Candidate]:
    """Plans for a request, best first; the last is always the framework's.

    `torch_only` says why only the framework can serve, if that is so. A kernel that refuses these strides or pointers, or that failed
    before, rules out the other tuned ones of its family; the family's default is still tried, since it may take what they don't.
    """
    problem = request.problem
    if torch_only is None and request.empty:
        torch_only = "there is nothing to compute"
    elif torch_only is None and problem is None:
        torch_only = f"kernels take float16, bfloat16, float32 and float8_e4m3fn, not {str(request.dtype).removeprefix('torch.')}"
    if torch_only is not None or problem is None:
        gpu = "cpu" if request.device.type == "cpu" else _slug(request.device)
        key = problem.key(gpu) if problem is not None and request.device.type == "cuda" else None
        reason = f"{torch_only}, so torch's own attention serves it"
        yield Candidate(plan=FrameworkPlan(request=request), explanation=Explanation(kind="framework", reason=reason, gpu=gpu, key=key))
        return
    target, known, records = _surroundings(memo, request, problem)
    q, k, v = request.views(q, k, v)
    mask = request.full_mask(mask)
    refused: list[str] = []
    failed: set[str] = set()
    for choice in rank(problem, target, records, known, framework_serves=request.fused_by_torch):
        if isinstance(choice, Refusal):
            refused.append(_refusal(memo, choice))
            continue
        family, config = choice.family, choice.config
        if family is None or config is None:
            yield Candidate(plan=FrameworkPlan(request=request), explanation=explained(choice, problem, target, refused))
            continue
        if family.name in failed and choice.record is not None:
            continue
        variant = _variant(choice, family)
        name = f"{variant.template} {variant.id}"
        module, why = _loaded(memo, family, variant, request.device)
        if module is None:
            refused.append(f"{name}: {why}")
            failed.add(family.name)
        elif not module.accepts(q, k, v, mask):
            refused.append(f"{name}: it doesn't take these strides or addresses")
            failed.add(family.name)
        else:
            explanation = explained(choice, problem, target, refused, variant)
            if request.device.type == "cpu":
                reason = f"{explanation.reason}, in Triton's interpreter"
                explanation = replace(explanation, gpu="cpu", key=None, reason=reason)
            yield Candidate(plan=kernel_plan(request, launcher(module), q), explanation=explanation, variant=variant)
            # The caller comes back only when this one failed.
            refused.append(f"{name}: {memo.broken.get((variant.id, str(request.device)), 'it failed')}")
            failed.add(family.name)


def explain_problem(memo: Memo, problem: Problem, target: Target) -> Explanation:
    """What the policy says of `problem` on `target`, without tensors: strides and compilers have no say."""
    refused: list[str] = []
    for choice in rank(problem, target, memo.records(problem.key(target.slug)), families(), framework_serves=_torch_has(problem)):
        if isinstance(choice, Choice):
            variant = None if choice.family is None else _variant(choice, choice.family)
            return explained(choice, problem, target, refused, variant)
        refused.append(_described(choice))
    raise AssertionError("the ranking ends with the framework")


def explained(choice: Choice, problem: Problem, target: Target, refused: list[str], variant: Variant | None = None) -> Explanation:
    """The explanation of a choice and of what was passed over before it."""
    record, reason = choice.record, choice.note
    if record is not None and variant is not None and variant.template_hash != record.outcome.template_hash:
        reason += f"; the template {variant.template} has changed since, so search again for a current time"
    if choice.kind == "framework" and record is None and refused:
        reason += f" ({refused[-1]})"
    return Explanation(
        kind=choice.kind,
        reason=reason,
        gpu=target.slug,
        key=problem.key(target.slug),
        template=None if variant is None else variant.template,
        variant_id=None if variant is None else variant.id,
        config=choice.config,
        source=None if record is None else record.outcome.source,
        origin=None if record is None else record.origin,
        record_key=None if record is None else record.key,
        median_us=None if record is None else record.median_us,
        framework_us=None if record is None else record.framework_us,
        refused=tuple(refused),
    )


def report_failure(memo: Memo, variant: Variant, device: torch.device, error: BaseException) -> str:
    """Remember that a kernel failed on a device, warn once, and return the reason in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    memo.broken[variant.id, str(device)] = why
    memo.warn_once(f"flashtune: {variant.template} with {variant.config.label()} failed on {device} and is skipped from now on: {why}")
    return why


def is_kernels_fault(error: Exception) -> bool:
    """Whether another kernel may do better: compilers fail in many ways, but out of memory and driver errors are nobody's config."""
    if isinstance(error, (FlashtuneError, torch.OutOfMemoryError)):
        return False
    return not str(error).startswith(_DRIVER_ERRORS)


def _surroundings(memo: Memo, request: Request, problem: Problem) -> tuple[Target, Mapping[str, Family], list[TuningRecord]]:
    """The target, the families that run there and the records; the interpreter runs defaults alone, since times mean nothing to it."""
    target = devices.target_of(request.device)
    if request.device.type == "cpu":
        return target, {name: family for name, family in families().items() if family.interpretable}, []
    return target, families(), memo.records(problem.key(target.slug))


def _loaded(memo: Memo, family: Family, variant: Variant, device: torch.device) -> tuple[ModuleType | None, str]:
    """The kernel's module, or None and why it can't be had."""
    why = memo.broken.get((variant.id, str(device)))
    if why is not None:
        return None, why
    try:
        return kernels.load(family, variant), ""
    except (OSError, ImportError) as error:
        return None, report_failure(memo, variant, device, error)


def _variant(choice: Choice, family: Family) -> Variant:
    assert choice.config is not None, "a choice with a family has a config"
    known_hash = choice.record.outcome.template_hash if choice.record is not None else None
    return kernels.variant(family, choice.spec, choice.config, known_hash)


def _torch_has(problem: Problem) -> bool:
    """Whether one call of torch's attention serves the features of a problem."""
    f = problem.features
    if f.window is not None or f.softcap or f.alibi or problem.dtype == "fp8":
        return False
    return not f.causal or (problem.band.diagonal == 0 and f.mask == "none")


def _refusal(memo: Memo, refusal: Refusal) -> str:
    """The refusal as a line; rows that should not exist are warned of once."""
    text = _described(refusal)
    if refusal.invalid and refusal.record is not None:
        memo.warn_once(f"flashtune: {text} (search it again or delete the row)")
    return text


def _described(refusal: Refusal) -> str:
    record = refusal.record
    if record is None:
        return refusal.reason
    key = record.key
    return f"record of {record.origin or 'a database'} (gpu {key.gpu}, n {key.n}, d {key.d}, {key.dtype}): {refusal.reason}"


def _slug(device: torch.device) -> str:
    return devices.target_of(device).slug if device.type == "cuda" else device.type
