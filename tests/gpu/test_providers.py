"""Attention that others provide, on a GPU: every one that is installed, named by a caller; what a first call measures and keeps; and
verdicts on them."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_torch_serves import exact, inputs, normal
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from flashtune import dispatch
from flashtune.bench.providers import judged_providers
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.core.pytorch.surroundings import Poisoned
from flashtune.core.records.results import IMPLEMENTATIONS, PROVIDERS, Fate
from flashtune.core.system.errors import InputError
from flashtune.db.library import Library
from flashtune.dispatch.decisions import confirming
from flashtune.dispatch.providers.libraries import PROVIDERS as PROVIDERS_HERE
from flashtune.dispatch.providers.torch_backends import TorchBackend
from flashtune.tuner.replies import Spent
from flashtune.tuner.verify.correctness import Verifier
from flashtune.tuner.verify.inputs import make_inputs

SHAPE = (2, 4, 384, 64)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (100, 0), "causal_alignment": "bottom_right"},
    "both sides": {"window": (31, 64), "causal_alignment": "bottom_right"},
    "chunk": {"is_causal": True, "causal_alignment": "bottom_right"},
}

ALWAYS = ("torch", "flash", "efficient", "math", "flashtune", "flex")
"""Implementations that serve plain and causal calls on every GPU since Ampere."""


def answered(name: str, *tensors: Tensor, **words: Any) -> Tensor | None:
    """Output by an implementation; None where it refuses the call, in a sentence that names it."""
    said = ""
    try:
        found: Tensor = dispatch.attention(*tensors, **words, implementation=name)
        return found
    except InputError as error:
        said = str(error)
    assert said.startswith(f"implementation={name!r}"), said
    return None


def bound(found: Tensor, wanted: Tensor, most: float) -> None:
    """Raise where the relative norm of the error is above a bound."""
    assert found.isfinite().all()
    gap = (found.double() - wanted).norm() / wanted.norm()
    assert gap <= most, f"relative error {gap:.3g}, allowed {most:.3g}"


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_named_implementation_is_right_with_gradients_or_says_why_not(name: str, case: str, dtype: torch.dtype) -> None:
    words, n_q = CASES[case], 256 if case == "chunk" else SHAPE[2]
    q, k, v = inputs(*SHAPE[:2], n_q, SHAPE[3], n_kv=SHAPE[2], dtype=dtype)
    refused = {one.name: one.why for one in dispatch.explain(q, k, v, **words).providers}
    # PyTorch sets its order at its first choice.
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    order = torch._C._get_sdp_priority_order()
    found = answered(name, q, k, v, **words)
    if found is None:
        assert name not in ALWAYS or case not in ("plain", "causal")
        return
    assert refused[name] is None and torch._C._get_sdp_priority_order() == order
    dout = normal(*found.shape, dtype=dtype, seed=9)
    wanted, gradients = exact({"q": q, "k": k, "v": v}, dout, words)
    allowed = TOLERANCES["bf16" if dtype == torch.bfloat16 else "fp16"]
    bound(found.detach(), wanted, allowed.relative_norm)
    for one, other in zip(torch.autograd.grad(found, [q, k, v], dout), gradients.values(), strict=True):
        bound(one, other, allowed.gradient_norm)
    with torch.no_grad():
        bound(dispatch.attention(q, k, v, implementation=name, **words), wanted, allowed.relative_norm)


@pytest.mark.parametrize("name", ["cudnn_fe", "ffpa"])
@pytest.mark.parametrize("case", ["plain", "causal", "chunk"])
@pytest.mark.parametrize("d", [320, 512, 1024])
def test_large_heads_are_right_with_gradients_or_refused(name: str, case: str, d: int) -> None:
    words, n_q = CASES[case], 640
    q, k, v = inputs(1, 4, n_q, d, n_kv=640 if case == "causal" else 768)
    with torch.no_grad():
        found = answered(name, q, k, v, **words)
    dout = normal(1, 4, n_q, d, seed=9)
    wanted, gradients = exact({"q": q, "k": k, "v": v}, dout, words)
    allowed = TOLERANCES["bf16"]
    if found is not None:
        bound(found, wanted, allowed.relative_norm)
    trained = answered(name, q, k, v, **words)
    if trained is not None:
        for one, other in zip(torch.autograd.grad(trained, [q, k, v], dout), gradients.values(), strict=True):
            bound(one, other, allowed.gradient_norm)


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 80, 100, 128])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_a_named_backend_gives_the_bits_of_pytorchs_function(name: str, dtype: torch.dtype, d: int, kv_heads: int, causal: bool) -> None:
    leaves = [normal(2, heads, 384, d, dtype=dtype, seed=place).requires_grad_() for place, heads in enumerate((8, kv_heads, kv_heads))]
    words: dict[str, Any] = {"is_causal": causal, "enable_gqa": kv_heads < 8}
    found = answered(name, *leaves, **words)
    if found is None:
        pytest.skip("PyTorch doesn't give it this call")
    dout, backend = normal(*found.shape, dtype=dtype, seed=9), PROVIDERS_HERE[name]
    assert isinstance(backend, TorchBackend)
    with sdpa_kernel([backend.backend]):
        wanted = torch.nn.functional.scaled_dot_product_attention(*leaves, **words)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    # Backends may add dQ up in no fixed order.
    for one, other in zip(torch.autograd.grad(found, leaves, dout), torch.autograd.grad(wanted, leaves, dout), strict=True):
        bound(one, other.double(), 1e-3)


@pytest.mark.parametrize("name", PROVIDERS)
def test_shared_heads_masks_and_sinks(name: str) -> None:
    q, k, v = (normal(2, heads, 384, 64, seed=heads + place) for place, heads in enumerate((8, 2, 2)))
    wide = [q.double(), *(x.double().repeat_interleave(4, 1) for x in (k, v))]
    mask, sinks = torch.rand(2, 1, 1, 384, device="cuda") > 0.3, normal(8, dtype=torch.float32)
    for words in ({}, {"attn_mask": mask}, {"sinks": sinks}):
        found = answered(name, q, k, v, enable_gqa=True, **words)
        if found is not None:
            bound(found, dispatch.attention(*wide, **words), TOLERANCES["bf16"].relative_norm)


def test_a_named_backend_is_the_one_that_runs() -> None:
    q, k, v = inputs(*SHAPE)
    for name in ("flash", "efficient", "cudnn", "math"):
        if answered(name, q, k, v) is None:
            continue
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as ran:
            dispatch.attention(q, k, v, implementation=name)
        names = {one.key for one in ran.key_averages()}
        wanted = "aten::_scaled_dot_product_attention_math" if name == "math" else f"aten::_scaled_dot_product_{name}_attention"
        assert wanted in names, (name, sorted(one for one in names if "scaled_dot" in one))


def test_named_implementations_under_graphs_and_compilers() -> None:
    q, k, v = (x.detach() for x in inputs(*SHAPE))
    wanted = dispatch.attention(*(x.double() for x in (q, k, v)))
    for name in ("flash", "efficient", "cudnn", "fa4", "fa2"):
        if answered(name, q, k, v) is None:
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = dispatch.attention(q, k, v, implementation=name)
        graph.replay()
        compiled = torch.compile(lambda q, k, v, name=name: dispatch.attention(q, k, v, implementation=name), fullgraph=True)
        for found in (captured, compiled(q, k, v)):
            bound(found, wanted, TOLERANCES["bf16"].relative_norm)


@pytest.mark.parametrize("kernels", [0, 2])
@pytest.mark.parametrize("words", [{"is_causal": True}, {"window": (127, 0), "causal_alignment": "bottom_right"}])
def test_a_first_call_is_measured_and_kept(
    kernels: int, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch, own_database: Path
) -> None:
    """At sizes without a record, with our kernels and with these hidden."""
    monkeypatch.setattr(confirming, "KERNELS", kernels)
    q, k, v = (x.detach() for x in inputs(3, 5, 700, 64))
    wanted, _ = exact({"q": q.requires_grad_(), "k": k, "v": v}, normal(*q.shape), words)
    q = q.detach()
    # FlexAttention compiles no more kinds of calls than PyTorch's limit for one function.
    torch._dynamo.reset()
    dispatch.reload()
    with dispatch.use(confirm=True), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        bound(dispatch.attention(q, k, v, **words), wanted, TOLERANCES["bf16"].relative_norm)
        explained = dispatch.explain(q, k, v, **words)
        times = {one.name: one.us for one in explained.providers if one.us is not None}
        # What wasn't kept, and why, is warned of.
        said = [str(one.message) for one in told]
        assert explained.source == "measured" and explained.origin == "overlay" and "torch" in times, (said, explained)
        assert ("flashtune" in times) is (kernels > 0)
        fastest = min(times, key=lambda name: times[name] or 0.0)
        chosen = explained.provider or ("torch" if explained.kind == "framework" else "flashtune")
        assert (times[chosen] or 0.0) <= 1.02 * (times[fastest] or 0.0), times
        bound(dispatch.attention(q, k, v, **words), wanted, TOLERANCES["bf16"].relative_norm)
    assert len(Library.of(own_database).records()) == 1
    dispatch.reload()


JUDGED = {
    "plain": Problem(batch=2, heads=8, kv_heads=8, n_q=1024, n_kv=1024, d=64, d_v=64, dtype="bf16"),
    "causal": Problem(batch=1, heads=8, kv_heads=2, n_q=2000, n_kv=2000, d=128, d_v=128, dtype="fp16", features=Features(causal=True)),
    "decode": Problem(batch=8, heads=28, kv_heads=4, n_q=1, n_kv=900, d=128, d_v=128, dtype="bf16"),
    "bias": Problem(batch=1, heads=4, kv_heads=4, n_q=704, n_kv=704, d=64, d_v=64, dtype="bf16", features=Features(mask="bias")),
}


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("kind", JUDGED)
def test_providers_pass_what_kernels_pass(kind: str, direction: Any) -> None:
    """A wrong one is a finding about it, or a bound to be calibrated: the message has the case and by how many tolerances."""
    problem = replace(JUDGED[kind], direction=direction)
    made = make_inputs(problem, device="cuda", seed=5)
    found, calls = judged_providers(made, Verifier(problem, device="cuda", seed=5, full_size=made), Spent())
    print({name: (str(one.fate), one.error, one.reason) for name, one in found.items()})
    assert not {name: one.reason for name, one in found.items() if one.fate is Fate.CORRECTNESS}
    assert all(found[name].fate is Fate.CORRECT for name in calls)


def test_what_is_written_beside_an_output_is_found() -> None:
    """A tensor of that size is given a freed place between two that stay, where an earlier test left none of its own."""
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        _written_beside()


def _written_beside() -> None:
    kernel = torch.cuda._compile_kernel('extern "C" __global__ void beyond(float* x, int n) { x[n + threadIdx.x] = 0.0f; }', "beyond")
    size = 128 * 1024
    for past, seen in ((0, "memory beside its outputs"), (-32, "")):
        poisoned = Poisoned([size], torch.float32, torch.device("cuda"))
        out = torch.empty(size, device="cuda")
        assert out.isnan().all(), "it lies in poisoned memory"
        kernel(grid=(1, 1, 1), block=(32, 1, 1), args=(out, size + past))
        assert poisoned.changed() == seen
