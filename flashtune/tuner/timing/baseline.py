"""PyTorch's own attention as the baseline: the same problem through `F.scaled_dot_product_attention`."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import sdpa_kernel

from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.pytorch.attention import BACKENDS, compiled_flex, sound_backends
from flashtune.core.pytorch.flex import Mod, flex_arguments
from flashtune.core.pytorch.private import TorchDispatchMode, kept_by_backwards, sdpa
from flashtune.tuner.timing.masks import mask_mod_of
from flashtune.tuner.verify.inputs import Inputs

EXPRESSIBLE = ("causal", "dropout", "tf32", "alibi", "latent", "packed", "dbias", "dslopes")
"""Flags of problems that PyTorch's functions compute, some by a mask or a bias."""


def pytorch_call(inputs: Inputs, backend: str | None = None, *, step: bool = False) -> Callable[[], object] | None:
    """PyTorch's pass on these inputs (its default choice, or one of `BACKENDS`); None where it can't express the problem.

    A backward is the gradients alone, dQ, dK and dV, then the bias's and the slopes' where requested: the forward that they need runs at
    the first call, and is kept; in a training `step` it runs each time. The default choice leaves out cuDNN where its gradients are
    unreliable (flashtune.core.pytorch.attention).

    A diagonal at the last key is PyTorch's `causal_lower_right`, where that reaches FlashAttention. Other bands that are not PyTorch's own
    causal become a boolean mask, and ALiBi a bias in the inputs' dtype (the one that every backend takes), made once and outside of the
    timed part. Flags beyond `EXPRESSIBLE` have no equivalent, nor have fp8 inputs. Packed sequences are one call of `varlen_attn` where
    that takes them, else a call each; a single backend of their own they don't have. A mask and a score as code are FlexAttention's,
    compiled by a first call, of packed sequences in one call with a document mask. Keys in pages are gathered into rows at each call.
    """
    p = inputs.problem
    if p.dtype == "fp8" or any(on and name not in EXPRESSIBLE for name, on in p.features.flags().items()):
        return None
    if inputs.mods is not None:
        return None if backend is not None else _flex(inputs, step)
    if inputs.sequences:
        return None if backend is not None else _packed(inputs, step)
    call = _Call(inputs, backend)
    if call.lower_right:
        # Imports torch's compiler, for seconds, which other problems shouldn't wait for.
        from torch.nn.attention.bias import causal_lower_right

        mask: torch.Tensor | None = causal_lower_right(p.n_q, p.n_kv)
        # Called directly, since it recognises PyTorch's function by its place in torch.nn.functional, which may be patched.
        call.function = type(mask)._dispatch  # type: ignore[union-attr]
    else:
        try:
            with torch.enable_grad():
                mask = call.joined()
        except torch.OutOfMemoryError:
            return None
    if p.direction == "fwd":
        return lambda: call.forward(inputs.q, inputs.k, inputs.v, mask)
    call.backends = [BACKENDS[backend]] if backend is not None else sound_backends(mask)
    return _gradients(call, mask, step)


class _Call:
    """Forward of `scaled_dot_product_attention` on some inputs, with leaves for the gradients of a bias and slopes."""

    function: Callable[..., torch.Tensor] = staticmethod(sdpa)

    def __init__(self, inputs: Inputs, backend: str | None) -> None:
        p, self.inputs, parameters = inputs.problem, inputs, inputs.parameters
        self.own = inputs.mask
        # Generated slopes are the same in every batch.
        self.slopes = None if parameters.slopes is None else parameters.slopes[:1]
        if self.own is not None and p.features.dbias:
            self.own = self.own.detach().requires_grad_()
        if self.slopes is not None and p.features.dslopes:
            self.slopes = self.slopes.detach().requires_grad_()
        plain = self.own is None and self.slopes is None
        self.causal = plain and parameters.band == Band(right=0)
        self.lower_right = plain and backend in (None, "flash") and _flash_takes_lower_right(inputs)
        self.backends = None if backend is None else [BACKENDS[backend]]

    def joined(self) -> torch.Tensor | None:
        """Bias or mask of the features that PyTorch lacks."""
        p, band, mask = self.inputs.problem, self.inputs.parameters.band, self.own
        if self.slopes is not None:
            mask = reference.joined(reference.alibi(self.slopes, p.n_q, p.n_kv, band.diagonal).to(self.inputs.q.dtype), mask)
        if not band.bounded or self.causal:
            return mask
        return reference.hidden_outside(reference.visible(band, p.n_q, p.n_kv, self.inputs.q.device), mask)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Output (B, Hq, N_q, D_v)."""
        p, parameters = self.inputs.problem, self.inputs.parameters
        with nullcontext() if self.backends is None else sdpa_kernel(self.backends):
            kwargs = {"dropout_p": parameters.dropout_p, "is_causal": self.causal, "scale": parameters.scale, "enable_gqa": p.gqa_ratio > 1}
            return self.function(q, k, v, attn_mask=mask, **kwargs)


def _flex(inputs: Inputs, step: bool) -> Callable[[], object]:
    """FlexAttention's pass with a mask and a score as code."""
    assert inputs.mods is not None, "the caller looked"
    p, functions = inputs.problem, inputs.mods.functions
    source, mask, score = functions.mods("fwd"), functions.mask_mod, functions.score_mod
    q, k, v, by_batch = inputs.q, inputs.k, inputs.v, source.by_batch
    if inputs.sequences:
        # A batch of all rows, without the stride of 0 that launches take.
        q, k, v = (x[0][None] for x in (q, k, v))
        (mask, score), by_batch = _of_documents(inputs, mask, score), False
    words = flex_arguments(
        mask, score, (p.batch if by_batch else None, p.heads if source.by_head else None, q.shape[2], k.shape[2]), q.device
    )
    words |= {"scale": inputs.parameters.scale, "enable_gqa": p.gqa_ratio > 1}
    flex = compiled_flex(dynamic=False)
    if p.direction == "fwd":
        call: Callable[[], object] = lambda: flex(q, k, v, **words)  # noqa: E731
    else:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        call = _differentiated(lambda: flex(*leaves, **words), leaves, inputs.operands["dout"], step)
    # The backward runs many times over one forward's tensors.
    with kept_by_backwards():
        call()
    return call


def _of_documents(inputs: Inputs, mask: Mod | None, score: Mod | None) -> tuple[Mod | None, Mod | None]:
    """A mask and a score over the rows of all packed sequences, at each one's own places, with the document mask."""
    documents = mask_mod_of(inputs.problem, inputs.q.device)
    assert inputs.parameters.lengths is not None, "packed sequences have bounds"
    of_q, of_k, _ = inputs.parameters.lengths
    number = torch.repeat_interleave(torch.arange(len(of_q) - 1, dtype=torch.int32, device=of_q.device), of_q.diff())
    # Each place counts in its own sequence, so that none leaves a captured tensor where the pair is of two.
    first_q, first_k = (torch.repeat_interleave(bounds[:-1], bounds.diff()) for bounds in (of_q, of_k))

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        assert mask is not None, "only functions that there are are called"
        own = mask(number[i], h, i - first_q[i], j - first_k[j])
        return own if documents is None else own & documents(b, h, i, j)

    def scored(x: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        assert score is not None, "only functions that there are are called"
        return score(x, number[i], h, i - first_q[i], j - first_k[j])

    return documents if mask is None else visible, None if score is None else scored


def _packed(inputs: Inputs, step: bool) -> Callable[[], object] | None:
    """PyTorch's pass on packed sequences, gathered from pages where they lie in some: by `varlen_attn`, or a call for each."""
    if (pages := inputs.pages) is not None:
        # A backward has no pages.
        if (call := _packed(replace(inputs, pages=None), step)) is None:
            return None

        def gathered() -> object:
            pages.gather(inputs.k, inputs.v)
            return call()

        return gathered
    if (varlen := _varlen(inputs)) is not None:
        if inputs.problem.direction == "fwd":
            return lambda: varlen(*(x[0].transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v)))
        leaves = [x[0].transpose(0, 1).detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        return _differentiated(lambda: varlen(*leaves), leaves, inputs.operands["dout"][0].transpose(0, 1), step)
    calls = [pytorch_call(part.alone(batch), step=step) for part, batches in inputs.parts() for batch in batches]
    return None if None in calls else lambda: [call() for call in calls if call is not None]


def _varlen(inputs: Inputs) -> Callable[..., torch.Tensor] | None:
    """PyTorch's `varlen_attn` for these inputs; None where it is missing or lacks what they need."""
    p, parameters = inputs.problem, inputs.parameters
    missing = p.features.dropout or p.features.alibi or p.dtype == "fp32" or p.d != p.d_v or inputs.q.device.type != "cuda"
    square = all(n_q == n_kv for n_q, n_kv in inputs.sequences)
    if missing or (p.features.banded and not square and p.features.alignment == "top_left") or parameters.lengths is None:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    if not {"window_size", "scale"} <= known.keys():
        return None
    words: dict[str, Any] = {"scale": parameters.scale}
    words["window_size"] = tuple(-1 if side is None else side for side in (parameters.band.left, parameters.band.right))
    # Earlier versions of torch share key heads without this argument.
    words |= {"enable_gqa": True} if p.gqa_ratio > 1 and "enable_gqa" in known else {}
    cu_q, cu_k, _ = parameters.lengths
    call: Any = varlen_attn
    return lambda q, k, v: call(q, k, v, cu_q, cu_k, *inputs.longest, **words)


def _differentiated(
    forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor, step: bool
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Gradients of the leaves: of a forward that runs once and is kept, or each time in a training `step`."""
    kept: list[torch.Tensor] = []

    def gradients() -> tuple[torch.Tensor, ...]:
        if not kept or step:
            with torch.enable_grad():
                kept[:] = [forward()]
        return torch.autograd.grad(kept[0], leaves, dout, retain_graph=not step)

    return gradients


def _gradients(call: _Call, mask: torch.Tensor | None, step: bool) -> Callable[[], tuple[torch.Tensor, ...]]:
    inputs = call.inputs
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    leaves = [q, k, v, *(x for x in (call.own, call.slopes) if x is not None and x.requires_grad)]
    first = [mask]

    def forward() -> torch.Tensor:
        # A mask that gets gradients needs a graph of its own in each further forward.
        found = first.pop() if first else call.joined() if inputs.problem.features.asked else mask
        return call.forward(q, k, v, found)

    return _differentiated(forward, leaves, inputs.operands["dout"], step)


def backend_name(call: Callable[[], object]) -> str:
    """Name of the PyTorch backend that serves a call, from the operators that it runs, since a profiler takes seconds to start."""

    class Named(TorchDispatchMode):  # type: ignore[misc]
        """Records the operators of a block."""

        names = ""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Otherwise torch would import its whole compiler (seconds) to keep it out of here.
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names += f" {func}"
            return func(*args, **(kwargs or {}))

    with Named() as ran:
        call()
    if "varlen_attn" in ran.names:
        return "varlen"
    return next((name for name in ("cudnn", "flash", "efficient") if f"_scaled_dot_product_{name}_attention" in ran.names), "math")


def _flash_takes_lower_right(inputs: Inputs) -> bool:
    """True where FlashAttention computes the band of these inputs from a diagonal at the last key, without a mask."""
    p, parameters = inputs.problem, inputs.parameters
    if parameters.band.left is not None or parameters.band.right != 0 or parameters.band.diagonal <= 0:
        return False
    return can_use_flash_attention(SDPAParams(inputs.q, inputs.k, inputs.v, None, parameters.dropout_p, False, p.gqa_ratio > 1))
