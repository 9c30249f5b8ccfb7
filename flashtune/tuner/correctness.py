"""Correct before fast: what a candidate writes against the float64 oracle, on random, ragged, poisoned inputs."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from flashtune.core.passes import Place
from flashtune.core.problem import DECODE_ROWS, Features, Problem
from flashtune.tuner.inputs import Inputs, make_inputs, run_forward

Launch = Callable[..., None]
"""A rendered module's `launch`."""

SLICE_ROWS = 64
"""Rows of one head that are compared at full size, at each of the places that are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`error` is the largest error over its tolerance (<= 1 passes); `reason` says what is wrong, empty when right."""

    error: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """What the oracle says that the written operands, by name, hold at a place."""

    place: Place
    values: Mapping[str, torch.Tensor]


def small_cases(problem: Problem) -> list[Problem]:
    """Ragged little problems with the problem's own spec: what tile edges, empty rows and shared heads get wrong."""
    ratio = problem.gqa_ratio

    def case(n_q: int, n_kv: int, features: Features) -> Problem:
        return replace(problem, batch=min(2, problem.batch), heads=2 * ratio, kv_heads=2, n_q=n_q, n_kv=n_kv, features=features)

    f = problem.features
    if f.window is not None:
        left, right = (None if side is None else min(side, 70) for side in f.window)
        f = replace(f, window=(left, right))
    flipped = replace(f, alignment="top_left" if f.alignment == "bottom_right" else "bottom_right")
    cases = [case(193, 321, f), case(1, 77, f), case(320, 320, f), case(97, 515, flipped)]
    if problem.n_q <= DECODE_ROWS:
        # Enough keys that many programs share them.
        cases.append(case(problem.n_q, 2177, flipped))
    return [*cases, case(391, 130, flipped)] if f.has_diagonal else cases


def make_extreme(inputs: Inputs) -> None:
    """Change the inputs so that scores defeat an estimate of a row's maximum.

    The first 40 keys, to which kernels come first or last, have scores up to some 100 (natural units), and all of a row's lie around 150
    or around -150. The first 64 rows' scores are a fortieth of that and the next 64 rows' a twelfth, so that their weights can be held
    relative to such an estimate. Of a boolean mask the last 140 columns are hidden.

    A backward, which is given the LSE, estimates nothing: its first keys stay as they are, and the output's gradient is quartered, since
    dS, rounded as in every kernel, is multiplied by these queries and keys in sums that cancel.
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


def places(problem: Problem, seed: int) -> list[Place]:
    """What to compare at full size: the first, last and two random places."""
    generator = torch.Generator().manual_seed(seed)

    def pick(high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=generator))

    def rows(total: int, first: int | None = None) -> slice:
        count = min(SLICE_ROWS, total)
        start = pick(total - count + 1) if first is None else min(first, total - count)
        return slice(start, start + count)

    p, far = problem, max(problem.n_q, problem.n_kv)
    found = [
        Place(batch=0, head=0, queries=rows(p.n_q, 0), keys=rows(p.n_kv, 0)),
        Place(batch=p.batch - 1, head=p.heads - 1, queries=rows(p.n_q, far), keys=rows(p.n_kv, far)),
    ]
    return found + [Place(batch=pick(p.batch), head=pick(p.heads), queries=rows(p.n_q), keys=rows(p.n_kv)) for _ in range(2)]


def everywhere(problem: Problem) -> list[Place]:
    """All rows of all heads, as places."""
    return [Place(batch=b, head=h) for b in range(problem.batch) for h in range(problem.heads)]


def oracle(inputs: Inputs, where: list[Place]) -> list[Expected]:
    """The float64 oracle at these places of `inputs`."""
    p = inputs.problem
    return [Expected(place, p.contract.oracle(p, inputs.operands, inputs.parameters, place)) for place in where]


def check(launch: Launch, inputs: Inputs, expected: list[Expected]) -> Verdict:
    """Run `launch` on poisoned outputs and compare; every element of them must have been written."""
    p = inputs.problem
    bounds = p.contract.bounds(p.spec())
    inputs.poison()
    launch(*inputs.arguments, **inputs.keywords)
    for operand in p.contract.written:
        if torch.isnan(inputs.operands[operand.name]).any():
            return Verdict(error=math.inf, reason=f"{p.label()}: NaN or unwritten elements in the {operand.title}")
    worst = 0.0
    for want in expected:
        for operand in p.contract.written:
            wanted, bound = want.values[operand.name], bounds[operand.name]
            found = inputs.operands[operand.name][operand.at(want.place, p)].double()
            if not torch.equal(torch.isneginf(found), torch.isneginf(wanted)):
                return Verdict(error=math.inf, reason=f"{p.label()}: the {operand.title} is -inf on the wrong rows")
            finite = torch.isfinite(wanted)
            wanted, gap = wanted[finite], (found - wanted)[finite]
            ratios = {
                operand.title: (gap.abs() / (bound.atol + bound.rtol * wanted.abs())).amax() if finite.any() else torch.zeros(()),
            }
            if bound.relative_norm is not None:
                ratios[f"{operand.title}'s norm"] = gap.norm() / (bound.relative_norm * wanted.norm()).clamp_min(1e-30)
            for name, ratio in ratios.items():
                worst = max(worst, float(ratio))
                if not ratio <= 1:
                    return Verdict(error=float(ratio), reason=f"{p.label()}: {name} is off by {float(ratio):.3g} tolerances")
    return Verdict(error=worst)


class Verifier:
    """Checks candidates of one problem; inputs and oracles are made once and serve every candidate.

    The small cases serve all N of a spec; the full-size places are this problem's own.
    """

    def __init__(self, problem: Problem, *, device: torch.device | str, seed: int, full_size: Inputs | None = None) -> None:
        self._cases = list(self._prepare(problem, device, seed))
        self._full = (full_size, oracle(full_size, places(problem, seed))) if full_size is not None else None

    @staticmethod
    def _prepare(problem: Problem, device: torch.device | str, seed: int) -> Iterator[tuple[Inputs, list[Expected]]]:
        for index, small in enumerate(small_cases(problem)):
            inputs = make_inputs(small, device=device, seed=seed + index, heads_inside=index % 2 == 1)
            yield inputs, oracle(inputs, everywhere(small))
            if index == 0 and problem.dtype in ("bf16", "fp16") and torch.device(device).type == "cuda":
                # Not for other types: rounding such scores to TF32 or adding them up as fp8's products do is not exact enough. Kernels that
                # Triton's interpreter runs look for their maxima in every block, and it would take a fifth of the time there.
                extreme = make_inputs(small, device=device, seed=seed)
                make_extreme(extreme)
                yield extreme, oracle(extreme, everywhere(small))

    def verdict(self, launch: Launch) -> Verdict:
        """The first failure, or the largest error of all checks."""
        worst = 0.0
        for inputs, expected in [*self._cases, *([self._full] if self._full else [])]:
            found = check(launch, inputs, expected)
            if found.reason:
                return found
            worst = max(worst, found.error)
        return Verdict(error=worst)
