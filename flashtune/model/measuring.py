"""Comparison of a whole model with tuned attention and with PyTorch's: outputs against float32, and times of interleaved runs."""

import copy
import gc
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from flashtune.core.pytorch.attention import BACKENDS
from flashtune.core.system.errors import first_line
from flashtune.model.runs import Run, runner
from flashtune.model.sources import Subject
from flashtune.model.workloads import Workload

CHECKED_BATCH = 2
"""Sequences at most of a check: float32 and eager attention need several times the memory of a run."""

SMALL = 1 / 64
"""Share of a model's largest gradient under which a tensor's own largest one is no measure of its errors."""

ALLOWED = 2.0
"""Error of tuned attention over that of PyTorch's, both against eager attention in float32, up to which outputs count as right."""

LEAST_ROUNDS, MOST_ROUNDS = 10, 60
"""Timings of each implementation: a host's own times vary, so that short runs take many."""

ROUNDS_S = 6.0
"""Seconds after which no further round of a workload begins, beyond the least number."""

LEAST_S = 0.02
"""Least time of one timing, in seconds: shorter runs are repeated within it."""

MOST_REPEATS = 20

FUSED = ("flash", "cudnn", "efficient")
"""PyTorch's fused backends, with each of which the whole model is timed."""


@dataclass(frozen=True, slots=True)
class Check:
    """Errors of a model's outputs, and of its gradients where it trains, against eager attention in float32.

    Each is the largest error of a tensor over its largest value. Gradients that are small beside others, as that of a key's bias, which is
    0 but for rounding, count over a `SMALL` part of the largest one.
    """

    tuned: float
    torch: float
    allowed: float

    @property
    def right(self) -> bool:
        """True if the error is within what is allowed."""
        return self.tuned <= self.allowed


class StandardFails(RuntimeError):
    """Failure of a model with PyTorch's own attention, without which there is nothing to compare with."""


def check(subject: Subject, model: torch.nn.Module, workload: Workload, *, device: str, dtype: torch.dtype) -> Check:
    """Errors of one workload, with a smaller batch where it is large; raises StandardFails where PyTorch's attention can't compute it."""
    small = replace(workload, batch=min(workload.batch, CHECKED_BATCH))
    inputs = subject.inputs(small, device=device, dtype=dtype)
    exact = copy.deepcopy(model).float()
    subject.attend(exact, "eager")
    wide = {key: _widened(value) for key, value in inputs.items()}
    expected = _results(exact, wide, small)
    del exact
    errors = {}
    for implementation in (subject.standard, "tuned"):
        subject.attend(model, implementation)
        try:
            found = _results(model, inputs, small)
        except RuntimeError as error:
            if implementation == "tuned" or isinstance(error, torch.OutOfMemoryError):
                raise
            raise StandardFails(first_line(error)) from error
        errors[implementation] = _largest_error(found, expected)
    allowed = ALLOWED * errors[subject.standard] + torch.finfo(dtype).eps
    return Check(tuned=errors["tuned"], torch=errors[subject.standard], allowed=allowed)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, Mapping):
        return {key: _widened(one) for key, one in value.items()}
    return value


def _results(model: torch.nn.Module, inputs: dict[str, Any], workload: Workload) -> list[torch.Tensor]:
    """Output of one run, without what padding gave, and gradients of all parameters where it trains."""
    out = runner(model, inputs, workload)()
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape == out.shape[:2]:
        out = out[mask.bool()]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None] if workload.trains else []
    for parameter in model.parameters():
        parameter.grad = None
    return [out, *gradients]


def _largest_error(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest error of an output, the first of each list, and of gradients, those that follow."""
    largest = [one.abs().max().item() if one.numel() else 0.0 for one in expected]
    least = SMALL * max(largest[1:], default=0.0)
    errors = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        gap = (one.float() - other).abs().max().item() if other.numel() else 0.0
        # NaN counts as infinitely wrong.
        errors.append(gap / max(largest[number], least if number else 0.0, 1e-30) if gap == gap else float("inf"))
    return max(errors)


@dataclass(frozen=True, slots=True)
class Times:
    """Median times of one run of a workload, in milliseconds: with our attention, with PyTorch's, and with each of its backends first."""

    tuned_ms: float
    torch_ms: float
    backends_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def speedup(self) -> float:
        """PyTorch's time over ours."""
        return self.torch_ms / self.tuned_ms

    @property
    def best_backend(self) -> str:
        """The single backend with which the whole model takes the least time; `torch` is PyTorch's own choice at each call."""
        times = {"torch": self.torch_ms, **self.backends_ms}
        return min(times, key=lambda name: times[name])

    @property
    def against_best(self) -> float:
        """The least time with a single backend over ours."""
        return min((self.torch_ms, *self.backends_ms.values())) / self.tuned_ms


def measure(subject: Subject, model: torch.nn.Module, workload: Workload, *, device: str, dtype: torch.dtype) -> Times:
    """Times of a workload on a device, host included: runs with PyTorch's attention, each of its backends first, and ours take turns.

    A model without PyTorch's fused attention is compared with its own eager one. Calls that a backend doesn't take go to the next in
    PyTorch's order; a backend with which the model fails is left out.
    """
    inputs = subject.inputs(workload, device=device, dtype=dtype)
    backends = FUSED if subject.standard == "sdpa" else ()
    times: dict[str, list[float]] = {subject.standard: [], "tuned": [], **{name: [] for name in backends}}
    run = runner(model, inputs, workload)

    def alone(implementation: str) -> AbstractContextManager[Any]:
        subject.attend(model, subject.standard if implementation in backends else implementation)
        if implementation not in backends:
            return nullcontext()
        return sdpa_kernel([BACKENDS[name] for name in (implementation, *FUSED, "math")], set_priority=True)

    with _without_collections():
        repeats = 1
        for implementation in list(times):
            with alone(implementation):
                try:
                    run()
                    repeats = max(repeats, min(MOST_REPEATS, int(LEAST_S / max(_timed(run, 1), 1e-6)) + 1))
                except RuntimeError as error:
                    if implementation == subject.standard and not isinstance(error, torch.OutOfMemoryError):
                        raise StandardFails(first_line(error)) from error
                    if implementation not in backends:
                        raise
                    del times[implementation]
        began = time.perf_counter()
        order, shuffled = list(times), random.Random(0)
        for turn in range(MOST_ROUNDS):
            if turn >= LEAST_ROUNDS and time.perf_counter() - began > ROUNDS_S:
                break
            # What ran before a timing has its share in it.
            shuffled.shuffle(order)
            for implementation in order:
                with alone(implementation):
                    times[implementation].append(_timed(run, repeats))
    ms = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    return Times(ms.pop("tuned"), ms.pop(subject.standard), ms)


def _timed(run: Run, repeats: int) -> float:
    prepared = [run.prepare() for _ in range(repeats)]
    gc.collect()
    _synchronize()
    started = time.perf_counter()
    for one in prepared:
        run.step(one)
    _synchronize()
    return (time.perf_counter() - started) / repeats


@contextmanager
def _without_collections() -> Iterator[None]:
    """Context without garbage collections but those asked for, which look at the objects alone that it makes: one in the midst of a timing
    would take longer than implementations differ by."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
