"""Paged keys and values: the kernel that finds pages by a table on the device, its launches, and copies of sequences where none serves."""

import itertools

import torch
from torch import Tensor

from flashtune.core import devices, launching
from flashtune.core.config import Config
from flashtune.core.errors import InputError, InputTypeError
from flashtune.core.launching import LoadedKernel, Plan, Tensors
from flashtune.dispatch.context import Memo
from flashtune.dispatch.inspection import is_distributed
from flashtune.dispatch.kernel import Kernel, loaded_kernel, served_here
from flashtune.dispatch.sequences import Numbers, Packed, problem_of, rows_last
from flashtune.templates.paged import flash_paged

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of caches that are dequantised."""

NO_KERNEL = "no kernel takes pages of this kind here"


def checked(packed: Packed, dropout_p: float) -> list[Tensor]:
    """One row of key and of value in the query's dtype, for the checks of packed calls; raises where the tensors don't fit as pages."""
    query, key, value, cu_q, table = *packed[:4], packed.table
    assert table is not None, "pages have a table"
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
    if packed.used is None:
        raise InputError("block_table says nothing about lengths: give seqused_k, the number of keys of each sequence, or cu_seqlens_k")
    if dropout_p:
        raise InputError(f"dropout_p={dropout_p} drops pairs, but paged caches are for inference: drop none, or pass packed keys")
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in packed):
        raise InputError("paged caches have no gradients: call under torch.no_grad(), or pass packed keys and values")
    if cu_q.dim() == 1 and 0 < len(cu_q) != table.shape[0] + 1:
        raise InputError(f"block_table has {table.shape[0]} rows for {len(cu_q) - 1} sequences: give one for each")
    sizes = table.shape[0], key.shape[2]
    for name, factor in (("k_descale", packed.k_descale), ("v_descale", packed.v_descale)):
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


def bounds_of(max_q: int, max_k: int) -> tuple[int, int]:
    """Bounds of lengths in powers of two, so that growing lengths share launches."""
    return 1 << max(0, max_q - 1).bit_length(), 1 << max(0, max_k - 1).bit_length()


def bounded(numbers: Numbers) -> Numbers:
    """The numbers with these bounds."""
    of_q, of_k = bounds_of(numbers.max_q, numbers.max_k)
    return numbers._replace(max_q=of_q, max_k=of_k)


def kernel_of(memo: Memo, packed: Packed, numbers: Numbers, config: Config | None = None) -> Kernel | str:
    """The kernel that takes such pages, with a `config` of one's own or by default, or the reason why none does."""
    (query, key, value), table = packed[:3], packed.table
    problem = problem_of(packed, bounded(numbers))
    if table is None or problem is None or not served_here(query.device, query.dtype) or 0 in (*query.shape, table.shape[1], len(key)):
        return NO_KERNEL
    target, family = devices.target_of(query.device), flash_paged.FAMILY
    spec = problem.spec()
    if (key.dtype == NARROW[0] and not target.has_e4m3) or (key.dtype == NARROW[1] and target.vendor != "nvidia"):
        return NO_KERNEL
    if family.supports(spec, target) is not None or not family.starts(spec, target):
        return NO_KERNEL
    rows = None if numbers.splits is not None else min(bounded(numbers).max_q, len(query)) * problem.gqa_ratio
    config = flash_paged.chosen(spec, target, rows, narrow=key.dtype in NARROW) if config is None else config
    place = "paged kernel", spec, config, query.device
    if place not in memo.packed:
        memo.packed[place] = loaded_kernel(family, spec, config, "the family's default", query.device, target)
    kernel: Kernel | str = memo.packed[place]
    if isinstance(kernel, str) or kernel.failed:
        return kernel if isinstance(kernel, str) else str(kernel.failed)
    return kernel if kernel.code.module.accepts(rows_last(query), key.transpose(1, 2), value.transpose(1, 2), None) else NO_KERNEL


def planned(kernel: LoadedKernel, tensors: Tensors, numbers: Numbers) -> Plan:
    """The launches for tensors of a call, with its bounded numbers."""
    assert kernel.host is not None and tensors.table is not None, "families of the package have a host side, and pages a table"
    sequences = tensors.table.shape[0]
    views = {name: getattr(tensors, name) for name in ("slopes", "sinks", "k_descale", "v_descale")}
    views = {name: None if x is None else x.expand(sequences, x.shape[-1]) for name, x in views.items()}
    views |= {"q": rows_last(tensors.q), "k": tensors.k.transpose(1, 2), "v": tensors.v.transpose(1, 2)}
    views |= {"out": rows_last(tensors.out), "lse": tensors.lse[None]}
    return launching.plan(
        kernel.host,
        tensors._replace(**views),
        scale=numbers.scale,
        diagonal=int(numbers.bottom_right),
        window_left=numbers.left,
        window_right=numbers.right,
        softcap=numbers.softcap,
        pages=(numbers.max_q, numbers.max_k, numbers.splits),
        sms=launching.sms_of(tensors.q.device),
    )


def gathered(packed: Packed) -> Packed:
    """The same call over packed copies of keys and values, in float32 of caches in float8; lengths are read by the host."""
    assert packed.table is not None and packed.used is not None, "pages have a table and lengths"
    table, page, narrow = packed.table, packed.key.shape[1], packed.key.dtype in NARROW
    lengths = packed.used.clamp(0, table.shape[1] * page).tolist()

    def all_of(cache: Tensor, factor: Tensor | None) -> Tensor:
        # PyTorch can't index tensors in float8.
        memory = cache.view(torch.uint8) if narrow else cache
        factor = None if factor is None else factor.expand(len(table), factor.shape[-1])
        found = []
        for b, count in enumerate(lengths):
            rows = memory[table[b, : -(-count // page)].long()].flatten(0, 1)[:count]
            if narrow:
                rows = rows.view(cache.dtype).float() * (1.0 if factor is None else factor[b][:, None])
            found.append(rows)
        return torch.cat(found) if found else packed.query.new_empty((0, *cache.shape[2:]))

    cu_k = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=packed.query.device)
    key, value = all_of(packed.key, packed.k_descale), all_of(packed.value, packed.v_descale)
    query = packed.query.float() if narrow else packed.query
    return Packed(query, key, value, packed.cu_q, cu_k, None, packed.slopes, packed.sinks)
