"""Maxima that settle, and are raised where a row outgrows them: the kernel's own arithmetic on numpy, beside the online softmax."""

import math
import struct
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hopper_kernels import Array, assembly, on_numpy, problem, rendered
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Problem
from flashtune.core.problems.tolerances import LSE_RTOL, tolerance
from flashtune.core.pytorch.dtypes import TORCH_DTYPES
from flashtune.tuner.verify.distributions import HUGE, HUGE_OF_BF16, PRESENT, redistribute
from flashtune.tuner.verify.inputs import make_inputs

DTYPES_HERE: tuple[DType, ...] = ("bf16", "fp16")
BLOCK_N = 64
HUGE_MAXIMUM = 2.0**27


def flushed_exp2(x: np.ndarray) -> np.ndarray:
    """2^x as a GPU has it, where a number too small to be normal is 0."""
    found = np.exp2(x)
    return np.where(found < np.finfo(np.float32).tiny, np.float32(0), found).view(Array)


@cache
def functions(dtype: DType, rescale: str) -> Any:
    """The softmax's device functions over numpy; votes are the test's, warp by warp."""
    asks_first = rescale == "outgrown"
    module = rendered(problem(64, dtype=dtype).spec(), maximum="running" if asks_first else "first", rescale=rescale)
    maxima, softmax = ("next_power", "factors", "finished_max"), ("quarter_sums", "online_softmax", "lazy_softmax", "rescale_acc_and_sum")
    parts = on_numpy(module, *maxima, *softmax, *(() if asks_first else ("settled_softmax", "raise_maxima", "unless_huge")))
    scope = parts.quarter_sums.__globals__
    scope["vote_grown"] = scope["vote_outweighed"] = lambda *_: None
    scope["thread_max"] = lambda powers, _sums: powers.reshape(64, BLOCK_N // 8, 4, 2).max((1, 3)).view(Array)
    axis = {"sum": np.sum, "max": np.max}
    for name, operation in axis.items():
        setattr(parts.gl, name, lambda array, axis, operation=operation: operation(array, axis).view(Array))
    parts.gl.exp2, parts.gl.log2, parts.gl.float32 = flushed_exp2, np.log2, np.float32
    parts.gl.minimum, parts.gl.maximum = np.minimum, np.maximum
    parts.gl.full = lambda shape, value, kind, _layout: np.full([int(size) for size in shape], value, kind).view(Array)
    return parts


def lazy_by_vote(parts: Any, block: Array, row_max: Array, row_sum: Array, scale: Array) -> tuple[Array, Array, Array, np.ndarray, Array]:
    """`lazy_softmax` of these, each warp by what its own rows vote: bool (64, 1)."""
    voted: list[np.ndarray] = []
    fresh, found = np.abs(row_max) >= HUGE_MAXIMUM, []

    def vote(local_max: np.ndarray, sums: np.ndarray, answer: int) -> int:
        voted.append(np.repeat(outweighed(local_max, sums) | fresh.reshape(4, 16).any(1), 16)[:, None])
        return answer

    for answer in (0, 1):
        parts.lazy_softmax.__globals__["vote_outweighed"] = lambda local_max, sums, *_, answer=answer: vote(local_max, sums, answer)
        probs, part, growth, _, new_max = parts.lazy_softmax(block, row_max.copy(), row_sum, scale, 0)
        found.append([probs, part, growth[:, None], new_max[:, None]])
    probs, part, growth, new_max = (np.where(voted[0], after, before).view(Array) for before, after in zip(*found, strict=True))
    return probs, part, growth[:, 0], voted[0], new_max[:, 0]


def outweighed(local_max: np.ndarray, row_sum: np.ndarray) -> np.ndarray:
    """bool (4,): for each warp of 16 rows what `vote_outweighed` says."""
    return (~(np.exp2(local_max) <= np.minimum(8 * row_sum + 4, 8192))).reshape(4, -1).any(1)


def outgrown(part: np.ndarray, row_sum: np.ndarray) -> np.ndarray:
    """bool (4,): for each warp of 16 rows what `vote_outgrown` says."""
    return (part > np.minimum(8 * row_sum + 4, 8192)).reshape(4, -1).any(1)


@dataclass(frozen=True, slots=True)
class Found:
    """Rows' output (64, D), LSE (64,), whether all sums are sound, how often each warp raised its maxima, and whether the first block of
    most rows is so peaked that a kernel wouldn't settle on it."""

    out: torch.Tensor
    lse: torch.Tensor
    sound: bool
    by_warp: tuple[int, ...]
    peaked: bool = False

    @property
    def raised(self) -> int:
        """How often warps raised their maxima."""
        return sum(self.by_warp)


def attention(
    scores: np.ndarray, v: torch.Tensor, dtype: DType, *, settles: bool, lazy: bool = False, asks_first: bool = False, factor: float = 1.0
) -> Found:
    """A warpgroup's result for scores (64, N), which are in base 2 times `factor`, and values (N, D), block by block as they come; with
    running maxima either rescaling each time or, where it is `lazy`, where one grew far; `asks_first` where a score outweighs what came
    before it."""
    scale = np.full(1, factor, np.float32).view(Array)
    parts, kind = functions(dtype, "outgrown" if asks_first else "grown"), TORCH_DTYPES[dtype]
    row_max = np.full(64, -np.inf, np.float32).view(Array)
    row_sum = np.zeros((64, 4), np.float32).view(Array)
    acc = np.zeros((64, v.shape[1]), np.float32).view(Array)
    raised = [0, 0, 0, 0]
    peaked = False
    with np.errstate(all="ignore"):
        for first in range(0, scores.shape[1], BLOCK_N):
            block = np.full((64, BLOCK_N), -np.inf, np.float32)
            block[:, : scores.shape[1] - first] = scores[:, first : first + BLOCK_N]
            block = block.view(Array)
            if not settles and (lazy or asks_first):
                if asks_first:
                    probs, part, growth, grown, row_max = lazy_by_vote(parts, block, row_max, row_sum, scale)
                    for warp in range(4):
                        raised[warp] += int(grown[16 * warp, 0])
                else:
                    probs, part, growth, _, row_max = parts.lazy_softmax(block, row_max, scale, 0, True)
                for warp in np.flatnonzero((growth > 0).reshape(4, -1).any(1)):
                    rows = slice(16 * warp, 16 * warp + 16)
                    acc[rows], row_sum[rows] = parts.rescale_acc_and_sum(acc[rows], row_sum[rows], growth[rows])
                row_sum = row_sum + part
            elif first == 0 or not settles:
                probs, rescale, row_max, row_sum = parts.online_softmax(block, row_max, row_sum, scale, True)
                acc = acc * rescale[:, None]
                if settles:
                    total = row_sum.sum(1)
                    peaked = bool(((total > 0) & (total < 3)).sum() > 32)
                    row_max = parts.unless_huge(np.where(np.isneginf(row_max), np.float32(0), row_max).view(Array))
            else:
                probs, part, row_max = parts.settled_softmax(block, row_max, scale, 0)
                for warp in np.flatnonzero(outgrown(part, row_sum)):
                    rows = slice(16 * warp, 16 * warp + 16)
                    raised[warp] += 1
                    probs[rows], acc[rows], row_max[rows], row_sum[rows] = parts.raise_maxima(
                        probs[rows], acc[rows], row_max[rows], row_sum[rows]
                    )
                    part = parts.quarter_sums(probs)
                row_sum = row_sum + part
            values = np.zeros((BLOCK_N, v.shape[1]), np.float32)
            values[: scores.shape[1] - first] = v[first : first + BLOCK_N].float().numpy()
            acc = acc + torch.from_numpy(np.asarray(probs, np.float32)).to(kind).float().numpy() @ values
        total = row_sum.sum(1)
        out = np.where(total[:, None] > 0, acc / total[:, None], 0)
        lse = (parts.finished_max(row_max, scale) + np.log2(total)) * math.log(2)
    sound = bool((total < np.inf).all())
    return Found(torch.from_numpy(np.asarray(out, np.float32)).to(kind), torch.from_numpy(np.asarray(lse)), sound, tuple(raised), peaked)


def told(found: Found, blocks: int, dtype: DType) -> bool:
    """True if a program with this one tile says that it was misled, by the kernel's own functions."""
    parts = on_numpy(rendered(problem(64, dtype=dtype).spec(), maximum="first"), "report_misled", "count_peaked")
    given: list[int] = []
    address = np.zeros(1, np.int64).view(Array)
    parts.gl.inline_asm_elementwise = lambda text, constraints, arguments, **_: given.append(int(arguments[-1]))
    # The first warp's register is all that they read of a GPU: two for each block that raises its maxima, less one for each block.
    raised = -blocks
    if not found.peaked:
        raised += 2 * found.by_warp[0]
    else:
        parts.count_peaked(blocks)
        raised += given[-1]
    parts.report_misled.__globals__["read_raised"] = lambda: raised
    parts.report_misled(SimpleNamespace(misled_ptr=address, host_misled_ptr=address), not found.sound)
    return bool(given[-1])


def errors(found: Found, scores: np.ndarray, v: torch.Tensor, dtype: DType, factor: float = 1.0) -> list[float]:
    """The largest errors over their tolerances: of the output, of its norm, of the LSE."""
    bounds = tolerance(problem(64, dtype=dtype).spec())
    natural = torch.from_numpy(scores).double() * math.log(2) * float(np.float32(factor))
    out, lse = torch.softmax(natural, 1) @ v.double(), torch.logsumexp(natural, 1)
    off = (found.out.double() - out).abs()
    of_norm = off.norm() / out.norm().clamp_min(1e-30) / bounds.relative_norm
    of_lse = ((found.lse.double() - lse).abs() / (bounds.lse_atol + LSE_RTOL * lse.abs())).max()
    return [float(error) for error in ((off / (bounds.atol + bounds.rtol * out.abs())).max(), of_norm, of_lse)]


@st.composite
def score_rows(draw: st.DrawFn) -> tuple[np.ndarray, torch.Tensor]:
    """Scores (64, N) in base 2, and values (N, 16): random ones, and such as make errors add up."""
    n = draw(st.sampled_from([64, 100, 500, 1024]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    scores = torch.randn(64, n, generator=generator) * draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 15.0]))
    # One key that stands out, as where a token attends to itself or to the first one.
    scores[:, draw(st.integers(0, n - 1))] += draw(st.floats(0, 60))
    scores += torch.linspace(0, draw(st.sampled_from([-100.0, 0.0, 1.0, 100.0])), n)
    scores[:, 1:][torch.rand(64, n - 1, generator=generator) < draw(st.sampled_from([0.0, 0.5]))] = float("-inf")
    v = torch.randn(n, 16, generator=generator) * draw(st.sampled_from([0.01, 1.0])) + draw(st.sampled_from([0.0, 1.0]))
    return (scores + draw(st.floats(-150, 150))).numpy(), v


@pytest.mark.parametrize("dtype", DTYPES_HERE)
@given(rows=score_rows(), ways=st.sampled_from([["settles"], ["lazy"], ["asks_first"]]))
def test_rows_are_exact_however_late_their_largest_score_comes(
    dtype: DType, rows: tuple[np.ndarray, torch.Tensor], ways: list[str]
) -> None:
    scores, v = rows[0], rows[1].to(TORCH_DTYPES[dtype])
    found = attention(scores, v, dtype, **({"settles": False} | dict.fromkeys(ways, True)))
    assert found.sound
    assert max(errors(found, scores, v, dtype)) <= 1


@pytest.mark.parametrize("dtype", DTYPES_HERE)
@pytest.mark.parametrize("jump", [100.0, 120.0, 140.0, 1000.0])
def test_a_jump_past_what_float32_holds_is_seen_and_no_smaller_one(dtype: DType, jump: float) -> None:
    scores = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    scores[17, 200] += jump
    found = attention(scores, torch.ones(256, 4), dtype, settles=True)
    assert found.sound == (jump < 125)


@pytest.mark.parametrize("jump", [125.5, 126.5, 127.9, 128.5])
def test_a_row_that_is_outgrown_by_as_much_as_float32_holds_is_right_or_seen_to_be_wrong(jump: float) -> None:
    scores = np.zeros((64, 256), np.float32)
    scores[17, 200] = jump
    v = torch.randn(256, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = attention(scores, v, "bf16", settles=True)
    assert found.sound == (jump < 128)
    assert not found.sound or max(errors(found, scores, v, "bf16")) <= 1


@pytest.mark.parametrize(("raised", "missed", "says"), [(0, False, False), (8, False, False), (9, False, True), (0, True, True)])
def test_a_program_says_that_it_was_misled_where_a_tile_was_missed_or_most_blocks_raised_maxima(
    raised: int, missed: bool, says: bool
) -> None:
    nothing = torch.empty(0)
    assert told(Found(nothing, nothing, not missed, (raised, 16, 16, 16)), 16, "bf16") == says


@pytest.mark.parametrize("dtype", DTYPES_HERE)
@pytest.mark.parametrize("name", [name for name in PRESENT if "misled" not in name])
def test_every_distribution_is_about_as_exact_as_with_running_maxima(name: str, dtype: DType) -> None:
    inputs = make_inputs(Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=1024, d=64, d_v=64, dtype=dtype), device="cpu", seed=1)
    redistribute(inputs, name)
    # Right to left, as the kernel goes.
    k, v = inputs.k[0, 0].flip(0), inputs.v[0, 0].flip(0)
    scores = (inputs.q[0, 0].float() @ k.float().T * (inputs.keywords["scale"] / math.log(2))).numpy()
    settled, running = (attention(scores, v, dtype, settles=settles) for settles in (True, False))
    assert settled.sound
    exact = torch.softmax(torch.from_numpy(scores).double() * math.log(2), 1) @ v.double()
    ours, theirs = ((found.out.double() - exact).norm() for found in (settled, running))
    assert ours <= 1.5 * theirs + 1e-6
    assert torch.allclose(settled.lse, running.lse, atol=1e-4, rtol=1e-6)
    if name in ("random", "sink+8", "deviation-3", "drift-60"):
        for ways in (["lazy"], ["asks_first"]):
            other = attention(scores, v, dtype, **({"settles": False} | dict.fromkeys(ways, True)))
            assert (other.out.double() - exact).norm() <= 1.5 * theirs + 1e-6
            assert torch.allclose(other.lse, running.lse, atol=1e-4, rtol=1e-6)
    assert settled.peaked == name.startswith("deviation")
    # Sinks and needles are fast as they are; not so keys that rise so fast that nearly every block raises a maximum, and rows of which
    # few keys take nearly all.
    assert told(settled, 1024 // BLOCK_N, dtype) == (name == "drift-60" or settled.peaked)


@pytest.mark.parametrize("ways", [["settles"], ["lazy"], ["asks_first"], []], ids=str)
@pytest.mark.parametrize("dtype", DTYPES_HERE)
def test_huge_scores_are_exact_or_seen_not_to_settle(dtype: DType, ways: list[str]) -> None:
    inputs = make_inputs(Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=500, d=64, d_v=64, dtype=dtype), device="cpu", seed=1)
    for name in HUGE + HUGE_OF_BF16 * (dtype == "bf16"):
        redistribute(inputs, name)
        k, v = inputs.k[0, 0].flip(0), inputs.v[0, 0].flip(0)
        scores, factor = (inputs.q[0, 0].float() @ k.float().T).numpy(), inputs.keywords["scale"] / math.log(2)
        found = attention(scores, v, dtype, **({"settles": False} | dict.fromkeys(ways, True)), factor=factor)
        assert found.sound == ("settles" not in ways)
        assert not found.sound or max(errors(found, scores, v, dtype, factor)) <= 1


@pytest.mark.parametrize("ways", [["settles"], ["lazy"], []], ids=str)
@pytest.mark.parametrize("amount", [18, 22, 24, 25, 26])
@pytest.mark.parametrize("sign", ["+", "-"])
def test_large_scores_are_exact_up_to_those_that_need_a_power_of_two(sign: str, amount: int, ways: list[str]) -> None:
    inputs = make_inputs(Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=500, d=64, d_v=64, dtype="fp16"), device="cpu", seed=1)
    redistribute(inputs, f"huge{sign}{amount}")
    k, v = inputs.k[0, 0].flip(0), inputs.v[0, 0].flip(0)
    scores, factor = (inputs.q[0, 0].float() @ k.float().T).numpy(), inputs.keywords["scale"] / math.log(2)
    found = attention(scores, v, "fp16", **({"settles": False} | dict.fromkeys(ways, True)), factor=factor)
    assert found.sound or ("settles" in ways and amount >= 24)
    assert not found.sound or max(errors(found, scores, v, "fp16", factor)) <= 1


def test_random_numbers_hardly_ever_raise_a_maximum_and_sinks_do_once() -> None:
    scores = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32) / math.log(2)
    v = torch.zeros(4096, 1)
    assert attention(scores, v, "bf16", settles=True).raised <= 1
    scores[:, -1] += 20 / math.log(2)
    assert attention(scores, v, "bf16", settles=True).raised <= 5


def test_the_largest_number_that_a_thread_holds_of_a_row_is_found_where_it_is_above_0() -> None:
    found: list[Any] = []
    parts = on_numpy(rendered(problem(64).spec(), rescale="outgrown"), "thread_max")
    parts.gl.inline_asm_elementwise = lambda text, _constraints, _arguments, **words: found.append((text, words)) or np.zeros((64, 32))
    parts.gl.int32 = parts.gl.float32 = np.int32
    parts.gl.sum = parts.gl.max = lambda array, axis: array.sum(axis).view(Array)
    parts.gl.split = lambda array: (array[..., 0], array[..., 1])
    parts.thread_max(np.zeros((64, 64), np.float32).view(Array), np.zeros((64, 4)).view(Array))
    [(text, words)] = found
    # What a thread holds of four pairs of columns: two rows in turn.
    numbers = np.random.default_rng(0).normal(-1, 1, (2, 1000, 8)).astype(np.float32)
    numbers[:, :9] = -np.inf
    numbers[1, 8, 7], numbers[0, 7, 2] = np.inf, 1e-30
    local_max = assembly(text, "", list(numbers.view(np.int32).view(Array)), **words).view(np.float32)
    right = np.stack([numbers[..., row::2].max((0, 2)) for row in (0, 1)], 1)
    assert np.array_equal(np.where(right > 0, right, -1), np.where(local_max[:, :2] > 0, local_max[:, :2], -1))
    assert (right > 0).any()
    assert (right < 0).any()
    assert not local_max[:, 2:].any()


def test_the_vote_in_assembly_has_the_numbers_that_these_tests_go_by() -> None:
    text = rendered(problem(64).spec(), maximum="first").vote_outgrown.src
    numbers = [struct.unpack(">f", bytes.fromhex(word))[0] for word in ("41000000", "40800000", "46000000")]
    assert numbers == [8.0, 4.0, 8192.0]
    assert all(f"0f{word}" in text for word in ("41000000", "40800000", "46000000"))
    assert "setp.gt.f32 upper, $2, 0f00000000;" in rendered(problem(64).spec(), rescale="grown").vote_grown.src
    counting = rendered(problem(64).spec(), maximum="first", rescale="grown")
    assert "        if W == 0:\n            count_peaked(number)" in counting.mainloop.src
    assert "add.s32 raised, raised, $1;" in counting.count_peaked.src
    assert "add.s32 raised, raised, 2;" in counting.count_raised.src and "sub.s32 raised, raised, $1;" in counting.count_blocks.src
