"""Prepared launches of a kernel for calls like a given one: the host's plan, with shipped machine code or what Triton compiles."""

import functools
import itertools
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashtune.core.code import launching
from flashtune.core.code.binaries import Binary, Manifest, machine_arch
from flashtune.core.code.launches import Launch, Resident, Varying
from flashtune.core.code.launching import LoadedKernel, Plan
from flashtune.core.problems.parameters import CallParameters
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.core.system.folders import let_triton_write
from flashtune.dispatch.plans import driver
from flashtune.dispatch.plans.misprediction import MISPREDICTIONS
from flashtune.dispatch.plans.program import Program

SEED, OFFSET = range(2)
"""Indices of the numbers that change from call to call."""

_handles: dict[tuple[str, int], int] = {}
"""Handles of loaded kernels by the hash of their code and the GPU."""

Operands = Sequence[Any]
"""Tensors of a pass in the order of flashtune.core.problems.passes; None for those that a launch doesn't have."""


def planned(kernel: LoadedKernel, operands: Operands, parameters: CallParameters, misses: tuple[int, int] | None = None) -> Plan | None:
    """Launches of a call with tensors like these; None for kernels whose text contains their host side.

    `misses` are the addresses where launches count mispredicting programs, where these are read.
    """
    if kernel.host is None:
        return None
    q, k, *_ = operands
    varying = replace(parameters, seed=Varying.of(SEED, 2**64 - 1), offset=Varying.of(OFFSET, 2**32 - 1))
    return launching.keyword_plan(kernel.host, operands, varying.keywords() | provided(kernel, q, k, misses))


def provided(kernel: LoadedKernel, q: torch.Tensor, k: torch.Tensor, misses: tuple[int, int] | None = None) -> dict[str, Any]:
    """Arguments that a device provides for a launch (`launching.provided`), with the addresses where it counts mispredicting programs.

    Where the driver launches, counts are described alone: memory of PyTorch's that outlives a call could belong to a graph's pool.
    """
    if not driver.driven(q.device):
        return launching.provided(kernel, q, k)
    needed = kernel.counts_needed(q, k)
    words: dict[str, Any] = {"sms": launching.sms_of(q.device), "counts": None}
    if needed:
        words["counts"] = torch.empty(needed, dtype=torch.int32, device="meta")
    if kernel.counts_misses:
        words["misses"] = tuple(Resident(at, "i64") for at in misses or MISPREDICTIONS.of(q.device.index, "unread").addresses)
    return words


PlanOf = Callable[[LoadedKernel], Plan | None]
"""Plans the launches of a call by a kernel's host side; None for kernels whose text contains it."""

Keep = Callable[[Manifest | None, Sequence[Binary], Callable[[Binary], bytes]], Manifest]
"""The manifest of a kernel, if it had one, with binaries that Triton compiled here; the last argument reads the code of any binary."""


class Code:
    """Code of a kernel: its host side, its machine code where there is any, and what Triton compiles in place of missing code."""

    __slots__ = ("_codes", "keep", "manifest", "module", "warn", "whole")

    def __init__(
        self,
        module: LoadedKernel,
        manifest: Manifest | None = None,
        whole: Callable[[], LoadedKernel] | None = None,
        warn: Callable[[str], object] = warnings.warn,
        keep: Keep | None = None,
    ) -> None:
        """`manifest` describes the machine code. `whole` loads the kernel with its module where `module` is its host side alone. `warn` is
        called with a message about damaged machine code. `keep`, if any, keeps what Triton compiles for other processes."""
        self.module, self.manifest, self.whole, self.warn, self.keep = module, manifest, whole, warn, keep
        self._codes: dict[str, bytes] = {}

    def program(self, plan: PlanOf) -> Program | None:
        """Prepared launches of calls like the one that `plan` plans, by machine code, else compiled by Triton, which may raise anything.

        None for kernels whose text contains their host side. Raises DriverError where the GPU or its driver refuses a kernel or a tensor
        map.
        """
        found = self.prepared(plan)
        return self.prepared(plan) if found is None and self.load() else found

    def load(self) -> bool:
        """Load the whole kernel, which Triton compiles; False where it is loaded already."""
        if (whole := self.whole) is None:
            return False
        self.module = whole()
        self.whole = None
        return True

    def prepared(self, plan: PlanOf) -> Program | None:
        """Prepared launches, as `program`; None where only the whole kernel has them. Damaged machine code is replaced by what Triton
        compiles."""
        planned = plan(self.module)
        if planned is None:
            return None
        try:
            return self._program(planned)
        except EnvironmentProblem as error:
            if self.manifest is None:
                raise
            self.warn(f"flashtune: {error}; until then Triton compiles it")
            self.manifest = None
            return self._program(planned)

    def _program(self, planned: Plan) -> Program | None:
        device = next(x for x in planned.tensors if x is not None).device
        index = device.index
        major, minor = torch.cuda.get_device_capability(index)
        arch = machine_arch(10 * major + minor)
        binaries: list[Binary] = []
        functions: list[int] = []
        new: list[Binary] = []
        for launch in planned.launches:
            binary = None if self.manifest is None else self.manifest.matching(launch.kernel, launch.arguments)
            if binary is None or binary.arch != arch:
                if self.whole is not None:
                    return None
                arguments = launching.Arguments(planned).of(launch)
                binary, code = compiled(getattr(self.module, launch.kernel), launch.grid, arguments, launch.options)
                new.append(binary)
                if self.keep is not None:
                    self._codes[binary.sha256] = code
                functions.append(_function(binary, lambda code=code: code, index))  # type: ignore[misc]
            else:
                functions.append(_function(binary, functools.partial(self._code, binary), index))
            binaries.append(binary)
        if new and self.keep is not None:
            self.manifest = self.keep(self.manifest, new, self._code)
        addresses = launching.addresses(planned.tensors)
        # Temporaries have no address yet; any aligned one will do for encoding.
        addresses += [next(x for x in addresses if x) // 256 * 256] * len(planned.scratch)
        return Program(planned, binaries, functions, device, addresses)

    def _code(self, binary: Binary) -> bytes:
        """The code of a binary of the manifest, or that was compiled in this process."""
        if binary.sha256 in self._codes or self.manifest is None:
            return self._codes[binary.sha256]
        return self.manifest.code(binary)


def compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Binary, bytes]:
    """Machine code that Triton's JIT makes for these arguments."""
    from flashtune.core.code.compiled import from_compiled

    let_triton_write()
    return from_compiled(kernel.warmup(*arguments, grid=grid, **launching.compiler_options(options)))


def program_of(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any], device: torch.device) -> Program:
    """Prepared launches of a kernel of Triton's that no family has; sources are its tensors in order, those in tuples among them.

    Raises EnvironmentProblem and DriverError.
    """
    binary, code = compiled(kernel, grid, arguments, options)
    given: list[torch.Tensor | None] = []
    flat: list[Any] = []
    for one in itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in arguments):
        if isinstance(one, torch.Tensor):
            flat.append(launching.operand(len(given), one))
            given.append(one)
        else:
            flat.append(one)
    plan = Plan([Launch(binary.kernel, grid, tuple(flat), dict(options))], given, [])
    return Program(plan, (binary,), (_function(binary, lambda: code, device.index),), device, launching.addresses(given))


def resident_factors(device: torch.device, factors: tuple[float, float, float]) -> tuple[int, int, int]:
    """Device addresses of fp8's factors that are numbers."""
    start = driver.resident(device.index, struct.pack("<3f", *factors))
    return start, start + 4, start + 8


def _function(binary: Binary, code: Callable[[], bytes], device: int) -> int:
    """Handle of a kernel; its code is read only where it isn't loaded yet."""
    found = _handles.get((binary.sha256, device))
    if found is None:
        found = driver.load_function(code(), binary.entry, binary.shared_bytes, device)
        _handles[binary.sha256, device] = found
    return found
