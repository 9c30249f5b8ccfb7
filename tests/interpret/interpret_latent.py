"""Latent and wide heads in Triton's interpreter: flash_decode by itself, and dense and paged calls that are recognised by their memory."""

import functools
import warnings
from typing import Any

import torch
from interpreting import failures_of
from paged_cases import agrees, inputs
from varlen_cases import forced

from flashtune import dispatch
from flashtune.core.code.launching import launcher, sms_of
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.correctness import check, everywhere, oracle
from flashtune.tuner.verify.inputs import make_inputs

warnings.filterwarnings("ignore")

SIZES: dict[str, tuple[int, int, DType, Features]] = {
    "96 and 64": (96, 64, "fp16", Features(latent=True, causal=True, alignment="bottom_right", sinks=True)),
    "72 and 24 in fp8": (72, 24, "fp8", Features(latent=True, softcap=True, alibi=True)),
    "80 and 40 with a mask": (80, 40, "fp32", Features(latent=True, mask="bool")),
    "320 and 256": (320, 256, "fp16", Features(latent=True, window=(40, 0))),
    "300 and 257 apart": (300, 257, "fp16", Features(causal=True)),
    "512 of many rows": (512, 512, "fp16", Features(causal=True, sinks=True, dropout=True)),
    "257 of many rows in float32": (257, 300, "fp32", Features(mask="bias", window=(20, 9))),
    "320 of many rows in fp8": (320, 320, "fp8", Features(softcap=True, alibi=True, mask="bool")),
}
"""Head sizes, element types and features; those of many rows are of flash_fwd, others of flash_decode."""


def of_case(name: str) -> None:
    """A family by a search's inputs; where keys are split, parts are added up in every way."""
    d, d_v, dtype, features = SIZES[name]
    many = "many rows" in name
    problem = Problem(batch=2, heads=6, kv_heads=2, n_q=70 if many else 3, n_kv=130, d=d, d_v=d_v, dtype=dtype, features=features)
    chosen, target = family("flash_fwd" if many else "flash_decode"), find_target("h200")
    ways = [{}] if many else [{"combine": combine, "BLOCK_M": 16, "BLOCK_N": 32} for combine in ("kernel", "last", "rows")]
    for way in ways:
        config = chosen.default(problem.spec(), target).replace(**way)
        module = load_kernel(render(chosen, variant_of(chosen, problem.spec(), config)), chosen.name)
        given = make_inputs(problem, device="cpu", seed=3)
        more = {} if many else {"sms": sms_of(torch.device("cpu")), "counts": torch.zeros(100, dtype=torch.int32)}
        launch = functools.partial(launcher(module), **more)
        reason = check(launch, given, oracle(given, everywhere(problem))).reason
        assert not reason, (way, reason)


def step(n_q: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(n_q)
    return tuple(torch.randn(2, heads, n, 288, generator=draw).half() for heads, n in ((4, n_q), (1, 70)))  # type: ignore[return-value]


def right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **words: Any) -> None:
    found = dispatch.attention(query, key, value, enable_gqa=True, **words)
    wanted, _ = reference.attention(*(x.double() for x in (query, key, value)), scale=288**-0.5)
    bound = TOLERANCES["fp16"]
    torch.testing.assert_close(found.double(), wanted, atol=bound.atol, rtol=bound.rtol)


def of_dense_calls() -> None:
    """Calls of one layout, whose values are in the keys, beside them, and in them again; each by the plan of its kind."""
    query, key = step()
    beside = torch.randn(key.shape).half()
    for _ in range(2):
        for value in (key, key, beside, beside, key):
            right(query, key, value[..., :256])
        right(query, beside, key[..., :256])
    labels = {}
    for value in (key, beside):
        said = dispatch.explain(query, key, value[..., :256], enable_gqa=True)
        labels[value is key] = said.template, said.variant_id
    assert labels[True][0] == labels[False][0] == "flash_decode" and labels[True][1] != labels[False][1], labels


def of_packed_sequences() -> None:
    draw = torch.Generator().manual_seed(5)
    lengths = (40, 0, 33)
    query, key, value = (torch.randn(sum(lengths), heads, 260, generator=draw).half() for heads in (4, 2, 2))
    bounds = torch.tensor([0, 40, 40, 73], dtype=torch.int32)
    words: dict[str, Any] = {"is_causal": True, "softcap": 3.0, "enable_gqa": True}
    packed = query, key, value, bounds, bounds, 40, 40
    assert dispatch.explain_varlen(*packed, **words).template == "flash_fwd"
    found = dispatch.attention_varlen(*packed, **words)
    for start, stop in ((0, 40), (40, 73)):
        one = (x[start:stop].transpose(0, 1)[None].double() for x in (query, key, value))
        wanted, _ = reference.attention(*one, scale=260**-0.5, softcap=3.0, band=Band(right=0))
        bound = TOLERANCES["fp16"]
        torch.testing.assert_close(found[start:stop].double(), wanted[0].transpose(0, 1), atol=bound.atol, rtol=bound.rtol)


def of_what_heads_beyond_576_get() -> None:
    """PyTorch runs them, and gradients of wide heads."""
    query = torch.randn(1, 1, 40, 577)
    assert "head sizes of 1 to 576, not 577" in dispatch.explain(query, query, query).reason
    wide = torch.randn(1, 1, 40, 300)
    assert dispatch.explain(wide, wide, wide).template == "flash_fwd"
    wide.requires_grad_()
    assert "none of our backward kernels takes such calls" in dispatch.explain(wide, wide, wide).reason


def of_many_rows_and_gradients() -> None:
    """More rows are no step; a step whose gradients are needed has values beside keys."""
    query, key = step(3)
    query.requires_grad_()
    out = dispatch.attention(query, key, key[..., :256], enable_gqa=True)
    out.sum().backward()
    assert query.grad is not None and bool(query.grad.isfinite().all())


def of_caches_whose_values_move() -> None:
    """A second call whose tensors have the layout of the first, but values of their own: they are read."""
    case: dict[str, Any] = {"latent": True, "d": 96, "d_v": 64, "heads": 4, "kv_heads": 1}
    given = inputs(case)
    agrees(given)
    other = torch.full_like(given.arguments["key"], float("nan"))[..., :64]
    other.copy_(given.arguments["value"].flip(0))
    # Blocks in the other order, but for values alone.
    keys, values = given.call()[0], given.call(value=other)[0]
    assert not torch.equal(keys, values)
    plain = other.contiguous()
    assert torch.allclose(values.nan_to_num(9), given.call(value=plain)[0].nan_to_num(9), atol=2e-3)
    agrees(given)


def main(*names: str) -> dict[str, str]:
    """Failures of flash_decode by itself, where "sizes" are named, else of calls."""
    return failures_of(globals(), of_case, list(SIZES) if names else (), lambda: forced("kernels"))
