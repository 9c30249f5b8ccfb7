"""Heads beyond 256 on Hopper's own kernels, against float64; each launch several times, for bits that vary tell of a race."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashtune import dispatch
from flashtune.core.code.launching import launcher
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.templates.hopper.flash_fwd_hopper_wide import FAMILY
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.correctness import check, differs, everywhere, oracle
from flashtune.tuner.verify.inputs import make_inputs

CAUSAL = Features(causal=True, alignment="bottom_right")


pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's kernels need a Hopper GPU"
)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("features", [Features(), CAUSAL, replace(CAUSAL, window=(90, 0), sinks=True, softcap=True)], ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        {"n_q": 100, "n_kv": 100, "d": 512, "d_v": 512},
        {"n_q": 1000, "n_kv": 1000, "d": 320, "d_v": 320, "heads": 8},
        {"n_q": 40, "n_kv": 2048, "d": 384, "d_v": 512, "dtype": "fp16"},
        {"n_q": 300, "n_kv": 70, "d": 448, "d_v": 72},
    ],
    ids=str,
)
def test_wide_heads_are_right_and_the_same_each_time(sizes: dict[str, Any], features: Features, overlap: int) -> None:
    problem = Problem(**{"batch": 2, "heads": 2, "kv_heads": 1, "dtype": "bf16", "features": features} | sizes)
    spec, target = problem.spec(), find_target("h200")
    config = FAMILY.default(spec, target).replace(intra_wg_overlap=overlap)
    launch = launcher(load_kernel(render(FAMILY, variant_of(FAMILY, spec, config)), "wide"))
    inputs = make_inputs(problem, device="cuda", seed=1)
    verdict = check(launch, inputs, oracle(inputs, everywhere(problem)))
    assert not verdict.reason
    assert not any(differs(launch, inputs) for _ in range(5))


STEPS: dict[str, tuple[dict[str, int], dict[str, Any], Band]] = {
    "full": ({"n_q": 1024, "n_kv": 1024}, {}, Band()),
    "causal": ({"n_q": 2048, "n_kv": 2048}, {"is_causal": True}, Band(right=0)),
    "groups": ({"n_q": 1024, "n_kv": 1500, "heads": 8}, {"is_causal": True}, Band(right=0)),
    "few queries": ({"n_q": 1000, "n_kv": 1000}, {}, Band()),
    "window and sinks": ({"n_q": 1100, "n_kv": 1100}, {"is_causal": True, "window": (300, 0), "sinks": True}, Band(left=300, right=0)),
    "soft cap": ({"n_q": 1000, "n_kv": 1300}, {"softcap": 5.0}, Band()),
}
"""Sizes and arguments of training steps, and the band that these mean."""

UNNAMED = ("full", "causal", "groups")
"""Those that our kernels serve without a record."""


@pytest.mark.parametrize("d", [320, 384, 512])
@pytest.mark.parametrize(("case", "implementation"), [(case, "flashtune") for case in STEPS] + [(case, None) for case in UNNAMED])
def test_backward_of_a_call_is_that_of_the_reference(case: str, d: int, implementation: str | None) -> None:
    sizes, words, band = STEPS[case]
    heads = sizes.get("heads", 2)
    torch.manual_seed(d)
    shapes = [(1, heads, sizes["n_q"], d), *[(1, 2, sizes["n_kv"], d)] * 2]
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    double = [x.detach().double().requires_grad_() for x in leaves]
    call, further = {"enable_gqa": True, "implementation": implementation} | words, {"softcap": words.get("softcap", 0.0)}
    if "sinks" in words:
        call["sinks"] = torch.randn(heads, device="cuda")
        further["sinks"] = call["sinks"].double()
    found = dispatch.explain(*leaves, **call)
    # Of few tiles the decode kernel, which splits the keys, is expected to be the faster forward.
    assert found.template in (FAMILY.name, "flash_decode"), found
    assert found.backward is not None and found.backward.template == "flash_bwd_hopper_wide", found
    out = dispatch.attention(*leaves, **call)
    dout = torch.randn_like(out)
    first, again = (torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    wanted, _ = reference.attention(*double, scale=d**-0.5, band=band, **further)
    for mine, other in zip((out, *first), (wanted, *torch.autograd.grad(wanted, double, dout.double())), strict=True):
        assert float((mine.double() - other).norm() / other.norm()) <= TOLERANCES["bf16"].gradient_norm
    out.backward(dout)
    assert all(x.grad is not None and torch.equal(x.grad, one) for x, one in zip(leaves, first, strict=True))
