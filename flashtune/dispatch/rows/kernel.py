"""A kernel on one device with its launches, prepared for each layout of its tensors, for packed, paged and coded calls."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashtune.core.code import launching
from flashtune.core.code.launches import Host
from flashtune.core.code.launching import LoadedKernel, Plan, Tensors
from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec, Variant
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.dtypes import KERNEL_DTYPES
from flashtune.core.records.plans import Place
from flashtune.core.records.results import TuningRecord
from flashtune.dispatch.call.sequences import Packed
from flashtune.dispatch.plans import driver, kernels
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.plans.misprediction import MISPREDICTIONS, Latch
from flashtune.dispatch.plans.program import COUNTS, LSE, Picker, Program, picker
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.state.context import Memo, current
from flashtune.templates.family import Family

MOST_PROGRAMS = 256
"""Prepared launches of a kernel, one for each layout: packed sequences have another number of rows at every step. Beyond it all are
dropped."""


_Result = TypeVar("_Result")


class NotBuilt(Exception):
    """A kernel that failed on this machine, as at a first call of a plan (`Kernels.tried`); who chooses passes over it from then on."""


class Repeat(NamedTuple):
    """Launches of a call and the layouts of its results: all that a call whose tensors have the same layouts needs."""

    program: Program
    like_query: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    of_lse: tuple[int, ...]
    """Shape of the LSE."""
    picked: Picker
    """Function that takes the addresses of the launches out of those of query, key, value, output, LSE, counts, and the others."""

    @classmethod
    def of(cls, program: Program, query: Tensor, out: Tensor, lse: Tensor, places: Sequence[tuple[int, int]]) -> "Repeat":
        """The repeat of a call; `places` pair a tensor's place among a launch's with its place in the order in which `run` gets them."""
        like_query = (out.shape, out.stride()) == (query.shape, query.stride())
        assert all(what.base.source < LSE for _, what, _ in program.layout.maps), "tensor maps are of query, key, value and output"
        # The output, the LSE and counts come between value and the others; behind these are tensors of functions, then temporaries.
        known = {place: place for place in range(COUNTS + 1)} | {place: COUNTS - 2 + source for place, source in places if source > 2}
        more = COUNTS - 1 + max(source for _, source in places) - len(Tensors._fields)
        picked = picker([more + source if source >= len(Tensors._fields) else known[source] for source in program.layout.sources])
        return cls(program, like_query, tuple(out.shape), out.stride(), tuple(lse.shape), picked)

    def run(self, query: Any, found: Sequence[int], mods: Sequence[int] = (), *, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Output and LSE, None without `with_lse`, of tensors at the addresses `found`; `mods` are the addresses of functions' tensors."""
        program, like_query, shape, strides, of_lse, picked = self
        out = torch.empty_like(query) if like_query else torch.empty_strided(shape, strides, dtype=query.dtype, device=query.device)
        lse, lse_at = None, 0
        if with_lse:
            lse = torch.empty(of_lse, dtype=torch.float32, device=query.device)
            lse_at = lse.data_ptr()
        program.run([*found[:3], out.data_ptr(), lse_at, 0, *found[3:], *mods], (), picked)
        return out, lse


class Kernel:
    """A kernel on one device. `choice` led to it; `variant` and `choice` are None for a pinned kernel.

    `latch` leads to the fallback kernel that serves once its softmax was mispredicted; None where it has none.
    """

    __slots__ = ("__weakref__", "_prepared", "choice", "code", "device", "latch", "memo", "tiles", "variant")

    def __init__(self, memo: Memo, variant: Variant | None, code: Code, device: torch.device, choice: Choice | None = None) -> None:
        self.memo, self.variant, self.code, self.device, self.choice = memo, variant, code, device, choice
        self._prepared: dict[Hashable, Program] = {}
        self.latch: Latch[Kernel] | None = None
        steps = [step for step in ("", "DQ_") if f"{step}BLOCK_M" in self.config.as_dict()]
        self.tiles = [(self.config.number(f"{step}BLOCK_M"), self.config.number(f"{step}BLOCK_N")) for step in steps]
        """Rows and columns of the tiles of each of its lists of blocks: those of the forward or of keys, then those of queries."""

    @property
    def record(self) -> TuningRecord | None:
        """The record that gave its config, if one did."""
        return None if self.choice is None else self.choice.record

    @property
    def spec(self) -> KernelSpec:
        """The spec that is compiled into it."""
        spec: KernelSpec = self._host.spec
        return spec

    @property
    def config(self) -> Config:
        """Its config."""
        config: Config = self._host.config
        return config

    def fall_back_to(self, family: Family, config: Config | None, key: Hashable) -> None:
        """Have the family's kernel with this config, if any, serve once the softmax was mispredicted; `key` names their counts."""
        if config is not None and self.code.module.counts_misses and driver.driven(self.device):
            counts = MISPREDICTIONS.of(self.device.index, (config, key))
            self.latch = Latch(counts, partial(self._other, family, config))

    def _other(self, family: Family, config: Config) -> "Kernel | None":
        """The fallback kernel; None, and a warning, where it can't be loaded."""
        variant, target = kernels.variant(family, self.spec, config), devices.target_of(self.device)
        with self.memo.lock:
            code = self.memo.kernels.code(family, variant, self.device, target, keeps=self.code.keep is not None)
        if isinstance(code, Code):
            return Kernel(self.memo, variant, code, self.device, self.choice)
        self.memo.warn_once(f"flashtune: a kernel mispredicts softmax, but its fallback {config.label()} can't run: {code}")
        return None

    @property
    def misses(self) -> tuple[int, int] | None:
        """Addresses where it counts mispredicting programs, where that has an effect."""
        # Read once: another thread may release the latch.
        state = None if self.latch is None else self.latch.state
        return None if state is None else state.addresses

    @property
    def _host(self) -> Host:
        host = self.code.module.host
        assert host is not None, "families of the package have a host side"
        return host

    @property
    def failed(self) -> str | None:
        """Reason why it isn't tried, where it failed before."""
        # A pinned kernel isn't passed over.
        why = None if self.variant is None else self.memo.kernels.failure(self.variant, self.device)
        return why if why is None or self.variant is None else f"{self.variant.template} can't be built here ({why})"

    def launch(
        self,
        words: Hashable,
        tensors: Sequence[Tensor | None],
        plan: Callable[[LoadedKernel], Plan | None],
        mods: Sequence[Tensor] = (),
        numbers: Sequence[int] = (),
    ) -> Program | None:
        """Launch on the tensors' device and its current stream; returns the prepared launches for tensors of this layout.

        `words` are all that a plan takes from a call beside layouts of its tensors. `tensors`, then `mods`, come in the order of the plan's
        sources; counts of tiles are found for each launch. `numbers` are the varying ones. None is returned
        where Triton launches. Raises NotBuilt where the kernel fails.
        """
        driven = driver.driven(self.device)
        key = (words, layout((*tensors, *mods))) if driven else None
        known = self._prepared.get(key)
        if known is None:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                if not driven:
                    self._tried(lambda: None, lambda: self._through_triton(plan, numbers))
                    return None
                known = self._built(key, plan)
        known.run(launching.addresses((*tensors, *mods)), numbers)
        return known

    def _built(self, key: Hashable, plan: Callable[[LoadedKernel], Plan | None]) -> Program:
        def build() -> None:
            if key in self._prepared:
                return
            if len(self._prepared) >= MOST_PROGRAMS:
                self._prepared.clear()
            program = self.code.program(plan)
            assert program is not None, "families of the package have a host side"
            if (state := None if self.latch is None else self.latch.state) is not None:
                # Launches of more programs need more mispredicting ones.
                state.programs = max(state.programs, program.programs)
            self._prepared[key] = program

        with self.memo.lock:
            return self._tried(build, lambda: self._prepared[key])

    def _tried(self, build: Callable[[], None], run: Callable[[], _Result]) -> _Result:
        found = self.memo.kernels.tried(self.variant, self.device, build, run)
        if found is None:
            raise NotBuilt(self.failed)
        return found

    def _through_triton(self, plan: Callable[[LoadedKernel], Plan | None], numbers: Sequence[int]) -> bool:
        planned = plan(self.code.module)
        assert planned is not None, "families of the package have a host side"
        arguments = launching.Arguments(planned, numbers)
        for one in planned.launches:
            function = getattr(self.code.module, one.kernel)
            function[one.grid](*arguments.of(one), **launching.compiler_options(one.options))
        return True


def place_of(packed: Packed, problem: Problem) -> Place:
    """Place of a packed call's pass in a plan; keys that aren't used may need another server."""
    return Place("packed", devices.slug_here(packed.query.device), problem, ("used keys",) * (packed.used is not None))


def note(memo: Memo, place: Place, found: Kernel | None, *, alone: bool = False) -> None:
    """Keep who serves a kind of calls: a kernel, None for PyTorch."""
    if memo.pinned or (found is not None and (found.variant is None or found.choice is None)):
        return
    more = {} if found is None or found.choice is None else {"fallback": found.choice.fallback}
    memo.met.note(place, None if found is None else found.variant, found, alone=alone, **more)


def layout(tensors: Sequence[Tensor | None]) -> Hashable:
    """All that a plan takes from tensors beside their addresses."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0) for x in tensors])


def served_here(device: torch.device, dtype: torch.dtype) -> bool:
    """True if kernels with plain pointers run on this device, on a GPU or in Triton's interpreter."""
    if KERNEL_DTYPES.get(dtype, "fp8") == "fp8" or not devices.TRITON:
        return False
    if device.type == "cpu":
        return devices.INTERPRETING and dtype is not torch.bfloat16
    return device.type == "cuda"


def loaded_kernel(choice: Choice, device: torch.device, target: Target, memo: Memo | None = None) -> Kernel | str:
    """The kernel of a choice, or the reason why it can't be loaded, in a `memo` or the one in force."""
    memo, family, config = memo or current(), choice.family, choice.config
    assert family is not None and config is not None, "a kernel is chosen"
    variant = kernels.variant(family, choice.spec, config)
    code = memo.kernels.code(family, variant, device, target, keeps=True)
    return code if isinstance(code, str) else Kernel(memo, variant, code, device, choice)
