"""From a call to plans: the policy's choices in their order, with their kernels, and what was passed over."""

import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flashtune.core.band import Sides
from flashtune.core.config import Variant
from flashtune.core.problem import MAX_HEAD_DIM, Problem
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target
from flashtune.core.torch_dtypes import KERNEL_DTYPES
from flashtune.dispatch.call import Call
from flashtune.dispatch.launch import devices, kernels
from flashtune.dispatch.plans.drawing import IN_AUTOGRAD, unseeded
from flashtune.dispatch.plans.forward import FrameworkPlan, KernelPlan, Twin
from flashtune.dispatch.plans.recalling import RememberingPlan
from flashtune.dispatch.policy import Choice, Kind, Pool, Refusal, growing, rank, torch_has
from flashtune.dispatch.policy.ready import ready_first
from flashtune.dispatch.resolve import backwards
from flashtune.dispatch.resolve.code import code_of, variant_of
from flashtune.dispatch.resolve.explanation import Explanation, described, explained
from flashtune.dispatch.resolve.given import GRADIENTS
from flashtune.dispatch.resolve.memo import Memo
from flashtune.templates import families
from flashtune.templates.family import Family

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Query, key, value and mask, as they were given."""


Recalls = Literal["kernels", "operations"]
"""Who can compute again what kernels drew without gradients: kernels, forward and backward, or torch's operations with a mask."""


class Candidate(NamedTuple):
    """A plan that may serve, the step of the policy that chose it, and what says why; `variant` is None where it is the framework's.

    Where it `trains`, kernels compute the gradients, too, and the plan is that of the forward (`forward_of`). `recalls` says what drops
    again, in the framework's place, what kernels dropped without gradients (`training.recalling`); None where nothing has to.
    """

    plan: FrameworkPlan | KernelPlan | RememberingPlan
    kind: Kind
    said: Callable[[], Explanation]
    variant: Variant | None = None
    trains: bool = False
    recalls: Recalls | None = None

    @property
    def explanation(self) -> Explanation:
        """Why it may serve, put into words only when somebody asks: a sequence that grows is decided on anew at each token."""
        return self.said()


def candidates(memo: Memo, call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, torch_only: str | None) -> Iterator[Candidate]:
    """Plans for a call, best first; the last is always the framework's.

    `torch_only` says why only the framework can serve, if that is so. A kernel that refuses these strides or pointers, or that failed
    before, rules out the other tuned ones of its family; the family's default is still tried, since it may take what they don't.
    """
    problem = call.problem
    if torch_only is None:
        torch_only = _out_of_reach(call)
    may_train = torch_only is None or torch_only in GRADIENTS
    if torch_only in GRADIENTS and problem is not None:
        why = yield from _trained(memo, call, problem, (q, k, v, mask), GRADIENTS[torch_only])
        torch_only = f"{torch_only}, and {why}"
        if call.mask_kind != "none" and call.device.type == "cuda":
            torch_only += " (without cuDNN, whose gradients can be NaN under a mask)"
    drawing = _drawing(memo, call, problem) if may_train and problem is not None else None
    if drawing is not None:
        torch_only = drawing.torch_only if torch_only is None else torch_only
    if torch_only is None and problem is not None:
        if devices.INTERPRETING:
            memo.warn_of_missing()
        yield from _by_rank(memo, call, problem, (q, k, v, mask), drawing or Drawing())
        return
    memo.warn_of_missing()
    gpu = "cpu" if call.device.type == "cpu" else _slug(call.device)
    key = problem.key(gpu) if problem is not None and gpu != call.device.type else None
    said = functools.partial(Explanation, kind="framework", reason=f"{torch_only}, so torch's own attention serves it", gpu=gpu, key=key)
    recalls = _recalling(call, drawing)
    if recalls == "kernels":
        said = functools.partial(_said_more, said, "what kernels drew without gradients they draw again")
    yield Candidate(plan=FrameworkPlan.of(call, q, k, v, mask), kind="framework", said=said, recalls=recalls)


def _out_of_reach(call: Call) -> str | None:
    """Why no kernel can serve a call like this, whatever was measured; None where one might."""
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


def _trained(memo: Memo, call: Call, problem: Problem, given: Tensors, asked: Sequence[str]) -> Generator[Candidate, None, str]:
    """Plans of kernels for a call whose gradients are needed, also those that are `asked` for; returns why there are no more."""
    target, trained = devices.target_of(call.device), backwards.trained_as(problem, asked)
    repeatable = backwards.same_bits_asked(call.deterministic)
    chosen, why = backwards.gradient_choice(memo, trained, target, repeatable=repeatable, composite=backwards.composite(call))
    if chosen is not None:
        for forward in candidates(memo, backwards.forward_of(call), *call.views(*given[:3]), call.small_mask(given[3]), None):
            if forward.kind == "framework":
                return f"no kernel serves the forward ({forward.explanation.reason})"
            yield forward._replace(said=functools.partial(_explained_both, forward, chosen, trained, target), trains=True)
    return why


class Drawing(NamedTuple):
    """What unseeded dropout makes of a call: whether kernels draw in training, whether they may draw again what was drawn without
    gradients, and why only torch can serve it, if that is so."""

    trains: bool = False
    recalls: bool = False
    torch_only: str | None = None


def _drawing(memo: Memo, call: Call, problem: Problem) -> Drawing | None:
    """The same of this call; None where nothing is drawn, or not by who serves.

    What is computed without gradients may be computed again with them, and has to drop the same then.
    """
    if memo.pinned or not call.torch_draws:
        return None
    trained, target = backwards.trained_as(problem), devices.target_of(call.device)
    repeatable = backwards.same_bits_asked(call.deterministic)
    chosen, why = backwards.gradient_choice(memo, trained, target, repeatable=repeatable)
    if chosen is not None:
        return Drawing(trains=True, recalls=True)
    recalls = backwards.has_gradients(memo, trained, target, repeatable=repeatable)
    alone = unseeded() == IN_AUTOGRAD or not recalls
    return Drawing(recalls=recalls, torch_only=f"unseeded dropout drops what it would drop in training, and there {why}" if alone else None)


def _recalling(call: Call, drawing: Drawing | None) -> Recalls | None:
    """What is to compute a call of the framework's again, where a kernel drew for one like it without gradients."""
    if drawing is not None and drawing.recalls:
        return "kernels"
    drawn = call.device.type == "cuda" or devices.INTERPRETING
    return "operations" if drawn and call.torch_draws and call.problem is not None else None


def _by_rank(memo: Memo, call: Call, problem: Problem, given: Tensors, drawing: Drawing) -> Iterator[Candidate]:
    """Plans in the policy's order, of kernels that can be built and take these tensors."""
    target, known, records = memo.surroundings(call.device, problem)
    q, k, v = call.views(*given[:3])
    mask = call.full_mask(given[3])
    interpreted = call.device.type == "cpu"
    # Gradients of a bias and of what is given per head may be torch's where others aren't.
    remembers = drawing.recalls and (not drawing.trains or call.mask_kind == "bias" or call.per_head)
    refused: list[str] = []
    failed: set[str] = set()
    if (pinned := memo.pinned.get("fwd")) is not None and pinned.accepts(q, k, v, mask):
        said = functools.partial(Explanation, kind="exact", reason="its kernel is pinned", gpu=target.slug)
        yield Candidate(plan=KernelPlan(call, pinned, q), kind="exact", said=said)
    # Where kernels draw in training, torch would drop other pairs.
    words = {"framework_serves": call.fused_by_torch and not drawing.trains, "unmeasured": memo.unmeasured or interpreted}
    for choice in _ranked(memo, problem, target, records, known, **words):
        if isinstance(choice, Refusal):
            refused.append(_refusal(memo, choice))
            continue
        family, config = choice.family, choice.config
        if family is None or config is None:
            said = functools.partial(explained, choice, problem, target, tuple(refused))
            yield Candidate(plan=FrameworkPlan.of(call, q, k, v, mask), kind=choice.kind, said=said, recalls=_recalling(call, drawing))
            continue
        if family.name in failed and choice.record is not None:
            continue
        variant = variant_of(choice, family)
        module, manifest, whole, why = code_of(memo, family, variant, call.device, target)
        if module is not None and module.accepts(q, k, v, mask):
            said = functools.partial(explained, choice, problem, target, tuple(refused), variant, interpreted=interpreted)
            if choice.record is not None and call.device.type == "cuda":
                memo.warn_of_elsewhere(choice.record, call.device)
            twin = _twin(memo, call, choice, target, q)
            plan = KernelPlan(call, module, q, twin=twin, manifest=manifest, whole=whole, warn=memo.warn_once)
            if not remembers:
                yield Candidate(plan=plan, kind=choice.kind, said=said, variant=variant)
            else:
                remembering = RememberingPlan(plan, torch_trains=not drawing.trains)
                said = functools.partial(_said_more, said, "what it draws is remembered, to be drawn again with gradients")
                yield Candidate(plan=remembering, kind=choice.kind, said=said, variant=variant)
            # The caller comes back only when this one failed.
            why = memo.broken.get((variant.id, str(call.device)), "it failed")
        elif module is not None:
            why = "it doesn't take these strides or addresses"
        refused.append(f"{variant.template} {variant.id}: {why}")
        failed.add(family.name)


def _twin(memo: Memo, call: Call, choice: Choice, target: Target, q: Tensor) -> Twin | None:
    """What serves in a choice's place while scores mislead it; its code is looked for when that happens."""
    family, config, record = choice.family, choice.twin, choice.record
    if family is None or config is None or record is None or record.twin is None:
        return None
    known_hash = record.twin.template_hash
    like = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device="meta")

    def plan() -> KernelPlan | None:
        with memo.lock:
            variant = kernels.variant(family, choice.spec, config, known_hash)
            module, manifest, whole, _ = code_of(memo, family, variant, call.device, target)
            return None if module is None else KernelPlan(call, module, like, manifest=manifest, whole=whole, warn=memo.warn_once)

    return Twin(config=config, plan=plan)


def serves_span(memo: Memo, call: Call, variant: Variant | None, sides: Sides) -> bool:
    """Whether this kernel (None: torch) is what the policy chooses for all decoding steps of the span that this call lies in."""
    if call.problem is None or memo.pinned:
        return False
    target, known, records = memo.surroundings(call.device, call.problem)
    if not isinstance(records, Pool):
        return False
    unmeasured = memo.unmeasured or call.device.type == "cpu"

    def chosen(problem: Problem) -> Choice:
        ranked = _ranked(memo, problem, target, records, known, framework_serves=call.fused_by_torch, unmeasured=unmeasured)
        return next(choice for choice in ranked if isinstance(choice, Choice))

    choice = growing.choice_of_span(call.problem, sides, records, chosen)
    return choice is not None and (None if choice.family is None else variant_of(choice, choice.family)) == variant


def explain_problem(memo: Memo, problem: Problem, target: Target) -> Explanation:
    """What the policy says of `problem` on `target`, without tensors: strides and compilers have no say."""
    refused: list[str] = []
    if problem.direction == "bwd":
        repeatable = backwards.same_bits_asked(deterministic=False)
        chosen, why = backwards.gradient_choice(memo, problem, target, repeatable=repeatable, composite=problem.features.softcap)
        if chosen is None or chosen.family is None:
            reason = f"{why}, so torch's own attention serves the gradient"
            return Explanation(kind="framework", reason=reason, gpu=target.slug, key=problem.key(target.slug))
        return explained(chosen, problem, target, refused, variant_of(chosen, chosen.family))
    pool = memo.pool(problem.key(target.slug), target)
    for choice in _ranked(memo, problem, target, pool, families(), framework_serves=torch_has(problem), unmeasured=memo.unmeasured):
        if isinstance(choice, Choice):
            variant = None if choice.family is None else variant_of(choice, choice.family)
            return explained(choice, problem, target, refused, variant)
        refused.append(described(choice))
    raise AssertionError("the ranking ends with the framework")


def _explained_both(forward: Candidate, chosen: Choice, problem: Problem, target: Target) -> Explanation:
    """The explanation of a forward by kernels, and of the backward's kernel that was `chosen`."""
    variant = None if chosen.family is None else variant_of(chosen, chosen.family)
    return replace(forward.explanation, backward=explained(chosen, problem, target, (), variant))


def _said_more(said: Callable[[], Explanation], more: str) -> Explanation:
    """The same with another clause of its reason."""
    found = said()
    return replace(found, reason=f"{found.reason}; {more}")


def _ranked(
    memo: Memo, problem: Problem, target: Target, records: Pool | Sequence[TuningRecord], known: Mapping[str, Family], **words: bool
) -> Iterator[Choice | Refusal]:
    """The policy's order, save that what is compiled goes before near-equal stand-ins that aren't."""
    return ready_first(rank(problem, target, records, known, **words), functools.partial(_compiled, memo, target))


def _compiled(memo: Memo, target: Target, choice: Choice) -> bool:
    """Whether machine code of a choice's kernel is at hand."""
    family, config, record = choice.family, choice.config, choice.record
    known_hash = None if record is None else record.outcome.template_hash
    if family is None or config is None or not kernels.may_be_compiled(family, choice.spec, config, known_hash, target.arch):
        return False
    return memo.machine_code(family, variant_of(choice, family), target)[0] is not None


def _refusal(memo: Memo, refusal: Refusal) -> str:
    """The refusal as a line; rows that should not exist are warned of once."""
    text = described(refusal)
    if refusal.invalid and refusal.record is not None:
        memo.warn_once(f"flashtune: {text} (search it again or delete the row)")
    return text


def _slug(device: torch.device) -> str:
    # Fake tensors may be on a GPU that isn't there.
    return devices.target_of(device).slug if device.type == "cuda" and torch.cuda.is_available() else device.type
