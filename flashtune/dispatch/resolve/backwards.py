"""Which backward kernels are trusted with gradients, and the plans that compute them."""

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
from flashtune.dispatch.plans.gradients import Backward, FormulaPlan, Given, GradientPlan, Gradients
from flashtune.dispatch.policy import Choice, Pool, rank
from flashtune.dispatch.resolve.code import code_of, tried, variant_of
from flashtune.dispatch.resolve.memo import MOST_PLANS, Memo
from flashtune.templates import families
from flashtune.templates.family import Family, blocks_of_head

SHORTEST_BACKWARD_US = 120.0
"""Where torch's own is shorter, the host decides, and a step of ours costs it a little more than torch's: the shortest gradients in
benchmarks/results/2026-11-22-h200-training whose whole steps ours were the faster at take torch about so long."""

TORCH_TILE = 128
"""Rows and columns of tiles of torch: gradients of 192 causal rows, in three tiles of which less than half of the pairs count, take 278 us
where pairs alone foretell 80 (n192 of D = 72 in benchmarks/results/2026-11-24-h200-training)."""

TORCH_BESIDE_US = 50.0
"""What torch's gradients take beside their tiles: 16 drawn ones of 192 to 1088 rows, foretold by tiles at 61 to 213 us, took 1.3 to 2.0
times as long, about 50 us and 1.2 times that (the same files)."""


def forward_of(call: Call) -> Call:
    """The forward of a call whose gradients are kernels': it hands on the LSE, and takes tensors as `Call.views` makes them."""
    return replace(call, return_lse=True, rank=4, batch_dims=(call.batch,), identity=True)


def trained_as(problem: Problem, asked: Sequence[str] = ()) -> Problem:
    """The backward of a forward, `asked` for more than dQ, dK and dV (`flashtune.core.problem.ASKED`)."""
    return replace(problem, direction="bwd", features=problem.features.asking(asked))


def composite(call: Call) -> bool:
    """Whether torch would compute a call's gradients by operations on all scores (`Call.composite`), several times as large as these. On a
    CPU kernels are interpreted, which takes longer than anything of torch's."""
    return call.composite and call.device.type != "cpu"


def gradient_choice(
    memo: Memo, problem: Problem, target: Target, *, repeatable: bool = False, composite: bool = False
) -> tuple[Choice | None, str]:
    """The kernel that is trusted with the backward of `problem` on `target`, or None and why torch is; `repeatable` asks for the same bits
    every time, and `composite` is what the function of that name says.

    What was never raced on the GPU's architecture serves only those who allow what is unmeasured, in the interpreter, too; so does what
    torch does in less than the host needs for the launches. Of what is `composite` any kernel that takes it computes the gradients.
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
        # Where whole training steps were measured of this very key, they have decided.
        exact = record is not None and record.key == trained.key(target.slug)
        stepped = exact and record is not None and record.outcome.call_us is not None and record.framework_call_us is not None
        if record is not None and not composite and not stepped and not memo.unmeasured:
            expected_us = _torch_us(trained, record, choices)
            if expected_us < SHORTEST_BACKWARD_US:
                return None, f"torch takes an estimated {expected_us:.1f} us for it, less than the launches of ours take the host"
        return chosen, ""
    if chosen.record is not None:
        return None, chosen.note
    with_more = f" with {' and '.join(trained.features.asked)}" if trained.features.asked else ""
    served = any(family.direction == "bwd" and family.supports(trained.spec(), target) is None for family in known.values())
    if memo.unmeasured or composite or not served:
        return None, f"none of our backward kernels takes such calls{with_more}"
    why = f"no backward kernel for such calls{with_more} was measured on GPUs like {target.name}"
    return None, f"{why} (FLASHTUNE_UNMEASURED=1 lets those serve that weren't)"


def _torch_us(trained: Problem, record: TuningRecord, others: Iterator[Choice]) -> float:
    """What torch is expected to take for a backward: by the record that serves it, or by the next one beside which torch was timed, as it
    wasn't beside kernels that repeat their bits; endless where it reads a matrix and no record tells."""
    tellers = (one for one in itertools.chain([record], (other.record for other in others)) if one is not None)
    timed = (one for one in tellers if one.framework_us is not None and _reads_matrix(one.problem) == _reads_matrix(trained))
    teller = next(timed, None)
    if teller is None and _reads_matrix(trained):
        return math.inf
    record = teller or record
    known_us = record.median_us if record.framework_us is None else record.framework_us
    beside_us = min(known_us, TORCH_BESIDE_US)
    return beside_us + (known_us - beside_us) * _tiled(trained) / _tiled(record.problem)


def _tiled(problem: Problem) -> int:
    """What tiles of TORCH_TILE queries and keys have to multiply, those that are partly seen as a whole."""
    p = problem
    return max(1, p.batch * p.heads * blocks_of_head(p.band, p.n_q, p.n_kv, TORCH_TILE, TORCH_TILE) * (p.d + p.d_v))


def usual(problem: Problem) -> Problem:
    """The same of a training step's usual sizes, for what is to hang on no call's."""
    return replace(problem, batch=8, heads=16 * (problem.heads // problem.kv_heads), kv_heads=16, n_q=2048, n_kv=2048)


def _gradient_choices(
    problem: Problem, target: Target, records: Pool | Sequence[TuningRecord], known: Mapping[str, Family], **words: bool
) -> Iterator[Choice]:
    """The policy's choices without rows that have other features than `problem` beside its diagonal: torch has a gradient of everything,
    but takes up to nine times as long for one feature as for another, so that such rows say nothing of when it is the better choice. Only
    gradients that nobody asks for here may have been among a row's: without them ours takes less time, too.

    Where no row has the very features and torch would read a matrix of all scores, which made it 3 to 100 times as slow as ours, measured
    rows with some of the features stand for all of them (benchmarks/results/2026-11-26-h100-divided)."""
    told = False
    for choice in rank(problem, target, records, known, **words):
        if not isinstance(choice, Choice):
            continue
        if choice.record is None and not told and _reads_matrix(problem):
            told = True
            yield from _with_fewer_features(problem, target, records, known)
        if choice.record is None or _tells(choice.record.problem, problem):
            told = told or choice.record is not None
            yield choice


def _with_fewer_features(
    problem: Problem, target: Target, records: Pool | Sequence[TuningRecord], known: Mapping[str, Family]
) -> Iterator[Choice]:
    """The choices by measured rows whose features are some of a problem's."""
    for choice in rank(problem, target, records, known, framework_serves=False):
        if isinstance(choice, Choice) and choice.record is not None and choice.record.outcome.source == "measured":
            theirs, ours = choice.record.problem.features, problem.features
            mask = theirs.mask in ("none", ours.mask) and (theirs.window is None or ours.window is not None)
            if mask and all(getattr(ours, name) >= getattr(theirs, name) for name in FLAGS) and set(ours.asked) <= set(theirs.asked):
                yield choice


def _reads_matrix(problem: Problem) -> bool:
    """Whether torch is given a mask or a bias of all scores for what a problem has."""
    f = problem.features
    return f.mask != "none" or f.window is not None or f.alibi or f.sinks


def _tells(theirs: Problem, ours: Problem) -> bool:
    return _kind(theirs) == _kind(ours) and set(ours.features.asked) <= set(theirs.features.asked)


def _kind(problem: Problem) -> tuple[object, ...]:
    f = problem.features
    return f.window is None, f.mask, *(getattr(f, name) for name in FLAGS)


def same_bits_asked(deterministic: bool) -> bool:
    """Whether gradients are to be the same bits every time: by the call, or by torch's deterministic mode."""
    return deterministic or torch.are_deterministic_algorithms_enabled()


def _repeatable(found: Mapping[str, Family]) -> dict[str, Family]:
    return {name: family for name, family in found.items() if family.repeatable}


def gradient_kernels(memo: Memo, call: Call, given: Given) -> Iterator[tuple[Variant | None, GradientPlan]]:
    """Backward kernels that take these tensors, best first; a pinned one has no variant."""
    if call.problem is None:
        return
    problem = trained_as(call.problem, given.asked)
    target, known, records = memo.surroundings(call.device, problem)
    if same_bits_asked(call.deterministic):
        known = _repeatable(known)
    mask = call.full_mask(given.mask)
    pinned = memo.pinned.get("bwd")
    written = operand_names(pinned.host.spec) if pinned is not None and pinned.host is not None else ()
    writes_all = written[len(BACKWARD.operands) :] == given.asked
    if pinned is not None and writes_all and pinned.accepts(given.query, given.key, given.value, mask):
        yield None, GradientPlan(call, pinned)
    for choice in _gradient_choices(problem, target, records, known, framework_serves=False):
        if choice.family is not None:
            variant = variant_of(choice, choice.family)
            module, manifest, whole, _ = code_of(memo, choice.family, variant, call.device, target)
            if module is not None and module.accepts(given.query, given.key, given.value, mask):
                yield variant, GradientPlan(call, module, manifest=manifest, whole=whole, warn=memo.warn_once)


def backward(memo: Memo, call: Call) -> Backward:
    """What computes the gradients of calls like this one, by kernels that are chosen when they are needed."""
    return Backward(call, functools.partial(_first_gradients, memo))


def backward_of(memo: Memo, signature: Hashable, call: Callable[[], Call]) -> Backward:
    """The same, remembered for a signature; `call` is asked where nothing is."""
    if (known := memo.backwards.get(signature)) is not None:
        return known
    if len(memo.backwards) >= MOST_PLANS:
        memo.backwards.clear()
    return memo.backwards.setdefault(signature, backward(memo, call()))


def _first_gradients(memo: Memo, call: Call, given: Given) -> tuple[GradientPlan | FormulaPlan, Gradients]:
    """The plan of the best backward kernel that takes these tensors and runs, else of the formula, and what it computes."""
    if call.problem is not None and not memo.pinned:
        # Graphs that were compiled ask here alone.
        CALLS.meet(trained_as(call.problem, given.asked))
    with memo.lock:
        # What failed before isn't offered again.
        for variant, plan in gradient_kernels(memo, call, given):
            found = tried(memo, variant, call.device, functools.partial(plan.build, given), functools.partial(plan.run, given))
            if found is not None:
                return plan, found
    formula = FormulaPlan(call, given)
    return formula, formula.run(given)
