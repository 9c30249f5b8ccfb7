"""Measurements of a profile: its shapes run on a GPU, medians of interleaved rounds, without gradients.

Inputs are random normal numbers from a fixed seed. The standard pipeline is PyTorch's operations one by one; its scale and mask are one
pass (`torch.add` with a mask of zeros), its dropout keeps 90 %.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from flashtune import dispatch
from flashtune.bench.accounting import Step, at_length, fused_step, standard_steps, tensor_bytes, total, windowed
from flashtune.bench.profiling import Document, Profile
from flashtune.bench.whole_calls import attention_call, explained
from flashtune.core.problems import reference
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch.dtypes import TORCH_DTYPES
from flashtune.core.records.results import Measurement
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.core.system.secrets import command_line
from flashtune.tuner.machine import provenance
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.timing.stopwatch import Run, Stopwatch
from flashtune.tuner.verify.inputs import Inputs, make_inputs

DROPOUT = 0.1
SAMPLED_ROWS = 512
"""Number of evenly spaced query rows of the first head that errors are computed over."""
LEAST_N, REACH_N = 64, 8192
"""Smallest N of latency measurements, and the N they reach at least."""
LONGEST_LAUNCH_S = 0.1
"""Seconds of a launch, estimated at a third of the target's peak, above which larger N are left out."""
FITTED_POINTS = 3
"""Number of the largest N that an exponent is fitted to: at small N launch overhead and idle SMs dominate."""
BUDGET_S, POINT_BUDGET_S = 2.0, 0.7
"""Seconds of each measurement, and of each N of the latencies."""


class Bench:
    """The current GPU, whose L2 holds `l2_bytes`: inputs, times by CUDA events, and free memory."""

    def __init__(self, l2_bytes: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.device)
        self._stopwatch = Stopwatch(self.device, l2_bytes)

    def free_bytes(self) -> int:
        """Free memory, without the allocator's cache."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def race(self, runs: Mapping[str, Run], *, budget_s: float = BUDGET_S) -> dict[str, Measurement]:
        """Interleaved measurements by name."""
        return dict(zip(runs, self._stopwatch.race(list(runs.values()), budget_s=budget_s), strict=True))

    def inputs(self, problem: Problem) -> Inputs:
        """Operands of a problem on the device."""
        return make_inputs(problem, device=self.device, seed=0)

    def matrix(self, problem: Problem, rows: int, columns: int) -> torch.Tensor:
        """Random matrix (rows, columns) of the problem's dtype, scaled so that products keep their inputs' magnitude."""
        generator = torch.Generator(self.device).manual_seed(1)
        x = torch.randn(rows, columns, generator=generator, device=self.device, dtype=TORCH_DTYPES[problem.dtype])
        return x.mul_(rows**-0.5)

    def fits(self, problem: Problem, *, copies_of_s: float) -> bool:
        """True if so many matrices of scores fit into the free memory beside the operands."""
        size = tensor_bytes(problem)
        return copies_of_s * size["S"] + 4 * size["Q"] < 0.9 * self.free_bytes()


def measure(profile: Profile, bench: Bench) -> Document:
    """The profile's document with all measurements; those that don't fit into memory are named in `skipped`.

    Kinds of attention are `eager` (PyTorch's operations one by one), `framework` (its fused attention) and `tuned` (the kernel that
    flashtune.dispatch chooses). Raises EnvironmentProblem where not even Q, K, V and O fit.
    """
    try:
        with torch.no_grad():
            return _measure(profile, bench)
    except torch.OutOfMemoryError as error:
        raise EnvironmentProblem(f"{bench.name} ran out of memory while measuring: give a smaller --n, --b or --h") from error


def _measure(profile: Profile, bench: Bench) -> Document:
    skipped: list[str] = []
    problem, found = profile.problem, profile.document()
    steps = _steps(problem, bench, skipped)
    kinds = _kinds(problem, bench, skipped)
    scaling = _scaling(profile, bench, skipped)
    layer = _layer(problem, bench, {kind["name"]: kind["time_us"] for kind in kinds}, skipped)
    runs = _strategies(profile, bench, skipped)
    served = explained(bench.inputs(problem))
    measured = {
        "device": bench.name,
        "provenance": provenance(command=command_line(["flashtune", *sys.argv[1:]]), seed=0, measured=True).as_json(),
        "steps": steps,
        "attention": kinds,
        "served_by": f"{served.template} {served.variant_id}: {served.reason}" if served.template else f"PyTorch: {served.reason}",
        "scaling": scaling,
        "layer": layer,
        "skipped": skipped,
    }
    strategies = [strategy | runs.get(strategy["name"], {}) for strategy in found["strategies"]]
    return found | {"measured": measured, "strategies": strategies}


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Standard pipeline without dropout: softmax(q k^T / sqrt(D) + mask) v, (B, H, N_q, D_v). Shared key heads are expanded in memory."""
    k, v = (_written_out(x, q.shape[1]) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-2, -1)).mul_(q.shape[-1] ** -0.5)
    if mask is not None:
        scores.add_(mask)
    return torch.matmul(torch.softmax(scores, -1), v)


def _written_out(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _eager_call(inputs: Inputs) -> Callable[[], torch.Tensor]:
    mask = _mask(inputs) if inputs.problem.features.causal else None
    return lambda: eager(inputs.q, inputs.k, inputs.v, mask)


def _mask(inputs: Inputs) -> torch.Tensor:
    """Additive mask (N_q, N_kv) of the problem's band."""
    p = inputs.problem
    hidden = ~reference.visible(p.band, p.n_q, p.n_kv, inputs.q.device)
    return torch.zeros_like(hidden, dtype=inputs.q.dtype).masked_fill_(hidden, -math.inf)


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
        if at_length(problem, larger).flops() / (profile.roofline.peak_tflops * 1e12 / 3) > LONGEST_LAUNCH_S:
            break
        found.append(larger)
    least = LEAST_N if problem.n_q == problem.n_kv else max(LEAST_N, problem.n_q)
    return [n for n in found if n >= least or n == problem.n_kv]


def exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """Exponent p of time ~ N^p from (N, time) in ascending N, fitted by least squares to logarithms at the largest `FITTED_POINTS`."""
    if len(points) < FITTED_POINTS:
        return None
    sizes, times = ([math.log(number) for number in numbers] for numbers in zip(*points[-FITTED_POINTS:], strict=True))
    return statistics.linear_regression(sizes, times).slope


def _times(m: Measurement) -> Document:
    return {"time_us": m.median_us, "q10_us": m.q10_us, "q90_us": m.q90_us, "samples": m.samples}


def _timed(name: str, step: Step, m: Measurement) -> Document:
    """Time of a step with the rates that it reached, in 10^12 matrix operations and counted bytes per second."""
    return {"name": name, **_times(m), "tflops": step.matmul_flops / m.median_us / 1e6, "tbs": step.bytes / m.median_us / 1e6}


def _steps(problem: Problem, bench: Bench, skipped: list[str]) -> list[Document]:
    """Measurements of each step of the standard pipeline by itself, with S and P in memory; none of packed sequences."""
    if problem.lengths is not None:
        skipped.append("the standard pipeline and its steps: packed sequences would have one each")
        return []
    if not bench.fits(problem, copies_of_s=5.0):
        skipped.append("the steps of the standard pipeline: S and its copies don't fit into the GPU's memory")
        return []
    inputs = bench.inputs(problem)
    q, (k, v) = inputs.q, (_written_out(x, problem.heads) for x in (inputs.k, inputs.v))
    mask, scale = _mask(inputs), problem.d**-0.5
    scores = torch.matmul(q, k.transpose(-2, -1))
    weights = torch.softmax(scores, -1)
    runs: dict[str, Run] = {
        "qk": lambda: torch.matmul(q, k.transpose(-2, -1)),
        "scale_mask": lambda: torch.add(mask, scores, alpha=scale),
        "softmax": lambda: torch.softmax(scores, -1),
        "dropout": lambda: F.dropout(weights, DROPOUT, training=True),
        "pv": lambda: torch.matmul(weights, v),
    }
    times = bench.race(runs)
    whole_us = math.fsum(time.median_us for time in times.values())
    counted = {step.name: step for step in standard_steps(problem, "separate")}
    return [{**_timed(name, counted[name], time), "share": time.median_us / whole_us} for name, time in times.items()]


def _attentions(problem: Problem, bench: Bench) -> dict[str, Run]:
    inputs = bench.inputs(problem)
    eager_fits = problem.lengths is None and bench.fits(problem, copies_of_s=2.5)
    runs: dict[str, Run] = {"eager": _eager_call(inputs)} if eager_fits else {}
    if (framework := pytorch_call(inputs)) is not None:
        runs["framework"] = framework
    return {**runs, "tuned": attention_call(inputs)}


def _kinds(problem: Problem, bench: Bench, skipped: list[str]) -> list[Document]:
    """Measurements of whole attentions at the profiled shape: eager (where S fits), PyTorch's, tuned."""
    runs = _attentions(problem, bench)
    if "eager" not in runs and problem.lengths is None:
        skipped.append("eager attention: S doesn't fit into the GPU's memory")
    # Bytes of the eager pipeline measured here: no dropout, and a separate scaling pass.
    standard = total("eager", tuple(step for step in standard_steps(problem, "separate") if step.name != "dropout"))
    fused = fused_step(problem)
    return [_timed(name, standard if name == "eager" else fused, time) for name, time in bench.race(runs).items()]


def _scaling(profile: Profile, bench: Bench, skipped: list[str]) -> list[Document]:
    """Latency against N of every kind of attention and of the layer's projections."""
    points: dict[str, list[tuple[int, float]]] = {"eager": [], "framework": [], "tuned": [], "projections": []}
    weights = _weights(profile.problem, bench)
    if weights is None:
        skipped.append("the projections' latency: their weights don't fit into the GPU's memory")
    for n in scaling_grid(profile):
        problem = at_length(profile.problem, n)
        # Q, K, V, two outputs, and the projections' input and outputs.
        if 12 * tensor_bytes(problem)["Q"] > bench.free_bytes():
            skipped.append(f"latency at N={n}: Q, K, V and O don't fit into the GPU's memory")
            continue
        runs = _attentions(problem, bench)
        if weights is not None:
            runs["projections"] = _projections(_tokens(problem, bench), weights)
        for name, time in bench.race(runs, budget_s=POINT_BUDGET_S).items():
            points[name].append((n, time.median_us))
    return [
        {"name": name, "points": [{"n": n, "time_us": us} for n, us in found], "exponent": exponent(found)}
        for name, found in points.items()
        if found
    ]


def _weights(problem: Problem, bench: Bench) -> list[torch.Tensor] | None:
    """Weights of a layer: Q, K and V (E, E + 2 Hkv D), output (E, E), MLP (E, 4E) and (4E, E); None if they don't fit into memory."""
    width = problem.heads * problem.d
    if 12 * width * width * ITEMSIZE[problem.dtype] > bench.free_bytes() / 2:
        return None
    shapes = ((width, width + 2 * problem.kv_heads * problem.d), (width, width), (width, 4 * width), (4 * width, width))
    return [bench.matrix(problem, *shape) for shape in shapes]


def _tokens(problem: Problem, bench: Bench) -> torch.Tensor:
    return bench.matrix(problem, problem.batch * problem.n_q, problem.heads * problem.d)


def _projections(tokens: torch.Tensor, weights: list[torch.Tensor]) -> Run:
    """Function that runs the layer's four projections on all tokens: (B N, E) to Q, K, V, and the output's."""
    return lambda: (torch.matmul(tokens, weights[0]), torch.matmul(tokens, weights[1]))


def _layer(problem: Problem, bench: Bench, attention_us: dict[str, float], skipped: list[str]) -> Document | None:
    """Attention's share of a transformer layer of width H D: projections and MLP measured here, attention times passed in."""
    weights = _weights(problem, bench)
    if weights is None or 8 * tensor_bytes(problem)["Q"] > bench.free_bytes():
        skipped.append("the transformer layer: its weights or activations don't fit into the GPU's memory")
        return None
    x, (_, _, up, down) = _tokens(problem, bench), weights
    runs: dict[str, Run] = {
        "projections_us": _projections(x, weights),
        "mlp_us": lambda: torch.matmul(F.gelu(torch.matmul(x, up)), down),
    }
    others = {name: time.median_us for name, time in bench.race(runs).items()}
    # Norms and residuals are not counted.
    attention = {kind: {"time_us": us, "share": us / (us + sum(others.values()))} for kind, us in attention_us.items()}
    return {**others, "attention": attention}


def _strategies(profile: Profile, bench: Bench, skipped: list[str]) -> dict[str, Document]:
    """Time of each strategy, and its error ||x - exact|| / ||exact|| against float64 attention over sampled rows of the first head."""
    problem, inputs = profile.problem, bench.inputs(profile.problem)
    q, k, v = inputs.q, inputs.k, inputs.v
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "standard": _eager_call(inputs),
        "fused": attention_call(inputs),
        "window": attention_call(bench.inputs(windowed(problem, profile.window))),
    }
    if "low_rank" in {strategy.name for strategy in profile.strategies}:
        project, gqa = averaging(profile.rank, problem.n_kv, k), problem.gqa_ratio > 1
        runs["low_rank"] = lambda: dispatch.attention(q, torch.matmul(project, k), torch.matmul(project, v), enable_gqa=gqa)
    if problem.lengths is not None:
        del runs["standard"]
    elif not bench.fits(problem, copies_of_s=2.5):
        skipped.append("the standard strategy: S doesn't fit into the GPU's memory")
        del runs["standard"]
    sampled, exact = _sampled(inputs)
    errors = {name: float((run()[sampled].double() - exact).norm() / exact.norm()) for name, run in runs.items()}
    return {name: {**_times(time), "relative_error": errors[name]} for name, time in bench.race(runs).items()}


def _sampled(inputs: Inputs) -> tuple[Any, torch.Tensor]:
    """Index of sampled rows of an output's first head, of packed sequences in the longest, and exact attention there (rows, D_v)."""
    p, places = inputs.problem, inputs.sequences or ((inputs.problem.n_q, inputs.problem.n_kv),)
    longest = max(range(len(places)), key=lambda index: places[index][0])
    start, first = (sum(lengths[side] for lengths in places[:longest]) for side in (0, 1))
    n_q, n_kv = places[longest]
    rows = torch.linspace(0, n_q - 1, min(n_q, SAMPLED_ROWS), device=inputs.q.device).long()
    seen = None
    if p.features.causal:
        seen = (torch.arange(n_kv, device=inputs.q.device) <= rows[:, None] + (n_kv - n_q))[None, None]
    k, v = (x[:1, :1, first : first + n_kv] for x in (inputs.k, inputs.v))
    exact, _ = reference.attention(inputs.q[:1, :1, start + rows], k, v, scale=p.d**-0.5, mask=seen)
    return ((start + rows, 0) if inputs.sequences else (0, 0, rows)), exact[0, 0]
