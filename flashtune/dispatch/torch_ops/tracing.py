"""`attention` under torch.compile: a kernel is one opaque operator of the graph, PyTorch's path is traced like any other code."""

from collections.abc import Callable
from typing import Any

import torch

from flashtune.core import reference
from flashtune.core.parameters import PER_HEAD
from flashtune.core.torch_dtypes import output_torch_dtype
from flashtune.dispatch.call import Arguments, Call, Options, Outputs, PerHead, parse, seed_bits, signed
from flashtune.dispatch.plans import pytorch
from flashtune.dispatch.plans.dropout_seed import draws_in_a_capture, random_bits
from flashtune.dispatch.plans.memory import out_strides

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, float scale, bool enable_gqa, "
    "int left, int right, float softcap, str causal_alignment, bool return_lse, int? seed, bool allow_tf32, "
    + ", ".join(f"Tensor? {name}" for name in PER_HEAD)
    + ") -> (Tensor, Tensor)"
)
_KEEP_SCHEMA = "(Tensor like, int seed, int batch, int heads, int n_q, int n_kv, float p) -> Tensor"
_OTHERS = tuple(parameter.split()[1] for parameter in _SCHEMA[1 : _SCHEMA.index(")")].split(", "))[3:]


def traced(call: Call, given: Arguments, options: Options, *, kernels: bool, trains: bool) -> Any:
    """The call while a compiler traces it, without a graph break.

    `kernels` is True where a kernel may serve, `trains` where kernels may serve it with its gradient.
    """
    query, key, value, attn_mask, seed, per_head = given
    bits = None if seed is None else signed(seed_bits(seed))
    sides = call.band.keywords()
    if trains:
        out, lse = _trained(call, given, (sides["window_left"], sides["window_right"]), bits, options)
    elif kernels:
        out, lse = torch.ops.flashtune.attention(
            query,
            key,
            value,
            attn_mask,
            call.dropout_p,
            call.scale,
            options.enable_gqa,
            sides["window_left"],
            sides["window_right"],
            call.softcap,
            options.causal_alignment,
            call.return_lse,
            bits,
            options.allow_tf32,
            *_tensors(per_head or PerHead(), query.device),
        )
    else:
        keep = None
        if call.dropout_p and not call.fused_by_torch:
            sizes = (call.batch, call.heads, call.n_q, call.n_kv)
            if bits is None:
                keep = torch.rand(sizes, device=call.device) >= call.dropout_p
            else:
                keep = torch.ops.flashtune.dropout_keep(query, bits, *sizes, call.dropout_p)
        out, lse = pytorch.attention(call, query, key, value, attn_mask, keep, per_head)
    return (out, lse) if call.return_lse else out


def _trained(call: Call, given: Arguments, sides: tuple[int, int], bits: int | None, options: Options) -> Outputs:
    """Output and, where `return_lse` is set, LSE by the operator with gradients that compilers trace."""
    q, k, v = call.views(*given[:3])
    per_head = given.per_head or PerHead()
    if per_head.sinks is not None:
        # Their gradient is summed over batches before it is rounded.
        per_head = per_head._replace(sinks=per_head.sinks.float())
    views = dict(zip(PER_HEAD, per_head.views(call), strict=True))
    numbers = (call.dropout_p, call.scale, *sides, call.softcap, options.causal_alignment, options.allow_tf32, call.deterministic)
    out, lse, _ = torch.ops.flashtune.attention_training(
        q, k, v, call.small_mask(given.attn_mask), views["alibi_slopes"], views["sinks"], bits, *numbers
    )
    return call.restored(out), call.restored(lse) if call.return_lse else None


def _tensors(per_head: PerHead, device: torch.device) -> list[torch.Tensor | None]:
    """Per-head arguments for the operator: numbers become tensors."""
    return [x if x is None or isinstance(x, torch.Tensor) else torch.full((), x, dtype=torch.float32, device=device) for x in per_head]


def define(eager: Callable[..., Any]) -> None:
    """Define torch.ops.flashtune.dropout_keep, and torch.ops.flashtune.attention: `eager` (flashtune.dispatch.attention) as one node.

    `left` and `right` include `is_causal`. Without `return_lse` the second output is empty.
    """

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(zip(_OTHERS, others, strict=True))
        window = given.pop("left"), given.pop("right")
        call = _parsed(query, key, value, given)
        draws = call.torch_draws and not draws_in_a_capture(call, None)
        if draws:
            # The operator is in graphs only where kernels serve with gradients, too, which sample the same way.
            given["seed"] = random_bits(None, query.device)[0]
        served = eager(query, key, value, window=window, **given)
        out, lse = served if given["return_lse"] else (served, query.new_empty(0, dtype=torch.float32))
        # The strides that the fake implementation returned; PyTorch's own backends may choose others.
        shape, strides = _promised(call, query, key, value)
        return out if out.stride() == strides else query.new_empty_strided(shape, strides, dtype=out.dtype).copy_(out), lse

    operator = torch.library.custom_op(
        "flashtune::attention", attention, mutates_args=(), schema=_SCHEMA, tags=(torch.Tag.nondeterministic_seeded,)
    )

    @operator.register_fake
    def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = dict(zip(_OTHERS, others, strict=True))
        shape, strides = _promised(_parsed(query, key, value, given), query, key, value)
        out = query.new_empty_strided(shape, strides, dtype=output_torch_dtype(query.dtype))
        return out, query.new_empty(shape[:-1] if given["return_lse"] else (0,), dtype=torch.float32)

    keep = torch.library.custom_op("flashtune::dropout_keep", _dropout_keep, mutates_args=(), schema=_KEEP_SCHEMA)

    @keep.register_fake
    def _(like: torch.Tensor, seed: int, batch: int, heads: int, n_q: int, n_kv: int, p: float) -> torch.Tensor:
        return like.new_empty((batch, heads, n_q, n_kv), dtype=torch.bool)


def _dropout_keep(like: torch.Tensor, seed: int, batch: int, heads: int, n_q: int, n_kv: int, p: float) -> torch.Tensor:
    """The reference's dropout mask on the device of `like`; an operator, since tracing would unroll its loop over heads."""
    return reference.dropout_keep(seed % 2**64, 0, batch, heads, n_q, n_kv, p, device=like.device)


def _parsed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: dict[str, Any]) -> Call:
    """The call but for its mask and per-head arguments."""
    names = "dropout_p", "enable_gqa", "softcap", "return_lse"
    return parse(Arguments(query, key, value, seed=given["seed"]), Options(**{name: given[name] for name in names}))


def _promised(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of an output as kernels lay it out."""
    q = call.views(query, key, value)[0]
    shape = (call.batch, call.heads, call.n_q, call.d_v)
    strides = out_strides(shape, q.stride())
    dims = {2: 2, 3: 1}.get(call.rank, 0)
    if call.rank <= 4:
        return shape[dims:], strides[dims:]
    # Merged leading dimensions are contiguous with each other.
    batch_strides = [strides[0]]
    for size in reversed(call.batch_dims[1:]):
        batch_strides.insert(0, batch_strides[0] * size)
    return (*call.batch_dims, *shape[1:]), (*batch_strides, *strides[1:])
