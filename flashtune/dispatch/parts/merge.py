"""`merge`: outputs and LSEs of attention over parts of the keys as those of attention over all of them, with gradients."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashtune.core.pytorch import devices
from flashtune.core.pytorch.attention import out_strides, transformed
from flashtune.core.pytorch.private import C, check_of
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.call.inspection import PLAIN_TYPES, is_distributed
from flashtune.dispatch.plans.plan import Recent, guarded

_KERNELS = (torch.float16, torch.bfloat16, torch.float32)
_MOST_PARTS = 32
"""Most parts of a launch, whose arguments they are; more are merged in several."""
_MOST_COLUMNS = 2048

Parts = tuple[list[Tensor], list[Tensor]]
"""Outputs and LSEs."""

Pair = tuple[Tensor, Tensor]
"""Keys and values, or an output and its LSE."""


def check_pairs(**pairs: object) -> None:
    """Raise InputTypeError for an argument that isn't a pair of keys and values."""
    for name, pair in pairs.items():
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(x, Tensor) for x in pair)):
            raise InputTypeError(f"{name} must be keys and values, not {type(pair).__name__}: give a pair of tensors")


def merge(parts: Sequence[tuple[Tensor, Tensor]], *, packed: bool = False) -> tuple[Tensor, Tensor]:
    """Output and LSE of attention over all keys, from those of the same queries over parts of them.

    Each key belongs to one part, and so do sinks where a call has them. Masks, windows and diagonals are those of the parts' calls.

    Args:
        parts: (output, LSE) of each part, as `attention(..., return_lse=True)` returns them: (..., H, N, D_v) in float16, bfloat16, float32
            or float64, and (..., H, N). A row whose LSE is -inf attended to nothing: its output isn't read.
        packed: the parts are of `attention_varlen`: (T, H, D_v) and (H, T).

    Returns:
        (output, LSE), laid out as the parts'; 0 and -inf in rows that attended to nothing in any part.

    Raises:
        InputError: for no parts at all, and for sizes or devices that differ.
        InputTypeError: for what is no pair of tensors, and for other dtypes.

    Weights and sums are in float32, for float64 in float64, and the bits of a row depend on its own numbers alone. On a GPU one kernel
    merges, and one computes the gradients of outputs and LSEs. PyTorch's operations do it on a CPU, for float64, and where a compiler or a
    transform looks into the call.
    """
    if (again := _again(parts, packed)) is not None:
        return again
    outs, lses = _checked(parts, packed)
    out, lse, program = _merged([x.transpose(0, 1) for x in outs] if packed else outs, lses)
    out = out.transpose(0, 1) if packed else out
    tensors = [*outs, *lses]
    if program is not None and guarded(tensors):
        grad_mode = torch.is_grad_enabled() if any(x.requires_grad for x in tensors) else None
        like = tuple((x.shape, x.stride(), x.dtype, x.device) for x in (out, lse))
        _RECENT[len(outs), packed] = Recent((), False, grad_mode, None, check_of(tensors), (program, like))
    return out, lse


_RECENT: dict[tuple[int, bool], Recent] = {}
"""How parts were merged last, by their number and layout, where a call launches a kernel and does nothing else."""


def _again(parts: Any, packed: bool) -> Pair | None:
    """Output and LSE of parts like those that were merged last; None of others."""
    if torch.compiler.is_compiling() or type(parts) not in (list, tuple) or type(packed) is not bool:
        return None
    recent = _RECENT.get((len(parts), packed))
    if recent is None or any([type(part) is not tuple or len(part) != 2 for part in parts]):
        return None
    tensors = [*[out for out, _ in parts], *[lse for _, lse in parts]]
    try:
        if not (recent.check(*tensors) and recent.unchanged([x.data_ptr() for x in tensors])):
            return None
    except (AttributeError, TypeError, RuntimeError):
        # What is no tensor, or has no memory, is looked at more closely.
        return None
    program, like = recent.plan
    out, lse = [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype, device in like]
    program.run([x.data_ptr() for x in (*tensors, out, lse)])
    return out, lse


def _merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor, Any]:
    """Output and LSE of checked parts (..., H, N, D_v), and what the driver launched where it did nothing else."""
    if not _kernels_serve([*outs, *lses]):
        return *_by_torch(outs, lses), None
    if len(outs) > _MOST_PARTS:
        # Rounded to their dtype once, as those of one launch are.
        bunches = [slice(begin, begin + _MOST_PARTS) for begin in range(0, len(outs), _MOST_PARTS)]
        out, lse, _ = _merged(*map(list, zip(*[_merged([x.float() for x in outs[one]], lses[one])[:2] for one in bunches], strict=True)))
        return out.to(outs[0].dtype), lse, None
    shape, of_lse = outs[0].shape, lses[0].shape
    rows = (math.prod(of_lse[:-2]), *(1, *of_lse)[-2:])
    folded = [x.reshape(*rows, shape[-1]) for x in outs], [x.reshape(rows) for x in lses]
    program = None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*outs, *lses)):
        out, lse = _Merge.apply(len(outs), *folded[0], *folded[1])  # type: ignore[no-untyped-call]
    else:
        out, lse, program = _by_kernel(*folded)
        if any(a.data_ptr() != b.data_ptr() for a, b in zip((*outs, *lses), (*folded[0], *folded[1]), strict=True)):
            program = None
    return out.view(shape), lse.view(of_lse), program


def _by_kernel(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor, Any]:
    """Output and LSE of parts (batch, heads, rows, columns), and what the driver launched where it read them as they are."""
    strides = _strides(outs[0])
    laid = [_laid(strides, x) for x in outs], [_laid(None, x) for x in lses]
    out, lse, program = _kernel().merged(*laid)
    copied = any(a is not b for a, b in zip((*outs, *lses), (*laid[0], *laid[1]), strict=True))
    return out, lse, None if copied else program


def _kernel() -> Any:
    """The module of the kernels, which needs Triton."""
    from flashtune.dispatch.parts import kernel

    return kernel


class _Merge(torch.autograd.Function):
    """The kernels, for parts (batch, heads, rows, columns)."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Output and LSE, kept beside the parts for the gradients."""
        out, lse, _ = _by_kernel(tensors[:count], tensors[count:])
        ctx.save_for_backward(*tensors, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of the parts that need them."""
        *tensors, out, lse = ctx.saved_tensors
        count, needed = len(tensors) // 2, ctx.needs_input_grad[1:]
        found: list[Tensor | None] = [None] * (2 * count)
        if dout is not None or dlse is not None:
            wanted = [place for place in range(count) if needed[place] or needed[count + place]]
            parts = [tensors[place] for place in wanted], [tensors[count + place] for place in wanted]
            grads = gradients(parts, out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
            for place, *of_part in zip(wanted, *grads, strict=True):
                found[place], found[count + place] = of_part
        return None, *(x if need else None for x, need in zip(found, needed, strict=True))


def gradients(parts: Parts, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Parts:
    """Gradients of outputs and LSEs of parts (batch, heads, rows, columns), which needn't be all that were merged to `out` and `lse`."""
    outs, lses = parts
    if torch.is_grad_enabled() or not _kernels_serve([*outs, *lses, out, lse, dout, *([] if dlse is None else [dlse])]):
        found = [_part_by_torch(*part, out, lse, dout, dlse) for part in zip(outs, lses, strict=True)]
        return [x for x, _ in found], [x for _, x in found]
    strides = _strides(out)
    of_lse = None if dlse is None else _laid(None, dlse)
    laid = [_laid(strides, x) for x in outs], [_laid(None, x) for x in lses]
    grads: Parts = _kernel().gradients(*laid, _laid(strides, out), _laid(None, lse), _laid(strides, dout), of_lse)
    return grads


def _strides(x: Tensor) -> tuple[int, ...]:
    """Dense strides of a part's kind, with its rows in the order that they have in memory."""
    batch, heads, rows, columns = x.shape
    return out_strides((batch, heads, rows, columns), x.stride())


def _laid(strides: tuple[int, ...] | None, x: Tensor) -> Tensor:
    """A tensor as kernels read it: with these strides, else contiguous, and on 16-byte boundaries. Strides of dimensions of 1 don't
    count."""
    wanted = (math.prod(x.shape[1:]), math.prod(x.shape[2:]), 1) if strides is None else strides
    x = x.resolve_neg()
    alike = all(size == 1 or ours == theirs for size, ours, theirs in zip(x.shape, wanted, x.stride(), strict=True))
    return x if alike and x.data_ptr() % 16 == 0 else x.new_empty_strided(x.shape, wanted).copy_(x)


def _by_torch(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The same by operations that compilers and transforms look into; each sum has one order, whatever the sizes."""
    wide = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
    levels = [x.to(wide) for x in lses]
    top = levels[0].detach()
    for level in levels[1:]:
        top = torch.maximum(top, level.detach())
    top = torch.where(top == -math.inf, 0.0, top)
    total, sums = torch.zeros_like(top), torch.zeros_like(outs[0], dtype=wide)
    for out, level in zip(outs, levels, strict=True):
        weight = torch.exp(level - top)
        sums = sums + weight[..., None] * torch.where((level == -math.inf)[..., None], 0.0, out.to(wide))
        total = total + weight
    nothing = total == 0.0
    total = torch.where(nothing, 1.0, total)
    merged = torch.where(nothing[..., None], 0.0, sums / total[..., None])
    return merged.to(outs[0].dtype), torch.where(nothing, -math.inf, top + torch.log(total)).to(lses[0].dtype)


def _part_by_torch(out: Tensor, lse: Tensor, whole: Tensor, whole_lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of one part's output and LSE, likewise."""
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    seen = lse != -math.inf
    weight = torch.where(seen, torch.exp(lse.to(wide) - torch.where(seen, whole_lse, 0.0).to(wide)), 0.0)
    given, difference = (torch.where(seen[..., None], x, 0.0) for x in (dout.to(wide), out.to(wide) - whole.to(wide)))
    of_lse = (given * difference).sum(-1)
    if dlse is not None:
        of_lse = of_lse + torch.where(seen, dlse, 0.0)
    return (weight[..., None] * given).to(out.dtype), (weight * of_lse).to(lse.dtype)


def _kernels_serve(tensors: Sequence[Tensor]) -> bool:
    """True where kernels take these tensors, the first of which is an output."""
    if torch.compiler.is_compiling() or not devices.TRITON or transformed() or C._len_torch_dispatch_stack() or C._is_tracing():
        return False
    first, runs = tensors[0], devices.INTERPRETING and tensors[0].is_cpu and tensors[0].dtype is not torch.bfloat16
    return (
        (first.is_cuda or runs)
        and 0 < first.shape[-1] <= _MOST_COLUMNS
        and 0 < first.numel() < 2**31 * first.shape[-1]
        and all(type(x) in PLAIN_TYPES and x.dtype in _KERNELS for x in tensors)
        and all(x.dtype is torch.float32 for x in tensors if x.dim() < first.dim())
    )


def _checked(parts: Any, packed: bool) -> Parts:
    """Outputs and LSEs of parts that fit to each other."""
    if not isinstance(parts, Sequence) or not parts:
        raise InputError(f"parts are {type(parts).__name__} with nothing to merge: give a list of (output, LSE), one pair at least")
    if not isinstance(packed, bool):
        raise InputTypeError(f"packed must be True or False, not {packed!r}: say which layout the parts have")
    for number, part in enumerate(parts):
        if not (isinstance(part, Sequence) and len(part) == 2 and all(isinstance(x, Tensor) for x in part)):
            raise InputTypeError(
                f"part {number} is no pair of tensors: give (output, LSE), as attention(..., return_lse=True) returns them"
            )
        if any(map(is_distributed, part)):
            raise InputTypeError(f"part {number} is a DTensor, and merging is of one rank: call with to_local() of each tensor")
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    like, rows = outs[0], lses[0]
    for number, (out, lse) in enumerate(parts):
        if out.dtype not in (*_KERNELS, torch.float64) or lse.dtype not in (torch.float32, torch.float64):
            raise InputTypeError(f"part {number} is {out.dtype} with an LSE in {lse.dtype}: give a floating output and its LSE in float32")
        if (out.dtype, lse.dtype) != (like.dtype, rows.dtype):
            raise InputTypeError(f"part {number} is {out.dtype} with an LSE in {lse.dtype}, and part 0 {like.dtype} {rows.dtype}: cast it")
        if out.shape != like.shape or lse.shape != rows.shape:
            said = tuple(out.shape), tuple(lse.shape), tuple(like.shape), tuple(rows.shape)
            raise InputError(
                f"part {number} has the shapes {said[0]} and {said[1]}, and part 0 {said[2]} and {said[3]}: merge equal queries"
            )
        if out.device != like.device or lse.device != like.device:
            raise InputError(f"part {number} is on {out.device} with an LSE on {lse.device}, and part 0 on {like.device}: use one device")
    fits = packed and like.dim() == 3 and rows.shape == (like.shape[1], like.shape[0])
    if not (fits if packed else like.dim() >= 2 and rows.shape == like.shape[:-1]):
        other = "pass packed=True for (T, H, D_v) and (H, T)" if not packed else "without packed they are (..., H, N, D_v) and (..., H, N)"
        raise InputError(f"outputs {tuple(like.shape)} don't fit to LSEs {tuple(rows.shape)}: {other}")
    return outs, lses
