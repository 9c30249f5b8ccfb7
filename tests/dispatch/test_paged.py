"""Paged caches: each sequence is as if its keys lay in a row, by kernels in Triton's interpreter and by gathered copies."""

import functools
from typing import Any

import pytest
import torch
from interpreting import interpreted
from paged_cases import CASES, CHUNKS, agrees, inputs
from torch.utils.flop_counter import FlopCounterMode
from varlen_cases import forced

from flashtune import dispatch
from flashtune.core.code import launching
from flashtune.core.code.launching import Tensors
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.records.results import CompileFacts
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.call.sequences import Numbers
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.rows import paged
from flashtune.dispatch.rows import run as packed_run
from flashtune.dispatch.rows.kernel import Kernel, loaded_kernel
from flashtune.dispatch.state import context
from flashtune.templates.paged import flash_paged
from flashtune.tuner.children.compile import compiling_for, facts_of

FP8 = torch.float8_e4m3fn


WITHIN_OTHERS = {"decode, causal", "chunks", "chunks, window", "pages of 64 keys", "split", "soft cap", "sinks", "unsplit"}
"""Cases whose code is that of others; kernels compute them on a GPU alone (tests/gpu/test_paged.py)."""


@pytest.mark.parametrize("half", [0, 1])
def test_kernels_read_the_pages_of_each_sequence_alone(half: int) -> None:
    names = [name for name in CASES if name not in WITHIN_OTHERS][half::2]
    report = interpreted("interpret_paged", *names)
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) == len(names)


def test_kernels_keep_the_promises_of_paged_calls() -> None:
    report = interpreted("interpret_paged")
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) > 8


@pytest.mark.parametrize("case", CASES)
def test_without_kernels_sequences_are_gathered(case: str) -> None:
    with forced("torch"):
        agrees(inputs(CASES[case]))


def test_float64_is_served_to_its_own_precision() -> None:
    given = inputs({"is_causal": True, "lengths": CHUNKS}, dtype=torch.float64)
    agrees(given, kind="fp32")


def test_lengths_beyond_the_table_are_cut_to_it() -> None:
    given = inputs({"lengths": ((1, 1), (32, 32))})
    agrees(given, seqused_k=torch.tensor([99, 32], dtype=torch.int32))


def test_bounds_of_keys_stand_for_numbers_of_used_ones() -> None:
    given = inputs({})
    bounds = torch.nn.functional.pad(given.arguments["seqused_k"].cumsum(0, dtype=torch.int32), (1, 0))
    agrees(given, seqused_k=None, cu_seqlens_k=bounds)


def test_without_kernels_a_compiler_traces_one_operator() -> None:
    given = inputs({"is_causal": True}, dtype=torch.float32, padding=0)

    def call(query: torch.Tensor, **words: Any) -> torch.Tensor:
        out: torch.Tensor = dispatch.attention_varlen(query, **words)[0]
        return out + 1

    words = dict(given.arguments)
    query = words.pop("query")
    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(query, **words), call(query, **words))


@pytest.mark.parametrize("compiled", [False, True])
def test_no_splits_at_all_leave_their_number_to_the_host(compiled: bool) -> None:
    given = inputs({"is_causal": True})
    explained = [dispatch.explain_varlen(**given.arguments, num_splits=splits) for splits in (None, 0)]
    assert explained[0] == explained[1]

    def call(splits: int | None) -> torch.Tensor:
        out: torch.Tensor = dispatch.attention_varlen(**given.arguments, num_splits=splits)[0]
        return out

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    assert torch.equal(run(0), run(None))


def test_switches_of_torchs_backends_and_its_modes_leave_the_meaning_alone() -> None:
    given = inputs({"is_causal": True})
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        agrees(given)
    with FlopCounterMode(display=False):
        agrees(given)


def test_the_operator_keeps_torchs_rules_of_operators() -> None:
    given = inputs({}, dtype=torch.float32, padding=0).arguments
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_q", "seqused_k")
    tensors = *(given[name] for name in names), None, None, given["block_table"], None, None
    arguments = (*tensors, None, 1, 70, 0.25, -1, 0, True, 0.0, 0.0, False, False, None)
    found = torch.library.opcheck(torch.ops.flashtune_packed.attention.default, arguments)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_in_the_outputs_type_stand_beside_caches_in_float8(dtype: torch.dtype) -> None:
    given = inputs({"cache": FP8, "is_causal": True, "lengths": CHUNKS, "sinks": True}, dtype=torch.bfloat16)
    out, lse = given.call(sinks=given.arguments["sinks"].to(dtype))
    wanted, wanted_lse = given.call(sinks=given.arguments["sinks"].to(dtype).float())
    torch.testing.assert_close((out, lse), (wanted, wanted_lse), rtol=0, atol=0)


def test_it_says_who_serves() -> None:
    said = dispatch.explain_varlen(**inputs({}).arguments)
    assert said.kind == "framework" and "gathered" in said.reason


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"key": torch.zeros(5, 2, 16)}, "dimensions"),
        ({"value": torch.zeros(5, 16, 2, 16)}, "equal pages"),
        ({"query": torch.zeros(9, 4, 16)}, "one dtype"),
        ({"query": torch.zeros(9, 4, 24, dtype=torch.float16)}, "sizes"),
        ({"enable_gqa": False}, "enable_gqa"),
        ({"block_table": [[0]]}, "tensor"),
        ({"block_table": torch.zeros(6, 5)}, "int32"),
        ({"block_table": torch.zeros(5, 5, dtype=torch.int32)}, "sequences"),
        ({"seqused_k": None}, "seqused_k"),
        ({"seqused_k": torch.zeros(9, dtype=torch.int32)}, "bounds"),
        ({"k_descale": torch.ones(2)}, "float8"),
        ({"num_splits": -1}, "num_splits"),
        ({"num_splits": "2"}, "num_splits"),
        ({"num_splits": 10**6}, "num_splits"),
        ({"max_seqlen_q": None}, "max_seqlen_q must be an integer"),
        ({"cu_seqlens_q": torch.tensor(3)}, "cu_seqlens_q has the shape"),
        ({"seqused_k": [1, 2]}, "seqused_k must be a tensor"),
        ({"seqused_k": None, "cu_seqlens_k": torch.tensor(1)}, "seqused_k"),
        ({"sinks": torch.zeros(4, device="meta")}, "one device"),
        ({"dropout_p": 0.5}, "inference"),
        ({"query": torch.zeros(8, 4, 16, dtype=torch.float16, requires_grad=True)}, "no_grad"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused_in_a_sentence(words: dict[str, Any], said: str) -> None:
    with pytest.raises((InputError, InputTypeError), match=said):
        inputs({}).call(**words)


@pytest.mark.parametrize("cache", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize("block", [-1, 6])
def test_a_page_with_used_keys_that_is_no_block_is_refused_where_it_is_read(block: int, cache: torch.dtype) -> None:
    caches, lists = [torch.randn(6, 8, 1, 16).to(cache)] * 2, (torch.arange(3).int(), None, 1, 16)
    table, used = torch.tensor([[0, 1], [2, block]]), torch.tensor([16, 8])
    dispatch.attention_varlen(torch.randn(2, 1, 16), *caches, *lists, seqused_k=used, block_table=table)
    with pytest.raises(InputError, match=f"block_table names block {block}, and the caches have 6: give 0 to 5 for pages with used keys"):
        dispatch.attention_varlen(torch.randn(2, 1, 16), *caches, *lists, seqused_k=used + 1, block_table=table)


def test_factors_are_of_each_key_head() -> None:
    with pytest.raises(InputError, match="Hkv"):
        inputs({"cache": FP8}).call(v_descale=torch.ones(4))
    for factor, said in (([1.0, 1.0], "must be a tensor"), (torch.ones(2, device="meta"), "one device")):
        with pytest.raises((InputError, InputTypeError), match=said):
            inputs({"cache": FP8}).call(k_descale=factor)
    with pytest.raises(InputTypeError, match="alone may be float8"):
        inputs({"cache": FP8}).call(query=torch.zeros(8, 4, 16).to(FP8))
    with pytest.raises(InputError, match="float8"):
        dispatch.attention_varlen(*[torch.zeros(3, 2, 16)] * 3, *[torch.tensor([0, 3])] * 2, 3, 3, k_descale=torch.ones(2))


@functools.cache
def facts(
    gpu: str,
    *,
    page: int,
    rows: int | None,
    cache: torch.dtype = torch.bfloat16,
    d: int = 128,
    splits: int | None = None,
    group: int = 4,
    latent: int = 0,
) -> CompileFacts:
    """Facts of the kernel for a step with `rows` queries to a sequence, of `group` heads to a key head, causal; `latent` are the columns of
    keys that are values, if any are."""
    target, queries = find_target(gpu), rows or 1
    spec = KernelSpec(
        direction="fwd", dtype="bf16", d=d, d_v=latent or d, causal=True, window=False, softcap=False, mask="none", latent=latent > 0
    )
    config: Config = flash_paged.chosen(spec, target, None if rows is None else group * rows, narrow=cache.itemsize == 1)
    choice = Choice(kind="default", spec=spec, note="", family=flash_paged.FAMILY, config=config)
    kernel = loaded_kernel(choice, torch.device("meta"), target)
    assert isinstance(kernel, Kernel)
    numbers = Numbers(queries, 4096, d**-0.5, -1, 0, True, 0.0, 0.0, False, False)

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    caches = [made(999, page, 8, d, dtype=cache) for _ in range(2)]
    lengths = made(9, dtype=torch.int32), made(8, 4096 // page, dtype=torch.int32), made(8, dtype=torch.int32)
    factors = [made(8, 8, dtype=torch.float32) if cache == FP8 else None for _ in range(2)]
    if latent:
        caches[1] = caches[0][..., :latent]
    results = made(8 * queries, 8 * group, latent or d), made(8 * group, 8 * queries, dtype=torch.float32)
    lists = dict(zip(("cu_q", "table", "used"), lengths, strict=True)) | {"cu_k": lengths[0]}
    tensors = Tensors(made(8 * queries, 8 * group, d), *caches, *results, k_descale=factors[0], v_descale=factors[1], **lists)
    plan = paged.plan_of_pages(kernel.code.module, tensors, numbers._replace(splits=splits))
    arguments, found = launching.Arguments(plan), []
    with compiling_for(target):
        for one in plan.launches:
            function, words = getattr(kernel.code.module, one.kernel), launching.compiler_options(one.options)
            found.append((one.kernel, function.warmup(*arguments.of(one), grid=one.grid, **words)))
    return facts_of(found, target)


@pytest.mark.parametrize(
    ("gpu", "page", "rows"),
    [
        ("a100", 128, 1),
        ("h200", 64, None),
        ("b200", 16, 512),
        ("mi300x", 16, 1),
    ],
)
def test_it_compiles_to_tensor_core_code_with_its_tiles_in_registers(gpu: str, page: int, rows: int | None) -> None:
    found = facts(gpu, page=page, rows=rows, splits=None if rows else 4)
    # A tile that is spilled counts hundreds of bytes a thread.
    assert found.tensor_core_ops > 0 and found.spills <= 128
    assert 0 < found.shared_bytes <= find_target(gpu).shared_bytes_per_block


@pytest.mark.parametrize(("gpu", "group", "page"), [("h200", 128, 64), ("a100", 16, 16)])
def test_keys_are_loaded_once_for_latent_values(gpu: str, group: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory holds the queries, the keys in flight, and nothing of the values; tiles stay in registers."""
    # As in a user's process, which compiles with the lines.
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO")
    target = find_target(gpu)
    found = facts(gpu, page=page, rows=1, d=576, latent=512, group=group)
    spec = KernelSpec(direction="fwd", dtype="bf16", d=576, d_v=512, causal=True, window=False, softcap=False, mask="none", latent=True)
    config = flash_paged.chosen(spec, target, group)
    in_flight = config.number("num_stages") - (config["BLOCK_M"] != 64)
    tiles = 2 * 576 * (config.number("BLOCK_M") + in_flight * config.number("BLOCK_N"))
    # Of 128 heads addresses spill, and yet it is the fastest.
    assert found.tensor_core_ops > 0 and found.spills <= (32 if group < 128 else 320)
    assert tiles <= found.shared_bytes <= tiles + 8192


@pytest.mark.parametrize(("gpu", "rows"), [("l4", 1), ("b200", 512)])
def test_caches_in_fp8_compile_for_every_gpu_that_has_it(gpu: str, rows: int) -> None:
    found = facts(gpu, page=64, rows=rows, cache=FP8)
    assert found.tensor_core_ops > 0 and found.spills <= 128


@pytest.mark.parametrize("page", [16, 128])
def test_blocks_of_keys_are_in_flight_while_another_is_read(page: int) -> None:
    # Two blocks of 64 keys and values in 16 bits; loads of the table between them would leave one.
    assert facts("h200", page=page, rows=1).shared_bytes >= 2 * 64 * (128 + 128) * 2


def test_the_failure_of_another_calls_kernel_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = object.__new__(Kernel)
    monkeypatch.setattr(packed_run, "torch_only", lambda _: None)
    monkeypatch.setattr(Kernel, "failed", "flash_paged can't be built here (too many registers)")
    memo = context.current()
    monkeypatch.setitem(memo.packed, "paged kernel of another call", failed)
    said = dispatch.explain_varlen(**inputs({}).arguments)
    assert said.kind == "framework" and said.reason.startswith("no kernel takes pages of this kind here")


@pytest.mark.parametrize("case", ["split, everything", "fp8 with factors"])
def test_a_compiler_traces_pytorch_over_whole_pages_where_it_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "attention_varlen", torch.compile(dispatch.attention_varlen, backend="eager", fullgraph=True))
    agrees(inputs(CASES[case]), implementation="torch")
