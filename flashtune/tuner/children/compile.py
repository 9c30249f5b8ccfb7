"""Cross-compilation of a variant for any target on any machine, the compiler's facts, and cached machine code that saves it.

The launch of a rendered module is run with meta tensors under a driver that only names the target. It passes through the same JIT path as a
real launch, so the machine code lands in Triton's disk cache under the key that the launch on the GPU will look up. Cached machine code of
exactly the same text and Triton, from the package or the user's own cache, is put there, too. The layout of Triton's disk cache is mirrored
from triton/compiler/compiler.py of 3.6; other versions compile.
"""

import ctypes
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flashtune.core.code import cache as kernel_cache
from flashtune.core.code.binaries import Binary, Manifest, machine_arch, source_digest
from flashtune.core.code.compiled import HOST_TYPES, signature_of
from flashtune.core.code.launching import compiler_options, provided
from flashtune.core.code.shipped import PACKAGE, shipped_manifest
from flashtune.core.gpu.target import Target, targets
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.templates.loading import load_kernel
from flashtune.tuner.verify.cases import first_steps, small_problems
from flashtune.tuner.verify.inputs import Inputs, make_inputs


def _driver_of(target: Target) -> SimpleNamespace:
    """Driver for compilation alone: it names the target, and nothing is launched."""
    gpu = GPUTarget("cuda", int(target.arch), 32) if target.vendor == "nvidia" else GPUTarget("hip", target.arch, target.warp_size)
    # The JIT caches by device index alone, so every target gets its own.
    index = list(targets()).index(target.slug)
    return SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: index,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("meta"),
    )


@contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Make `target` Triton's active GPU within the block; a launch there can compile but not run."""
    # Reading driver.active would start the real driver, which fails on a machine without a GPU.
    triton_driver: Any = driver
    before = triton_driver._active
    triton_driver.set_active(_driver_of(target))
    try:
        yield
    finally:
        triton_driver._active = before


def facts_of(kernels: Sequence[tuple[str, Any]], target: Target) -> CompileFacts:
    """Facts of the main kernel among some compiled kernels.

    That is the first with matrix instructions: kernels before it only prepare, and those after it have little to do. Where products use
    none (fp32) it is the one with the most shared memory.
    """
    found = [read_facts(compiled, target) for _, compiled in kernels]
    hungriest = max(found, key=lambda facts: (facts.shared_bytes, facts.registers))
    return next((facts for facts in found if facts.tensor_core_ops), hungriest)


def compiled_kernels(source: str, stem: str, problem: Problem, target: Target, manifest: Manifest | None = None) -> list[tuple[str, Any]]:
    """Name and Triton's compiled kernel of every launch of `problem`, in their order; raises the compiler's errors.

    Kernels with machine code in `manifest` aren't compiled. Those for checks follow, where they differ.
    """
    module = load_kernel(source, stem)
    found: dict[int, tuple[str, Any]] = {}
    with compiling_for(target):
        for inputs, arguments in _compiled_for(problem):
            kwargs = inputs.keywords | provided(module, inputs.q, inputs.k) | {"sms": target.sms}
            for kernel, grid, args, options in module.launches(*arguments, **kwargs):
                with taking(kernel, manifest):
                    compiled = kernel.warmup(*args, grid=grid, **compiler_options(options))
                    found.setdefault(id(compiled), (kernel.__name__, compiled))
    return list(found.values())


def _compiled_for(problem: Problem) -> Iterator[tuple[Inputs, tuple[torch.Tensor | None, ...]]]:
    """Meta tensors and arguments of the launches to compile: the problem's own, those of whole calls, whose LSE has no gradient, and small
    ones as candidates are checked on, which are the same to most kernels.

    Over pages the order of tiles is compiled in, and follows from all sizes; so is the width of offsets into large tensors.
    """
    full = make_inputs(problem, device="meta", seed=0)
    yield full, full.arguments
    if "dlse" in full.operands:
        yield full, tuple((full.operands | {"dlse": None}).values())
    small = small_problems(problem, 2)
    sequences = tuple((one.n_q, one.n_kv) for one in small) if problem.features.packed else ()
    few = replace(small[0], batch=len(small)) if sequences else small[0]
    inputs = make_inputs(few, device="meta", seed=0, sequences=sequences, like=first_steps(full.steps))
    yield inputs, inputs.arguments


def build_launchers(kernels: Sequence[tuple[str, Any]], target: Target) -> None:
    """Have Triton build the launchers of these kernels into its cache: each kind of arguments takes a C compiler about 0.5 s, which the
    timing process would otherwise wait for. A failure costs nothing but this time."""
    if target.vendor != "nvidia":
        return
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        # Without a driver the compiler would run for nothing.
        ctypes.CDLL("libcuda.so.1")
        for _, compiled in kernels:
            CudaLauncher(compiled.src, compiled.metadata)


def read_facts(compiled: Any, target: Target) -> CompileFacts:
    """Registers, spills, shared memory and matrix instructions of a compiled kernel, from its machine code."""
    threads = compiled.metadata.num_warps * target.warp_size
    if target.vendor == "amd":
        text = compiled.asm["amdgcn"]
        return CompileFacts(
            registers=_largest(r"\.vgpr_count:\s+(\d+)", text),
            spills=4 * _largest(r"\.vgpr_spill_count:\s+(\d+)", text),
            shared_bytes=compiled.metadata.shared,
            threads=threads,
            tensor_core_ops=len(re.findall(r"^\s*v_mfma", text, re.MULTILINE)),
        )
    usage, ptx = cuobjdump(compiled.asm["cubin"], "-res-usage"), compiled.asm.get("ptx")
    # Cached machine code comes without PTX, and its metadata has all warps.
    products = r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)" if ptx is not None else r"\b[HQID]G?MMA\b"
    text = cuobjdump(compiled.asm["cubin"], "-sass") if ptx is None else ptx
    # With warp specialisation the machine code starts more warps than the kernel's own num_warps.
    warps = _largest(r"\.reqntid\s+(\d+)", ptx or "") or threads
    return CompileFacts(
        registers=_largest(r"REG:(\d+)", usage),
        spills=_largest(r"STACK:(\d+)", usage) + _largest(r"LOCAL:(\d+)", usage),
        shared_bytes=compiled.metadata.shared,
        threads=warps,
        tensor_core_ops=len(re.findall(products, text)),
    )


def _largest(pattern: str, text: str) -> int:
    return max((int(number) for number in re.findall(pattern, text)), default=0)


def cuobjdump(cubin: bytes, *flags: str) -> str:
    """Output of the wheel's own cuobjdump for machine code; raises EnvironmentProblem where the wheel lacks it."""
    tool = knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        try:
            return subprocess.run([tool, *flags, file.name], capture_output=True, text=True, check=True, timeout=60).stdout
        except FileNotFoundError as error:
            raise EnvironmentProblem(f"no cuobjdump at {tool}: reinstall triton, whose wheel carries it") from error


_MIRRORED = "3.6."
"""Versions of Triton whose disk cache has the mirrored layout."""


def machine_code_of(variant_id: str, text: str, target: Target) -> Manifest | None:
    """Cached machine code of this text, by the installed Triton, for this target; None where it must be compiled."""
    import triton

    version = str(triton.__version__)
    if target.vendor != "nvidia" or not version.startswith(_MIRRORED):
        return None
    arch, digest = machine_arch(int(target.arch)), source_digest(text)
    for found in (_shipped(variant_id, target.arch), kernel_cache.find(variant_id, arch, version)):
        if found is not None and found.source_sha256 == digest and {(b.arch, b.triton) for b in found.binaries} == {(arch, version)}:
            return found
    return None


def _shipped(variant_id: str, arch: str) -> Manifest | None:
    # A damaged package is reported to its user by dispatch.
    with suppress(EnvironmentProblem):
        return shipped_manifest(PACKAGE, variant_id, arch)
    return None


@contextmanager
def taking(kernel: Any, manifest: Manifest | None) -> Iterator[list[Binary]]:
    """Within the block Triton's JIT finds the machine code that `manifest` has of `kernel`, a function of its module; yields the binaries
    used."""
    taken: list[Binary] = []
    if manifest is None:
        yield taken
        return
    from triton.runtime import driver

    active: Any = driver.active
    # The JIT sets its compile function up on the first look at a device's cache.
    _ = kernel.device_caches[active.get_current_device()]
    compile_one = kernel.compile

    def compiled(source: Any, target: Any = None, options: Any = None, **kwargs: Any) -> Any:
        binary = fitting(source, manifest.of(kernel.__name__))
        if binary is not None:
            _put(source, target, options, binary, manifest.code(binary))
            taken.append(binary)
        return compile_one(source, target=target, options=options, **kwargs)

    kernel.compile = compiled
    try:
        yield taken
    finally:
        kernel.compile = compile_one


def fitting(source: Any, binaries: Sequence[Binary]) -> Binary | None:
    """First of a kernel's binaries that this source (Triton's ASTSource) would compile to: same constants and parameters, and no further
    assumptions about the others."""
    for binary in binaries:
        try:
            parameters, conditions = signature_of(source, _maps(binary))
        except EnvironmentProblem:
            continue
        more = set(map(repr, conditions)) - set(map(repr, binary.conditions))
        missing = set(map(repr, binary.conditions)) - set(map(repr, conditions))
        if tuple(parameters) == binary.parameters and not missing and all("rule='multiple_of'" in one for one in more):
            return binary
    return None


def _maps(binary: Binary) -> list[dict[str, Any]]:
    """Metadata of a binary's tensor maps in Triton's form."""
    codes = {host: code for code, host in HOST_TYPES.items()}
    return [
        {
            "swizzle": one.swizzle,
            "elem_size": one.element_bytes,
            "elem_type": codes.get(one.element_type, one.element_type),
            "block_size": list(one.box),
            "fp4_padded": False,
        }
        for parameter in binary.parameters
        if (one := parameter.tensor_map) is not None
    ]


def _put(source: Any, target: Any, options: Mapping[str, Any], binary: Binary, code: bytes) -> None:
    """Put machine code into Triton's disk cache, as if it had been compiled there from this source."""
    from triton import __version__
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend: Any = make_backend(target)
    chosen = backend.parse_options({**options, **source.parse_options()})
    environment = get_cache_invalidating_env_vars()
    key = hashlib.sha256(get_cache_key(source, backend, chosen, env_vars=environment).encode()).hexdigest()
    cache, name = get_cache_manager(key), source.name[:150]
    described = f"{name}.json"
    if described in (cache.get_group(described) or {}):
        return
    metadata = {"hash": key, "target": target, **chosen.__dict__, **environment, "triton_version": __version__}
    metadata |= {
        "tensordesc_meta": _maps(binary),
        "num_warps": binary.threads // 32,
        "shared": binary.shared_bytes,
        "tmem_size": 0,
        "global_scratch_size": binary.global_scratch_bytes,
        "global_scratch_align": 1,
        "profile_scratch_size": binary.profile_scratch_bytes,
        "profile_scratch_align": 1,
        "name": binary.entry,
    }
    files = {f"{name}.cubin": cache.put(code, f"{name}.cubin")}
    files[described] = cache.put(json.dumps(metadata, default=vars), described, binary=False)
    cache.put_group(described, files)
