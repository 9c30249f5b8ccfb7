"""Heads beyond 256 on Hopper: what the rendered kernel computes, on a stand-in for the GPU, and what it compiles to."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_kernels import H200, key_loops, launches, machine_code, problem
from test_hopper_pieces import Masked

from flashtune.core.code.launching import compiler_options
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.problems.reference import visible
from flashtune.templates import family
from flashtune.templates.expected import log_us
from flashtune.templates.hopper.flash_fwd_hopper_wide import FAMILY
from flashtune.templates.hopper.wide import WideLayout
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiling_for, read_facts
from flashtune.tuner.verify.inputs import make_inputs

PLAIN: dict[str, int | str | bool] = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "K_COLUMNS": 128,
    "num_stages": 1,
    "intra_wg_overlap": 1,
    "section": 1,
    "rescale": "always",
}
CAUSAL = Features(causal=True, alignment="bottom_right")


def config(spec: KernelSpec, changes: dict[str, Any]) -> Config:
    """PLAIN with changes; it keeps every constraint."""
    found = Config.of(PLAIN, **changes)
    assert FAMILY.violated(found, spec, H200) is None
    return found


class Wide(Masked):
    """The stand-in, where packed probs are probs."""

    def _stand_ins(self) -> dict[str, Any]:
        return super()._stand_ins() | {"pack_apart": lambda probs: probs}


def run(wanted: Problem, changes: dict[str, Any], seed: int = 0) -> tuple[float, float]:
    """The largest errors of a kernel's output and LSE, on poisoned memory."""
    inputs = make_inputs(wanted, device="cpu", seed=seed)
    inputs.poison()
    text = render(FAMILY, variant_of(FAMILY, wanted.spec(), config(wanted.spec(), changes)))
    module = load_kernel(text, "wide")
    [(kernel, grid, arguments, options)] = launches(module, inputs, sms=2)
    Wide(module, (kernel, grid, arguments, options), seed=seed).run()
    q, k, v = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v))
    k, v = (tensor.repeat_interleave(wanted.gqa_ratio, 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * inputs.keywords["scale"]
    scores = scores.masked_fill(~visible(wanted.band, wanted.n_q, wanted.n_kv), -torch.inf)
    lse = scores.logsumexp(-1)
    if wanted.features.sinks:
        lse = torch.logaddexp(lse, inputs.keywords["sinks"].double()[:, :, None])
    seen = lse.isfinite()
    out = (scores - torch.where(seen, lse, 0.0)[..., None]).exp() @ v
    assert torch.equal(inputs.lse.isfinite(), seen)
    return float((inputs.out.double() - out).abs().max()), float((inputs.lse.double() - lse)[seen].abs().max())


CASES: list[tuple[dict[str, Any], Features, dict[str, Any]]] = [
    ({"d": 512}, Features(), {}),
    ({"d": 512, "n_q": 45, "n_kv": 40}, Features(), {"rescale": "grown"}),
    ({"d": 512}, CAUSAL, {"rescale": "grown", "K_COLUMNS": 64}),
    ({"d": 512, "n_q": 130, "n_kv": 70}, CAUSAL, {"intra_wg_overlap": 0}),
    ({"d": 512, "n_q": 70, "n_kv": 200}, replace(CAUSAL, alignment="top_left"), {"K_COLUMNS": 256}),
    ({"d": 320}, CAUSAL, {"K_COLUMNS": 64, "num_stages": 2, "section": 8}),
    ({"d": 264}, Features(), {"K_COLUMNS": 64, "num_stages": 2, "intra_wg_overlap": 0, "rescale": "grown"}),
    ({"d": 384, "heads": 6, "kv_heads": 2}, replace(CAUSAL, window=(70, 0)), {"rescale": "grown"}),
    ({"d": 448}, replace(CAUSAL, sinks=True), {"K_COLUMNS": 64, "rescale": "grown"}),
    ({"d": 512, "d_v": 128}, CAUSAL, {"num_stages": 2}),
    ({"d": 64, "d_v": 512}, Features(window=(40, 20)), {"K_COLUMNS": 64}),
]
"""Sizes, features, and changes of the config."""


@pytest.mark.parametrize(("sizes", "features", "changes"), CASES, ids=str)
def test_two_warpgroups_make_the_whole_output(sizes: dict[str, Any], features: Features, changes: dict[str, Any]) -> None:
    usual = {"batch": 1, "heads": 2, "kv_heads": 1, "n_q": 100, "n_kv": 300, "d_v": sizes["d"]}
    out, lse = run(Problem(**usual | sizes, dtype="fp16", features=features), changes, seed=len(str(sizes)))
    assert out < 3e-3
    assert lse < 2e-3


@pytest.mark.parametrize(
    ("d", "features", "changes"),
    [
        (512, Features(), {"rescale": "grown"}),
        (320, Features(causal=True, window=(64, 0), softcap=True, sinks=True), {"K_COLUMNS": 64, "num_stages": 2}),
    ],
    ids=str,
)
def test_products_run_side_by_side_without_spills(d: int, features: Features, changes: dict[str, Any]) -> None:
    wanted = problem(d, features)
    chosen = config(wanted.spec(), changes)
    module = load_kernel(render(FAMILY, variant_of(FAMILY, wanted.spec(), chosen)), "wide")
    [(kernel, grid, arguments, options)] = launches(module, make_inputs(wanted, device="meta", seed=0))
    with compiling_for(H200):
        compiled = kernel.warmup(*arguments, grid=grid, **compiler_options(options))
    facts, layout = read_facts(compiled, H200), WideLayout.of(wanted.spec(), chosen)
    assert facts.spills == 0
    assert facts.shared_bytes <= layout.shared_bytes
    values, both = sorted(key_loops(machine_code(compiled)), key=lambda loop: loop["HGMMA"])
    # Of 16 columns or 16 keys each.
    assert (values["HGMMA"], both["HGMMA"]) == (64 // 16, layout.stored_d // 16 + 64 // 16)
    # The compiler waits for each product by itself where registers of one are written while another runs.
    assert values["WARPGROUP"] == 2
    assert both["WARPGROUP"] <= 2 * (layout.parts + 2)


@pytest.mark.parametrize(("d", "causal"), [(512, True), (320, False)])
def test_a_search_expects_it_to_be_the_fastest(d: int, causal: bool) -> None:
    wanted = replace(problem(d, Features(causal=causal)), n_q=8192, n_kv=8192)
    times: dict[str, list[float]] = {}
    for kind in (FAMILY, family("flash_fwd")):
        found = [log_us(kind, one, wanted, H200) for one in kind.starts(wanted.spec(), H200)]
        times[kind.name] = [one for one in found if one is not None]
    assert max(times["flash_fwd_hopper_wide"]) < min(times["flash_fwd"])
