"""Dropout's mask depends on the seed and the absolute indices alone, and its draws are fair."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtune.core import reference

WORKER = Path(__file__).parent / "interpret_dropout.py"


def test_the_mask_is_the_same_at_every_tile_size_and_that_of_the_reference() -> None:
    command = [sys.executable, str(WORKER), "flash_fwd", "flash_fwd_tma"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [report for reports in json.loads(done.stdout).values() for report in reports]
    assert len(reports) == 7
    assert len({report["digest"] for report in reports}) == 1
    assert all(report["is_reference"] for report in reports)
    draws = 2 * 2 * 50 * 120
    for report in reports:
        assert abs(report["kept"] - 0.7) < 4 * math.sqrt(0.7 * 0.3 / draws)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_keep_rate_is_within_four_sigma(p: float) -> None:
    keep = reference.dropout_keep(99, 0, 1, 4, 256, 256, p)
    assert abs(keep.double().mean().item() - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / keep.numel()) + 1 / 65536


def test_nothing_is_dropped_at_zero_and_everything_at_one() -> None:
    assert reference.dropout_keep(99, 0, 1, 1, 64, 64, 0.0).all()
    assert not reference.dropout_keep(99, 0, 1, 1, 64, 64, 1.0).any()


def test_neighbours_draw_independently() -> None:
    # The eight pairs of one Philox call, and those of neighbouring calls, heads and offsets, must not follow each other.
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
