"""Times of whole calls of `attention` and PyTorch's function in an eager loop, host included; of a backward whole training steps.

A training step is the forward and its gradients, since kernels serve both or neither.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from flashtune.core.code.launching import LoadedKernel
from flashtune.core.pytorch.flex import flex_arguments
from flashtune.dispatch import api, flex, varlen
from flashtune.dispatch.call.parse import Options
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.state import context
from flashtune.dispatch.state.context import Memo
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.verify.inputs import Inputs

Call = Callable[[], object]


def call_kwargs(inputs: Inputs) -> dict[str, Any]:
    """Keyword arguments of `dispatch.attention`, `attention_varlen` or `flex_attention` for these inputs."""
    parameters = inputs.parameters
    if inputs.mods is not None:
        return {"scale": parameters.scale, "enable_gqa": inputs.problem.gqa_ratio > 1}
    if parameters.lengths is not None:
        return {
            "dropout_p": parameters.dropout_p,
            "scale": parameters.scale,
            "enable_gqa": inputs.problem.gqa_ratio > 1,
            "window_size": tuple(-1 if side is None else side for side in (parameters.band.left, parameters.band.right)),
            "causal_alignment": inputs.problem.features.alignment,
            "softcap": parameters.softcap,
            "alibi_slopes": parameters.slopes,
            "sinks": None if parameters.sinks is None else parameters.sinks[0],
            **({} if inputs.pages is None else {"block_table": inputs.pages.table, "seqused_k": inputs.pages.used}),
        }
    return {
        **{name: getattr(parameters, name) for name in Options._fields if hasattr(parameters, name)},
        "attn_mask": inputs.mask,
        "enable_gqa": inputs.problem.gqa_ratio > 1,
        "window": (parameters.band.left, parameters.band.right),
        "causal_alignment": "bottom_right" if parameters.band.diagonal else "top_left",
        **parameters.per_head(),
    }


def operands(inputs: Inputs) -> list[torch.Tensor]:
    """Query, key and value, packed or not, or caches of pages, as callers have them."""
    if inputs.pages is not None:
        return [inputs.q[0].transpose(0, 1), inputs.pages.k.transpose(1, 2), inputs.pages.v.transpose(1, 2)]
    found = [inputs.q, inputs.k, inputs.v]
    return [x[0].transpose(0, 1) for x in found] if inputs.sequences else found


def bounds(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bounds of queries and keys of packed sequences, as callers have them: no keys' over pages."""
    assert inputs.parameters.lengths is not None, "only packed sequences have bounds"
    cu_q, cu_k, _ = inputs.parameters.lengths
    return cu_q, cu_k if inputs.pages is None else None


def attention_of(inputs: Inputs) -> Callable[..., torch.Tensor]:
    """`dispatch.attention`, `attention_varlen` with these lengths, or `flex_attention` with these functions, of query, key and value."""
    if inputs.mods is not None:
        return _with_functions(inputs)
    if inputs.parameters.lengths is None:
        return api.attention
    cu_q, cu_k = bounds(inputs)
    return lambda q, k, v, **kwargs: varlen.attention_varlen(q, k, v, cu_q, cu_k, *inputs.longest, **kwargs)


def _with_functions(inputs: Inputs) -> Callable[..., torch.Tensor]:
    """`flex_attention` of dense inputs with their functions, whose blocks are found once."""
    assert inputs.mods is not None, "the caller looked"
    p, functions = inputs.problem, inputs.mods.functions
    source = functions.mods("fwd")
    sizes = p.batch if source.by_batch else None, p.heads if source.by_head else None, p.n_q, p.n_kv
    words = flex_arguments(functions.mask_mod, functions.score_mod, sizes, inputs.q.device)
    return lambda q, k, v, **kwargs: flex.flex_attention(q, k, v, **words, **kwargs)


def explained(inputs: Inputs) -> Explanation:
    """Explanation of what serves `attention_call`."""
    if inputs.parameters.lengths is None:
        return api.explain(inputs.q, inputs.k, inputs.v, **call_kwargs(inputs))
    (q, k, v), (cu_q, cu_k) = operands(inputs), bounds(inputs)
    return varlen.explain_varlen(q, k, v, cu_q, cu_k, *inputs.longest, **call_kwargs(inputs))


def attention_call(inputs: Inputs, **words: Any) -> Callable[[], torch.Tensor]:
    """Function that calls `dispatch.attention`, or `attention_varlen`, on these inputs, with further keyword arguments."""
    call, kwargs, (q, k, v) = attention_of(inputs), call_kwargs(inputs) | words, operands(inputs)
    return lambda: call(q, k, v, **kwargs)


def training_step(inputs: Inputs, **words: Any) -> Call:
    """Function that calls `dispatch.attention` on the inputs of a backward, and computes its gradients."""
    features, call, kwargs = inputs.problem.features, attention_of(inputs), call_kwargs(inputs) | words
    q, k, v = leaves = [x.detach().requires_grad_() for x in operands(inputs)]
    dout = inputs.operands["dout"]
    dout = dout[0].transpose(0, 1) if inputs.sequences else dout
    for name in ("attn_mask",) * features.dbias + ("alibi_slopes",) * features.dslopes:
        kwargs[name] = kwargs[name].detach().requires_grad_()
        leaves = [*leaves, kwargs[name]]

    def step() -> object:
        with torch.enable_grad():
            out = call(q, k, v, **kwargs)
        return torch.autograd.grad(out, leaves, dout)

    return step


def call_times(
    modules: Sequence[LoadedKernel], inputs: Inputs, *, budget_s: float, beside: Sequence[Call] = (), pytorch: bool = True
) -> list[list[float]]:
    """Microseconds of back-to-back calls with each rendered module, then of the calls `beside`, and last with PyTorch's function where it
    supports the problem, unless `pytorch` is False."""
    direction, framework = inputs.problem.direction, pytorch_call(inputs, step=True) if pytorch else None
    ours = attention_call(inputs) if direction == "fwd" else training_step(inputs)
    memos = [Memo(pinned=(direction, module)) for module in modules]
    for memo in memos[1:]:
        # Reading and sorting the records takes a tenth of a second.
        memo.share(memos[0])
    runs: list[tuple[Memo | None, Call]] = [(memo, ours) for memo in memos]
    runs += [(None, call) for call in (*beside, *([] if framework is None else [framework]))]
    return interleaved(runs, budget_s=budget_s)


def interleaved(runs: Sequence[tuple[Memo | None, Call]], *, budget_s: float) -> list[list[float]]:
    """Microseconds of back-to-back calls in turns, each served by its memo where it has one.

    The times are those of the slower of host and GPU: only the end of each group of calls waits for the GPU.
    """
    found: list[list[float]] = [[] for _ in runs]
    repeats, rounds = 1, 0
    started = time.perf_counter()
    with torch.no_grad():
        while rounds < 3 or time.perf_counter() - started < budget_s:
            for place in range(len(runs)) if rounds % 2 else reversed(range(len(runs))):
                memo, call = runs[place]
                with nullcontext() if memo is None else context.serving(memo):
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
    return found
