"""Preparation of a `Program`: a kernel's launches planned, its machine code taken from the package or compiled, and loaded."""

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashtune.core import launching
from flashtune.core.binaries import Binary, Manifest, machine_arch
from flashtune.core.folders import let_triton_write
from flashtune.core.launches import Resident, Varying
from flashtune.core.launching import LoadedKernel, Plan
from flashtune.core.parameters import CallParameters
from flashtune.dispatch.launch import driver
from flashtune.dispatch.launch.program import Program

Q, K, V, OUT, LSE, COUNTS, MASK, HEADS = range(8)
"""Indices of a forward's addresses: from HEADS on those of `PER_HEAD`, then a copied bias, then its scratch memory. A backward has its
operands in place of the first five."""

SEED, OFFSET = range(2)
"""Indices of the numbers that change from call to call."""

_functions: dict[tuple[str, int], int] = {}
"""Handles of loaded kernels by the hash of their code and the GPU."""

Operands = Sequence[Any]
"""Tensors of a pass in the order of flashtune.core.passes; None for those that a launch doesn't have."""


def planned(kernel: LoadedKernel, operands: Operands, parameters: CallParameters, misses: tuple[int, int] | None = None) -> Plan | None:
    """Launches of a call with tensors like these; None for kernels whose text contains their host side.

    `misses` are the addresses where launches count mispredicting programs, where these are read.
    """
    if kernel.host is None:
        return None
    q, k, *_ = operands
    varying = replace(parameters, seed=Varying.of(SEED, 2**64 - 1), offset=Varying.of(OFFSET, 2**32 - 1))
    words = varying.keywords() | launching.provided(kernel, q, k)
    if "misses" in words:
        words["misses"] = tuple(Resident(at, "i64") for at in misses or (x.data_ptr() for x in words["misses"]))
    return launching.plan(kernel.host, kernel.host.spec, operands, words)


def program(
    kernel: LoadedKernel,
    manifest: Manifest | None,
    operands: Operands,
    parameters: CallParameters,
    *,
    compiles: bool,
    misses: tuple[int, int] | None = None,
) -> Program | None:
    """Prepared launches of a kernel for calls like this one; None for kernels whose text contains their host side.

    Kernels without fitting machine code in `manifest` are compiled by Triton, which may raise anything; with `compiles` False, where the
    kernel is its host side alone, None is returned instead. `misses` is as in `planned`. Raises DriverError where the GPU or its driver
    refuses a kernel or a tensor map.
    """
    plan = planned(kernel, operands, parameters, misses)
    if plan is None:
        return None
    index = operands[Q].device.index
    major, minor = torch.cuda.get_device_capability(index)
    arch = machine_arch(10 * major + minor)
    binaries: list[Binary] = []
    functions: list[int] = []
    for launch in plan.launches:
        binary = None if manifest is None else manifest.matching(launch.kernel, launch.arguments)
        if manifest is not None and binary is not None and binary.arch == arch:
            function = _function(binary, functools.partial(manifest.code, binary), index)
        elif not compiles:
            return None
        else:
            arguments = launching.Arguments(plan).of(launch)
            binary, code = compiled(getattr(kernel, launch.kernel), launch.grid, arguments, launch.options)
            function = _function(binary, lambda code=code: code, index)  # type: ignore[misc]
        binaries.append(binary)
        functions.append(function)
    addresses = [0 if x is None else x.data_ptr() for x in plan.tensors]
    # Temporaries have no address yet; any aligned one will do for encoding.
    addresses += [operands[OUT].data_ptr() // 256 * 256] * len(plan.scratch)
    return Program(plan, binaries, functions, index, addresses)


def compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Binary, bytes]:
    """Machine code that Triton's JIT makes for these arguments."""
    from flashtune.core.compiled import from_compiled

    let_triton_write()
    return from_compiled(kernel.warmup(*arguments, grid=grid, **launching.compiler_options(options)))


def resident_factors(device: torch.device, factors: tuple[float, float, float]) -> tuple[int, int, int]:
    """Device addresses of fp8's factors that are numbers."""
    start = driver.resident(device.index, struct.pack("<3f", *factors))
    return start, start + 4, start + 8


def _function(binary: Binary, code: Callable[[], bytes], device: int) -> int:
    """Handle of a kernel; its code is read only where it isn't loaded yet."""
    found = _functions.get((binary.sha256, device))
    if found is None:
        found = driver.load_function(code(), binary.entry, binary.shared_bytes, device)
        _functions[binary.sha256, device] = found
    return found
