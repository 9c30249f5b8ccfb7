"""Parser from the arguments of `attention` to a checked `Call`; every bad value is refused here, in one sentence."""

import math
import numbers
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.problems.band import ALIGNMENTS, Sides, Window, parse_window
from flashtune.core.problems.parameters import FACTORS, PER_HEAD, PER_HEAD_FLAGS
from flashtune.core.problems.problem import DECODE_ROWS, LARGEST_HEAD, Features, MaskKind, Problem, wide_heads
from flashtune.core.pytorch.attention import in_columns
from flashtune.core.pytorch.dtypes import KERNEL_DTYPES, output_torch_dtype
from flashtune.core.records.results import IMPLEMENTATIONS
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.call.call import Call, PerHead, surely


class Arguments(NamedTuple):
    """Tensors of a call, its seed and its per-head arguments, in the order in which plans take them."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    seed: int | None = None
    per_head: PerHead | None = None


class Options(NamedTuple):
    """Remaining arguments of `attention`, as the caller passed them."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    window: int | Window | None = None
    softcap: float = 0.0
    causal_alignment: str = "top_left"
    return_lse: bool = False
    allow_tf32: bool = False
    deterministic: bool = False
    implementation: str | None = None

    def flags(self) -> dict[str, bool]:
        """Truth values that packed calls have as numbers, too, by their names there."""
        return {"tf32": self.allow_tf32, "deterministic": self.deterministic}

    def sides(self) -> Sides:
        """Band that the options describe, whatever the sizes."""
        return Sides.of(self.window, self.is_causal, self.causal_alignment)


TRUTH_VALUES = ("is_causal", "return_lse", "enable_gqa", "allow_tf32", "deterministic")
"""Options that are True or False."""


def parse(given: Arguments, options: Options) -> Call:
    """Checked `Call` of these arguments; raises InputError or InputTypeError with the offending value and the remedy."""
    query, key, value, attn_mask, seed, per_head = given
    _check_tensors(query, key, value)
    check_flags({name: getattr(options, name) for name in TRUTH_VALUES})
    q, k, v = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    _check_sizes(q, k, v)
    rank = max(len(q), len(k), len(v))
    batch_dims = _batch_dims(q, k, v)
    heads, kv_heads = _heads(q, k, v, options.enable_gqa)
    # Head sizes are compiled into kernels, so a tracer's symbolic ones become numbers.
    n_q, n_kv, d, d_v = q[-2], k[-2], index(q[-1]), index(v[-1])
    if options.is_causal and attn_mask is not None:
        raise InputError("Explicit attn_mask should not be set when is_causal=True: give one of them, or put the causal band into the mask")
    mask_kind: MaskKind = "none"
    if attn_mask is not None:
        mask_kind = _mask_kind(attn_mask, query, (*batch_dims, *((heads,) if rank > 2 else ()), n_q, n_kv))
    if options.causal_alignment not in ALIGNMENTS:
        raise InputError(f"unknown causal_alignment {options.causal_alignment!r}: use one of {', '.join(ALIGNMENTS)}")
    check_implementation(options.implementation)
    # A side that hides no pair at these sizes would only select a slower kernel: decoding one token isn't causal.
    band = options.sides().band(n_q, n_kv, surely)
    dropout_p, softcap, scale = scalars(options, wide=query.dtype == torch.float64)
    if seed is not None:
        seed_bits(seed)
    if per_head is not None:
        _check_per_head(per_head, query, batch_dims, {"heads": heads, "kv_heads": kv_heads})
    per_head = per_head or PerHead()
    sizes = {"batch": math.prod(batch_dims), "heads": heads, "kv_heads": kv_heads, "n_q": n_q, "n_kv": n_kv, "d": d, "d_v": d_v}
    problem = None
    if query.dtype in KERNEL_DTYPES and 0 not in (*batch_dims, heads, n_q, n_kv, d, d_v) and max(d, d_v) <= LARGEST_HEAD:
        flags = {flag: getattr(per_head, name) is not None for name, flag in PER_HEAD_FLAGS.items()}
        flags |= {"dropout": dropout_p > 0.0, "softcap": softcap > 0.0}
        # Kernels of smaller heads, and of more rows, were measured with values beside keys.
        flags["latent"] = wide_heads(d, d_v) and surely(n_q <= DECODE_ROWS) and in_columns(key, value)
        # Features record only whether the diagonal begins at the first key.
        diagonal = replace(band, diagonal=0 if surely(band.diagonal == 0) else 1)
        features = Features.within(diagonal, mask=mask_kind, tf32=options.allow_tf32 and query.dtype == torch.float32, **flags)
        problem = Problem(**sizes, direction="fwd", dtype=KERNEL_DTYPES[query.dtype], features=features, lengths=None)
    return Call(
        dtype=query.dtype,
        out_dtype=output_torch_dtype(query.dtype),
        device=query.device,
        problem=problem,
        band=band,
        per_head=any(x is not None for x in per_head),
        factors=_factors(per_head) if query.dtype == torch.float8_e4m3fn else None,
        deterministic=options.deterministic,
        seeded=seed is not None,
        return_lse=options.return_lse,
        mask_kind=mask_kind,
        rank=rank,
        batch_dims=batch_dims,
        identity=rank == len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and q[1] == heads and k[1] == v[1] == kv_heads,
        scale=1.0 / math.sqrt(d or 1) if scale is None else scale,
        softcap=softcap,
        dropout_p=dropout_p,
        **sizes,
    )


def scalars(options: Options, *, wide: bool) -> tuple[float, float, float | None]:
    """Dropout's rate, the soft cap and the scale, if it is set; `wide` ones are in the range of float64."""
    dropout_p = number("dropout_p", options.dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise InputError(f"dropout_p={dropout_p} is not a probability: give a rate between 0 and 1")
    softcap = number("softcap", options.softcap, wide=wide)
    if softcap < 0.0:
        raise InputError(f"softcap={softcap} is negative: give a positive cap, or 0 for none")
    if 0.0 < softcap < _SMALLEST and not wide:
        raise InputError(f"softcap={softcap} is less than float32's {_SMALLEST:.2g}: give a larger cap, or 0 for none")
    return dropout_p, softcap, None if options.scale is None else number("scale", options.scale, wide=wide)


def unwrapped(number: Any) -> Any:
    """Number in a 0-D tensor without requires_grad, which PyTorch accepts as a number; any other argument unchanged."""
    plain = isinstance(number, Tensor) and number.dim() == 0 and not number.requires_grad
    return number.item() if plain else number


def settled(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """Options in their order, with numbers as Python's own; for calls whose options aren't of the usual types.

    Raises InputTypeError for what is no bool or number, since plans are found by equal options, and 1 == True == Decimal(1). In a
    compiler's trace numbers are only taken out of 0-D tensors.
    """
    found = dict(zip(Options._fields, options, strict=False))
    found |= {name: unwrapped(found[name]) for name in ("dropout_p", "scale")}
    if not torch.compiler.is_compiling():
        check_flags({name: found[name] for name in TRUTH_VALUES})
        given = {name: found[name] for name in ("dropout_p", "softcap", "scale") if name != "scale" or found[name] is not None}
        # Parsing refuses an integer that is too large, by the range of the tensors' dtype.
        found |= {name: number(name, x, wide=True) for name, x in given.items() if x.__class__ is not int}
    return tuple(found.values())


def check_window(window: Any) -> None:
    """Refuse what is no window, such as one of floats, which would equal a window of integers."""
    if window.__class__ is not int and not (window.__class__ is tuple and all([side is None or side.__class__ is int for side in window])):
        parse_window(window)


def seed_bits(seed: int) -> int:
    """`seed` as an unsigned 64-bit number (negative ones wrap, as in torch.manual_seed); raises InputError or InputTypeError."""
    # isinstance of an abstract class is slow, so that int is checked first.
    if type(seed) is not int and (isinstance(seed, bool) or not isinstance(seed, numbers.Integral)):
        raise InputTypeError(f"seed must be an integer, not {type(seed).__name__}: give 64 bits, or None to draw one")
    if not -(2**63) <= seed < 2**64:
        raise InputError(f"seed={seed} does not fit into 64 bits: give a smaller one")
    return int(seed) % 2**64


def signed(bits: int) -> int:
    """64 bits as the signed integer that PyTorch's operators take."""
    return (bits + 2**63) % 2**64 - 2**63


def _check_tensors(query: object, key: object, value: object) -> None:
    """Refuse inputs that aren't dense tensors of one floating dtype on one device."""
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise InputTypeError(f"{name} must be a tensor, not {type(x).__name__}: pass torch tensors")
        if x.is_nested:
            raise InputTypeError(f"{name} is a nested tensor: pad it to a dense one and mask the padding")
        if x.layout != torch.strided:
            raise InputTypeError(f"{name} has the layout {x.layout}: convert it with .to_dense()")
        if x.dtype not in KERNEL_DTYPES and x.dtype != torch.float64:
            raise InputTypeError(f"{name} has dtype {x.dtype}: use float16, bfloat16, float32, float64 or float8_e4m3fn")
    given: dict[str, Any] = tensors
    for kind, error, joint, remedy in (("dtype", InputTypeError, " ", "convert"), ("device", InputError, " on ", "move")):
        found = {name: getattr(x, kind) for name, x in given.items()}
        if len(set(found.values())) > 1:
            raise error(f"mixed {kind}s ({', '.join(f'{name}{joint}{x}' for name, x in found.items())}): {remedy} all to one {kind}")


def _check_sizes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    for name, shape in (("query", q), ("key", k), ("value", v)):
        if len(shape) < 2:
            raise InputError(f"{name} has the shape {shape}: give at least two dimensions, (..., tokens, head size)")
    if q[-1] != k[-1]:
        raise InputError(f"query has the head size {q[-1]} and key {k[-1]}: they must be equal")
    if k[-2] != v[-2]:
        raise InputError(f"key has {k[-2]} tokens and value {v[-2]}: they must be equal")


def _batch_dims(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Broadcast of all dimensions before the heads."""
    found: list[int] = []
    for sizes in zip_longest(*(reversed(shape[:-3]) for shape in shapes), fillvalue=1):
        size = 1
        for other in sizes:
            if other != 1 and size not in (1, other):
                q, k, v = shapes
                raise InputError(f"batch sizes of query {q}, key {k} and value {v} don't broadcast: make them equal or 1")
            size = other if size == 1 else size
        found.append(size)
    return tuple(reversed(found))


def _heads(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], enable_gqa: bool) -> tuple[int, int]:
    """Query heads and key heads as kernels see them; a tensor without a head dimension has one head.

    Where key and value have different head counts, the smaller is repeated.
    """
    q_heads, k_heads, v_heads = (shape[-3] if len(shape) > 2 else 1 for shape in (q, k, v))
    kv_heads = max(k_heads, v_heads)
    if enable_gqa and q_heads:
        if any(not count or q_heads % count for count in (k_heads, v_heads)):
            raise InputError(f"query has {q_heads} heads, key {k_heads} and value {v_heads}: make both 1 or divisors of the query's heads")
        return q_heads, kv_heads if kv_heads % k_heads == 0 == kv_heads % v_heads else q_heads
    heads = max(q_heads, kv_heads)
    if any(count not in (1, heads) for count in (q_heads, k_heads, v_heads)):
        shared = k_heads and v_heads and q_heads % k_heads == 0 == q_heads % v_heads
        hint = "pass enable_gqa=True to share key heads" if shared else "make them equal or 1"
        raise InputError(f"query has {q_heads} heads, key {k_heads} and value {v_heads}: {hint}")
    return heads, kv_heads


def _mask_kind(mask: object, query: Tensor, scores: tuple[int, ...]) -> MaskKind:
    """`bool` or `bias` for a mask that broadcasts to the scores' shape; raises for any other."""
    if not isinstance(mask, Tensor):
        raise InputTypeError(f"attn_mask must be a tensor or None, not {type(mask).__name__}: pass a torch tensor")
    _check_dense("attn_mask", mask)
    floating = output_torch_dtype(query.dtype)
    if mask.dtype not in (torch.bool, torch.float32, floating):
        types = "float32" if floating is torch.float32 else f"float32 or the output's {floating}"
        raise InputTypeError(f"attn_mask has dtype {mask.dtype}: use bool (True attends), {types}")
    if mask.device != query.device:
        raise InputError(f"attn_mask is on {mask.device} and query on {query.device}: move all to one device")
    shape = tuple(mask.shape)
    if not _broadcasts(shape, scores):
        raise InputError(f"attn_mask of shape {shape} doesn't broadcast to the scores {scores}: each size must be equal or 1")
    return "bool" if mask.dtype == torch.bool else "bias"


def _check_dense(name: str, x: Tensor) -> None:
    if x.is_nested or x.layout != torch.strided:
        raise InputTypeError(f"{name} is nested or sparse: pass a dense tensor")


def _check_per_head(per_head: PerHead, query: Tensor, batch_dims: tuple[int, ...], counts: dict[str, int]) -> None:
    """Refuse per-head arguments of a wrong dtype or device, or that don't broadcast to (..., heads); fp8 factors may be numbers."""
    for (name, heads), given in zip(PER_HEAD.items(), per_head, strict=True):
        if given is None:
            continue
        factor = name in FACTORS
        if factor and query.dtype != torch.float8_e4m3fn:
            raise InputError(f"{name} is set for inputs of {query.dtype}: only torch.float8_e4m3fn ones have factors, leave it out")
        if not isinstance(given, Tensor):
            if not factor:
                raise InputTypeError(
                    f"{name} must be a tensor or None, not {type(given).__name__}: pass a float32 tensor with a number per head"
                )
            value = number(name, given)
            if name in ("q_descale", "k_descale") and not value > 0.0:
                raise InputError(f"{name} is {given}: factors of queries and keys must be above 0")
            continue
        _check_dense(name, given)
        if given.dtype != torch.float32 and (name != "sinks" or given.dtype != output_torch_dtype(query.dtype)):
            raise InputTypeError(f"{name} has dtype {given.dtype}: use float32" + " or the output's" * (name == "sinks"))
        if given.device != query.device:
            raise InputError(f"{name} is on {given.device} and query on {query.device}: move all to one device")
        shape, full = tuple(given.shape), (*batch_dims, counts[heads])
        if not _broadcasts(shape, full):
            raise InputError(f"{name} of shape {shape} doesn't broadcast to the heads {full}: each size must be equal or 1")


def _factors(per_head: PerHead) -> tuple[float, float, float]:
    """fp8 factors that are numbers; 1 in the place of others."""
    q, k, v = (1.0 if x is None or isinstance(x, Tensor) else float(x) for x in (getattr(per_head, name) for name in FACTORS))
    return q, k, v


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return len(shape) <= len(full) and all(size in (1, other) for size, other in zip(reversed(shape), reversed(full), strict=False))


def check_flags(flags: Mapping[str, object]) -> None:
    """Refuse truth values that aren't bools, as a mask in the place of `is_causal` would be one."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputTypeError(f"{name} must be True or False, not {type(value).__name__}: check the order of the arguments")


def check_implementation(name: object) -> None:
    """Refuse what is no name of an implementation."""
    if name is not None and name not in IMPLEMENTATIONS:
        raise InputError(f"unknown implementation {name!r}: use one of {', '.join(IMPLEMENTATIONS)}")


def cannot_serve(name: str, why: str, title: str = "") -> InputError:
    """Error where the implementation that a caller names can't serve the call; `title` is the name of a library."""
    shown, remedy = f" ({title})" if title else "", "" if ": pip" in why else ": leave implementation out, or name another"
    return InputError(f"implementation={name!r}{shown} can't run this call, since {why}{remedy}")


def wants_lse(return_lse: bool, return_aux: Any) -> bool:
    """True where the LSE is requested, by itself or in PyTorch's AuxRequest.

    Raises InputTypeError for what is no bool or AuxRequest, and InputError for both requests at once, as PyTorch raises a ValueError.
    """
    if type(return_lse) is not bool:
        check_flags({"return_lse": return_lse})
    if return_aux is None:
        return return_lse
    if not hasattr(return_aux, "lse"):
        raise InputTypeError(f"return_aux must be an AuxRequest or None, not {type(return_aux).__name__}: pass AuxRequest(lse=True)")
    if return_lse:
        raise InputError("return_lse stands beside return_aux: leave it out, and pass AuxRequest(lse=True)")
    return bool(return_aux.lse)


def number(name: str, value: object, *, wide: bool = False) -> float:
    """A finite real number in the range of float32; of float64 where it is `wide`."""
    if isinstance(value, Tensor) or not isinstance(value, numbers.Real):
        raise InputTypeError(f"{name} must be a number, not {type(value).__name__}: pass a Python float")
    given: Any = value
    # Compared, since compilers that trace can't evaluate math.isfinite of a symbolic number; before `float`, which large integers overflow.
    if not -_LARGEST <= given <= _LARGEST and not (wide and -_LARGEST64 <= given <= _LARGEST64):
        shown = f"{name}={value}" if isinstance(value, float) else name
        if isinstance(value, float) and not -math.inf < value < math.inf:
            raise InputError(f"{shown} is not finite: give an ordinary number")
        kind, most = ("float64", _LARGEST64) if wide else ("float32", _LARGEST)
        raise InputError(f"{shown} is larger than {kind} holds: give a number below {most:.2g}")
    return float(value)


_LARGEST, _SMALLEST, _LARGEST64 = 2.0**128 - 2.0**104, 2.0**-126, sys.float_info.max
"""Largest and smallest normal number of float32, and largest of float64."""
