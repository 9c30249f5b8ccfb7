"""Measurements of a profile: its shapes run on a GPU, medians of interleaved rounds.

Inputs are random normal numbers from a fixed seed. Everything is timed without gradients. The standard pipeline is PyTorch's
operations one by one; its scale and mask are one pass (`torch.add` with a mask of zeros), its dropout keeps 90 %.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from flashtune import dispatch
from flashtune.core import reference
from flashtune.core.dtypes import ITEMSIZE, DType
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.problem import Problem
from flashtune.core.results import Measurement
from flashtune.core.torch_attention import sdpa
from flashtune.core.torch_dtypes import TORCH_DTYPES
from flashtune.profiler.accounting import Step, fused_step, standard_steps, tensor_bytes, total
from flashtune.profiler.measured import Layer, Measured, Series, StrategyRun, Timed
from flashtune.profiler.strategies import at_length
from flashtune.profiler.summary import Profile
from flashtune.tuner.machine import provenance
from flashtune.tuner.timing.stopwatch import Run, Stopwatch

DROPOUT = 0.1
SAMPLED_ROWS = 512
"""Number of evenly spaced query rows of the first head that errors are computed over."""
LEAST_N, REACH_N = 64, 8192
"""Smallest N of latency measurements, and the N they reach at least."""
LONGEST_LAUNCH_S = 0.1
"""Seconds of a launch, estimated at a third of the target's peak, above which larger N are left out."""
STEPS_BUDGET_S, KINDS_BUDGET_S, POINT_BUDGET_S, STRATEGY_BUDGET_S = 2.0, 2.0, 0.7, 2.0


class Clock(Protocol):
    """Clock for callables; `Stopwatch` is the one for GPUs."""

    def race(self, runs: Sequence[Run], *, budget_s: float) -> list[Measurement]:
        """One measurement for each of `runs`, interleaved."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Environment of measurements: device, clock, and its free memory in bytes."""

    device: torch.device
    clock: Clock
    free_bytes: Callable[[], int]
    name: str

    @classmethod
    def on_gpu(cls, profile: Profile) -> "Bench":
        """Bench on the current GPU with CUDA events as its clock."""
        device = torch.device("cuda", torch.cuda.current_device())

        def free_bytes() -> int:
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(device)[0])

        clock = Stopwatch(device, profile.target.l2_bytes)
        return cls(device=device, clock=clock, free_bytes=free_bytes, name=torch.cuda.get_device_name(device))

    def tensors(self, problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of a problem, (B, H, N, D) each."""
        p, dtype = problem, TORCH_DTYPES[problem.dtype]
        generator = torch.Generator(self.device).manual_seed(0)
        shapes = ((p.heads, p.n_q, p.d), (p.kv_heads, p.n_kv, p.d), (p.kv_heads, p.n_kv, p.d_v))
        q, k, v = (torch.randn(p.batch, *shape, generator=generator, device=self.device, dtype=dtype) for shape in shapes)
        return q, k, v

    def matrix(self, rows: int, columns: int, dtype: DType) -> torch.Tensor:
        """Random weight matrix (rows, columns), scaled so that products keep their inputs' magnitude."""
        generator = torch.Generator(self.device).manual_seed(1)
        return torch.randn(rows, columns, generator=generator, device=self.device, dtype=TORCH_DTYPES[dtype]).mul_(rows**-0.5)


def measure(profile: Profile, bench: Bench) -> Measured:
    """All measurements of `profile`; those that don't fit into memory are left out and named in `skipped`.

    Raises EnvironmentProblem where not even Q, K, V and O fit.
    """
    try:
        with torch.no_grad():
            return _measure(profile, bench)
    except torch.OutOfMemoryError as error:
        raise EnvironmentProblem(f"{bench.name} ran out of memory while measuring: give a smaller --n, --b or --h") from error


def _measure(profile: Profile, bench: Bench) -> Measured:
    skipped: list[str] = []
    problem = profile.problem
    steps = _steps(problem, bench, skipped)
    kinds = _kinds(problem, bench, skipped)
    scaling = _scaling(profile, bench, skipped)
    layer = _layer(problem, bench, {kind.name: kind.time_us for kind in kinds}, skipped)
    runs = _strategies(profile, bench, skipped)
    served = dispatch.explain(*bench.tensors(problem), **_call_kwargs(problem))
    return Measured(
        device=bench.name,
        provenance=provenance(command="", seed=0, measured=True),
        steps=steps,
        kinds=kinds,
        served_by=f"{served.template} {served.variant_id}: {served.reason}" if served.template else f"PyTorch: {served.reason}",
        scaling=scaling,
        layer=layer,
        strategies=runs,
        skipped=tuple(skipped),
    )


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Standard pipeline without dropout: softmax(q k^T / sqrt(D) + mask) v, (B, H, N_q, D_v). Shared key heads are expanded in memory."""
    k, v = (_written_out(x, q.shape[1]) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)).mul_(q.shape[-1] ** -0.5)
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(torch.softmax(scores, -1), v)


def _written_out(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _mask(problem: Problem, like: torch.Tensor) -> torch.Tensor | None:
    """Additive mask (N_q, N_kv) of a causal problem, whose last query sees the last key; None for a full one."""
    if not problem.features.causal:
        return None
    everything = torch.full((problem.n_q, problem.n_kv), float("-inf"), device=like.device, dtype=like.dtype)
    return everything.triu_(1 + problem.n_kv - problem.n_q)


def _call_kwargs(problem: Problem) -> dict[str, Any]:
    """Keyword arguments of `dispatch.attention` for this problem."""
    alignment = "top_left" if problem.n_q == problem.n_kv else "bottom_right"
    return {"is_causal": problem.features.causal, "enable_gqa": problem.gqa_ratio > 1, "causal_alignment": alignment}


def _framework(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """PyTorch's fused attention; bottom-right alignment is its `causal_lower_right`."""
    causal, gqa = problem.features.causal, problem.gqa_ratio > 1
    if not causal or problem.n_q == problem.n_kv:
        return lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=gqa)
    band = causal_lower_right(problem.n_q, problem.n_kv)
    return lambda: sdpa(q, k, v, attn_mask=band, enable_gqa=gqa)


def averaging(rank: int, n: int, like: torch.Tensor) -> torch.Tensor:
    """Projection (rank, n) whose row i averages the i-th of `rank` equal groups of keys: an untrained Linformer's.

    Linformer (Wang et al. 2020, section 4) learns this matrix and names mean pooling as an alternative; the cost is the same.
    """
    place, row = torch.arange(n, device=like.device), torch.arange(rank, device=like.device)[:, None]
    inside = (place >= row * n // rank) & (place < ((row + 1) * n + rank - 1) // rank)
    return (inside / inside.sum(1, keepdim=True)).to(like.dtype)


def scaling_grid(profile: Profile) -> list[int]:
    """Values of N to measure: the profiled one times powers of two from 1/8 to 4, and on to `REACH_N`."""
    problem = profile.problem
    found = [problem.n_kv // 8, problem.n_kv // 4, problem.n_kv // 2, problem.n_kv]
    while found[-1] < max(4 * problem.n_kv, REACH_N):
        larger = found[-1] * 2
        if at_length(problem, larger).flops() / (profile.peak_tflops * 1e12 / 3) > LONGEST_LAUNCH_S:
            break
        found.append(larger)
    least = LEAST_N if problem.n_q == problem.n_kv else max(LEAST_N, problem.n_q)
    return [n for n in found if n >= least or n == problem.n_kv]


def _timed(name: str, step: Step, measurement: Measurement) -> Timed:
    return Timed(name=name, measurement=measurement, matmul_flops=step.matmul_flops, bytes=step.bytes)


def _steps(problem: Problem, bench: Bench, skipped: list[str]) -> tuple[Timed, ...]:
    """Measurements of each step of the standard pipeline by itself, with S and P in memory."""
    if not _fits(problem, bench, copies_of_s=5.0):
        skipped.append("the steps of the standard pipeline: S and its copies don't fit into the GPU's memory")
        return ()
    q, k, v = bench.tensors(problem)
    k, v = (_written_out(x, problem.heads) for x in (k, v))
    scale = problem.d**-0.5
    mask = _mask(problem, q)
    if mask is None:
        mask = torch.zeros(problem.n_q, problem.n_kv, device=bench.device, dtype=q.dtype)
    scores = torch.matmul(q, k.transpose(-2, -1))
    weights = torch.softmax(scores, -1)
    runs: dict[str, Run] = {
        "qk": lambda: torch.matmul(q, k.transpose(-2, -1)),
        "scale_mask": lambda: torch.add(mask, scores, alpha=scale),
        "softmax": lambda: torch.softmax(scores, -1),
        "dropout": lambda: F.dropout(weights, DROPOUT, training=True),
        "pv": lambda: torch.matmul(weights, v),
    }
    steps = {step.name: step for step in standard_steps(problem, "separate")}
    times = bench.clock.race(list(runs.values()), budget_s=STEPS_BUDGET_S)
    return tuple(_timed(name, steps[name], time) for name, time in zip(runs, times, strict=True))


def _kinds(problem: Problem, bench: Bench, skipped: list[str]) -> tuple[Timed, ...]:
    """Measurements of whole attentions at the profiled shape: eager (where S fits), PyTorch's, tuned."""
    q, k, v = bench.tensors(problem)
    runs = _attentions(problem, bench, q, k, v)
    if "eager" not in runs:
        skipped.append("eager attention: S doesn't fit into the GPU's memory")
    # Bytes of the eager pipeline measured here: no dropout, and a separate scaling pass.
    standard = total("eager", tuple(step for step in standard_steps(problem, "separate") if step.name != "dropout"))
    fused = fused_step(problem)
    times = bench.clock.race(list(runs.values()), budget_s=KINDS_BUDGET_S)
    return tuple(_timed(name, standard if name == "eager" else fused, time) for name, time in zip(runs, times, strict=True))


def _attentions(problem: Problem, bench: Bench, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    if _fits(problem, bench, copies_of_s=2.5):
        mask = _mask(problem, q)
        runs["eager"] = lambda: eager(q, k, v, mask)
    kwargs = _call_kwargs(problem)
    return {**runs, "framework": _framework(problem, q, k, v), "tuned": lambda: dispatch.attention(q, k, v, **kwargs)}


def _scaling(profile: Profile, bench: Bench, skipped: list[str]) -> tuple[Series, ...]:
    """Latency against N of every kind of attention and of the layer's projections."""
    points: dict[str, list[tuple[int, float]]] = {"eager": [], "framework": [], "tuned": [], "projections": []}
    width = profile.problem.heads * profile.problem.d
    weights = _weights(profile.problem, bench)
    if weights is None:
        skipped.append("the projections' latency: their weights don't fit into the GPU's memory")
    for n in scaling_grid(profile):
        problem = at_length(profile.problem, n)
        # Q, K, V, two outputs, and the projections' input and outputs.
        if 12 * tensor_bytes(problem)["Q"] > bench.free_bytes():
            skipped.append(f"latency at N={n}: Q, K, V and O don't fit into the GPU's memory")
            continue
        runs = _attentions(problem, bench, *bench.tensors(problem))
        if weights is not None:
            runs["projections"] = _projections(problem, width, weights, bench)
        for name, time in zip(runs, bench.clock.race(list(runs.values()), budget_s=POINT_BUDGET_S), strict=True):
            points[name].append((n, time.median_us))
    return tuple(Series(name=name, points=tuple(found)) for name, found in points.items() if found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Weight matrices of a layer: (E, E + 2 Hkv D), (E, E), (E, 4E) and (4E, E)."""

    qkv: torch.Tensor
    output: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


def _weights(problem: Problem, bench: Bench) -> _Weights | None:
    width, dtype = problem.heads * problem.d, problem.dtype
    if 12 * width * width * ITEMSIZE[dtype] > bench.free_bytes() / 2:
        return None
    return _Weights(
        qkv=bench.matrix(width, width + 2 * problem.kv_heads * problem.d, dtype),
        output=bench.matrix(width, width, dtype),
        up=bench.matrix(width, 4 * width, dtype),
        down=bench.matrix(4 * width, width, dtype),
    )


def _projections(problem: Problem, width: int, weights: _Weights, bench: Bench) -> Run:
    """Function that runs the layer's four projections on all tokens: (B N, E) to Q, K, V, and the output's."""
    tokens = bench.matrix(problem.batch * problem.n_q, width, problem.dtype)

    def run() -> None:
        torch.matmul(tokens, weights.qkv)
        torch.matmul(tokens, weights.output)

    return run


def _layer(problem: Problem, bench: Bench, attention_us: dict[str, float], skipped: list[str]) -> Layer | None:
    """One transformer layer: projections and MLP measured here, attention times passed in."""
    width = problem.heads * problem.d
    weights = _weights(problem, bench)
    tokens = problem.batch * problem.n_q
    if weights is None or 8 * tokens * width * ITEMSIZE[problem.dtype] > bench.free_bytes():
        skipped.append("the transformer layer: its weights or activations don't fit into the GPU's memory")
        return None
    x = bench.matrix(tokens, width, problem.dtype)

    def mlp() -> torch.Tensor:
        return torch.matmul(F.gelu(torch.matmul(x, weights.up)), weights.down)

    projections, hidden = bench.clock.race([_projections(problem, width, weights, bench), mlp], budget_s=KINDS_BUDGET_S)
    return Layer(projections_us=projections.median_us, mlp_us=hidden.median_us, attention_us=attention_us)


def _strategies(profile: Profile, bench: Bench, skipped: list[str]) -> tuple[StrategyRun, ...]:
    """Measured time of each strategy, and its error against float64 attention over sampled rows of the first head."""
    problem = profile.problem
    q, k, v = bench.tensors(problem)
    project = averaging(profile.rank, problem.n_kv, k)
    kwargs = _call_kwargs(problem)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "standard": lambda: eager(q, k, v, _mask(problem, q)),
        "fused": lambda: dispatch.attention(q, k, v, **kwargs),
        "window": lambda: dispatch.attention(q, k, v, window=profile.window, **kwargs),
        "low_rank": lambda: dispatch.attention(q, torch.matmul(project, k), torch.matmul(project, v), enable_gqa=kwargs["enable_gqa"]),
    }
    runs = {strategy.name: runs[strategy.name] for strategy in profile.strategies}
    if not _fits(problem, bench, copies_of_s=2.5):
        skipped.append("the standard strategy: S doesn't fit into the GPU's memory")
        del runs["standard"]
    rows = torch.linspace(0, problem.n_q - 1, min(problem.n_q, SAMPLED_ROWS), device=bench.device).long()
    seen = None
    if problem.features.causal:
        seen = (torch.arange(problem.n_kv, device=bench.device) <= rows[:, None] + (problem.n_kv - problem.n_q))[None, None]
    exact, _ = reference.attention(q[:1, :1, rows], k[:1, :1], v[:1, :1], scale=problem.d**-0.5, mask=seen)
    errors = [float((run()[:1, :1, rows].double() - exact).norm() / exact.norm()) for run in runs.values()]
    times = bench.clock.race(list(runs.values()), budget_s=STRATEGY_BUDGET_S)
    return tuple(
        StrategyRun(name=name, measurement=time, relative_error=error) for name, time, error in zip(runs, times, errors, strict=True)
    )


def _fits(problem: Problem, bench: Bench, *, copies_of_s: float) -> bool:
    return copies_of_s * tensor_bytes(problem)["S"] + 4 * tensor_bytes(problem)["Q"] < 0.9 * bench.free_bytes()
