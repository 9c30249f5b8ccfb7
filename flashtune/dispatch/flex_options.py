"""Kernel options of PyTorch's FlexAttention for a call: those of the nearest measured records, tried once, else PyTorch's defaults."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core import devices
from flashtune.core.errors import first_line
from flashtune.core.flex_options import SHORTEST, extent, fits, part
from flashtune.core.problem import ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.core.torch_dtypes import KERNEL_DTYPES
from flashtune.dispatch.plan import capturing

FARTHEST = 3.0
"""Largest distance of a record: octaves of keys, and of the share of visible pairs, and one for a record of the other direction."""

MOST_SIGNATURES = 1024

Run = Callable[[dict[str, int] | None, Tensor, Tensor, Tensor], Any]
"""FlexAttention of query, key and value with these kernel options (None: PyTorch's defaults)."""


class Tuned(NamedTuple):
    """Kernel options, None for PyTorch's defaults, and their origin in a sentence's part; empty where there is nothing to say."""

    options: dict[str, int] | None = None
    note: str = ""


class TunedOptions:
    """Options by signature of a call, looked up once; those that fail on a call give way to PyTorch's defaults from then on."""

    devices: tuple[str, ...] = ("cuda",)

    def __init__(self, library: Callable[[], Mapping[ProblemKey, Sequence[TuningRecord]]], warn: Callable[[str], None]) -> None:
        self._library, self._warn = library, warn
        self._known: dict[Hashable, Tuned] = {}
        self._records: dict[Hashable, list[TuningRecord]] = {}

    def clear(self) -> None:
        """Forget what was looked up, and what failed."""
        self._known.clear()
        self._records.clear()

    def run(self, call: Run, query: Tensor, key: Tensor, value: Tensor, block_mask: Any = None, score_mod: Any = None) -> Any:
        """Result of `call` with the options of its signature.

        The first call of a signature runs twice, forward and backward where gradients are needed, since options fail at compilation: for
        shared memory, say. Under graph capture a signature that wasn't met before has PyTorch's defaults.
        """
        if query.device.type not in self.devices:
            return call(None, query, key, value)
        place = _signature(query, key, value, block_mask, score_mod)
        tuned = self._known.get(place)
        if tuned is None:
            if capturing(query.device):
                return call(None, query, key, value)
            tuned = self.chosen(query, key, value, block_mask)
            if tuned.options is not None and (error := _failure(call, tuned.options, query, key, value)) is not None:
                # Raises where the options aren't the cause.
                found = call(None, query, key, value)
                self._keep(place, Tuned(note=f"the defaults, since the tuned options failed: {error}"))
                self._warn(f"flashtune: PyTorch's FlexAttention fails with {tuned.note}, so that its defaults serve such calls: {error}")
                return found
            self._keep(place, tuned)
        return call(tuned.options, query, key, value)

    def note(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any = None, score_mod: Any = None) -> str:
        """The origin of a call's options, for explanations; empty where PyTorch's defaults serve."""
        if query.device.type not in self.devices:
            return ""
        found = self._known.get(_signature(query, key, value, block_mask, score_mod))
        return (found or self.chosen(query, key, value, block_mask)).note

    def chosen(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tuned:
        """Options of the nearest records of this GPU, element type and head sizes: of the forward, and of the backward where gradients are
        needed; waits for the GPU, which knows the mask's sparsity."""
        dtype = KERNEL_DTYPES.get(query.dtype)
        # Fewer queries have a kernel of their own, whose tiles differ.
        if dtype is None or query.dim() != 4 or query.shape[2] < SHORTEST or not key.numel():
            return Tuned()
        gpu = devices.target_of(query.device).slug
        records = self._tuned(gpu, dtype, query.shape[3], value.shape[3])
        if not records:
            return Tuned()
        visible = 1.0 if block_mask is None else max(1e-6, 1.0 - block_mask.sparsity() / 100.0)
        blocks = (SHORTEST, SHORTEST) if block_mask is None else block_mask.BLOCK_SIZE
        wanted = ("fwd", "bwd") if _trains(query, key, value) else ("fwd",)
        options: dict[str, int] = {}
        origins: list[str] = []
        for which in wanted:
            near = sorted(_near(records, which, wanted[-1], key.shape[2], visible), key=lambda one: one[0])
            for _, record in near:
                found = part(record.outcome.config, which)
                if fits(found, blocks):
                    options |= found
                    origins.append(f"{record.problem.label()} ({record.origin})")
                    break
        if not options:
            return Tuned()
        listed = " ".join(f"{name}={value}" for name, value in options.items())
        return Tuned(options, f"kernel options {listed} of the record of {' and '.join(dict.fromkeys(origins))}")

    def _tuned(self, gpu: str, dtype: str, d: int, d_v: int) -> list[TuningRecord]:
        """Records with tuned options for a GPU, element type and head sizes, the preferred ones of a key first."""
        wanted = (gpu, dtype, d, d_v)
        if wanted not in self._records:
            library = self._library()
            keys = [key for key in library if (key.gpu, key.dtype, key.d, key.d_v) == wanted]
            self._records[wanted] = [record for key in keys for record in library[key] if record.tunes_flex]
        return self._records[wanted]

    def _keep(self, place: Hashable, tuned: Tuned) -> None:
        if len(self._known) >= MOST_SIGNATURES:
            self._known.clear()
        self._known[place] = tuned


def _near(records: Sequence[TuningRecord], which: str, direction: str, keys: int, visible: float) -> Iterator[tuple[float, TuningRecord]]:
    """Distances of the records that have options of a kernel, up to `FARTHEST`, for a call with so many keys and visible pairs."""
    for record in records:
        if part(record.outcome.config, which):
            theirs, share = extent(record.problem)
            away = abs(math.log2(theirs / keys)) + abs(math.log2(share / visible)) + (record.key.direction != direction)
            if away <= FARTHEST:
                yield away, record


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _signature(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, score_mod: Any) -> Hashable:
    """Key of a call's options: sizes, types, gradients, blocks, and the code of its functions, on which it depends whether they compile."""
    mask = None if block_mask is None else (tuple(block_mask.BLOCK_SIZE), getattr(block_mask.mask_mod, "__code__", None))
    code = getattr(score_mod, "__code__", score_mod is None)
    return query.shape, key.shape, value.shape, query.dtype, query.device, _trains(query, key, value), mask, code


def _failure(call: Run, options: dict[str, int], *tensors: Tensor) -> str | None:
    """The error of a first run with these options, forward and backward where gradients are needed, in one line; None where it succeeds."""
    # Compiled code is for one state of gradients, and the call's own run is to find it.
    copies = [x.detach().requires_grad_() if x.requires_grad else x.detach() for x in tensors]
    try:
        found = call(options, *copies)
        out = found[0] if isinstance(found, tuple) else found
        if _trains(*copies):
            torch.autograd.grad(out, [x for x in copies if x.requires_grad], torch.zeros_like(out), allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # The compiler's errors are of many types.
        return first_line(error)
    return None
