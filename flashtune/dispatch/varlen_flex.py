"""Packed sequences with a mask and a score as code: kernels that serve them, and a call of `flex_attention` for each sequence."""

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashtune.core.pytorch import devices
from flashtune.core.pytorch.flex import Mod, soft_cap_mod
from flashtune.core.pytorch.private import C
from flashtune.core.system.errors import InputError
from flashtune.dispatch import flex
from flashtune.dispatch.call.parse import cannot_serve
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.functions import by_torch as flex_torch
from flashtune.dispatch.functions import decided as flex_decided
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions.blocks import FlexCall, Functions
from flashtune.dispatch.functions.by_torch import in_band, of_sequence, zero_of
from flashtune.dispatch.functions.kernels import Sequences, distinct, explained_kernel
from flashtune.dispatch.functions.recent import keep_recent, recent_call
from flashtune.dispatch.functions.trained import attend_by_kernels
from flashtune.dispatch.policy.offers import TORCHS
from flashtune.dispatch.rows.by_sequence import by_sequence
from flashtune.dispatch.rows.kernel import Kernel, NotBuilt
from flashtune.dispatch.rows.paged import gathered_whole
from flashtune.dispatch.rows.read import integers
from flashtune.templates.mods import structure
from flashtune.templates.mods.scores import slopes_of


def call_of(
    packed: Packed, numbers: Numbers, score_mod: Mod | None, mask_mod: Mod | None, implementation: str | None = None
) -> FlexCall | dict[str, Any] | str:
    """The call of kernels with these functions, arguments of `attention_varlen` that mean the same, or the reason why PyTorch serves;
    raises InputError where the implementation can't that is named."""
    why = flex_torch.why_torch(*packed[:3], numbers.scale, dimensions=3)
    if why is None and 0 in (packed.sequences, *packed.key.shape[1:], packed.value.shape[2]):
        why = flex_torch.NOTHING
    named = functools.partial(flex_torch.why_named, implementation, query=packed.query, nothing=packed.empty)
    if (why := named(why)) is not None:
        return why
    found = _by_kernels(packed, numbers, score_mod, mask_mod)
    if isinstance(found, dict) and implementation is not None:
        found["implementation"] = implementation
    return (named(found) or found) if isinstance(found, str) else found


def _by_kernels(packed: Packed, numbers: Numbers, score_mod: Mod | None, mask_mod: Mod | None) -> FlexCall | dict[str, Any] | str:
    """The same where no argument leaves the call to PyTorch.

    The number of a sequence isn't compared with captured tensors' sizes, since lists of bounds may be padded to a capacity.
    """
    tensors = packed[:3]
    sizes = ("h", tensors[0].shape[1]), ("q_idx", int(numbers.max_q)), ("kv_idx", int(numbers.max_k))
    found = flex_functions.functions_of(score_mod, mask_mod, tensors[0].device, sizes)
    if isinstance(found, str):
        return found
    functions, captured = found
    if (words := _arguments_of(functions, captured, packed, numbers)) is not None:
        return words
    if functions.mask is not None and max(numbers.left, numbers.right) < 0:
        band, rest = structure.split(functions.mask)
        if band is not None:
            left, right = (-1 if side is None else side for side in band)
            numbers = numbers._replace(left=left, right=right, bottom_right=False)
            # Captured tensors of functions that are traced at every call aren't kept.
            without = replace if functions.fresh else _replaced
            functions = functions if rest is not None else without(functions, mask=None)
    sequences = Sequences((packed.cu_q, packed.cu_k, packed.used), numbers)
    if sequences.deterministic and torch.is_grad_enabled() and any(x.requires_grad for x in captured):
        if not torch.are_deterministic_algorithms_enabled():
            raise InputError("gradients of tensors that score_mod captures are added up in no fixed order: leave deterministic out")
        return "gradients of captured tensors are added up in no fixed order"
    return flex_decided.with_kernel(functions, captured, tensors, numbers.scale, sequences=sequences)


@functools.lru_cache(maxsize=256)
def _replaced(functions: Functions, **changes: None) -> Functions:
    """The functions with changes, the same object for the same ones."""
    return replace(functions, **changes)  # type: ignore[arg-type]


def _arguments_of(functions: Functions, captured: tuple[Tensor, ...], packed: Packed, numbers: Numbers) -> dict[str, Any] | None:
    """The arguments of `attention_varlen` for functions that it has built in; None where it hasn't, or has no gradient of their slopes."""
    if functions.known is None:
        return None
    window, score = functions.known
    placed = window != (None, None) or bool(score.slope)
    # Kernels have one band on one diagonal. Slopes of sequences may be too few for a list of bounds that is padded.
    if (placed and max(numbers.left, numbers.right) >= 0) or score.by_batch:
        return None
    slopes = slopes_of(score, captured, 1, packed.query.shape[1], packed.query.device)
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        return None
    sides = window if placed else (numbers.left, numbers.right)
    return {
        **score.words(numbers.scale),
        "alibi_slopes": slopes if slopes is None else slopes.flatten(),
        "window_size": tuple(-1 if side is None else side for side in sides),
        "causal_alignment": "bottom_right" if numbers.bottom_right and not placed else "top_left",
        "seqused_k": packed.used,
        "enable_gqa": True,
        "allow_tf32": numbers.tf32,
        "deterministic": numbers.deterministic,
    }


def again(given: tuple[Any, ...], options: tuple[Any, ...], score_mod: Any, mask_mod: Any) -> tuple[Tensor, Tensor | None] | None:
    """Output and LSE of a call like one that kernels served before, of tensors as in Packed; None of others.

    `options` are True if an LSE is wanted, the bounds of query and key lengths, and the others.
    """
    query, key, value, cu_q, cu_k, used, *_ = given
    with_lse, max_q, max_k, _ = options
    try:
        call = recent_call(distinct(*given[:6]), score_mod, mask_mod, ("packed", options, cu_k is cu_q, used is None), given[3:6])
        if call is not None and not max_q.__class__ is max_k.__class__ is int:
            integers(max_q, max_k)
    except (AttributeError, TypeError, RuntimeError):
        # What is no tensor, or has no memory, is looked at more closely.
        return None
    if call is None:
        return None
    if type(call) is tuple:
        repeat, mods, addresses = call
        return repeat.run(query, addresses, mods, with_lse=with_lse)  # type: ignore[no-any-return]
    try:
        return attend_by_kernels(query, key, value, call, with_lse=with_lse)
    except NotBuilt:
        return None


def keep(call: FlexCall, given: tuple[Any, ...], options: tuple[Any, ...], score_mod: Any, mask_mod: Any) -> None:
    """Keep a decided call of kernels for others like it."""
    words = "packed", options, given[4] is given[3], given[5] is None
    keep_recent(call, distinct(*given[:6]), score_mod, mask_mod, words)


def attend_with_functions(
    call: FlexCall | str,
    packed: Packed,
    numbers: Numbers,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Output (T_q, Hq, D_v) and LSE (Hq, T_q) by kernels or, for a reason, by `flex_attention`: a call for each sequence, or one for all in
    the graph of a compiler."""
    if isinstance(call, FlexCall):
        try:
            out, lse = attend_by_kernels(*packed[:3], call)
            return out, lse
        except NotBuilt:
            # From now on another kernel serves such calls, or PyTorch.
            again = call_of(packed, numbers, score_mod, mask_mod, implementation)
            assert not isinstance(again, dict), "functions that are built in have no kernels of their own"
            return attend_with_functions(again, packed, numbers, score_mod, mask_mod, implementation)
    named = None if implementation is None else TORCHS
    if unread(packed.query):
        return _at_once(packed, numbers, score_mod, mask_mod, named)
    try:
        zero = functools.partial(zero_of, score_mod, packed.query)
        # Looked up at the call, where measurements put another function in its place.
        attend = flex.flex_attention if named is None else functools.partial(flex.flex_attention, implementation=named)
        return by_sequence(packed, numbers, 0, functools.partial(of_sequence, attend, score_mod, mask_mod), zero)
    except InputError:
        # Of the caller's own functions the error names the line, not of those around them.
        flex_functions.functions_of(score_mod, mask_mod, packed.query.device, ())
        raise


def unread(query: Tensor) -> bool:
    """True where the host can't read lengths: compilers that trace, modes, tensors without memory."""
    return torch.compiler.is_compiling() or bool(C._len_torch_dispatch_stack()) or query.is_meta


_ONE_STAGE = {"fwd_num_stages": 1, "bwd_num_stages": 1}
"""Options of PyTorch's kernels, which hold what functions read by pairs of indices in shared memory, once for each stage: with its three a
bias of relative positions takes more than an H100 has (PyTorch 2.11)."""


def _owners(rows: int, bounds: Tensor) -> Tensor:
    """Number of each row's sequence (rows,), that of all sequences for rows of none.

    No bucketize: PyTorch 2.11's compiler reads its boundaries from the start of their storage, where `bounds[1:]` doesn't begin.
    """
    ends = bounds[1:].clamp(max=rows)
    ended = torch.zeros(rows + 1, dtype=torch.int64, device=bounds.device)
    return ended.index_add(0, ends, torch.ones_like(ends, dtype=torch.int64))[:rows].cumsum(0)


def traced_by_torch(packed: Packed, numbers: Numbers) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call without functions by PyTorch's flex_attention, where lengths can't be read; whole pages are copied."""
    if numbers.dropout_p:
        raise cannot_serve(TORCHS, "a compiler can't trace its dropout, which counts rows of each sequence")
    if packed.table is not None:
        out, lse = traced_by_torch(gathered_whole(packed), numbers)
        return out.to(packed.query.dtype), lse
    shifts = (_lengths(packed)[1] - packed.cu_q.diff()) * numbers.bottom_right
    capped, slopes = soft_cap_mod(numbers.softcap), packed.slopes

    def sloped(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = x if capped is None else capped(x, b, h, i, j)
        return x if slopes is None else x - slopes[b, h] * (i + shifts[b] - j).abs()

    out, lse = _at_once(packed, numbers, capped if slopes is None else sloped, None, TORCHS)
    if packed.sinks is None:
        return out, lse
    # A sink is one more key whose value is 0.
    sinks, seen = packed.sinks.float()[:, None], lse > -math.inf
    known = lse.masked_fill(~seen, 0.0)
    share = torch.where(seen, (known - sinks).sigmoid(), 0.0)
    inside = _owners(len(packed.query), packed.cu_q) < packed.sequences
    total = torch.where(seen, torch.logaddexp(known, sinks), torch.where(inside, sinks, -math.inf))
    return (out * share.T[:, :, None]).to(out.dtype), total


def _lengths(packed: Packed) -> tuple[Tensor, Tensor]:
    """Queries and used keys of each sequence."""
    of_k = packed.cu_k.diff()
    return packed.cu_q.diff(), of_k if packed.used is None else torch.minimum(of_k, packed.used)


def _at_once(
    packed: Packed, numbers: Numbers, score_mod: Mod | None, mask_mod: Mod | None, implementation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE by one call of `flex_attention` whose mask keeps sequences apart: a compiler has no lengths to read."""
    query, key, value, cu_q, cu_k, *_ = packed
    n_q, n_kv = _lengths(packed)
    of_q, of_k = _owners(len(query), cu_q), _owners(len(key), cu_k)
    owner_q, owner = (x.clamp(max=packed.sequences - 1) for x in (of_q, of_k))
    # Of rows, not of pairs, for the same reason as one stage.
    at_q, at_k = (torch.arange(len(x), device=x.device) - cu[own] for x, cu, own in ((query, cu_q, owner_q), (key, cu_k, owner)))
    at_q = torch.where(of_q < packed.sequences, at_q, 0)
    limits, shifts = n_kv[owner_q], (n_kv - n_q)[owner_q] * numbers.bottom_right

    def places(q_idx: Tensor, kv_idx: Tensor) -> tuple[Tensor, ...]:
        together = (of_q[q_idx] == of_k[kv_idx]) & (of_q[q_idx] < packed.sequences)
        # Keys of another sequence may have no place in a captured tensor.
        return together, owner_q[q_idx], at_q[q_idx], torch.where(together, at_k[kv_idx], 0)

    def score(x: Tensor, _: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert score_mod is not None, "only functions that a caller gives are called"
        _, b, i, j = places(q_idx, kv_idx)
        return score_mod(x, b, h, i, j)

    def visible(_: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        together, b, i, j = places(q_idx, kv_idx)
        found = together & (j < limits[q_idx]) & (True if mask_mod is None else mask_mod(b, h, i, j))
        return found & in_band(numbers, i + shifts[q_idx], j)

    # Zeros for rows of no sequence and unused keys: PyTorch multiplies what is hidden by 0, and 0 times NaN is NaN.
    unused, outside = ((of_k >= packed.sequences) | (at_k >= n_kv[owner]))[:, None, None], of_q >= packed.sequences
    hidden = (query, outside[:, None, None]), (key, unused), (value, unused)
    q, k, v = (x.masked_fill(mask, 0.0).transpose(0, 1)[None] for x, mask in hidden)
    words: dict[str, Any] = {"return_lse": True, "kernel_options": dict(_ONE_STAGE), "implementation": implementation}
    gqa = query.shape[1] != key.shape[1]
    out, lse = flex.flex_attention(q, k, v, None if score_mod is None else score, visible, numbers.scale, gqa, **words)
    # Gradients of theirs may be NaN, too.
    return out[0].transpose(0, 1).masked_fill(outside[:, None, None], 0.0), lse[0].masked_fill(outside, -math.inf)


def explained_with_functions(call: FlexCall | str, packed: Packed) -> Explanation:
    """Explanation of who serves such a call."""
    device = packed.query.device
    gpu = devices.slug_here(device)
    if isinstance(call, str):
        return Explanation(kind="framework", reason=f"{call}, so each sequence is a call of flex_attention", gpu=gpu)
    assert call.sequences is not None, "it is a call of packed sequences"
    found = _of_kernel(call.kernel, packed, call.sequences.numbers, gpu)
    backward = call.kernels.backward
    return found if backward is None else replace(found, backward=_of_kernel(backward, packed, call.sequences.numbers, gpu))


def _of_kernel(kernel: Kernel, packed: Packed, numbers: Numbers, gpu: str) -> Explanation:
    spec = kernel.spec
    return explained_kernel(
        kernel, f"packed sequences with the functions {spec.mods}", gpu, problem_of(packed, numbers, spec.direction, mods=spec.mods)
    )
