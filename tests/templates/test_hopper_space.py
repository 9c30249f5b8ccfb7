"""The Hopper family as data and text: its space is sound for every spec that it supports, and its text is stable, formatted Python."""

import ast
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import triton
from hopper_kernels import H200, PLAIN, problem, source
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.core.gpu.target import find_target, targets
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.lengths import Lengths
from flashtune.core.problems.problem import MASK_KINDS, Features, Problem
from flashtune.core.records.results import Fate
from flashtune.core.system.errors import InputError
from flashtune.dispatch.plans import kernels
from flashtune.templates.backward.hopper.flash_bwd_hopper_split import FAMILY as SPLIT
from flashtune.templates.cost import predict_us
from flashtune.templates.expected import log_us
from flashtune.templates.family import Family
from flashtune.templates.hopper.flash_fwd_hopper import FAMILY
from flashtune.templates.hopper.layout import HopperLayout, tiles_of
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.propose.space import SearchSpace

ROOT = Path(__file__).parents[2]
HOPPERS = list({(t.shared_bytes_per_block, t.registers_per_sm): t for t in targets().values() if t.is_hopper}.values())
"""One of each kind: a constraint knows a GPU by what a program may have of it."""
HEAD_SIZES = range(8, 257, 8)
DTYPES_HERE: tuple[DType, ...] = ("fp16", "bf16", "fp8")
FEATURES = [
    Features(),
    Features(causal=True),
    Features(window=(64, 32)),
    Features(causal=True, window=(64, 0)),
    Features(mask="bool"),
    Features(mask="bias"),
    Features(causal=True, dropout=True),
    Features(softcap=True),
    Features(alibi=True),
    Features(causal=True, alibi=True, softcap=True, sinks=True),
    Features(causal=True, window=(100, 0), mask="bias", dropout=True, softcap=True, alibi=True),
]


@pytest.mark.parametrize("features", FEATURES, ids=Features.label)
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_every_supported_spec_has_starts_that_break_no_constraint(dtype: DType, features: Features) -> None:
    supported = 0
    for d in HEAD_SIZES:
        for d_v in {d, 64, 128, 256}:
            spec = problem(d, features, d_v=d_v, dtype=dtype).spec()
            for target in HOPPERS:
                if FAMILY.supports(spec, target) is not None:
                    continue
                supported += 1
                found = FAMILY.starts(spec, target)
                default = FAMILY.default(spec, target)
                assert default in found
                assert default["maximum"] == "running"
                assert len(set(found)) == len(found)
                for chosen in found:
                    FAMILY.validate(chosen)
                    assert FAMILY.violated(chosen, spec, target) is None
    assert supported >= 33


@pytest.mark.parametrize(
    ("gpu", "changes"),
    [
        ("a100", {}),
        ("b200", {}),
        ("h200", {"dtype": "fp32"}),
        ("h200", {"d": 36}),
        ("h200", {"d_v": 100}),
        ("h200", {"dtype": "fp8", "d": 72}),
        ("h200", {"dtype": "fp8", "d_v": 136}),
    ],
    ids=str,
)
def test_it_says_why_it_refuses(gpu: str, changes: dict[str, Any]) -> None:
    spec = KernelSpec(**{**problem().spec().as_dict(), **changes})
    assert "flash_fwd_hopper" in (FAMILY.supports(spec, find_target(gpu)) or "")


@pytest.mark.parametrize("features", [Features(), Features(causal=True, mask="bool")], ids=Features.label)
@pytest.mark.parametrize(("d", "d_v", "dtype"), [(16, 16, "bf16"), (64, 64, "bf16"), (64, 128, "fp16"), (32, 256, "bf16"), (64, 64, "fp8")])
def test_programs_of_an_sm_fit_its_register_file_and_products_a_threads_registers(
    d: int, d_v: int, dtype: DType, features: Features
) -> None:
    spec = problem(d, features, d_v=d_v, dtype=dtype).spec()
    read = {axis.name: axis.values for axis in FAMILY.axes if axis.name in ("BLOCK_M", "BLOCK_N", "intra_wg_overlap", "ctas_per_sm")}
    members = 0
    for values in product(*read.values()):
        chosen = Config.of(PLAIN, **dict(zip(read, values, strict=True)))
        if FAMILY.violated(chosen, spec, H200) is None:
            layout, members = HopperLayout.of(spec, chosen), members + 1
            # Warps get registers in units of 256.
            of_warp = -(-layout.entry_registers * H200.warp_size // 256) * 256
            assert of_warp * 4 * (layout.consumers + 1) * chosen.number("ctas_per_sm") <= H200.registers_per_sm
            # Of a product's accumulator a thread has a number for every two columns, and 64 rows are the warpgroup's.
            assert max(chosen.number("BLOCK_N"), layout.block_dv) // 2 + 26 <= layout.entry_registers
    assert members > 5


TILES_IN_CHUNKS = [
    (FAMILY, problem(192, d_v=128), FAMILY.default(problem(192, d_v=128).spec(), H200)),
    (SPLIT, replace(problem(192), direction="bwd"), SPLIT.default(replace(problem(192), direction="bwd").spec(), H200)),
]


@pytest.mark.parametrize(("family", "wanted", "chosen"), TILES_IN_CHUNKS, ids=["forward", "backward"])
@pytest.mark.parametrize("version", ["3.8.0", "3.9.1", "3.10.0+git", "4.0.0"])
def test_tiles_in_chunks_arent_compiled_by_versions_of_triton_whose_views_end_with_their_memory(
    family: Family, wanted: Problem, chosen: Config, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    variant = variant_of(family, wanted.spec(), chosen)
    reply = tasks.compile_candidate(Source.of(family, variant), wanted, H200)
    assert (reply.fate, reply.reason) == (Fate.CONSTRAINT, family.uncompilable(wanted.spec(), chosen))
    assert version in reply.reason
    with pytest.raises(InputError, match=re.escape(version)):
        SearchSpace({family.name: family}, wanted, H200, only_suited=False)
    with pytest.raises(ImportError, match=re.escape(version)):
        kernels.load(family, variant)
    # Machine code that there is serves: it breaks no constraint.
    assert family.unfit(chosen, wanted.spec(), H200) is None
    assert family.uncompilable(replace(wanted, d=128, d_v=128).spec(), chosen) is None


@pytest.mark.parametrize(("family", "wanted", "chosen"), TILES_IN_CHUNKS, ids=["forward", "backward"])
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_tiles_in_chunks_are_compiled_by_earlier_versions(
    family: Family, wanted: Problem, chosen: Config, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert family.uncompilable(wanted.spec(), chosen) is None
    assert SearchSpace({family.name: family}, wanted, H200, only_suited=False).families


def drawn_text(choose: Any) -> str:
    """The text of any variant; `choose` picks one of a list."""
    features = Features(
        causal=choose([False, True]),
        window=choose([None, (64, 32)]),
        mask=choose(MASK_KINDS),
        dropout=choose([False, True]),
        softcap=choose([False, True]),
        alibi=choose([False, True]),
        sinks=choose([False, True]),
    )
    dtype: DType = choose(DTYPES_HERE)
    step = 16 if dtype == "fp8" else 8
    d, d_v = choose(range(step, 257, step)), choose(range(8, 129 if dtype == "fp8" else 257, 8))
    spec = problem(d, features, d_v=d_v, dtype=dtype).spec()
    assert FAMILY.supports(spec, H200) is None
    chosen = Config.of({axis.name: choose(axis.values) for axis in FAMILY.axes})
    if FAMILY.violated(chosen, spec, H200) is not None:
        chosen = choose(FAMILY.starts(spec, H200))
    variant = variant_of(FAMILY, spec, chosen)
    text = render(FAMILY, variant)
    assert text == render(FAMILY, variant)
    return text


def test_the_rendered_text_is_the_reviewed_one(golden: Callable[[str, str], None]) -> None:
    # Of a plain kernel the package shows the text.
    spec = problem(64, Features(alibi=True, mask="bool", window=(9, 9)), dtype="fp8").spec()
    text = source(spec, BLOCK_M=64, intra_wg_overlap=0, ctas_per_sm=2)
    golden("flash_fwd_hopper-fwd-fp8-d64-window-bool-alibi.py", text)


@settings(max_examples=25)
@given(st.data())
def test_any_feasible_config_renders_to_the_same_python_twice(data: st.DataObject) -> None:
    text = drawn_text(lambda values: data.draw(st.sampled_from(values)))
    # Some lines of kernels that settle are longer than 140: this text was raced, and changes with the next race.
    assert max(map(len, text.splitlines())) <= 200
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    tree = ast.parse(text)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert "flash_fwd_hopper" in functions
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in modules} == {"triton", "typing"}


@pytest.mark.xfail(
    strict=True, reason="a header and a docstring of the text that was raced are laid out otherwise; mend with the next race"
)
def test_rendered_text_imports_and_is_as_a_formatter_and_a_linter_want_it(tmp_path: Path) -> None:
    choose = random.Random(0).choice
    for index in range(40):
        text = drawn_text(choose)
        (tmp_path / f"drawn_{index}.py").write_text(text)
        load_kernel(text, "hopper")
    # Tuples that travel together are unpacked whole.
    settings = ["--config", str(ROOT / "pyproject.toml"), "--quiet", str(tmp_path)]
    for words in (["format", "--diff"], ["check", "--ignore", "D1,RUF059"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *settings], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


BOTTOM_RIGHT = Features(causal=True, alignment="bottom_right")
FEW = Problem(batch=16, heads=32, kv_heads=4, n_q=24, n_kv=4096, d=128, d_v=128, dtype="bf16", features=BOTTOM_RIGHT)


def packed(wanted: Problem, block_m: int = 128) -> int:
    """How many heads a tile of so many rows has there."""
    config = FAMILY.default(wanted.spec(), H200).replace(BLOCK_M=block_m)
    return FAMILY.resized(config, wanted, H200).number("packed_heads")


def test_heads_that_share_keys_are_packed_where_that_spares_tiles() -> None:
    # Of 24 queries of four heads 96 rows, which fit; of eight heads two tiles, too.
    assert packed(FEW) == 4
    # Three tiles of eight queries of all heads, where those of two heads would take four.
    assert packed(FEW, 64) == 8
    assert packed(replace(FEW, n_q=16)) == 8
    assert packed(replace(FEW, n_q=16, heads=28)) == 8, "seven heads leave rows for an eighth"
    assert packed(replace(FEW, n_q=1)) == packed(replace(FEW, n_q=1), 64) == 8
    assert packed(replace(FEW, kv_heads=32)) == 1
    assert packed(replace(FEW, n_q=4096)) == packed(replace(FEW, n_q=1000)) == 1
    # Eight heads have 64 tiles of 900 queries, and 57 where each has 16 queries in a tile.
    assert packed(replace(FEW, n_q=900)) == 8 and packed(replace(FEW, n_q=950)) == 1
    # A prompt's own keys: of 150 queries ten tiles in place of sixteen are worth a compiler's time, of 200 thirteen aren't.
    assert packed(replace(FEW, n_q=150, n_kv=150)) == 4 and packed(replace(FEW, n_q=200, n_kv=200)) == 1
    # 128 tiles run at once.
    assert packed(replace(FEW, batch=4)) == 1 and packed(replace(FEW, batch=5)) == 4


@pytest.mark.parametrize("more", [{"mask": "bool"}, {"mask": "bias"}, {"dropout": True}, {"alibi": True}])
def test_what_each_row_has_of_its_own_is_not_packed(more: dict[str, Any]) -> None:
    other = replace(FEW, features=replace(FEW.features, **more))
    assert packed(other) == 1
    broken = FAMILY.violated(FAMILY.default(other.spec(), H200).replace(packed_heads=2), other.spec(), H200)
    assert broken is not None and broken.name == "packed heads"


@settings(deadline=None)
@given(st.integers(1, 600), st.sampled_from([1, 2, 3, 4, 5, 7, 8, 12, 16]), st.sampled_from([64, 128, 192, 256]), st.integers(1, 9))
def test_a_resized_config_keeps_the_constraints_and_has_no_more_tiles(n_q: int, group: int, block_m: int, batch: int) -> None:
    wanted = replace(FEW, n_q=n_q, heads=4 * group, batch=batch)
    for config in FAMILY.starts(wanted.spec(), H200)[:4]:
        found = FAMILY.resized(config, wanted, H200)
        assert FAMILY.violated(found, wanted.spec(), H200) is None and FAMILY.resized(found, wanted, H200) == found
        assert found.replace(packed_heads=1) == config
        assert tiles_of(found, wanted) <= tiles_of(config, wanted)
        # Each head of each query has a row.
        assert tiles_of(found, wanted) * config.number("BLOCK_M") >= batch * wanted.heads * n_q


def test_each_packed_sequence_ends_in_a_tile_of_its_own() -> None:
    lengths = Lengths.of("lognormal", 64, 64 * 256)
    wanted = Problem(
        batch=64,
        heads=16,
        kv_heads=16,
        n_q=256,
        n_kv=256,
        d=128,
        d_v=128,
        dtype="bf16",
        features=Features(causal=True, packed=True),
        lengths=lengths,
    )
    tiles = 16 * sum(-(-length // 128) for length in lengths.drawn(64, 64 * 256))
    assert tiles_of(Config.of(BLOCK_M=128), wanted) == tiles > 16 * 64 * 2


@pytest.mark.parametrize("n_q", [2, 24])
def test_the_cost_model_knows_what_packing_spares(n_q: int) -> None:
    wanted = replace(FEW, n_q=n_q)
    config = FAMILY.default(wanted.spec(), H200)
    facts = FAMILY.expected(config, wanted.spec(), H200)
    assert facts is not None
    found = FAMILY.resized(config, wanted, H200)
    spared = predict_us(found, facts, wanted, H200) / predict_us(config, facts, wanted, H200)
    # One wave of tiles in place of four.
    assert tiles_of(found, wanted) <= H200.sms < 3 * H200.sms < tiles_of(config, wanted)
    assert 0.25 < spared < 0.3
    # Nor does what it leaves out say otherwise (benchmarks/run.py fit_expected).
    apart = [log_us(FAMILY, one, wanted, H200) for one in (found, config)]
    assert None not in apart and 0.25 < math.exp(apart[0] - apart[1]) < 0.35


def test_a_search_tries_packed_heads_where_they_spare_tiles_and_nowhere_else() -> None:
    for wanted in (FEW, replace(FEW, n_q=4096), replace(FEW, kv_heads=32)):
        space = SearchSpace({FAMILY.name: FAMILY}, wanted, H200)
        every = [candidate.config for candidate in (*space.every(), *space.starts())]
        assert every and all(FAMILY.resized(config, wanted, H200) == config for config in every)
        assert any(config["packed_heads"] != 1 for config in every) == (wanted is FEW)


def test_the_decision_on_the_space_names_every_axis() -> None:
    text = (ROOT / "docs/decisions/0008-hopper-forward.md").read_text()
    [sentence] = re.findall(r"has thirteen axes: (.*?\))\.\s", text, re.DOTALL)
    named = re.findall(r"\w+", sentence)
    assert len(FAMILY.axes) == 13
    assert [axis.name for axis in FAMILY.axes if axis.name not in named] == []
