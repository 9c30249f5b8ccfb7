"""Calls whose gradient is needed, as operators of torch: a forward's kernel keeps the LSE, and a backward's kernel goes on from there.

`torch.ops.flashtune.attention_training` and `torch.ops.flashtune.attention_gradients` are opaque to compilers. What lies between them
is the output, the LSE and 64 bits that dropout's mask follows from; nothing is as large as the scores. Where gradients are to be the same
bits every time, only families serve that add up in a fixed order.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from flashtune.core import launching
from flashtune.core.errors import InputError
from flashtune.core.passes import CallParameters
from flashtune.core.torch_dtypes import output_torch_dtype
from flashtune.dispatch import formula, framework, layers, resolve
from flashtune.dispatch.arguments import parse, signed
from flashtune.dispatch.call import PerHead
from flashtune.dispatch.plans import GradientPlan, out_strides, random_bits

_NUMBERS = "float dropout_p, float scale, int left, int right, float softcap, str causal_alignment, bool allow_tf32, bool deterministic"
_PER_HEAD = "Tensor? alibi_slopes, Tensor? sinks"
_FORWARD = f"(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_PER_HEAD}, int? seed, {_NUMBERS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor state, Tensor? attn_mask, "
    f"{_PER_HEAD}, bool of_query, bool of_keys, {_NUMBERS}) -> (Tensor, Tensor, Tensor)"
)

_forwards = threading.local()
"""In `memo`, what was in force when the forward of the gradients ran that this thread makes."""


def define(eager: Callable[..., Any]) -> None:
    """Make the operators; `eager` is flashtune.dispatch.attention."""

    def forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        seed: int | None,
        dropout_p: float,
        scale: float,
        left: int,
        right: int,
        softcap: float,
        causal_alignment: str,
        allow_tf32: bool,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bits = 0
        if dropout_p:
            # As calls without gradients draw them: a checkpoint that is recomputed goes from one to the other.
            bits = random_bits(seed, query.device)[0]
        with torch.no_grad():
            out, lse = eager(
                query.detach(),
                key.detach(),
                value.detach(),
                attn_mask,
                dropout_p,
                False,
                scale,
                query.shape[1] != key.shape[1],
                window=(left, right),
                softcap=softcap,
                causal_alignment=causal_alignment,
                return_lse=True,
                seed=bits if dropout_p else None,
                allow_tf32=allow_tf32,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
            )
        promised = _like_query(query, value.shape[3])
        if out.stride() != promised.stride():
            out = promised.copy_(out)
        return out, lse.contiguous(), torch.tensor([signed(bits)])

    training = torch.library.custom_op(
        "flashtune::attention_training", forward, mutates_args=(), schema=_FORWARD, tags=(torch.Tag.nondeterministic_seeded,)
    )

    @training.register_fake
    def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        return _like_query(query, value.shape[3]), lse, torch.empty(1, dtype=torch.int64)

    backward = torch.library.custom_op("flashtune::attention_gradients", _gradients, mutates_args=(), schema=_BACKWARD)

    @backward.register_fake
    def _(dout: torch.Tensor, dlse: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> Any:
        of_query, of_keys = others[6], others[7]
        return _written(query, key, value, of_query, of_keys)

    training.register_autograd(_differentiated, setup_context=_keep)
    backward.register_autograd(_twice, setup_context=lambda ctx, inputs, output: None)
    _Eager.compute = staticmethod(forward)


class _Eager(torch.autograd.Function):
    """What `attention_training` does, where nobody traces or transforms: an operator of Python's costs the host several times as much."""

    compute: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        output = _Eager.compute(*inputs)
        _keep(ctx, inputs, output)
        ctx.mark_non_differentiable(output[2])
        ctx.eager = True
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        return _differentiated(ctx, *grads)


def attend(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, LSE and random state of what `attention_training` takes, by the operator where somebody traces."""
    operator: Callable[..., Any] = _Eager.apply if _untraced(query) else torch.ops.flashtune.attention_training
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = operator(query, *others)
    return found


def _untraced(x: torch.Tensor) -> bool:
    # A compiler that traces (compiled autograd does a backward) understands the first question alone. What vmap wraps is a tensor without
    # memory: a batch of gradients, of which only an operator knows how to take one after the other.
    if torch.compiler.is_compiling() or type(x) not in (torch.Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack():
        return False
    return bool(torch._C._has_storage(x))


def _like_query(query: torch.Tensor, columns: int) -> torch.Tensor:
    """An output that lies in memory as the query does."""
    shape = query.shape[0], query.shape[1], query.shape[2], columns
    return query.new_empty_strided(shape, out_strides(shape, query.stride()), dtype=output_torch_dtype(query.dtype))


def _written(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, of_query: bool, of_keys: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the gradients, each laid out as its input; empty for those that nobody asked for."""
    dq, dk, dv = (
        x.new_empty_strided(x.shape, out_strides((x.shape[0], x.shape[1], x.shape[2], x.shape[3]), x.stride())) if asked else x.new_empty(0)
        for x, asked in ((query, of_query), (key, of_keys), (value, of_keys))
    )
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """What the backward needs: the inputs, which exist anyway, the output, the LSE and the random state."""
    query, key, value, attn_mask, slopes, sinks, _, *numbers = inputs
    ctx.save_for_backward(query, key, value, *output, attn_mask, slopes, sinks)
    ctx.numbers = numbers
    # Threads of autograd have no layers of their own.
    ctx.memo = layers.current()
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, _: object) -> tuple[torch.Tensor | None, ...]:
    """The gradients that are asked for."""
    query, key, value, *others = ctx.saved_tensors
    nothing = (None,) * (4 + len(ctx.numbers))
    if dout is None and dlse is None:
        return (None, None, None, *nothing)
    of_query, of_key, of_value = ctx.needs_input_grad[:3]
    dout = torch.zeros_like(others[0]) if dout is None else dout
    _forwards.memo = ctx.memo
    # Where a graph of the gradients is made, the operator is in it and says that there are no second ones.
    plain = getattr(ctx, "eager", False) and not torch.is_grad_enabled() and _untraced(dout) and (dlse is None or _untraced(dlse))
    operator: Callable[..., Any] = _gradients if plain else torch.ops.flashtune.attention_gradients
    try:
        dq, dk, dv = operator(dout, dlse, query, key, value, *others, of_query, of_key or of_value, *ctx.numbers)
    finally:
        _forwards.memo = None
    return dq if of_query else None, dk if of_key else None, dv if of_value else None, *nothing


def _twice(ctx: Any, *_: object) -> None:
    raise InputError(
        "attention was differentiated twice, and kernels have first derivatives alone: "
        "for second ones call F.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    )


def _gradients(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    state: torch.Tensor,
    attn_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    of_query: bool,
    of_keys: bool,
    dropout_p: float,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    causal_alignment: str,
    allow_tf32: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients by the best backward kernel that takes the call, else by the formula."""
    words = (of_query, of_keys, dropout_p, scale, left, right, softcap, causal_alignment, allow_tf32, deterministic)
    # Kernels are told of no strides of these. Hooks on saved tensors may have changed those of the LSE.
    dout, lse, dlse = _readable(dout), lse.contiguous(), None if dlse is None else dlse.contiguous()
    memo = getattr(_forwards, "memo", None) or layers.current()
    signature = _signature((query, key, value, out, lse, dout, dlse, attn_mask, alibi_slopes, sinks), words)
    known = memo.gradients.get(signature)
    call = (
        known.call
        if known is not None
        else parse(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
            window=(left, right),
            softcap=softcap,
            causal_alignment=causal_alignment,
            allow_tf32=allow_tf32,
            deterministic=deterministic,
            per_head=PerHead(alibi_slopes=alibi_slopes, sinks=sinks),
        )
    )
    given = CallParameters(
        scale=scale,
        band=call.band,
        mask=call.full_mask(attn_mask),
        softcap=softcap,
        dropout_p=dropout_p,
        seed=int(state.item()) % 2**64 if dropout_p else 0,
        slopes=alibi_slopes,
        sinks=sinks,
    )
    grads = _written(query, key, value, of_query, of_keys)
    dq, dk, dv = (grad if asked else None for grad, asked in zip(grads, (of_query, of_keys, of_keys), strict=True))
    tensors = (query, key, value, out, lse, dout, dlse, dq, dk, dv)
    if known is not None:
        with _on(query.device):
            known.launch(*tensors, **given.keywords())
        return grads
    while True:
        with memo.lock:
            # What failed before isn't offered again.
            chosen = next(resolve.gradient_kernels(memo, call, query, key, value, given.mask), None)
        if chosen is None:
            break
        variant, module = chosen
        launch = launching.launcher(module)
        try:
            with _on(query.device):
                launch(*tensors, **given.keywords())
        except Exception as error:
            if not resolve.uncompilable(error):
                raise
            with memo.lock:
                resolve.report_failure(memo, variant, query.device, error)
            continue
        memo.keep_gradient(signature, GradientPlan(call=call, launch=launch))
        return grads
    # Autocast, where a backward runs inside of it, would round the formula's float32 products.
    with framework.no_autocast(query.device.type):
        found = formula.gradients(query, key, value, out, lse, dout, dlse, given)
    for grad, values, asked in zip(grads, found, (of_query, of_keys, of_keys), strict=True):
        if asked:
            grad.copy_(values)
    return grads


def _signature(tensors: tuple[torch.Tensor | None, ...], words: tuple[object, ...]) -> Hashable:
    """What chooses a backward kernel: sizes, strides, types and where tensors lie, beside the call's numbers."""
    laid_out = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)
    return laid_out, tensors[0].device if tensors[0] is not None else None, words, torch.are_deterministic_algorithms_enabled()


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current one, where it isn't."""
    here = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device(device)


def _readable(dout: torch.Tensor) -> torch.Tensor:
    """A gradient as kernels read it fast: rows without gaps, on 16-byte boundaries, nothing broadcast."""
    unit = 16 // dout.element_size()
    outer = [stride for size, stride in zip(dout.shape[:3], dout.stride()[:3], strict=True) if size > 1]
    if dout.stride(3) == 1 and dout.data_ptr() % 16 == 0 and all(stride and stride % unit == 0 for stride in outer):
        return dout
    return dout.clone(memory_format=torch.contiguous_format)
