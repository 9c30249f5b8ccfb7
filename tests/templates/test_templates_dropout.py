"""Dropout's mask depends on the seed and the absolute indices alone, and its draws are fair."""

import functools
import math

import pytest
import torch
from hopper_kernels import launches, on_numpy, problem, rendered, sizes_of
from interpreting import interpreted

from flashtune.core.problems import reference
from flashtune.core.problems.problem import Features
from flashtune.tuner.verify.inputs import make_inputs


@functools.cache
def calls(p: float) -> torch.Tensor:
    """Pairs that 2^20 Philox calls keep at rate p: bool (calls, 16), by word, half of the word (columns) and rotation (rows)."""
    keep = reference.dropout_keep_rows(99, 3, 5, 0, 4096, 4096, p)
    return keep.view(256, 2, 8, 128, 4, 4, 2).permute(0, 2, 3, 5, 4, 6, 1).reshape(-1, 16)


def test_the_mask_is_the_same_at_every_tile_size_and_that_of_the_reference() -> None:
    reports = interpreted("interpret_dropout", "flash_fwd")
    assert len(reports) == 6
    assert len({(report["rate"], report["digest"]) for report in reports}) == 3
    assert all(report["is_reference"] for report in reports)
    draws = 2 * 2 * 50 * 120
    for report in reports:
        rate = report["rate"]
        assert abs(report["kept"] - (1 - rate)) <= 4 * math.sqrt(rate * (1 - rate) / draws)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.7, 0.99, 1.0])
def test_the_hopper_kernels_mask_is_that_of_the_reference(p: float) -> None:
    wanted, rows, columns = problem(64, Features(dropout=True)), 64, 128
    module, seed, offset = rendered(wanted.spec(), BLOCK_N=columns), 2**40 + 17, 5
    inputs = make_inputs(wanted, device="meta", seed=0)
    [launch] = launches(module, inputs, dropout_p=p, seed=seed, offset=offset)
    scalars = dict(zip(launch[0].arg_names, launch[2], strict=True))
    parts = on_numpy(module, "random_words", "keep_mask")
    params = parts.scalars(module.Params(**{name: scalars[name] for name in module.Params._fields}))
    batch, head, row, column = 1, 3, 192, 640
    coord, sizes = parts.scalars(module.TileCoord(batch, head, row)), parts.scalars(sizes_of(launch))
    draws = parts.random_words(coord, parts.scalar(column), sizes, params)
    halves = torch.from_numpy(parts.keep_mask(draws, params)).view(torch.int16)
    assert ((halves == 0) | (halves == -1)).all()
    expected = reference.dropout_keep_rows(seed, offset, batch * wanted.heads + head, row, rows, column + columns, p)
    assert torch.equal(halves == -1, expected[:, column:])


@pytest.mark.parametrize("threshold", [0, 1, 3277, 16383, 16384, 16385, 31744, 31745, 32767, 32768])
def test_the_hopper_kernel_compares_every_draw_as_an_integer(threshold: int) -> None:
    module = rendered(problem(64, Features(dropout=True)).spec())
    parts = on_numpy(module, "keep_mask")
    draw = torch.arange(32768)
    # The low halves count up and the high ones down, and the sign of a half is none of the draw's.
    words = (draw + 32768) | (32767 - draw << 16)
    params = parts.scalars(module.Params(scale=1.0, seed=0, offset=0, threshold=threshold, keep_scale=1.0))
    halves = torch.from_numpy(parts.keep_mask(words.numpy().astype("uint32")[None], params)).view(torch.int16).view(-1, 2)
    keep = draw >= threshold if threshold <= 16384 else 32767 - draw >= threshold
    assert torch.equal(halves[:, 0] == -1, keep)
    assert torch.equal(halves[:, 1] == -1, keep.flip(0))


@pytest.mark.parametrize("p", [0.1, 1 / 3, 0.8])
def test_the_keep_rate_is_that_of_p_to_five_digits_and_within_four_sigma(p: float) -> None:
    keep, rate = calls(p), reference.dropout_threshold(p) / 32768
    assert abs(rate - p) <= 1 / 65536
    assert abs(keep.double().mean().item() - (1 - rate)) <= 4 * math.sqrt(p * (1 - p) / keep.numel())


# The last of these rates is one where the correlation is all but as large as it can be.
@pytest.mark.parametrize(("p", "expected"), [(0.1, 0.001732), (0.5, 0.0), (3084 / 32768, 0.003889)])
def test_draws_of_a_call_are_independent_but_for_the_eight_bits_that_two_rows_share(p: float, expected: float) -> None:
    keep = calls(p).double()
    sigma = 1 / math.sqrt(len(keep))
    correlation = torch.corrcoef(keep.T)
    word, rotation = torch.arange(16) // 4, torch.arange(16) % 2
    share = (word[:, None] == word) & (rotation[:, None] != rotation)
    alone = ~share & ~torch.eye(16, dtype=torch.bool)
    assert (correlation[share].max() <= 2**-8 + 4.5 * sigma) and (correlation[share].min() >= -4.5 * sigma)
    assert correlation[alone].abs().max() <= 4.5 * sigma
    # Each pair stands in the matrix twice.
    assert correlation[share].mean().item() == pytest.approx(expected, abs=4.5 * sigma / math.sqrt(16))
    assert correlation[alone].mean().abs() <= 4.5 * sigma / math.sqrt(104)


def test_nothing_is_dropped_at_zero_and_everything_at_one() -> None:
    assert reference.dropout_keep(99, 0, 1, 1, 64, 64, 0.0).all()
    assert not reference.dropout_keep(99, 0, 1, 1, 64, 64, 1.0).any()


def test_neighbours_draw_independently() -> None:
    # Pairs of neighbouring Philox calls, heads and offsets must not follow each other, nor those of one call that share no bits.
    keep = reference.dropout_keep(7, 0, 1, 2, 256, 256, 0.5).double() - 0.5
    other = reference.dropout_keep(7, 1, 1, 2, 256, 256, 0.5).double() - 0.5
    x = keep[0, 0]
    pairs = [(x[8:], x[:-8]), (x[1:], x[:-1]), (x[:, 8:], x[:, :-8]), (x[:, 1:], x[:, :-1]), (x[:, 32:], x[:, :-32])]
    pairs += [(keep[0, 0], keep[0, 1]), (keep, other)]
    for a, b in pairs:
        correlation = (a * b).mean().item() / 0.25
        assert abs(correlation) < 4.5 / math.sqrt(a.numel())


def test_seeds_differ() -> None:
    masks = [reference.dropout_keep(seed, 0, 1, 1, 64, 64, 0.5) for seed in (0, 1, 2**32, -1)]
    assert len({mask.numpy().tobytes() for mask in masks}) == 4
    assert torch.equal(masks[3], reference.dropout_keep(2**64 - 1, 0, 1, 1, 64, 64, 0.5))
