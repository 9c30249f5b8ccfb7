"""A stand-in for a Hopper GPU that computes: the rendered text of a warp-specialised kernel runs on torch's tensors, its roles as threads.

What is real: the kernel's own functions, tiles of shared memory and views of them, barriers with their phases and counts, hardware
barriers, copies that land at any time, products and copies that read shared memory at any time until they are waited for. Memory starts
as NaN. What isn't: layouts, and how threads of a warpgroup share its work.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from hopper_kernels import Launch, assembly
from hopper_machine import Barrier, Number, Role, Scheduler, quotient, remainder

from flashtune.core.problems.reference import dropout_keep_rows


class Array(torch.Tensor):
    """A tensor in registers; layouts mean nothing here."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    def __or__(self, other: Any) -> Any:
        # Of words that nobody has drawn yet, with those that somebody has.
        return torch.maximum(self, other) if self.is_floating_point() else super().__or__(other)

    def expand_dims(self, axis: int) -> "Array":
        return array(self.unsqueeze(axis))


def array(values: torch.Tensor) -> Array:
    return values.as_subclass(Array)  # type: ignore[return-value]


class Tile:
    """A view of shared memory."""

    def __init__(self, values: torch.Tensor, memory: torch.Tensor | None = None, place: int = 0) -> None:
        self.values, self._memory, self._place = values, memory, place

    def index(self, place: int) -> "Tile":
        assert 0 <= place < self.values.shape[0]
        return Tile(self.values[int(place)], self.values, int(place))

    def _reinterpret(self, _dtype: Any, shape: list[int], _layout: Any) -> "Chunks":
        assert self._memory is not None
        columns = self._memory.shape[-1]
        return Chunks([chunk.view(shape[0], columns) for chunk in self._memory[self._place : self._place + shape[1] // columns]])

    def reshape(self, shape: list[int]) -> "Tile":
        return Tile(self.values.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Tile":
        return Tile(self.values.permute(order))

    def slice(self, first: int, width: int, axis: int) -> "Tile":
        return Tile(self.values.narrow(axis, first, width))

    def store(self, values: torch.Tensor) -> None:
        assert values.dtype == self.values.dtype
        assert values.shape == self.values.shape
        self.values.copy_(values)

    def load(self, _layout: Any) -> Array:
        return array(self.values.clone())


class Chunks:
    """A view of chunks of columns that lie one behind another."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self._parts, self._turned = parts, False

    @property
    def values(self) -> torch.Tensor:
        """Present content of the memory."""
        whole = torch.cat(self._parts, 1)
        return whole.T if self._turned else whole

    def slice(self, first: int, width: int, axis: int) -> "Chunks":
        assert axis == 1
        columns = self._parts[0].shape[1]
        inside = self._parts[first // columns :][: -(-width // columns)]
        found = Chunks([part[:, first % columns :][:, :width] for part in inside])
        assert found.values.shape[1] == width
        return found

    def permute(self, order: tuple[int, ...]) -> "Chunks":
        assert order == (1, 0)
        found = Chunks(self._parts)
        found._turned = True
        return found

    def load(self, _layout: Any) -> Array:
        return array(self.values)

    def store(self, values: torch.Tensor) -> None:
        assert values.shape == self.values.shape
        place = 0
        for part in self._parts:
            part.copy_(values[:, place : place + part.shape[1]])
            place += part.shape[1]


class Single(Barrier):
    """A barrier by itself."""

    def index(self, place: int) -> "Single":
        assert place == 0
        return self


class Barriers(list[Single]):
    """Some of them."""

    @property
    def shape(self) -> list[int]:
        return [len(self)]

    def index(self, place: int) -> Single:  # type: ignore[override]
        return self[int(place)]


class Pointer:
    """An address, or one for each element of a tensor, in a flat tensor."""

    def __init__(self, memory: torch.Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + other)


class Product:
    """A product under way."""

    def __init__(self, left: Any, right: "Tile | Chunks", sum: Any) -> None:
        self._left, self._right, self._sum, self.found = left, right, sum, None

    def finish(self) -> None:
        left = (self._left.values if isinstance(self._left, Tile | Chunks) else self._left).float()
        start = self._sum.found if isinstance(self._sum, Product) else self._sum
        product = left @ self._right.values.float()
        self.found = array(product if start is None else start + product)


def _least(choose: Callable[..., int], of_tensors: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: (
        array(of_tensors(torch.as_tensor(a), torch.as_tensor(b)))
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor)
        else Number(choose(a, b))
    )


def _where(condition: Any, one: Any, other: Any) -> Any:
    return torch.where(condition, one, other) if isinstance(condition, torch.Tensor) else one if condition else other


def _load(place: Pointer, cache_modifier: str = "") -> Array:
    return array(torch.as_tensor(place.memory[place.offset]))


def _philox(c0: Any, c1: Any, _zero: Any, head: Any, _params: Any) -> list[torch.Tensor]:
    # Not bits, but what they would be drawn for.
    return [((head.index * 2.0**14 + torch.as_tensor(c0).double()) * 2**14 + c1) * 4 + word for word in range(4)]


def _apply_dropout(probs: torch.Tensor, words: torch.Tensor, transposed: bool, params: Any) -> torch.Tensor:
    """Reads what a pair's word is for and checks nothing: another pair's word drops other pairs than the reference."""
    code = words.long()
    head, group, rows, word = code // 2**30, code // 2**16 % 2**14, code // 4 % 2**14, code % 4
    key, query = (torch.arange(size) for size in (probs.shape if transposed else probs.shape[::-1]))
    places = (key[:, None], query[None, :]) if transposed else (key[None, :], query[:, None])
    column = group // 4 * 32 + word * 8 + group % 4 * 2 + places[0] % 2
    row = rows // 8 * 16 + places[1] // 8 % 2 * 8 + rows % 8
    kept = torch.zeros_like(probs, dtype=torch.bool)
    for index in head.unique().tolist():
        wanted = dropout_keep_rows(
            params.seed, params.offset, index, 0, int(row.max()) + 1, int(column.max()) + 1, params.threshold / 32768, "cpu"
        )
        kept |= (head == index) & wanted[row, column]
    return torch.where(kept, probs, 0.0)


def _store(place: Pointer, values: torch.Tensor, mask: Any = True) -> None:
    inside = torch.as_tensor(mask).expand_as(values)
    place.memory[place.offset[inside]] = values[inside].as_subclass(torch.Tensor)


class Machine(Scheduler):
    """The programs of a launch, one after another."""

    def __init__(self, module: ModuleType, launch: Launch, *, seed: int) -> None:
        super().__init__(seed)
        self._module = module
        kernel, (self._programs,), self._arguments, _ = launch
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[str(module.DTYPE.value)]
        self._run = self.kernel_of(module, kernel.__name__, self._stand_ins())

    def run(self) -> None:
        """Runs every program to its end."""
        for program in range(self._programs):
            self._program = program
            self.begin()
            self._named: dict[int, list[int]] = {}
            self._run(*map(self._argument, self._arguments))
            self.play()
            assert not any(state[0] for state in self._named.values()), "a hardware barrier is left with arrivals"

    def check_end(self, role: Role) -> None:
        assert not role.products, "products that nobody waited for"
        assert not role.leaving, "copies that nobody waited for"

    def _argument(self, value: Any) -> Any:
        if hasattr(value, "block_shape"):
            nbytes = value.base.element_size() * torch.Size(value.block_shape).numel()
            memory = value.base.as_strided(value.shape, value.strides)
            return SimpleNamespace(
                memory=memory, block=value.block_shape, layout=None, block_type=SimpleNamespace(nbytes=nbytes), dtype=value.base.dtype
            )
        if isinstance(value, torch.Tensor):
            # All of its memory from its first element on, however it is strided.
            size = 1 + sum((extent - 1) * stride for extent, stride in zip(value.shape, value.stride(), strict=True))
            return Pointer(value.as_strided((size,), (1,)))
        return Number(value) if isinstance(value, int) and not isinstance(value, bool) else value

    def _box(self, desc: Any, corner: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """Part of memory that a tile at `corner` covers, and where in the tile that is."""
        ends = [min(int(place) + width, size) for place, width, size in zip(corner, desc.block, desc.memory.shape, strict=True)]
        assert all(place >= 0 for place in corner)
        inside = tuple(slice(int(place), max(end, int(place))) for place, end in zip(corner, ends, strict=True))
        return desc.memory[inside], tuple(slice(0, part.stop - part.start) for part in inside)

    def _load(self, desc: Any, corner: list[int], barrier: Barrier, tile: Tile) -> None:
        self.pause()
        tile.values.fill_(float("nan"))

        def land() -> None:
            source, inside = self._box(desc, corner)
            tile.values.zero_()
            tile.values[inside] = source
            barrier.bytes -= desc.block_type.nbytes
            barrier.advance()

        self._copies.append(land)

    def _leave(self, add: bool) -> Callable[[Any, list[int], Tile], None]:
        def leave(desc: Any, corner: list[int], tile: Tile) -> None:
            self.pause()

            def go() -> None:
                target, inside = self._box(desc, corner)
                target.copy_(target + tile.values[inside] if add else tile.values[inside])

            self._role.leaving.append(go)

        return leave

    def _leave_up_to(self, number: int) -> None:
        self.pause()
        while len(self._role.leaving) > number:
            self._role.leaving.pop(0)()

    def _multiply(self, left: Any, right: Tile, sum: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        self.pause()
        assert is_async
        found = Product(left, right, sum if use_acc else None)
        self._role.products.append(found)
        if self._random.random() < 0.3:
            self._finish(0)
        return found

    def _finish(self, number: int) -> None:
        while len(self._role.products) > number:
            self._role.products.pop(0).finish()

    def _products_left(self, number: int, deps: list[Product]) -> Any:
        self.pause()
        self._finish(number)
        if number and deps[0] in self._role.products:
            # Passed on, and no numbers yet.
            return deps[0]
        found = [dep if isinstance(dep, Product) else SimpleNamespace(found=dep) for dep in deps]
        assert all(dep not in self._role.products for dep in found), "what is taken is still under way"
        return found[0].found if len(found) == 1 else tuple(dep.found for dep in found)

    def _assembly(self, text: str, constraints: str, arguments: list[Any], **keywords: Any) -> Any:
        if any(isinstance(argument, torch.Tensor) for argument in arguments):
            kinds = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int32}
            tensors = [argument if isinstance(argument, torch.Tensor) else torch.tensor(argument) for argument in arguments]
            held = [tensor.numpy().astype(kinds[tensor.dtype]) for tensor in tensors]
            found = assembly(text, constraints, held, **keywords | {"dtype": kinds[keywords["dtype"]]})
            return array(torch.from_numpy(np.asarray(found)))
        if "nanosleep" in text:
            assert arguments[0] >= 0, "sleeps for ever"
            return Number(0)
        if "bar." not in text:
            assert text == "mov.b32 $0, $1;"
            return Number(arguments[0])
        barrier, threads = (int(argument) for argument in arguments)
        assert 5 <= barrier < 16
        self.pause()
        state = self._named.setdefault(barrier, [0, 0])
        state[0] += self._role.threads
        opened = state[1]
        assert state[0] <= threads, f"more than {threads} threads at barrier {barrier}"
        if state[0] == threads:
            state[:] = 0, opened + 1
        if "bar.sync" in text:
            self.pause(lambda: state[1] > opened)
        return Number(0)

    def _allocate(self, dtype: Any, shape: list[int], _layout: Any) -> Any:
        if dtype is torch.int64:
            return Barriers(Single() for _ in range(shape[0]))
        return Tile(torch.full([int(size) for size in shape], float("nan") if dtype.is_floating_point else 2**30, dtype=dtype))

    def _random_words_dq(self, key: int, row: int, head: Any, _params: Any) -> torch.Tensor:
        column = torch.arange(key, key + getattr(self._module, "DQ_BLOCK_N", self._module.BLOCK_N).value)[None, :]
        query = torch.arange(row, row + 64)[:, None]
        words = _philox(column // 32 * 4 + column // 2 % 4, query // 16 * 8 + query % 8, None, head, None)
        return words[0] + column // 8 % 4

    def _add(self, place: Pointer, values: Any, sem: str) -> Any:
        if isinstance(values, torch.Tensor):
            place.memory.index_add_(0, place.offset.as_subclass(torch.Tensor), values.as_subclass(torch.Tensor))
            return None
        self.pause()
        found = Number(place.memory[place.offset])
        place.memory[place.offset] += values
        return found

    def _start(self, roles: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        assert len(roles) == len(warps) + 1 == len(registers) + 1
        self._roles = [Role(self, self._program, *role, 32 * count) for role, count in zip(roles, [4, *warps], strict=True)]

    def _stand_ins(self) -> dict[str, Any]:
        gl: Any = SimpleNamespace(
            **{name: getattr(torch, name) for name in ("int32", "int64", "float32", "exp2", "abs")},
            # Wide enough for what stands for random bits, and with a NaN for memory that nobody has written.
            uint32=torch.float64,
            SliceLayout=lambda *_: None,
            DotOperandLayout=lambda **_: None,
            join=lambda one, other: array(torch.stack((one, other), -1)),
            arange=lambda first, end, layout: array(torch.arange(first, end)),
            zeros=lambda shape, dtype, _layout: array(torch.zeros([int(size) for size in shape], dtype=dtype)),
            minimum=_least(min, torch.minimum),
            maximum=_least(max, torch.maximum),
            where=_where,
            convert_layout=lambda values, _layout: values,
            to_tensor=Number,
            static_range=range,
            full=lambda shape, value, dtype, _layout: array(torch.full(shape, value, dtype=dtype)),
            load=_load,
            store=_store,
            max=lambda values, _axis: Number(values.max()),
            BlockedLayout=lambda *_: None,
            SwizzledSharedLayout=lambda *_: None,
            program_id=lambda _axis: Number(self._program),
            num_programs=lambda _axis: Number(self._programs),
            atomic_add=self._add,
            allocate_shared_memory=self._allocate,
            inline_asm_elementwise=self._assembly,
            warp_specialize=self._start,
            constexpr=None,
        )
        return {
            "gl": gl,
            "DTYPE": self._dtype,
            "mbarrier": SimpleNamespace(
                wait=self._wait, arrive=self._arrive, expect=self._expect, init=self._init, MBarrierLayout=lambda: None
            ),
            "tma": SimpleNamespace(store_wait=self._leave_up_to),
            "async_load": self._load,
            "async_store": self._leave(add=False),
            "async_add": self._leave(add=True),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._products_left,
            "fence_async_shared": lambda: None,
            "thread_barrier": lambda: None,
            "philox": _philox,
            "random_words_dq": self._random_words_dq,
            "byte_selectors": lambda: True,
            "byte_selectors_dq": lambda: False,
            "apply_dropout": _apply_dropout,
            "range": lambda *ends: map(Number, range(*ends)),
            # Of tensors only places are divided, which aren't negative.
            "quotient": lambda a, b: a // b if isinstance(a, torch.Tensor) else quotient(a, b),
            "remainder": lambda a, b: a % b if isinstance(a, torch.Tensor) else remainder(a, b),
        }
