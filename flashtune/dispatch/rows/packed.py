"""Packed sequences by kernels: the kernel that serves them, its launches forward and backward, and the reasons for the choice."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtune.core.code import launching
from flashtune.core.code.launching import LoadedKernel, Plan, Tensors
from flashtune.core.problems.config import Direction, KernelSpec
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch import devices
from flashtune.dispatch.call.sequences import Numbers, Packed, octaves_of, parameters_of, problem_of, rows_last, viewed
from flashtune.dispatch.decisions.explanation import Explanation, explanation_by
from flashtune.dispatch.plans import driver, launch
from flashtune.dispatch.plans.autograd import readable
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.plans.misprediction import Latch
from flashtune.dispatch.plans.program import Program
from flashtune.dispatch.policy.choose import Choice, Refusal
from flashtune.dispatch.policy.orders import rank_packed
from flashtune.dispatch.rows import paged as pages
from flashtune.dispatch.rows.kernel import Kernel, NotBuilt, Repeat, note, place_of
from flashtune.dispatch.state import context
from flashtune.dispatch.state.context import Memo
from flashtune.templates import families

_PLACES = tuple(map(Tensors._fields.index, ("q", "k", "v", "cu_q", "cu_k", "used", "slopes", "sinks", "table", "k_descale", "v_descale")))
"""Places of a call's tensors among those of its launches."""


class PackedPlan:
    """A decided call: its kernel, its numbers, and, once it ran on a GPU, who served last with the launches for its tensors' layout.

    `fixed` are those of the forward, and `trained` those of the backward, with the layouts of what it is given.
    """

    __slots__ = ("_alone", "fixed", "forward", "heads_outside", "latch", "memo", "numbers", "repeat", "trained")

    def __init__(self, memo: Memo, forward: Kernel | None, numbers: Numbers, *, heads_outside: bool = False) -> None:
        """With `heads_outside` the output is (Hq, T_q, D_v) in memory."""
        self.memo, self.forward, self.numbers, self.heads_outside = memo, forward, numbers, heads_outside
        self.fixed: tuple[Kernel, Program] | None = None
        self.trained: tuple[Kernel, Program, tuple[Any, ...], Sequence[bool]] | None = None
        # The launches of `fixed` where a call does nothing else, the latch to others in their place, and what `again` found last.
        self._alone: Program | None = None
        self.latch: Latch[Kernel] | None = None
        self.repeat: Repeat | None = None

    def keep(self, kernel: Kernel, program: Program) -> None:
        """Keep the launches of the forward."""
        self.fixed = kernel, program
        self.latch = None if self.numbers.deterministic else kernel.latch
        self.repeat = None
        self._alone = program if kernel is self.forward and self.numbers.scale > 0.0 and not self.numbers.dropout_p else None

    def keep_trained(self, like: tuple[Any, ...], alike: Sequence[bool], kernel: Kernel, program: Program) -> None:
        """Keep the launches of the backward for tensors of the layouts `like`; `alike` says which gradients have that of their tensor."""
        self.trained = kernel, program, like, alike

    def gives_way(self, kernel: Kernel | None) -> None:
        """Have another kernel serve in place of one that failed, or none (None)."""
        self.forward, self.fixed, self._alone, self.repeat = kernel, None, None, None

    def again(self, given: Sequence[Tensor | None], places: Sequence[int]) -> Repeat | None:
        """The launches of `fixed` for a call that does nothing else, else None. Its tensors are in the order of Packed, and a repeat gets
        those at these places, each once."""
        program, latch = self._alone, self.latch
        if program is None or (latch is not None and latch.suspect):
            return None
        if (repeat := self.repeat) is None:
            repeat = self.repeat = self._repeated(program, given, places)
        return repeat

    def _repeated(self, program: Program, given: Sequence[Tensor | None], places: Sequence[int]) -> Repeat:
        query, _, value, *_ = given
        assert query is not None and value is not None, "every call has them"
        found = {id(given[place]): source for source, place in enumerate(places)}
        at = [(place, found[id(x)]) for place, x in zip(_PLACES, given, strict=True) if x is not None]
        return Repeat.of(program, query, *_outputs(query, value, heads_outside=self.heads_outside), at)


def _outputs(query: Tensor, value: Tensor, *, heads_outside: bool = False) -> tuple[Tensor, Tensor]:
    """Memory for an output (T_q, Hq, D_v) and its LSE (Hq, T_q)."""
    rows, heads, _ = query.shape
    width = value.shape[-1]
    strides = (width, rows * width, 1) if heads_outside else (heads * width, width, 1)
    out = torch.empty_strided((rows, heads, width), strides, dtype=query.dtype, device=query.device)
    return out, torch.empty((heads, rows), dtype=torch.float32, device=query.device)


def served(packed: Packed, numbers: Numbers, direction: Direction = "fwd", memo: Memo | None = None) -> Kernel | None:
    """The best kernel that takes a call; None where none does."""
    memo = memo or context.current()
    query, key, value, cu_q, _, used, slopes, sinks, table, *_ = packed
    aligned = [x.data_ptr() % 16 == 0 for x in (query, key, value)]
    strides = query.stride(), key.stride(), value.stride()
    sizes: tuple[Any, ...] = query.shape[1:], key.shape[1:], value.shape[-1], cu_q.shape, min(len(query), 2), min(len(key), 2)
    bounds: tuple[Any, ...] = octaves_of(packed, numbers) if sizes[3][0] > 1 else ()
    if table is not None:
        bounds = pages.kind_of(packed, numbers)
    given = used is None, slopes is None, sinks is None, *aligned, torch.are_deterministic_algorithms_enabled()
    signature = direction, query.device, query.dtype, strides, sizes, bounds, given, numbers[2:]
    if signature not in memo.packed:
        memo.packed[signature] = _choose(packed, numbers, direction, memo)
    found: Kernel | None = memo.packed[signature]
    return found


def _choose(packed: Packed, numbers: Numbers, direction: Direction, memo: Memo) -> Kernel | None:
    if packed.table is not None:
        kernel = pages.kernel_of_pages(memo, packed, numbers)
        return None if isinstance(kernel, str) else kernel
    device, plan = packed.query.device, memo.settings.plan
    problem = problem_of(packed, numbers, direction)
    if problem is None or not devices.TRITON or not (device.type == "cuda" or devices.INTERPRETING):
        return None
    if device.type == "cpu" and problem.dtype == "bf16" and not driver.driven(device):
        # Triton's interpreter can't multiply it.
        return None
    place = place_of(packed, problem)
    named = None if plan is None else list(plan.choices(place))
    with memo.lock:
        # A plan's kernels depend on the place, which the problem alone doesn't tell.
        known = (problem, device) if plan is None else (place, device)
        if known not in memo.packed:
            memo.packed[known] = list(_loaded(memo, problem, device, named))
        found: list[Kernel] = memo.packed[known]
    chosen = next((one for one in found if one.failed is None and _takes(one, packed, numbers, direction)), None)
    if chosen is None and plan is not None and named is not None and not any(one.kind == "framework" for one in named):
        raise plan.unable(place, next((str(one.failed) for one in found if one.failed is not None), "no kernel of it takes these tensors"))
    note(memo, place, chosen)
    return chosen


def _takes(found: Kernel, packed: Packed, numbers: Numbers, direction: Direction) -> bool:
    """True if a kernel takes these tensors, and repeats its bits where that is required."""
    varies = direction == "bwd" and found.variant is not None and not families()[found.variant.template].repeatable
    if varies and (numbers.deterministic or torch.are_deterministic_algorithms_enabled()):
        return False
    return found.code.module.accepts(rows_last(packed.query), rows_last(packed.key), rows_last(packed.value), None)


def _loaded(memo: Memo, problem: Problem, device: torch.device, named: Sequence[Choice] | None) -> Iterator[Kernel]:
    """Kernels of a problem that can be loaded, best first, or those that a plan has `named`."""
    target, pinned = devices.target_of(device), memo.pinned.get(problem.direction)
    if pinned is not None and pinned.host is not None and pinned.host.spec == problem.spec():
        yield Kernel(memo, None, Code(pinned), device)
    records = lambda one: memo.surroundings(device, one)[2]  # noqa: E731
    ranked: Iterator[Choice | Refusal] = rank_packed(problem, target, records, families(), unmeasured=memo.unmeasured)
    for choice in ranked if named is None else named:
        if isinstance(choice, Refusal) or choice.family is None or (variant := choice.variant) is None:
            continue
        code = memo.kernels.code(choice.family, variant, device, target)
        if isinstance(code, Code):
            made = Kernel(memo, variant, code, device, choice)
            made.fall_back_to(choice.family, choice.fallback, problem)
            yield made


def explained_pass(packed: Packed, numbers: Numbers, why_torch: str | None = None, direction: Direction = "fwd") -> Explanation:
    """Explanation of the choice of a call. `why_torch` is the reason why no kernel serves, if there is one."""
    device, memo = packed.query.device, context.current()
    problem = problem_of(packed, numbers, direction)
    found = None if why_torch is not None else served(packed, numbers, direction, memo)
    gpu = devices.slug_here(device)
    refused: tuple[str, ...] = ()
    if found is None and packed.table is not None:
        why = why_torch or pages.kernel_of_pages(memo, packed, numbers)
        return Explanation(kind="framework", reason=f"{why}, so each sequence is gathered and a call of its own", gpu=gpu)
    if packed.table is None:
        failed: list[Kernel] = memo.packed.get((problem, device), [])
        reasons = ((one.variant, memo.kernels.failure(one.variant, device)) for one in failed if one.variant is not None)
        refused = tuple(f"{variant.template} {variant.id}: {why}" for variant, why in reasons if why is not None)
    if found is None:
        reason = why_torch or (refused[0] if refused else "no kernel takes packed sequences of this kind here")
        return Explanation(kind="framework", reason=f"{reason}, so each sequence is a call of its own", gpu=gpu, refused=refused)
    assert problem is not None and found.choice is not None, "a kernel that isn't pinned serves it"
    choice, state = found.choice, None if found.latch is None else found.latch.state
    if numbers.deterministic or torch.are_deterministic_algorithms_enabled():
        # One kernel serves all such calls.
        choice, state = choice._replace(fallback=None), None
    return explanation_by(choice, problem, gpu, refused).remembering(state)


def forward(memo: Memo, packed: Packed, numbers: Numbers, seed: int, plan: PackedPlan | None = None) -> tuple[Tensor, Tensor] | None:
    """Output (T_q, Hq, D_v) and LSE (Hq, T_q), float32: 0 and -inf in rows that no sequence has; None where no kernel serves.

    With a `plan` for tensors of this layout nothing is looked up; it gets the kernel that serves in place of a failed one.
    """
    found = served(packed, numbers, "fwd", memo) if plan is None else plan.forward
    query, key, value = packed[:3]
    out, lse = _outputs(query, value, heads_outside=plan is not None and plan.heads_outside)
    if plan is not None and found is not None and (fixed := plan.fixed) is not None and numbers.scale > 0.0:
        latch = None if numbers.deterministic else found.latch
        if fixed[0] is (found if latch is None else latch.serving() or found):
            fixed[1].run(_addresses((query, key, value, out, lse, *[None] * 5), packed), (seed, 0))
            return out, lse
    keep = None if plan is None else plan.keep
    while found is not None and not _launch(memo, found, (query, key, value, out, lse), packed, numbers, seed, keep):
        found = served(packed, numbers, "fwd", memo)
        if plan is not None:
            plan.gives_way(found)
    return None if found is None else (out, lse)


def backward(
    memo: Memo,
    packed: Packed,
    numbers: Numbers,
    seed: int,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    plan: PackedPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Gradients of query, key and value: 0 in rows that no sequence has, and of keys that aren't used; None where no kernel serves.

    With a `plan` of the call nothing is looked up where all tensors lie as those of its last backward did.
    """
    dout, dlse = readable(out, dout, dlse)
    # Saved tensors may come back with other strides or elsewhere (saved_tensors_hooks).
    given = (*packed[:3], out, lse, dout, dlse)
    like = torch.are_deterministic_algorithms_enabled(), *[None if x is None else (x.stride(), x.data_ptr() % 16) for x in given]
    known = None if plan is None or numbers.scale <= 0.0 else plan.trained
    fixed = known is not None and known[2] == like
    found = known[0] if known is not None and fixed else served(packed, numbers, "bwd", memo)
    if found is None:
        return None
    query, key, value = packed[:3]
    alike = known[3] if known is not None and fixed else [_covers_once(x) for x in packed[:3]]
    dq, dk, dv = (
        torch.empty_like(x) if once else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x, once in zip(packed[:3], alike, strict=True)
    )
    operands = (query, key, value, out, lse, dout, dlse, dq, dk, dv)
    if known is not None and fixed:
        known[1].run(_addresses(operands, packed), (seed, 0))
        return dq, dk, dv
    keep = None if plan is None else partial(plan.keep_trained, like, alike)
    while found is not None and not _launch(memo, found, operands, packed, numbers, seed, keep):
        found = served(packed, numbers, "bwd", memo)
    return None if found is None else (dq, dk, dv)


def _covers_once(x: Tensor) -> bool:
    """True if no element of it lies under another."""
    return 0 not in (stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def _launch(
    memo: Memo,
    found: Kernel,
    operands: Sequence[Tensor | None],
    packed: Packed,
    numbers: Numbers,
    seed: int,
    keep: Callable[[Kernel, Program], None] | None = None,
) -> bool:
    """Launch a kernel on the tensors' device and its current stream; False where it failed, as at a first call of a plan (`Kernels.tried`).

    Operands are (T, H, D), and numbers of rows (H, T). `keep` gets what was launched, where that is prepared.
    """
    latch = None if numbers.deterministic else found.latch
    if latch is not None and (other := latch.serving()) is not None:
        if _launch(memo, other, operands, packed, numbers, seed, keep):
            return True
        latch.release()
    host, (query, *others) = found.code.module.host, operands
    if numbers.scale <= 0.0 and host is not None:
        # Kept until the launches are enqueued.
        query, _ = launching.positive_scale(host, packed.query, numbers.scale)
    tensors, bits = named((query, *others), packed, found.spec), (seed, 0)
    misses = None if latch is None else found.misses

    # Launches over pages have programs for the longest sequence.
    words = numbers[2:] if packed.table is None else pages.bounded(numbers)

    def planned(kernel: LoadedKernel) -> Plan | None:
        if packed.table is not None:
            return pages.plan_of_pages(kernel, tensors, pages.bounded(numbers), misses)
        return launch.planned(kernel, viewed(operands), parameters_of(packed, numbers, seed), misses)

    try:
        fixed = found.launch(words, tensors, planned, (), bits)
    except NotBuilt:
        return _dropped(memo, found)
    if keep is not None and fixed is not None:
        keep(found, fixed)
    return True


def named(operands: Sequence[Tensor | None], packed: Packed, spec: KernelSpec | None = None) -> Tensors:
    """The tensors of a pass as its launches name them: those of a forward, or of the pass of a spec."""
    _, _, _, cu_q, cu_k, used, slopes, sinks, table, of_k, of_v = packed
    others = {
        "slopes": slopes,
        "k_descale": of_k,
        "v_descale": of_v,
        "sinks": sinks,
        "cu_q": cu_q,
        "cu_k": cu_k,
        "used": used,
        "table": table,
    }
    return Tensors(*operands, **others) if spec is None else Tensors.of(spec, operands, **others)  # type: ignore[arg-type]


def _addresses(operands: Sequence[Tensor | None], packed: Packed) -> list[int]:
    """Addresses of the tensors that `named` makes of ten operands, without making it: in the order of Tensors."""
    query, key, value, out, lse, *gradients = operands
    _, _, _, cu_q, cu_k, used, slopes, sinks, table, of_k, of_v = packed
    of_call = query, key, value, out, lse, None, None, slopes, None, of_k, of_v, sinks, None
    return launching.addresses((*of_call, *gradients, None, None, cu_q, cu_k, used, table, None, None))


def _dropped(memo: Memo, found: Kernel) -> bool:
    """Choose anew for the calls that a kernel served which failed."""
    with memo.lock:
        for place, one in list(memo.packed.items()):
            # Kernels of pages are kept with their failure.
            if one is found and not (isinstance(place, tuple) and place[0] == pages.PLACE):
                del memo.packed[place]
    return False
