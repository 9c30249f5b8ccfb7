"""`flex_attention`: PyTorch's torch.nn.attention.flex_attention, masks and scores as code, run by kernels where they can."""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from flashtune.core.pytorch import devices
from flashtune.core.pytorch.flex import Mod
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch import api
from flashtune.dispatch.call.parse import check_flags, check_implementation, number, unwrapped, wants_lse
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions.blocks import FlexCall, sizes_of
from flashtune.dispatch.functions.by_torch import flex_by_torch, lacks
from flashtune.dispatch.functions.decided import call_of
from flashtune.dispatch.functions.documents import PackedCall, attend_packed, explained_packed
from flashtune.dispatch.functions.kernels import explained_kernel, problem_with_functions
from flashtune.dispatch.functions.recent import Planned, keep_recent, recent_call
from flashtune.dispatch.functions.trained import attend_by_kernels
from flashtune.dispatch.rows.kernel import Kernel, NotBuilt
from flashtune.dispatch.state.context import current
from flashtune.dispatch.typed import with_signature_of
from flashtune.templates.mods.graph import INDICES

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ..., block_mask: "BlockMask | Mod | None" = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: Literal[False] = ..., kernel_options: dict[str, Any] | None = ..., *,
    return_aux: None = ..., implementation: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ..., block_mask: "BlockMask | Mod | None" = ...,
    scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[True], kernel_options: dict[str, Any] | None = ...,
    return_aux: None = ..., implementation: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ..., block_mask: "BlockMask | Mod | None" = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: bool = ..., kernel_options: dict[str, Any] | None = ..., *,
    return_aux: "AuxRequest", implementation: str | None = ...,
) -> tuple[Tensor, "AuxOutput"]: ...  # fmt: skip


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = ..., block_mask: "BlockMask | Mod | None" = ...,
    scale: float | None = ..., enable_gqa: bool = ..., return_lse: bool = ..., kernel_options: dict[str, Any] | None = ..., *,
    return_aux: "AuxRequest | None" = ..., implementation: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, "AuxOutput"]: ...  # fmt: skip


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: "BlockMask | Mod | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: "AuxRequest | None" = None,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, "AuxOutput"]:
    """Attention whose mask and scores are functions, as torch.nn.attention.flex_attention.flex_attention takes them.

    Args:
        query: (B, Hq, L, E).
        key: (B, Hkv, S, E), or with batch 1 for all.
        value: (B, Hkv, S, Ev).
        score_mod: (score, b, h, q_idx, kv_idx) to the score that the softmax takes, of scalar tensors, by pointwise operations; captured
            tensors are read by index, and get gradients if they need them.
        block_mask: a BlockMask, whose mask_mod and blocks say which pairs are visible, or a mask_mod (b, h, q_idx, kv_idx) to a bool.
        scale: factor of scores before score_mod; None is 1/sqrt(E).
        enable_gqa: allow fewer key heads than query heads.
        return_lse: return (output, lse), lse (B, Hq, L) float32, the natural logarithm of the softmax's denominator.
        kernel_options: options of PyTorch's kernels where these run the call.
        return_aux: an AuxRequest, for (output, AuxOutput).
        implementation: who runs the call, whatever the records say: "flashtune" (kernels of ours, measured or not) or "torch"; on a GPU
            "flex" is PyTorch's flex_attention, too. Other names are refused, since their libraries take no functions. torch.compile traces
            PyTorch's.

    Returns:
        The output (B, Hq, L, Ev), or (output, lse), or (output, AuxOutput).

    Raises:
        InputError: for functions that branch on values, change tensors, read beyond a captured tensor or return no scalar, and for an
            implementation that can't run the call.

    The functions are traced once for all calls with equal code, sizes of captured tensors and numbers. They are compiled into kernels,
    which skip tiles without a visible pair. If `attention` has an option for what they compute, it runs the call with that option;
    documents run as packed sequences.

    If no kernel can run the call, PyTorch's flex_attention does, compiled on a GPU: on the CPU, for float64, in torch.compile, for
    operations that kernels lack. It also does if it was faster in a search of these functions, and on GPUs other than Hopper's until a
    search measured them; FLASHTUNE_UNMEASURED=1 or `use(unmeasured=True)` allows unmeasured kernels there. Gradients on a CPU, which
    PyTorch's function lacks, are computed by matrices of all scores. `explain_flex` says what runs a call.
    """
    with_lse = return_lse if return_aux is None and type(return_lse) is bool else wants_lse(return_lse, return_aux)
    if type(enable_gqa) is not bool or kernel_options is not None or not (scale is None or type(scale) is float):
        scale = _settled(scale, enable_gqa, kernel_options)
    options: tuple[Any, ...] = (scale, enable_gqa, with_lse, return_aux)
    if implementation is not None:
        check_implementation(implementation)
        options = (*options, implementation)
    call = recent_call((query, key, value), score_mod, block_mask, options)
    if call is None:
        flex_functions.check_functions(score_mod, block_mask, "block_mask")
        query, key, value = _checked_call(query, key, value, scale, enable_gqa, kernel_options)
        call = call_of(query, key, value, score_mod, block_mask, scale, enable_gqa, return_aux, with_lse, implementation)
        keep_recent(call, (query, key, value), score_mod, block_mask, options)
    out: Tensor
    lse: Any
    if type(call) is tuple:
        repeat, mods, addresses = call
        out, lse = repeat.run(query, addresses, mods, with_lse=with_lse)
    elif isinstance(call, Planned):
        out, lse = call.plan.run(query, key, value, None, None, None)
    elif isinstance(call, str):
        words = scale, enable_gqa, return_lse, kernel_options, return_aux
        if torch.compiler.is_compiling():
            return flex_by_torch(query, key, value, score_mod, block_mask, *words)
        try:
            return flex_by_torch(query, key, value, score_mod, block_mask, *words)
        except Exception:
            if (refused := _untraceable(query, key, score_mod, block_mask)) is not None:
                raise refused from None
            raise
    else:
        try:
            out, lse = _served(query, key, value, call, with_lse=with_lse)
        except NotBuilt:
            # From now on another kernel runs such calls, or PyTorch.
            current().plans.flex.clear()
            return flex_attention(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
                return_aux=return_aux, implementation=implementation,
            )  # fmt: skip
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def _served(
    query: Tensor, key: Tensor, value: Tensor, call: FlexCall | PackedCall | dict[str, Any], *, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Output and LSE of a decided call; the LSE may be None without `with_lse`."""
    if not isinstance(call, (dict, PackedCall)):
        return attend_by_kernels(query, key, value, call, with_lse=with_lse)
    if key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    if isinstance(call, PackedCall):
        return attend_packed(query, key, value, call)
    found: Any = api.attention(query, key, value, return_lse=with_lse, **call)
    return found if with_lse else (found, None)


def _settled(scale: Any, enable_gqa: object, kernel_options: object) -> Any:
    """The scale as Python's float; raises as `parse.settled` does, and for options that are no dictionary."""
    check_flags({"enable_gqa": enable_gqa})
    if kernel_options is not None and not isinstance(kernel_options, Mapping):
        raise InputTypeError(f"kernel_options must be a dictionary or None, not {type(kernel_options).__name__}: pass {{name: value}}")
    scale = unwrapped(scale)
    return scale if scale is None or torch.compiler.is_compiling() else number("scale", scale, wide=True)


def _checked_call(
    query: Any, key: Any, value: Any, scale: float | None, enable_gqa: bool, kernel_options: Any = None
) -> tuple[Any, Any, Any]:
    """Query, key and value without lazy negations; raises for what is no tensor, finite number, bool or dictionary."""
    _settled(scale, enable_gqa, kernel_options)
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and not hasattr(x, "__torch_function__"):
            raise InputTypeError(f"{name} must be a tensor, not {type(x).__name__}: pass torch tensors")
    if scale is not None and (type(scale) is float or not torch.compiler.is_compiling()):
        number("scale", scale, wide=getattr(query, "dtype", None) is torch.float64)
    query, key, value = (x.resolve_neg() if isinstance(x, Tensor) and not x.is_nested else x for x in tensors.values())
    return query, key, value


def _untraceable(query: Any, key: Any, score_mod: Mod | None, block_mask: Any) -> InputError | None:
    """Error for functions that nobody can trace, in place of PyTorch's, which names no line; None for other ones."""
    if not query.dim() == key.dim() == 4:
        return None
    try:
        sizes = zip(INDICES, sizes_of(query, key), strict=True)
        flex_functions.functions_of(score_mod, getattr(block_mask, "mask_mod", block_mask), query.device, sizes)
    except InputError as error:
        return error
    except Exception:
        return None
    return None


@with_signature_of(flex_attention)
def explain_flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Mod | None = None, block_mask: "BlockMask | Mod | None" = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: dict[str, Any] | None = None, *,
    return_aux: "AuxRequest | None" = None, implementation: str | None = None,
) -> Explanation:  # fmt: skip
    """Explanation of the same call of `flex_attention`, whose arguments it takes: its kernel and config, or why PyTorch runs it.

    Returns:
        Who runs the call, and why.

    Raises:
        InputError: as `flex_attention` does.
    """
    given: dict[str, Any] = locals()
    with_lse = wants_lse(given["return_lse"], given["return_aux"])
    given["scale"] = unwrapped(given["scale"])
    check_implementation(given["implementation"])
    flex_functions.check_functions(given["score_mod"], given["block_mask"], "block_mask")
    tensors = _checked_call(*(given[name] for name in ("query", "key", "value", "scale", "enable_gqa", "kernel_options")))
    given |= dict(zip(("query", "key", "value"), tensors, strict=True))
    gpu = devices.slug_here(given["query"].device) if isinstance(given["query"], Tensor) else "cpu"
    names = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_aux")
    call = call_of(*[given[name] for name in names], with_lse, given["implementation"])  # type: ignore[call-arg]
    if isinstance(call, str):
        need = lacks(*(given[name] for name in ("query", "key", "value", "return_lse", "return_aux", "block_mask")))
        if need is not None:
            reason = f"PyTorch by matrices of all scores: {call}, and PyTorch's flex_attention has no {need} on a CPU"
            return Explanation(kind="framework", reason=reason, gpu=gpu)
        return Explanation(kind="framework", reason=f"PyTorch's flex_attention: {call}", gpu=gpu)
    if isinstance(call, PackedCall):
        return explained_packed(call, *(given[name] for name in names[:3]))
    if isinstance(call, dict):
        served = api.explain(*(given[name] for name in names[:3]), return_lse=with_lse, **call)
        more = "".join(f", {name}" for name in call if name not in ("window", "scale", "enable_gqa", "implementation"))
        return replace(served, reason=f"attention with window={call['window']}{more}: {served.template or 'PyTorch'}, {served.reason}")

    def of(kernel: Kernel) -> Explanation:
        assert kernel.variant is not None, "kernels with functions aren't pinned"
        mask = "by the lists of its BlockMask, " if call.functions.blocks is not None else ""
        said = f"{kernel.variant.template} {kernel.variant.id}, {mask}functions {kernel.spec.mods}"
        problem = problem_with_functions(kernel.spec.direction, given["query"], given["key"], given["value"], kernel.spec.mods)
        return explained_kernel(kernel, said, gpu, problem)

    backward = call.kernels.backward
    return replace(of(call.kernel), backward=None if backward is None else of(backward))


_TAKEN = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "implementation")
"""Arguments of `attention` that `flex_attention` has, too."""


_USUAL = {name: one.default for name, one in inspect.signature(api.attention).parameters.items() if name not in _TAKEN}
"""Arguments of `attention` that `flex_attention` lacks, with their defaults."""


def refuse_arguments_of_attention(given: Mapping[str, Any]) -> None:
    """Raise InputError likewise for an argument of `attention` that `flex_attention` lacks."""
    flex_functions.refuse_beside_functions(given, _USUAL, "block_mask", "call attention without functions")


def explained_by_flex(given: dict[str, Any]) -> Explanation:
    """Explanation of such a call of `attention`."""
    refuse_arguments_of_attention(given)
    return explain_flex(**{name: given[name] for name in _TAKEN})


api.functions = sys.modules[__name__]
