"""Choice of backward kernels, and the plans that compute gradients."""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from flashtune.core.config import Variant
from flashtune.core.launching import operand_names
from flashtune.core.passes import BACKWARD
from flashtune.core.problem import FLAGS, Problem
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target
from flashtune.dispatch.call import Call
from flashtune.dispatch.calls import CALLS
from flashtune.dispatch.plans.gradients import Backward, BackwardInputs, GradientPlan, Gradients, ReferencePlan
from flashtune.dispatch.policy import Choice, Pool, rank
from flashtune.dispatch.resolve.code import code_of, tried, variant_of
from flashtune.dispatch.resolve.memo import MOST_PLANS, Memo
from flashtune.templates import families
from flashtune.templates.family import Family, blocks_of_head

SHORTEST_BACKWARD_US = 120.0
"""Shortest backward of PyTorch, in us, that ours replaces: below it the host's time decides, where our training step costs a little more
(benchmarks/results/2026-11-22-h200-training)."""

TORCH_TILE = 128
"""Queries and keys of a tile of PyTorch's backward; pairs alone underestimate small causal ones
(benchmarks/results/2026-11-24-h200-training)."""

TORCH_BESIDE_US = 50.0
"""Time in us of PyTorch's backward beside its tiles, from 16 random problems of 192 to 1088 rows (the same results)."""


def forward_of(call: Call) -> Call:
    """Forward of a call whose gradients kernels compute: it returns the LSE, and takes tensors as `Call.views` makes them."""
    return replace(call, return_lse=True, rank=4, batch_dims=(call.batch,), identity=True)


def trained_as(problem: Problem, requested: Sequence[str] = ()) -> Problem:
    """Backward of a forward problem; `requested` are requested gradients beside dQ, dK and dV (`flashtune.core.problem.ASKED`)."""
    return replace(problem, direction="bwd", features=problem.features.asking(requested))


def composite(call: Call) -> bool:
    """True where PyTorch would compute a call's gradients by operations on all scores (`Call.composite`), several times slower than
    kernels.

    False on the CPU, where kernels are interpreted, which is slower than anything of PyTorch's.
    """
    return call.composite and call.device.type != "cpu"


def gradient_choice(
    memo: Memo, problem: Problem, target: Target, *, repeatable: bool = False, composite: bool = False
) -> tuple[Choice | None, str]:
    """Kernel for the backward of `problem` on `target`, or None and the reason for PyTorch.

    `repeatable` requires bitwise repeatable gradients; `composite` is the result of the function of that name. Kernels without measurements
    on the GPU's architecture serve only where unmeasured ones are allowed, in the interpreter, too; so do those that replace a backward of
    PyTorch's that is shorter than the host's time for our launches. Where `composite` is True, any kernel that takes the call serves.
    """
    trained = replace(problem, direction="bwd")
    if "bwd" in memo.pinned:
        return Choice(kind="exact", spec=trained.spec(), note="its kernel is pinned"), ""
    pool = memo.pool(trained.key(target.slug), target)
    known = _repeatable(families()) if repeatable else families()
    choices = _gradient_choices(trained, target, pool, known, framework_serves=not composite, unmeasured=memo.unmeasured)
    chosen = next(choices)
    if chosen.family is not None:
        record = chosen.record
        # Measured whole training steps of exactly this key include the host's time, so that no estimate is needed.
        exact = record is not None and record.key == trained.key(target.slug)
        stepped = exact and record is not None and record.outcome.call_us is not None and record.framework_call_us is not None
        if record is not None and not composite and not stepped and not memo.unmeasured:
            expected_us = _torch_us(trained, record, choices)
            if expected_us < SHORTEST_BACKWARD_US:
                return None, f"PyTorch takes an estimated {expected_us:.1f} us for it, less than the launches of ours take the host"
        return chosen, ""
    if chosen.record is not None:
        return None, chosen.note
    with_more = f" with {' and '.join(trained.features.asked)}" if trained.features.asked else ""
    served = any(family.direction == "bwd" and family.supports(trained.spec(), target) is None for family in known.values())
    if memo.unmeasured or composite or not served:
        return None, f"none of our backward kernels takes such calls{with_more}"
    why = f"no backward kernel for such calls{with_more} was measured on GPUs like {target.name}"
    return None, f"{why} (FLASHTUNE_UNMEASURED=1 allows unmeasured ones)"


def _torch_us(trained: Problem, record: TuningRecord, others: Iterator[Choice]) -> float:
    """Expected time of PyTorch's backward in us, scaled by tiles from the record that serves it, or else from the next one with a time of
    PyTorch.

    Kernels with repeatable gradients aren't timed beside PyTorch. Infinite where PyTorch reads a matrix of scores and no such record
    exists.
    """
    references = (one for one in itertools.chain([record], (other.record for other in others)) if one is not None)
    timed = (one for one in references if one.framework_us is not None and _reads_matrix(one.problem) == _reads_matrix(trained))
    reference = next(timed, None)
    if reference is None and _reads_matrix(trained):
        return math.inf
    record = reference or record
    known_us = record.median_us if record.framework_us is None else record.framework_us
    beside_us = min(known_us, TORCH_BESIDE_US)
    return beside_us + (known_us - beside_us) * _tiled(trained) / _tiled(record.problem)


def _tiled(problem: Problem) -> int:
    """Multiplications of a backward in tiles of TORCH_TILE queries and keys, partly visible tiles counted in full."""
    p = problem
    return max(1, p.batch * p.heads * blocks_of_head(p.band, p.n_q, p.n_kv, TORCH_TILE, TORCH_TILE) * (p.d + p.d_v))


def usual(problem: Problem) -> Problem:
    """The problem at usual sizes of a training step, for choices that must not depend on a call's."""
    return replace(problem, batch=8, heads=16 * (problem.heads // problem.kv_heads), kv_heads=16, n_q=2048, n_kv=2048)


def _gradient_choices(
    problem: Problem, target: Target, records: Pool | Sequence[TuningRecord], known: Mapping[str, Family], **words: bool
) -> Iterator[Choice]:
    """The policy's choices without records of other features than those of `problem`, its diagonal aside.

    PyTorch takes up to nine times as long for one feature as for another, so that other records don't say which is faster. A record that
    also computes further gradients (dbias, dslopes) applies to a call that doesn't request them: ours takes less time without them.

    Where no record has exactly these features and PyTorch would read a matrix of all scores, 3 to 100 times slower than ours, measured
    records with a subset of the features apply, too (benchmarks/results/2026-11-26-h100-divided).
    """
    informed = False
    for choice in rank(problem, target, records, known, **words):
        if not isinstance(choice, Choice):
            continue
        if choice.record is None and not informed and _reads_matrix(problem):
            informed = True
            yield from _with_fewer_features(problem, target, records, known)
        if choice.record is None or _informs(choice.record.problem, problem):
            informed = informed or choice.record is not None
            yield choice


def _with_fewer_features(
    problem: Problem, target: Target, records: Pool | Sequence[TuningRecord], known: Mapping[str, Family]
) -> Iterator[Choice]:
    """Choices by measured records whose features are a subset of a problem's."""
    for choice in rank(problem, target, records, known, framework_serves=False):
        if isinstance(choice, Choice) and choice.record is not None and choice.record.outcome.source == "measured":
            theirs, ours = choice.record.problem.features, problem.features
            mask = theirs.mask in ("none", ours.mask) and (theirs.window is None or ours.window is not None)
            if mask and all(getattr(ours, name) >= getattr(theirs, name) for name in FLAGS) and set(ours.asked) <= set(theirs.asked):
                yield choice


def _reads_matrix(problem: Problem) -> bool:
    """True where PyTorch needs a mask or bias of all scores for a problem."""
    f = problem.features
    return f.mask != "none" or f.window is not None or f.alibi or f.sinks


def _informs(theirs: Problem, ours: Problem) -> bool:
    return _kind(theirs) == _kind(ours) and set(ours.features.asked) <= set(theirs.features.asked)


def _kind(problem: Problem) -> tuple[object, ...]:
    f = problem.features
    return f.window is None, f.mask, *(getattr(f, name) for name in FLAGS)


def repeatable_requested(deterministic: bool) -> bool:
    """True where gradients have to be bitwise repeatable: by the call, or by PyTorch's deterministic mode."""
    return deterministic or torch.are_deterministic_algorithms_enabled()


def _repeatable(found: Mapping[str, Family]) -> dict[str, Family]:
    return {name: family for name, family in found.items() if family.repeatable}


def gradient_kernels(memo: Memo, call: Call, inputs: BackwardInputs) -> Iterator[tuple[Variant | None, GradientPlan]]:
    """Backward kernels that accept these tensors, best first; a pinned one has no variant."""
    if call.problem is None:
        return
    problem = trained_as(call.problem, inputs.requested)
    target, known, records = memo.surroundings(call.device, problem)
    if repeatable_requested(call.deterministic):
        known = _repeatable(known)
    mask = call.full_mask(inputs.mask)
    pinned = memo.pinned.get("bwd")
    written = operand_names(pinned.host.spec) if pinned is not None and pinned.host is not None else ()
    writes_all = written[len(BACKWARD.operands) :] == inputs.requested
    if pinned is not None and writes_all and pinned.accepts(inputs.query, inputs.key, inputs.value, mask):
        yield None, GradientPlan(call, pinned)
    for choice in _gradient_choices(problem, target, records, known, framework_serves=False):
        if choice.family is not None:
            variant = variant_of(choice, choice.family)
            module, manifest, whole, _ = code_of(memo, choice.family, variant, call.device, target)
            if module is not None and module.accepts(inputs.query, inputs.key, inputs.value, mask):
                yield variant, GradientPlan(call, module, manifest=manifest, whole=whole, warn=memo.warn_once)


def backward(memo: Memo, call: Call) -> Backward:
    """Gradients of calls like this one, by kernels that are chosen at first use."""
    return Backward(call, functools.partial(_first_gradients, memo))


def backward_of(memo: Memo, signature: Hashable, call: Callable[[], Call]) -> Backward:
    """Cached result of `backward` for a signature; `call` makes the call where there is none."""
    if (known := memo.backwards.get(signature)) is not None:
        return known
    if len(memo.backwards) >= MOST_PLANS:
        memo.backwards.clear()
    return memo.backwards.setdefault(signature, backward(memo, call()))


def _first_gradients(memo: Memo, call: Call, inputs: BackwardInputs) -> tuple[GradientPlan | ReferencePlan, Gradients]:
    """Plan of the best backward kernel that accepts these tensors and runs, else of the formula, and its gradients."""
    if call.problem is not None and not memo.pinned:
        # Compiled graphs get here without `attention`, which records other calls.
        CALLS.meet(trained_as(call.problem, inputs.requested))
    with memo.lock:
        # Kernels that failed before are skipped.
        for variant, plan in gradient_kernels(memo, call, inputs):
            found = tried(memo, variant, call.device, functools.partial(plan.build, inputs), functools.partial(plan.run, inputs))
            if found is not None:
                return plan, found
    formula = ReferencePlan(call, inputs)
    return formula, formula.run(inputs)
