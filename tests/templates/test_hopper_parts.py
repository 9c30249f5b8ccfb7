"""Computations of Hopper kernels beside attention itself, run without a GPU: who takes which tile, which keys a tile
sees, how masks and values are laid out for the copy engine."""

import random
import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hopper_kernels import Array, launch_of, launches, on_numpy, on_torch, problem, rendered, sizes_of, words_of
from hypothesis import example, given
from hypothesis import strategies as st
from interpreting import interpreted

from flashtune.core.code.launching import bias_copy
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features
from flashtune.templates.launches.common import magic_divisor
from flashtune.tuner.verify.inputs import make_inputs

INT32 = st.integers(0, 2**31 - 1)
CAUSAL = Features(causal=True)


@cache
def dividing() -> tuple[Any, Any]:
    """A module, and its division as an ordinary function."""
    module = rendered(problem(64).spec())
    return module, on_torch(module, "fast_divide").fast_divide


@given(number=INT32, divisor=INT32.filter(bool))
@example(2**31 - 1, 1)
@example(2**31 - 1, 2**31 - 1)
@example(2**31 - 2, 2**31 - 1)
@example(2**31 - 1, 2**30 + 1)
@example(0, 3)
def test_a_product_and_a_shift_divide_exactly(number: int, divisor: int) -> None:
    module, divide = dividing()
    magic, shift = magic_divisor(divisor)
    last_multiple = number // divisor * divisor
    for n in {number, last_multiple, max(last_multiple - 1, 0)}:
        assert divide(torch.tensor(n), module.Divisor(magic, shift)) == n // divisor
        assert n * magic < 2**63
    # Always too wide for 32 bits, so that Triton compiles for one type of it.
    assert 2**31 <= magic < 2**32


@pytest.mark.parametrize(
    ("features", "changes"),
    [
        (Features(), {}),
        (Features(), {"section": 8}),
        (CAUSAL, {}),
        (CAUSAL, {"section": 8, "tiles": "chained"}),
        (CAUSAL, {"section": 32}),
        (Features(mask="bool"), {"section": 8}),
        (Features(mask="bias", causal=True), {"section": 8, "BLOCK_M": 64}),
    ],
    ids=str,
)
# Eight, eighteen, one and forty heads in all: sections that are whole, that end early, that never fill.
@pytest.mark.parametrize(("batch", "heads", "n_q"), [(2, 4, 1000), (3, 6, 700), (1, 1, 1), (2, 20, 129)])
def test_every_tile_has_one_place_in_launch_order(features: Features, changes: dict[str, Any], batch: int, heads: int, n_q: int) -> None:
    wanted = replace(problem(64, features), batch=batch, heads=heads, kv_heads=1, n_q=n_q)
    sizes = sizes_of(launch_of(wanted, **changes))
    parts = on_torch(rendered(wanted.spec(), **changes), "fast_divide", "tile_at")
    m_tiles = -(-n_q // changes.get("BLOCK_M", 128))
    coords = torch.stack(parts.tile_at(torch.arange(batch * heads * m_tiles), sizes), 1).tolist()
    tiles = [[b, h, row // changes.get("BLOCK_M", 128)] for b, h, row in coords]
    assert all(row % changes.get("BLOCK_M", 128) == 0 for _, _, row in coords)
    assert sorted(tiles) == sorted([b, h, m] for b, h, m in product(range(batch), range(heads), range(m_tiles)))
    # As many heads as a section has, or all, go side by side, and of a band their longest tiles first.
    together = min(changes.get("section", 1), batch * heads)
    assert {m for _, _, m in tiles[:together]} == {m_tiles - 1 if features.causal else 0}
    if features.mask != "none" and together > 1:
        # The batches of a head are neighbours, for they often share a mask.
        assert [b for b, _, _ in tiles[:together]] == [place % batch for place in range(together)]


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_sink_joins_the_sums_wherever_it_lies(dtype: DType, alibi: bool) -> None:
    """Far above and far below all scores, none at all, and alone in rows that see no key, whatever maximum these were left with."""
    module = rendered(problem(64, Features(causal=True, sinks=True, alibi=alibi), dtype=dtype).spec(), BLOCK_M=64)
    parts = on_numpy(module, "join_sink")
    parts.gl.exp2 = np.exp2
    generator = np.random.default_rng(0)
    row_max = generator.uniform(-200, 200, 64).astype(np.float32).view(Array)
    row_sum = generator.uniform(1, 1000, 64).astype(np.float32).view(Array)
    row_sum[:3], row_max[:3] = 0, (-np.inf, 0, 0)
    slope = 0.25 if alibi else 0.0
    # In fp8 the largest of probs is 2^8, and of ALiBi what is the same for all keys of a row is left out.
    lift, left_out = 8.0 if dtype == "fp8" else 0.0, slope / np.log(2) * np.arange(64)
    mean = generator.standard_normal(64)
    for sink in (-np.inf, -300.0, -3.0, 0.0, 2.5, 100.0, 300.0):
        params = module.Params(**{name: np.float32({"sink": sink, "slope": slope}.get(name, 1)) for name in module.Params._fields})
        with np.errstate(divide="ignore", invalid="ignore"):
            found_max, found_sum, rescale = parts.join_sink(row_max, row_sum, params)
            keys = np.where(row_sum > 0, row_max.astype(float) - lift + np.log2(row_sum.astype(float)), -np.inf)
            wanted = np.logaddexp2(keys, sink / np.log(2) + left_out)
            found = found_max + np.log2(found_sum)
            share = np.where(found_sum > 0, rescale * row_sum / found_sum, 0)
            wanted_share = np.where(np.isneginf(wanted), 0, np.exp2(keys - np.where(np.isneginf(wanted), 0, wanted)))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
        np.testing.assert_allclose(share * mean, wanted_share * mean, rtol=2e-4, atol=1e-37)


@pytest.mark.parametrize("tiles", ["loop", "chained"])
def test_a_fixed_order_hands_out_each_tile_once(tiles: str) -> None:
    # Only wide tiles leave no room to chain them.
    parts = on_torch(rendered(problem(256 if tiles == "loop" else 64).spec(), tiles=tiles), "fixed_work_index")
    for programs, count in [(1, 5), (4, 4), (7, 23), (132, 1000)]:
        parts.gl.program_id, parts.gl.num_programs = lambda axis, n=programs: torch.arange(n), lambda axis, n=programs: n
        given_out = torch.cat([parts.fixed_work_index(iteration) for iteration in range(-(-count // programs))])
        assert sorted(given_out[given_out < count].tolist()) == list(range(count))


@pytest.mark.parametrize(("programs", "batch"), [(1, 1), (5, 1), (8, 2), (132, 40)])
def test_drawing_hands_out_each_tile_once_and_leaves_the_counter_at_zero(programs: int, batch: int) -> None:
    wanted = replace(problem(64, CAUSAL), batch=batch)
    chosen = {"tiles": "chained", "order": "drawn"}
    parts, sizes = on_torch(rendered(wanted.spec(), **chosen), "draw_work_index"), sizes_of(launch_of(wanted, **chosen))
    counter = [0]

    def atomic_add(place: list[int], amount: int, sem: str) -> int:
        place[0] += amount
        return place[0] - amount

    parts.gl.num_programs, parts.gl.atomic_add = lambda axis: programs, atomic_add
    parts.gl.store = lambda place, value: place.__setitem__(0, value)
    generator = random.Random(programs)
    tiles = batch * 4 * -(-1000 // 128)
    for _ in range(2):
        at_work = list(range(programs))
        taken = []
        while at_work:
            index = at_work.pop(generator.randrange(len(at_work)))
            taken.append(index)
            following = parts.draw_work_index(counter, sizes)
            at_work += [following] if following < tiles else []
        assert sorted(taken) == list(range(tiles))
        assert counter == [0]


@pytest.mark.parametrize("tiles", ["one", "chained"])
def test_only_tiles_that_are_drawn_need_a_counter(tiles: str) -> None:
    wanted = problem(64, CAUSAL)
    for order in ("fixed", "drawn") if tiles == "chained" else ("fixed",):
        kernel, _, arguments, _ = launch_of(wanted, tiles=tiles, order=order)
        assert len(kernel.arg_names) == len(arguments)
        assert ("counter_ptr" in kernel.arg_names) == (order == "drawn")


@cache
def band(features: Features) -> tuple[Any, Any]:
    wanted = problem(64, features)
    return on_torch(rendered(wanted.spec(), BLOCK_M=64), "block_range"), launch_of(wanted, BLOCK_M=64)


@given(
    features=st.sampled_from([Features(), CAUSAL, Features(window=(9, 9)), Features(causal=True, window=(9, 0))]),
    n_q=st.integers(1, 300),
    n_kv=st.integers(1, 500),
    diagonal=st.integers(-400, 500),
    left=st.integers(-1, 200),
    right=st.integers(-1, 200),
    number=st.sampled_from([64, 128, 256]),
)
def test_rows_visit_every_block_that_they_see_and_mask_all_that_they_must(
    features: Features, n_q: int, n_kv: int, diagonal: int, left: int, right: int, number: int
) -> None:
    parts, launch = band(features)
    m_tiles = -(-n_q // 64)
    numbers = {"diagonal": diagonal, "window_left": left, "window_right": right}
    numbers = {name: number for name, number in numbers.items() if name in launch[0].arg_names}
    sizes = sizes_of(launch, n_q=n_q, n_kv=n_kv, m_tiles=m_tiles, **numbers)
    rows, keys = torch.arange(n_q)[:, None] + diagonal, torch.arange(n_kv)[None, :]
    visible = torch.ones(n_q, n_kv, dtype=torch.bool)
    if features.causal:
        visible &= keys <= rows
    if "window_left" in numbers and left >= 0:
        visible &= keys >= rows - left
    if "window_right" in numbers and right >= 0:
        visible &= keys <= rows + right
    blocks = -(-n_kv // 64)
    # A tile may end in warpgroups without a row.
    for row in range(0, -(-n_q // number) * number, 64):
        first, unmasked_first, unmasked_end, end = (int(bound) for bound in parts.block_range(torch.tensor(row), number, sizes))
        assert 0 <= first < end <= blocks
        assert first <= unmasked_first <= unmasked_end <= end
        for block in range(blocks):
            # A block is 64 keys, whole ones only where no key is past the end.
            seen = visible[row : row + number, block * 64 : block * 64 + 64]
            assert first <= block < end or not seen.any()
            assert not unmasked_first <= block < unmasked_end or (seen.all() and seen.shape[1] == 64)
        # What a tile copies holds what each of its warpgroups looks at.
        if row % number == 0:
            for own in range(row, row + number, 64):
                own_first, _, _, own_end = (int(bound) for bound in parts.block_range(torch.tensor(own), 64, sizes))
                assert first <= own_first < own_end <= end


WORD = {64: torch.int16, 128: torch.int32, 256: torch.int64}
"""What a word of a block is stored as, by BLOCK_N; 16 bits are read as 32, filled with their sign."""


def read(words: torch.Tensor, block_n: int) -> Any:
    """Stored words, or what would be, as the kernel has them."""
    return words.to(WORD[block_n]).to(torch.int64 if block_n == 256 else torch.int32).numpy().view(Array)


@pytest.mark.parametrize("block_n", [64, 128, 256])
def test_words_of_the_columns_before_an_edge(block_n: int) -> None:
    parts = on_numpy(rendered(problem(64).spec(), BLOCK_N=block_n, intra_wg_overlap=0), "bits_before")
    ends = torch.cat([torch.arange(-2 * block_n, 3 * block_n), torch.tensor([-(2**30), 2**30])])
    words = torch.from_numpy(parts.bits_before(ends.int().numpy()))
    assert torch.equal(words.to(WORD[block_n]), words_of(torch.arange(block_n) < ends[:, None]).to(WORD[block_n]))


@pytest.mark.parametrize("block_n", [64, 128, 256])
def test_a_score_is_kept_where_its_bit_of_the_words_is_set(block_n: int) -> None:
    parts = on_numpy(rendered(problem(64).spec(), BLOCK_N=block_n, intra_wg_overlap=0), "mask_scores")
    generator = torch.Generator().manual_seed(block_n)
    scores = torch.randn(64, block_n, generator=generator)
    allowed = torch.rand(64, block_n, generator=generator) < torch.linspace(0, 1, 64)[:, None]
    found = torch.from_numpy(parts.mask_scores(scores.numpy().view(Array), read(words_of(allowed), block_n)))
    assert torch.equal(found, torch.where(allowed, scores, float("-inf")))


@pytest.mark.parametrize("stored", [(1, 1), (1, 4), (2, 1), (2, 4)], ids=str)
def test_a_tile_reads_the_words_of_its_own_batch_head_block_and_rows(stored: tuple[int, int]) -> None:
    wanted = problem(64, Features(mask="bool"))
    chosen = {"BLOCK_N": 256, "intra_wg_overlap": 0}
    steps = {"mask_per_batch": stored[1] if stored[0] > 1 else 0, "mask_per_head": int(stored[1] > 1)}
    module = rendered(wanted.spec(), **chosen)
    parts = on_numpy(module, "load_mask_bits")
    sizes = parts.scalars(sizes_of(launch_of(wanted, **chosen), **steps))
    blocks, rows = -(-1100 // 256), 8 * 128
    packed = torch.arange(stored[0] * stored[1] * blocks * rows * 4).view(*stored, blocks, rows, 4)
    parts.gl.load = lambda places: packed.flatten().numpy()[places].view(Array)
    for batch, head, block, row in [(0, 0, 0, 0), (1, 3, 4, 960), (1, 0, 2, 64), (0, 2, 1, 128)]:
        coord = parts.scalars(module.TileCoord(batch, head, row))
        found = parts.load_mask_bits(coord, parts.scalar(block * 256), sizes, module.Params(scale=1.0, mask_bits_ptr=0))
        assert torch.equal(torch.from_numpy(found), packed[batch % stored[0], head % stored[1], block, row : row + 64])


def weights_order(block_n: int) -> list[int]:
    """The key whose weight lies at each place of the left operand of an e4m3 product."""
    module = rendered(problem(64, dtype="fp8").spec(), BLOCK_N=block_n, intra_wg_overlap=0)
    # The bytes of a register are the last two axes, the second of them first.
    assert module.FOURS_LAYOUT.value.reg_bases[:2] == [[0, 0, 0, 1], [0, 0, 1, 0]]
    parts = on_torch(module, "pack")

    def bytes_of(asm: str, constraints: str, operands: list[torch.Tensor], **settings: Any) -> torch.Tensor:
        # PTX converts the second source into the lower byte.
        pairs = re.findall(r"e4m3x2\.f32 (?:low|high), \$(\d), \$(\d);", asm)
        assert "mov.b32 $0, {low, high};" in asm
        return torch.stack([operands[int(place) - 1] for high, low in pairs for place in (low, high)], -1)

    parts.gl.inline_asm_elementwise, parts.gl.float32 = bytes_of, torch.float32
    keys: list[int] = parts.pack(torch.arange(block_n).expand(64, block_n))[0].flatten().tolist()
    return keys


@pytest.mark.parametrize("block_n", [64, 128, 256])
def test_e4m3_weights_are_packed_within_a_thread(block_n: int) -> None:
    order = weights_order(block_n)
    assert order == [key // 16 * 16 + order[key % 16] for key in range(block_n)]
    assert sorted(order[:16]) == list(range(16))
    # Thread t of four holds columns 2 t, 2 t + 1 of every eight scores, and bytes 4 t .. 4 t + 3 of the operand.
    assert all(key % 8 // 2 == place // 4 % 4 for place, key in enumerate(order))


def test_masks_are_packed_into_words_and_values_transposed_into_the_order_of_the_weights() -> None:
    assert interpreted("interpret_hopper_copies", weights_order(64)[:16]) == []


@pytest.mark.parametrize(("columns", "copied"), [(64, False), (24, False), (50, True), (1, True)])
def test_a_bias_reaches_the_copy_engine_without_its_repeats(columns: int, copied: bool) -> None:
    module = rendered(problem(64, Features(mask="bias")).spec())
    bias = torch.randn(2, 1, 5, columns).bfloat16()
    copy = bias_copy(module.host, bias.expand(2, 3, 5, columns))
    assert (copy is not None) == copied
    if copy is not None:
        assert torch.equal(copy, bias)
        assert all(stride * 2 % 16 == 0 for stride in copy.stride()[:3])


def test_strides_that_the_copy_engine_cant_take_are_refused() -> None:
    module = rendered(problem(64).spec())
    good = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16)
    inside = torch.empty(2, 16, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert module.accepts(good, inside, good, None)
    wide = torch.empty(2, 4, 16, 68, dtype=torch.bfloat16)[..., :64]
    shifted = torch.empty(2 * 4 * 16 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 4, 16, 64)
    for bad in (wide, shifted, good.transpose(2, 3).contiguous().transpose(2, 3), good[:, :1].expand(2, 4, 16, 64)):
        assert not module.accepts(good, bad, good, None)


def test_e4m3_values_may_have_any_strides_since_they_are_copied() -> None:
    module = rendered(problem(64, dtype="fp8").spec(), intra_wg_overlap=0)
    good = torch.empty(2, 4, 16, 64, dtype=torch.float8_e4m3fn)
    odd = torch.empty(2, 4, 64, 17, dtype=torch.float8_e4m3fn).transpose(2, 3)[:, :, 1:]
    assert module.accepts(good, good, odd, None)
    assert not module.accepts(good, odd, good, None)
    assert not module.accepts(odd, good, good, None)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize(("scale", "sign"), [(-0.5, -1.0), (0.0, 0.0)])
def test_a_scale_that_is_not_positive_moves_into_the_queries(dtype: DType, scale: float, sign: float) -> None:
    wanted = problem(64, dtype=dtype)
    inputs = make_inputs(wanted, device="cpu", seed=0)
    found = launches(rendered(wanted.spec()), inputs, scale=scale)
    [(kernel, _, arguments, _)] = [launch for launch in found if launch[0].__name__ == "flash_fwd_hopper"]
    given = dict(zip(kernel.arg_names, arguments, strict=True))
    assert torch.equal(given["q_desc"].base.float(), inputs.q.float() * sign)
    assert given["scale"] > 0


@pytest.mark.parametrize(("batch", "n", "taken"), [(1, 4096, True), (8, 16384, True), (8, 65536, False), (1, 131072, False)])
def test_a_mask_of_one_repeated_row_is_written_out_up_to_half_a_gibibyte(batch: int, n: int, taken: bool) -> None:
    module = rendered(problem(64, Features(mask="bool")).spec())
    q = torch.empty(batch, 2, n, 64, dtype=torch.bfloat16, device="meta")
    repeated = torch.empty(batch, 1, 1, n, dtype=torch.bool, device="meta").expand(batch, 2, n, n)
    assert module.accepts(q, q, q, repeated) is taken
    # One that has its rows in memory takes eight times as much itself.
    assert module.accepts(q, q, q, torch.empty(batch, 1, n, n, dtype=torch.bool, device="meta").expand(batch, 2, n, n))


def test_the_soft_caps_tanh_is_as_exact_as_it_says() -> None:
    parts = on_numpy(rendered(problem(64, Features(softcap=True)).spec()), "scaled_tanh")
    x = np.concatenate([np.linspace(-20, 20, 100_001), np.linspace(-0.01, 0.01, 1001), [-1e30, 1e30, 0.0]]).astype(np.float32).view(Array)
    scale = np.array(1.7, np.float32).view(Array)
    found = parts.scaled_tanh(x, scale)
    assert np.abs(found - np.tanh(x.astype(np.float64) * 1.7 * np.log(2) / 2)).max() <= 3e-6
    assert np.abs(found).max() <= 1
