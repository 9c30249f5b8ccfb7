"""A template family: its axes as data, its constraints as named predicates, and the problems it can serve.

The rendered file of a family is a module of kernels. Their host side is Python of the package (`Family.host`): the tensors a kernel
takes, and its launches as a pure function of shapes, strides and numbers (`flashtune.core.code.launches`). `flashtune.templates.loading`
joins both.
`flashtune.core.problems.reference` defines the numbers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flashtune.core.code.launches import Host
from flashtune.core.gpu.target import Target
from flashtune.core.problems.band import Band
from flashtune.core.problems.config import Config, Direction, KernelSpec, Value
from flashtune.core.problems.problem import MAX_HEAD_DIM, Problem, unfit_heads, wide_heads
from flashtune.core.records.results import CompileFacts
from flashtune.core.system.errors import InputError
from flashtune.templates.mods.known import known, unknown, whole_tiles

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Axis(NamedTuple):
    """One dimension of the search space; `why` is its trade-off in a line."""

    name: str
    values: tuple[Value, ...]
    why: str


class Constraint(NamedTuple):
    """A named predicate over (config, spec, target): True where the candidate may be built.

    `axes` are the axes that it reads: enumeration calls it once for each combination of them, with configs
    of these alone. None where it must see whole configs.
    """

    name: str
    holds: Callable[[Config, KernelSpec, Target], bool]
    why: str
    axes: tuple[str, ...] | None = None


def constraint(*axes: str) -> Callable[[Callable[[Config, KernelSpec, Target], bool]], Constraint]:
    """Decorator of a predicate: the `Constraint` of its name, with its docstring as the reason; without `axes` it sees whole configs."""
    return lambda holds: Constraint(name=holds.__name__, holds=holds, why=holds.__doc__ or "", axes=axes or None)


FLAGS = frozenset(("causal", "dropout", "softcap", "tf32", "alibi", "sinks", "packed", "dbias", "dslopes"))
"""Flags that a family has unless it declares others, so that no template ignores one that it wasn't written for."""


def lies_in_rows(problem: Problem) -> str | None:
    """The reason why kernels without a table can't read a problem's keys, or None."""
    return "it reads keys in rows, not in pages" if problem.features.page else None


MOST_REFITTED = 4
"""Most axes that refitting a config changes; 34 of 4000 pairs of shipped records needed more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """A template with its search space.

    `direction` is the pass that it computes, `flags` those that it serves, `largest` its largest head size, and `functions` is True if it
    takes a mask and a score as code. `refuses` returns any other reason why a spec can't be served on a target, or None where it can, and
    `reads` the reason why its kernels can't read where a problem's keys lie, in rows or in pages.
    `suits` returns the reason why a problem's sizes are better left to other families, or None where this one competes. It is a heuristic
    for sizes without measurements: it selects the families that a search tries unless they are named, the default on offer, and near
    records of other sizes. A measured record of exactly the problem's key is served in any case.
    `outruns_torch` names the committed run in which every config timed took less time than PyTorch at all sizes like a problem's: there the
    default config runs calls without a record of their own. It is None elsewhere.
    `tried_first` are configs worth trying first (the field's published tiles, say), in or out of the constraints; of those that keep them
    `pick` takes a safe one for use without tuning, and `at_sizes`, where there is one, that of a problem. `interpretable` is True if
    Triton's interpreter runs it. `folder` is that of its template.
    `layout` makes the facts derived from a spec and a config; the template knows them as `layout`.
    `resized` adapts a config to a problem's sizes on a target: searches try no other, and a config that serves another problem is moved
    to it. It keeps the constraints that the config keeps.
    `path_axes` are the axes that change the rendered code: configs that agree in them share a code path.
    `repeatable` is True if launches on equal inputs write equal bits, wherever scores are within float32 of one another (decision 0009):
    not with atomic sums in memory, whose order varies. Verification checks it, and deterministic calls require it.
    `host` makes the host side of its kernels; None for a template whose text defines that itself (`flashtune.templates.loading`).
    `uncompilable` returns the reason why the installed Triton can't compile a kernel, or None where it can. Machine code that there is
    serves in any case.
    `expected` estimates the compiler's resource usage of a config; searches order candidates by it.
    """

    name: str
    folder: str = ""
    axes: tuple[Axis, ...]
    constraints: tuple[Constraint, ...]
    refuses: Callable[[KernelSpec, Target], str | None]
    tried_first: Callable[[KernelSpec, Target], list[Config]]
    interpretable: bool
    pick: Callable[[list[Config], KernelSpec, Target], Config] = lambda starts, spec, target: starts[0]
    direction: Direction = "fwd"
    largest: int = MAX_HEAD_DIM
    flags: frozenset[str] = FLAGS
    functions: bool = False
    suits: Callable[[Problem, Target], str | None] = lambda problem, target: None
    outruns_torch: Callable[[Problem, Target], str | None] = lambda problem, target: None
    reads: Callable[[Problem], str | None] = lies_in_rows
    at_sizes: Callable[[Problem, Target], Config] | None = None
    layout: Callable[[KernelSpec, Config], object] = lambda spec, config: None
    resized: Callable[[Config, Problem, Target], Config] = lambda config, problem, target: config
    path_axes: tuple[str, ...] = field(default=())
    host: Callable[[KernelSpec, Config], Host] | None = None
    repeatable: bool = True
    uncompilable: Callable[[KernelSpec, Config], str | None] = lambda spec, config: None
    expected: Callable[[Config, KernelSpec, Target], CompileFacts | None] = lambda config, spec, target: None

    def __reduce__(self) -> tuple[Callable[[str], "Family"], tuple[str]]:
        """Pickling by name, since families consist of functions."""
        return _named, (self.name,)

    @property
    def template_file(self) -> str:
        """The Jinja file, relative to the templates folder."""
        return f"{self.folder}/{self.name}.py.jinja" if self.folder else f"{self.name}.py.jinja"

    def supports(self, spec: KernelSpec, target: Target) -> str | None:
        """The reason why a spec can't be served on a target, or None where it can."""
        if spec.direction != self.direction:
            return f"{self.name} computes the {'forward' if self.direction == 'fwd' else 'backward'} pass, not {spec.direction!r}"
        if (why := unfit_heads(spec.d, spec.d_v, self.largest, f"kernels of {self.name}")) is not None:
            return why
        if lacking := [name for name, on in spec.flags().items() if on and name not in self.flags]:
            return f"{self.name} has no {lacking[0]}"
        if spec.mods and (not self.functions or spec.dtype == "fp8"):
            return f"{self.name} takes no mask and no score as code" + " with fp8" * self.functions
        if spec.mods and spec.mods not in known():
            return unknown(spec.mods)
        if (why := self.refuses(spec, target)) is None and wide_heads(spec.d, spec.d_v) and not self.starts(spec, target):
            why = f"{self.name} has no tile for head sizes of {spec.d} and {spec.d_v} that fits into {target.name}"
        return why

    def starts(self, spec: KernelSpec, target: Target) -> list[Config]:
        """Configs worth trying first that keep the constraints, of whole tiles in the blocks of a mask by lists where there are some."""
        found = [config for config in self.tried_first(spec, target) if self.violated(config, spec, target) is None]
        return [config for config in found if whole_tiles(config, spec.mods)] or found

    def default(self, spec: KernelSpec, target: Target) -> Config:
        """A safe config for use without tuning, one of `starts`."""
        return self.pick(self.starts(spec, target), spec, target)

    def default_of(self, problem: Problem, target: Target) -> Config:
        """The default of a problem's sizes, where they matter."""
        return self.default(problem.spec(), target) if self.at_sizes is None else self.at_sizes(problem, target)

    def violated(self, config: Config, spec: KernelSpec, target: Target) -> Constraint | None:
        """The first constraint that this config breaks on this target, or None."""
        return next((c for c in self.constraints if not c.holds(config, spec, target)), None)

    def refusal(self, problem: Problem, spec: KernelSpec, target: Target) -> str | None:
        """The reason why this family can't serve a problem, or doesn't suit its sizes; None where it does. `spec` is the problem's."""
        return self.inability(problem, spec, target) or self.suits(problem, target)

    def inability(self, problem: Problem, spec: KernelSpec, target: Target) -> str | None:
        """The reason why this family can't serve a problem at any sizes; None where it can."""
        return self.reads(problem) or self.supports(spec, target)

    def unfit(self, config: Config, spec: KernelSpec, target: Target) -> str | None:
        """The reason why a config of the declared space can't serve `spec` on `target`, or None where it can."""
        if (why := self.supports(spec, target)) is not None:
            return why
        broken = self.violated(config, spec, target)
        return None if broken is None else f"{config.label()} breaks {broken.name}: {broken.why}"

    def validate(self, config: Config) -> None:
        """Raise InputError unless `config` has exactly the declared axes with declared values (types included)."""
        declared = {axis.name: axis for axis in self.axes}
        values = config.as_dict()
        if strange := sorted(values.keys() - declared.keys()):
            raise InputError(
                f"config of {self.name} has the undeclared axis {strange[0]!r}: it was not written by this version of flashtune"
            )
        for name, axis in declared.items():
            if name not in values:
                raise InputError(f"config of {self.name} lacks the axis {name!r}: it was not written by this version of flashtune")
            if not any(values[name] == value and type(values[name]) is type(value) for value in axis.values):
                raise InputError(
                    f"{name}={values[name]!r} is outside the declared space of {self.name}: {', '.join(map(repr, axis.values))}"
                )

    def refitted(self, config: Config, spec: KernelSpec, target: Target, checked: "ConstraintCache | None" = None) -> Config | None:
        """The valid config nearest to one of the declared space: itself, or one with as few axes changed as possible, by as few steps.

        Among equals the axes that are declared first, which matter most, stay. None where no valid config has at most MOST_REFITTED
        axes changed. `checked` caches constraints for several configs.
        """
        return self.refit(config, spec, target, checked or ConstraintCache(spec, target)).config

    def refit(self, config: Config, spec: KernelSpec, target: Target, checked: "ConstraintCache") -> "Refit":
        """The result of `refitted` with its work, which doesn't depend on the contents of `checked`."""
        values = config.as_dict()
        broken = [constraint for constraint in self.constraints if not checked.holds(constraint, values)]
        if not broken:
            return Refit(config, 0)
        looked = 0
        at = [axis.values.index(config[axis.name]) for axis in self.axes]
        others = [
            [(abs(i - now), value) for i, value in enumerate(axis.values) if i != now] for axis, now in zip(self.axes, at, strict=True)
        ]

        def moves(places: Sequence[int]) -> Iterator[tuple[int, dict[str, Value]]]:
            """All other values of these axes, with their numbers of steps."""
            nonlocal looked
            for made in product(*(others[place] for place in places)):
                looked += 1
                yield (
                    sum(steps for steps, _ in made),
                    {self.axes[place].name: value for place, (_, value) in zip(places, made, strict=True)},
                )

        @cache
        def mends(constraint: Constraint, places: tuple[int, ...]) -> bool:
            """True if other values of these axes, all the changed ones that it reads, satisfy a constraint."""
            return bool(places) and any(checked.holds(constraint, values | changes) for _, changes in moves(places))

        for count in range(1, MOST_REFITTED + 1):
            found: list[tuple[int, tuple[int, ...], dict[str, Value]]] = []
            for places in combinations(range(len(self.axes)), count):
                looked += 1
                if all(mends(constraint, self._read(constraint, places)) for constraint in broken):
                    found += ((steps, tuple(-place for place in places), changes) for steps, changes in moves(places))
            for _, _, changes in sorted(found, key=lambda move: move[:2]):
                moved = values | changes
                if all(checked.holds(constraint, moved) for constraint in self.constraints):
                    return Refit(Config.of(moved), looked)
        return Refit(None, looked)

    def _read(self, constraint: Constraint, places: tuple[int, ...]) -> tuple[int, ...]:
        """The axes among these that a constraint reads, by index."""
        return places if constraint.axes is None else tuple(place for place in places if self.axes[place].name in constraint.axes)

    def configs(self, spec: KernelSpec, target: Target) -> Iterator[Config]:
        """Every config of the space that breaks no constraint, in a fixed order."""
        whole = [constraint for constraint in self.constraints if constraint.axes is None]
        for indices in np.argwhere(self._allowed(spec, target)):
            config = Config.of({axis.name: axis.values[index] for axis, index in zip(self.axes, indices, strict=True)})
            if all(constraint.holds(config, spec, target) for constraint in whole):
                yield config

    def _allowed(self, spec: KernelSpec, target: Target) -> "NDArray[np.bool_]":
        """Mask of the space, an axis to a dimension: True where a point keeps the constraints with declared `axes`."""
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
    """A config moved to keep the constraints, None where no near one does, and the number of changes that were tried."""

    config: Config | None
    looked: int


class ConstraintCache:
    """Cache of constraints for a spec on a target, by the axis values that each reads."""

    def __init__(self, spec: KernelSpec, target: Target) -> None:
        self._spec, self._target = spec, target
        self._known: dict[tuple[Constraint, tuple[Value, ...]], bool] = {}

    def holds(self, constraint: Constraint, values: Mapping[str, Value]) -> bool:
        """True if the constraint holds for a config of these values."""
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
    """Blocks of columns that the row tiles of one head visit in all."""
    return int(blocks_of_tiles(band, rows, columns, block_rows, block_columns).sum())


@lru_cache(maxsize=4096)
def blocks_of_problem(problem: Problem, block_m: int, block_n: int, *, of_keys: bool = False) -> float:
    """Blocks that the tiles of one head visit, of queries or (`of_keys`) of keys; of packed sequences the mean of all."""
    visited = 0
    for one, count in problem.shapes():
        sizes = (one.band.turned, one.n_kv, one.n_q, block_n, block_m) if of_keys else (one.band, one.n_q, one.n_kv, block_m, block_n)
        visited += count * blocks_of_head(*sizes)
    return visited / problem.batch


def blocks_of_tiles(band: Band, rows: int, columns: int, block_rows: int, block_columns: int) -> "NDArray[np.int64]":
    """Blocks of columns that each row tile visits, in order."""
    first = np.arange(0, rows, block_rows, dtype=np.int64)
    last = np.minimum(first + block_rows, rows) - 1
    start = np.zeros_like(first) if band.left is None else np.maximum(0, first + band.diagonal - band.left)
    stop = np.full_like(first, columns) if band.right is None else np.minimum(columns, last + band.diagonal + band.right + 1)
    return np.where(stop > start, (stop - 1) // block_columns - start // block_columns + 1, 0)


def _named(name: str) -> Family:
    from flashtune.templates import family

    return family(name)
