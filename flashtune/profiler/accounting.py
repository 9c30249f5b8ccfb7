"""Bytes and operations of each step of attention, by counting alone: no GPU, no torch.

Rules of the count, by which the figures can be checked by hand:

- Every tensor is in the problem's own element type, S and P = softmax(S) included (with fp8 inputs, S, P and O are bf16), and a step
  reads each of its inputs once and writes its output once. Caches are not modelled: between two kernels S is too large for them at
  the sizes that matter.
- The standard pipeline is Q K^T; scale and mask; softmax; dropout; P V. The three elementwise steps run as one pass over S
  (`fused`) or as one pass each (`separate`). Masks come from indices and dropout from a counter, so neither is read from memory.
- A fused kernel reads Q, K and V once and writes O and the float32 log-sum-exp (`Problem.io_bytes`); S never leaves the chip.
- A matrix product of (m, k) and (k, n) is 2 m k n operations. Per score: scale and mask 2; softmax 5, of which one is an
  exponential (maximum, subtract, exp, sum, divide); dropout 2.
- The standard backward reads P, which its forward stored: P^T dO; dO V^T; dropout, softmax and scale of dP; dS K; dS^T Q. Per score:
  dropout 2; softmax 4 (times P, sum, subtract, times P); scale 1. The fused one recomputes P: per pair scale and subtract 2, an
  exponential, dropout 4 (of P and of dP), and 2 for dS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from flashtune.core.dtypes import ITEMSIZE, output_dtype
from flashtune.core.problem import Problem

Elementwise = Literal["fused", "separate"]
ELEMENTWISE: tuple[Elementwise, ...] = get_args(Elementwise)

ELEMENTWISE_OPS: dict[str, tuple[int, int]] = {"scale_mask": (2, 0), "softmax": (4, 1), "dropout": (2, 0)}
"""Per score: ordinary operations and exponentials of each elementwise step."""
BACKWARD_OPS: dict[str, int] = {"dropout": 2, "softmax": 4, "scale": 1}
"""Per score: operations of each elementwise step of the backward, none of them an exponential."""
_FUSED_BACKWARD_OPS = 8
_OPS = sum(ordinary for ordinary, _ in ELEMENTWISE_OPS.values())


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
        "S": out_size * _scores(p),
        "O": out_size * p.batch * p.heads * p.n_q * p.d_v,
    }


def standard_steps(problem: Problem, elementwise: Elementwise) -> tuple[Step, ...]:
    """Steps of the standard pipeline: `qk`, then `elementwise` or `scale_mask`, `softmax`, `dropout`, then `pv`.

    Of a backward: `dv`, `dp`, then `elementwise` or `dropout`, `softmax`, `scale`, then `dq`, `dk`.
    """
    if problem.direction == "bwd":
        return _backward_steps(problem, elementwise)
    p, size, s = problem, tensor_bytes(problem), tensor_bytes(problem)["S"]
    passes = {name: (1, *ops) for name, ops in ELEMENTWISE_OPS.items()}
    return (
        _product(p, "qk", size["Q"] + size["K"], s, p.d),
        *_elementwise(p, passes, elementwise),
        _product(p, "pv", s + size["V"], size["O"], p.d_v),
    )


def _backward_steps(problem: Problem, elementwise: Elementwise) -> tuple[Step, ...]:
    p, size, s = problem, tensor_bytes(problem), tensor_bytes(problem)["S"]
    # The softmax step reads P and dP.
    passes = {name: (2 if name == "softmax" else 1, ops, 0) for name, ops in BACKWARD_OPS.items()}
    return (
        _product(p, "dv", s + size["O"], size["V"], p.d_v),
        _product(p, "dp", size["O"] + size["V"], s, p.d_v),
        *_elementwise(p, passes, elementwise),
        _product(p, "dq", s + size["K"], size["Q"], p.d),
        _product(p, "dk", s + size["Q"], size["K"], p.d),
    )


def _product(problem: Problem, name: str, read: int, write: int, width: int) -> Step:
    """Matrix product that reads or writes the scores; `width` is the other dimension."""
    s, flops = tensor_bytes(problem)["S"], 2 * _scores(problem) * width
    return Step(name=name, read_bytes=read, write_bytes=write, score_bytes=s, matmul_flops=flops)


def _elementwise(problem: Problem, passes: Mapping[str, tuple[int, int, int]], elementwise: Elementwise) -> tuple[Step, ...]:
    """Elementwise steps from `passes`: name to tensors of scores read, ordinary operations and exponentials per score."""
    if elementwise == "fused":
        reads, ops, exps = zip(*passes.values(), strict=True)
        passes = {"elementwise": (max(reads), sum(ops), sum(exps))}
    s, scores = tensor_bytes(problem)["S"], _scores(problem)
    return tuple(
        Step(
            name=name,
            read_bytes=reads * s,
            write_bytes=s,
            score_bytes=(reads + 1) * s,
            vector_flops=ops * scores,
            exps=exps * scores,
        )
        for name, (reads, ops, exps) in passes.items()
    )


def fused_step(problem: Problem, name: str = "fused") -> Step:
    """One kernel for the whole problem, over its visible pairs; S stays on the chip."""
    p = problem
    pairs = p.batch * p.heads * p.visible_pairs()
    written = sum(operand.nbytes(p) for operand in p.contract.written)
    return Step(
        name=name,
        read_bytes=p.io_bytes() - written,
        write_bytes=written,
        matmul_flops=p.flops(),
        vector_flops=(_OPS if p.direction == "fwd" else _FUSED_BACKWARD_OPS) * pairs,
        exps=pairs,
    )


def projection_steps(problem: Problem, rank: int) -> tuple[Step, ...]:
    """Linformer's projections: K and V (N x D each, per head) to `rank` rows by one (rank, N) matrix shared by all heads."""
    p, size = problem, ITEMSIZE[problem.dtype]
    heads = p.batch * p.kv_heads
    return tuple(
        Step(
            name=f"project_{letter}",
            read_bytes=size * (rank * p.n_kv + heads * p.n_kv * width),
            write_bytes=size * heads * rank * width,
            matmul_flops=2 * heads * rank * p.n_kv * width,
        )
        for letter, width in (("k", p.d), ("v", p.d_v))
    )


def _scores(problem: Problem) -> int:
    return problem.batch * problem.heads * problem.n_q * problem.n_kv
