"""A stand-in for the machine under the Hopper kernels' protocol: their rendered text runs, with roles as threads and tensors as names.

What is real: the kernel's own functions, barriers with their phases and counts, named barriers, copies that land at any time, products
that read shared memory until they are waited for. What isn't: numbers. A tensor knows which (batch, head, row, column) blocks it stands
for, so that at the end each output tile can say which key blocks went into it.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from hopper_kernels import Launch
from hopper_machine import Barrier, Number, Role, Scheduler, quotient, remainder

Block = tuple[int, int, int, int]
"""Batch, query head, first query row of a warpgroup, first key."""

NONSENSE: Block = (-1, -1, -1, -1)
"""What stands for no block: read from a tile before its copy has landed, or made of what doesn't belong together."""


class Value:
    """A tensor in registers: the blocks that it stands for, and whether the product that makes it was waited for."""

    def __init__(self, *blocks: Block, ready: bool = True) -> None:
        self.blocks, self.ready = blocks, ready

    def __getattr__(self, _name: str) -> "Value":
        return self

    def __call__(self, *_arguments: Any, **_keywords: Any) -> "Value":
        return self

    def __getitem__(self, _place: Any) -> "Value":
        return self

    def _with(self, other: Any) -> "Value":
        assert self.ready, f"{self.blocks} are used before their product was waited for"
        theirs = other.blocks if isinstance(other, Value) else ()
        return Value(*self.blocks, *(() if theirs == self.blocks else theirs))

    def __add__(self, other: Any) -> "Value":
        if isinstance(other, Bias):
            return self if self.blocks == other.blocks else Value(NONSENSE)
        theirs = other.blocks if isinstance(other, Value) else ()
        assert not set(theirs) & set(self.blocks), f"{theirs} twice in one sum"
        return self._with(other)


for _name in ("sub", "mul", "truediv", "and", "or", "rshift", "lshift", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", lambda self, other: self._with(other))
for _name in ("radd", "rsub", "rmul", "rtruediv", "rand", "ror", "neg", "invert"):
    setattr(Value, f"__{_name}__", lambda self, _other=None: self)


class Bias(Value):
    """A tile of the bias; it meets the scores of its own block."""

    def _with(self, other: Any) -> "Bias":
        return self


class Shared(Barrier):
    """A tile of shared memory, or a barrier there."""

    def __init__(self, machine: "Machine", memory: "Memory | None" = None, place: int = 0) -> None:
        super().__init__()
        self._machine, self._memory, self._place = machine, memory, place
        self.held: Any = None
        self.readers = self.leaving = 0

    def reshape(self, _shape: Any) -> "Shared":
        return self

    def permute(self, _order: Any) -> "Shared":
        return self

    def slice(self, _first: int, _width: int, _axis: int) -> "Shared":
        return self

    def _reinterpret(self, _dtype: Any, shape: list[int], _layout: Any) -> "Chunks":
        assert self._memory
        return Chunks(self._machine, [(n, self._memory.index(self._place + n)) for n in range(shape[1] // CHUNK)])

    @property
    def parts(self) -> "list[Shared]":
        """The tiles of which it is made."""
        return [self]

    def check_free(self) -> None:
        """Nothing may be written while a product, a load or a copy still reads."""
        assert not self.readers, f"{self.held} is written over while a product or a load reads it"
        assert not self.leaving, f"{self.held} is written over on its way to memory"

    def store(self, value: Any) -> None:
        self._machine.pause()
        self.check_free()
        self.held = value

    def load(self, _layout: Any) -> Any:
        self._machine.pause()
        if isinstance(self.held, tuple):
            self._machine.read_late(self)
        # After the last tile of a chain a bias is read that never came.
        return Bias(self.held or NONSENSE) if isinstance(self.held, tuple | None) else self.held


CHUNK = 64
"""Columns of a chunk of a tile."""


class Chunks:
    """A tile of chunks of columns, by their places in it, each of which is a tile of shared memory."""

    def __init__(self, machine: "Machine", chunks: list[tuple[int, Shared]]) -> None:
        self._machine, self._chunks = machine, chunks

    def slice(self, first: int, width: int, _axis: int) -> "Chunks":
        inside = range(first // CHUNK, -(-(first + width) // CHUNK))
        return Chunks(self._machine, [(n, tile) for n, tile in self._chunks if n in inside])

    def permute(self, _order: Any) -> "Chunks":
        return self

    @property
    def parts(self) -> list[Shared]:
        """The tiles of which it is made."""
        return [tile for _, tile in self._chunks]

    @property
    def held(self) -> Any:
        """Where the tile lies in memory, if all of its chunks have come from there."""
        corners = {(*tile.held[:3], tile.held[3] - n * CHUNK) if tile.held else None for n, tile in self._chunks}
        return corners.pop() if len(corners) == 1 else None

    def store(self, value: Any) -> None:
        self._machine.pause()
        for tile in self.parts:
            tile.check_free()
            tile.held = value


class Memory:
    """Tiles of shared memory of one program."""

    def __init__(self, machine: "Machine", shape: list[int]) -> None:
        self._machine, self._tiles, self.shape = machine, dict[int, Shared](), shape

    def index(self, place: int) -> Shared:
        return self._tiles.setdefault(int(place), Shared(self._machine, self, int(place)))


def _pick(condition: Any, one: Any, other: Any) -> Any:
    return Value() if isinstance(condition, Value) else one if condition else other


def _least(choose: Callable[..., int]) -> Callable[..., Any]:
    return lambda *numbers: Value() if any(isinstance(number, Value) for number in numbers) else Number(choose(*numbers))


def _nothing(*_arguments: Any, **_keywords: Any) -> Value:
    return Value()


class Machine(Scheduler):
    """All programs of a launch at once."""

    def __init__(self, module: ModuleType, launch: Launch, *, programs: int, kv_group: int, seed: int, raises: float = 0.3) -> None:
        super().__init__(seed)
        self._programs, self._kv_group = programs, kv_group
        self._named: dict[tuple[int, int], list[int]] = {}
        self.counter = [Number(0)]
        # How many tiles warpgroups missed; none in every other launch.
        self.missed = 0
        self._share_missed = 0.3 * (seed % 2)
        # How often warps are outgrown, the programs with a warpgroup that missed a tile, how many more blocks of a program's first one
        # raised maxima than didn't, and the programs that said that they were misled.
        self._share_raised = raises
        self.missing: set[int] = set()
        self.raised: dict[int, int] = {}
        self.told: list[int] = []
        # The programs that came to where the first counts the launch.
        self.counted: list[int] = []
        self.written: dict[tuple[int, ...], Value] = {}
        kernel, _, arguments, _ = launch
        self._given = [self._argument(name, value) for name, value in zip(kernel.arg_names, arguments, strict=True)]
        self._kernel = self.kernel_of(module, kernel.__name__, self._stand_ins())

    def run(self) -> None:
        """Runs every program to its end."""
        for program in range(self._programs):
            self._program = program
            self._kernel(*self._given)
        self.play()

    def _argument(self, name: str, value: Any) -> Any:
        if name.endswith("_desc"):
            return SimpleNamespace(name=name[:-5], layout=None, dtype=None, block_type=SimpleNamespace(nbytes=1))
        if name == "counter_ptr":
            return self.counter
        return Value() if name.endswith("_ptr") else Number(value) if isinstance(value, int) else value

    def _load(self, desc: Any, corner: list[int], barrier: Shared, tile: Shared) -> None:
        self.pause()
        tile.check_free()
        tile.held = None
        place = self._place(corner)

        def land() -> None:
            tile.held = place
            barrier.bytes -= 1
            barrier.advance()

        self._copies.append(land)

    def _place(self, corner: list[int]) -> tuple[int, ...]:
        """Where a tile lies; of several heads, which a dimension of their own tells from those of other key heads, by the first."""
        place = tuple(int(number) for number in corner)
        if len(place) == 4:
            return place
        batch, kv_head, first, *rest = place
        assert 0 <= first < self._kv_group
        return batch, kv_head * self._kv_group + first, *rest

    def read_late(self, tile: Shared) -> None:
        """A load is under way until a fence: an arrival doesn't wait for it, and so the copy engine could be ahead of it."""
        tile.readers += 1
        self._role.loads.append(tile)

    def _fence(self) -> None:
        # One stands before the roles begin.
        if self._running:
            self.pause()
            while self._role.loads:
                self._role.loads.pop().readers -= 1

    def _store(self, _desc: Any, corner: list[int], tile: Shared) -> None:
        self.pause()
        assert tile.held.ready
        place = self._place(corner)
        assert place not in self.written, f"{place} is written twice"
        self.written[place] = tile.held
        tile.leaving += 1
        self._role.leaving.append(tile)

    def _stores_left(self, number: int) -> None:
        self.pause()
        assert number == 0
        for tile in self._role.leaving:
            tile.leaving -= 1
        self._role.leaving.clear()

    def _multiply(self, left: Any, right: "Shared | Chunks", sum: Value, use_acc: bool = True, is_async: bool = False) -> Value:
        """Scores of a tile of queries and one of keys, or weights times a tile of values: NONSENSE where they don't belong together.

        That is allowed, for what follows the last tile of a chain is never used.
        """
        self.pause()
        assert is_async
        stored = not isinstance(left, Value)
        assert stored or left.ready
        if stored:
            (batch, head, row, _), (other, kv_head, column, _) = left.held or NONSENSE, right.held or NONSENSE
            block = batch, head, row, column
            fits = (other, kv_head) == (batch, head // self._kv_group) and (not use_acc or sum.blocks == (block,))
        else:
            [block] = left.blocks
            batch, kv_head, *places = right.held or NONSENSE
            # e4m3 values lie with the keys innermost.
            fits = (batch, kv_head, max(places)) == (block[0], block[1] // self._kv_group, block[3])
            assert not use_acc or (sum.ready and block not in sum.blocks), f"{block} twice in one sum"
        found = Value(*(sum.blocks if use_acc and not stored else ()), block if fits else NONSENSE, ready=False)
        read = tuple(part for tile in ((left, right) if stored else (right,)) for part in tile.parts)
        for tile in read:
            tile.readers += 1
        self._role.products.append((found, read))
        return found

    def _products_left(self, number: int, deps: list[Value]) -> Any:
        self.pause()
        while len(self._role.products) > number:
            found, read = self._role.products.pop(0)
            found.ready = True
            for tile in read:
                tile.readers -= 1
        return deps[0] if len(deps) == 1 else deps

    def _assembly(self, text: str, _constraints: str, arguments: list[Any], **_keywords: Any) -> Any:
        if "atom." in text and len(arguments) == 2:
            self.counted.append(self._role.program)
        elif "atom." in text and arguments[2]:
            self.told.append(self._role.program)
        if "bar." in text:
            state = self._named.setdefault((self._role.program, int(arguments[0])), [0, 0, 0])
            self._meet(state, waits="bar.sync" in text)
        return arguments[0]

    def _meet(self, state: list[int], *, waits: bool) -> None:
        """A hardware barrier of two warpgroups, of which one waits: arrivals, waiting ones, times that it opened."""
        self.pause()
        state[0] += 1
        state[1] += waits
        opened = state[2]
        if state[0] == 2:
            assert state[1] == 1, "of the two at a turn's barrier one waits and one passes on"
            state[:] = 0, 0, opened + 1
        if waits:
            self.pause(lambda: state[2] > opened)

    def _vote(self, *_arguments: Any) -> Number:
        return Number(self._random.random() < 0.3)

    def _outgrown(self, *_arguments: Any) -> Number:
        return Number(self._random.random() < self._share_raised)

    def _count_raised(self, number: int) -> None:
        assert self._role.name.startswith("consumer0"), "one warpgroup speaks for all"
        self.raised[self._role.program] = self.raised.get(self._role.program, 0) + number

    def _miss(self, *_arguments: Any) -> Number:
        wrong = self._random.random() < self._share_missed
        self.missed += wrong
        if wrong:
            self.missing.add(self._role.program)
        return Number(wrong)

    def _draw_next(self, counter: list[Number], amount: int, sem: str) -> Number:
        self.pause()
        counter[0] = Number(counter[0] + amount)
        return Number(counter[0] - amount)

    def _write(self, place: Any, value: Any, mask: Any = None) -> None:
        if place is self.counter:
            place[0] = Number(value)

    def _start(self, roles: list[tuple[Callable[..., None], tuple[Any, ...]]], _warps: list[int], _registers: list[int]) -> None:
        self._roles += [Role(self, self._program, work, arguments) for work, arguments in roles]

    def _stand_ins(self) -> dict[str, Any]:
        gl: Any = SimpleNamespace(
            **{
                name: _nothing
                for name in ("arange", "zeros", "load", "sum", "abs", "log2", "SliceLayout", "BlockedLayout", "DotOperandLayout")
            },
            **dict.fromkeys(("int32", "int64", "float32", "constexpr", "NVMMASharedLayout")),
            full=lambda shape, value, *_layout: value if isinstance(value, Number) else Value(),
            max=lambda value, axis: value if isinstance(value, Number) else Value(),
            minimum=_least(min),
            maximum=_least(max),
            where=_pick,
            exp2=lambda value: value,
            convert_layout=lambda value, layout: value,
            split=lambda value: (value, value),
            to_tensor=Number,
            static_range=range,
            program_id=lambda _axis: Number(self._role.program),
            num_programs=lambda axis: Number(self._programs),
            atomic_add=self._draw_next,
            store=self._write,
            allocate_shared_memory=lambda _dtype, shape, _layout: Memory(self, shape),
            inline_asm_elementwise=self._assembly,
            warp_specialize=self._start,
        )
        return {
            "gl": gl,
            "mbarrier": SimpleNamespace(
                wait=self._wait, arrive=self._arrive, expect=self._expect, init=self._init, MBarrierLayout=_nothing
            ),
            "tma": SimpleNamespace(store_wait=self._stores_left),
            "async_load": self._load,
            "async_store": self._store,
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._products_left,
            "fence_async_shared": self._fence,
            # What is only arithmetic, or moves numbers between registers.
            "pack": lambda probs, *_dropout: probs,
            **dict.fromkeys(("unpack", "next_power"), lambda value: value),
            "mask_scores": lambda scores, mask_bits: scores,
            "bits_before": _nothing,
            "random_words": _nothing,
            # Votes on numbers: any answer may come.
            "declare_answer": _nothing,
            "vote_outgrown": self._outgrown,
            "vote_grown": self._vote,
            "vote_outweighed": self._vote,
            "thread_max": _nothing,
            "declare_raised": _nothing,
            "count_raised": lambda: self._count_raised(2),
            "count_blocks": lambda number: self._count_raised(-number),
            "count_peaked": lambda number: self._count_raised(2 * number),
            "count_unseen": lambda _part, number: self._count_raised(1 + 2 * number * self._random.randint(0, 1)),
            "read_raised": lambda: Number(self.raised[self._role.program]),
            "vote_unseen": self._vote,
            "vote_peaked": self._vote,
            "vote_overflowed": self._miss,
            "quotient": lambda a, b: a if isinstance(a, Value) else quotient(a, b),
            "remainder": lambda a, b: a if isinstance(a, Value) else remainder(a, b),
        }
