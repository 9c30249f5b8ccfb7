"""Machine code of a rendered module, compiled for a target without its GPU: the same bytes on every machine with the same Triton."""

import gzip
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from flashtune.core.code.binaries import Binary, Manifest, source_digest
from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.parameters import per_head_words
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import EnvironmentProblem, first_line
from flashtune.tuner.children.start import held_back, withdraw

if TYPE_CHECKING:
    # It imports torch, which a search's own process does without.
    from flashtune.core.code.launching import LoadedKernel

SIZES = {"aligned": 1056, "any_size": 1059}
"""Specialisations by name, in the order in which a launch tries them, with a number of keys that makes Triton's JIT choose them.

For both, tensors start at multiples of 16 bytes, rows are contiguous, and strides that are multiples of the head size are divisible by 16
where that is. With `aligned` sizes the strides of masks are, too. A kernel for which that makes no difference has `any_size` alone.
"""

OUTPUT_ALONE = "output_alone"
"""Specialisation, tried last, of a backward's kernels without a gradient of the LSE; other kernels are the same without it."""

IN_PARTS = "in_parts"
"""Specialisation, tried last, for the gradient of a bias that batches share: few tiles, whose sums are computed in parts."""

ONE_TILE = "one_tile", "one_tile_output_alone"
"""Specialisations, tried last, of a backward whose programs own whole rows of dQ where one tile holds all keys."""

_FEW_KEYS = 51

_QUERIES = 259
"""Queries of a sequence over pages: enough for several tiles of any size."""

_BOUNDS = {"page{}": _QUERIES, "page{}_unequal": 512}
"""Specialisations of each page size, with the bound of a sequence's queries in their call. Where it is the mean, launches have tiles for
the bound in each sequence; where it is above, tiles for the sum of all queries."""

_SPLITS = 5
"""Parts of the keys in these calls: more than one, so that the kernel that adds up the parts is among the launches."""

_NO_DEBUG = "-suppress-debug-info"
"""Option that leaves line tables and PTX, most of a binary, out of it; instructions are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Module to compile; `stem` names it, and has no bearing on the result."""

    text: str
    stem: str
    variant_id: str
    spec: KernelSpec
    target: Target
    pages: tuple[int, ...] = ()
    """Page sizes, in keys, of a kernel over pages: each has code of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Binaries of a module, in no files yet, and their code."""

    manifest: Manifest
    codes: tuple[bytes, ...]


def pages_of(manifest: Manifest) -> set[int]:
    """Page sizes, in keys, that a kernel has machine code for."""
    found = (re.fullmatch(r"page(\d+)", binary.specialization) for binary in manifest.binaries)
    return {int(one[1]) for one in found if one is not None}


def can_have_binaries(target: Target) -> bool:
    """True where machine code for this target can be compiled here and described as a `Binary`."""
    return target.vendor == "nvidia" and target.compilable


def triton_version() -> str:
    """Version of the installed Triton."""
    import triton

    return str(triton.__version__)


def build(order: Order, *, fresh: bool = True) -> Built:
    """Machine code of every kernel of the module's launches, in each specialisation; raises the compiler's errors.

    Unless it is `fresh`, cached machine code and Triton's disk cache of a search's candidates are used: exactly the code that was raced,
    also without line tables, which differs from a fresh build in some bytes beside its instructions.
    """
    from triton import knobs

    from flashtune.core.code.compiled import from_compiled
    from flashtune.core.code.launching import compiler_options
    from flashtune.templates.loading import load_kernel
    from flashtune.tuner.children.compile import compiling_for, machine_code_of, taking

    found: dict[tuple[str, str], tuple[Binary, bytes]] = {}
    cached = None if fresh else machine_code_of(order.variant_id, order.text, order.target)
    without_lines = {"ptx_options": _NO_DEBUG} if fresh else {}
    with ExitStack() as stack:
        triton_knobs: Any = knobs
        if fresh:
            stack.enter_context(triton_knobs.cache.scope())
            triton_knobs.cache.dir = stack.enter_context(TemporaryDirectory(prefix="flashtune-build-"))
        module = load_kernel(order.text, order.stem)
        stack.enter_context(compiling_for(order.target))
        for name, arguments, kwargs in _typical_calls(module, order):
            made: dict[tuple[str, str], tuple[Binary, bytes]] = {}
            for kernel, grid, args, options in module.launches(*arguments, **kwargs):
                with taking(kernel, cached):
                    compiled = kernel.warmup(*args, grid=grid, **without_lines, **compiler_options(options))
                # A call may launch a kernel again with other constants.
                again = sum(kernel.__name__ == one for one, _ in made)
                binary, code = from_compiled(compiled, specialization=f"{name}_{again + 1}" if again else name)
                made.setdefault((binary.kernel, binary.sha256), (binary, code))
            # The same code under fewer conditions replaces the entry with more.
            found |= made if name in SIZES else {place: one for place, one in made.items() if place not in found}
    binaries = tuple(binary for binary, _ in found.values())
    assert len({(binary.kernel, binary.specialization) for binary in binaries}) == len(binaries), "names tell binaries apart"
    manifest = Manifest(variant_id=order.variant_id, binaries=binaries, source_sha256=source_digest(order.text))
    return Built(manifest=manifest, codes=tuple(code for _, code in found.values()))


def _typical_calls(module: "LoadedKernel", order: Order) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Name, arguments and keywords of a launch for each specialisation."""
    spec, target = order.spec, order.target
    n_kv = SIZES["any_size"]
    for page in order.pages:
        arguments, kwargs = _typical_call(module, spec, target, n_kv, page)
        for name, bound in _BOUNDS.items():
            yield name.format(page), arguments, kwargs | {"pages": (bound, n_kv, _SPLITS)}
    if order.pages:
        return
    for name, size in SIZES.items():
        yield name, *_typical_call(module, spec, target, size)
    if spec.direction == "bwd":
        arguments, kwargs = _typical_call(module, spec, target, n_kv)
        operands = dict(zip((operand.name for operand in _problem(spec, n_kv).contract.operands), arguments, strict=True))
        yield OUTPUT_ALONE, tuple((operands | {"dlse": None}).values()), kwargs
        if spec.dbias:
            shared = operands["dbias"][:1].expand(operands["dbias"].shape)
            yield IN_PARTS, tuple((operands | {"dbias": shared}).values()), kwargs
        if getattr(getattr(module.host, "layout", None), "owns", False):
            arguments, kwargs = _typical_call(module, spec, target, _FEW_KEYS)
            operands = dict(zip(operands, arguments, strict=True))
            for name, fewer in zip(ONE_TILE, ({}, {"dlse": None}), strict=True):
                yield name, tuple((operands | fewer).values()), kwargs


def _typical_call(
    module: "LoadedKernel", spec: KernelSpec, target: Target, n_kv: int, page: int = 0
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Meta tensors and keywords of a launch that specialises nothing but the property of SIZES.

    Batches, heads and queries are neither 1 nor divisible by 16; a mask has rows, and per-head parameters one number per head; a seed and
    an offset take all the bits that they may ever need.
    """
    import torch

    from flashtune.core.code.launching import provided
    from flashtune.tuner.verify.inputs import make_inputs

    inputs = make_inputs(_problem(spec, n_kv, page), device="meta", seed=2**63 + 1)
    p, base = inputs.problem, inputs.parameters
    parameters = replace(
        base,
        offset=2**33 if spec.dropout else 0,
        mask=None if base.mask is None else torch.empty((p.batch, p.heads, p.n_q, p.n_kv), dtype=base.mask.dtype, device="meta"),
        **per_head_words({name: torch.empty(x.shape, device="meta") for name, x in base.per_head().items()}),
    )
    if "dbias" in inputs.operands:
        # Fully strided, like the mask.
        full = torch.empty((p.batch, p.heads, p.n_q, p.n_kv), dtype=inputs.operands["dbias"].dtype, device="meta")
        inputs = replace(inputs, operands=inputs.operands | {"dbias": full})
    inputs = replace(inputs, parameters=parameters)
    return inputs.arguments, inputs.keywords | provided(module, inputs.q, inputs.k) | {"sms": target.sms}


def _problem(spec: KernelSpec, n_kv: int, page: int = 0) -> Problem:
    """Problem of this spec with few tiles, so that their keys are split where a family does so."""
    window = (96, 0 if spec.causal else 96) if spec.window else None
    features = Features(alignment="bottom_right", window=window, mask=spec.mask, page=page, **spec.flags())  # type: ignore[arg-type]
    sizes = {
        "batch": 2,
        "heads": 6,
        "kv_heads": 3,
        "n_q": _QUERIES if page else n_kv % 16 or 16,
        "n_kv": n_kv,
        "d": spec.d,
        "d_v": spec.d_v,
    }
    problem = Problem(**sizes, dtype=spec.dtype, features=features, direction=spec.direction, lengths=None)
    assert problem.spec() == spec, "every spec is that of a problem"
    return problem


def build_all(orders: Sequence[Order], *, jobs: int) -> Iterator[tuple[Order, Built | str]]:
    """Result of `build` for each order, as they complete, in `jobs` processes; or one line of text with the reason of a failure. Raises
    EnvironmentProblem where a compiler's process died."""
    if not orders:
        return
    with ProcessPoolExecutor(max_workers=min(jobs, len(orders)), mp_context=get_context("spawn"), initializer=withdraw) as pool:
        try:
            with held_back():
                waiting = {pool.submit(_attempt, order): order for order in orders}
            for done in as_completed(waiting):
                try:
                    yield waiting[done], done.result()
                except BrokenProcessPool as error:
                    raise EnvironmentProblem(
                        f"a compiler's process died with {waiting[done].stem} under way: try again with --jobs 1"
                    ) from error
        except BaseException:
            # An interruption, or a caller that stops iterating, needn't wait for compilers.
            for process in list(pool._processes.values()):
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _attempt(order: Order) -> Built | str:
    try:
        return build(order)
    except Exception as error:
        return first_line(error)


def with_files(built: Built, stem: str) -> tuple[Manifest, dict[str, bytes]]:
    """Manifest with a name for each binary's file, and the files, each gzipped by itself, since a call loads few of them."""
    named = [replace(binary, file=f"{stem}.{binary.kernel}.{binary.specialization}.cubin.gz") for binary in built.manifest.binaries]
    files = {binary.file: gzip.compress(code, 9, mtime=0) for binary, code in zip(named, built.codes, strict=True)}
    return replace(built.manifest, binaries=tuple(named)), files
