"""Bytes and operations of each step of attention, by counting alone, and the least time of each on a GPU (its roofline).

Rules of the count, by which the figures can be checked by hand:

- Every tensor is in the problem's own element type, S and P = softmax(S) included (with fp8 inputs, S, P and O are bf16), and a step
  reads each of its inputs once and writes its output once. Caches are not modelled: between two kernels S is too large for them at
  the sizes that matter.
- The standard pipeline is Q K^T; scale and mask; softmax; dropout; P V. The three elementwise steps run as one pass over S
  (`fused`) or as one pass each (`separate`). Masks come from indices and dropout from a counter, so neither is read from memory.
- A fused kernel reads Q, and what a band shows of K and V, once, and writes O and the float32 log-sum-exp (`Problem.io_bytes`); S
  never leaves the chip.
- A matrix product of (m, k) and (k, n) is 2 m k n operations. Per score: scale and mask 2; softmax 5, of which one is an
  exponential (maximum, subtract, exp, sum, divide); dropout 2.
- The standard backward reads P, which its forward stored: P^T dO; dO V^T; dropout, softmax and scale of dP; dS K; dS^T Q. Per score:
  dropout 2; softmax 4 (times P, sum, subtract, times P); scale 1. The fused one recomputes P: per pair scale and subtract 2, an
  exponential, dropout 4 (of P and of dP), and 2 for dS.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from flashtune.core.gpu.target import Target
from flashtune.core.problems.dtypes import ITEMSIZE, DType, output_dtype
from flashtune.core.problems.problem import Problem
from flashtune.core.system.errors import InputError

Elementwise = Literal["fused", "separate"]
ELEMENTWISE: tuple[Elementwise, ...] = get_args(Elementwise)
Bound = Literal["compute", "memory", "exp"]

DEFAULT_WINDOW, DEFAULT_RANK = 128, 64

_FORWARD = {"scale_mask": (1, 2, 0), "softmax": (1, 4, 1), "dropout": (1, 2, 0)}
_BACKWARD = {"dropout": (1, 2, 0), "softmax": (2, 4, 0), "scale": (1, 1, 0)}
"""Elementwise steps of a direction: tensors of scores read, and per score ordinary operations and exponentials."""
_FUSED_OPS = 8
"""Ordinary operations of a fused kernel, in either direction, per visible pair of query and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pass over memory: its bytes and operations.

    `score_bytes` is the part of the traffic that is S or P. `matmul_flops` run on matrix units, `vector_flops` on ordinary
    cores, `exps` on the exponential unit.
    """

    name: str
    read_bytes: int
    write_bytes: int
    score_bytes: int = 0
    matmul_flops: int = 0
    vector_flops: int = 0
    exps: int = 0

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.write_bytes

    @property
    def flops(self) -> int:
        """All operations; an exponential counts as one."""
        return self.matmul_flops + self.vector_flops + self.exps

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.flops / self.bytes

    @property
    def score_share(self) -> float:
        """Share of the traffic that is S or P, 0 to 1."""
        return self.score_bytes / self.bytes


def total(name: str, steps: tuple[Step, ...]) -> Step:
    """Sum of `steps` as one step called `name`."""
    counts = [field.name for field in fields(Step) if field.name != "name"]
    return Step(name=name, **{count: sum(getattr(step, count) for step in steps) for count in counts})


def tensor_bytes(problem: Problem) -> dict[str, int]:
    """Bytes of Q, K, V, S and O."""
    p, size, out_size = problem, ITEMSIZE[problem.dtype], ITEMSIZE[output_dtype(problem.dtype)]
    return {
        "Q": size * p.batch * p.heads * p.n_q * p.d,
        "K": size * p.batch * p.kv_heads * p.n_kv * p.d,
        "V": size * p.batch * p.kv_heads * p.n_kv * p.d_v,
        "S": out_size * p.scores(),
        "O": out_size * p.batch * p.heads * p.n_q * p.d_v,
    }


def standard_steps(problem: Problem, elementwise: Elementwise) -> tuple[Step, ...]:
    """Steps of the standard pipeline: `qk`, then `elementwise` or `scale_mask`, `softmax`, `dropout`, then `pv`.

    Of a backward: `dv`, `dp`, then `elementwise` or `dropout`, `softmax`, `scale`, then `dq`, `dk`.
    """
    size = tensor_bytes(problem)
    s, scores = size["S"], problem.scores()
    passes = _BACKWARD if problem.direction == "bwd" else _FORWARD
    if elementwise == "fused":
        reads, ops, exps = zip(*passes.values(), strict=True)
        passes = {"elementwise": (max(reads), sum(ops), sum(exps))}

    def product(name: str, read: int, write: int, width: int) -> Step:
        return Step(name=name, read_bytes=read, write_bytes=write, score_bytes=s, matmul_flops=2 * scores * width)

    middle = tuple(
        Step(
            name=name,
            read_bytes=read * s,
            write_bytes=s,
            score_bytes=(read + 1) * s,
            vector_flops=ordinary * scores,
            exps=exp * scores,
        )
        for name, (read, ordinary, exp) in passes.items()
    )
    if problem.direction == "fwd":
        first, last = product("qk", size["Q"] + size["K"], s, problem.d), product("pv", s + size["V"], size["O"], problem.d_v)
        return (first, *middle, last)
    return (
        product("dv", s + size["O"], size["V"], problem.d_v),
        product("dp", size["O"] + size["V"], s, problem.d_v),
        *middle,
        product("dq", s + size["K"], size["Q"], problem.d),
        product("dk", s + size["Q"], size["K"], problem.d),
    )


def fused_step(problem: Problem, name: str = "fused") -> Step:
    """One kernel for the whole problem, over its visible pairs; S stays on the chip."""
    pairs = problem.batch * problem.heads * problem.visible_pairs()
    written = sum(operand.nbytes(problem) for operand in problem.contract.written)
    return Step(
        name=name,
        read_bytes=problem.io_bytes() - written,
        write_bytes=written,
        matmul_flops=problem.flops(),
        vector_flops=_FUSED_OPS * pairs,
        exps=pairs,
    )


def at_length(problem: Problem, n: int) -> Problem:
    """The problem with `n` keys, of packed sequences the mean; the number of queries follows where it was equal, and stays otherwise
    (decoding)."""
    lengths = problem.lengths and replace(problem.lengths, longest=max(1, problem.lengths.longest * n // problem.n_kv))
    return replace(problem, n_q=n if problem.n_q == problem.n_kv else problem.n_q, n_kv=n, lengths=lengths)


def windowed(problem: Problem, window: int) -> Problem:
    """The problem with a window of `window` keys on either side of each query."""
    return replace(problem, features=replace(problem.features, window=(window, window)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Strategy of attention; its steps run one after another."""

    name: str
    what: str
    exact: bool
    steps: tuple[Step, ...]


def strategies(problem: Problem, elementwise: Elementwise, window: int, rank: int) -> tuple[Strategy, ...]:
    """Strategies standard, fused, window and low_rank of a full or causal problem; the first two are exact.

    Causal problems have no low_rank, since projected keys have no positions, backwards none, since projections need gradients, too, and
    packed sequences none, since one matrix doesn't fit their lengths.
    """
    local, local_words = fused_step(windowed(problem, window), "window"), f"fused, {window} keys on either side of each query"
    found = (
        Strategy(name="standard", what="one kernel per step", exact=True, steps=standard_steps(problem, elementwise)),
        Strategy(name="fused", what="one kernel, S stays on the chip", exact=True, steps=(fused_step(problem),)),
        Strategy(name="window", what=local_words, exact=window >= problem.n_kv - 1, steps=(local,)),
    )
    if problem.features.causal or problem.features.packed or problem.direction == "bwd":
        return found
    what = f"K and V projected from {problem.n_kv} to {rank} rows, then fused"
    steps = (
        _projection(problem, "k", rank),
        _projection(problem, "v", rank),
        fused_step(replace(problem, n_kv=rank), "low_rank_attention"),
    )
    return (*found, Strategy(name="low_rank", what=what, exact=False, steps=steps))


def _projection(problem: Problem, letter: str, rank: int) -> Step:
    """Linformer's projection of K or V (N x D, per head) to `rank` rows by one (rank, N) matrix shared by all heads."""
    size, heads, n = ITEMSIZE[problem.dtype], problem.batch * problem.kv_heads, problem.n_kv
    width = problem.d if letter == "k" else problem.d_v
    return Step(
        name=f"project_{letter}",
        read_bytes=size * (rank * n + heads * n * width),
        write_bytes=size * heads * rank * width,
        matmul_flops=2 * heads * rank * n * width,
    )


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline of a GPU for one element type: the least time of a step if each unit ran at its peak and all overlapped.

    The roofline of Williams, Waterman and Patterson (CACM 2009), with a third unit beside memory and arithmetic: softmax needs one
    exponential per score, and GPUs do only 16 of those per clock and SM (FlashAttention-3, Shah et al. 2024, section 3.1).
    Raises InputError where the GPU has no matrix products in `dtype`.
    """

    target: Target
    dtype: DType

    def __post_init__(self) -> None:
        if self.dtype not in self.target.peak_tflops:
            known = [name for name in ("fp16", "bf16", "fp32") if name in self.target.peak_tflops]
            raise InputError(f"{self.target.slug} has no {self.dtype} matrix products: use --dtype {' or '.join(known)}")

    @property
    def peak_tflops(self) -> float:
        """Dense peak of matrix products, in TFLOP/s."""
        return self.target.peak_tflops[self.dtype]

    @property
    def crossover(self) -> float:
        """Operations per byte at which memory and matrix units take the same time: below it, memory is the bound."""
        return self.peak_tflops * 1e3 / self.target.bandwidth_gbs

    def units_us(self, step: Step) -> dict[Bound, float]:
        """Microseconds that each unit needs for a step; matrix products and elementwise work use different units and overlap."""
        vector_us = step.vector_flops / (self.target.peak_tflops["fp32"] * 1e6)
        return {
            "compute": max(step.matmul_flops / (self.peak_tflops * 1e6), vector_us),
            "memory": step.bytes / (self.target.bandwidth_gbs * 1e3),
            "exp": step.exps / self.target.exp_per_second * 1e6,
        }

    def floor(self, *steps: Step) -> tuple[float, Bound]:
        """Least time of consecutive steps, in microseconds, and the unit that sets most of it."""
        by_unit: dict[Bound, float] = {}
        for units in map(self.units_us, steps):
            slowest = max(units, key=lambda unit: units[unit])
            by_unit[slowest] = by_unit.get(slowest, 0.0) + units[slowest]
        return sum(by_unit.values()), max(by_unit, key=lambda unit: by_unit[unit])
