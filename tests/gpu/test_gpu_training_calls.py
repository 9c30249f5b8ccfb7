"""Training calls on a GPU beyond numbers: prepared launches, parts of gradients, threads, streams, CUDA graphs."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from call_checks import in_threads, inputs
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashtune import dispatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and graphs need a GPU")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def gradients(attend: Callable[..., Any], leaves: list[torch.Tensor], grad: torch.Tensor, **words: Any) -> tuple[torch.Tensor, ...]:
    """The output of a call and its gradients by q, k and v."""
    out = attend(*leaves, **words)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def in_float32(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    hidden: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by its definition, in 16 bits at the end alone."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.mT / q.shape[3] ** 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias
    scores = scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : v.shape[2]] @ v).to(q.dtype)


def alike(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    """Raises where the norms of differences are more than what rounding to 16 bits does."""
    for a, b in zip(ours, theirs, strict=True):
        gap = float((a.float() - b.float()).norm() / b.float().norm())
        assert gap < 2e-2, f"they differ by {gap:.3g} of their norm"


def prepared_backwards() -> list[bool]:
    """For each plan of a backward whether it launches through the driver."""
    from flashtune.dispatch.state import context

    found = [plan.backward for plan in context.current().plans.values() if hasattr(plan, "backward")]
    return [getattr(plan, "program", None) is not None for backward in found for plan, _ in backward._plans.values()]


def test_training_steps_are_launched_through_the_driver() -> None:
    """gradients of plain, causal, mask, bias, window, soft cap and ALiBi calls, strided or with shared heads, by prepared launches"""
    row = torch.arange(384, device="cuda")
    ahead = row[:, None] - row
    mask = torch.rand(2, 1, 384, 384, device="cuda") > 0.3
    bias = torch.randn(1, 8, 384, 384, device="cuda", dtype=torch.bfloat16)
    slopes = torch.rand(8, device="cuda")
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"is_causal": True}, {"hidden": ahead < 0}),
        ({"attn_mask": mask}, {"hidden": ~mask}),
        ({"attn_mask": bias}, {"bias": bias.float()}),
        ({"is_causal": True, "window": 64}, {"hidden": (ahead < 0) | (ahead > 64)}),
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"alibi_slopes": slopes}, {"bias": -slopes[:, None, None] * ahead.abs()}),
    ]
    with dispatch.use(unmeasured=True):
        for d in (64, 128):
            dispatch.reload()
            leaves = inputs(d=d, requires_grad=True)
            # Rows inside of heads, as a model's projections leave them.
            turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
            grad = torch.randn_like(turned[0])
            few = [leaves[0], *(x.detach()[:, :2].contiguous().requires_grad_() for x in leaves[1:])]
            for some in (leaves, turned, few):
                for words, plain in cases:
                    wanted = gradients(partial(in_float32, **plain), some, grad)
                    for _ in range(2):
                        alike(gradients(dispatch.attention, some, grad, enable_gqa=some is few, **words), wanted)
            found = prepared_backwards()
            assert found and all(found), f"{found.count(False)} of {len(found)} backwards went through Triton"


def test_some_gradients_and_that_of_the_lse() -> None:
    """the query's gradient alone, the keys' alone, the LSE's, and dropout's with a seed, twice the same"""
    grad = torch.randn(2, 8, 384, 128, device="cuda", dtype=torch.bfloat16)
    with dispatch.use(unmeasured=True):
        dispatch.reload()
        for wanted in ((True, False, False), (False, True, True)):
            leaves = [x.requires_grad_(asked) for x, asked in zip(inputs(), wanted, strict=True)]
            asking = [x for x in leaves if x.requires_grad]
            ours, theirs = (torch.autograd.grad(attend(*leaves), asking, grad) for attend in (dispatch.attention, sdpa))
            alike(ours, theirs)
        leaves = inputs(requires_grad=True)
        _, lse = dispatch.attention(*leaves, return_lse=True)
        scores = leaves[0].float() @ leaves[1].float().mT / 128**0.5
        ours, theirs = (torch.autograd.grad(x.sum(), leaves[:2]) for x in (lse, scores.logsumexp(-1)))
        alike(ours, theirs)
        # Sums in memory have no order, so that the last bits vary.
        drops = [gradients(dispatch.attention, leaves, grad, dropout_p=0.3, seed=5) for _ in range(2)]
        alike(*drops)


def test_gradients_of_bias_slopes_and_sinks() -> None:
    """gradients of a bias of its own sizes or repeated, of ALiBi slopes and of sinks, beside those of q, k and v, twice the same"""
    row = torch.arange(384, device="cuda")
    ahead = row[:, None] - row
    grad = torch.randn(2, 8, 384, 128, device="cuda", dtype=torch.bfloat16)
    with dispatch.use(unmeasured=True):
        dispatch.reload()
        for dtype in (torch.bfloat16, torch.float32):
            for shape in ((2, 8, 384, 384), (1, 8, 384, 384), (384, 384), (2, 1, 1, 384), (8, 384, 1), (8, 1, 1)):
                leaves = [*inputs(requires_grad=True), torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)]
                # Heavy ones: a softmax sees no number for each row or head but for them, and rounding is all that is left without.
                sinks = (torch.randn(8, device="cuda") + math.log(384)).requires_grad_()
                served = dispatch.explain(*leaves, sinks=sinks)
                assert served.backward is not None, served.reason
                ours, theirs = (
                    torch.autograd.grad(attend(*leaves[:3], **{name: leaves[3]}, sinks=sinks), [*leaves, sinks], grad)
                    for attend, name in ((dispatch.attention, "attn_mask"), (in_float32, "bias"))
                )
                assert ours[3].shape == shape and ours[3].dtype == dtype
                alike(ours, theirs)
        leaves, slopes = inputs(requires_grad=True), torch.rand(8, device="cuda", requires_grad=True)
        for words, hidden in (({}, None), ({"is_causal": True}, ahead < 0)):
            ours = [
                torch.autograd.grad(dispatch.attention(*leaves, alibi_slopes=slopes, **words), [*leaves, slopes], grad) for _ in range(2)
            ]
            bias = -slopes[:, None, None] * ahead.abs()
            theirs = torch.autograd.grad(in_float32(*leaves, bias=bias, hidden=hidden), [*leaves, slopes], grad)
            alike(ours[0], theirs)
            assert torch.equal(ours[0][3], ours[1][3]), "the slopes' gradient is added up in one order"
        found = prepared_backwards()
        assert found and any(found), "no backward is launched through the driver"


def test_training_steps_of_threads_with_streams_of_their_own() -> None:
    """4 threads on 2 streams take training steps of one shape at once, and every gradient is what the step gives alone"""
    streams = [torch.cuda.Stream() for _ in range(2)]
    sets = [inputs(1, 8, 512, 128, requires_grad=True) for _ in range(4)]
    grad = torch.randn_like(sets[0][0])
    torch.cuda.synchronize()
    # A decision that is for all threads.
    with dispatch.use(unmeasured=True, everywhere=True):
        dispatch.reload()
        wanted = [gradients(dispatch.attention, one, grad, is_causal=True) for one in sets]
        torch.cuda.synchronize()

        def work(index: int) -> None:
            with torch.cuda.stream(streams[index % 2]):
                found = [gradients(dispatch.attention, sets[index], grad, is_causal=True) for _ in range(60)]
                torch.cuda.current_stream().synchronize()
                for one in found:
                    alike(one, wanted[index])

        in_threads(4, work)
        assert all(prepared_backwards())


def test_a_graph_captures_a_training_step() -> None:
    """a CUDA graph of a forward and its gradients, captured on a first call and on a known one, follows new inputs"""
    with dispatch.use(unmeasured=True):
        for known in (False, True):
            dispatch.reload()
            leaves = inputs(2, 8, 512, 64, requires_grad=True)
            grad = torch.randn_like(leaves[0])
            # What torch itself sets up at a first backward isn't part of the check.
            gradients(sdpa, leaves, grad, is_causal=True)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                if known:
                    gradients(dispatch.attention, leaves, grad, is_causal=True)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                captured = gradients(dispatch.attention, leaves, grad, is_causal=True)
            for _ in range(3):
                with torch.no_grad():
                    for x in (*leaves, grad):
                        x.normal_()
                junk = [torch.full((1 << 20,), 7, dtype=torch.int32, device="cuda") for _ in range(4)]
                graph.replay()
                torch.cuda.synchronize()
                alike(captured, gradients(sdpa, leaves, grad, is_causal=True))
                del junk
