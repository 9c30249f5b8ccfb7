"""Heads beyond 256 on Hopper's own kernel, against float64; each launch twice, for bits that vary tell of a race."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashtune.core.code.launching import launcher
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates.hopper.flash_fwd_hopper_wide import FAMILY
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.correctness import check, differs, everywhere, oracle
from flashtune.tuner.verify.inputs import make_inputs

CAUSAL = Features(causal=True, alignment="bottom_right")


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's kernels need a Hopper GPU")
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
