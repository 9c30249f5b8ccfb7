"""Masks and scores as code on a GPU: by kernels, forwards and gradients, against the functions themselves in float64."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mod_cases import CASES, oracle
from mods_machine import shapes
from torch.nn.attention.flex_attention import create_block_mask

from flashtune import dispatch
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.dispatch.state.context import current

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def norm(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm().clamp(min=1e-9))


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    with dispatch.use(unmeasured=True):
        yield


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("d", [64, 60])
def test_only_measured_families_serve_unless_others_are_allowed(d: int, learned: bool) -> None:
    q, k, v = (torch.randn(1, 2, 128, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    bias = torch.randn(128, device="cuda").requires_grad_(learned)
    with dispatch.use(unmeasured=False):
        said = dispatch.explain_flex(q, k, v, lambda score, b, h, q_idx, kv_idx: score + bias[q_idx] * bias[kv_idx]).reason
        hoppers = HOPPER and d % 8 == 0
        assert said.startswith(
            "flash_fwd_hopper " if hoppers else "PyTorch's flex_attention: kernels with these functions weren't measured"
        ), said


@pytest.mark.skipif(not HOPPER, reason="kernels for Hopper")
@pytest.mark.parametrize("block_mask", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", shapes())
def test_hoppers_kernels_agree_with_the_function_itself(name: str, d: int, block_mask: bool) -> None:
    functions, generator = shapes("cuda")[name], torch.Generator().manual_seed(d)
    if block_mask and functions[1] is None:
        pytest.skip("no mask")
    # Queries with heads inside, and keys of odd lengths.
    q = torch.randn(2, 290, 4, d, generator=generator).to("cuda", torch.bfloat16).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, 2, 300, d, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for _ in range(2))
    mask = create_block_mask(functions[1], 2, 4, 290, 300, device="cuda") if block_mask else functions[1]
    given = {"score_mod": functions[0], "block_mask": mask, "enable_gqa": True, "return_lse": True}
    with dispatch.use(unmeasured=False):
        said = dispatch.explain_flex(q, k, v, **given).reason
        assert said.startswith(("flash_fwd_hopper ", "attention with window=")), said
        out, lse = dispatch.flex_attention(q, k, v, **given)
    seen = lse.isfinite()
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)
    ((out * weights).sum() + lse[seen].sin().sum()).backward()
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out64, lse64 = oracle(*doubles, *functions)
    ((out64 * weights.double()).sum() + lse64[seen].sin().sum()).backward()
    bound = TOLERANCES["bf16"]
    assert torch.equal(lse64.isfinite(), seen)
    assert norm(out.detach(), out64.detach()) <= bound.relative_norm
    assert float((lse[seen].double() - lse64[seen]).abs().max()) <= bound.lse_atol
    for ours, theirs in zip((q, k, v), doubles, strict=True):
        assert norm(ours.grad, theirs.grad) <= 2 * bound.gradient_norm


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_learned_biases_over_many_tiles_get_their_gradients(d: int, masked: bool) -> None:
    """Read by the distance of query and key, clamped and not, by the query, by blocks of both, and by the head."""
    generator = torch.Generator("cuda").manual_seed(d)
    words: dict[str, Any] = {"device": "cuda", "generator": generator}
    q, k, v = (torch.randn(2, h, n, d, dtype=torch.bfloat16, **words).requires_grad_() for h, n in ((4, 450), (2, 600), (2, 600)))
    tables = [torch.randn(size, **words).requires_grad_() for size in ((4, 1051), (41,), (450,), (9, 19))]
    rate = torch.randn(4, **words).requires_grad_()

    def functions(every: Any, near: Any, place: Any, both: Any, rate: Any) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            by_distance = every[h, i - j + 600] * (1 + near[(j - i).clamp(-20, 20) + 20] * 0.1)
            return s * (torch.sigmoid(rate[h]) + place[i]) + by_distance + both[i // 64, j // 32]

        return score, (lambda b, h, i, j: (i + 90 >= j) & ((i - j) % 5 != h)) if masked else None

    score_mod, mask_mod = functions(*tables, rate)
    given = {"score_mod": score_mod, "block_mask": mask_mod, "enable_gqa": True}
    assert dispatch.explain_flex(q, k, v, **given).reason.startswith("flash_fwd")
    out = dispatch.flex_attention(q, k, v, **given)
    dout = torch.randn(out.shape, **words)
    (out * dout).sum().backward()
    learned = [*tables, rate]
    twins = [x.detach().double().requires_grad_() for x in (q, k, v, *learned)]
    expected, _ = oracle(*twins[:3], *functions(*twins[3:]))
    (expected * dout.double()).sum().backward()
    for ours, theirs, most in zip((q, k, v, *learned), twins, [2] * 3 + [5] * 5, strict=True):
        assert norm(ours.grad, theirs.grad) <= most * TOLERANCES["bf16"].gradient_norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_function_itself(name: str, dtype: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(5)
    shapes = [(2, 4, case.n_q, 64), (2, 2, case.n_kv, 64), (2, 2, case.n_kv, 128)]
    tensors = [torch.randn(shape, generator=generator).to("cuda", DTYPES[dtype]).requires_grad_() for shape in shapes]
    captured = [x.detach().cuda().requires_grad_(x.requires_grad) for x in case.captured(generator)]
    score_mod, mask_mod = case.functions(*captured)
    mask: Any = mask_mod
    if mask_mod is not None and case.block_mask:
        mask = create_block_mask(mask_mod, 2, 4, case.n_q, case.n_kv, device="cuda")
    given = {"score_mod": score_mod, "block_mask": mask, "enable_gqa": True, "return_lse": True}
    assert dispatch.explain_flex(*tensors, **given).reason.startswith(("flash_fwd", "attention with window="))
    out, lse = dispatch.flex_attention(*tensors, **given)
    seen = lse.isfinite()
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)
    ((out * weights).sum() + lse[seen].sin().sum()).backward()
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    twins = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in captured]
    out64, lse64 = oracle(*doubles, *case.functions(*twins))
    ((out64 * weights.double()).sum() + lse64[seen].sin().sum()).backward()
    bound = TOLERANCES[dtype]
    assert torch.equal(lse64.isfinite(), seen)
    assert norm(out.detach(), out64.detach()) <= bound.relative_norm
    assert float((lse[seen].double() - lse64[seen]).abs().max()) <= bound.lse_atol
    for ours, theirs in zip(tensors, doubles, strict=True):
        assert norm(ours.grad, theirs.grad) <= 2 * bound.gradient_norm
    # Terms of both signs cancel in sums over many pairs.
    for ours, theirs in zip(captured, twins, strict=True):
        if ours.requires_grad and theirs.grad is not None:
            assert norm(ours.grad, theirs.grad) <= 5 * bound.gradient_norm


def test_another_length_compiles_nothing_anew() -> None:
    table = torch.randn(4096, device="cuda")

    def relative(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return s + table[q - k]

    def causal(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q >= k

    def call(n: int) -> torch.Tensor:
        q, k, v = (torch.randn(1, 2, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        found: torch.Tensor = dispatch.flex_attention(q, k, v, relative, causal)
        return found

    def manifests() -> dict[object, object]:
        made = current().packed["kernels of functions"]
        return {place: kernel.code.manifest for place, kernel in made.items() if not isinstance(kernel, str)}

    call(512)
    kernels = manifests()
    for n in (777, 1024, 1031):
        call(n)
    assert manifests() == kernels


CHILD = """
import torch
from flashtune import dispatch
from flashtune.dispatch.plans import launch
compiled, launch.compiled = [], lambda *arguments: compiled.append(arguments) or 1 / 0
q = torch.ones(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
dispatch.flex_attention(q, q, q, lambda s, b, h, q, k: s * 1.0625 + q % 2, lambda b, h, q, k: q >= k)
print("compiled anew" if globals().get("compiled") else "found")
"""


def test_a_new_process_finds_the_kernel(tmp_path: Path) -> None:
    environment = {**os.environ, "FLASHTUNE_CACHE": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    first = "\n".join(line for line in CHILD.splitlines() if not line.startswith("compiled"))
    for script in (first, CHILD):
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == "found", done.stderr[-2000:]


def test_a_call_is_captured_in_a_graph() -> None:
    q, k, v = (torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cuda")
    expected = dispatch.flex_attention(q, k, v, block_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatch.flex_attention(q, k, v, block_mask=mask)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_what_kernels_lack_is_served_by_pytorch() -> None:
    q, k, v = (torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def erfinv(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(s.abs() + 1)

    assert "lgamma" in dispatch.explain_flex(q, k, v, erfinv).reason
    start = time.monotonic()
    out = dispatch.flex_attention(q, k, v, erfinv)
    twins = [x.double() for x in (q, k, v)]
    assert norm(out, oracle(*twins, erfinv, None)[0]) <= TOLERANCES["bf16"].relative_norm, time.monotonic() - start
