"""From a rendered module to a `Program`: its host code recorded, its machine code taken from the package or compiled, all loaded."""

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from flashtune.core import launching
from flashtune.core.binaries import Binary, Manifest, machine_arch
from flashtune.core.folders import let_triton_write
from flashtune.core.parameters import PER_HEAD, CallParameters, per_head_words
from flashtune.dispatch.launch import driver
from flashtune.dispatch.launch.program import Program
from flashtune.dispatch.launch.recording import Drawn, Recording, Resident, Tensor, record

Q, K, V, OUT, LSE, COUNTS, MASK, HEADS = range(8)
"""The order of a forward's addresses: from HEADS on those of `PER_HEAD`, then its temporary tensors. A backward has its operands in the
place of the first five."""

SEED, OFFSET = range(2)
"""The order of the numbers that change from call to call."""

_functions: dict[tuple[str, int], int] = {}
"""Handles of loaded kernels by the hash of their code and the GPU."""


Operands = Sequence[Any]
"""The tensors that a pass of flashtune.core.passes names, in its order; None for those that a launch does without."""


def operand_names(module: ModuleType) -> tuple[str, ...]:
    """The names of what a module's `launches` takes by place: the operands of its pass."""
    code = module.launches.__code__
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount]
    return names


def launches(
    module: ModuleType, operands: Operands, parameters: CallParameters, told: tuple[int, int] | None = None
) -> tuple[list[Any], list[torch.Tensor | None], Recording | None]:
    """The launches of a module, its tensors in the order of their addresses, and the launches recorded where they can be.

    `told` are the addresses where recorded ones count misled programs, where somebody reads that.
    """
    q, k, v, *_ = operands
    names, mask, heads = operand_names(module), parameters.mask, parameters.per_head()
    words = replace(parameters, seed=Drawn.of(SEED, 2**64 - 1), offset=Drawn.of(OFFSET, 2**32 - 1)).keywords()
    words |= launching.provided(module, q, k)
    tensors = [*operands, words["counts"], mask, *(heads.get(name) for name in PER_HEAD)]
    steps = module.launches(*operands, **words)
    if not module.records(q, k, v, mask, parameters.scale):
        return steps, tensors, None
    places: dict[str, Any] = {
        name: None if x is None else Tensor(place) for place, (name, x) in enumerate(zip(names, operands, strict=True))
    }
    places |= {name: Tensor(place) for place, name in enumerate(("counts", "mask"), len(names)) if words[name] is not None}
    if "misled" in words:
        places["misled"] = tuple(map(Resident, told or (x.data_ptr() for x in words["misled"])))
    places |= per_head_words({name: Tensor(place) for place, name in enumerate(PER_HEAD, len(names) + 2) if name in heads})
    return steps, tensors, record(module.launches, tensors, words | places)


def program(
    module: ModuleType,
    manifest: Manifest | None,
    operands: Operands,
    parameters: CallParameters,
    *,
    compiles: bool,
    told: tuple[int, int] | None = None,
) -> Program | None:
    """The prepared launches of a module for calls like this one; None where its host code can't be recorded.

    Kernels without fitting machine code in `manifest` are compiled by Triton, which may raise anything; None where one would be, and the
    module is host code alone (not `compiles`). `told` is as in `launches`. Raises DriverError where the GPU or its driver refuses a kernel
    or a tensor map.
    """
    steps, tensors, recording = launches(module, operands, parameters, told)
    if recording is None:
        return None
    index = operands[Q].device.index
    major, minor = torch.cuda.get_device_capability(index)
    arch = machine_arch(10 * major + minor)
    binaries: list[Binary] = []
    functions: list[int] = []
    for kernel, grid, arguments, options in steps:
        binary = None if manifest is None else manifest.matching(kernel.__name__, arguments)
        if manifest is not None and binary is not None and binary.arch == arch:
            function = _function(binary, functools.partial(manifest.code, binary), index)
        elif not compiles:
            return None
        else:
            binary, code = compiled(kernel, grid, arguments, options)
            function = _function(binary, lambda code=code: code, index)  # type: ignore[misc]
        binaries.append(binary)
        functions.append(function)
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    # What is made during a call has no address yet; any that is aligned will do.
    addresses += [operands[OUT].data_ptr() // 256 * 256] * len(recording.temporaries)
    return Program(recording, binaries, functions, index, addresses)


def compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Binary, bytes]:
    """The machine code that Triton's JIT makes for these arguments."""
    from flashtune.core.compiled import from_compiled

    let_triton_write()
    return from_compiled(kernel.warmup(*arguments, grid=grid, **launching.compiler_options(options)))


def resident_factors(device: torch.device, factors: tuple[float, float, float]) -> tuple[int, int, int]:
    """The addresses of fp8's factors that are numbers, on the device."""
    start = driver.resident(device.index, struct.pack("<3f", *factors))
    return start, start + 4, start + 8


def _function(binary: Binary, code: Callable[[], bytes], device: int) -> int:
    """The handle of a kernel; its code is read only where it isn't loaded yet."""
    found = _functions.get((binary.sha256, device))
    if found is None:
        found = driver.load_function(code(), binary.entry, binary.shared_bytes, device)
        _functions[binary.sha256, device] = found
    return found
