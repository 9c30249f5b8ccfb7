"""Paged keys and values: kernels that find pages by a table on the device, their launches, and copies of sequences where none serves."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flashtune.core.code import launching
from flashtune.core.code.launching import LoadedKernel, Plan, Tensors
from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch import devices
from flashtune.core.records.plans import Place
from flashtune.dispatch.call.sequences import Numbers, Packed, octaves_of, problem_of, rows_last
from flashtune.dispatch.plans import driver, launch
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.rows.kernel import Kernel, loaded_kernel, note, served_here
from flashtune.dispatch.state.context import Memo
from flashtune.templates.family import Family
from flashtune.templates.hopper import flash_fwd_hopper_paged
from flashtune.templates.paged import flash_paged

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of caches that are dequantised."""

PLACE = "paged kernel"
"""First part of the keys of kernels in a memo."""

NO_KERNEL = "no kernel takes pages of this kind here"


def bounds_of(max_q: int, max_k: int) -> tuple[int, int]:
    """Bounds of lengths in powers of two, so that growing lengths share launches."""
    return 1 << max(0, max_q - 1).bit_length(), 1 << max(0, max_k - 1).bit_length()


def bounded(numbers: Numbers) -> Numbers:
    """The numbers with these bounds."""
    of_q, of_k = bounds_of(numbers.max_q, numbers.max_k)
    return numbers._replace(max_q=of_q, max_k=of_k)


def kind_of(packed: Packed, numbers: Numbers) -> tuple[object, ...]:
    """All that the choice of a kernel takes from a call's sizes beside heads and the number of sequences."""
    assert packed.table is not None
    of_q, caches = min(bounded(numbers).max_q, len(packed.query)), (packed.table.shape[1] > 0, packed.key.dtype, packed.latent)
    return of_q, octaves_of(packed, numbers)[0], *caches


def kernel_of_pages(memo: Memo, packed: Packed, numbers: Numbers, config: Config | None = None) -> Kernel | str:
    """The kernel that takes such pages, with a `config` of flash_paged or by default, or the reason why none does."""
    (query, key, value), table = packed[:3], packed.table
    problem = problem_of(packed, bounded(numbers))
    if table is None or problem is None or not served_here(query.device, query.dtype) or 0 in (*query.shape, table.shape[1], len(key)):
        return NO_KERNEL
    target = devices.target_of(query.device)
    if (key.dtype == NARROW[0] and not target.has_e4m3) or (key.dtype == NARROW[1] and target.vendor != "nvidia"):
        return NO_KERNEL
    rows = None if numbers.splits is not None else min(bounded(numbers).max_q, len(query)) * problem.gqa_ratio
    caches = f"caches in {str(key.dtype).removeprefix('torch.')}"
    own = Place("paged", devices.slug_here(query.device), problem, (*("splits",) * (rows is None), caches))
    found = list(_chosen(packed, problem, target, rows))
    if config is not None:
        found = [(flash_paged.FAMILY, config)]
    elif found and memo.settings.plan is not None:
        found = [(one.family, one.config) for one in memo.settings.plan.choices(own) if one.family and one.config] or found[-1:]
    why, known = NO_KERNEL, None
    for family, its_config in found:
        kernel = _loaded(memo, problem, family, its_config, query.device)
        if isinstance(kernel, str) or kernel.failed:
            why = kernel if isinstance(kernel, str) else str(kernel.failed)
            continue
        known = kernel
        if kernel.code.module.accepts(rows_last(query), key.transpose(1, 2), value.transpose(1, 2), None):
            note(memo, own, kernel)
            return kernel
    if known is not None:
        note(memo, own, known)
        return NO_KERNEL
    return why


def _chosen(packed: Packed, problem: Problem, target: Target, rows: int | None) -> Iterator[tuple[Family, Config]]:
    """Families that serve at most `rows` rows to a key head, None for any number, with their default configs, the preferred first."""
    spec, narrow = problem.spec(), packed.key.dtype in NARROW
    hopper, plain = flash_fwd_hopper_paged.FAMILY, flash_paged.FAMILY
    apart = replace(problem, features=replace(problem.features, latent=False))
    suited = rows is not None and not narrow and driver.driven(packed.query.device) and hopper.refusal(apart, apart.spec(), target) is None
    if suited and flash_fwd_hopper_paged.ends_apart(problem, packed.key.shape[1]):
        yield hopper, hopper.default(apart.spec(), target)
    if plain.supports(spec, target) is None and plain.starts(spec, target):
        yield plain, flash_paged.chosen(spec, target, rows, narrow=narrow)


def _loaded(memo: Memo, problem: Problem, family: Family, config: Config, device: torch.device) -> Kernel | str:
    """The kernel of a config, kept with its failure, or the reason why it can't be loaded."""
    # A family without the flag reads values beside keys.
    spec = replace(problem.spec(), latent=problem.features.latent and "latent" in family.flags)
    place = PLACE, spec, config, device
    if place not in memo.packed:
        why = "paged keys and values take the family's default config"
        choice = Choice(kind="default", spec=spec, note=why, family=family, config=config)
        memo.packed[place] = loaded_kernel(choice, device, devices.target_of(device), memo)
    found: Kernel | str = memo.packed[place]
    return found


def plan_of_pages(kernel: LoadedKernel, tensors: Tensors, numbers: Numbers) -> Plan:
    """The launches for tensors of a call, with its bounded numbers."""
    assert kernel.host is not None and tensors.table is not None, "families of the package have a host side, and pages a table"
    sequences = tensors.table.shape[0]
    views = {name: getattr(tensors, name) for name in ("slopes", "sinks", "k_descale", "v_descale")}
    views = {name: None if x is None else x.expand(sequences, x.shape[-1]) for name, x in views.items()}
    views |= {"q": rows_last(tensors.q), "k": tensors.k.transpose(1, 2), "v": tensors.v.transpose(1, 2)}
    views |= {"out": rows_last(tensors.out), "lse": tensors.lse[None]}
    words = launch.provided(kernel, views["q"], views["k"])
    views["counts"] = words.pop("counts")
    pages = numbers.max_q, numbers.max_k, numbers.splits
    return launching.plan(kernel.host, tensors._replace(**views), **numbers.of_launch(), pages=pages, **words)


def gathered(packed: Packed) -> Packed:
    """A packed call over copies of the used keys and values; copies of float8 caches are float32. Lengths are read by the host."""
    assert packed.table is not None and packed.used is not None, "pages have a table and lengths"
    table, page = packed.table, packed.key.shape[1]
    lengths = packed.used.clamp(0, table.shape[1] * page).tolist()

    def all_of(cache: Tensor, factor: Tensor | None) -> Tensor:
        factor = None if factor is None else factor.expand(len(table), factor.shape[-1])
        found = []
        for b, count in enumerate(lengths):
            rows = _blocks(cache, table[b, : -(-count // page)], None if factor is None else factor[b])
            found.append(rows.flatten(0, 1)[:count])
        return torch.cat(found) if found else packed.query.new_empty((0, *cache.shape[2:]))

    cu_k = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=packed.query.device)
    return _over(packed, all_of(packed.key, packed.k_descale), all_of(packed.value, packed.v_descale), cu_k, None)


def gathered_whole(packed: Packed) -> Packed:
    """A packed call over copies of all pages of each sequence, used or not, for which no length is read."""
    assert packed.table is not None and packed.used is not None, "pages have a table and lengths"
    room = packed.table.shape[1] * packed.key.shape[1]
    # What stands in the place of pages that aren't used may name no block.
    table = packed.table.clamp(0, packed.key.shape[0] - 1)

    def all_of(cache: Tensor, factor: Tensor | None) -> Tensor:
        factor = None if factor is None else factor.expand(len(table), factor.shape[-1])[:, None, None]
        return _blocks(cache, table, factor).flatten(0, 2)

    cu_k = torch.arange(len(packed.cu_q), dtype=torch.int32, device=packed.query.device) * room
    keys = all_of(packed.key, packed.k_descale), all_of(packed.value, packed.v_descale)
    return _over(packed, *keys, cu_k, packed.used.clamp(0, room))


def _blocks(cache: Tensor, places: Tensor, factor: Tensor | None) -> Tensor:
    """Copies of blocks (..., page, Hkv, D), times a factor (..., Hkv) in float32 where they are float8."""
    if cache.dtype not in NARROW:
        return cache[places.long()]
    # PyTorch can't index tensors in float8.
    rows = cache.view(torch.uint8)[places.long()].view(cache.dtype).float()
    return rows if factor is None else rows * factor[..., None]


def _over(packed: Packed, key: Tensor, value: Tensor, cu_k: Tensor, used: Tensor | None) -> Packed:
    """The call over other keys and values, in the dtype of these."""
    query, sinks = packed.query, packed.sinks
    if packed.key.dtype in NARROW:
        query, sinks = query.float(), None if sinks is None else sinks.float()
    return Packed(query, key, value, packed.cu_q, cu_k, used, packed.slopes, sinks)
