"""Calls that only a GPU shows: unseeded dropout in CUDA graphs, vmap, and rows that see no key, whoever serves."""

import contextlib
import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_dispatch_transforms import loss_of
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.band import Sides

GPU = "cuda"


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(GPU, dtype)


def captured(call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Outputs of two replays of a graph of this call."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    found = []
    for _ in range(2):
        graph.replay()
        found.append(out.detach().clone())
    torch.cuda.synchronize()
    return found


DROPPED: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"is_causal": True}, "window": {"window": 17}, "softcap": {"softcap": 3.0}}


def step(words: dict[str, Any], gradient: bool) -> Callable[[], torch.Tensor]:
    """A call with unseeded dropout, or the gradient of its query."""
    q, k, v = (numbers(2, 4, 256, 64, seed=seed, dtype=torch.bfloat16).requires_grad_(gradient) for seed in range(3))

    def run() -> torch.Tensor:
        out: torch.Tensor = dispatch.attention(q, k, v, dropout_p=0.5, **words)
        return torch.autograd.grad(out.sum(), q)[0] if gradient else out

    return run


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("case", DROPPED)
def test_unseeded_dropout_is_captured_after_a_call_of_another_signature_and_draws_anew(case: str, gradient: bool) -> None:
    dispatch.reload()
    step({"is_causal": True} if case == "plain" else {}, gradient)()
    run = step(DROPPED[case], gradient)
    first, second = captured(run)
    assert first.isfinite().all() and not torch.equal(first, second)
    # Nothing was decided: what serves outside of graphs is as before.
    torch.manual_seed(1)
    once = run()
    torch.manual_seed(1)
    assert torch.equal(once, run()) and once.isfinite().all()
    third, fourth = captured(run)
    assert not torch.equal(third, fourth)


@pytest.mark.parametrize("case", ["causal", "softcap"])
def test_it_may_be_the_first_call_of_a_process(case: str) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from test_calls_on_gpu import DROPPED, captured, step
import torch
first, second = captured(step(DROPPED[{case!r}], gradient=True))
assert not torch.equal(first, second)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


VMAPPED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "window": ({"window": 9}, {}),
    "mask": ({}, {"attn_mask": torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) > 0.3}),
    "slopes": ({}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}),
    "sinks": ({}, {"sinks": torch.tensor([0.1, -0.2, 0.3, 1.4])}),
    "softcap and LSE": ({"softcap": 2.0, "return_lse": True, "window": (30, 1)}, {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", VMAPPED)
def test_vmap_gives_what_a_loop_gives(case: str, dtype: torch.dtype) -> None:
    words, tensors = VMAPPED[case]
    tolerance, loss = 3e-2 if dtype == torch.bfloat16 else 2e-3, loss_of(words, list(tensors))
    inputs = [*(numbers(2, 4, 64, 64, seed=seed, dtype=dtype) for seed in range(3)), *(x.to(GPU) for x in tensors.values())]
    for dims in itertools.product((0, None), repeat=len(inputs)):
        if not any(dim == 0 for dim in dims):
            continue
        given = [torch.stack([x, x.flip(-1), x]) if dim == 0 else x for x, dim in zip(inputs, dims, strict=True)]
        each = [[x[i] if dim == 0 else x for x, dim in zip(given, dims, strict=True)] for i in range(3)]
        wanted = torch.stack([torch.func.grad(loss)(*(x.double() for x in one[:3]), *one[3:]) for one in each])
        assert close(torch.vmap(torch.func.grad(loss), dims)(*given), wanted, tolerance), dims
        of_all = torch.func.grad(lambda *x, dims=dims: torch.vmap(loss, dims)(*x).sum())(*given)
        assert close(of_all, wanted if dims[0] == 0 else wanted.float().sum(0), tolerance), dims
        nested = [torch.stack([x, x]) if dim == 0 else x for x, dim in zip(given, dims, strict=True)]
        assert close(torch.vmap(torch.vmap(torch.func.grad(loss), dims), dims)(*nested)[1], wanted, tolerance), dims


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> bool:
    found, wanted = found.double(), wanted.double()
    return bool((found - wanted).norm() <= tolerance * wanted.norm())


SIZES = [(2, 1, 64, 160, 2000), (3, 2, 7, 96, 2000), (2, 4, 256, 64, 256), (2, 2, 300, 64, 100), (1, 2, 1, 128, 500)]


def dead_rows(kind: str, b: int, n_q: int, n_kv: int, dtype: torch.dtype) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Words and the mask of a call some of whose rows see no key."""
    seen = torch.rand(b, 1, n_q, n_kv, generator=torch.Generator().manual_seed(1)) > 0.3
    seen[:, :, n_q // 2] = False
    seen[0, :, 0] = False
    padded = (torch.arange(n_kv) < torch.tensor([0, 7, n_kv])[:b, None])[:, None, None]
    bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    found: dict[str, tuple[dict[str, Any], torch.Tensor | None]] = {
        "mask": ({}, seen),
        "bias": ({}, bias.to(dtype)),
        "padded keys": ({}, padded),
        "window": ({"window": (n_q // 3, -1), "causal_alignment": "top_left"}, None),
        "bottom right": ({"is_causal": True, "causal_alignment": "bottom_right"}, None),
        "mask and window": ({"window": 3}, seen),
    }
    words, mask = found[kind]
    return words, None if mask is None else mask.to(GPU)


KINDS = {
    "mask": torch.float16,
    "bias": torch.bfloat16,
    "padded keys": torch.bfloat16,
    "window": torch.float16,
    "bottom right": torch.bfloat16,
    "mask and window": torch.bfloat16,
}
BACKENDS: dict[str, Sequence[SDPBackend] | None] = {
    "whoever": None,
    "torch": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cuDNN": [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
    "memory-efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


@pytest.mark.filterwarnings("ignore:flashtune:RuntimeWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_see_no_key_are_zero_whoever_serves(kind: str, backend: str) -> None:
    backends, dtype = BACKENDS[backend], KINDS[kind]
    for b, h, n_q, d, n_kv in SIZES:
        words, mask = dead_rows(kind, b, n_q, n_kv, dtype)
        shapes = (b, h, n_q, d), (b, h, n_kv, d), (b, h, n_kv, d)
        x = [numbers(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes)]
        wide = [t.detach().double().requires_grad_() for t in x]
        band = Sides.of(words.get("window"), words.get("is_causal", False), words.get("causal_alignment", "top_left")).band(n_q, n_kv)
        wanted, lse = reference.attention(*wide, mask=mask, band=band, scale=d**-0.5)
        dead = lse == float("-inf")
        wanted.square().sum().backward()
        with sdpa_kernel(list(backends)) if backends else contextlib.nullcontext():
            with torch.no_grad():
                plain = dispatch.attention(*x, attn_mask=mask, **words)
                again, found_lse = dispatch.attention(*x, attn_mask=mask, return_lse=True, **words)
            out = dispatch.attention(*x, attn_mask=mask, **words)
            grads = torch.autograd.grad(out.float().square().sum(), x)
        place = (b, h, n_q, d, n_kv)
        for found in (plain, again, out.detach()):
            assert not found[dead].any() and close(found, wanted.detach(), 2e-2), place
        assert torch.equal(found_lse == float("-inf"), dead), place
        assert not grads[0][dead].any(), place
        assert all(close(grad, t.grad, 3e-2) for grad, t in zip(grads, wide, strict=True) if t.grad is not None), place


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_explain_names_what_serves_before_the_call_and_after(dtype: torch.dtype) -> None:
    for b, h, n_q, d, n_kv in SIZES[:2]:
        x = [numbers(b, h, n, d, dtype=dtype) for n in (n_q, n_kv, n_kv)]
        dispatch.reload()
        for kind in ("mask", "bottom right"):
            words, mask = dead_rows(kind, b, n_q, n_kv, dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                before = dispatch.explain(*x, attn_mask=mask, **words)
            with warnings.catch_warnings():
                # A kernel that fails now, explain would have named wrongly.
                warnings.simplefilter("error", RuntimeWarning)
                dispatch.attention(*x, attn_mask=mask, **words)
            after = dispatch.explain(*x, attn_mask=mask, **words)
            assert (before.kind, before.variant_id) == (after.kind, after.variant_id), (kind, b, h, n_q, d, n_kv)
