"""Problems, their keys and specs: what changes a winner is told apart, what was written before is read as it was meant."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.problems.band import ALIGNMENTS
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.dtypes import DTYPES, ITEMSIZE, output_dtype, parse_dtype
from flashtune.core.problems.problem import FLAGS, MASK_KINDS, Features, Problem
from flashtune.core.system.errors import InputError

PROBLEM = Problem(batch=2, heads=4, kv_heads=2, n_q=100, n_kv=140, d=64, d_v=32, dtype="fp16")
sides = st.none() | st.integers(0, 5000)
features = st.builds(
    Features,
    causal=st.booleans(),
    alignment=st.sampled_from(ALIGNMENTS),
    window=st.none() | st.tuples(sides, sides),
    mask=st.sampled_from(MASK_KINDS),
    **dict.fromkeys(FLAGS, st.booleans()),
)


@given(features)
def test_features_come_back_from_their_json(given: Features) -> None:
    back = Features.from_json(json.loads(json.dumps(given.as_json())))
    assert back == (given if given.has_diagonal else replace(given, alignment="top_left"))
    assert back.as_json() == given.as_json() and back.label() == given.label()


@pytest.mark.parametrize("value", [1, "yes", None, [True]], ids=str)
def test_a_feature_that_is_no_flag_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="impossible value"):
        Features.from_json({"alibi": value})


def test_alibi_keeps_the_alignment_without_a_band() -> None:
    keys = {replace(PROBLEM, features=Features(alibi=alibi, alignment=a)).key("h200") for alibi in (False, True) for a in ALIGNMENTS}
    assert {key.features for key in keys} == {"{}", '{"alibi":true}', '{"alibi":true,"alignment":"bottom_right"}'}
    assert replace(PROBLEM, n_q=140, features=Features(alibi=True, alignment="bottom_right")).key("h200").features == '{"alibi":true}'


def test_features_that_came_later_leave_older_variants_their_ids() -> None:
    """Shipped kernels are found by the id."""
    spec = replace(PROBLEM, features=Features(causal=True)).spec()
    variant = Variant(template="flash_fwd", spec=spec, config=Config.of(BLOCK_M=64))
    assert variant.id == "35d8b1ca1fe3833f"
    others = {replace(variant, spec=replace(spec, **{name: True})).id for name in ("alibi", "sinks")}
    assert len(others - {variant.id}) == 2


def test_every_flag_is_a_feature_a_part_of_the_spec_and_a_word_of_labels() -> None:
    assert FLAGS == ("alibi", "dropout", "latent", "packed", "sinks", "softcap", "tf32")
    for name in FLAGS:
        problem = replace(PROBLEM, dtype="fp32" if name == "tf32" else "fp16", features=Features(**{name: True}))
        assert problem.spec().label() == f"fwd-{problem.dtype}-d64x32-{name}"
        assert problem.key("h200").features == f'{{"{name}":true}}'
        assert problem.label().endswith(f"-full+{name}-gqa2")


def test_fp8_is_e4m3_by_all_its_names_with_one_byte_each() -> None:
    assert {parse_dtype(name) for name in ("fp8", "e4m3", "float8_e4m3fn", "torch.float8_e4m3fn", " FP8 ")} == {"fp8"}
    assert ITEMSIZE["fp8"] == 1
    assert {dtype: output_dtype(dtype) for dtype in DTYPES} == {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "fp8": "bf16"}
    with pytest.raises(InputError, match="use one of"):
        parse_dtype("e5m2")


def test_fp8_reads_one_byte_an_element_and_writes_two() -> None:
    p = replace(PROBLEM, dtype="fp8")
    q_rows, kv_rows = 2 * 4 * 100, 2 * 2 * 140
    assert p.io_bytes() == q_rows * 64 + kv_rows * (64 + 32) + q_rows * 2 * 32 + 4 * q_rows
    assert PROBLEM.io_bytes() == 2 * (q_rows * 64 + kv_rows * (64 + 32) + q_rows * 32) + 4 * q_rows


@pytest.mark.parametrize(
    ("n_q", "features", "seen"),
    [
        (1, Features(causal=True, window=(1023, 0), alignment="bottom_right"), 1024),
        (1, Features(causal=True), 1),
        (16, Features(window=(100, 20)), 36),
        (4, Features(window=(100, 0), alignment="bottom_right"), 104),
        (4000, Features(causal=True, window=(100, 0)), 4000),
        (1, Features(mask="bool"), 8192),
    ],
)
def test_keys_that_no_query_sees_are_not_read(n_q: int, features: Features, seen: int) -> None:
    """A windowed decoding step reads its window, of a long cache too; the gradients of all keys are written."""
    p = replace(PROBLEM, n_q=n_q, n_kv=8192, features=features)
    rows = 2 * 4 * n_q
    reads = 2 * (rows * 64 + 2 * 2 * seen * (64 + 32))
    assert p.io_bytes() == reads + rows * 32 * 2 + 4 * rows
    backward = replace(p, direction="bwd")
    assert backward.io_bytes() == p.io_bytes() + 2 * rows * (32 + 64) + 4 * rows + 2 * 2 * 2 * 8192 * (64 + 32)
