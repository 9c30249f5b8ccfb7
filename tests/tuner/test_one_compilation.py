"""A candidate is compiled once: its checks and its timing launch what its compiler compiled, at any strides of the problem's tensors."""

from dataclasses import replace
from math import gcd
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.code.launching import compiler_options, provided
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.lengths import Lengths
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import families
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children import compile as compiling
from flashtune.tuner.verify.cases import cases
from flashtune.tuner.verify.inputs import Inputs, make_inputs, spaced

H200 = find_target("h200")
PLAIN = Problem(batch=4, heads=8, kv_heads=8, n_q=500, n_kv=500, d=72, d_v=72, dtype="bf16", features=Features(causal=True))
PROBLEMS = {
    "odd rows": replace(PLAIN, n_q=501, n_kv=501),
    "odd head size": replace(PLAIN, d=100, d_v=100),
    "one key head": replace(PLAIN, kv_heads=1),
    "one batch": replace(PLAIN, batch=1, features=Features(causal=True, alibi=True, sinks=True)),
    "step": replace(PLAIN, n_q=1, n_kv=4000),
    "mask": replace(PLAIN, features=Features(mask="bool")),
    "bias": replace(PLAIN, d=64, d_v=64, features=Features(mask="bias")),
    "slopes": replace(PLAIN, heads=28, kv_heads=28, features=Features(causal=True, alibi=True)),
    "fp8": replace(PLAIN, d=64, d_v=64, dtype="fp8", heads=28, kv_heads=4),
    "packed": replace(PLAIN, heads=7, kv_heads=7, lengths=Lengths(law="equal", longest=500), features=Features(causal=True, packed=True)),
    "backward": replace(PLAIN, direction="bwd"),
    "gradient of a bias": replace(PLAIN, direction="bwd", features=Features(mask="bias", dbias=True)),
}

READS_SIZES = {"pack_mask", "transpose_v", "score_gradients", "sum_parts"}
"""Kernels beside the main one that are compiled for sizes, too."""


@pytest.mark.parametrize(
    ("name", "family"), [(name, one.name) for name, p in PROBLEMS.items() for one in families().values() if one.direction == p.direction]
)
def test_checks_and_timing_launch_what_was_compiled(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, chosen = PROBLEMS[name], families()[family]
    spec = problem.spec()
    if chosen.supports(spec, H200) is not None:
        # The family's own tests say which problems it takes.
        return
    module = load_kernel(render(chosen, variant_of(chosen, spec, chosen.default(spec, H200))), f"once_{family}")
    compiled: list[str] = []
    seen: set[str] = set()

    def launch(inputs: Inputs, sms: int, arguments: tuple[Any, ...] | None = None) -> None:
        words = inputs.keywords | provided(module, inputs.q, inputs.k) | {"sms": sms}
        for kernel, grid, args, options in module.launches(*(arguments or inputs.arguments), **words):
            if kernel.__name__ not in seen:
                # Another problem with the same text may have been here.
                kernel.device_caches.clear()
                seen.add(kernel.__name__)
            _ = kernel.device_caches[compiling.driver.active.get_current_device()]
            monkeypatch.setattr(kernel, "compile", lambda source, **_: compiled.append(source.name) or SimpleNamespace())
            kernel.warmup(*args, grid=grid, **compiler_options(options))

    with compiling.compiling_for(H200):
        for inputs, arguments in compiling._compiled_for(problem):
            launch(inputs, H200.sms, arguments)
        assert compiled
        compiled.clear()
        full = make_inputs(problem, device="meta", seed=0)
        launch(full, H200.sms)
        if problem.direction == "bwd":
            # As training steps launch it.
            launch(full, H200.sms, tuple((full.operands | {"dlse": None}).values()))
        for case in cases(problem, device="cpu", seed=0, thorough=True):
            for sms in {H200.sms, case.few_sms or H200.sms}:
                launch(case.inputs, sms)
    assert set(compiled) <= READS_SIZES


@given(shape=st.lists(st.integers(1, 9), min_size=2, max_size=4), steps=st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=4, max_size=4))
def test_spaced_tensors_have_the_steps_and_no_element_twice(shape: list[int], steps: list[int]) -> None:
    wanted = (*steps[: len(shape) - 1], 1)
    strides = spaced(shape, wanted)
    assert tuple(gcd(stride, 16) for stride in strides) == wanted
    places = sum(
        (torch.arange(n).view(-1, *[1] * (len(shape) - i - 1)) * strides[i] for i, n in enumerate(shape)), start=torch.zeros(1).long()
    )
    assert len(places.unique()) == places.numel()
