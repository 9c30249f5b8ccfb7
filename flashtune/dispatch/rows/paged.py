"""Paged keys and values: kernels that find pages by a table on the device, their launches, and copies of sequences where none serves."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashtune.core.code import launching
from flashtune.core.code.launching import LoadedKernel, Plan, Tensors
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem, next_power_of_two
from flashtune.core.pytorch import devices
from flashtune.core.records.plans import Place
from flashtune.core.records.results import TuningRecord
from flashtune.core.system.errors import InputError
from flashtune.dispatch.call.sequences import Numbers, Packed, octaves_of, problem_of, rows_last
from flashtune.dispatch.plans import driver, launch
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.policy.choose import Choice, Pool
from flashtune.dispatch.policy.orders import rank_packed
from flashtune.dispatch.rows.kernel import Kernel, loaded_kernel, note, served_here
from flashtune.dispatch.state.context import Memo
from flashtune.templates import families_of_pages
from flashtune.templates.family import Family
from flashtune.templates.paged import flash_paged

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of caches that are dequantised."""

PLACE = "paged kernel"
"""First part of the keys of kernels in a memo."""

NO_KERNEL = "no kernel takes pages of this kind here"


def bounds_of(max_q: int, max_k: int) -> tuple[int, int]:
    """Bounds of lengths in powers of two, so that growing lengths share launches."""
    return next_power_of_two(max_q), next_power_of_two(max_k)


def bounded(numbers: Numbers) -> Numbers:
    """The numbers with these bounds."""
    of_q, of_k = bounds_of(numbers.max_q, numbers.max_k)
    return numbers._replace(max_q=of_q, max_k=of_k)


def kind_of(packed: Packed, numbers: Numbers) -> tuple[object, ...]:
    """All that the choice of a kernel takes from a call's sizes beside heads and the number of sequences."""
    assert packed.table is not None
    of_q, caches = min(bounded(numbers).max_q, len(packed.query)), (packed.table.shape[1] > 0, packed.key.dtype, packed.latent)
    return of_q, octaves_of(packed, numbers), *caches


def kernel_of_pages(memo: Memo, packed: Packed, numbers: Numbers, config: Config | None = None) -> Kernel | str:
    """The kernel that takes such pages, with a `config` of flash_paged, by a record or by default, or the reason why none does."""
    (query, key, value), table = packed[:3], packed.table
    problem = problem_of(packed, bounded(numbers))
    if table is None or problem is None or not served_here(query.device, query.dtype) or 0 in (*query.shape, table.shape[1], len(key)):
        return NO_KERNEL
    target = devices.target_of(query.device)
    if (key.dtype == NARROW[0] and not target.has_e4m3) or (key.dtype == NARROW[1] and target.vendor != "nvidia"):
        return NO_KERNEL
    pinned = memo.pinned.get("fwd")
    if pinned is not None and pinned.host is not None and pinned.host.spec == problem.spec():
        return Kernel(memo, None, Code(pinned), query.device)
    caches = f"caches in {str(key.dtype).removeprefix('torch.')}"
    own = Place("paged", devices.slug_here(query.device), problem, (*("splits",) * (numbers.splits is not None), caches))
    with memo.lock:
        if config is not None:
            given = Choice(kind="default", spec=problem.spec(), note="its config is given", family=flash_paged.FAMILY, config=config)
            found = _served(memo, packed, problem, [given])
        else:
            found = _served(memo, packed, problem, _ranked(memo, packed, numbers, problem, own))
    if isinstance(found, Kernel):
        note(memo, own, found)
        takes = found.code.module.accepts(rows_last(query), key.transpose(1, 2), value.transpose(1, 2), None)
        return found if takes else NO_KERNEL
    return found


def _served(memo: Memo, packed: Packed, problem: Problem, choices: Iterable[Choice]) -> Kernel | str:
    """The first kernel that takes a call, else the last that can be loaded, else the reason why none can."""
    query, key, value = rows_last(packed.query), packed.key.transpose(1, 2), packed.value.transpose(1, 2)
    found: Kernel | str = NO_KERNEL
    for choice in choices:
        kernel = _loaded(memo, problem, choice, query.device)
        why = kernel if isinstance(kernel, str) else kernel.failed
        if isinstance(kernel, Kernel) and why is None:
            found = kernel
            if kernel.code.module.accepts(query, key, value, None):
                return kernel
        elif isinstance(found, str):
            found = str(why)
    return found


def recordable(packed: Packed, numbers: Numbers) -> bool:
    """True if records may serve a call: they are of about equal chunks and of caches in the queries' type.

    With a number of splits the bits of a sequence mustn't depend on the others, so all sizes have one config.
    """
    return numbers.splits is None and packed.key.dtype not in NARROW and bounded(numbers).max_q <= 2 * octaves_of(packed, numbers)[0]


def _ranked(memo: Memo, packed: Packed, numbers: Numbers, problem: Problem, place: Place) -> Iterator[Choice]:
    """Choices of kernels, the preferred first: by the plan in force, or by records, where they may serve, and then by default."""
    device, latent, narrow = packed.query.device, problem.features.latent, packed.key.dtype in NARROW
    target, plain, plan = devices.target_of(device), flash_paged.FAMILY, memo.settings.plan
    rows = None if numbers.splits is not None else min(bounded(numbers).max_q, len(packed.query)) * problem.gqa_ratio
    # Others copy caches in the queries' type, and only by the driver.
    others = rows is not None and not narrow and driver.driven(device)
    known = {name: one for name, one in families_of_pages().items() if others or one is plain}
    # Families without the flag read values beside keys.
    apart = replace(problem, features=replace(problem.features, latent=False))
    kinds = [(apart, False), (problem, True)] if latent else [(problem, None)]

    def records(one: Problem) -> Pool | Sequence[TuningRecord]:
        return memo.surroundings(device, one)[2] if plan is None and recordable(packed, numbers) else ()

    def of_kind(like: Problem, once: bool | None) -> Iterator[Choice]:
        spec = like.spec()

        def default(family: Family) -> Config:
            return flash_paged.chosen(spec, target, rows, narrow=narrow) if family is plain else family.default(spec, target)

        able = {name: one for name, one in known.items() if once is None or ("latent" in one.flags) is once}
        able = {name: one for name, one in able.items() if not one.inability(like, spec, target) and one.starts(spec, target)}
        ranked = rank_packed(like, target, records, able, unmeasured=memo.unmeasured, default=default)
        return (one for one in ranked if isinstance(one, Choice) and one.family is not None)

    found: Iterator[Choice] = itertools.chain.from_iterable(of_kind(*kind) for kind in kinds)
    if plan is not None and (defaults := list(found)):
        found = iter([one for one in plan.choices(place) if one.family and one.config] or defaults[-1:])
    yield from found


def _loaded(memo: Memo, problem: Problem, choice: Choice, device: torch.device) -> Kernel | str:
    """The kernel of a choice, kept with its failure, or the reason why it can't be loaded."""
    place = PLACE, choice.spec, choice.config, device, choice.record and choice.record.key, choice.differences
    if place not in memo.packed:
        made = loaded_kernel(choice, device, devices.target_of(device), memo)
        if isinstance(made, Kernel) and choice.family is not None:
            made.fall_back_to(choice.family, choice.fallback, problem)
        memo.packed[place] = made
    found: Kernel | str = memo.packed[place]
    return found


def plan_of_pages(kernel: LoadedKernel, tensors: Tensors, numbers: Numbers, misses: tuple[int, int] | None = None) -> Plan:
    """The launches for tensors of a call, with its bounded numbers; `misses` as in `launch.planned`."""
    assert kernel.host is not None and tensors.table is not None, "families of the package have a host side, and pages a table"
    sequences = tensors.table.shape[0]
    views = {name: getattr(tensors, name) for name in ("slopes", "sinks", "k_descale", "v_descale")}
    views = {name: None if x is None else x.expand(sequences, x.shape[-1]) for name, x in views.items()}
    q, k = rows_last(tensors.q), tensors.k.transpose(1, 2)
    views |= {"q": q, "k": k, "v": tensors.v.transpose(1, 2)}
    views |= {"out": rows_last(tensors.out), "lse": tensors.lse[None]}
    words = launch.provided(kernel, q, k, misses)
    views["counts"] = words.pop("counts")
    pages = numbers.max_q, numbers.max_k, numbers.splits
    return launching.plan(kernel.host, tensors._replace(**views), **numbers.of_launch(), pages=pages, **words)


def gathered(packed: Packed) -> Packed:
    """A packed call over copies of the used keys and values; copies of float8 caches are float32. The host reads lengths and pages, and
    InputError is raised for a page with used keys that is no block."""
    assert packed.table is not None and packed.used is not None, "pages have a table and lengths"
    table, page = packed.table, packed.key.shape[1]
    used = packed.used.clamp(0, table.shape[1] * page)
    wrong = (torch.arange(table.shape[1], device=table.device) * page < used[:, None]) & ((table < 0) | (table >= len(packed.key)))
    if wrong.any():
        found, blocks = int(table[wrong][0]), len(packed.key)
        raise InputError(f"block_table names block {found}, and the caches have {blocks}: give 0 to {blocks - 1} for pages with used keys")
    lengths = used.tolist()

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
