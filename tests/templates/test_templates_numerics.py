"""Every family computes what the float64 reference does, in Triton's interpreter, on ragged inputs amid poisoned memory."""

from typing import Any

import pytest
import torch
from attention_cases import CASES
from interpreting import interpreted

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import FLAGS, Problem
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of

BF16 = {"bf16", "bf16-causal"}
REFUSED: dict[str, set[str]] = {"flash_decode": BF16, "flash_fwd": BF16}
"""What accepts() of a family turns down in the interpreter."""
UNSUPPORTED: dict[str, set[str]] = {
    "flash_decode": {case.name for case in CASES if case.problem.features.dropout},
    "flash_fwd": set(),
}
"""What a family leaves to others: decoding drops nothing."""


def interpret(name: str, cases: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = interpreted("interpret_cases", name, cases)
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_every_case_agrees_with_the_reference(name: str) -> None:
    reports = interpret(name, [case.name for case in CASES])
    assert [report["name"] for report in reports] == [case.name for case in CASES]
    assert {report["name"] for report in reports if not report["supported"]} == UNSUPPORTED[name]
    assert {report["name"] for report in reports if report["supported"] and not report["accepted"]} == REFUSED[name]
    assert [report for report in reports if report["reason"]] == []


def test_huge_scores_agree_with_the_reference_however_keys_are_split() -> None:
    assert interpreted("interpret_huge") == []


def test_every_feature_that_is_on_or_off_has_a_case() -> None:
    # Packed sequences and latent values have cases of their own (test_varlen, test_latent).
    assert {flag for case in CASES for flag in FLAGS if getattr(case.problem.features, flag)} == set(FLAGS) - {"packed", "latent"}


@pytest.mark.parametrize("name", REFUSED)
def test_bf16_is_taken_where_kernels_are_compiled(name: str) -> None:
    spec = Problem(batch=1, heads=1, kv_heads=1, n_q=16, n_kv=16, d=16, d_v=16, dtype="bf16").spec()
    chosen = family(name)
    module = load_kernel(render(chosen, variant_of(chosen, spec, chosen.default(spec, find_target("h200")))), name)
    x = torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16)
    assert module.accepts(x, x, x, None)


def test_tma_takes_only_what_the_copy_engine_can_read() -> None:
    chosen = family("flash_decode")
    spec = Problem(batch=2, heads=2, kv_heads=2, n_q=16, n_kv=16, d=16, d_v=16, dtype="fp16").spec()
    config = chosen.default(spec, find_target("h200")).replace(loads="tma")
    module = load_kernel(render(chosen, variant_of(chosen, spec, config)), chosen.name)

    def taken(x: torch.Tensor) -> bool:
        right = torch.zeros(2, 2, 16, 16, dtype=torch.float16)
        assert module.accepts(right, right, right, None)
        answers = {module.accepts(x, right, right, None), module.accepts(right, x, right, None), module.accepts(right, right, x, None)}
        assert len(answers) == 1
        return answers.pop()

    half = torch.float16
    assert taken(torch.zeros(2, 16, 2, 16, dtype=half).transpose(1, 2))
    assert taken(torch.zeros(2, 2, 16, 24, dtype=half)[..., :16])
    # The stride of a dimension of size 1 is never used.
    assert taken(torch.zeros(32 * 17, dtype=half).as_strided((1, 2, 16, 16), (3, 256, 16, 1)))
    assert not taken(torch.zeros(2, 2, 16, 20, dtype=half)[..., :16])
    assert not taken(torch.zeros(2, 2, 16, 24, dtype=half)[..., 1:17])
    assert not taken(torch.zeros(2, 2, 16, 16, dtype=half).transpose(2, 3))
    assert not taken(torch.zeros(2, 2, 16, 32, dtype=half)[..., ::2])
    assert not taken(torch.zeros(1, 2, 16, 16, dtype=half).expand(2, 2, 16, 16))
    assert not taken(torch.zeros(2, 2, 1, 16, dtype=half).expand(2, 2, 16, 16))
