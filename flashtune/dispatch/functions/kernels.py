"""Kernels of a mask and a score as code: compiled where they are first called, kept in the user's cache, launched by plans."""

import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.code import launching
from flashtune.core.code.launching import LoadedKernel, Plan, Tensors, operand
from flashtune.core.problems.config import Direction
from flashtune.core.problems.problem import MAX_HEAD_DIM, Features, Problem
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.dtypes import KERNEL_DTYPES
from flashtune.core.records.plans import Place
from flashtune.dispatch.call.sequences import Numbers, Packed, rows_last, viewed
from flashtune.dispatch.call.sequences import problem_of as packed_problem
from flashtune.dispatch.decisions.explanation import Explanation, explanation_by
from flashtune.dispatch.plans import launch as launches
from flashtune.dispatch.plans.program import Program
from flashtune.dispatch.policy.choose import Choice, Refusal, kind_by
from flashtune.dispatch.policy.orders import UNMEASURED, rank_coded
from flashtune.dispatch.policy.records import differences
from flashtune.dispatch.rows.kernel import Kernel, Repeat, layout, loaded_kernel, note
from flashtune.dispatch.state.context import current
from flashtune.dispatch.state.recorded import meet_coded
from flashtune.templates import families
from flashtune.templates.launches.common import cdiv
from flashtune.templates.launches.mods import kinds_launch, mask_launch, sorting_launch
from flashtune.templates.mods import known
from flashtune.templates.mods.emit import Mods

MOST_CALLS = 1024
"""Most signatures of calls whose kernel is at hand."""


class Sequences(NamedTuple):
    """Packed sequences of a call with functions: bounds of queries and keys, numbers of used keys or None, and numbers of the call."""

    bounds: tuple[Tensor, Tensor, Tensor | None]
    numbers: Numbers

    @property
    def words(self) -> dict[str, Any]:
        """Numbers of a launch."""
        return self.numbers.band.keywords()

    @property
    def deterministic(self) -> bool:
        """True if bits have to repeat."""
        return self.numbers.deterministic or torch.are_deterministic_algorithms_enabled()


def kernels_here() -> dict[Hashable, Kernel | str]:
    """Kernels of this context by what is compiled in and the record that gave the config."""
    found: dict[Hashable, Kernel | str] = current().packed.setdefault("kernels of functions", {})
    return found


def kernel_of(
    direction: Direction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mods: Mods,
    *,
    unmeasured: bool = True,
    sequences: Sequences | None = None,
) -> Kernel | str:
    """The kernel of the functions' own record, else of the first family that takes tensors like these, or the reason why there is none.

    Families with plain pointers need a record of their own, unless `unmeasured` ones may serve, too.
    """
    # Searches are of functions without gradients of captured tensors, which have a kernel of their own.
    searched = known.keep(mods.untrained)
    problem = problem_with_functions(direction, query, key, value, known.keep(mods), sequences)
    if problem is None:
        return "no kernel takes tensors of these sizes"
    meet_coded(current(), problem_with_functions(direction, query, key, value, searched, sequences, exact=True))
    repeatable = direction == "bwd" and sequences is not None and sequences.deterministic
    if sequences is not None:
        query, key, value = (rows_last(x.detach()) for x in (query, key, value))
    memo, made, device, why = current(), kernels_here(), query.device, ""
    served: dict[Hashable, Kernel] = memo.packed.setdefault("kernels of calls with functions", {})
    call = problem, searched, device, layout((query, key, value)), unmeasured, repeatable
    if call in served and not served[call].failed:
        return served[call]
    target, records = devices.target_of(device), lambda one: memo.surroundings(device, one)[2]
    words = {"unmeasured": memo.unmeasured, "framework_serves": not unmeasured, "repeatable": repeatable}
    place, plan = Place("functions", devices.slug_here(device), problem, ("deterministic",) * repeatable), memo.settings.plan
    ranked: Iterator[Choice | Refusal] = rank_coded(problem, target, records, families(), searched=searched, **words)
    with memo.lock:
        for choice in ranked if plan is None else plan.choices(place):
            if isinstance(choice, Refusal):
                why = choice.reason
            if isinstance(choice, Refusal) or choice.family is None:
                continue
            # Two records may name one config: each has its own times beside PyTorch's.
            own = choice.family.name, choice.spec, device, choice.config, None if choice.record is None else choice.record.key
            if own not in made:
                made[own] = loaded_kernel(choice, device, target)
            found = made[own]
            if isinstance(found, str) or found.failed:
                why = found if isinstance(found, str) else str(found.failed)
            elif found.code.module.accepts(query, key, value, None):
                if len(served) >= MOST_CALLS:
                    served.clear()
                served[call] = found
                note(memo, place, found)
                return found
            else:
                why = "the kernel can't read tensors of these strides"
        note(memo, place, None)
    return why if unmeasured else UNMEASURED


def problem_with_functions(
    direction: Direction,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mods: str,
    sequences: Sequences | None = None,
    *,
    exact: bool = False,
) -> Problem | None:
    """The problem of a call with the hash of functions, of packed sequences by `exact` lengths or by octaves; None where no kernel takes
    tensors of such sizes."""
    if sequences is not None:
        packed = Packed(query, key, value, *sequences.bounds)
        return packed_problem(packed, sequences.numbers, direction, exact=exact, mods=mods)
    (batch, heads, n_q, d), n_kv, d_v = query.shape, key.shape[2], value.shape[3]
    if max(d, d_v) > MAX_HEAD_DIM:
        return None
    tf32 = query.dtype is torch.float32 and query.is_cuda and torch.get_float32_matmul_precision() != "highest"
    features, dtype = Features(mods=mods, tf32=tf32), KERNEL_DTYPES[query.dtype]
    return Problem(
        batch=batch, heads=heads, kv_heads=key.shape[1], n_q=n_q, n_kv=n_kv, d=d, d_v=d_v, dtype=dtype, features=features,
        direction=direction,
    )  # fmt: skip


def tile_kinds(kernel: Kernel, mods: Mods, captured: Sequence[Tensor], sizes: tuple[int, int, int, int], tile: tuple[int, int]) -> Tensor:
    """Kinds of the tiles of a mask: int8 (batches, heads, tiles of queries, tiles of keys), with batches and heads of 1 where the mask
    doesn't depend on them: 0 needs the mask, 1 is visible, 2 hidden. `sizes` are batches, heads, queries and keys."""
    batch, heads, n_q, n_kv = sizes
    shape = (batch if mods.by_batch else 1, heads if mods.by_head else 1, cdiv(n_q, tile[0]), cdiv(n_kv, tile[1]))
    kinds = torch.empty(shape, dtype=torch.int8, device=kernel.device)

    def plan(_: LoadedKernel) -> Plan:
        places = tuple(operand(1 + i, x) for i, x in enumerate(captured))
        return Plan([kinds_launch(operand(0, kinds), places, n_q, n_kv, tile)], [kinds, *captured], [])

    kernel.launch(("kinds", sizes, tile), [kinds, *captured], plan)
    return kinds


def lists_of_kinds(kernel: Kernel, kinds: Tensor, *, of_keys: bool) -> Tensor:
    """Lists of blocks from kinds of tiles (batches, heads, tiles of queries, tiles of keys): int32 (batches, heads, rows, 2 + columns), of
    each tile of queries or (`of_keys`) of keys the number of blocks that need the mask, that of all visible ones, and their places."""
    rows, columns = kinds.shape[:1:-1] if of_keys else kinds.shape[2:]
    lists = torch.empty((*kinds.shape[:2], rows, columns + 2), dtype=torch.int32, device=kernel.device)
    flat = lists.flatten(0, 1)

    def plan(_: LoadedKernel) -> Plan:
        return Plan([sorting_launch(operand(0, kinds), operand(1, flat), of_keys=of_keys)], [kinds, flat], [])

    kernel.launch(("sort", of_keys), [kinds, flat], plan)
    return lists


def lists_of_mask(kernel: Kernel, mask: Sequence[Tensor], blocks: tuple[int, int], rows: int, columns: int) -> Tensor:
    """The same from a BlockMask's numbers and places of blocks, then those of full ones; `blocks` are tiles of a block either way."""
    held = [x.contiguous() for x in mask]
    lists = torch.empty((*mask[0].shape[:2], rows, columns + 2), dtype=torch.int32, device=kernel.device)
    flat = lists.flatten(0, 1)

    def plan(_: LoadedKernel) -> Plan:
        return Plan([mask_launch(tuple(operand(i, x) for i, x in enumerate(held)), operand(len(held), flat), blocks)], [*held, flat], [])

    kernel.launch(("mask", blocks), [*held, flat], plan)
    return lists


class Launched:
    """Launches of a forward with functions, kept for calls of it whose rows and lists of lengths lie alike."""

    __slots__ = ("_lists", "kept")

    def __init__(self) -> None:
        # Kernel, launches, and which tensors of functions are aligned to 16 bytes; one tuple, to be read atomically.
        self.kept: tuple[Kernel, Repeat, list[bool]] | None = None
        self._lists: list[weakref.ref[Tensor]] | None = None

    def keep_lists(self, lists: Sequence[Tensor]) -> None:
        """Keep lists of blocks, weakly: they live as long as they are kept with their mask."""
        self._lists = [weakref.ref(x) for x in lists]

    def lists(self) -> list[Tensor] | None:
        """Lists of blocks that were kept; None where there are none, or no longer."""
        # Read once: another thread may keep others.
        if (kept := self._lists) is None:
            return None
        found = []
        for ref in kept:
            if (x := ref()) is None:
                return None
            found.append(x)
        return found

    def keep(
        self, kernel: Kernel, program: Program, operands: Sequence[Tensor], bounds: Sequence[Tensor | None], more: Sequence[Tensor]
    ) -> None:
        """Keep what a call launched, with tensors of functions like these."""
        query, key, value, out, lse = operands
        own = {id(x): source for source, x in enumerate(distinct(query, key, value, *bounds))}
        places = [
            *zip(range(3), range(3), strict=True),
            *((place, own[id(x)]) for place, x in zip(_BOUNDS, bounds, strict=False) if x is not None),
        ]
        self.kept = kernel, Repeat.of(program, query, out, lse, places), [x.data_ptr() % 16 == 0 for x in more]

    def again(self, kernel: Kernel, more: Sequence[Tensor]) -> tuple[Repeat, list[int]] | None:
        """The launches for a call's `distinct` tensors, and the addresses of tensors of functions; None unless kernel and alignments are
        those kept. Tensors of functions (`more`) have the sizes and strides of those that were kept."""
        kept, mods = self.kept, [*map(Tensor.data_ptr, more)]
        if kept is None or kept[0] is not kernel or (mods and [at % 16 == 0 for at in mods] != kept[2]):
            return None
        return kept[1], mods


def distinct(query: Tensor, key: Tensor, value: Tensor, *bounds: Tensor | None) -> list[Tensor]:
    """The tensors of a call with functions, each once."""
    if not bounds:
        return [query, key, value]
    cu_q, cu_k, used = bounds
    return [x for x in (query, key, value, cu_q, None if cu_k is cu_q else cu_k, used) if x is not None]


_BOUNDS = tuple(map(Tensors._fields.index, ("cu_q", "cu_k", "used")))
"""Places of lists of lengths among a launch's tensors."""


def launch(
    kernel: Kernel, operands: Sequence[Tensor | None], more: Sequence[Tensor], scale: float, sequences: Sequences | None = None
) -> Program | None:
    """Launch a pass: its operands in the order of flashtune.core.problems.passes, then the tensors of functions (LaunchInputs.mods).

    Returns its prepared launches, or None where Triton launched.
    """
    numbers: dict[str, Any] = {"scale": scale}
    bounds: tuple[Tensor | None, ...] = (None, None, None)
    if sequences is not None:
        operands, bounds = viewed(operands), sequences.bounds
        numbers |= sequences.words
    tensors = Tensors.of(kernel.spec, operands, **dict(zip(("cu_q", "cu_k", "used"), bounds, strict=True)))

    def plan(loaded: LoadedKernel) -> Plan:
        assert loaded.host is not None, "families of the package have a host side"
        given = launches.provided(loaded, tensors.q, tensors.k)
        return launching.plan(loaded.host, tensors._replace(counts=given.pop("counts")), more, **numbers, **given)

    return kernel.launch((scale, () if sequences is None else sequences.numbers[2:]), tensors, plan, more)


def explained_kernel(kernel: Kernel, said: str, gpu: str, problem: Problem | None) -> Explanation:
    """Explanation of a kernel for a problem of calls; its reason begins with `said`."""
    choice = kernel.choice
    assert choice is not None, "kernels with functions aren't pinned"
    if choice.record is not None and problem is not None:
        # Calls of other sizes share it, and gradients of captured tensors those of the functions without.
        key = replace(problem, features=replace(problem.features, mods=choice.record.problem.features.mods)).key(gpu)
        choice = choice._replace(kind=kind_by(choice.record, key), differences=differences(choice.record, key))
    return explanation_by(choice._replace(note=f"{said}: {kernel.config.label()} ({choice.origin})"), problem, gpu)


def slower(passes: Sequence[Kernel]) -> str | None:
    """The reason why PyTorch serves where its passes took less time than kernels beside them; None where one of them wasn't measured."""
    records = [one.record for one in passes if one.record is not None]
    theirs = [record.framework_us for record in records if record.framework_us is not None]
    ours = sum(record.median_us for record in records)
    if len(theirs) < len(passes) or ours <= sum(theirs):
        return None
    return f"it was faster beside the record {records[0].problem.label()}: {sum(theirs):.1f} us, and ours {ours:.1f} us"
