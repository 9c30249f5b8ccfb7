"""FlexAttention on random inputs of a problem, by PyTorch's defaults and by a candidate's kernel options, compared and timed."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flashtune.core.band import diagonal_of
from flashtune.core.errors import InputError, first_line
from flashtune.core.flex_attention import band_mod, flex_arguments, soft_cap_mod
from flashtune.core.flex_options import extent
from flashtune.core.problem import Problem
from flashtune.core.results import Measurement
from flashtune.core.torch_attention import compiled_flex
from flashtune.core.torch_dtypes import TORCH_DTYPES
from flashtune.core.torch_private import set_options
from flashtune.tuner.timing.stopwatch import Stopwatch, orders
from flashtune.tuner.verify.inputs import SOFTCAP

Run = Callable[[], Any]

RELATIVE, OF_RMS = 0.02, 0.05
"""Largest difference from the defaults' numbers: a share of the number, and of the root mean squares of its row and of the tensor. Both are
rounded to the same type, and sum in another order."""


def mask_mod_of(problem: Problem, device: torch.device) -> Callable[..., Tensor] | None:
    """The mask of a problem's band and packed sequences (FlexAttention's document mask) as a function; None where all pairs are visible."""
    if problem.lengths is None or problem.batch == 1:
        return band_mod(problem.band) if problem.band.bounded else None
    sequences = problem.sequences()
    of_queries, of_keys = ([lengths[side] for lengths in sequences] for side in (0, 1))
    queries, keys = (_repeated(range(len(sequences)), lengths, device) for lengths in (of_queries, of_keys))
    # The distance of a query from a key counts from their own sequence's diagonal.
    begins_q, begins_k = ([0, *accumulate(lengths)][:-1] for lengths in (of_queries, of_keys))
    shifts = [diagonal_of(problem.features.alignment, n_q, n_kv) for n_q, n_kv in sequences]
    moved = [k - q + shift for q, k, shift in zip(begins_q, begins_k, shifts, strict=True)]
    of_band = band_mod(problem.band, _repeated(moved, of_queries, device))

    def of_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return queries[i] == keys[j]

    return (lambda b, h, i, j: of_document(b, h, i, j) & of_band(b, h, i, j)) if problem.band.bounded else of_document


def _repeated(values: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    found = torch.repeat_interleave(torch.tensor(list(values)), torch.tensor(list(lengths)))
    return found.to(device=device, dtype=torch.int32)


class FlexBench:
    """A problem's inputs, FlexAttention's results by the defaults, and one candidate at a time."""

    def __init__(self, problem: Problem, l2_bytes: int, device: str, seed: int, compiled: Callable[..., Any] | None = None) -> None:
        """`compiled` stands in for the compiled FlexAttention."""
        self.problem, self._device, self._l2_bytes = problem, torch.device(device), l2_bytes
        self.function = compiled or _compiled()
        together = 1 if problem.lengths is None else problem.batch
        batch, rows, keys = problem.batch // together, problem.n_q * together, extent(problem)[0]
        drawn = torch.Generator(self._device).manual_seed(seed)
        words: dict[str, Any] = {"dtype": TORCH_DTYPES[problem.dtype], "device": self._device, "generator": drawn}
        shapes = [(problem.heads, rows, problem.d), (problem.kv_heads, keys, problem.d), (problem.kv_heads, keys, problem.d_v)]
        trains = problem.direction == "bwd"
        self.leaves = [torch.randn(batch, *shape, **words).requires_grad_(trains) for shape in shapes]
        self.dout = torch.randn(batch, problem.heads, rows, problem.d_v, **words)
        mask, score = mask_mod_of(problem, self._device), soft_cap_mod(SOFTCAP if problem.features.softcap else 0.0)
        self.words = flex_arguments(mask, score, (None, None, rows, keys), self._device) | {"enable_gqa": problem.gqa_ratio > 1}
        self._results: dict[str, list[Tensor]] = {}
        self.default, failed = self.loaded(None)
        if failed:
            raise InputError(f"FlexAttention's defaults fail ({next(iter(failed.values()))}): give another problem")
        self.options: Mapping[str, int] | None = None
        self.candidate: dict[str, Run] = {}

    @cached_property
    def _watch(self) -> Stopwatch:
        return Stopwatch(self._device, self._l2_bytes)

    def loaded(self, options: Mapping[str, int] | None) -> tuple[dict[str, Run], dict[str, str]]:
        """The forward and, for a backward, the gradients of a kept forward, and whole steps (`call`), as functions, after a first run of
        each and a comparison with the defaults; and the reason for each kernel (`fwd`, `bwd`) that fails."""
        call = partial(self.function, *self.leaves, kernel_options=None if options is None else dict(options), **self.words)
        found: dict[str, Run] = {}
        failed: dict[str, str] = {}
        kept: list[Tensor] = []

        def gradients(out: Tensor, **words: Any) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, self.leaves, self.dout, **words)

        def forward() -> list[Tensor]:
            kept[:] = [call()]
            return [kept[0].detach()]

        steps: list[tuple[str, Run, Run]] = [("fwd", forward, call)]
        if self.problem.direction == "bwd":
            steps.append(("bwd", lambda: list(gradients(kept[0], retain_graph=True)), lambda: gradients(kept[0], retain_graph=True)))
        for which, first, run in steps:
            try:
                if (why := self._compared(which, first(), keep=options is None)) is None:
                    found[which] = run
                else:
                    failed[which] = why
            except Exception as error:
                if "CUDA error" in str(error):
                    raise
                # Compilers and launches fail variously.
                failed[which] = first_line(error)
        if not failed:
            found["call"] = (lambda: gradients(call())) if self.problem.direction == "bwd" else call
        return found, failed

    def _compared(self, which: str, found: list[Tensor], *, keep: bool) -> str | None:
        """Reason why results differ from the defaults', which are kept."""
        if keep:
            self._results[which] = found
            return None
        for one, other in zip(found, self._results[which], strict=True):
            wanted = other.float()
            squares = wanted.square()
            # Rows that see few keys have larger numbers, and gradients of some are differences of equal ones.
            bound = OF_RMS * (squares.mean(-1, keepdim=True).sqrt() + squares.mean().sqrt()) + RELATIVE * wanted.abs()
            if not bool(((one.float() - wanted).abs() <= bound).all()):
                return "its numbers differ from those of FlexAttention's defaults"
        return None

    def load(self, options: Mapping[str, int]) -> dict[str, str]:
        """Compile a candidate, in place of the one before; the reason for each kernel that fails."""
        self.candidate.clear()
        self.candidate, failed = self.loaded(options)
        self.options = options
        return failed

    def times(self, budget_s: float, *, calls: bool) -> dict[str, tuple[Measurement, Measurement]]:
        """Times of the candidate and of the defaults, interleaved: on the GPU alone of each kernel, and with `calls` of whole calls, or
        training steps, host included."""
        both = {which: [runs[which] for runs in (self.candidate, self.default)] for which in self.candidate}
        found = {which: self._watch.samples(runs, budget_s=budget_s) for which, runs in both.items() if which != "call"}
        if calls and "call" in both:
            found["call"] = eager(both["call"], budget_s, torch.cuda.synchronize)
        return {which: (Measurement.of(times[0]), Measurement.of(times[1])) for which, times in found.items()}


def eager(runs: Sequence[Run], budget_s: float, wait: Callable[[], object]) -> list[list[float]]:
    """Microseconds of back-to-back calls of each run, in rounds of changing order: of the slower of host and GPU."""
    found: list[list[float]] = [[] for _ in runs]
    repeats, begun = 1, time.perf_counter()
    for turn, order in enumerate(orders(len(runs), LONGEST_RACE)):
        for place in order:
            wait()
            at = time.perf_counter()
            for _ in range(repeats):
                runs[place]()
            wait()
            found[place].append((time.perf_counter() - at) / repeats * 1e6)
        if turn == 0:
            repeats = max(1, int(READING_US / max(times[0] for times in found)))
        if turn >= SHORTEST_RACE and time.perf_counter() - begun > budget_s:
            break
    # The first round also waits for clocks and caches.
    return [times[1:] for times in found]


READING_US = 3000.0
"""Shortest interval that is timed, in microseconds."""
SHORTEST_RACE, LONGEST_RACE = 12, 200
"""Rounds of a race of whole calls."""


def _compiled() -> Callable[..., Any]:
    """The compiled FlexAttention of a process that compiles many candidates, itself, and keeps what a backward needs."""
    set_options({"compile_threads": 1, "recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20, "donated_buffer": False})
    with suppress(ImportError):
        from tqdm import tqdm  # type: ignore[import-untyped]

        # PyTorch's progress bars would make one for all processes, which a killed process leaves behind.
        tqdm.set_lock(threading.RLock())
    return compiled_flex(dynamic=False)
