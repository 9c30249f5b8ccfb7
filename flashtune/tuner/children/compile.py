"""Cross-compilation of a variant for any target on any machine, and the compiler's facts.

The launch of a rendered module is run with meta tensors under a driver that only names the target. It passes through the same JIT path as a
real launch, so the machine code lands in Triton's disk cache under the key that the launch on the GPU will look up.
"""

import ctypes
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from flashtune.core.binaries import Manifest
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.launching import compiler_options, provided
from flashtune.core.problem import Problem
from flashtune.core.results import CompileFacts
from flashtune.core.target import Target, targets
from flashtune.templates.loading import load_kernel
from flashtune.tuner.children.cached_code import taking
from flashtune.tuner.verify.inputs import make_inputs


class TargetDriver:
    """Driver for compilation alone: the target, and a device index to cache under."""

    def __init__(self, target: Target) -> None:
        self._target = (
            GPUTarget("cuda", int(target.arch), 32) if target.vendor == "nvidia" else GPUTarget("hip", target.arch, target.warp_size)
        )
        # The JIT caches by device index alone, so every target gets its own.
        self._device = list(targets()).index(target.slug)

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Index that no other target shares."""
        return self._device

    def get_current_stream(self, device: int | None = None) -> int:
        """Any stream, since nothing is launched."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Device of the launch's tensors."""
        return torch.device("meta")


@contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Make `target` Triton's active GPU within the block; a launch there can compile but not run."""
    # Reading driver.active would start the real driver, which fails on a machine without a GPU.
    triton_driver: Any = driver
    before = triton_driver._active
    triton_driver.set_active(TargetDriver(target))
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


def code_hash(kernels: Sequence[tuple[str, Any]]) -> str:
    """Hash that is equal for kernels of equal machine code, launched with as many warps and as much shared memory; empty where only machine
    code is available.

    It covers the assembler's input without names, comments and debug sections, which depend on the text's lines.
    """
    parts = []
    for name, compiled in kernels:
        text = compiled.asm.get("ptx") or compiled.asm.get("amdgcn")
        if text is None:
            return ""
        code = re.sub(rf"^\s*\.(loc|file)\b.*$|//.*$|\b{name}\b", "", text.split(".section")[0], flags=re.MULTILINE)
        parts.append((" ".join(code.split()), compiled.metadata.num_warps, compiled.metadata.shared))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def launch_hash(source: str, stem: str, problem: Problem, target: Target) -> str:
    """Hash that is equal for sources whose kernels are launched alike for `problem`, at its own sizes: grids, numbers, shapes and
    strides."""
    module = load_kernel(source, stem)
    inputs = make_inputs(problem, device="meta", seed=0)
    kwargs = inputs.keywords | provided(module, inputs.q, inputs.k) | {"sms": target.sms}
    launches = module.launches(*inputs.arguments, **kwargs)
    parts = [
        (kernel.__name__, _shown(grid), [_shown(arg) for arg in args], sorted(options.items())) for kernel, grid, args, options in launches
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _shown(value: Any) -> object:
    """Parts of a launch argument that matter to the launch: of a tensor all but its address."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.stride()
    if isinstance(value, list | tuple):
        return tuple(map(_shown, value))
    fields = getattr(value, "__dict__", None)
    return value if fields is None else (type(value).__name__, [(name, _shown(fields[name])) for name in sorted(fields)])


def compiled_kernels(source: str, stem: str, problem: Problem, target: Target, manifest: Manifest | None = None) -> list[tuple[str, Any]]:
    """Name and Triton's compiled kernel of every launch of `problem`, in their order; raises the compiler's errors.

    Sizes are cut to one batch and head, which kernels take at run time. Kernels with machine code in `manifest` aren't compiled.
    """
    module = load_kernel(source, stem)
    inputs = make_inputs(replace(problem, batch=1, heads=problem.gqa_ratio, kv_heads=1), device="meta", seed=0)
    kwargs = inputs.keywords | provided(module, inputs.q, inputs.k) | {"sms": target.sms}
    found = []
    with compiling_for(target):
        for kernel, grid, args, options in module.launches(*inputs.arguments, **kwargs):
            with taking(kernel, manifest):
                found.append((kernel.__name__, kernel.warmup(*args, grid=grid, **compiler_options(options))))
    return found


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
