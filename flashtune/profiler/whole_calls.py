"""Times of whole calls of `attention` and PyTorch's function in an eager loop, host included; of a backward whole training steps.

A training step is the forward and its gradients, since kernels serve both or neither.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from flashtune.core.errors import FlashtuneError
from flashtune.core.launching import LoadedKernel
from flashtune.core.problem import Problem
from flashtune.core.results import Fate
from flashtune.core.target import Target
from flashtune.dispatch import api
from flashtune.dispatch.resolve import layers
from flashtune.dispatch.resolve.memo import Memo
from flashtune.templates.loading import load_kernel
from flashtune.tuner.children import tasks
from flashtune.tuner.replies import Called, Failed
from flashtune.tuner.timing.baseline import framework_call
from flashtune.tuner.verify.inputs import Inputs

Call = Callable[[], object]


def attention_call(inputs: Inputs) -> Call:
    """Function that calls `dispatch.attention` on these inputs, and for a backward problem computes its gradients."""
    parameters, mask = inputs.parameters, inputs.mask
    kwargs: dict[str, Any] = {
        "scale": parameters.scale,
        "enable_gqa": inputs.problem.gqa_ratio > 1,
        "window": (parameters.band.left, parameters.band.right),
        "causal_alignment": "bottom_right" if parameters.band.diagonal else "top_left",
        "softcap": parameters.softcap,
        **parameters.per_head(),
    }
    if inputs.problem.direction == "fwd":
        return lambda: api.attention(inputs.q, inputs.k, inputs.v, mask, parameters.dropout_p, **kwargs)
    q, k, v = leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if mask is not None and inputs.problem.features.dbias:
        mask = mask.detach().requires_grad_()
        leaves = [*leaves, mask]
    if inputs.problem.features.dslopes:
        kwargs["alibi_slopes"] = kwargs["alibi_slopes"].detach().requires_grad_()
        leaves = [*leaves, kwargs["alibi_slopes"]]

    def step() -> object:
        with torch.enable_grad():
            out = api.attention(q, k, v, mask, parameters.dropout_p, **kwargs)
        return torch.autograd.grad(out, leaves, inputs.operands["dout"])

    return step


def time_calls(sources: list[tasks.Source], problem: Problem, target: Target, seed: int, budget_s: float) -> Called | Failed:
    """Task that times whole calls of some kernels and of PyTorch, in the process with the problem's inputs on its GPU."""
    try:
        inputs = tasks.inputs_on_device(problem, target, seed)
        modules = [load_kernel(source.text, source.stem) for source in sources]
        times = call_times(modules, inputs, budget_s=budget_s)
    except (FlashtuneError, RuntimeError, ValueError, TypeError) as error:
        return Failed(fate=Fate.RUNTIME, reason=tasks.one_line(error))
    return Called(times=tuple(times[: len(sources)]), framework=times[-1] if len(times) > len(sources) else None)


def call_times(modules: Sequence[LoadedKernel], inputs: Inputs, *, budget_s: float) -> list[float]:
    """Median microseconds of back-to-back calls with each rendered module, and last with PyTorch's function where it supports the problem.

    The times are those of the slower of host and GPU: only the end of each group of calls waits for the GPU.
    """
    ours, framework = attention_call(inputs), framework_call(inputs, step=True)
    direction = inputs.problem.direction
    runs: list[tuple[Any, Call]] = [(Memo(pinned=(direction, module)), ours) for module in modules]
    runs += [] if framework is None else [(None, framework)]
    found: list[list[float]] = [[] for _ in runs]
    repeats, rounds = 1, 0
    started = time.perf_counter()
    with torch.no_grad():
        while rounds < 3 or time.perf_counter() - started < budget_s:
            for place in range(len(runs)) if rounds % 2 else reversed(range(len(runs))):
                memo, call = runs[place]
                with nullcontext() if memo is None else layers.serving(memo):
                    call()
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    for _ in range(repeats):
                        call()
                    torch.cuda.synchronize()
                    spent = (time.perf_counter() - begun) / repeats * 1e6
                # The first round compiles, the second sets the number of calls per reading of the clock.
                if rounds > 1:
                    found[place].append(spent)
                elif rounds == 1:
                    repeats = max(repeats, min(200, int(3e3 / spent)))
                    started = time.perf_counter()
            rounds += 1
    return [statistics.median(times) for times in found]
