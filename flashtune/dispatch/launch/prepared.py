"""From a rendered module to a `Program`: its host code recorded, its machine code taken from the package or compiled, all loaded."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from flashtune.core import launching
from flashtune.core.binaries import Binary, Manifest
from flashtune.dispatch.call import Descale
from flashtune.dispatch.launch import driver
from flashtune.dispatch.launch.program import Program
from flashtune.dispatch.launch.recording import Drawn, Recording, Tensor, record

Q, K, V, OUT, LSE, COUNTS, MASK, SLOPES, Q_DESCALE, K_DESCALE, V_DESCALE, TEMPORARIES = range(12)
"""The order of a launch's addresses; its temporary tensors come last."""

SEED, OFFSET = range(2)
"""The order of the numbers that change from call to call."""

_functions: dict[tuple[str, int], int] = {}
"""Handles of loaded kernels by the hash of their code and the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """What a launch is given: q (B, Hq, N_q, D), k (B, Hkv, N_kv, D), v (B, Hkv, N_kv, D_v), out (B, Hq, N_q, D_v), lse (B, Hq, N_q), and
    where the call has them the mask (B, Hq, N_q, N_kv), slopes (B, Hq) and factors per head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mask: torch.Tensor | None
    slopes: torch.Tensor | None
    descale: Descale | None


def launches(
    module: ModuleType, given: Tensors, settings: Mapping[str, Any]
) -> tuple[list[Any], list[torch.Tensor | None], Recording | None]:
    """The launches of a module, its tensors in the order of their addresses, and the launches recorded where they can be."""
    q, k, mask = given.q, given.k, given.mask
    provided = launching.provided(module, q, k)
    tensors = [q, k, given.v, given.out, given.lse, provided["counts"], mask, given.slopes, *(given.descale or (None, None, None))]
    numbers = {"seed": Drawn.of(SEED, 2**64 - 1), "offset": Drawn.of(OFFSET, 2**32 - 1), "sms": provided["sms"], **settings}
    optional = {"counts": provided["counts"], "mask": mask, "slopes": given.slopes, "descale": given.descale}
    steps = module.launches(q, k, given.v, given.out, given.lse, **optional, **numbers)
    if not module.records(q, k, given.v, mask, settings["scale"]):
        return steps, tensors, None
    places: dict[str, Any] = {"q": Tensor(Q), "k": Tensor(K), "v": Tensor(V), "out": Tensor(OUT), "lse": Tensor(LSE)}
    places |= {"counts": Tensor(COUNTS), "mask": Tensor(MASK), "slopes": Tensor(SLOPES)}
    places["descale"] = (Tensor(Q_DESCALE), Tensor(K_DESCALE), Tensor(V_DESCALE))
    places |= {name: None for name, value in optional.items() if value is None}
    return steps, tensors, record(module.launches, tensors, places | numbers)


def program(
    module: ModuleType, manifest: Manifest | None, given: Tensors, settings: Mapping[str, Any], *, compiles: bool
) -> Program | None:
    """The prepared launches of a module for calls like this one; None where its host code can't be recorded.

    `settings` are the numbers of the call. Kernels without fitting machine code in `manifest` are compiled by Triton, which may raise
    anything; None where one would be, and the module is host code alone (not `compiles`). Raises DriverError where the GPU or its driver
    refuses a kernel or a tensor map.
    """
    steps, tensors, recording = launches(module, given, settings)
    if recording is None:
        return None
    index = given.q.device.index
    major, minor = torch.cuda.get_device_capability(index)
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    binaries, functions = [], []
    for kernel, grid, arguments, options in steps:
        binary = None if manifest is None else manifest.matching(kernel.__name__, arguments)
        if manifest is not None and binary is not None and binary.arch == arch:
            code = manifest.code(binary)
        elif not compiles:
            return None
        else:
            binary, code = compiled(kernel, grid, arguments, options)
        binaries.append(binary)
        functions.append(_function(binary, code, index))
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    # What is made during a call has no address yet; any that is aligned will do.
    addresses += [given.out.data_ptr() // 256 * 256] * len(recording.temporaries)
    return Program(recording, binaries, functions, index, addresses)


def compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Binary, bytes]:
    """The machine code that Triton's JIT makes for these arguments."""
    from flashtune.core.compiled import from_compiled

    return from_compiled(kernel.warmup(*arguments, grid=grid, **options))


def resident_factors(device: torch.device, factors: tuple[float, float, float]) -> tuple[int, int, int]:
    """The addresses of fp8's factors that are numbers, on the device."""
    start = driver.resident(device.index, struct.pack("<3f", *factors))
    return start, start + 4, start + 8


def _function(binary: Binary, code: bytes, device: int) -> int:
    found = _functions.get((binary.sha256, device))
    if found is None:
        found = driver.load_function(code, binary.entry, binary.shared_bytes, device)
        _functions[binary.sha256, device] = found
    return found
