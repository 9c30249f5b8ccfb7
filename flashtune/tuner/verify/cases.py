"""Small problems that candidates are checked on: tile edges, empty rows, shared heads and scores as models produce them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

import torch

from flashtune.core.problems.band import ALIGNMENTS
from flashtune.core.problems.problem import DECODE_ROWS, Features, Problem
from flashtune.tuner.verify.distributions import HUGE, HUGE_OF_BF16, PRESENT, redistribute
from flashtune.tuner.verify.inputs import Inputs, Steps, make_inputs, run_forward

FEW_SMS = 1
"""Multiprocessors of an extra launch of a small problem, so that persistent programs go from tile to tile there too."""

CROWD_SMS = 3
"""Multiprocessors of that launch for a crowd of heads, whose tiles several programs share."""

BEYOND_FLOAT32 = tuple(name for name in PRESENT if name.startswith("misled"))
"""Distributions with scores that float32 can't hold relative to others of their row, which kernels may compute twice (decision 0008)."""

WITHIN_FLOAT32 = tuple(name for name in PRESENT if name not in BEYOND_FLOAT32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Inputs to check a launch on.

    `titles` names the contents of each key head of the first batch, where they differ. `few_sms` are the multiprocessors of an extra
    launch, None for no such launch. `repeats` is True where two launches must be bitwise equal, if the family guarantees that.
    `beyond_float32` marks scores of which only kernels of ours promise the right softmax.
    """

    inputs: Inputs
    titles: tuple[str, ...] = ()
    few_sms: int | None = FEW_SMS
    repeats: bool = False
    beyond_float32: bool = False

    def __post_init__(self) -> None:
        # What was changed since the inputs were made.
        self.inputs.store()


def small_problems(problem: Problem, batch: int) -> list[Problem]:
    """Small unaligned problems with the problem's own spec, for faults at tile edges, empty rows and shared heads."""
    ratio = problem.gqa_ratio

    def case(n_q: int, n_kv: int, features: Features) -> Problem:
        found = replace(problem, batch=batch, heads=2 * ratio, kv_heads=2, n_q=n_q, n_kv=n_kv, features=features, lengths=None)
        if not features.mods:
            return found
        # Captured tensors may end where the problem does.
        ends = {"batch": problem.batch, "kv_heads": problem.kv_heads} | dict(zip(("n_q", "n_kv"), problem.longest, strict=True))
        sizes = {name: min(getattr(found, name), most) for name, most in ends.items()}
        # So many sequences at a time.
        sizes |= {"batch": problem.batch} if features.packed else {}
        return replace(found, heads=ratio * sizes["kv_heads"], **sizes)

    f = _narrow(problem.features)
    # Kernels over pages may need a window's diagonal where it is.
    kept = f.page and f.window is not None
    flipped = f if kept else replace(f, alignment="top_left" if f.alignment == "bottom_right" else "bottom_right")
    cases = [case(193, 321, f), case(1, 77, f), case(320, 320, f), case(97, 515, flipped)]
    if problem.n_q <= DECODE_ROWS:
        # Enough keys that many programs share them.
        cases.append(case(problem.n_q, 2177, flipped))
    return [*cases, case(391, 130, flipped)] if f.has_diagonal else cases


def own_steps(problem: Problem) -> Mapping[str, Steps]:
    """Steps of the problem's own tensors."""
    return make_inputs(problem, device="meta", seed=0).steps


def first_steps(steps: Mapping[str, Steps]) -> Mapping[str, Steps]:
    """Steps of the first small case: its mask and the gradient of that have rows of any stride, as callers' may have."""
    return {name: own for name, own in steps.items() if name not in ("mask", "dbias")}


def _narrow(features: Features) -> Features:
    """Features with a window that small problems notice."""
    if features.window is None:
        return features
    # No narrower than a page, which may not have both ends of a window.
    left, right = (None if side is None else min(side, max(70, features.page)) for side in features.window)
    return replace(features, window=(left, right))


def make_extreme(inputs: Inputs) -> None:
    """Change the inputs so that scores defeat an estimate of a row's maximum.

    The first 40 keys, to which kernels come first or last, have scores up to some 100 (natural units), and all of a row's lie around 150 or
    around -150. The first 64 rows' scores are a fortieth of that and the next 64 rows' a twelfth, so that float32 can hold their weights
    relative to such an estimate. Of a boolean mask the last 140 columns are hidden.

    A backward, which reads the LSE, estimates nothing: its first keys stay as they are, and the output's gradient is quartered, since dS,
    rounded as in every kernel, is multiplied by these queries and keys in sums that cancel.
    """
    d = inputs.problem.d
    shift = (150 / (inputs.parameters.scale * d)) ** 0.5
    if inputs.problem.direction == "bwd":
        inputs.operands["dout"] /= 4
    else:
        inputs.k[:, :, :40] *= 24.0
    inputs.k.add_(shift)
    inputs.q[:, :, ::2] += shift
    inputs.q[:, :, 1::2] -= shift
    inputs.q[:, :, :64] /= 40
    inputs.q[:, :, 64:128] /= 12
    if inputs.problem.features.mask == "bool":
        assert inputs.parameters.mask is not None, "generated for every problem with a mask"
        # One mask serves all heads.
        inputs.parameters.mask[0, 0, :, -140:] = False
    run_forward(inputs)


def crowd(
    problem: Problem, names: tuple[str, ...], *, device: torch.device | str, seed: int, like: Mapping[str, Steps] = MappingProxyType({})
) -> Case:
    """Small problem whose key heads have a distribution of scores each: a single launch is checked on all of them.

    The keys are several blocks of any config, and the rows end within a tile. A backward takes normal numbers only: others would need its
    forward's results to be computed again.
    """
    ratio = problem.gqa_ratio
    few, features = replace(problem, batch=1, heads=len(names) * ratio, kv_heads=len(names)), _narrow(problem.features)
    sizes = replace(few, n_q=197, n_kv=643, features=features, lengths=None)
    inputs = make_inputs(sizes, device=device, seed=seed, like=like)
    [(part, _)] = inputs.parts()
    # Dropout's mask depends on the head's number, but scores don't: views of single heads do without it.
    plain = replace(part, problem=replace(part.problem, features=replace(part.problem.features, dropout=False)))
    for kv_head, name in enumerate(names):
        if name != "random":
            assert problem.direction == "fwd", "another pass takes what the forward wrote"
            redistribute(plain.group(0, kv_head), name, seed=seed)
    return Case(inputs=inputs, titles=names, few_sms=CROWD_SMS)


def _packed(small_ones: list[Problem], *, device: torch.device | str, seed: int, like: Mapping[str, Steps]) -> list[Case]:
    """The small problems as packed sequences, twice: every other one is NaN, which mustn't reach its neighbours."""
    found = []
    first, most = small_ones[0], len(small_ones)
    # Captured tensors may have no more sequences than the problem.
    step = min(most, first.batch) if first.features.mods else most
    kept = first.features.page and first.features.window is not None
    for start, (odd, alignment) in product(range(0, most, step), enumerate((first.features.alignment,) * 2 if kept else ALIGNMENTS)):
        sequences = tuple((one.n_q, one.n_kv) for one in small_ones[start : start + step])
        sizes = replace(first, batch=len(sequences), features=replace(first.features, alignment=alignment))
        poisoned = frozenset(range(odd, len(sequences), 2))
        if len(poisoned) < len(sequences):
            inputs = make_inputs(sizes, device=device, seed=seed + odd, sequences=sequences, poisoned=poisoned, like=like)
            found.append(Case(inputs=inputs))
    return found


def huge(problem: Problem) -> tuple[str, ...]:
    """Distributions of huge scores that this problem's operands can make, and float32 adds up exactly: none with biases or ALiBi, which
    float32 loses beside them."""
    if problem.features.mask == "bias" or problem.features.alibi:
        return ()
    return HUGE + HUGE_OF_BF16 * (problem.dtype == "bf16")


def cases(problem: Problem, *, device: torch.device | str, seed: int, thorough: bool) -> list[Case]:
    """Cases that every candidate of `problem` is checked on; `thorough` adds those that cost a GPU little and Triton's interpreter much.

    Strides are divided by what divides the problem's own, but for `first_steps`: else kernels that ask for it would be compiled again, on
    the GPU's time.
    """
    found, like = [], own_steps(problem)
    small_ones = small_problems(problem, 2 if thorough else min(2, problem.batch))
    for index, small in enumerate([] if problem.features.packed else small_ones):
        odd, steps = index % 2 == 1, like if index else first_steps(like)
        found.append(Case(inputs=make_inputs(small, device=device, seed=seed + index, heads_inside=odd, own_masks=odd, like=steps)))
    if problem.features.packed:
        found += _packed(small_ones, device=device, seed=seed, like=like)
    if not thorough or problem.features.mods:
        # Interpretable kernels compute their maxima in every block, as all with functions do, so extreme scores have nothing to find.
        return found
    if problem.dtype in ("bf16", "fp16"):
        # Other types are left out: rounding such scores to TF32 or adding them up as fp8's products do is not exact enough.
        one = replace(small_ones[0], batch=1) if problem.features.packed else small_ones[0]
        extreme = make_inputs(one, device=device, seed=seed, like=like)
        make_extreme(extreme.sequence(0) if extreme.sequences else extreme)
        found.append(Case(inputs=extreme))
    if problem.direction == "fwd" and problem.dtype in ("bf16", "fp16"):
        found.append(replace(crowd(problem, WITHIN_FLOAT32, device=device, seed=seed, like=like), repeats=True))
        beyond = crowd(problem, BEYOND_FLOAT32 + huge(problem), device=device, seed=seed, like=like)
        found.append(replace(beyond, beyond_float32=True))
    else:
        # In a backward dS, rounded as in every kernel, meets raised keys in sums that cancel.
        found.append(replace(crowd(problem, ("random",) * 12, device=device, seed=seed, like=like), repeats=True))
    return found
