"""Lengths of packed sequences: drawn by their law, measured by what a host knows, and a part of a problem's work, key and calls."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.gpu.limits import least_us, most_framework_us
from flashtune.core.problems.lengths import LAWS, Law, Lengths, spread
from flashtune.core.problems.problem import MOST_SEQUENCES, Features, Problem
from flashtune.core.records import calls
from flashtune.core.records.nearness import FEATURE, distance
from flashtune.core.system.errors import InputError

PACKED = Problem(
    batch=16, heads=8, kv_heads=2, n_q=1024, n_kv=1024, d=64, d_v=64, dtype="bf16",
    features=Features(causal=True, packed=True), lengths=Lengths.of("one_long", 16, 16384),
)  # fmt: skip


@given(st.sampled_from(LAWS), st.integers(1, 200), st.integers(0, 50_000), st.integers(1, 60_000))
def test_lengths_add_up_and_none_is_longer_than_the_longest(law: Law, sequences: int, more: int, longest: int) -> None:
    tokens = sequences + more
    found = Lengths(law=law, longest=longest).drawn(sequences, tokens)
    assert len(found) == sequences and sum(found) == tokens and min(found) >= 1
    assert max(found) <= max(longest, -(-tokens // sequences))
    assert found == Lengths(law=law, longest=longest).drawn(sequences, tokens)


@pytest.mark.parametrize(("law", "ratio"), [("equal", 1), ("uniform", 2), ("lognormal", 8), ("one_long", 32)])
def test_each_law_has_its_spread(law: Law, ratio: int) -> None:
    lengths = Lengths.of(law, 64, 65536)
    drawn = lengths.drawn(64, 65536)
    assert max(drawn) == lengths.longest and spread(lengths.longest, 64, 65536) == ratio
    assert sorted(drawn)[-2] <= (lengths.longest if law == "equal" else lengths.longest - 1)


@given(st.integers(1, 10**6), st.integers(1, 4096), st.integers(1, 10**7))
def test_a_spread_is_the_nearest_power_of_two(longest: int, sequences: int, tokens: int) -> None:
    exact = math.log2(longest * sequences / tokens)
    assert abs(math.log2(spread(longest, sequences, tokens)) - max(0.0, exact)) <= 0.5 + 1e-9


def test_a_call_has_the_key_of_the_law_that_it_looks_like() -> None:
    for law in LAWS:
        lengths = Lengths.of(law, 16, 16384)
        met = Lengths.met(lengths.longest, 16, 16384)
        assert met.law == law and replace(PACKED, lengths=met).key("h200") == replace(PACKED, lengths=lengths).key("h200")


def test_lengths_are_part_of_the_key_and_of_the_work() -> None:
    even = replace(PACKED, lengths=None)
    assert even.lengths == Lengths(law="equal", longest=1024), "packed sequences without lengths are equally long"
    assert (even.key("h200").spread, PACKED.key("h200").spread) == (1, 8)
    pairs = sum(n * (n + 1) // 2 for n, _ in PACKED.sequences())
    assert PACKED.visible_pairs() == pairs // 16 and PACKED.flops() > 3 * even.flops()
    dense = replace(PACKED, lengths=None, features=Features(causal=True))
    assert even.flops() == dense.flops() and dense.key("h200").spread == 0
    assert least_us(PACKED, "h200") > least_us(dense, "h200") and most_framework_us(PACKED, "h200") > most_framework_us(dense, "h200")
    assert distance(dense.key("h200"), even.key("h200")) == FEATURE > distance(PACKED.key("h200"), even.key("h200")) == 3.0
    assert PACKED.seen() == PACKED and "16one_long" in PACKED.label()


def test_queries_are_in_proportion_to_keys() -> None:
    fewer = replace(PACKED, n_q=256)
    of_q, of_k = zip(*fewer.sequences(), strict=True)
    assert sum(of_q) == 16 * 256 and of_k == tuple(n for _, n in PACKED.sequences())
    assert all(abs(n_q - n_kv / 4) <= 2 + n_kv / 400 for n_q, n_kv in fewer.sequences())


def test_impossible_lengths_are_refused() -> None:
    for law, longest, said in (("gauss", 8, "unknown law"), ("equal", 0, "at least 1")):
        with pytest.raises(InputError, match=said):
            Lengths(law=law, longest=longest)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give the feature packed"):
        replace(PACKED, features=Features(causal=True))
    with pytest.raises(InputError, match="too many"):
        replace(PACKED, batch=MOST_SEQUENCES + 1)


def test_calls_keep_lengths_and_tell_spreads_apart(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    even = replace(PACKED, lengths=None)
    dense = replace(PACKED, lengths=None, features=Features(causal=True))
    near = replace(PACKED, lengths=Lengths(law="lognormal", longest=8000))
    calls.add(path, [PACKED, even, dense])
    assert set(calls.read(path)) == {PACKED, even, dense}
    assert len(calls.thinned([PACKED, near, even])) == 2 and calls.thinned([near, PACKED]) == calls.thinned([PACKED, near])
    for wrong in ('{"law": "equal"}', '{"law": 1, "longest": 8}', '{"law": "equal", "longest": "8"}', '{"law": "gauss", "longest": 8}'):
        path.write_text(path.read_text().replace('{"law": "equal", "longest": 1024}', wrong))
        with pytest.raises(InputError, match=r"call \d of"):
            calls.read(path)
        path.write_text(path.read_text().replace(wrong, '{"law": "equal", "longest": 1024}'))
