"""Paged caches in Hopper's forward: what the rendered text computes, on a stand-in for the GPU, which reads nothing that isn't a key."""

import math
from typing import Any

import pytest
import torch
from hopper_kernels import config
from paged_cases import Inputs, inputs, right_of
from paged_machine import Paged

from flashtune.core.code import launching
from flashtune.core.code.launching import Tensors
from flashtune.core.problems.band import Sides
from flashtune.core.problems.tolerances import LSE_RTOL, TOLERANCES
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.rows import paged
from flashtune.templates.hopper.flash_fwd_hopper_paged import FAMILY
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of

CHUNKS = ((70, 0, 3, 130, 40), (150, 20, 200, 130, 0))
"""Chunks at the ends of caches, one that is a whole prompt, and one without keys; some end within a page."""


def run(given: Inputs, changes: dict[str, Any], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of a kernel on poisoned memory."""
    words = given.arguments
    sides = Sides.of(words.get("window_size", (-1, -1)), words.get("is_causal", False), words.get("causal_alignment", "bottom_right"))
    left, right = (-1 if side is None else side for side in sides.window)
    scale, softcap = words["query"].shape[2] ** -0.5, words.get("softcap", 0.0)
    longest = words["max_seqlen_q"], words["max_seqlen_k"]
    numbers = Numbers(*longest, scale, left, right, bool(sides.band(2, 3).diagonal), softcap, 0.0, False, False)
    query, key, value, cu_q = (words[name] for name in ("query", "key", "value", "cu_seqlens_q"))
    slopes, sinks = words.get("alibi_slopes"), words.get("sinks")
    packed = Packed(query, key, value, cu_q, cu_q, words["seqused_k"], slopes, sinks, words["block_table"])
    problem = problem_of(packed, numbers)
    assert problem is not None
    module = load_kernel(render(FAMILY, variant_of(FAMILY, problem.spec(), config(problem.spec(), **changes))), "paged")
    assert module.accepts(paged.rows_last(query), key.transpose(1, 2), value.transpose(1, 2), None)
    out = torch.full((*query.shape[:2], value.shape[3]), math.nan, dtype=query.dtype)
    lse = torch.full((query.shape[1], len(query)), math.nan)
    lists = {"cu_q": cu_q, "cu_k": cu_q, "used": packed.used, "table": packed.table}
    planned = paged.plan_of_pages(module, Tensors(query, key, value, out, lse, slopes=slopes, sinks=sinks, **lists), numbers)
    [one] = planned.launches
    arguments = launching.Arguments(planned).of(one)
    machine = Paged(module, (getattr(module.module, one.kernel), one.grid, arguments, {}), seed=seed)
    machine.run()
    assert not any(x.isnan().any() for x in machine.read), "rows behind or before the keys are read"
    return out, lse


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"is_causal": True}, {"tiles": "chained", "order": "drawn", "BLOCK_N": 128}),
    ({"is_causal": True, "page": 64, "hnd": True}, {"tiles": "chained", "order": "drawn"}),
    ({"is_causal": True, "page": 128, "causal_alignment": "top_left"}, {"intra_wg_overlap": 0}),
    ({"window_size": (40, 0)}, {"tiles": "chained"}),
    ({"window_size": (130, 9), "page": 64}, {"tiles": "chained", "order": "drawn"}),
    ({"sinks": True, "is_causal": True, "page": 32}, {"tiles": "chained", "order": "drawn", "section": 8}),
    ({"d": 160, "is_causal": True}, {"tiles": "loop", "order": "drawn"}),
    ({"d": 80, "d_v": 160}, {"v_columns": "pieces"}),
    ({"d": 32, "page": 32}, {}),
    ({"d": 256, "is_causal": True}, {"tiles": "loop", "order": "drawn"}),
]


@pytest.mark.parametrize(("case", "changes"), CASES, ids=str)
def test_hoppers_forward_reads_the_pages_of_each_sequence_alone(case: dict[str, Any], changes: dict[str, Any]) -> None:
    given = inputs({"d": 64, "heads": 2, "kv_heads": 1, "lengths": CHUNKS} | case, padding=70, pages=2)
    if "window_size" in case and case["window_size"][1] == 0:
        given = without_gone_pages(given, case["window_size"][0])
    out, lse = run(given, changes)
    right, right_lse = right_of(given.arguments, given)
    bound = TOLERANCES["fp16"]
    torch.testing.assert_close(out.double(), right, atol=bound.atol, rtol=bound.rtol)
    torch.testing.assert_close(lse.double(), right_lse, atol=bound.lse_atol, rtol=LSE_RTOL)


def without_gone_pages(given: Inputs, left: int) -> Inputs:
    """The call after the keys before its windows were overwritten, and those of whole pages given to others."""
    words, page = given.arguments, given.arguments["key"].shape[1]
    table = words["block_table"].clone()
    for b, (n_q, n_kv) in enumerate(zip(*given.lengths, strict=True)):
        gone = max(n_kv - n_q - left, 0)
        for cache in (words["key"], words["value"]):
            for key in range(gone):
                cache[int(table[b, key // page]), key % page] = math.nan
        table[b, : gone // page] = -1
    return given._replace(arguments=words | {"block_table": table})
