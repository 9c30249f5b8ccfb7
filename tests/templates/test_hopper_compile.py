"""The Hopper kernels without a GPU: the compiler makes of them the machine code that they are meant to be."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from compiling import cross_compile
from hopper_kernels import H200, PLAIN, compiled, count, key_loops, launch_of, machine_code, problem, source

from flashtune.core.problems.config import Config
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features
from flashtune.templates.hopper.flash_fwd_hopper import FAMILY
from flashtune.templates.hopper.layout import HopperLayout
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import read_facts

CAUSAL = Features(causal=True)
EVERYTHING = Features(causal=True, window=(100, 0), mask="bias", dropout=True, softcap=True, alibi=True, sinks=True)
CHAINED = {"BLOCK_N": 128, "tiles": "chained"}


@pytest.mark.parametrize(
    ("d", "features", "changes"),
    [
        (128, CAUSAL, {**CHAINED, "section": 8, "order": "drawn"}),
        (256, CAUSAL, {"tiles": "loop", "order": "drawn", "maximum": "first", "rescale": "grown"}),
        (64, Features(causal=True, window=(64, 0)), {"BLOCK_M": 192, "packed_heads": 8, "maximum": "first", "rescale": "grown"}),
    ],
    ids=str,
)
def test_it_compiles_to_warpgroup_instructions_in_flight_without_spills(d: int, features: Features, changes: dict[str, Any]) -> None:
    is_in_flight(compiled(problem(d, features), **changes), **changes)


def is_in_flight(kernel: Any, **changes: Any) -> list[str]:
    """The machine code of a kernel whose products wait for each other no more than they must, and that spills nothing in its loops."""
    facts = read_facts(kernel, H200)
    # Sizes and bounds may wait in memory from tile to tile, outside the loops over keys; an empty stack frame counts 8 bytes.
    assert facts.spills <= (48 if changes.get("tiles") == "loop" else 32 if changes.get("order") == "drawn" else 8)
    assert facts.shared_bytes <= H200.shared_bytes_per_block
    assert facts.registers * facts.threads <= H200.registers_per_sm
    code = machine_code(kernel)
    assert not any(loop["STL"] + loop["LDL"] for loop in key_loops(code))
    products = count(code)["HGMMA"]
    waits = sum("WARPGROUP.DEPBAR" in line for line in code)
    assert products > 0
    # ptxas waits after each product where it can't prove that they may overlap.
    assert waits <= products / 3
    return code


@pytest.mark.parametrize(
    ("d", "d_v", "dtype", "features"),
    [
        (96, 64, "bf16", EVERYTHING),
        (96, 64, "fp8", EVERYTHING),
        (64, 40, "bf16", Features(alibi=True, softcap=True)),
        (64, 64, "fp8", Features(alibi=True, mask="bool", window=(64, 32))),
    ],
    ids=str,
)
def test_features_and_uneven_head_sizes_compile_without_spills(d: int, d_v: int, dtype: DType, features: Features) -> None:
    facts = read_facts(compiled(problem(d, features, d_v=d_v, dtype=dtype), BLOCK_M=64, intra_wg_overlap=0), H200)
    assert facts.tensor_core_ops > 0
    assert facts.spills <= 8


@pytest.mark.parametrize(
    ("d", "features", "changes"),
    [
        (128, CAUSAL, {"BLOCK_M": 128, "BLOCK_N": 64, "tiles": "chained", "order": "drawn"}),
    ],
    ids=str,
)
def test_e4m3_weights_reach_their_product_without_moving(d: int, features: Features, changes: dict[str, Any]) -> None:
    kernel = compiled(problem(d, features, dtype="fp8"), **changes)
    assert read_facts(kernel, H200).spills <= 8
    code = machine_code(kernel)
    assert count(code)["HGMMA"] == 0
    loops = key_loops(code)
    assert len(loops) == changes["BLOCK_M"] // 64
    for loop in loops:
        # An instruction takes 32 columns of q and k, or 32 keys of the weights and v.
        assert loop["QGMMA"] == d // 32 + changes["BLOCK_N"] // 32
        assert loop["PRMT"] == 0
        # Four threads share a row, so that each of a thread's two row maxima takes two steps.
        assert loop["SHFL"] == 4
        # A thread packs its BLOCK_N / 2 weights by twos.
        assert loop["F2FP"] == changes["BLOCK_N"] // 4


@pytest.mark.parametrize(
    ("features", "overlap", "block_n"),
    [(CAUSAL, 1, 64), (Features(mask="bool"), 0, 128)],
    ids=str,
)
def test_a_settled_block_votes_once_and_meets_no_other_barrier_than_a_running_one(features: Features, overlap: int, block_n: int) -> None:
    code = machine_code(
        compiled(problem(64, features), BLOCK_M=64, BLOCK_N=block_n, intra_wg_overlap=overlap, maximum="first", rescale="grown")
    )
    running, settled = key_loops(code)
    scores, masked = block_n // 2, features.mask == "bool"
    assert running["VOTE"] == 1
    assert settled["VOTE"] == (2 if masked else 1)
    assert settled["BAR"] == running["BAR"]
    assert settled["STL"] + settled["LDL"] == running["STL"] + running["LDL"] == 0
    # A thread holds two rows, each shared by four threads; maxima, if a row outgrew them, or has seen no key yet, which is also counted.
    assert running["SHFL"] == 4
    assert settled["SHFL"] == (12 if masked else 4)
    # One exponential a score, and in the branch a logarithm and an exponential a row at most.
    assert scores < settled["MUFU"] <= scores + 4
    # Probs are rounded before the vote where blocks overlap, and in the branch once more.
    assert settled["F2FP"] == scores // 2 * (1 + overlap)


@pytest.mark.parametrize(
    ("features", "dtype", "block_n"),
    [(Features(mask="bool"), "fp8", 64), (Features(window=(64, 32)), "fp16", 64)],
    ids=str,
)
def test_hiding_scores_takes_a_selection_each_and_no_comparison(features: Features, dtype: DType, block_n: int) -> None:
    # One instruction sets the predicates of some three scores from their word.
    [loop] = key_loops(machine_code(compiled(problem(64, features, dtype=dtype), BLOCK_M=64, BLOCK_N=block_n)))
    scores = block_n // 2
    # The two row maxima are selected too, so that -inf - -inf doesn't come up, and what rows are scaled with.
    assert loop["FSEL"] == scores + (2 if dtype == "fp8" else 4)
    assert 0 < loop["R2P"] < scores / 2
    assert loop["ISETP"] < 8


@pytest.mark.parametrize(("d", "dtype", "maximum"), [(128, "bf16", "running"), (64, "fp16", "first")])
def test_weights_wait_by_twos_and_reach_their_product_without_moving(d: int, dtype: DType, maximum: str) -> None:
    settles = maximum == "first"
    changes = {**CHAINED, "pingpong": True, "maximum": maximum}
    loops = key_loops(is_in_flight(compiled(problem(d, CAUSAL, dtype=dtype), **changes), **changes))
    assert len(loops) == (4 if settles else 2)
    for index, loop in enumerate(loops):
        assert loop["PRMT"] == 0
        # Of each pair of loops the second has settled maxima, and rounds once more in the branch for rows that outgrew them.
        assert loop["F2FP"] == 128 // 4 * (2 if settles and index % 2 else 1)


def test_alibi_costs_a_causal_score_an_addition_and_a_column_a_multiply_add() -> None:
    # Loops with running and with settled maxima.
    plain = key_loops(machine_code(compiled(problem(64, CAUSAL), BLOCK_M=64, maximum="first")))
    leaning = key_loops(machine_code(compiled(problem(64, replace(CAUSAL, alibi=True)), BLOCK_M=64, maximum="first")))
    assert len(plain) == 2
    # A thread has 64 / 2 scores of a block, in 64 / 4 columns.
    assert [more_of(*loops) for loops in zip(plain, leaning, strict=True)] == [{"FADD": 32, "FFMA": 16, "I2FP": 1}] * len(plain)


def test_alibi_costs_other_scores_an_addition_and_a_multiply_add() -> None:
    # Plain as in the test of padding columns, so that it is compiled once.
    [plain] = key_loops(machine_code(compiled(problem(80), BLOCK_M=64, BLOCK_N=64)))
    [leaning] = key_loops(machine_code(compiled(problem(80, Features(alibi=True)), BLOCK_M=64, BLOCK_N=64)))
    assert more_of(plain, leaning) == {"FADD": 32, "FFMA": 32, "I2FP": 16}


def more_of(plain: Counter[str], other: Counter[str]) -> dict[str, int]:
    """By how much the numbers of the softmax's instructions differ."""
    names = ("FADD", "FFMA", "FMUL", "MUFU", "FSEL", "FMNMX", "SHFL", "PRMT", "I2FP")
    return {name: other[name] - plain[name] for name in names if other[name] != plain[name]}


def test_dropout_costs_a_thread_twelve_wide_products_per_sixteen_weights_and_five_instructions_per_four() -> None:
    changes = {**CHAINED, "pingpong": True}
    kernel = compiled(problem(128, Features(causal=True, dropout=True)), **changes)
    plain = key_loops(machine_code(compiled(problem(128, CAUSAL), **changes)))
    dropping = key_loops(is_in_flight(kernel, **changes))
    assert len(plain) == len(dropping) == 2
    for before, after in zip(plain, dropping, strict=True):
        more = Counter(after)
        more.subtract(before)
        # A thread has 64 weights of a block. Seven rounds have fourteen wide products, but two of them don't depend on the column.
        calls, weights = 64 // 16, 64
        assert 12 * calls <= more["IMAD"] <= 18 * calls
        # A round's two exclusive ors, and a mask for two weights.
        assert more["LOP3"] <= 14 * calls + weights // 2
        # Two rows share a word, and two columns a comparison.
        assert more["SHF"] == weights // 4
        assert more["HSET2"] == weights // 2
        assert more["PRMT"] == more["FSEL"] == 0
        assert abs(more["ISETP"]) <= 4
        assert more["F2FP"] == 0


@pytest.mark.parametrize(("d", "d_v", "computed"), [(80, 80, 80), (192, 128, 192)])
def test_products_leave_out_padding_columns(d: int, d_v: int, computed: int) -> None:
    [loop] = key_loops(machine_code(compiled(problem(d, d_v=d_v), BLOCK_M=64, BLOCK_N=64)))
    # An instruction takes 16 columns of q and k, or 16 keys of the weights and v.
    assert loop["HGMMA"] == computed // 16 + 64 // 16


@pytest.mark.parametrize(("d", "widths"), [(192, [128, 64])])
def test_products_of_values_in_pieces_are_under_way_together_and_as_wide_as_the_pieces(d: int, widths: list[int]) -> None:
    kernel = compiled(problem(d), BLOCK_M=64, v_columns="pieces")
    assert read_facts(kernel, H200).spills <= 8
    code = machine_code(kernel)
    [loop] = key_loops(code)
    assert loop["STL"] + loop["LDL"] == 0
    assert loop["HGMMA"] == sum(widths) // 16 + len(widths) * 64 // 16
    # The left operand of these products is in registers. One block's are in the loop, another's after it.
    values = Counter(int(found[1]) for line in code if (found := re.search(r"HGMMA\.64x(\d+)x16\S* R\d+, R", line)))
    assert values == {width: 2 * 64 // 16 for width in widths}
    # Scores, then values: in the first block, in the loop, and after it.
    assert sum("WARPGROUP.DEPBAR" in line for line in code) == 4


@pytest.mark.parametrize(
    ("ctas_per_sm", "changes"), [(2, {"BLOCK_M": 128, "intra_wg_overlap": 0}), (3, {}), (4, {"intra_wg_overlap": 0})], ids=str
)
def test_as_many_programs_fit_an_sm_as_the_config_says(ctas_per_sm: int, changes: dict[str, Any]) -> None:
    wanted, changes = problem(64), {"BLOCK_M": 64, "ctas_per_sm": ctas_per_sm} | changes
    facts = read_facts(compiled(wanted, **changes), H200)
    cap = launch_of(wanted, **changes)[3]["maxnreg"]
    assert facts.registers <= cap
    assert cap * facts.threads * ctas_per_sm <= H200.registers_per_sm
    # The system keeps 1 KiB for each program.
    assert (facts.shared_bytes + 1024) * ctas_per_sm <= H200.shared_bytes_per_sm
    assert facts.spills == 0


@pytest.mark.parametrize(
    ("d", "d_v", "changes"),
    [
        (64, 64, {"BLOCK_N": 128, "ctas_per_sm": 3}),
        (64, 128, {"ctas_per_sm": 3}),
    ],
    ids=str,
)
def test_a_product_that_ptxas_refuses_is_outside_the_space(d: int, d_v: int, changes: dict[str, Any]) -> None:
    spec, chosen = problem(d, d_v=d_v).spec(), Config.of({**PLAIN, "BLOCK_M": 64, "intra_wg_overlap": 0}, **changes)
    broken, layout = FAMILY.violated(chosen, spec, H200), HopperLayout.of(spec, chosen)
    assert broken is not None and broken.name == "registers at entry"
    text, needed = render(FAMILY, variant_of(FAMILY, spec, chosen)), r"Insufficient registers \((\d+)\) .*register target of (\d+)"
    with pytest.raises(Exception, match=needed) as error:
        cross_compile(text, "refused", problem(d, d_v=d_v), H200)
    found = re.search(needed, str(error.value))
    assert found is not None and (int(found[1]), int(found[2])) == (layout.entry_registers, layout.product_registers)


def test_a_single_program_of_an_sm_has_no_register_cap() -> None:
    assert "maxnreg" not in launch_of(problem(64), BLOCK_M=64)[3]


def test_the_facts_of_a_launch_are_those_of_the_attention_kernel() -> None:
    # `pack_mask` goes before it.
    wanted, chosen = problem(64, Features(mask="bool")), {"BLOCK_M": 64, "ctas_per_sm": 3, "maximum": "first"}
    facts = cross_compile(source(wanted.spec(), **chosen), "hopper", wanted, H200)
    assert facts == read_facts(compiled(wanted, **chosen), H200)
    assert facts.threads == 256


@pytest.mark.parametrize(("dtype", "changes"), [("bf16", {"maximum": "first"}), ("fp8", {"section": 8})])
def test_one_compile_serves_every_length_batch_and_head_count(dtype: DType, changes: dict[str, Any]) -> None:
    wanted = problem(64, CAUSAL, dtype=dtype)
    first = compiled(wanted, BLOCK_M=64, **changes)
    for batch, heads, kv_heads, n in ((1, 1, 1, 1), (3, 40, 8, 100_000), (16, 2, 1, 17)):
        other = replace(wanted, batch=batch, heads=heads, kv_heads=kv_heads, n_q=n, n_kv=n)
        assert compiled(other, BLOCK_M=64, **changes) is first
