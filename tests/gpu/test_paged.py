"""Paged caches on a GPU, by kernels and by gathered copies: against float64 and PyTorch's own, without waiting, and under CUDA graphs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from branches import BRANCHES, Branch
from click.testing import CliRunner
from paged_cases import CASES, CHUNKS, LONG, Inputs, agrees, inputs, without_gone_keys
from varlen_cases import forced

from flashtune import dispatch
from flashtune.cli.main import main

DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
FP8 = torch.float8_e4m3fn
LONGER = ((1, 1, 1, 1, 1), (9000, 31, 0, 4097, 700))
PROMPTS = ((300, 1, 129, 1, 777, 64), (300, 700, 1000, 0, 1500, 4096))

on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
on_hopper = pytest.mark.skipif(
    DEVICE != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_each_sequence_is_as_if_its_keys_lay_in_a_row(case: str, kind: str, branch: Branch) -> None:
    words = {"d": 64} | CASES[case]
    with forced(branch):
        agrees(inputs(words, dtype=torch.float16 if kind == "fp16" else torch.bfloat16, device=DEVICE), kind=kind)


@pytest.mark.parametrize("lengths", [LONGER, PROMPTS], ids=["decode", "prompts"])
@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=str)
def test_head_sizes_and_pages(d: int, page: int, cache: torch.dtype, lengths: Any) -> None:
    words = {"d": d, "page": page, "cache": cache, "lengths": lengths, "heads": 8, "is_causal": True}
    with forced("kernels"):
        agrees(inputs(words, dtype=torch.bfloat16, device=DEVICE, pages=2), kind="bf16")


@on_hopper
@pytest.mark.parametrize(
    "case",
    [
        {"page": 16},
        {"page": 64, "window_size": (150, 0)},
        {"page": 16, "window_size": (200, 40), "d": 256},
        {"page": 256, "is_causal": True, "softcap": 3.0},
        {"page": 32, "is_causal": True, "sinks": True, "slopes": "sequences"},
        {"page": 128, "is_causal": True, "causal_alignment": "top_left", "hnd": True},
        {"page": 16, "d": 192, "d_v": 128, "is_causal": True},
        {"page": 16, "d": 40, "is_causal": True},
        {"page": 16, "is_causal": True, "scale": -0.1},
    ],
    ids=str,
)
def test_chunks_run_hoppers_own_kernel(case: dict[str, Any]) -> None:
    given = inputs({"d": 128, "lengths": PROMPTS, "heads": 8} | case, dtype=torch.bfloat16, device=DEVICE, pages=2)
    if case.get("window_size", (0, 1))[1] == 0:
        given = without_gone_keys(given, case["window_size"][0])
    with forced("kernels"):
        agrees(given, kind="bf16")
    assert dispatch.explain_varlen(**given.arguments).template == "flash_fwd_hopper_paged"


@pytest.mark.parametrize("lengths", [LONGER, PROMPTS], ids=["decode", "prompts"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(("d", "d_v", "latent"), [(576, 512, True), (576, 512, False), (320, 256, True), (192, 128, True)])
def test_latent_and_wide_heads(d: int, d_v: int, latent: bool, cache: torch.dtype, page: int, heads: int, lengths: Any) -> None:
    words = {"d": d, "d_v": d_v, "latent": latent, "page": page, "cache": cache, "lengths": lengths, "heads": heads, "kv_heads": 1}
    with forced("kernels"):
        agrees(inputs(words | {"is_causal": True}, dtype=torch.bfloat16, device=DEVICE, pages=2), kind="bf16")


def test_float32_is_exact() -> None:
    with forced("kernels"):
        agrees(inputs({"is_causal": True, "lengths": CHUNKS, "d": 64}, dtype=torch.float32, device=DEVICE), kind="fp32")


def test_caches_that_begin_anywhere() -> None:
    given = inputs({"lengths": LONG, "d": 64}, device=DEVICE)
    changed = {}
    for name in ("query", "key", "value"):
        x = given.arguments[name]
        changed[name] = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x)
    agrees(given, **changed)


@on_gpu
def test_blocks_beyond_2_to_the_31_elements() -> None:
    blocks, page, kv_heads, d = 70_000, 64, 4, 128
    if torch.cuda.mem_get_info()[0] < 2.5 * 2 * blocks * page * kv_heads * d:
        pytest.skip("the caches don't fit")
    given = inputs({"lengths": LONG, "d": d, "page": page, "kv_heads": kv_heads, "heads": 8}, dtype=torch.bfloat16, device=DEVICE)
    changed: dict[str, Any] = {}
    for name in ("key", "value"):
        small = given.arguments[name]
        changed[name] = torch.empty((blocks, page, kv_heads, d), dtype=torch.bfloat16, device=DEVICE)
        changed[name][-len(small) :] = small
    table = given.arguments["block_table"]
    used = (table >= 0) & (table < blocks)
    with forced("kernels"):
        agrees(given, **changed, block_table=torch.where(used, table + blocks - len(given.arguments["key"]), table), kind="bf16")


@on_gpu
def test_nothing_waits_for_the_device() -> None:
    given = inputs({"is_causal": True, "lengths": CHUNKS, "d": 64}, device=DEVICE)
    given.call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        given.call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def part(given: Inputs, b: int) -> dict[str, Any]:
    """Arguments of a call with one sequence."""
    bounds = given.arguments["cu_seqlens_q"].tolist()
    return {
        "query": given.arguments["query"][bounds[b] : bounds[b + 1]],
        "cu_seqlens_q": torch.tensor([0, bounds[b + 1] - bounds[b]], dtype=torch.int32, device=DEVICE),
        "block_table": given.arguments["block_table"][b : b + 1].clone(),
        "seqused_k": given.arguments["seqused_k"][b : b + 1].clone(),
        "max_seqlen_q": bounds[b + 1] - bounds[b],
        "max_seqlen_k": given.lengths[1][b],
    }


@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("splits", [1, 4, 32])
def test_bits_dont_depend_on_the_batch(splits: int, cache: torch.dtype) -> None:
    for lengths in (LONGER, PROMPTS):
        words = {"lengths": lengths, "d": 128, "cache": cache, "heads": 8, "is_causal": True, "num_splits": splits}
        given = inputs(words, dtype=torch.bfloat16, device=DEVICE)
        out, lse = given.call()
        bounds = given.arguments["cu_seqlens_q"].tolist()
        for b in range(len(lengths[0])):
            alone, its_lse = given.call(**part(given, b))
            here = slice(bounds[b], bounds[b + 1])
            assert torch.equal(alone, out[here]) and torch.equal(its_lse, lse[:, here])


@on_gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("rows", [1, 40, 200])
def test_a_graph_is_right_when_lengths_and_pages_change(rows: int, cache: torch.dtype) -> None:
    lengths = (rows,) * 6, (3000,) * 6
    given = inputs(
        {"lengths": lengths, "d": 128, "cache": cache, "heads": 8, "is_causal": True}, dtype=torch.bfloat16, device=DEVICE, padding=0
    )
    static = given.arguments
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            given.call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = given.call()
    generator = torch.Generator().manual_seed(3)
    whole = static["block_table"].clone()
    for _ in range(10):
        sizes = torch.randint(0, rows + 1, (6,), generator=generator)
        used = torch.randint(0, 3001, (6,), generator=generator)
        static["cu_seqlens_q"].copy_(torch.nn.functional.pad(sizes.cumsum(0), (1, 0)))
        static["seqused_k"].copy_(used)
        table = whole[torch.randperm(6, generator=generator).to(DEVICE)]
        gone = torch.arange(whole.shape[1])[None, :] >= -(-used[:, None] // 16)
        static["block_table"].copy_(table.masked_fill(gone.to(DEVICE), -1))
        graph.replay()
        for ours, eager in zip(found, given.call(), strict=True):
            assert torch.equal(ours, eager)
        assert not found[0][int(sizes.sum()) :].any()


@on_gpu
def test_a_compiler_gets_the_same_bits() -> None:
    given = inputs({"lengths": LONG, "d": 64, "is_causal": True}, dtype=torch.bfloat16, device=DEVICE)

    def call(query: torch.Tensor, **words: Any) -> torch.Tensor:
        out: torch.Tensor = dispatch.attention_varlen(query, **words)[0]
        return out

    words = dict(given.arguments)
    query = words.pop("query")
    with torch.no_grad():
        assert torch.equal(torch.compile(call, fullgraph=True)(query, **words), call(query, **words))


@on_gpu
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 0)])
@pytest.mark.parametrize("lengths", [((1, 1, 1), (900, 40, 256)), ((100, 1, 33), (900, 40, 256))], ids=["decode", "chunks"])
def test_it_means_what_torch_means(lengths: Any, window: tuple[int, int]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    given = inputs({"lengths": lengths, "d": 64, "page": 256, "kv_heads": 4}, dtype=torch.bfloat16, device=DEVICE, padding=0)
    words = given.arguments
    for name in ("key", "value"):
        # What torch's kernel reads of unused slots isn't our subject.
        words[name] = words[name].nan_to_num(0.0)
    table = words["block_table"].clamp(0, len(words["key"]) - 1)
    places = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    arguments: list[Any] = [words[name] for name in places]
    bounds = torch.nn.functional.pad(words["seqused_k"].cumsum(0, dtype=torch.int32), (1, 0))
    arguments[4] = bounds
    try:
        theirs = varlen.varlen_attn(*arguments, window_size=window, block_table=table, seqused_k=words["seqused_k"])
    except (TypeError, RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has no paged attention: {error}")
    ours, _ = given.call(window_size=window, block_table=table)
    torch.testing.assert_close(ours.float(), theirs.float(), atol=2e-2, rtol=2e-2)


@on_gpu
@pytest.mark.parametrize(("queries", "page"), [(1, 16), (1, 64), (256, 16)])
def test_a_search_over_pages_measures_and_its_record_serves(queries: int, page: int, tmp_path: Path) -> None:
    path = str(tmp_path / "paged.sqlite")
    words = ("--paged", str(page), "--n", "2048", "--n-q", str(queries), "--batch", "8", "--heads", "8", "--kv-heads", "2", "--d", "64")
    result = CliRunner().invoke(main, ["search", *words, "--causal", "--dtype", "bf16", "--trials", "4", "--db", path, "--json"])
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)
    assert (row["source"], row["fate"], row["features"]["page"]) == ("measured", "correct", page)
    assert row["framework_us"] > 0 and row["call_us"] > 0 and row["framework_call_us"] > 0
    given = inputs(
        {"page": page, "is_causal": True, "d": 64, "heads": 8, "kv_heads": 2, "lengths": ((queries,) * 8, (2048,) * 8)},
        dtype=torch.bfloat16,
        device=DEVICE,
        padding=0,
    )
    with dispatch.use(path, alone=True), torch.no_grad():
        said = dispatch.explain_varlen(**given.arguments)
        assert (said.kind, said.variant_id) == ("exact", row["variant"])
        agrees(given, kind="bf16")
