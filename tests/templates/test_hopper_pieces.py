"""The output's columns in pieces, and heads that share a tile: what the rendered kernel computes, on a stand-in for the GPU, and what
the space says of it."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_emulator import Machine, Pointer, Tile, array
from hopper_kernels import H200, config, launches, problem, source
from hopper_machine import Number

from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features
from flashtune.core.problems.reference import visible
from flashtune.core.system.errors import InputError
from flashtune.templates.hopper.flash_fwd_hopper import FAMILY
from flashtune.templates.hopper.layout import HopperLayout
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.inputs import Inputs, make_inputs


class Forward(Machine):
    """The stand-in with what the forward asks of it; probs reach their product without the packing, and votes come out either way."""

    def _allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype is torch.int32:
            return Tile(torch.zeros([int(size) for size in shape], dtype=dtype))
        return super()._allocate(dtype, shape, layout)

    def _stand_ins(self) -> dict[str, Any]:
        def most(values: torch.Tensor, axis: int) -> Any:
            return array(values.amax(axis)) if values.is_floating_point() else Number(int(values.amax(axis)))

        def write(place: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
            place.memory[place.offset[mask].long()] = values[mask].as_subclass(torch.Tensor)

        found = super()._stand_ins()
        gl = found["gl"]
        gl.sum, gl.max, gl.log2, gl.store = (lambda values, axis: array(values.sum(axis))), most, torch.log2, write
        gl.full = lambda shape, value, dtype, _layout: array(torch.full([int(size) for size in shape], float(value)).to(dtype))
        gl.split = lambda values: values.unbind(-1)
        gl.DotOperandLayout = gl.BlockedLayout = lambda *_, **_words: None
        votes = ("vote_outgrown", "vote_peaked")
        return found | {
            # Keys fill their blocks.
            "bits_before": lambda _end: None,
            "mask_scores": lambda scores, _bits: scores,
            "pack": lambda probs: probs,
            "unpack": lambda probs: array(probs.to(self._dtype)),
            "declare_answer": lambda *_: None,
            "vote_overflowed": lambda *_: Number(0),
            "vote_grown": lambda growth, _warpgroup: Number(bool((growth > 0).any())),
            # What is counted of votes is tests/templates/test_hopper_protocol.py's.
            **{
                name: lambda *_: None
                for name in ("declare_raised", "count_launch", "count_raised", "count_blocks", "count_peaked", "report_misled")
            },
            "read_raised": lambda: Number(-1),
            # A scale has no bits here.
            "next_power": lambda scale: 2.0 ** math.ceil(math.log2(scale)),
            **{name: lambda *_: Number(self._random.random() < 0.4) for name in votes},
        }


def inputs_of(d: int, d_v: int) -> Inputs:
    """Rows that end within a tile, and keys that fill their blocks."""
    wanted = replace(problem(d, d_v=d_v, dtype="fp16"), batch=1, heads=2, kv_heads=1, n_q=130, n_kv=192)
    return make_inputs(wanted, device="cpu", seed=d_v)


def run(inputs: Inputs, text: str, seed: int) -> None:
    """Launches a rendered kernel on poisoned outputs."""
    inputs.poison()
    module = load_kernel(text, "pieces")
    [(kernel, (programs,), arguments, options)] = launches(module, inputs, sms=2)
    Forward(module, (kernel, (programs,), arguments, options), seed=seed).run()


def wanted_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the LSE in float64."""
    q, k, v = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) * inputs.keywords["scale"]
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize(
    ("d", "d_v", "changes"),
    [
        (64, 96, {"intra_wg_overlap": 0, "maximum": "first"}),
        (64, 80, {"tiles": "chained", "maximum": "first"}),
        (64, 72, {}),
        (64, 160, {"BLOCK_M": 64}),
        (224, 224, {"tiles": "loop"}),
        (192, 192, {"tiles": "loop", "num_stages": 3, "maximum": "first"}),
        (160, 160, {"num_stages": 3}),
        (160, 160, {"BLOCK_M": 192, "intra_wg_overlap": 0, "maximum": "first"}),
        (160, 224, {"BLOCK_M": 64}),
        (176, 160, {"num_stages": 3}),
        (40, 40, {"BLOCK_M": 192, "intra_wg_overlap": 0, "maximum": "first"}),
        (80, 80, {"tiles": "chained", "maximum": "first"}),
        (144, 112, {"num_stages": 3}),
    ],
    ids=str,
)
def test_pieces_of_the_columns_make_the_whole_output(d: int, d_v: int, changes: dict[str, Any]) -> None:
    inputs = inputs_of(d, d_v)
    run(inputs, source(inputs.problem.spec(), **changes, v_columns="pieces"), seed=d_v)
    out, lse = wanted_of(inputs)
    assert torch.allclose(inputs.out.double(), out, atol=2e-3)
    assert torch.allclose(inputs.lse.double(), lse, atol=1e-3)


class Masked(Forward):
    """The same with edges of bands, and numbers that rows have of their own."""

    def _stand_ins(self) -> dict[str, Any]:
        found = super()._stand_ins()
        plain = found["gl"].load

        def load(place: Pointer) -> Any:
            several = isinstance(place.offset, torch.Tensor)
            return array(place.memory[place.offset.as_subclass(torch.Tensor).long()]) if several else plain(place)

        found["gl"].load = load
        return found | {
            "bits_before": lambda end: array(torch.arange(64) < end.as_subclass(torch.Tensor)[:, None]),
            "mask_scores": lambda scores, bits: array(
                scores.as_subclass(torch.Tensor).masked_fill(~bits.as_subclass(torch.Tensor), -torch.inf)
            ),
        }


CAUSAL = Features(causal=True, alignment="bottom_right")
EDGES: list[tuple[Features, int, dict[str, Any]]] = [
    (CAUSAL, 3, {"packed_heads": 2, "intra_wg_overlap": 0}),
    (replace(CAUSAL, window=(70, 0)), 5, {"packed_heads": 8, "tiles": "chained"}),
    (replace(CAUSAL, sinks=True), 8, {"packed_heads": 4, "BLOCK_M": 192}),
]
"""Features, heads to a key head, and changes of the config."""


def with_edges(features: Features, group: int, text_of: Callable[[str], str], changes: dict[str, Any]) -> tuple[float, float]:
    """The largest errors of the output and of the LSE of a packed kernel."""
    wanted = replace(problem(64, features, dtype="fp16"), batch=2, heads=2 * group, kv_heads=2, n_q=45, n_kv=192)
    inputs = make_inputs(wanted, device="cpu", seed=group)
    inputs.poison()
    module = load_kernel(text_of(source(wanted.spec(), **changes)), "pieces")
    [(kernel, (programs,), arguments, options)] = launches(module, inputs, sms=2)
    Masked(module, (kernel, (programs,), arguments, options), seed=group).run()
    q, k, v = (tensor.double() for tensor in (inputs.q, inputs.k, inputs.v))
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = (q @ k.transpose(-1, -2) * inputs.keywords["scale"]).masked_fill(~visible(wanted.band, 45, 192), -torch.inf)
    lse = scores.logsumexp(-1)
    if features.sinks:
        lse = torch.logaddexp(lse, inputs.keywords["sinks"].double()[:, :, None])
    out = (scores - lse[..., None]).exp() @ v
    return float((inputs.out.double() - out).abs().max()), float((inputs.lse.double() - lse).abs().max())


@pytest.mark.parametrize(("features", "group", "changes"), EDGES, ids=str)
def test_heads_in_one_tile_see_their_own_keys_and_sinks(features: Features, group: int, changes: dict[str, Any]) -> None:
    out, lse = with_edges(features, group, str, changes)
    assert out < 2e-3 and lse < 2e-3


@pytest.mark.parametrize(
    ("case", "line", "wrong"),
    [
        (0, "gl.arange(0, ROWS, layout=ROW_LAYOUT) % QUERIES\n        end =", "gl.arange(0, ROWS, layout=ROW_LAYOUT)\n        end ="),
        (2, "heads = kv_head * sizes.group + gl.minimum", "heads = kv_head + gl.minimum"),
    ],
)
def test_a_row_taken_for_another_is_seen(case: int, line: str, wrong: str) -> None:
    features, group, changes = EDGES[case]

    def broken(text: str) -> str:
        assert text.count(line) == 1
        return text.replace(line, wrong)

    out, lse = with_edges(features, group, broken, changes)
    assert out > 0.01 or lse > 0.01


PACKED: list[tuple[int, int, dict[str, Any]]] = [
    (64, 3, {"packed_heads": 2, "intra_wg_overlap": 0, "maximum": "first"}),
    (64, 5, {"packed_heads": 8, "tiles": "chained"}),
    (64, 8, {"packed_heads": 4, "BLOCK_M": 192, "rescale": "grown"}),
    (192, 4, {"packed_heads": 4, "tiles": "loop", "num_stages": 3, "v_columns": "pieces"}),
]
"""Head sizes, heads to a key head, and changes of the config."""


def packed_inputs(d: int, group: int) -> Inputs:
    """Two batches and key heads, and queries that end within a tile, as they lie behind a projection: heads innermost."""
    wanted = replace(problem(d, dtype="fp16"), batch=2, heads=2 * group, kv_heads=2, n_q=45, n_kv=192)
    inputs = make_inputs(wanted, device="cpu", seed=group)
    inputs.operands["q"] = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    return inputs


@pytest.mark.parametrize(("d", "group", "changes"), PACKED, ids=str)
def test_heads_in_one_tile_get_their_own_rows_of_output_and_lse(d: int, group: int, changes: dict[str, Any]) -> None:
    inputs = packed_inputs(d, group)
    run(inputs, source(inputs.problem.spec(), **changes), seed=group)
    out, lse = wanted_of(inputs)
    assert torch.allclose(inputs.out.double(), out, atol=2e-3)
    assert torch.allclose(inputs.lse.double(), lse, atol=1e-3)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("gl.arange(0, ROWS, layout=ROW_LAYOUT) // QUERIES", "gl.arange(0, ROWS, layout=ROW_LAYOUT) % PACKED"),
        ("* sizes.group + heads", "* sizes.kv_heads + heads"),
        (
            "async_store(out_desc, [batch, kv_head, first_head, row, 0], out_tile)",
            "async_store(out_desc, [batch, kv_head, 0, row, 0], out_tile)",
        ),
    ],
)
def test_a_head_in_a_wrong_place_is_seen(line: str, wrong: str) -> None:
    inputs = packed_inputs(64, 3)
    text = source(inputs.problem.spec(), **PACKED[0][2])
    assert text.count(line) == 1
    run(inputs, text.replace(line, wrong), seed=0)
    out, lse = wanted_of(inputs)
    assert not (torch.allclose(inputs.out.double(), out, atol=2e-3) and torch.allclose(inputs.lse.double(), lse, atol=1e-3))


@pytest.mark.parametrize("line", ["v_tile.slice(64, 32, 1)", "out_columns.slice(64, 32, 1)"])
def test_a_piece_in_a_wrong_place_is_seen(line: str) -> None:
    inputs = inputs_of(64, 96)
    text = source(inputs.problem.spec(), v_columns="pieces")
    assert line in text
    run(inputs, text.replace(line, line.replace("64", "32", 1)), seed=0)
    assert not torch.allclose(inputs.out.double(), wanted_of(inputs)[0], atol=2e-3)


@pytest.mark.parametrize(
    ("d_v", "pieces"),
    [
        *(
            (96, [64, 32]),
            (160, [128, 32]),
            (192, [128, 64]),
            (224, [128, 64, 32]),
            (136, [128, 32]),
            (176, [128, 64]),
            (56, []),
            (128, []),
        ),
        *((40, [32, 16]), (48, [32, 16]), (72, [64, 16]), (80, [64, 16]), (104, [64, 32, 16]), (112, [64, 32, 16])),
    ],
)
def test_pieces_are_powers_of_two_side_by_side_and_only_where_they_spare_columns(d_v: int, pieces: list[int]) -> None:
    spec = problem(64, d_v=d_v).spec()
    configs = [c for c in FAMILY.configs(spec, H200) if c["v_columns"] == "pieces"]
    assert bool(configs) == bool(pieces)
    for found in configs[:1]:
        assert HopperLayout.of(spec, found).v_pieces == [(sum(pieces[:place]), width) for place, width in enumerate(pieces)]
    # What is served without a search has padded columns.
    assert FAMILY.default(spec, H200)["v_columns"] == "padded"


def test_depth_is_rounded_up_to_a_smaller_unit_where_that_was_measured_to_spare_time() -> None:
    def layout(d: int) -> HopperLayout:
        spec = problem(d).spec()
        return HopperLayout.of(spec, FAMILY.default(spec, H200))

    assert layout(40).pieces == [(0, 32), (32, 16)]
    narrow = {d for d in range(8, 257, 8) if layout(d).narrow_unit}
    assert narrow == {40, 48, 72, 80, 104, 112}


@pytest.mark.parametrize("changes", [{"tiles": "chained"}, {"tiles": "loop", "num_stages": 3, "maximum": "first"}], ids=str)
def test_keys_in_chunks_beside_narrower_values_make_the_whole_output(changes: dict[str, Any]) -> None:
    inputs = inputs_of(192, 128)
    run(inputs, source(inputs.problem.spec(), **changes), seed=1)
    out, lse = wanted_of(inputs)
    assert torch.allclose(inputs.out.double(), out, atol=2e-3)
    assert torch.allclose(inputs.lse.double(), lse, atol=1e-3)


@pytest.mark.parametrize(
    ("d", "d_v", "dtype", "allowed"),
    [
        *((160, 160, "bf16", True), (192, 128, "fp16", True), (136, 136, "bf16", True), (200, 200, "bf16", False)),
        *((256, 256, "bf16", False), (128, 128, "bf16", False), (96, 96, "bf16", False), (160, 128, "fp8", False)),
    ],
)
def test_tiles_lie_in_chunks_where_that_spares_memory(d: int, d_v: int, dtype: DType, allowed: bool) -> None:
    spec = problem(d, d_v=d_v, dtype=dtype).spec()
    chunked = [layout for found in FAMILY.configs(spec, H200) if (layout := HopperLayout.of(spec, found)).chunked]
    assert bool(chunked) == allowed
    for layout in chunked:
        assert layout.stored_d == 192
        assert layout.v_columns <= layout.stored_dv


@pytest.mark.parametrize(("d", "d_v"), [(160, 256), (136, 200), (64, 160), (192, 128)])
def test_chunks_of_the_output_have_room_and_every_enumerated_config_is_valid(d: int, d_v: int) -> None:
    spec = problem(d, d_v=d_v).spec()
    chunked = [found for found in FAMILY.configs(spec, H200) if HopperLayout.of(spec, found).chunked]
    assert chunked
    for found in chunked:
        layout = HopperLayout.of(spec, found)
        whole = layout.stored_dv // layout.chunk
        assert layout.out_columns // layout.chunk >= (whole if layout.out_halves == 1 else layout.block_dv // 2 // layout.chunk)
        assert FAMILY.violated(found, spec, H200) is None


def test_wide_values_beside_keys_in_chunks_leave_from_memory_of_their_own() -> None:
    inputs = inputs_of(160, 256)
    run(inputs, source(inputs.problem.spec(), BLOCK_M=64), seed=1)
    assert torch.allclose(inputs.out.double(), wanted_of(inputs)[0], atol=2e-3)


def test_fp8_keeps_its_padding() -> None:
    spec = problem(96, dtype="fp8").spec()
    assert {c["v_columns"] for c in FAMILY.configs(spec, H200)} == {"padded"}


def test_fewer_columns_leave_registers_for_larger_tiles() -> None:
    spec = problem(192).spec()
    tiles = {kind: {c["BLOCK_M"] for c in FAMILY.configs(spec, H200) if c["v_columns"] == kind} for kind in ("padded", "pieces")}
    assert tiles["pieces"] - tiles["padded"] == {192}


def test_kernels_of_fewer_columns_have_ids_of_their_own() -> None:
    spec = problem(96).spec()
    chosen = config(spec)
    variants = [variant_of(FAMILY, spec, config) for config in (chosen, chosen.replace(v_columns="pieces"))]
    assert variants[1].id != variants[0].id
    assert "v_columns=pieces" in render(FAMILY, variants[1])
    with pytest.raises(InputError, match="v_columns='other' is outside"):
        variant_of(FAMILY, spec, chosen.replace(v_columns="other"))
