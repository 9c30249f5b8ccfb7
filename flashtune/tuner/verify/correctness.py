"""Checks of a candidate's results against the float64 oracle, on random, unaligned, poisoned inputs.

Small cases (flashtune.tuner.verify.cases) are compared in all rows with float64. At full size a few slices are, and the whole output is
compared with PyTorch's operations in float32, so that every tile is checked. Tolerances, and the faults that each check finds, are in
decision 0007.
"""

import functools
import math
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from flashtune.core.problems.oracles import expected_at
from flashtune.core.problems.passes import Operand, Place
from flashtune.core.problems.problem import Problem
from flashtune.core.problems.tolerances import Bound
from flashtune.core.system.words import counted
from flashtune.tuner.verify.cases import Case, cases, own_steps, small_problems
from flashtune.tuner.verify.inputs import Inputs, without_repeats

Launch = Callable[..., None]
"""Function `launch` of a rendered module."""

SLICE_ROWS = 64
"""Rows of one head that are compared at full size with float64, per place; also the block over which norms of whole outputs are taken."""

WHOLE_SCORES = 2**34
"""Most attention scores of a float32 reference at full size; larger problems leave out heads."""

WHOLE_SEQUENCES = 16
"""Most packed sequences that are compared at full size."""

WHOLE_ELEMENTS = 2**28
"""Most output elements of a float32 reference at full size, likewise."""

_AT_ONCE = 2**25
"""Output elements compared at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a check: `error` is the largest error over its tolerance (<= 1 passes); `reason` says what is wrong, empty when right."""

    error: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """Oracle's values of the written operands, by name, at a place."""

    place: Place
    values: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Expected values of one operand at places of equally many rows, stacked: `values` are (places, rows) or (places, rows, D).

    `index` are the batches and heads of the places, int64. Norms are taken over `block` rows, or over all. `part` are the inputs of a
    packed sequence, to which places belong; None for those of the launch.
    """

    operand: Operand
    bound: Bound
    places: tuple[Place, ...]
    index: tuple[torch.Tensor, torch.Tensor]
    rows: slice
    values: torch.Tensor
    block: int | None = None
    part: Inputs | None = None

    def ratios(self, found: torch.Tensor) -> dict[str, torch.Tensor]:
        """Error of the operand at each place over its bound, by kind of comparison; infinite where -inf stands on the wrong rows."""
        step = max(1, _AT_ONCE // max(1, self.values[0].numel()))
        parts = [self._ratios(found, slice(first, first + step)) for first in range(0, len(self.places), step)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _ratios(self, found: torch.Tensor, some: slice) -> dict[str, torch.Tensor]:
        wanted = self.values[some]
        here = found[self.index[0][some], self.index[1][some]][:, self.rows].to(wanted.dtype)
        finite = torch.isfinite(wanted)
        gap = torch.where(finite, here - wanted, 0.0)
        size = torch.where(finite, wanted, 0.0)
        rest = tuple(range(1, wanted.dim()))
        ratios = {
            "": (gap.abs() / (self.bound.atol + self.bound.rtol * size.abs())).amax(rest),
            "-inf": torch.where((torch.isneginf(here) != torch.isneginf(wanted)).flatten(1).any(1), math.inf, 0.0),
        }
        if self.bound.relative_norm is not None:
            off, norm = (self._norms(x) for x in (gap, size))
            ratios["norm"] = (off / (self.bound.relative_norm * norm).clamp_min(1e-30)).amax(1)
        return ratios

    def _norms(self, x: torch.Tensor) -> torch.Tensor:
        """Norms over blocks of rows: (places, rows, D) or (places, rows) to (places, blocks); the last block also has the remaining
        rows."""
        squares = x.square().sum(-1) if x.dim() == 3 else x.square()
        rows = squares.shape[1]
        block = min(self.block or rows, rows)
        whole = rows // block * block
        sums = squares[:, :whole].reshape(len(x), -1, block).sum(-1)
        sums[:, -1] += squares[:, whole:].sum(-1)
        return sums.sqrt()


Checks = list[tuple[Case, list[Wanted]]]
"""Inputs to launch on, with the expected values of each."""


def places(problem: Problem, seed: int, batches: Sequence[int] | None = None) -> list[Place]:
    """Places compared at full size with float64: the first, the last and two random ones, of these batches or of all."""
    generator = torch.Generator().manual_seed(seed)

    def pick(high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=generator))

    def rows(total: int, first: int | None = None) -> slice:
        count = min(SLICE_ROWS, total)
        start = pick(total - count + 1) if first is None else min(first, total - count)
        return slice(start, start + count)

    p, far, of = problem, max(problem.n_q, problem.n_kv), batches or range(problem.batch)
    found = [
        Place(batch=of[0], head=0, queries=rows(p.n_q, 0), keys=rows(p.n_kv, 0)),
        Place(batch=of[-1], head=p.heads - 1, queries=rows(p.n_q, far), keys=rows(p.n_kv, far)),
    ]
    return found + [Place(batch=of[pick(len(of))], head=pick(p.heads), queries=rows(p.n_q), keys=rows(p.n_kv)) for _ in range(2)]


def everywhere(problem: Problem, batches: Sequence[int] | None = None) -> list[Place]:
    """All rows of all heads, as places, of these batches or of all."""
    return [Place(batch=b, head=h) for b in batches or range(problem.batch) for h in range(problem.heads)]


def whole(problem: Problem, seed: int, batches: Sequence[int] | None = None) -> list[Place]:
    """All rows of as many heads as WHOLE_SCORES and WHOLE_ELEMENTS allow: random ones of the largest problems, else all."""
    p = problem
    work = p.n_q * p.n_kv * (1 if p.direction == "fwd" else 3)
    elements = max(math.prod(operand.shape(p)) for operand in p.contract.written) // (p.batch * p.heads)
    count = max(1, min(WHOLE_SCORES // work, WHOLE_ELEMENTS // max(1, elements)))
    found = everywhere(p, batches)
    if count >= len(found):
        return found
    # A backward's oracle computes the query heads of a key head together.
    group = 1 if p.direction == "fwd" else p.gqa_ratio
    chosen = torch.randperm(len(found) // group, generator=torch.Generator().manual_seed(seed))[: max(1, count // group)]
    return [found[index * group + head] for index in sorted(chosen.tolist()) for head in range(group)]


def oracle(inputs: Inputs, where: Iterable[Place], dtype: torch.dtype | None = None) -> list[Expected]:
    """Oracle's values at these places of `inputs`, in float64 unless `dtype` is set."""
    p = inputs.problem
    # NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which turns float32 products into TF32.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        some = list(where)
        return [
            Expected(place, values)
            for place, values in zip(some, expected_at(p, inputs.operands, inputs.parameters, some, dtype), strict=True)
        ]
    finally:
        torch.set_float32_matmul_precision(before)


def some_parts(inputs: Inputs, seed: int) -> list[tuple[Inputs, Sequence[int]]]:
    """Parts that are compared at full size: the longest packed sequence, the first, the last and random ones, or all."""
    parts = inputs.parts()
    if len(parts) <= WHOLE_SEQUENCES:
        return parts
    longest = max(range(len(parts)), key=lambda place: parts[place][0].problem.n_kv)
    drawn = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = dict.fromkeys((longest, 0, len(parts) - 1, *drawn))
    return [parts[place] for place in list(chosen)[:WHOLE_SEQUENCES]]


def stacked(problem: Problem, expected: Iterable[Expected], *, block: int | None = None, part: Inputs | None = None) -> list[Wanted]:
    """Expected values stacked by equal rows; those computed in float32 get float32's tolerance in addition, for both sides may err."""
    p = problem
    found = []
    for _, group in groupby(expected, key=lambda e: (e.place.queries, e.place.keys)):
        alike = list(group)
        for operand in p.contract.written:
            # Query heads of one key head share its gradient.
            unique = {operand.at(e.place, p)[:2]: e for e in alike}
            values = torch.stack([e.values[operand.name] for e in unique.values()])
            bound = p.contract.bounds(p.spec())[operand.name]
            if values.dtype == torch.float32:
                bound = _sum(bound, p.contract.bounds(replace(p.spec(), dtype="fp32", tf32=False))[operand.name])
            batches, heads = torch.tensor(list(unique), device=values.device).unbind(1)
            rows = operand.at(alike[0].place, p)[2]
            assert isinstance(rows, slice), "an operand's third axis has rows"
            found.append(
                Wanted(
                    operand=operand,
                    bound=bound,
                    places=tuple(e.place for e in unique.values()),
                    index=(batches, heads),
                    rows=rows,
                    values=values,
                    block=block,
                    part=part,
                )
            )
    return found


def _sum(one: Bound, other: Bound) -> Bound:
    norm = None if one.relative_norm is None or other.relative_norm is None else one.relative_norm + other.relative_norm
    return Bound(atol=one.atol + other.atol, rtol=one.rtol + other.rtol, relative_norm=norm)


def compare(inputs: Inputs, wanted: Iterable[Wanted], titles: tuple[str, ...] = (), given: Container[str] | None = None) -> Verdict:
    """Compare the written operands with the expected values; unwritten elements fail. The GPU is synchronised once.

    `titles` name the contents of each key head, for the reason; `given` are the operands that there are, by default all.
    """
    p = inputs.problem
    label, written = p.label(), () if inputs.poisoned else p.contract.written
    if given is not None:
        written, wanted = tuple(one for one in written if one.name in given), [one for one in wanted if one.operand.name in given]
    unwritten = [torch.isnan(without_repeats(inputs.operands[operand.name])).any()[None].double() for operand in written]
    made = [
        (want, name, ratio) for want in wanted for name, ratio in want.ratios((want.part or inputs).operands[want.operand.name]).items()
    ]
    numbers = torch.cat([*unwritten, *(ratio.double() for _, _, ratio in made)]).tolist()
    for operand, nan in zip(written, numbers, strict=False):
        if nan:
            return Verdict(error=math.inf, reason=f"{label}: NaN or unwritten elements in the {operand.title}")
    worst, first = 0.0, len(written)
    for want, name, ratio in made:
        for place, number in zip(want.places, numbers[first : first + len(ratio)], strict=True):
            if not number <= 1:
                kv_head = place.head // p.gqa_ratio
                where = titles[kv_head] if titles else f"batch {place.batch}, head {place.head}"
                title = want.operand.title
                if name == "-inf":
                    return Verdict(error=math.inf, reason=f"{label}: the {title} is -inf on the wrong rows ({where})")
                what = f"{title}'s norm" if name else title
                if math.isnan(number):
                    return Verdict(error=math.inf, reason=f"{label}: the {title} has NaN or infinities ({where})")
                return Verdict(error=number, reason=f"{label}: {what} is off by {number:.3g} tolerances ({where})")
            worst = max(worst, number)
        first += len(ratio)
    return Verdict(error=worst)


def run(launch: Launch, inputs: Inputs, sms: int | None = None) -> None:
    """Launch once on poisoned outputs; `sms` overrides the number of multiprocessors."""
    inputs.poison()
    launch(*inputs.arguments, **inputs.keywords, **({} if sms is None else {"sms": sms}))


def check(launch: Launch, inputs: Inputs, expected: Iterable[Expected]) -> Verdict:
    """Run `launch` on poisoned outputs and compare; every element of them must have been written."""
    run(launch, inputs)
    return compare(inputs, stacked(inputs.problem, expected))


def differs(launch: Launch, inputs: Inputs, sms: int | None = None) -> str:
    """Reason why another launch isn't bitwise equal to the one before it, or ""."""
    written = inputs.problem.contract.written
    before = [without_repeats(inputs.operands[operand.name]).clone() for operand in written]
    run(launch, inputs, sms)
    for operand, once in zip(written, before, strict=True):
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[once.element_size()]
        if not torch.equal(without_repeats(inputs.operands[operand.name]).view(kind), once.view(kind)):
            return f"{inputs.problem.label()}: two launches on the same inputs differ in the {operand.title}"
    return ""


def everything(inputs: Inputs) -> list[Wanted]:
    """Expected values of all rows, but of poisoned sequences."""
    wanted = []
    for part, batches in inputs.parts():
        wanted += stacked(part.problem, oracle(part, everywhere(part.problem, batches)), part=part)
    return wanted


def at_full_size(inputs: Inputs, seed: int, *, thorough: bool) -> list[Wanted]:
    """Expected values of a few places in float64, and with `thorough` of whole outputs in float32."""
    wanted: list[Wanted] = []
    for part, batches in some_parts(inputs, seed):
        p = part.problem
        wanted += stacked(p, oracle(part, places(p, seed, batches)), part=part)
        if thorough:
            wanted += stacked(p, oracle(part, whole(p, seed, batches), torch.float32), block=SLICE_ROWS, part=part)
    return wanted


class SmallCases:
    """Small problems that candidates of a spec are checked on, at any N, with their expected values.

    Remembers the texts that passed, so that none is checked again at another N. `of_calls` are the cases as whole calls compute them
    (flashtune.bench.judging).
    """

    def __init__(self, problem: Problem, *, device: torch.device | str, seed: int, thorough: bool) -> None:
        made = cases(problem, device=device, seed=seed, thorough=thorough)
        self.checks: Checks = [(case, everything(case.inputs)) for case in made]
        self.passed: dict[str, float] = {}
        self.of_calls: Checks | None = None

    @staticmethod
    def serving(problem: Problem, seed: int) -> Hashable:
        """Key that is equal for problems with the same small cases on a GPU."""
        return tuple(small_problems(problem, 2)), tuple(own_steps(problem).items()), seed


class Verifier:
    """Checker of one problem's candidates; inputs and oracles are made once and serve all of them.

    The small cases serve all N of a spec and may be passed in; `full_size` inputs are this problem's own. A `thorough` one, the default on
    a GPU, also runs the small cases on few multiprocessors, compares whole outputs at full size, and launches twice (decision 0007).
    """

    def __init__(
        self,
        problem: Problem,
        *,
        device: torch.device | str,
        seed: int,
        full_size: Inputs | None = None,
        thorough: bool | None = None,
        small: SmallCases | None = None,
    ) -> None:
        self._thorough = torch.device(device).type == "cuda" if thorough is None else thorough
        self.small = small or SmallCases(problem, device=device, seed=seed, thorough=self._thorough)
        self.full: Checks = []
        self.of_calls: Checks | None = None
        self.wanted = functools.partial(at_full_size, seed=seed, thorough=self._thorough)
        if full_size is not None:
            self.full = [(Case(inputs=full_size, few_sms=None, repeats=True), self.wanted(full_size))]

    def verdict(self, launch: Launch, *, repeats: bool = True, text: str = "") -> Verdict:
        """First failure, or the largest error of all checks; `repeats` is True where the family guarantees identical bits every time.

        Of equal non-empty `text`s only the first that passes is run on the small cases.
        """
        passed = self.small.passed.get(text)
        small = Verdict(error=passed) if passed is not None else self._checked(launch, self.small.checks, repeats)
        if small.reason:
            return small
        if text:
            self.small.passed[text] = small.error
        full = self._checked(launch, self.full, repeats)
        return full if full.reason else Verdict(error=max(small.error, full.error))

    def rehearse(self) -> None:
        """Compare once without a launch, so that the first candidate doesn't wait for lazy loading and allocation on the GPU."""
        for case, wanted in [*self.small.checks, *self.full]:
            run(_nothing, case.inputs)
            compare(case.inputs, wanted, case.titles)
            if self._thorough and case.repeats:
                differs(_nothing, case.inputs)

    def _checked(self, launch: Launch, checks: Checks, repeats: bool) -> Verdict:
        worst = 0.0
        for case, wanted in checks:
            grids = (None, case.few_sms) if self._thorough and case.few_sms is not None else (None,)
            for sms in grids:
                run(launch, case.inputs, sms)
                found = compare(case.inputs, wanted, case.titles)
                if found.reason:
                    return replace(found, reason=found.reason + _on(sms))
                worst = max(worst, found.error)
            if self._thorough and repeats and case.repeats and (reason := differs(launch, case.inputs, grids[-1])):
                return Verdict(error=math.inf, reason=reason + _on(grids[-1]))
        return Verdict(error=worst)


def _nothing(*arguments: object, **settings: object) -> None:
    """Launch of no kernel."""


def _on(sms: int | None) -> str:
    return "" if sms is None else f" on programs for {counted(sms, 'multiprocessor')}"
