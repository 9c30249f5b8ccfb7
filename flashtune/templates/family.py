"""What a template family declares: its axes as data, its constraints as named predicates, and what it can serve.

The rendered file of a family is a module of kernels. Their host side is Python of the package (`Family.host`): which tensors a kernel
takes, and its launches as a pure function of shapes, strides and numbers (`flashtune.core.launches`). `flashtune.templates.loading` puts
both together.
`flashtune.core.reference` defines the numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashtune.core.band import Band
from flashtune.core.config import Config, Direction, KernelSpec, Value
from flashtune.core.errors import InputError
from flashtune.core.launches import Host
from flashtune.core.problem import Problem, next_power_of_two
from flashtune.core.results import CompileFacts
from flashtune.core.target import Target

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Axis(NamedTuple):
    """One dimension of the search space; `why` says in a line what it trades.

    `absent` is what configs did that were written before this axis was declared; None for one that was there from the start.
    `formerly` is the name that it has in configs of earlier versions; None where it was always called so.
    Where it doesn't `refit`, `Family.refitted` gives it no other value than `absent`: those are a search's to measure first.
    """

    name: str
    values: tuple[Value, ...]
    why: str
    absent: Value | None = None
    formerly: str | None = None
    refits: bool = True


class Constraint(NamedTuple):
    """A named predicate over (config, spec, target): True where the candidate may be built.

    `axes` are those that it reads, so that a space is enumerated by asking it once for each combination of them; it is then given configs
    of these alone. None where it must see whole configs.
    """

    name: str
    holds: Callable[[Config, KernelSpec, Target], bool]
    why: str
    axes: tuple[str, ...] | None = None


def constraint(*axes: str) -> Callable[[Callable[[Config, KernelSpec, Target], bool]], Constraint]:
    """Makes a predicate the `Constraint` of its name, for the reason that its docstring gives; without `axes` it sees whole configs."""
    return lambda holds: Constraint(name=holds.__name__, holds=holds, why=holds.__doc__ or "", axes=axes or None)


MOST_REFITTED = 4
"""So many axes of a config change at most where it serves in another kernel's place: the ways to change more are too many to try. Of 4000
pairs of shipped records 34 took more, from heads of 40 columns to heads of 192 and 256."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """A template with its search space.

    `direction` is the pass that it computes. `supports` returns why a spec can't be served on a target, or None where it can.
    `suits` returns why a problem's sizes are better left to other families, or None where this one competes. It is a rule of thumb for
    what nobody measured: it says which families a search tries unless they are named, whose default is offered and which records of
    other sizes stand in. A measured record of exactly the problem's key is served whatever it says.
    `tried_first` are configs worth trying first (the field's published tiles, say), in or out of the constraints; of those that keep them
    `pick` takes a sound one for when nothing was ever tuned. `interpretable` says whether Triton's interpreter runs it. `folder` is where
    its template lies.
    `layout` is what follows from a spec and a config; the template knows it as `layout`.
    `gone` are axes of earlier versions, with the value at which they did what kernels do without them.
    `successor` is what searches try in place of a config that rows of earlier versions have, which are served as they are.
    `resized` is a config with what follows from a problem's sizes on a target: searches try no other, and where it serves in another
    problem's place a config is moved to it. It keeps the constraints that the config keeps.
    `path_axes` are the axes that change which code is rendered, so that two configs that agree in them share a code path.
    `repeatable` says whether launches on the same inputs write the same bits, wherever scores are within float32 of one another (decision
    0009): not with sums in memory, whose order is left to chance. The gate holds a family to it, and deterministic calls ask for it.
    `host` makes the host side of its kernels; None for a template whose text defines that itself (`flashtune.templates.loading`).
    `expected` is what the compiler will say of a config, as far as it can be told before it is asked; searches order candidates by it.
    """

    name: str
    folder: str = ""
    axes: tuple[Axis, ...]
    constraints: tuple[Constraint, ...]
    supports: Callable[[KernelSpec, Target], str | None]
    tried_first: Callable[[KernelSpec, Target], list[Config]]
    interpretable: bool
    pick: Callable[[list[Config], KernelSpec, Target], Config] = lambda starts, spec, target: starts[0]
    direction: Direction = "fwd"
    suits: Callable[[Problem, Target], str | None] = lambda problem, target: None
    layout: Callable[[KernelSpec, Config], object] = lambda spec, config: None
    gone: Mapping[str, Value] = field(default_factory=dict)
    successor: Callable[[Config], Config] = lambda config: config
    resized: Callable[[Config, Problem, Target], Config] = lambda config, problem, target: config
    path_axes: tuple[str, ...] = field(default=())
    host: Callable[[KernelSpec, Config], Host] | None = None
    repeatable: bool = True
    expected: Callable[[Config, KernelSpec, Target], CompileFacts | None] = lambda config, spec, target: None

    def __reduce__(self) -> tuple[Callable[[str], "Family"], tuple[str]]:
        """Families travel to other processes by their names: what they are made of is code."""
        return _named, (self.name,)

    @property
    def template_file(self) -> str:
        """The Jinja file, relative to the templates folder."""
        return f"{self.folder}/{self.name}.py.jinja" if self.folder else f"{self.name}.py.jinja"

    def starts(self, spec: KernelSpec, target: Target) -> list[Config]:
        """Configs worth trying first, those that keep the constraints."""
        return [config for config in self.tried_first(spec, target) if self.violated(config, spec, target) is None]

    def default(self, spec: KernelSpec, target: Target) -> Config:
        """A sound config for when nothing was ever tuned, one of `starts`."""
        return self.pick(self.starts(spec, target), spec, target)

    def violated(self, config: Config, spec: KernelSpec, target: Target) -> Constraint | None:
        """The first constraint that this config breaks on this target, or None."""
        return next((c for c in self.constraints if not c.holds(config, spec, target)), None)

    def refusal(self, problem: Problem, spec: KernelSpec, target: Target) -> str | None:
        """Why this family can't serve a problem, whose spec takes a while to make, or doesn't suit its sizes; None where it does."""
        return self.supports(spec, target) or self.suits(problem, target)

    def unfit(self, config: Config, spec: KernelSpec, target: Target) -> str | None:
        """Why a config of the declared space can't serve `spec` on `target`, or None where it can."""
        if (why := self.supports(spec, target)) is not None:
            return why
        broken = self.violated(config, spec, target)
        return None if broken is None else f"{config.label()} breaks {broken.name}: {broken.why}"

    def completed(self, config: Config) -> Config:
        """A config that an earlier version wrote, under today's names and with the axes that came later at what it did without them.

        It loses axes that are gone where it did what is left; where it did anything else it stays outside the declared space.
        """
        left_over = {name for name, value in self.gone.items() if name in config and config[name] == value}
        if left_over:
            config = Config.of({name: value for name, value in config.items if name not in left_over})
        today = {axis.formerly: axis.name for axis in self.axes if axis.formerly is not None and axis.name not in config}
        if not today.keys().isdisjoint(config):
            config = Config.of({today.get(name, name): value for name, value in config.items})
        lacking = {axis.name: axis.absent for axis in self.axes if axis.absent is not None and axis.name not in config}
        return config.replace(**lacking) if lacking else config

    def validate(self, config: Config) -> None:
        """Raise InputError unless `config` has exactly the declared axes with declared values (types included)."""
        declared = {axis.name: axis for axis in self.axes}
        given = config.as_dict()
        if strange := sorted(given.keys() - declared.keys()):
            raise InputError(
                f"config of {self.name} has the undeclared axis {strange[0]!r}: it was not written by this version of flashtune"
            )
        for name, axis in declared.items():
            if name not in given:
                raise InputError(f"config of {self.name} lacks the axis {name!r}: it was not written by this version of flashtune")
            if not any(given[name] == value and type(given[name]) is type(value) for value in axis.values):
                raise InputError(
                    f"{name}={given[name]!r} is outside the declared space of {self.name}: {', '.join(map(repr, axis.values))}"
                )

    def refitted(self, config: Config, spec: KernelSpec, target: Target, held: "Held | None" = None) -> Config | None:
        """The valid config nearest to one of the declared space: itself, or one with as few axes changed as possible, by as few steps.

        Among equals the axes that are declared first, which matter most, stay; those that don't refit take no new value. None where that
        leaves no valid config, or none with at most MOST_REFITTED axes changed. Who refits several configs shares what is `held`.
        """
        return self.refit(config, spec, target, held or Held(spec, target)).config

    def refit(self, config: Config, spec: KernelSpec, target: Target, held: "Held") -> "Refit":
        """The same, with the work that it took, which doesn't depend on what was `held` before."""
        values = config.as_dict()
        broken = [constraint for constraint in self.constraints if not held.holds(constraint, values)]
        if not broken:
            return Refit(config, 0)
        looked = 0
        at = [axis.values.index(config[axis.name]) for axis in self.axes]
        others = [
            [(abs(i - now), value) for i, value in enumerate(axis.values) if i != now and (axis.refits or value == axis.absent)]
            for axis, now in zip(self.axes, at, strict=True)
        ]

        def moves(places: Sequence[int]) -> Iterator[tuple[int, dict[str, Value]]]:
            """All new values of these axes, with how many steps they are away."""
            nonlocal looked
            for made in product(*(others[place] for place in places)):
                looked += 1
                yield (
                    sum(steps for steps, _ in made),
                    {self.axes[place].name: value for place, (_, value) in zip(places, made, strict=True)},
                )

        @cache
        def mends(constraint: Constraint, places: tuple[int, ...]) -> bool:
            """Whether new values of all these axes, which are all of the changed ones that it reads, make a constraint hold."""
            return bool(places) and any(held.holds(constraint, values | changes) for _, changes in moves(places))

        for count in range(1, MOST_REFITTED + 1):
            found: list[tuple[int, tuple[int, ...], dict[str, Value]]] = []
            for places in combinations(range(len(self.axes)), count):
                looked += 1
                if all(mends(constraint, self._read(constraint, places)) for constraint in broken):
                    found += ((steps, tuple(-place for place in places), changes) for steps, changes in moves(places))
            for _, _, changes in sorted(found, key=lambda move: move[:2]):
                moved = values | changes
                if all(held.holds(constraint, moved) for constraint in self.constraints):
                    return Refit(Config.of(moved), looked)
        return Refit(None, looked)

    def _read(self, constraint: Constraint, places: tuple[int, ...]) -> tuple[int, ...]:
        """Those of these axes, by their places, that a constraint reads."""
        return places if constraint.axes is None else tuple(place for place in places if self.axes[place].name in constraint.axes)

    def configs(self, spec: KernelSpec, target: Target) -> Iterator[Config]:
        """Every config of the space that breaks no constraint and has no successor, in a fixed order."""
        whole = [constraint for constraint in self.constraints if constraint.axes is None]
        for indices in np.argwhere(self._allowed(spec, target)):
            config = Config.of({axis.name: axis.values[index] for axis, index in zip(self.axes, indices, strict=True)})
            if self.successor(config) == config and all(constraint.holds(config, spec, target) for constraint in whole):
                yield config

    def _allowed(self, spec: KernelSpec, target: Target) -> "NDArray[np.bool_]":
        """Whether each point of the space, an axis to a dimension, keeps the constraints that say which axes they read."""
        allowed = np.ones([len(axis.values) for axis in self.axes], dtype=bool)
        for constraint in self.constraints:
            if constraint.axes is None:
                continue
            read = [axis for axis in self.axes if axis.name in constraint.axes]
            points = product(*(axis.values for axis in read))
            names = [axis.name for axis in read]
            holds = [constraint.holds(Config.of(dict(zip(names, point, strict=True))), spec, target) for point in points]
            allowed &= np.reshape(holds, [len(axis.values) if axis in read else 1 for axis in self.axes])
        return allowed


class Refit(NamedTuple):
    """A config moved to where it keeps the constraints, None where nothing near does, and how many ways to change it were looked at."""

    config: Config | None
    looked: int


class Held:
    """Which constraints hold in the place of a spec on a target, by the values that each reads; computed once for all configs that share
    these."""

    def __init__(self, spec: KernelSpec, target: Target) -> None:
        self._spec, self._target = spec, target
        self._known: dict[tuple[Constraint, tuple[Value, ...]], bool] = {}

    def holds(self, constraint: Constraint, values: Mapping[str, Value]) -> bool:
        """Whether it does for a config of these values."""
        names = values.keys() if constraint.axes is None else constraint.axes
        read = (constraint, tuple(values[name] for name in names))
        if read not in self._known:
            self._known[read] = constraint.holds(Config.of({name: values[name] for name in names}), self._spec, self._target)
        return self._known[read]


def wave_efficiency(tiles: int, sms: int) -> float:
    """The share of `sms` that is busy while `tiles` equal tiles run in waves, one to an SM: 1 where the last wave is full."""
    return tiles / (math.ceil(tiles / sms) * sms)


@lru_cache(maxsize=4096)
def blocks_of_head(band: Band, rows: int, columns: int, block_rows: int, block_columns: int) -> int:
    """Blocks of columns that the tiles of rows of one head visit in all."""
    return int(blocks_of_tiles(band, rows, columns, block_rows, block_columns).sum())


def blocks_of_tiles(band: Band, rows: int, columns: int, block_rows: int, block_columns: int) -> "NDArray[np.int64]":
    """Blocks of columns that each tile of rows visits, in the order of the tiles."""
    first = np.arange(0, rows, block_rows, dtype=np.int64)
    last = np.minimum(first + block_rows, rows) - 1
    start = np.zeros_like(first) if band.left is None else np.maximum(0, first + band.diagonal - band.left)
    stop = np.full_like(first, columns) if band.right is None else np.minimum(columns, last + band.diagonal + band.right + 1)
    return np.where(stop > start, (stop - 1) // block_columns - start // block_columns + 1, 0)


def padded(head_dim: int) -> int:
    """The power of two (at least 16, the smallest matrix tile) that a kernel pads a head size to."""
    return max(16, next_power_of_two(head_dim))


def _named(name: str) -> Family:
    from flashtune.templates import family

    return family(name)
