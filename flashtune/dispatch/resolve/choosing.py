"""Plans of a call: the policy's choices in their order, with their kernels, and the reasons against others."""

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.band import Sides
from flashtune.core.config import Variant
from flashtune.core.problem import MAX_HEAD_DIM, Problem
from flashtune.core.target import Target
from flashtune.core.torch_dtypes import KERNEL_DTYPES
from flashtune.dispatch.call import Call
from flashtune.dispatch.choose import Choice, Compiled, Kind, Pool, Refusal, choose, rank, torch_has
from flashtune.dispatch.launch import devices, kernels
from flashtune.dispatch.plans.forward import Fallback, KernelPlan
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.resolve import backwards, length_buckets
from flashtune.dispatch.resolve.code import code_of, variant_of
from flashtune.dispatch.resolve.explanation import Explanation, described, explained
from flashtune.dispatch.resolve.inspection import GRADIENTS
from flashtune.dispatch.resolve.memo import Memo
from flashtune.templates import families

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Query, key, value and mask of the caller."""


class Candidate(NamedTuple):
    """Plan that may serve, the step of the policy that chose it, and a factory of its explanation; `variant` is None for PyTorch.

    Where `trains` is True, kernels compute the gradients, too, and the plan is that of the forward (`forward_of`).
    """

    plan: TorchPlan | KernelPlan
    kind: Kind
    said: Callable[[], Explanation]
    variant: Variant | None = None
    trains: bool = False

    @property
    def explanation(self) -> Explanation:
        """Explanation, formatted on demand: a growing sequence makes a choice per token."""
        return self.said()


def candidates(memo: Memo, call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, torch_only: str | None) -> Iterator[Candidate]:
    """Plans for a call, best first; the last is always PyTorch's.

    `torch_only` is the reason why only PyTorch can serve, if there is one. A kernel that refuses these strides or pointers, or that failed
    before, excludes the other tuned ones of its family; the family's default is still tried, since it may accept them.
    """
    problem = call.problem
    if torch_only is None:
        torch_only = _out_of_reach(call)
    if torch_only in GRADIENTS and problem is not None:
        why = yield from _trained(memo, call, problem, (q, k, v, mask), GRADIENTS[torch_only])
        torch_only = f"{torch_only}, and {why}"
        if call.mask_kind != "none" and call.device.type == "cuda":
            torch_only += " (without cuDNN, whose gradients can be NaN under a mask)"
    fused = call.fused_by_torch
    if torch_only is None and problem is not None and call.torch_draws and not memo.pinned:
        # A forward without gradients may be recomputed with them, and has to drop the same pairs.
        repeatable = backwards.repeatable_requested(call.deterministic)
        chosen, why = backwards.gradient_choice(memo, backwards.trained_as(problem), devices.target_of(call.device), repeatable=repeatable)
        fused = fused and chosen is None
        if chosen is None:
            torch_only = f"unseeded dropout is served as in training, and there {why}"
    if torch_only is None and problem is not None:
        if devices.INTERPRETING:
            memo.warn_of_missing()
        yield from _by_rank(memo, call, problem, (q, k, v, mask), framework_serves=fused)
        return
    memo.warn_of_missing()
    gpu = "cpu" if call.device.type == "cpu" else _slug(call.device)
    key = problem.key(gpu) if problem is not None and gpu != call.device.type else None
    said = functools.partial(Explanation, kind="framework", reason=f"{torch_only}, so PyTorch's own attention serves it", gpu=gpu, key=key)
    yield Candidate(plan=TorchPlan.of(call, q, k, v, mask), kind="framework", said=said)


def _out_of_reach(call: Call) -> str | None:
    """Reason why no kernel can serve a call like this, whatever was measured; None where one might."""
    if call.empty:
        return "there is nothing to compute"
    if call.problem is None and call.dtype in KERNEL_DTYPES:
        size = call.d_v if 0 < call.d <= MAX_HEAD_DIM else call.d
        return f"kernels take head sizes of 1 to {MAX_HEAD_DIM}, not {size}"
    if call.problem is None:
        return f"kernels take float16, bfloat16, float32 and float8_e4m3fn, not {str(call.dtype).removeprefix('torch.')}"
    if call.problem.dtype == "bf16" and call.device.type == "cpu":
        return "Triton's interpreter can't multiply bfloat16"
    return None


def _trained(memo: Memo, call: Call, problem: Problem, tensors: Tensors, requested: Sequence[str]) -> Generator[Candidate, None, str]:
    """Plans of kernels for a call that needs gradients, `requested` beside dQ, dK and dV; returns the reason why there are no more."""
    target, trained = devices.target_of(call.device), backwards.trained_as(problem, requested)
    repeatable = backwards.repeatable_requested(call.deterministic)
    chosen, why = backwards.gradient_choice(memo, trained, target, repeatable=repeatable, composite=backwards.composite(call))
    if chosen is not None:
        for forward in candidates(memo, backwards.forward_of(call), *call.views(*tensors[:3]), call.small_mask(tensors[3]), None):
            if forward.kind == "framework":
                return f"no kernel serves the forward ({forward.explanation.reason})"
            yield forward._replace(said=functools.partial(_explained_both, forward, chosen, trained, target), trains=True)
    return why


def _by_rank(memo: Memo, call: Call, problem: Problem, tensors: Tensors, *, framework_serves: bool) -> Iterator[Candidate]:
    """Plans in the policy's order, of kernels that can be built and accept these tensors."""
    target, known, records = memo.surroundings(call.device, problem)
    q, k, v = call.views(*tensors[:3])
    mask = call.full_mask(tensors[3])
    interpreted = call.device.type == "cpu"
    refused: list[str] = []
    failed: set[str] = set()
    if (pinned := memo.pinned.get("fwd")) is not None and pinned.accepts(q, k, v, mask):
        said = functools.partial(Explanation, kind="exact", reason="its kernel is pinned", gpu=target.slug)
        yield Candidate(plan=KernelPlan(call, pinned, q), kind="exact", said=said)
    words = {"framework_serves": framework_serves, "unmeasured": memo.unmeasured or interpreted}
    for choice in rank(problem, target, records, known, **words, compiled=compiled_on(target)):
        if isinstance(choice, Refusal):
            refused.append(_refusal(memo, choice))
            continue
        family, config = choice.family, choice.config
        if family is None or config is None:
            said = functools.partial(explained, choice, problem, target, tuple(refused))
            yield Candidate(plan=TorchPlan.of(call, q, k, v, mask), kind=choice.kind, said=said)
            continue
        if family.name in failed and choice.record is not None:
            continue
        variant = variant_of(choice, family)
        module, manifest, whole, why = code_of(memo, family, variant, call.device, target)
        if module is not None and module.accepts(q, k, v, mask):
            said = functools.partial(explained, choice, problem, target, tuple(refused), variant, interpreted=interpreted)
            if choice.record is not None and call.device.type == "cuda":
                memo.warn_of_elsewhere(choice.record, call.device)
            fallback = _fallback(memo, call, choice, target, q)
            plan = KernelPlan(call, module, q, fallback=fallback, manifest=manifest, whole=whole, warn=memo.warn_once)
            yield Candidate(plan=plan, kind=choice.kind, said=said, variant=variant)
            # The caller resumes the generator only after this candidate failed.
            kernel = (variant.id, str(call.device))
            why = memo.broken.get(kernel) or memo.faults.get(kernel) or "it failed"
        elif module is not None:
            why = "it doesn't take these strides or addresses"
        refused.append(f"{variant.template} {variant.id}: {why}")
        failed.add(family.name)


def _fallback(memo: Memo, call: Call, choice: Choice, target: Target, q: Tensor) -> Fallback | None:
    """Fallback kernel of a choice; its code is loaded at the first switch to it."""
    family, config, record = choice.family, choice.fallback, choice.record
    if family is None or config is None or record is None or record.fallback is None:
        return None
    like = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="meta")

    def plan() -> KernelPlan | None:
        with memo.lock:
            variant = kernels.variant(family, choice.spec, config)
            module, manifest, whole, _ = code_of(memo, family, variant, call.device, target)
            return None if module is None else KernelPlan(call, module, like, manifest=manifest, whole=whole, warn=memo.warn_once)

    return Fallback(config=config, plan=plan)


def serves_bucket(memo: Memo, call: Call, variant: Variant | None, sides: Sides) -> bool:
    """True where the policy chooses this kernel (None: PyTorch) for all decode steps of the call's length bucket."""
    if call.problem is None or memo.pinned:
        return False
    target, known, records = memo.surroundings(call.device, call.problem)
    if not isinstance(records, Pool):
        return False
    unmeasured = memo.unmeasured or call.device.type == "cpu"

    def chosen(problem: Problem) -> Choice:
        words = {"framework_serves": call.fused_by_torch, "unmeasured": unmeasured}
        return choose(problem, target, records, known, **words, compiled=compiled_on(target))

    choice = length_buckets.choice_of_bucket(call.problem, sides, records, chosen)
    return choice is not None and (None if choice.family is None else variant_of(choice, choice.family)) == variant


def explain_problem(memo: Memo, problem: Problem, target: Target) -> Explanation:
    """Explanation for `problem` on `target`, without tensors: strides and compilers aren't considered."""
    refused: list[str] = []
    if problem.direction == "bwd":
        repeatable = backwards.repeatable_requested(deterministic=False)
        chosen, why = backwards.gradient_choice(memo, problem, target, repeatable=repeatable, composite=problem.features.softcap)
        if chosen is None or chosen.family is None:
            reason = f"{why}, so PyTorch's own attention serves the gradient"
            return Explanation(kind="framework", reason=reason, gpu=target.slug, key=problem.key(target.slug))
        return explained(chosen, problem, target, refused, variant_of(chosen, chosen.family))
    pool = memo.pool(problem.key(target.slug), target)
    words = {"framework_serves": torch_has(problem), "unmeasured": memo.unmeasured}
    for choice in rank(problem, target, pool, families(), **words, compiled=compiled_on(target)):
        if isinstance(choice, Choice):
            variant = None if choice.family is None else variant_of(choice, choice.family)
            return explained(choice, problem, target, refused, variant)
        refused.append(described(choice))
    raise AssertionError("the ranking ends with PyTorch")


def _explained_both(forward: Candidate, chosen: Choice, problem: Problem, target: Target) -> Explanation:
    """Explanation of a forward by kernels, and of the kernel `chosen` for its backward."""
    variant = None if chosen.family is None else variant_of(chosen, chosen.family)
    return replace(forward.explanation, backward=explained(chosen, problem, target, (), variant))


def compiled_on(target: Target) -> Compiled:
    """Predicate of kernels whose machine code for this GPU is at hand."""
    return functools.partial(kernels.compiled, arch=target.arch)


def _refusal(memo: Memo, refusal: Refusal) -> str:
    """A refusal as a line; invalid records are warned of once."""
    text = described(refusal)
    if refusal.invalid and refusal.record is not None:
        memo.warn_once(f"flashtune: {text} (search it again or delete the record)")
    return text


def _slug(device: torch.device) -> str:
    # Fake tensors may be on a GPU that doesn't exist here.
    return devices.target_of(device).slug if device.type == "cuda" and torch.cuda.is_available() else device.type
