"""Maxima that settle: rows whose sums are sound are as exact as any, and `recompute` computes exactly the tiles of the others."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hopper_kernels import problem, rendered
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.dtypes import DType
from flashtune.core.tolerances import tolerance
from flashtune.core.torch_dtypes import TORCH_DTYPES
from flashtune.tuner.correctness import make_extreme, small_cases
from flashtune.tuner.inputs import make_inputs

DTYPES_HERE: tuple[DType, ...] = ("bf16", "fp16")


def test_tiles_with_an_unsound_row_are_computed_again_and_no_others_are_touched() -> None:
    command = [sys.executable, str(Path(__file__).parent / "interpret_recompute.py")]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(done.stdout)
    assert [report["name"] for report in reports if report["reason"]] == []
    assert [report["name"] for report in reports if report["kept"] != report["tiles"] - report["wrong"]] == []
    assert {report["wrong"] for report in reports} >= {0, 1, 4}
    assert max(report["programs"] for report in reports) > 1


@dataclass(frozen=True, slots=True)
class Settled:
    """Rows' output (R, D), LSE (R,) and which sums are sound (R,), and the float64 sums that were to be judged."""

    out: torch.Tensor
    lse: torch.Tensor
    sound: torch.Tensor
    total: torch.Tensor


def settled_softmax(scores: torch.Tensor, v: torch.Tensor, maximum: torch.Tensor, dtype: DType) -> Settled:
    """The kernel's softmax of scores (R, N) in base 2 over values (N, D), relative to a `maximum` (R,) that need not be the rows' own."""
    module = rendered(problem(64, dtype=dtype).spec(), maximum="first")
    centre = maximum - (module.LIFT.value if hasattr(module, "LIFT") else 0.0)
    weights = torch.exp2(scores.float() - centre.float()[:, None])
    total = weights.sum(1)
    out = weights.to(TORCH_DTYPES[dtype]).float() @ v.float() / total[:, None]
    sound = (total >= module.LEAST.value) & (total <= module.MOST.value)
    exact = torch.exp2(scores.double() - centre.double()[:, None]).sum(1)
    return Settled(out, (centre + torch.log2(total)) * math.log(2), sound, exact)


def errors(found: Settled, scores: torch.Tensor, v: torch.Tensor, dtype: DType) -> list[float]:
    """The largest errors of sound rows over their tolerances: of the output, of its norm, of the LSE."""
    bounds = tolerance(problem(64, dtype=dtype).spec())
    natural = scores.double() * math.log(2)
    out, lse = (torch.softmax(natural, 1) @ v.double())[found.sound], torch.logsumexp(natural, 1)[found.sound]
    if not len(out):
        return [0.0]
    off = (found.out[found.sound].double() - out).abs()
    of_norm = off.norm() / out.norm().clamp_min(1e-30) / bounds.relative_norm
    of_lse = (found.lse[found.sound].double() - lse).abs().max() / bounds.lse_atol
    return [float(error) for error in ((off / (bounds.atol + bounds.rtol * out.abs())).max(), of_norm, of_lse)]


@st.composite
def score_rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (8, N) in base 2 with some keys hidden, and values (N, 16): random ones, and such as make errors add up."""
    n = draw(st.sampled_from([1, 2, 63, 500, 4096, 16384]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    scores = torch.randn(8, n, generator=generator) * draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0]))
    # One key that stands out, as where a token attends to itself or to the first one.
    scores[:, draw(st.integers(0, n - 1))] += draw(st.floats(0, 60))
    scores += torch.linspace(0, draw(st.sampled_from([0.0, 1.0, 100.0])), n)
    scores[:, 1:][torch.rand(8, n - 1, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = float("-inf")
    v = torch.randn(n, 16, generator=generator) * draw(st.sampled_from([0.01, 1.0])) + draw(st.sampled_from([0.0, 1.0]))
    return scores + draw(st.floats(-200, 200)), v


@pytest.mark.parametrize("dtype", DTYPES_HERE)
@given(rows=score_rows(), off=st.floats(-60, 60))
def test_sound_rows_are_exact_however_wrong_their_maximum(dtype: DType, rows: tuple[torch.Tensor, torch.Tensor], off: float) -> None:
    scores, v = rows[0], rows[1].to(TORCH_DTYPES[dtype]).double()
    found = settled_softmax(scores, v, scores.max(1).values + torch.linspace(off, -off, 8), dtype)
    assert max(errors(found, scores, v, dtype)) <= 1


@pytest.mark.parametrize("dtype", DTYPES_HERE)
@given(rows=score_rows())
def test_rows_that_saw_their_largest_score_first_are_sound(dtype: DType, rows: tuple[torch.Tensor, torch.Tensor]) -> None:
    scores, v = rows[0], rows[1].to(TORCH_DTYPES[dtype]).double()
    found = settled_softmax(scores, v, scores.max(1).values, dtype)
    assert found.sound.all()
    assert max(errors(found, scores, v, dtype)) <= 1


@pytest.mark.parametrize("n", [1000, 16384])
@pytest.mark.parametrize("dtype", DTYPES_HERE)
def test_many_small_weights_beside_a_large_one_count_in_full(dtype: DType, n: int) -> None:
    # A token that attends to itself, or to the first one, and to all others alike: what their small weights lose is lost for good.
    gaps = torch.arange(0, 40, 0.25)
    scores = -gaps[:, None].expand(-1, n).clone()
    scores[:, -1] = 0.0
    v = torch.rand(n, 16, generator=torch.Generator().manual_seed(n)).to(TORCH_DTYPES[dtype]).double()
    found = settled_softmax(scores, v, torch.zeros(len(gaps)), dtype)
    assert found.sound.all()
    assert max(errors(found, scores, v, dtype)) <= 1


@pytest.mark.parametrize("dtype", DTYPES_HERE)
def test_rows_are_marked_where_their_sums_leave_the_range_and_only_there(dtype: DType) -> None:
    module = rendered(problem(64, dtype=dtype).spec(), maximum="first")
    low, high = math.log2(module.LEAST.value), math.log2(module.MOST.value)
    scores = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([low - 0.01, low + 0.01, high - 0.01, high + 0.01])])[:, None]
    found = settled_softmax(scores, torch.ones(1, 1), torch.zeros(len(scores)), dtype)
    inside = (found.total >= module.LEAST.value) & (found.total <= module.MOST.value)
    assert torch.equal(found.sound, inside)
    assert 0 < inside.sum() < len(inside)
    # A row that saw no key has the sum 0, and one with a score that nothing holds the sum infinity or NaN.
    for score in (float("-inf"), float("inf"), float("nan")):
        assert not settled_softmax(torch.tensor([[score]]), torch.ones(1, 1), torch.zeros(1), dtype).sound.any()


@pytest.mark.parametrize("block_n", [64, 128])
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES_HERE)
def test_extreme_inputs_have_rows_of_every_kind(dtype: DType, d: int, block_n: int) -> None:
    wanted = small_cases(problem(d, dtype=dtype))[0]
    inputs = make_inputs(wanted, device="cpu", seed=0)
    make_extreme(inputs)
    scores = inputs.q[0, 0].double() @ inputs.k[0, 0].double().T * inputs.keywords["scale"] / math.log(2)
    v = inputs.v[0, 0].double()
    maximum = scores[:, wanted.n_kv // block_n * block_n :].max(1).values
    found = settled_softmax(scores, v, maximum, dtype)
    assert max(errors(found, scores, v, dtype)) <= 1
    late = scores.max(1).values - maximum
    # Sound sums with a wrong maximum are seen on a GPU where a whole tile of 64 rows has them: others are computed again.
    assert found.sound[:64].all()
    assert late[:64].max() > 4
    assert not found.sound[128:].any()
    if dtype == "bf16":
        assert found.sound[64:128].all()
        assert late[64:128].max() > 20
