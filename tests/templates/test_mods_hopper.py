"""Masks and scores as code in Hopper's forward: what the rendered text computes, on a stand-in for the GPU, and what it compiles to."""

import functools
import math
from typing import Any

import pytest
import torch
from hopper_kernels import config
from interpreting import interpreted
from mod_cases import CASES, OPERATIONS, Functions, oracle
from mods_machine import Coded, batches_of, lists_of, seen_by, shapes
from test_hopper_pieces import Masked

from flashtune.core.code.launching import provided
from flashtune.core.problems.config import KernelSpec
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions import trained as flex_autograd
from flashtune.templates.hopper.flash_fwd_hopper import FAMILY
from flashtune.templates.loading import load_kernel
from flashtune.templates.mods import known
from flashtune.templates.mods.emit import emitted
from flashtune.templates.rendering import render, variant_of


class Forward(Coded, Masked):
    """The forward's stand-in."""


def forward(functions: Functions, sizes: tuple[int, int, int, int, int], changes: dict[str, Any], seed: int = 0) -> tuple[float, float]:
    """The largest errors of output and LSE of (B, Hq, Hkv, N_q, N_kv) on poisoned memory; all other places must be infinite alike."""
    batch, heads, kv_heads, n_q, n_kv = sizes
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, h, n, 64, generator=generator).half() for h, n in ((heads, n_q), (kv_heads, n_kv), (kv_heads, n_kv)))
    traced, captured = flex_functions._traced(*functions, torch.device("cpu"))
    made = emitted(traced.score, traced.mask, flex_autograd.types_of(captured, [False] * len(captured)), backward=False)
    spec = KernelSpec(direction="fwd", dtype="fp16", d=64, d_v=64, window=False, mask="none", mods=known.keep(made))
    chosen = config(spec, **changes)
    module = load_kernel(render(FAMILY, variant_of(FAMILY, spec, chosen)), "coded")
    out, lse = torch.full_like(q, math.nan), torch.full((batch, heads, n_q), math.nan)
    mods = [x.detach() for x in captured]
    if functions[1] is not None:
        mods.append(lists_of(seen_by(functions[1], batch, heads, n_q, n_kv), (chosen.number("BLOCK_M"), chosen.number("BLOCK_N"))))
    words = {"scale": 0.125, "mods": mods, **provided(module, q, k), "sms": 3}
    [launch] = module.launches(q, k, v, out, lse, **words)
    Forward(module, launch, seed=seed).run()
    right, right_lse = oracle(q.double(), k.double(), v.double(), *functions)
    assert torch.equal(lse.isfinite(), right_lse.isfinite())
    seen = right_lse.isfinite()
    return float((out.double() - right).abs().max()), float((lse[seen] - right_lse[seen]).abs().max())


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "chained": {"tiles": "chained"},
    "small": {"BLOCK_M": 64, "intra_wg_overlap": 0, "rescale": "grown"},
}
BESIDE = {
    "chained": ("causal", "document", "unseen", "nothing", "relative", "both"),
    "small": ("global_window", "heads", "unseen", "hidden_by_score", "alibi", "both"),
}
"""Shapes that other configs than the default compute, too."""


@pytest.mark.parametrize(
    ("name", "config"),
    [*((name, "default") for name in shapes()), *((name, config) for config, names in BESIDE.items() for name in names)],
)
def test_hoppers_forward_computes_the_function(name: str, config: str) -> None:
    masked, changes = shapes()[name][1] is not None, CONFIGS[config]
    if masked and changes.get("tiles") == "chained":
        changes = changes | {"order": "drawn", "section": 8}
    out, lse = forward(shapes()[name], (batches_of(name), 2, 1, 290, 300), changes, seed=len(name))
    assert out < 3e-3 and lse < 3e-3


@pytest.mark.parametrize("name", [name for name in CASES if name not in shapes()])
def test_hoppers_forward_computes_every_case(name: str) -> None:
    case = CASES[name]
    functions = case.functions(*(x.detach() for x in case.captured(torch.Generator().manual_seed(5))))
    out, lse = forward(functions, (case.heads // 2, case.heads, case.heads // 2, case.n_q, case.n_kv), {"BLOCK_M": 64})
    assert out < 4e-3 and lse < 4e-3


@pytest.mark.parametrize("name", OPERATIONS)
def test_gluon_has_the_operations_of_scores(name: str) -> None:
    out, lse = forward((OPERATIONS[name], None), (1, 2, 1, 20, 24), {"BLOCK_M": 64})
    assert out < 1e-2 and lse < 1e-2


@functools.cache
def gradients() -> dict[str, Any]:
    """Errors of gradients, which another process finds in Triton's interpreter."""
    found: dict[str, Any] = interpreted("interpret_mods_hopper")
    return found


@pytest.mark.parametrize("name", [*shapes(), *(f"case {name}" for name in CASES if name not in shapes())])
def test_hoppers_backward_computes_the_gradients(name: str) -> None:
    found = gradients()[name]
    assert not isinstance(found, str), found
    assert max(found) < 5e-3
