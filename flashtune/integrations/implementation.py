"""`FLASHTUNE` among the implementations of torch.nn.attention: PyTorch's attention and varlen_attn by dispatch, in a whole process.

    torch.nn.attention.activate_flash_attention_impl("FLASHTUNE")

PyTorch imports this module then, and `restore_flash_attention_impl` undoes it.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtune import dispatch
from flashtune.core.pytorch.private import end, found, kernel_of
from flashtune.core.system.errors import EnvironmentProblem, InputError, InputTypeError
from flashtune.dispatch.call.inspection import PERHAPS_FAKE, PLAIN_TYPES, why_torch_now
from flashtune.dispatch.policy.offers import OURS
from flashtune.integrations import swap

_KEYS = ("AutogradCPU", "AutogradCUDA", "CPU", "CUDA")
"""Dispatch keys at which calls are served: tensors made under torch.inference_mode have none of autograd."""

_IGNORED = frozenset({"backend", "lse", "rng_state"})
"""Arguments of PyTorch's operators about kernels of its own."""

_BETWEEN = frozenset({swap.__name__, "torch._ops", "torch.nn.attention.varlen"})
"""Modules that pass on a call of another's."""


class _Serving(threading.local):
    """Per-thread flag, True inside a call that is served: what a library calls meanwhile is PyTorch's."""

    inside = False


_SERVING = _Serving()


class Activated:
    """The operators in PyTorch's dispatcher, and attention for compilers in torch.nn.functional, from now on until `remove`."""

    def __init__(self) -> None:
        _torchs("aten::scaled_dot_product_attention", "CPU")
        # PyTorch defines those of packed sequences when torch.nn.attention.varlen is imported; its own gradients of them run on GPUs alone.
        libraries = {namespace: torch.library.Library(namespace, "IMPL") for namespace in ("aten", "torch_attn")}  # type: ignore[no-untyped-call]
        self._libraries: dict[str, Any] = libraries
        self._serve("aten::scaled_dot_product_attention", _dense, _KEYS)
        self._serve("torch_attn::_varlen_attn", _packed, _KEYS)
        self._serve("torch_attn::_varlen_attn_out", _packed_into, _KEYS)
        self._serve("torch_attn::_varlen_attn_backward", _packed_gradients, ("AutogradCPU",))
        self._leave = swap.for_compilers()

    def _serve(self, name: str, serve: Callable[..., Any], keys: Sequence[str]) -> None:
        namespace, operator = name.split("::")
        for key in keys:
            self._libraries[namespace].impl(operator, partial(_called, serve, name, key), key)

    def remove(self) -> None:
        """Leave all calls to PyTorch's kernels again."""
        self._leave()
        for library in self._libraries.values():
            end(library)
        self._libraries.clear()


def _called(serve: Callable[..., Any], name: str, key: str, *arguments: Any, **words: Any) -> Any:
    """Result of an operator by `serve`, else by PyTorch's own kernel."""
    own, names = _torchs(name, key)
    if not (_SERVING.inside or _by_ourselves()):
        given = dict(zip(names, arguments, strict=False)) | words
        for one in _IGNORED & given.keys():
            del given[one]
        if given.keys() <= _KNOWN and _served_now(given):
            _SERVING.inside = True
            try:
                answer = serve(**given)
                if answer is not None:
                    return answer
            except (InputError, InputTypeError):
                # PyTorch takes some calls that ours refuses; else its own error is raised.
                pass
            finally:
                _SERVING.inside = False
    return own(*arguments, **words)


@functools.cache
def _torchs(name: str, key: str) -> tuple[Callable[..., Any], list[str]]:
    """The kernel that PyTorch has of an operator for a dispatch key, and the names of its arguments."""
    namespace, function = name.split("::")
    operator = getattr(getattr(torch.ops, namespace), function).default
    # An operator made of operators has one kernel for all keys; of others that of autograd calls the next.
    own = kernel_of(operator, ("CompositeImplicitAutograd", "Autograd" if key.startswith("Autograd") else "CompositeExplicitAutograd"))
    if own is None:
        raise EnvironmentProblem(
            f"PyTorch {torch.__version__} doesn't let its own kernel of {name} be called: use flashtune.integrations.torchs_place()"
        )
    return own, [one.name for one in operator._schema.arguments]


def _by_ourselves() -> bool:
    """True where this package asks for PyTorch's kernels."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("flashtune.")


def _served_now(given: dict[str, Any]) -> bool:
    """True where kernels may serve these tensors, or the CPU: not under transforms, modes and tracers, nor with flash attention off."""
    query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    plain = all(type(x) in PLAIN_TYPES for x in given.values() if isinstance(x, Tensor))
    return plain and why_torch_now(query, key, value, mask, None) not in PERHAPS_FAKE


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """scaled_dot_product_attention; None where PyTorch's kernels differ: in the pairs that dropout drops, in rounding of other ranks."""
    if dropout_p or not query.dim() == key.dim() == value.dim() == 4:
        return None
    out: Tensor = dispatch.attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return out


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Output, LSE and random state of varlen_attn; None for gradients that PyTorch refuses.

    Raises InputError where no kernel serves on a GPU: PyTorch's own is faster than a call for each sequence.
    """
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if wanted and not seqused_k is block_table is None:
        return None
    sides = (-1, -1) if window_size is None else (window_size[0], window_size[1])
    out, lse = dispatch.attention_varlen(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        scale=scale, window_size=sides, enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table,
        num_splits=num_splits, return_lse=True, implementation=OURS if query.is_cuda else None,
    )  # fmt: skip
    # Compiled code relies on the strides that PyTorch's operator has.
    if not query.is_contiguous():
        out = _laid_out(query, out.shape).copy_(out)
    return out, lse.detach().contiguous(), torch.zeros(2, dtype=torch.uint64, device=query.device)


def _laid_out(query: Tensor, shape: torch.Size) -> Tensor:
    """Empty output with the strides of PyTorch's operator."""
    if query.shape == shape:
        return torch.empty_like(query)
    empty: Callable[..., Tensor] = found(
        "torch.nn.attention._utils._empty_with_matching_layout", lambda query, shape: query.new_empty(shape)
    )
    return empty(query, tuple(shape))


def _packed_into(out: Tensor, **given: Any) -> Tensor | None:
    """LSE of varlen_attn_out, whose output is written into `out`."""
    answer = _packed(**given)
    if answer is None:
        return None
    out.copy_(answer[0])
    return answer[1]


def _packed_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, **given: Any
) -> tuple[Tensor | None, ...] | None:
    """Gradients of query, key and value of varlen_attn in compiled code, by another forward: PyTorch has none on the CPU."""
    q, k, v = tensors = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        answer = _packed(q, k, v, **given, enable_gqa=True)
    return None if answer is None else torch.autograd.grad(answer[0], tensors, grad_out)


_KNOWN = frozenset({"out", "grad_out", *inspect.signature(_dense).parameters, *inspect.signature(_packed).parameters})
"""Arguments that are understood: PyTorch's own kernel serves calls with another."""
