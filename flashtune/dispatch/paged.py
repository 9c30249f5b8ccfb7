"""Paged keys and values: plans of kernels that find pages by a table on the device, and sequences that are gathered where none serves."""

import contextlib
import functools
import itertools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core import devices, launching
from flashtune.core.config import Config
from flashtune.core.errors import InputError, InputTypeError
from flashtune.core.launching import LoadedKernel, Plan, Tensors
from flashtune.dispatch import context
from flashtune.dispatch.call import PerHead
from flashtune.dispatch.context import Memo
from flashtune.dispatch.flex_kernels import loaded_kernel, served_here
from flashtune.dispatch.inspection import GRADIENTS, is_distributed, perhaps_fake, transformed, why_torch_now
from flashtune.dispatch.kernel import MOST_PROGRAMS, Kernel, NotBuilt, Prepared, layout
from flashtune.dispatch.operators import define_lazily
from flashtune.dispatch.packed import Numbers, Packed, problem_of, rows_last
from flashtune.dispatch.packed_ops import by_attention
from flashtune.dispatch.resolve import Explanation, slug_of
from flashtune.templates.paged import flash_paged

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of caches that are dequantised."""

NO_KERNEL = "no kernel takes pages of this kind here"


class Paged(NamedTuple):
    """Tensors of a call: query (T_q, Hq, D); key (blocks, page, Hkv, D) and value (blocks, page, Hkv, D_v), with any strides;
    (sequences + 1,) integers where each sequence's queries begin and the last one's end; (sequences, pages) blocks of each page;
    (sequences,) numbers of keys; slopes (Hq,) or (sequences, Hq), sinks (Hq,), and factors (Hkv,) or (sequences, Hkv) of key and value,
    float32, or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_q: Tensor
    table: Tensor
    used: Tensor
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    def expanded(self) -> "Paged":
        """These tensors with slopes, sinks and factors expanded to a row for each sequence."""
        more = [None if x is None else x.expand(self.table.shape[0], x.shape[-1]) for x in self[6:]]
        return self._replace(slopes=more[0], sinks=more[1], k_descale=more[2], v_descale=more[3])

    def packed(self, key: Tensor, value: Tensor, cu_k: Tensor) -> Packed:
        """The same queries over packed keys and values."""
        return Packed(self.query, key, value, self.cu_q, cu_k, None, self.slopes, self.sinks)


class PagedPlan:
    """Plan of paged calls whose tensors have one layout: their kernel, and its launches once it ran on a GPU."""

    __slots__ = ("fixed", "kernel", "numbers", "splits")

    def __init__(self, kernel: Kernel, numbers: Numbers, splits: int | None) -> None:
        self.kernel, self.numbers, self.splits = kernel, numbers, splits
        self.fixed: Prepared | None = None


def checked(paged: Paged, dropout_p: float) -> list[Tensor]:
    """One row of key and of value in the query's dtype, for the checks of packed calls; raises where the tensors don't fit as pages."""
    query, key, value, cu_q, table, *_ = paged
    for name, x in (("query", query), ("key", key), ("value", value), ("cu_seqlens_q", cu_q), ("block_table", table)):
        if not isinstance(x, Tensor):
            raise InputTypeError(f"{name} must be a tensor, not {type(x).__name__}: pass torch tensors")
        if is_distributed(x):
            raise InputTypeError(f"{name} is a DTensor, and paged caches are of one rank: call with to_local() of each tensor")
    for name, x in (("key", key), ("value", value)):
        if x.dim() != 4:
            raise InputError(f"{name} has {x.dim()} dimensions: with block_table caches are (blocks, page size, heads, head size)")
    if key.shape[:3] != value.shape[:3] or key.shape[1] == 0 or key.dtype != value.dtype:
        raise InputError(
            f"key {tuple(key.shape)} {key.dtype} and value {tuple(value.shape)} {value.dtype} don't fit: give them equal pages, none empty"
        )
    if key.dtype != query.dtype and key.dtype not in NARROW:
        raise InputTypeError(f"query is {query.dtype} and its caches are {key.dtype}: give them one dtype, or caches in float8")
    if table.dim() != 2 or table.dtype not in (torch.int32, torch.int64) or table.device != query.device:
        raise InputError(
            f"block_table is {table.dtype} {tuple(table.shape)} on {table.device}: give (sequences, pages) int32 or int64 on query's device"
        )
    if paged.used is None:
        raise InputError("block_table says nothing about lengths: give seqused_k, the number of keys of each sequence, or cu_seqlens_k")
    if dropout_p:
        raise InputError(f"dropout_p={dropout_p} drops pairs, but paged caches are for inference: drop none, or pass packed keys")
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in paged):
        raise InputError("paged caches have no gradients: call under torch.no_grad(), or pass packed keys and values")
    if cu_q.dim() == 1 and 0 < len(cu_q) != table.shape[0] + 1:
        raise InputError(f"block_table has {table.shape[0]} rows for {len(cu_q) - 1} sequences: give one for each")
    sizes = table.shape[0], key.shape[2]
    for name, factor in (("k_descale", paged.k_descale), ("v_descale", paged.v_descale)):
        if factor is None:
            continue
        if not isinstance(factor, Tensor):
            raise InputTypeError(f"{name} must be a tensor, not {type(factor).__name__}: give float32 (sequences, Hkv) or (Hkv,)")
        if factor.device != query.device:
            raise InputError(f"{name} is on {factor.device} and query on {query.device}: move all to one device")
        if key.dtype not in NARROW or factor.dtype != torch.float32 or factor.shape not in (sizes, sizes[1:]):
            raise InputError(
                f"{name} is {factor.dtype} {tuple(factor.shape)} for {key.dtype}: give float32 (sequences, Hkv) or (Hkv,) and float8 caches"
            )
    stubs = [query.new_empty((1, *x.shape[2:])) for x in (key, value)]
    return stubs


def attend(paged: Paged, numbers: Numbers, splits: int | None) -> tuple[Tensor, Tensor, PagedPlan | None]:
    """Output and LSE of checked tensors, and the plan of kernels that served them, if there was one."""
    why_torch = _why_torch(paged)
    if (torch.compiler.is_compiling() or perhaps_fake(why_torch, paged.query)) and not transformed():
        return *torch.ops.flashtune_paged.attention(*paged, *numbers, splits), None
    return served(paged, numbers, splits) if why_torch is None or why_torch in GRADIENTS else (*gathered(paged, numbers), None)


def served(paged: Paged, numbers: Numbers, splits: int | None) -> tuple[Tensor, Tensor, PagedPlan | None]:
    """Output and LSE by the plan of kernels, and that plan, or by gathered copies where none serves or its kernel can't be built here."""
    plan = plan_of(paged, numbers, splits)
    if plan is not None:
        with contextlib.suppress(NotBuilt):
            return *run(plan, paged), plan
    return *gathered(paged, numbers), None


def _why_torch(paged: Paged) -> str | None:
    return why_torch_now(*paged[:3], None, PerHead(alibi_slopes=paged.slopes, sinks=paged.sinks))


def plan_of(paged: Paged, numbers: Numbers, splits: int | None, config: Config | None = None) -> PagedPlan | None:
    """The plan for tensors of this layout, with a `config` of one's own or by default; None where no kernel takes them."""
    memo, numbers = context.current(), _bounded(numbers)
    plans: dict[Hashable, PagedPlan | None] = memo.packed.setdefault("paged", {})
    key = layout(paged), paged.query.device, numbers, splits, config
    known = plans.get(key)
    if key not in plans or (known is not None and known.kernel.failed):
        kernel = _kernel(memo, paged, numbers, splits, config)
        if len(plans) >= MOST_PROGRAMS:
            plans.clear()
        plans[key] = None if isinstance(kernel, str) else PagedPlan(kernel, numbers, splits)
    return plans[key]


def bounds_of(max_q: int, max_k: int) -> tuple[int, int]:
    """Bounds of lengths in powers of two, so that growing lengths share plans."""
    return 1 << max(0, max_q - 1).bit_length(), 1 << max(0, max_k - 1).bit_length()


def _bounded(numbers: Numbers) -> Numbers:
    """The numbers with the bounds that a plan has."""
    of_q, of_k = bounds_of(numbers.max_q, numbers.max_k)
    return numbers._replace(max_q=of_q, max_k=of_k)


def _kernel(memo: Memo, paged: Paged, numbers: Numbers, splits: int | None, config: Config | None) -> Kernel | str:
    """The kernel for tensors of this layout, or the reason why none takes them."""
    query, key, value = paged[:3]
    problem = problem_of(paged.packed(key[:, 0], value[:, 0], paged.cu_q), numbers)
    if problem is None or not served_here(query.device, query.dtype) or 0 in (*query.shape, paged.table.shape[1], len(key)):
        return NO_KERNEL
    target, family = devices.target_of(query.device), flash_paged.FAMILY
    spec = problem.spec()
    if (key.dtype == NARROW[0] and not target.has_e4m3) or (key.dtype == NARROW[1] and target.vendor != "nvidia"):
        return NO_KERNEL
    if family.supports(spec, target) is not None or not family.starts(spec, target):
        return NO_KERNEL
    rows = None if splits is not None else min(numbers.max_q, len(query)) * problem.gqa_ratio
    config = flash_paged.chosen(spec, target, rows, narrow=key.dtype in NARROW) if config is None else config
    place = "paged kernel", spec, config, query.device
    if place not in memo.packed:
        memo.packed[place] = loaded_kernel(family, spec, config, "the family's default", query.device, target)
    kernel: Kernel | str = memo.packed[place]
    if isinstance(kernel, str) or kernel.failed:
        return kernel if isinstance(kernel, str) else str(kernel.failed)
    return kernel if kernel.code.module.accepts(rows_last(query), key.transpose(1, 2), value.transpose(1, 2), None) else NO_KERNEL


def run(plan: PagedPlan, paged: Paged) -> tuple[Tensor, Tensor]:
    """Output (T_q, Hq, D_v) and LSE (Hq, T_q) of tensors of the plan's layout, on the current stream; raises NotBuilt at a first call."""
    query, value = paged.query, paged.value
    rows, heads, _ = query.shape
    out = torch.empty((rows, heads, value.shape[3]), dtype=query.dtype, device=query.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=query.device)
    _, key, _, cu_q, table, used, slopes, sinks, of_k, of_v = paged
    lists = {"cu_q": cu_q, "cu_k": cu_q, "used": used, "table": table}
    tensors = Tensors(query, key, value, out, lse, slopes=slopes, k_descale=of_k, v_descale=of_v, sinks=sinks, **lists)
    if plan.fixed is not None:
        plan.kernel.run(plan.fixed, tensors)
    else:
        plan.fixed = plan.kernel.launch((plan.numbers, plan.splits), tensors, functools.partial(_planned, plan, tensors))
    return out, lse


def _planned(plan: PagedPlan, tensors: Tensors, kernel: LoadedKernel) -> Plan:
    """The launches for tensors of the plan's layout."""
    numbers, (sequences, _) = plan.numbers, tensors.table.shape  # type: ignore[union-attr]
    views = {name: getattr(tensors, name) for name in ("slopes", "sinks", "k_descale", "v_descale")}
    views = {name: None if x is None else x.expand(sequences, x.shape[-1]) for name, x in views.items()}
    views |= {"q": rows_last(tensors.q), "k": tensors.k.transpose(1, 2), "v": tensors.v.transpose(1, 2)}
    views |= {"out": rows_last(tensors.out), "lse": tensors.lse[None]}
    assert kernel.host is not None, "families of the package have a host side"
    return launching.plan(
        kernel.host,
        tensors._replace(**views),
        scale=numbers.scale,
        diagonal=int(numbers.bottom_right),
        window_left=numbers.left,
        window_right=numbers.right,
        softcap=numbers.softcap,
        pages=(numbers.max_q, numbers.max_k, plan.splits),
        sms=launching.sms_of(tensors.q.device),
    )


def gathered(paged: Paged, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Output and LSE by a call of `attention` for each sequence over a copy of its keys and values; lengths are read by the host."""
    page, narrow = paged.key.shape[1], paged.key.dtype in NARROW
    query = paged.query.float() if narrow else paged.query
    lengths = paged.used.clamp(0, paged.table.shape[1] * page).tolist()

    def all_of(cache: Tensor, factor: Tensor | None) -> Tensor:
        # PyTorch can't index tensors in float8.
        memory = cache.view(torch.uint8) if narrow else cache
        found = []
        for b, count in enumerate(lengths):
            rows = memory[paged.table[b, : -(-count // page)].long()].flatten(0, 1)[:count]
            if narrow:
                rows = rows.view(cache.dtype).float() * (1.0 if factor is None else factor[b][:, None])
            found.append(rows)
        return torch.cat(found) if found else query.new_empty((0, *cache.shape[2:]))

    cu_k = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=query.device)
    factors = paged.expanded()[8:]
    packed = paged.packed(all_of(paged.key, factors[0]), all_of(paged.value, factors[1]), cu_k)
    out, lse = by_attention(packed._replace(query=query), numbers, 0)
    return out.to(paged.query.dtype), lse


def explained(paged: Paged, numbers: Numbers, splits: int | None) -> Explanation:
    """Explanation of the choice of a call."""
    device, why_torch = paged.query.device, _why_torch(paged)
    plan = plan_of(paged, numbers, splits) if why_torch is None or why_torch in GRADIENTS else None
    gpu = slug_of(device)
    if plan is None:
        reason = why_torch or _kernel(context.current(), paged, _bounded(numbers), splits, None)
        return Explanation(kind="framework", reason=f"{reason}, so each sequence is gathered and a call of its own", gpu=gpu)
    variant = plan.kernel.variant
    assert variant is not None, "kernels of pages aren't pinned"
    reason = "paged keys and values take the family's default config"
    return Explanation(kind="default", reason=reason, gpu=gpu, template=variant.template, variant_id=variant.id, config=variant.config)


_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor cu_q, Tensor table, Tensor used, Tensor? slopes, Tensor? sinks, Tensor? k_descale, "
    "Tensor? v_descale, SymInt max_q, SymInt max_k, float scale, SymInt left, SymInt right, bool bottom_right, float softcap, "
    "float dropout_p, bool tf32, bool deterministic, SymInt? splits) -> (Tensor, Tensor)"
)


def _define() -> None:
    """Define the operator: an opaque node of a compiler's graph."""

    def eager(*given: Any) -> tuple[Tensor, Tensor]:
        count = len(Paged._fields)
        paged, numbers = Paged(*given[:count]), Numbers(*given[count:-1])
        out, lse, _ = served(paged, numbers, given[-1])
        return out.contiguous(), lse.contiguous()

    operator = torch.library.custom_op("flashtune_paged::attention", eager, mutates_args=(), schema=_SCHEMA)

    @operator.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        rows, heads, _ = query.shape
        return query.new_empty((rows, heads, value.shape[3])), query.new_empty((heads, rows), dtype=torch.float32)


define_lazily(_define, "flashtune_paged")
