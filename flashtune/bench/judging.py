"""Checks of providers' whole calls on the cases that kernels pass: what they return, where else they write, and what they leave unwritten.

Decision 0016 says what becomes of a provider that fails one.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from flashtune.core.problems.oracles import forward_oracle
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch.surroundings import Kept, Poisoned
from flashtune.tuner.verify.cases import Case
from flashtune.tuner.verify.correctness import Checks, Verdict, Verifier, Wanted, compare, everything, everywhere
from flashtune.tuner.verify.inputs import Inputs

RUNS = 2
"""Calls on each case, each in memory that was poisoned anew: what one leaves unwritten, another may have written before."""


ROUNDINGS = 3.0
"""Roundings of the output that a whole call's gradients may be off by: its own, that of the weights before it, and chance."""

ROUNDED_SUM = 0.4
"""A unit roundoff of bf16 over its tolerance of norms: errors of additions, each rounded, add up as a random walk."""

NOTHING = 1e-9
"""Largest element of gradients that are 0 but for the oracle's rounding."""


class RefusedError(Exception):
    """Signal that a provider doesn't take a case, with the reason; `failed` is True where it says so by an exception of its own."""

    def __init__(self, reason: str, *, failed: bool = False) -> None:
        super().__init__(reason)
        self.failed = failed


Run = Callable[[Inputs], Mapping[str, Tensor]]
"""Function that computes the written operands of some inputs that a provider gives, by name; raises RefusedError where it takes no such
call."""


def judged(run: Run, verifier: Verifier, text: str) -> Verdict:
    """The smallest case on which a provider of this name is wrong, or its largest error; small cases that it refuses are left out.

    These are those of a kernel spec, so that one that passed them at another N isn't run on them again.
    """
    passed = verifier.small.passed
    if text not in passed:
        verifier.small.of_calls = verifier.small.of_calls or of_calls(verifier.small.checks, of_whole_passes)
        found = _checked(run, verifier.small.of_calls)
        if found.reason:
            return found
        passed[text] = found.error
    verifier.of_calls = verifier.of_calls or of_calls(verifier.full, verifier.wanted)
    found = _checked(run, verifier.of_calls, refusable=False)
    return found if found.reason else Verdict(error=max(found.error, passed[text]))


def of_calls(checks: Checks, wanted: Callable[[Inputs], list[Wanted]]) -> Checks:
    """Checks for whole calls of others, the smallest first: with scores that float32 holds, and gradients of the output alone, since others
    return no LSE. A backward's oracles are made anew for that."""
    found: Checks = []
    for case, values in checks:
        inputs = case.inputs
        if case.beyond_float32:
            continue
        if "dlse" in inputs.operands:
            inputs = replace(inputs, operands={**inputs.operands, "dlse": torch.zeros_like(inputs.operands["dlse"])})
            values = [_of_shared_heads(_without_norm_of_nothing(one), inputs.problem) for one in wanted(inputs)]
        found.append((replace(case, inputs=inputs), values))
    return sorted(found, key=lambda check: check[0].inputs.problem.batch * check[0].inputs.problem.heads * check[0].inputs.problem.n_kv)


def of_whole_passes(inputs: Inputs) -> list[Wanted]:
    """Expected gradients of a forward and a backward that share no rounding with ours: those at the exact output, with bounds wider by what
    the output's own rounding moves them, ROUNDINGS times. Where scores are large and keys alike that is more than a kernel's tolerance."""
    exact = torch.full_like(inputs.out, torch.nan, dtype=torch.float64)
    whole = replace(inputs, operands={**inputs.operands, "out": exact})
    for part, batches in whole.parts():
        where = everywhere(part.problem, batches)
        for place, values in zip(where, forward_oracle(part.problem, part.operands, part.parameters, where), strict=True):
            part.out[place.batch, place.head] = values["out"]
    return [_wider(one, rounded.values) for one, rounded in zip(everything(whole), everything(inputs), strict=True)]


def _wider(wanted: Wanted, rounded: Tensor) -> Wanted:
    """Expected values with bounds wider by ROUNDINGS times their distance from these."""
    bound, gap = wanted.bound, (wanted.values - rounded).flatten(1)
    norms = wanted.values.flatten(1).norm(dim=1)
    # Places without gradients say nothing of the others' bound.
    share = float(torch.where(norms > NOTHING, gap.norm(dim=1) / norms, 0.0).max())
    norm = None if bound.relative_norm is None else bound.relative_norm + ROUNDINGS * share
    return replace(wanted, bound=replace(bound, atol=bound.atol + ROUNDINGS * float(gap.abs().max()), relative_norm=norm))


def _of_shared_heads(wanted: Wanted, problem: Problem) -> Wanted:
    """Expected values, with wider bounds for dK and dV: these may be sums of a gradient per query head, rounded after each addition."""
    if wanted.operand.name not in ("dk", "dv"):
        return wanted
    bound, others = wanted.bound, problem.gqa_ratio - 1
    norm = None if bound.relative_norm is None else bound.relative_norm * (1 + ROUNDED_SUM * math.sqrt(others))
    return replace(wanted, bound=replace(bound, atol=bound.atol * problem.gqa_ratio, relative_norm=norm))


def _without_norm_of_nothing(wanted: Wanted) -> Wanted:
    """Expected values, without a bound of norms where gradients cancel, as those of queries that see one key: an error is no share of 0."""
    if float(wanted.values.abs().max()) > NOTHING:
        return wanted
    return replace(wanted, bound=replace(wanted.bound, relative_norm=None))


def _checked(run: Run, checks: Checks, *, refusable: bool = True) -> Verdict:
    worst = 0.0
    for case, wanted in checks:
        try:
            found = _on_case(run, case, wanted)
        except RefusedError:
            if not refusable:
                raise
            continue
        if found.reason:
            return found
        worst = max(worst, found.error)
    return Verdict(error=worst)


def _on_case(run: Run, case: Case, wanted: list[Wanted]) -> Verdict:
    inputs, worst = case.inputs, 0.0
    p, label = inputs.problem, inputs.problem.label()
    kept = Kept(_read(inputs))
    sizes = [inputs.operands[operand.name].numel() for operand in p.contract.written if operand.axes[-1].startswith("d")]
    for turn in range(RUNS):
        poisoned = Poisoned(sizes, inputs.q.dtype, inputs.q.device)
        try:
            found = run(inputs)
        except RefusedError as error:
            if not turn:
                raise
            raise RuntimeError(f"{label}: it fails at the second call: {error}") from error
        if where := kept.changed() or poisoned.changed():
            return Verdict(error=math.inf, reason=f"{label}: it writes into the {where}, or beside it")
        for name, x in found.items():
            if x.shape != inputs.operands[name].shape:
                return Verdict(error=math.inf, reason=f"{label}: its {name} has the shape {tuple(x.shape)}")
        verdict = compare(*_seen(inputs, wanted, found), case.titles, given=found.keys())
        if verdict.reason:
            return verdict
        worst = max(worst, verdict.error)
    return Verdict(error=worst)


def _seen(inputs: Inputs, wanted: list[Wanted], found: Mapping[str, Tensor]) -> tuple[Inputs, list[Wanted]]:
    """Inputs that hold these operands, and what is expected of them."""
    if not inputs.sequences:
        return replace(inputs, operands={**inputs.operands, **found}), [replace(one, part=None) for one in wanted]
    # What is expected of a packed sequence views the inputs' own memory.
    for name, x in found.items():
        inputs.operands[name].copy_(x)
    return inputs, wanted


def _read(inputs: Inputs) -> dict[str, Tensor]:
    """Tensors that a call reads, by titles for messages."""
    found = {operand.title: inputs.operands[operand.name] for operand in inputs.problem.contract.operands if not operand.written}
    found |= {} if inputs.parameters.mask is None else {"mask": inputs.parameters.mask}
    return found | inputs.parameters.per_head()
