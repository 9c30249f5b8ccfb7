"""`attention_jagged`: attention of jagged nested tensors (torch.nested), a shim on `attention_varlen`."""

from typing import Any

import torch
from torch import Tensor

from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.varlen import attention_varlen


def attention_jagged(query: Any, key: Any, value: Any, *, causal_alignment: str = "top_left", **words: Any) -> Tensor:
    """Attention of sequences of different lengths as nested tensors, as F.scaled_dot_product_attention takes them.

    Nothing is copied, and nothing waits for the device.

    Args:
        query: (B, Hq, jagged, D), of torch's layout `jagged`; the third dimension is the ragged one.
        key: (B, Hkv, jagged, D).
        value: (B, Hkv, jagged, D_v), with the offsets of the key.
        causal_alignment: as in `attention`.
        **words: keywords of `attention_varlen`, but for those that return an LSE.

    Returns:
        The output (B, Hq, jagged, D_v), with the lengths of the query.

    Raises:
        InputError: for tensors of other shapes, and where sequences of the query have room that isn't used.
        InputTypeError: for tensors that aren't nested.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged:
            raise InputTypeError(f"{name} is no jagged nested tensor: make it one by torch.nested with layout=torch.jagged")
        if x.dim() != 4 or ragged_dimension(x) != 2:
            raise InputError(f"{name} has its ragged dimension elsewhere than (B, H, jagged, D): transpose it")
    if query.lengths() is not None:
        raise InputError("query has room after its sequences that isn't used: call contiguous() on it")
    if key.size(0) != query.size(0) or value.size(0) != query.size(0):
        raise InputError(f"query, key and value have {query.size(0)}, {key.size(0)} and {value.size(0)} sequences: give as many of each")
    for name in ("return_lse", "return_aux", "seqused_k"):
        given = words.get(name)
        if given is not None and given is not False:
            raise InputError(f"{name} is no argument of attention_jagged: call attention_varlen with values() and offsets()")
    if key.size(2) != value.size(2):
        raise InputError("key and value have offsets of their own: make both with one tensor of offsets")
    q, k, v = (x.values().transpose(0, 1) for x in (query, key, value))
    words |= {"seqused_k": key.lengths(), "causal_alignment": causal_alignment}
    out = attention_varlen(q, k, v, query.offsets(), key.offsets(), _bound(query, len(q)), _bound(key, len(k)), **words)
    nested = torch.nested.nested_tensor_from_jagged(out, offsets=query.offsets(), max_seqlen=getattr(query, "_maybe_max_seqlen", None))
    found: Tensor = nested.transpose(1, 2)
    return found


def ragged_dimension(x: Tensor) -> int:
    """The dimension of a jagged nested tensor whose sizes differ."""
    return int(getattr(x, "_ragged_idx", 1))


def _bound(x: Tensor, rows: int) -> int:
    """A bound of the lengths of a nested tensor: the longest, where torch knows it, else all rows, so that nothing waits for the device."""
    known = getattr(x, "_maybe_max_seqlen", None)
    return rows if known is None else int(known)
