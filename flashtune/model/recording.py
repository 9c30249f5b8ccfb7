"""Recording of a model's attention calls: the problems of each workload and how often a run calls them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flashtune import dispatch
from flashtune.core.problems.problem import Problem
from flashtune.dispatch.state.recorded import CALLS
from flashtune.model.runs import runner
from flashtune.model.sources import Subject
from flashtune.model.workloads import Workload


class Recording:
    """Attention that counts the problems of its calls: forwards, and backwards where gradients are requested."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self._attend = attend
        self._known: dict[Any, list[Problem]] = {}
        self.counts: Counter[Problem] = Counter()

    def __call__(self, *arguments: Any, **words: Any) -> torch.Tensor:
        """Result of the call."""
        key = (tuple(map(_signature, arguments)), tuple((name, _signature(word)) for name, word in words.items()), torch.is_grad_enabled())
        if key in self._known:
            out = self._attend(*arguments, **words)
        else:
            # A call is recorded when it is decided on: known plans are dropped first.
            CALLS.forget()
            dispatch.reload()
            out = self._attend(*arguments, **words)
            self._known[key] = CALLS.met()
        self.counts.update(self._known[key])
        return out


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value


@contextmanager
def recorded() -> Iterator[Counter[Problem]]:
    """Counts of the problems that `dispatch.attention` is called with meanwhile, by whoever looks it up in its module."""
    attend = dispatch.attention
    recording = Recording(attend)
    dispatch.attention = recording  # type: ignore[assignment]
    try:
        yield recording.counts
    finally:
        dispatch.attention = attend
        CALLS.forget()
        dispatch.reload()


def calls_of(subject: Subject, model: torch.nn.Module, workload: Workload, *, device: str, dtype: torch.dtype) -> Counter[Problem]:
    """Problems of one run of a workload with their numbers of calls, by a model that the subject built on `device` in `dtype`.

    On the device `meta` nothing is computed, so that any size is recorded in seconds; a model whose path depends on values needs another.
    A decoding workload is prefilled first, which isn't counted.
    """
    subject.attend(model, "tuned")
    inputs = subject.inputs(workload, device=device, dtype=dtype)
    run = runner(model, inputs, workload)
    with recorded() as counts:
        run()
    return counts
