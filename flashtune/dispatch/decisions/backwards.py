"""Choice of backward kernels, and the plans that compute gradients."""

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashtune.core.code.launching import operand_names
from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Variant
from flashtune.core.problems.passes import BACKWARD
from flashtune.core.problems.problem import FLAGS, Problem, ProblemKey
from flashtune.core.pytorch import devices
from flashtune.core.records.plans import Place
from flashtune.core.records.results import TuningRecord
from flashtune.dispatch.call.call import Call, trained_as
from flashtune.dispatch.plans.gradients import Backward, BackwardInputs, GradientPlan, Gradients, ReferencePlan
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.policy.choose import Choice, Pool, rank
from flashtune.dispatch.policy.torch_times import HOST_BACKWARD_US, backward_kind, reads_matrix, scaled_backward_us
from flashtune.dispatch.state.context import MOST_PLANS, Memo
from flashtune.dispatch.state.recorded import CALLS
from flashtune.templates import families
from flashtune.templates.family import Family


def forward_of(call: Call) -> Call:
    """Forward of a call whose gradients kernels compute: it returns the LSE, and takes tensors as `Call.views` makes them."""
    return replace(call, return_lse=True, rank=4, batch_dims=(call.batch,), identity=True)


def composite(call: Call) -> bool:
    """True where PyTorch would compute a call's gradients by operations on all scores (`Call.composite`), several times slower than
    kernels.

    False on the CPU, where kernels are interpreted, which is slower than anything of PyTorch's.
    """
    return call.composite and call.device.type != "cpu"


def gradient_choice(
    memo: Memo, problem: Problem, target: Target, *, deterministic: bool = False, composite: bool = False
) -> tuple[Choice | None, str]:
    """Kernel for the backward of `problem` on `target`, or None and the reason for PyTorch.

    `deterministic` requires bitwise repeatable gradients; `composite` is the result of the function of that name. A kernel serves where it
    is expected to take less time than PyTorch, the host's included (`torch_us_of`). Kernels without measurements on the GPU's architecture
    serve only where unmeasured ones are allowed, in the interpreter, too, or PyTorch has no fused kernel.
    """
    trained = replace(problem, direction="bwd")
    if memo.settings.plan is not None:
        return memo.settings.plan.trains(trained, target.slug), f"the plan {memo.settings.plan.path} has no gradients of such calls"
    if "bwd" in memo.pinned:
        return Choice(kind="exact", spec=trained.spec(), note="its kernel is pinned"), ""
    key = trained.key(target.slug)
    pool, known = memo.pool(key, target), _allowed(families(), deterministic)
    unmeasured = memo.unmeasured or composite
    chosen = next(measured_gradients(trained, target, pool, known, framework_serves=not composite, unmeasured=unmeasured), None)
    if chosen is None:
        with_more = f" with {' and '.join(trained.features.asked)}" if trained.features.asked else ""
        served = any(family.direction == "bwd" and family.supports(trained.spec(), target) is None for family in known.values())
        if unmeasured or not served:
            return None, f"none of our backward kernels takes such calls{with_more}"
        why = f"no backward kernel for such calls{with_more} was measured on GPUs like {target.name}"
        return None, f"{why} (FLASHTUNE_UNMEASURED=1 allows unmeasured ones)"
    record = chosen.record
    if record is None or composite or (memo.unmeasured and chosen.family is not None):
        return chosen, ""
    if chosen.family is not None and len(known) < len(families()):
        # Records hold the times of PyTorch's usual gradients, which aren't repeatable.
        return chosen, ""
    if record.key == key and (chosen.family is None or (record.outcome.call_us and record.framework_call_us)):
        # Measured whole training steps include the host's time.
        return (chosen, "") if chosen.family is not None else (None, chosen.note)
    torch_us = torch_us_of(trained, pool, key)
    ours_us = max(HOST_BACKWARD_US, scaled_backward_us(record.median_us, record.problem, trained))
    if ours_us <= torch_us:
        return chosen, ""
    return None, f"PyTorch takes an estimated {torch_us:.1f} us for it, and ours {ours_us:.1f} us, the host's launches included"


def torch_us_of(trained: Problem, pool: Pool, key: ProblemKey) -> float:
    """Expected time of PyTorch's backward in us, scaled by tiles from the nearest record of equal features with a time of PyTorch's.

    Without such a time it is infinitely slow where it reads a matrix of all scores, which takes 3 to 100 times as long as ours; else it is
    taken to be as fast as the nearest record of equal features.
    """
    nearest: TuningRecord | None = None
    for one in pool.near_or_exact(key):
        if backward_kind(one.problem) == backward_kind(trained):
            if one.framework_us is not None:
                return scaled_backward_us(one.framework_us, one.problem, trained)
            nearest = nearest or one
    if reads_matrix(trained):
        return math.inf
    return scaled_backward_us(nearest.median_us, nearest.problem, trained) if nearest is not None else 0.0


def usual(problem: Problem) -> Problem:
    """The problem at usual sizes of a training step, for choices that must not depend on a call's."""
    return replace(problem, batch=8, heads=16 * (problem.heads // problem.kv_heads), kv_heads=16, n_q=2048, n_kv=2048)


def measured_gradients(
    problem: Problem, target: Target, records: Pool | Sequence[TuningRecord], known: Mapping[str, Family], **words: Any
) -> Iterator[Choice]:
    """The policy's kernels by records of equal features, or else of some of them where PyTorch would read a matrix of all scores;
    PyTorch for a record that it won; and last the kernels that need no record (`rank`).

    A record that computes further gradients (dbias, dslopes) applies: ours takes less time without them.
    """
    informed = False
    for alike in (True, False):
        for choice in rank(problem, target, records, known, **words):
            if isinstance(choice, Choice) and choice.record is not None and _informs(choice.record.problem, problem, alike=alike):
                informed = True
                yield choice
        if informed or not reads_matrix(problem):
            break
    ranked = rank(problem, target, records, known, **words)
    yield from (one for one in ranked if isinstance(one, Choice) and one.record is None and one.family is not None)


def _informs(theirs: Problem, ours: Problem, *, alike: bool) -> bool:
    """True for a record that has all requested gradients, and the same features or (without `alike`) a subset of these."""
    a, b = theirs.features, ours.features
    if not set(b.asked) <= set(a.asked):
        return False
    if alike:
        return backward_kind(theirs) == backward_kind(ours)
    fewer = a.mask in ("none", b.mask) and (a.window is None or b.window is not None)
    return fewer and all(getattr(b, name) >= getattr(a, name) for name in FLAGS)


def _allowed(found: Mapping[str, Family], deterministic: bool) -> Mapping[str, Family]:
    """Repeatable families alone where gradients have to be: by the call, or by PyTorch's deterministic mode."""
    if not (deterministic or torch.are_deterministic_algorithms_enabled()):
        return found
    return {name: family for name, family in found.items() if family.repeatable}


def gradient_kernels(memo: Memo, call: Call, inputs: BackwardInputs) -> Iterator[tuple[Variant | None, GradientPlan]]:
    """Backward kernels that accept these tensors, best first; a pinned one has no variant."""
    if call.problem is None:
        return
    problem = trained_as(call.problem, inputs.requested)
    target, known, records = memo.surroundings(call.device, problem)
    mask = call.full_mask(inputs.mask)
    pinned = memo.pinned.get("bwd")
    written = operand_names(pinned.host.spec) if pinned is not None and pinned.host is not None else ()
    writes_all = written[len(BACKWARD.operands) :] == inputs.requested
    if pinned is not None and writes_all and pinned.accepts(inputs.query, inputs.key, inputs.value, mask):
        yield None, GradientPlan(call, Code(pinned))
    ranked = measured_gradients(problem, target, records, _allowed(known, call.deterministic), framework_serves=False)
    if memo.settings.plan is not None:
        ranked = memo.settings.plan.choices(_place(call, problem))
    for choice in ranked:
        if choice.family is not None and (variant := choice.variant) is not None:
            code = memo.kernels.code(choice.family, variant, call.device, target)
            if not isinstance(code, str) and code.module.accepts(inputs.query, inputs.key, inputs.value, mask):
                yield variant, GradientPlan(call, code)


def _place(call: Call, problem: Problem) -> Place:
    """Place of a call's gradients in a plan."""
    repeatable = call.deterministic or torch.are_deterministic_algorithms_enabled()
    return Place("gradients", devices.slug_here(call.device), problem, ("deterministic",) * repeatable)


def backward_of(memo: Memo, signature: Hashable, call: Callable[[], Call]) -> Backward:
    """Gradients of calls like the one that `call` makes, by kernels that are chosen at first use; cached by signature."""
    if (known := memo.backwards.get(signature)) is not None:
        return known
    if len(memo.backwards) >= MOST_PLANS:
        memo.backwards.clear()
    return memo.backwards.setdefault(signature, Backward(call(), functools.partial(_first_gradients, memo)))


def _first_gradients(memo: Memo, call: Call, inputs: BackwardInputs) -> tuple[GradientPlan | ReferencePlan, Gradients]:
    """Plan of the best backward kernel that accepts these tensors and runs, else of the formula, and its gradients."""
    if call.problem is not None and not memo.pinned:
        # Compiled graphs get here without `attention`, which records other calls.
        CALLS.meet(trained_as(call.problem, inputs.requested))
    with memo.lock:
        # Kernels that failed before are skipped.
        for variant, plan in gradient_kernels(memo, call, inputs):
            found = memo.kernels.tried(variant, call.device, functools.partial(plan.build, inputs), functools.partial(plan.run, inputs))
            if found is not None:
                if call.problem is not None and variant is not None:
                    memo.met.note(_place(call, trained_as(call.problem, inputs.requested)), variant)
                return plan, found
        if memo.settings.plan is not None and call.problem is not None:
            raise memo.settings.plan.unable(_place(call, trained_as(call.problem, inputs.requested)), "no kernel of it takes these tensors")
    formula = ReferencePlan(call, inputs)
    return formula, formula.run(inputs)
