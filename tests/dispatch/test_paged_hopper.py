"""Paged caches in Hopper's forward: what the rendered text computes, on a stand-in for the GPU, which reads nothing that isn't a key."""

import math
from typing import Any

import pytest
import torch
from hopper_kernels import H200, config, count, key_loops, machine_code, problem
from paged_cases import Inputs, inputs, right_of, without_gone_keys
from paged_machine import Paged

from flashtune.core.code import launching
from flashtune.core.code.launches import Operand
from flashtune.core.code.launching import Tensors
from flashtune.core.problems.band import Sides
from flashtune.core.problems.problem import Features
from flashtune.core.problems.tolerances import LSE_RTOL, TOLERANCES
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.rows import paged
from flashtune.templates.hopper.flash_fwd_hopper_paged import FAMILY
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiling_for, read_facts

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
        given = without_gone_keys(given, case["window_size"][0])
    out, lse = run(given, changes)
    right, right_lse = right_of(given.arguments, given)
    bound = TOLERANCES["fp16"]
    torch.testing.assert_close(out.double(), right, atol=bound.atol, rtol=bound.rtol)
    torch.testing.assert_close(lse.double(), right_lse, atol=bound.lse_atol, rtol=LSE_RTOL)


Q, CACHE = (1, 4, 300, 64), (9, 2, 16, 64)


def operand(shape: tuple[int, ...], strides: tuple[int, ...] | None = None, dtype: str = "bf16", **words: Any) -> Operand:
    """A tensor of a launch, caches as (blocks, Hkv, page, D)."""
    if strides is None:
        _, heads, rows, d = shape
        strides = rows * heads * d, d, heads * d, 1
    return Operand(0, shape, strides, dtype, **words)


@pytest.mark.parametrize(
    ("cache", "taken"),
    [
        (operand(CACHE), True),
        (operand(CACHE, (2 * 16 * 64, 16 * 64, 64, 1)), True),
        # Keys beside values in a block, and a part of each row.
        (operand(CACHE, (2 * 2 * 16 * 64, 64, 2 * 64, 1)), True),
        (operand(CACHE, (2 * 16 * 80, 80, 2 * 80, 1)), True),
        (operand((9, 2, 512, 64)), True),
        (operand((1, 2, 16, 64), (7, 64, 128, 1)), True),
        (operand((9, 2, 8, 64)), False),
        (operand((9, 2, 48, 64)), False),
        (operand(CACHE, (16 * 128 + 64, 64, 128, 1)), False),
        (operand(CACHE, (16 * 136, 68, 136, 1)), False),
        (operand(CACHE, dtype="fp16"), False),
        (operand(CACHE, dtype="fp8e4nv"), False),
        (operand(CACHE, aligned=False), False),
        (operand((2**31, 2, 16, 64)), False),
    ],
    ids=str,
)
def test_it_takes_pages_that_the_copy_engine_reads(cache: Operand, taken: bool) -> None:
    spec = problem(64, Features(packed=True)).spec()
    host = FAMILY.host
    assert host is not None
    assert host(spec, config(spec)).accepts(operand(Q), cache, operand(CACHE), None) is taken


@pytest.mark.parametrize(
    ("features", "d", "dtype"),
    [
        (Features(), 64, "bf16"),
        (Features(packed=True), 64, "fp32"),
        (Features(packed=True), 512, "bf16"),
        (Features(packed=True), 20, "bf16"),
    ],
    ids=str,
)
def test_it_refuses_what_it_has_no_code_for(features: Features, d: int, dtype: Any) -> None:
    assert FAMILY.supports(problem(d, features, dtype=dtype).spec(), H200) is not None


@pytest.mark.parametrize(("d", "page", "window"), [(256, 64, None)])
def test_its_consumers_keep_their_tiles_in_registers(d: int, page: int, window: Any) -> None:
    spec = problem(d, Features(causal=True, window=window, packed=True, alignment="bottom_right")).spec()
    module = load_kernel(render(FAMILY, variant_of(FAMILY, spec, FAMILY.default(spec, H200))), "paged")

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    caches = [made(999, page, 8, d, dtype=torch.bfloat16) for _ in range(2)]
    results = made(4096, 32, d, dtype=torch.bfloat16), made(32, 4096, dtype=torch.float32)
    tensors = Tensors(
        made(4096, 32, d, dtype=torch.bfloat16), *caches, *results, cu_q=made(9), cu_k=made(9), used=made(8), table=made(8, 9)
    )
    left = -1 if window is None else window[0]
    planned = paged.plan_of_pages(module, tensors, Numbers(512, 8192, d**-0.5, left, 0, True, 0.0, 0.0, False, False))
    [one] = planned.launches
    with compiling_for(H200):
        words = launching.compiler_options(one.options)
        kernel = getattr(module.module, one.kernel).warmup(*launching.Arguments(planned).of(one), grid=one.grid, **words)
    facts = read_facts(kernel, H200)
    # One number waits in memory from tile to tile.
    assert facts.spills <= 8 and facts.registers * facts.threads <= H200.registers_per_sm
    assert facts.shared_bytes <= H200.shared_bytes_per_block
    code = machine_code(kernel)
    assert not any(loop["STL"] + loop["LDL"] for loop in key_loops(code))
    # A block is as many copies of keys as of values, and the last values of all are copied in a place of their own.
    copies = FAMILY.default(spec, H200).number("BLOCK_N") // page * (d // 64)
    assert count(code)["UTMALDG"] >= 3 * copies
