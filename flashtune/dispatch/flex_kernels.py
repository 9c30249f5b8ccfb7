"""Kernels of a mask and a score as code: compiled where they are first called, kept in the user's cache, launched by plans."""

import gzip
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashtune.core import devices, kernel_cache, launching
from flashtune.core.binaries import Binary, Manifest, machine_arch, source_digest
from flashtune.core.config import Config, Direction, KernelSpec, Variant
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.launching import Plan, operand
from flashtune.core.problem import MAX_HEAD_DIM, Problem
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target
from flashtune.core.torch_dtypes import KERNEL_DTYPES
from flashtune.core.torch_private import C
from flashtune.dispatch import driver, kernels
from flashtune.dispatch import launch as launches
from flashtune.dispatch.context import current
from flashtune.dispatch.flex_configs import (
    UNMEASURED,
    Recorded,
    choices,
    kind_of,
    origin_of,
    problem_of,
    recorded_with,
    refusal,
    source_note,
    usual,
)
from flashtune.dispatch.launch import Program
from flashtune.dispatch.packed import MOST_PROGRAMS, Numbers, Packed, rows_last, viewed
from flashtune.dispatch.packed import problem_of as packed_problem
from flashtune.dispatch.resolve import Explanation, said_of
from flashtune.templates.family import Family
from flashtune.templates.launches.common import cdiv
from flashtune.templates.launches.mods import kinds_launch, mask_launch, sorting_launch
from flashtune.templates.mods import known
from flashtune.templates.mods.emit import Mods

Tensors = Sequence[Tensor | None]
_Found = TypeVar("_Found")


def served_here(device: torch.device, dtype: torch.dtype) -> bool:
    """True if kernels with plain pointers run on this device, on a GPU or in Triton's interpreter."""
    if KERNEL_DTYPES.get(dtype, "fp8") == "fp8" or not devices.TRITON:
        return False
    if device.type == "cpu":
        return devices.INTERPRETING and dtype is not torch.bfloat16
    return device.type == "cuda"


class NotBuilt(Exception):
    """A kernel that failed on this machine, as at a first call of a plan (`Kernels.tried`); `kernel_of` passes over it from then on."""


class ModKernel:
    """The kernel of one spec on one device, with the machine code that this process has of it."""

    def __init__(
        self,
        kind: Family,
        spec: KernelSpec,
        config: Config,
        origin: str,
        device: torch.device,
        target: Target,
        record: TuningRecord | None = None,
    ) -> None:
        """`origin` says where the config comes from; `record` is one of these functions."""
        self.variant, self.memo = kernels.variant(kind, spec, config), current()
        self.device, self.config, self.origin, self.record = device, config, origin, record
        self.loaded = kernels.load(kind, self.variant)
        steps = [step for step in ("", "DQ_") if f"{step}BLOCK_M" in config.as_dict()]
        # Rows and columns of the tiles of each of its lists of blocks: those of the forward or of keys, then those of queries.
        self.tiles = [(config.number(f"{step}BLOCK_M"), config.number(f"{step}BLOCK_N")) for step in steps]
        self._text = ""
        self._programs: dict[Hashable, Program] = {}
        self._manifest: Manifest | None = None
        self._codes: dict[str, bytes] = {}
        if driver.driven(device):
            from flashtune.templates import rendering

            self._text = rendering.render(kind, self.variant)
            with suppress(EnvironmentProblem):
                self._manifest = kernels.manifest(self.variant, target.arch)

    @property
    def failed(self) -> str | None:
        """Reason why it isn't tried, where it failed before."""
        why = self.memo.kernels.failure(self.variant, self.device)
        return None if why is None else f"{self.variant.template} can't be built here ({why})"

    def run(self, key: Hashable, tensors: Tensors, plan: Callable[[], Plan]) -> None:
        """Launch on the current stream; equal keys have equal plans but for the tensors, which come in the order of the plan's sources.

        Raises NotBuilt where the kernel fails at a first launch.
        """
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if not driver.driven(self.device):
                self._tried(lambda: None, lambda: self._through_triton(plan()))
                return
            program = self._programs.get(key) or self.prepared(key, plan)
            held = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in program.temporaries]
            addresses = [0 if x is None else x.data_ptr() for x in (*tensors, *held)]
            program.run(addresses, C._cuda_getCurrentRawStream(self.device.index))

    def _through_triton(self, plan: Plan) -> bool:
        arguments = launching.Arguments(plan)
        for one in plan.launches:
            function = getattr(self.loaded, one.kernel)
            function[one.grid](*arguments.of(one), **launching.compiler_options(one.options))
        return True

    def prepared(self, key: Hashable, plan: Callable[[], Plan]) -> Program:
        """Launches prepared for the key, at whose first call they are built; the current device must be the kernel's."""

        def build() -> None:
            if key not in self._programs:
                if len(self._programs) >= MOST_PROGRAMS:
                    # Packed sequences have another number of rows at every step.
                    self._programs.clear()
                self._programs[key] = self.program(plan())

        with self.memo.lock:
            return self._tried(build, lambda: self._programs[key])

    def _tried(self, build: Callable[[], None], run: Callable[[], _Found]) -> _Found:
        found = self.memo.kernels.tried(self.variant, self.device, build, run)
        if found is None:
            raise NotBuilt(self.failed)
        return found

    def program(self, plan: Plan) -> Program:
        """Launches prepared for tensors of a plan's layout; the current device must be the kernel's."""
        try:
            return self._program(plan)
        except EnvironmentProblem as error:
            if self._manifest is None:
                raise
            self.memo.warn_once(f"flashtune: {error}; until then Triton compiles it")
            self._manifest = None
            return self._program(plan)

    def _program(self, plan: Plan) -> Program:
        index = self.device.index
        major, minor = torch.cuda.get_device_capability(index)
        arch = machine_arch(10 * major + minor)
        binaries, functions, new = [], [], False
        for one in plan.launches:
            binary = None if self._manifest is None else self._manifest.matching(one.kernel, one.arguments)
            if binary is None or binary.arch != arch:
                binary, code = launches.compiled(getattr(self.loaded, one.kernel), one.grid, launching.Arguments(plan).of(one), one.options)
                self._codes[binary.sha256], new = code, True
                self._manifest = added(self._manifest, self.variant, self._text, binary)
            binaries.append(binary)
            functions.append(launches._function(binary, lambda binary=binary: self._code(binary), index))  # type: ignore[misc]
        if new and self._manifest is not None:
            # What can't be kept is compiled again by the next process.
            with suppress(EnvironmentProblem):
                self._manifest = kept(self._text, self._manifest, {one.sha256: self._code(one) for one in self._manifest.binaries})
        addresses = [0 if x is None else x.data_ptr() for x in plan.tensors]
        addresses += [next(x for x in addresses if x) // 256 * 256] * len(plan.scratch)
        return Program(plan, binaries, functions, index, addresses)

    def _code(self, binary: Binary) -> bytes:
        if binary.sha256 in self._codes or self._manifest is None:
            return self._codes[binary.sha256]
        return self._manifest.code(binary)


def added(manifest: Manifest | None, variant: Variant, text: str, binary: Binary) -> Manifest:
    """A variant's manifest with one more binary, tried first."""
    before = () if manifest is None else tuple(one for one in manifest.binaries if one.sha256 != binary.sha256)
    if manifest is None:
        return Manifest(variant_id=variant.id, binaries=(binary,), source_sha256=source_digest(text))
    return replace(manifest, binaries=(binary, *before))


def kept(text: str, manifest: Manifest, codes: dict[str, bytes]) -> Manifest:
    """The manifest as it was written to the user's cache, with its code; raises EnvironmentProblem where that can't be written."""
    named = tuple(replace(one, file=f"{one.kernel}_{one.sha256[:16]}.cubin.gz") for one in manifest.binaries)
    written = replace(manifest, binaries=named, archive=None)
    folder = kernel_cache.keep(text, written, {one.file: gzip.compress(codes[one.sha256], mtime=0) for one in named})
    return replace(written, folder=folder)


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
        """Parameters of a launch."""
        _, _, _, left, right, bottom_right, *_ = self.numbers
        return {"lengths": self.bounds, "diagonal": int(bottom_right), "window_left": left, "window_right": right}

    @property
    def deterministic(self) -> bool:
        """True if bits have to repeat."""
        return self.numbers.deterministic or torch.are_deterministic_algorithms_enabled()


def kernels_here() -> dict[Hashable, ModKernel | str]:
    """Kernels of this context by what is compiled in and the functions' record; without one the config is the default, or of another
    feature's record."""
    found: dict[Hashable, ModKernel | str] = current().packed.setdefault("kernels of functions", {})
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
) -> ModKernel | str:
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
        elif found.loaded.accepts(query, key, value, None):
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
    problem = problem_of(spec, batch=batch, heads=heads, kv_heads=key.shape[1], n_q=n_q, n_kv=key.shape[2])
    return recorded_with(problem, query.device)


def _made(kind: Family, spec: KernelSpec, device: torch.device, own: Recorded | None) -> ModKernel | str:
    target = devices.target_of(device)
    if own is not None:
        return loaded_kernel(kind, spec, own.config, origin_of(own.record), device, target, own.record)
    if (why := refusal(kind, spec, target)) is not None:
        return why
    return loaded_kernel(kind, spec, *_config(kind, spec, device, target), device, target)


def loaded_kernel(
    kind: Family, spec: KernelSpec, config: Config, origin: str, device: torch.device, target: Target, record: TuningRecord | None = None
) -> ModKernel | str:
    """The kernel with a config, or the reason why it can't be loaded."""
    variant, known = kernels.variant(kind, spec, config), current().kernels
    if (why := known.failure(variant, device)) is not None:
        return why
    made = known.tried(variant, device, lambda: None, partial(ModKernel, kind, spec, config, origin, device, target, record))
    return made or known.failure(variant, device) or "it can't be loaded"


def _config(kind: Family, spec: KernelSpec, device: torch.device, target: Target) -> tuple[Config, str]:
    """The config without a record of the functions, and its origin."""
    memo = current()
    with memo.lock:
        return usual(kind, spec, target, lambda problem: memo.surroundings(device, problem)[2])


def tile_kinds(
    kernel: ModKernel, mods: Mods, captured: Sequence[Tensor], sizes: tuple[int, int, int, int], tile: tuple[int, int]
) -> Tensor:
    """Kinds of the tiles of a mask: int8 (batches, heads, tiles of queries, tiles of keys), with batches and heads of 1 where the mask
    doesn't depend on them: 0 needs the mask, 1 is visible, 2 hidden. `sizes` are batches, heads, queries and keys."""
    batch, heads, n_q, n_kv = sizes
    shape = (batch if mods.by_batch else 1, heads if mods.by_head else 1, cdiv(n_q, tile[0]), cdiv(n_kv, tile[1]))
    kinds = torch.empty(shape, dtype=torch.int8, device=kernel.device)

    def plan() -> Plan:
        places = tuple(operand(1 + i, x) for i, x in enumerate(captured))
        return Plan([kinds_launch(operand(0, kinds), places, n_q, n_kv, tile)], [kinds, *captured], [])

    kernel.run(("kinds", sizes, tile, layout(captured)), [kinds, *captured], plan)
    return kinds


def lists_of_kinds(kernel: ModKernel, kinds: Tensor, *, of_keys: bool) -> Tensor:
    """Lists of blocks from kinds of tiles (batches, heads, tiles of queries, tiles of keys): int32 (batches, heads, rows, 2 + columns), of
    each tile of queries or (`of_keys`) of keys the number of blocks that need the mask, that of all visible ones, and their places."""
    rows, columns = kinds.shape[:1:-1] if of_keys else kinds.shape[2:]
    lists = torch.empty((*kinds.shape[:2], rows, columns + 2), dtype=torch.int32, device=kernel.device)
    flat = lists.flatten(0, 1)

    def plan() -> Plan:
        return Plan([sorting_launch(operand(0, kinds), operand(1, flat), of_keys=of_keys)], [kinds, flat], [])

    kernel.run(("sort", of_keys, kinds.shape), [kinds, flat], plan)
    return lists


def lists_of_mask(kernel: ModKernel, mask: Sequence[Tensor], blocks: tuple[int, int], rows: int, columns: int) -> Tensor:
    """The same from a BlockMask's numbers and places of blocks, then those of full ones; `blocks` are tiles of a block either way."""
    held = [x.contiguous() for x in mask]
    lists = torch.empty((*mask[0].shape[:2], rows, columns + 2), dtype=torch.int32, device=kernel.device)
    flat = lists.flatten(0, 1)

    def plan() -> Plan:
        return Plan([mask_launch(tuple(operand(i, x) for i, x in enumerate(held)), operand(len(held), flat), blocks)], [*held, flat], [])

    kernel.run(("mask", blocks, layout(held), flat.shape), [*held, flat], plan)
    return lists


def layout(tensors: Tensors) -> Hashable:
    """All that a plan takes from tensors beside their addresses."""
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors)


def launch(kernel: ModKernel, operands: Tensors, more: Sequence[Tensor], scale: float, sequences: Sequences | None = None) -> None:
    """Launch a pass: its operands in the order of flashtune.core.passes, then the tensors of functions (LaunchInputs.mods)."""
    spec = kernel.variant.spec
    bounds: Tensors = ()
    words: dict[str, Any] = {}
    if sequences is not None:
        operands, bounds, words = viewed(operands), sequences.bounds, sequences.words
    query, key, *_ = operands
    assert query is not None and key is not None, "a pass has queries and keys"
    words |= {"scale": scale, "mods": tuple(more), **launching.provided(kernel.loaded, query, key)}

    def plan() -> Plan:
        assert kernel.loaded.host is not None, "families of the package have a host side"
        return launching.plan(kernel.loaded.host, spec, operands, words)

    # Between both are the tensors of other features.
    everything = [*operands, words["counts"], *[None] * (len(launching._MORE) - 1), *bounds, *more]
    numbers = () if sequences is None else sequences.numbers[2:]
    kernel.run((scale, numbers, layout(operands), layout(bounds), layout(more)), everything, plan)


def explained_kernel(kernel: ModKernel, said: str, gpu: str, problem: Problem | None) -> Explanation:
    """Explanation of a kernel for a problem of calls; its reason begins with `said`."""
    variant, record = kernel.variant, kernel.record
    key = None if problem is None or gpu == "cpu" else problem.key(gpu)
    return Explanation(
        kind="default" if record is None else kind_of(record, key),
        reason=f"{said}: {variant.config.label()} ({kernel.origin}, {source_note(record)})",
        gpu=gpu,
        key=key,
        template=variant.template,
        variant_id=variant.id,
        config=variant.config,
        **said_of(record),
    )
