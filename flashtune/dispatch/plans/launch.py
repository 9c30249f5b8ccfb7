"""Prepared launches: planned once, then a call writes addresses and launches, nothing else."""

import ctypes
import functools
import itertools
import math
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flashtune.core.code import launching
from flashtune.core.code.binaries import (
    INTERLEAVE_NONE,
    L2_PROMOTION_128B,
    OUTSIDE_IS_ZERO,
    STRUCT_FORMATS,
    Binary,
    Manifest,
    Parameter,
    machine_arch,
)
from flashtune.core.code.launches import Descriptor, Launch, Operand, Resident, Varying
from flashtune.core.code.launching import LoadedKernel, Plan, Tensors
from flashtune.core.problems.parameters import CallParameters
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.core.system.folders import let_triton_write
from flashtune.dispatch.plans import driver
from flashtune.dispatch.plans.misprediction import MISPREDICTIONS

_MAP_BYTES = 128
_MAP_ALIGNMENT = 64


@dataclass(slots=True, eq=False, repr=False)
class _Layout:
    """Layout of the parameters of all launches in one allocation, and their initial contents."""

    image: bytearray = field(default_factory=bytearray)
    places: list[list[int]] = field(default_factory=list)
    addresses: list[tuple[int, int]] = field(default_factory=list)
    maps: list[tuple[int, Descriptor, Parameter]] = field(default_factory=list)
    numbers: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, launch: Launch, binary: Binary) -> None:
        """Append the parameters of one launch, each at its alignment."""
        places: list[int] = []
        self.places.append(places)
        for parameter in binary.parameters:
            value = launch.arguments[parameter.position]
            if isinstance(value, Descriptor):
                assert parameter.tensor_map is not None, "a descriptor goes to a tensor map"
                places.append(self._take(_MAP_BYTES, _MAP_ALIGNMENT))
                self.maps.append((places[-1], value, parameter))
                places.extend(self._number("i32", size) for size in value.shape)
                places.extend(self._number("i64", stride) for stride in value.strides)
            elif isinstance(value, Operand):
                places.append(self._take(8, 8))
                self.addresses.append((places[-1], value.source))
            elif isinstance(value, Resident):
                places.append(self._number(parameter.kind, value.address))
            else:
                places.append(self._number(parameter.kind, value))
                if isinstance(value, Varying):
                    self.numbers.append((places[-1], value.source, struct.calcsize(STRUCT_FORMATS[parameter.kind])))
        # Triton's two pointers to scratch memory, which our kernels don't use.
        places.extend((self._number("u64", 0), self._number("u64", 0)))

    def _take(self, size: int, alignment: int) -> int:
        start = -(-len(self.image) // alignment) * alignment
        self.image.extend(bytes(start + size - len(self.image)))
        return start

    def _number(self, kind: str, value: float) -> int:
        # Eight bytes each, so that a varying number can be written as a 64-bit word.
        start = self._take(8, 8)
        struct.pack_into("<" + STRUCT_FORMATS[kind], self.image, start, value)
        return start


class _Block:
    """Parameter block of one call in progress."""

    __slots__ = ("_held", "bound", "configs", "launches", "stream", "words")

    def __init__(self, program: "Program", addresses: Sequence[int]) -> None:
        layout = program.layout
        raw = ctypes.create_string_buffer(len(layout.image) + _MAP_ALIGNMENT)
        start = -(-ctypes.addressof(raw) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        ctypes.memmove(start, bytes(layout.image), len(layout.image))
        self.words = (ctypes.c_uint64 * (len(layout.image) // 8)).from_address(start)
        self.configs: list[driver.LaunchConfig] = []
        self.launches: list[tuple[int, int, int]] = []
        self.stream: int | None = None
        held: list[Any] = [raw]
        for planned, binary, function, places in zip(program.planned, program.binaries, program.functions, layout.places, strict=True):
            parameters = (ctypes.c_void_p * len(places))(*[start + place for place in places])
            attributes = driver.attributes(pdl=binary.launch_pdl, cooperative=binary.cooperative, cluster=binary.cluster)
            x, y, z = (*planned.grid, 1, 1)[:3]
            config = driver.LaunchConfig(
                x * binary.cluster, y, z, binary.threads, 1, 1, binary.shared_bytes, None, ctypes.addressof(attributes), len(attributes)
            )
            held += [parameters, attributes, config]
            self.configs.append(config)
            if x * y * z > 0:
                self.launches.append((ctypes.addressof(config), function, ctypes.addressof(parameters)))
        # Where the address is the map's first word, as on every driver so far, it is written like any other parameter.
        plain = [_address_is_first_word(start + place, what, parameter, addresses) for place, what, parameter in layout.maps]
        self.bound = [] if all(plain) else [(start + place, what.base.source) for place, what, _ in layout.maps]
        self._held = held


def _address_is_first_word(place: int, descriptor: Descriptor, parameter: Parameter, addresses: Sequence[int]) -> bool:
    """Encode a tensor map; True where its first word is the address, and another address changes nothing else."""
    words = (ctypes.c_uint64 * (_MAP_BYTES // 8)).from_address(place)
    address = addresses[descriptor.base.source]
    encode(place, descriptor, parameter, address + 4096)
    first = list(words)
    encode(place, descriptor, parameter, address)
    return first[0] == address + 4096 and words[0] == address and first[1:] == list(words)[1:]


class Program:
    """Prepared launches of a plan, for any number of concurrent calls."""

    def __init__(self, plan: Plan, binaries: Sequence[Binary], functions: Sequence[int], device: int, addresses: Sequence[int]) -> None:
        """`functions` are the binaries' handles on GPU `device`; `addresses` are those of a first call.

        Raises DriverError where the driver refuses a tensor map.
        """
        self.planned, self.binaries, self.functions = plan.launches, tuple(binaries), tuple(functions)
        self.layout = _Layout()
        for planned, binary in zip(self.planned, self.binaries, strict=True):
            self.layout.add(planned, binary)
        self.counts = plan.counts
        self.temporaries = tuple(math.prod(x.shape) * x.item_bytes for x in plan.scratch)
        self._pool: list[_Block] = []
        pointers = [(place // 8, source) for place, source in self.layout.addresses]
        maps = [(place // 8, what.base.source) for place, what, _ in self.layout.maps]
        self._pointers, self._slots = pointers, pointers + maps
        self.last_source = max(source for _, source in self._slots)
        self._numbers = [(place // 8, source, (1 << 8 * size) - 1) for place, source, size in self.layout.numbers]
        self._launch = driver.library().cuLaunchKernelEx
        self._device = device
        driver.use_context(device)
        self._pool.append(_Block(self, addresses))

    @property
    def programs(self) -> int:
        """Number of programs of the largest launch."""
        return max(math.prod(planned.grid) for planned in self.planned)

    def run(self, addresses: Sequence[int], stream: int, numbers: Sequence[int] = ()) -> None:
        """Launch on a stream. `addresses` are those of the call's tensors, temporaries last; `numbers` are the varying ones.

        Raises DriverError where a launch fails.
        """
        try:
            block = self._pool.pop()
        except IndexError:
            driver.use_context(self._device)
            block = _Block(self, addresses)
        words = block.words
        for at, source in block.bound:
            driver.checked("cuTensorMapReplaceAddress", at, addresses[source])
        for place, source in self._pointers if block.bound else self._slots:
            words[place] = addresses[source]
        for place, source, mask in self._numbers:
            words[place] = numbers[source] & mask
        if block.stream != stream:
            for config in block.configs:
                config.stream = stream
            block.stream = stream
        launch = self._launch
        for config_at, function, parameters in block.launches:
            code = launch(config_at, function, parameters, None)
            if code in driver.NO_CONTEXT:
                # The thread has no current context before its first call.
                driver.use_context(self._device)
                code = launch(config_at, function, parameters, None)
            if code:
                raise driver.DriverError("cuLaunchKernelEx", code)
        self._pool.append(block)


def encode(place: int, descriptor: Descriptor, parameter: Parameter, address: int) -> None:
    """Write the tensor map of a descriptor, as Triton 3.6 encodes it, to 128 aligned bytes; raises DriverError."""
    tensor_map = parameter.tensor_map
    assert tensor_map is not None, "only descriptors have tensor maps"
    rank = tensor_map.rank
    strides = [stride * tensor_map.element_bytes for stride in reversed(descriptor.strides[:-1])]
    driver.checked(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(place),
        tensor_map.element_type,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(descriptor.shape)),
        (ctypes.c_uint64 * max(1, rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*reversed(tensor_map.box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        INTERLEAVE_NONE,
        tensor_map.swizzle,
        L2_PROMOTION_128B,
        OUTSIDE_IS_ZERO,
    )


OUT, LSE, COUNTS, MASK = (Tensors._fields.index(name) for name in ("out", "lse", "counts", "mask"))
"""Places in a call's addresses, which begin with those of a forward without features."""

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
        index = next(x for x in planned.tensors if x is not None).device.index
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
        return Program(planned, binaries, functions, index, addresses)

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


def program_of(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: Mapping[str, Any], device: int) -> Program:
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
    return Program(plan, (binary,), (_function(binary, lambda: code, device),), device, launching.addresses(given))


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
