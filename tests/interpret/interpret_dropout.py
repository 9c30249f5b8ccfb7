"""Dropout's mask, read off a family's kernel at several tile sizes in Triton's interpreter; see test_templates_dropout."""

import hashlib

import torch

from flashtune.core.code.launching import launcher
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of

PROBLEM = Problem(batch=2, heads=2, kv_heads=1, n_q=50, n_kv=120, d=16, d_v=128, dtype="fp16", features=Features(dropout=True))
SEED, OFFSET = 2**40 + 17, 5
CASES = ((64, 32, 4, 0.3), (128, 64, 8, 0.3), (64, 128, 4, 0.3), (16, 64, 1, 0.3), (64, 32, 4, 0.7), (64, 32, 4, 1.0))
"""BLOCK_M, BLOCK_N, warps and the rate."""


def main(family_name: str) -> list[dict[str, object]]:
    """Of each case: the rate, the mask's digest, whether it is the reference's, and the share of pairs kept."""
    p, chosen = PROBLEM, family(family_name)
    sizes = next(axis.values for axis in chosen.axes if axis.name == "BLOCK_M")
    # Equal scores and V = I: an output element is above 0 exactly where its pair is kept.
    q, k = torch.zeros(p.batch, p.heads, p.n_q, p.d).half(), torch.zeros(p.batch, p.kv_heads, p.n_kv, p.d).half()
    v = torch.eye(p.n_kv, p.d_v).half().expand(p.batch, p.kv_heads, -1, -1).contiguous()
    words = {"mask": None, "scale": 1.0, "diagonal": 0, "window_left": -1, "window_right": -1, "softcap": 0.0}
    found: list[dict[str, object]] = []
    for block_m, block_n, num_warps, rate in CASES:
        if block_m not in sizes:
            continue
        config = chosen.default(p.spec(), find_target("h200")).replace(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps)
        module = load_kernel(render(chosen, variant_of(chosen, p.spec(), config)), chosen.name)
        out, lse = torch.full((p.batch, p.heads, p.n_q, p.d_v), float("nan")).half(), torch.empty(p.batch, p.heads, p.n_q)
        launcher(module)(q, k, v, out, lse, **words, dropout_p=rate, seed=SEED, offset=OFFSET)
        keep = out[..., : p.n_kv] > 0
        digest = hashlib.sha256(keep.numpy().tobytes()).hexdigest()
        same = torch.equal(keep, reference.dropout_keep(SEED, OFFSET, p.batch, p.heads, p.n_q, p.n_kv, rate))
        found.append({"rate": rate, "digest": digest, "is_reference": same, "kept": keep.double().mean().item()})
    return found
