"""Kernels of a mask and a score as code: compiled where they are first called, kept in the user's cache, launched by plans."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core import devices, launching
from flashtune.core.config import Config, Direction, KernelSpec
from flashtune.core.launching import LoadedKernel, Plan, Tensors, operand
from flashtune.core.problem import MAX_HEAD_DIM, Problem
from flashtune.core.target import Target
from flashtune.core.torch_dtypes import KERNEL_DTYPES
from flashtune.dispatch import launch as launches
from flashtune.dispatch.choose import Choice
from flashtune.dispatch.context import current
from flashtune.dispatch.flex_configs import (
    UNMEASURED,
    Recorded,
    choices,
    config_without_record,
    kind_of,
    origin_of,
    problem_with_functions,
    recorded_with,
    refusal,
    source_note,
)
from flashtune.dispatch.kernel import Kernel, loaded_kernel
from flashtune.dispatch.resolve import Explanation, explanation_by
from flashtune.dispatch.sequences import Numbers, Packed, rows_last, viewed
from flashtune.dispatch.sequences import problem_of as packed_problem
from flashtune.templates import family
from flashtune.templates.family import Family
from flashtune.templates.launches.common import cdiv
from flashtune.templates.launches.mods import kinds_launch, mask_launch, sorting_launch
from flashtune.templates.mods import known
from flashtune.templates.mods.emit import Mods


class Sequences(NamedTuple):
    """Packed sequences of a call with functions: bounds of queries and keys, numbers of used keys or None, and numbers of the call."""

    bounds: tuple[Tensor, Tensor, Tensor | None]
    numbers: Numbers

    @property
    def flags(self) -> dict[str, bool]:
        """Flags of a spec."""
        _, _, _, left, right, *_ = self.numbers
        return {"packed": True, "causal": right == 0, "window": left >= 0 or right > 0}

    @property
    def words(self) -> dict[str, Any]:
        """Numbers of a launch."""
        _, _, _, left, right, bottom_right, *_ = self.numbers
        return {"diagonal": int(bottom_right), "window_left": left, "window_right": right}

    @property
    def deterministic(self) -> bool:
        """True if bits have to repeat."""
        return self.numbers.deterministic or torch.are_deterministic_algorithms_enabled()


def kernels_here() -> dict[Hashable, Kernel | str]:
    """Kernels of this context by what is compiled in and the functions' record; without one the config is the default, or of another
    feature's record."""
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
    tf32 = query.is_cuda and torch.get_float32_matmul_precision() != "highest" if sequences is None else sequences.numbers.tf32
    flags = {"window": False} if sequences is None else sequences.flags
    spec = KernelSpec(
        direction=direction, dtype=KERNEL_DTYPES[query.dtype], d=query.shape[-1], d_v=value.shape[-1], mask="none", **flags,
        tf32=tf32 and query.dtype is torch.float32, mods=known.keep(mods),
    )  # fmt: skip
    # Searches are of functions without gradients of captured tensors, which have a kernel of their own.
    why, record = "", _recorded(replace(spec, mods=known.keep(mods.untrained)), query, key, value, sequences)
    if record is not None and record.kind.unfit(record.config, spec, devices.target_of(query.device)) is not None:
        record = None
    # Kernels whose bits may vary don't write gradients of unused keys either.
    repeatable = direction == "bwd" and sequences is not None and (sequences.deterministic or sequences.bounds[2] is not None)
    if sequences is not None:
        query, key, value = (rows_last(x.detach()) for x in (query, key, value))
    made = kernels_here()
    for kind, own in choices(spec, record, unmeasured=unmeasured, repeatable=repeatable):
        # Two records may name one config: each has its own times beside PyTorch's.
        place = kind.name, spec, query.device, None if own is None else (own.config, own.record.key)
        if place not in made:
            made[place] = _made(kind, spec, query.device, own)
        found = made[place]
        if isinstance(found, str) or found.failed:
            why = found if isinstance(found, str) else str(found.failed)
        elif found.code.module.accepts(query, key, value, None):
            return found
        else:
            why = "the kernel can't read tensors of these strides"
    return why if unmeasured else UNMEASURED


def _recorded(spec: KernelSpec, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences | None) -> Recorded | None:
    """The record of a call's functions; none for the interpreter, whose times mean nothing."""
    if query.device.type != "cuda" or max(spec.d, spec.d_v) > MAX_HEAD_DIM:
        return None
    if sequences is not None:
        found = packed_problem(Packed(query, key, value, *sequences.bounds), sequences.numbers, spec.direction, mods=spec.mods)
        return None if found is None else recorded_with(found, query.device)
    batch, heads, n_q, _ = query.shape
    problem = problem_with_functions(spec, batch=batch, heads=heads, kv_heads=key.shape[1], n_q=n_q, n_kv=key.shape[2])
    return recorded_with(problem, query.device)


def _made(kind: Family, spec: KernelSpec, device: torch.device, own: Recorded | None) -> Kernel | str:
    target = devices.target_of(device)
    if own is not None:
        choice = Choice("near_n", spec, "", own.record, kind, own.config)
        return loaded_kernel(kind, spec, own.config, origin_of(own.record), device, target, choice)
    if (why := refusal(kind, spec, target)) is not None:
        return why
    return loaded_kernel(kind, spec, *_config(kind, spec, device, target), device, target)


def _config(kind: Family, spec: KernelSpec, device: torch.device, target: Target) -> tuple[Config, str]:
    """The config without a record of the functions, and its origin."""
    memo = current()
    with memo.lock:
        return config_without_record(kind, spec, target, lambda problem: memo.surroundings(device, problem)[2])


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


def launch(
    kernel: Kernel, operands: Sequence[Tensor | None], more: Sequence[Tensor], scale: float, sequences: Sequences | None = None
) -> None:
    """Launch a pass: its operands in the order of flashtune.core.passes, then the tensors of functions (LaunchInputs.mods)."""
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

    kernel.launch((scale, () if sequences is None else sequences.numbers[2:]), tensors, plan, more)


def explained_kernel(kernel: Kernel, said: str, gpu: str, problem: Problem | None) -> Explanation:
    """Explanation of a kernel for a problem of calls; its reason begins with `said`."""
    variant, record = kernel.variant, kernel.record
    assert variant is not None, "kernels with functions aren't pinned"
    kind = "default" if record is None else kind_of(record, None if problem is None else problem.key(gpu))
    reason = f"{said}: {variant.config.label()} ({kernel.origin}, {source_note(record)})"
    choice = Choice(kind, variant.spec, reason, record, family(variant.template), variant.config)
    return explanation_by(choice, problem, gpu)


def slower(passes: Sequence[Kernel]) -> str | None:
    """The reason why PyTorch serves where its passes took less time than kernels beside them; None where one of them wasn't measured."""
    records = [one.record for one in passes if one.record is not None]
    theirs = [record.framework_us for record in records if record.framework_us is not None]
    ours = sum(record.median_us for record in records)
    if len(theirs) < len(passes) or ours <= sum(theirs):
        return None
    return f"it was faster beside the record {records[0].problem.label()}: {sum(theirs):.1f} us, and ours {ours:.1f} us"
