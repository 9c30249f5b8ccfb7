"""Prepared launches with the memory that they take: planned once, then a call writes addresses and launches, nothing else."""

import ctypes
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from flashtune.core.code.binaries import INTERLEAVE_NONE, L2_PROMOTION_128B, OUTSIDE_IS_ZERO, STRUCT_FORMATS, Binary, Parameter
from flashtune.core.code.launches import Descriptor, Launch, Operand, Resident, Varying
from flashtune.core.code.launching import Plan, Tensors
from flashtune.core.pytorch.private import C
from flashtune.dispatch.plans import driver

OUT, LSE, COUNTS, MASK = (Tensors._fields.index(name) for name in ("out", "lse", "counts", "mask"))
"""Places in a call's addresses, which begin with those of a forward without features."""

_MAP_BYTES = 128
_MAP_ALIGNMENT = 64


@dataclass(slots=True, eq=False, repr=False)
class _Layout:
    """Layout of the parameters of all launches in one allocation, and their initial contents: first the addresses that they take, each
    once, from these sources, so that a call writes all at once."""

    sources: list[int]
    image: bytearray = field(default_factory=bytearray)
    places: list[list[int]] = field(default_factory=list)
    maps: list[tuple[int, Descriptor, Parameter]] = field(default_factory=list)
    numbers: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, launches: Sequence[Launch], binaries: Sequence[Binary]) -> "_Layout":
        """The layout of these launches of these kernels."""
        given = [launch.arguments[one.position] for launch, binary in zip(launches, binaries, strict=True) for one in binary.parameters]
        found = cls(list(dict.fromkeys(x.source for x in given if isinstance(x, Operand))))
        found._take(8 * len(found.sources), 8)
        for launch, binary in zip(launches, binaries, strict=True):
            found._add(launch, binary)
        return found

    def _add(self, launch: Launch, binary: Binary) -> None:
        """Append the other parameters of one launch, each at its alignment."""
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
                places.append(8 * self.sources.index(value.source))
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

    __slots__ = ("_held", "bound", "configs", "launches", "maps", "stream", "words")

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
        plain = all([_address_is_first_word(start + place, what, parameter, addresses) for place, what, parameter in layout.maps])
        self.maps = [(place // 8, what.base.source) for place, what, _ in layout.maps if plain]
        self.bound = [(start + place, what.base.source) for place, what, _ in layout.maps if not plain]
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
    """Prepared launches of a plan with their memory, for any number of concurrent calls."""

    def __init__(
        self, plan: Plan, binaries: Sequence[Binary], functions: Sequence[int], device: torch.device, addresses: Sequence[int]
    ) -> None:
        """`functions` are the binaries' handles on `device`; `addresses` are those of a first call.

        Raises DriverError where the driver refuses a tensor map.
        """
        self.planned, self.binaries, self.functions = plan.launches, tuple(binaries), tuple(functions)
        self.layout = _Layout.of(self.planned, self.binaries)
        self.counts, self.lse_bytes = plan.counts, plan.lse_bytes
        # Bytes of temporaries; an LSE that nobody reads lies behind them.
        self.offsets, self.scratch = _placed([math.prod(x.shape) * x.item_bytes for x in plan.scratch])
        # True where a launch of a call may read scratch that an earlier launch of it wrote.
        self._hands_on = len(self.planned) > 1 and self.scratch + self.lse_bytes > 0
        self._takes = self.counts > 0 or self.scratch > 0
        # Stream of the last call, with addresses of its counters, of an LSE that isn't read, and of its temporaries, and the lock of its
        # turn: one tuple for calls whose LSE is read, the next for others. Tuples, to be read atomically.
        self._memory: list[_Memory] = [(-1, 0, 0, (), None)] * 2
        self._pool: list[_Block] = []
        self._table, self._picked = slice(len(self.layout.sources)), picker(self.layout.sources)
        self.last_source = max([*self.layout.sources, *(what.base.source for _, what, _ in self.layout.maps)])
        self._numbers = [(place // 8, source, (1 << 8 * size) - 1) for place, source, size in self.layout.numbers]
        self._launch = driver.library().cuLaunchKernelEx
        self.device, self._index = device, device.index
        driver.use_context(self._index)
        self._pool.append(_Block(self, addresses))

    @property
    def programs(self) -> int:
        """Number of programs of the largest launch."""
        return max(math.prod(planned.grid) for planned in self.planned)

    def run(self, addresses: list[int], numbers: Sequence[int] = (), picked: "Picker | None" = None) -> None:
        """Launch on the current stream. `addresses` are those of the call's tensors, in the order of the plan's or in that of `picked`, the
        same up to that of counters; those of counters and scratch are written into the list. Where the address of a forward's LSE is 0, it
        goes to scratch. `numbers` are the varying ones.

        Raises DriverError where a launch fails.
        """
        index, held, turn = self._index, None, None
        if C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(addresses, numbers, picked)
        stream = C._cuda_getCurrentRawStream(index)
        unread = self.lse_bytes > 0 and not addresses[LSE]
        if self._takes or unread:
            known, counts, lse, temporaries, turn = self._memory[unread]
            if C._cuda_isCurrentStreamCapturing() or known != stream:
                (_, counts, lse, temporaries, turn), held = self._taken(stream, unread=unread)
            addresses[COUNTS] = counts
            if unread:
                addresses[LSE] = lse
            addresses += temporaries
        if turn is None:
            self.launch(addresses, stream, numbers, picked)
        else:
            # Launches of another thread on this stream could interleave with these, and use the same scratch. As a context the lock takes
            # twice as long.
            turn.acquire()
            try:
                self.launch(addresses, stream, numbers, picked)
            finally:
                turn.release()
        # All launches are enqueued: later work of this stream may reuse the memory.
        del held
        return None

    def _taken(self, stream: int, *, unread: bool) -> "tuple[_Memory, Tensor | None]":
        """Memory for a launch on this stream, and the scratch tensor where PyTorch allocates it."""
        index, in_graph = self._index, C._cuda_isCurrentStreamCapturing()
        counts = driver.STREAM_MEMORY.counters(index, stream, self.counts, in_graph) if self.counts else 0
        size = self.scratch + _padded(self.lse_bytes) * unread
        start, held = 0, None
        if in_graph or size > driver.StreamMemory.MOST_SCRATCH:
            # A graph needs memory from its own pool, and large calls run long enough on the GPU to hide an allocation.
            held = torch.empty(size, dtype=torch.uint8, device=self.device)
            start = held.data_ptr()
        elif size:
            start = driver.STREAM_MEMORY.scratch(index, stream, size, in_turn=self._hands_on)
        turn = driver.STREAM_MEMORY.turn(index, stream) if self._hands_on and held is None else None
        found = stream, counts, start + self.scratch, tuple([start + offset for offset in self.offsets]), turn
        if held is None:
            self._memory[unread] = found
        return found, held

    def launch(self, addresses: Sequence[int], stream: int, numbers: Sequence[int] = (), picked: "Picker | None" = None) -> None:
        """Launch on a stream; `addresses` are all that the plan names, scratch included, in its order or that of `picked`. Raises
        DriverError."""
        try:
            block = self._pool.pop()
        except IndexError:
            driver.use_context(self._index)
            block = _Block(self, addresses)
        words = block.words
        words[self._table] = (picked or self._picked)(addresses)
        for place, source in block.maps:
            words[place] = addresses[source]
        for at, source in block.bound:
            driver.checked("cuTensorMapReplaceAddress", at, addresses[source])
        for place, source, mask in self._numbers:
            words[place] = numbers[source] & mask
        if block.stream != stream:
            for config in block.configs:
                config.stream = stream
            block.stream = stream
        launch = self._launch
        for config_at, function, parameters in block.launches:
            code = launch(config_at, function, parameters, None)
            if code and code in driver.NO_CONTEXT:
                # The thread has no current context before its first call.
                driver.use_context(self._index)
                code = launch(config_at, function, parameters, None)
            if code:
                raise driver.DriverError("cuLaunchKernelEx", code)
        self._pool.append(block)


_Memory = tuple[int, int, int, tuple[int, ...], Any]

Picker = Callable[[Sequence[int]], Any]
"""Function that takes the addresses of launches, each once, out of those of a call."""


def picker(places: Sequence[int]) -> Picker:
    """The function that takes the addresses at these places."""
    return itemgetter(*places) if len(places) > 1 else lambda addresses: [addresses[place] for place in places]


def _padded(size: int) -> int:
    """Size rounded up to a multiple of 256 bytes, the alignment of PyTorch's allocator."""
    return -(-size // 256) * 256


def _placed(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Offsets of tensors of these bytes in one allocation, and its size."""
    ends = tuple(itertools.accumulate(map(_padded, sizes), initial=0))
    return ends[:-1], ends[-1]


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
