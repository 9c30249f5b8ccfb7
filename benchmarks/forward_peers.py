"""What forward.py runs on the GPU, in child processes: a cell's inputs, everything that can compute it, its errors and its times."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from forward_cells import Cell
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashtune import dispatch
from flashtune.core import reference
from flashtune.core.problem import Features
from flashtune.core.results import Measurement
from flashtune.core.tolerances import TOLERANCES, Tolerance
from flashtune.tuner import tasks
from flashtune.tuner.framework import framework_call
from flashtune.tuner.inputs import Inputs, make_inputs
from flashtune.tuner.measure import Run, Stopwatch
from flashtune.tuner.verify import Expected, everywhere, oracle, places

OURS = "flashtune"

SOFTCAP = 30.0

COPY_BYTES = 1 << 30
"""Bytes that the device copy reads, and writes again: far more than any cache holds."""

FP8 = torch.float8_e4m3fn

MANY_ROWS = 4096
"""Up to so many rows all are compared with the oracle; beyond it, slices of four heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """How far an output is from the oracle: at most, in the norm, and at most in units of the tolerance (up to 1 passes)."""

    max_abs: float
    relative_norm: float
    tolerances: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What serves our call of a cell (see dispatch.Explanation), the errors of all that ran, and why others didn't.

    `skipped` says why there is nothing of ours to time (empty when there is).
    """

    kind: str = ""
    template: str | None = None
    variant: str | None = None
    reason: str = ""
    errors: dict[str, Error] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A cell's inputs: as the oracle sees them, as the framework takes them, and as the arguments of dispatch.attention."""

    truth: Inputs
    framework: Inputs
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    words: dict[str, Any]
    slopes: torch.Tensor | None = None

    def ours(self) -> torch.Tensor:
        """Our call."""
        found: torch.Tensor = dispatch.attention(*self.tensors, **self.words)
        return found


def start() -> None:
    """Prepare a child process: silent, killable, and compiling by itself (the parent already runs several)."""
    tasks.withdraw()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    warnings.simplefilter("ignore")


def data_of(cell: Cell, device: torch.device | str, seed: int) -> Data:
    """Random inputs of a cell on `device`."""
    inputs = make_inputs(cell.problem, device=device, seed=seed)
    p, f, mask = cell.problem, cell.problem.features, inputs.keywords["mask"]
    if f.softcap:
        inputs = replace(inputs, keywords={**inputs.keywords, "softcap": SOFTCAP})
    words: dict[str, Any] = {"is_causal": f.causal, "enable_gqa": p.gqa_ratio > 1}
    if f.window is not None:
        words["window"] = f.window
    if mask is not None:
        # As small as it is: expanding it is the callee's business.
        words["attn_mask"] = mask[0, 0] if f.mask == "bool" else mask[:1]
    if f.softcap:
        words["softcap"] = SOFTCAP
    if f.dropout:
        words |= {"dropout_p": inputs.keywords["dropout_p"], "seed": seed}
    if cell.case == "alibi":
        return _with_alibi(inputs, words)
    if cell.group == "fp8":
        return _in_fp8(inputs, words)
    return Data(truth=inputs, framework=inputs, tensors=(inputs.q, inputs.k, inputs.v), words=words)


def _with_alibi(inputs: Inputs, words: dict[str, Any]) -> Data:
    """ALiBi with the slopes of Press et al. (2022); the framework gets it and the causal band as one bias (1, H, N, N)."""
    p, device = inputs.problem, inputs.q.device
    slopes = 2.0 ** (-8.0 * torch.arange(1, p.heads + 1, device=device) / p.heads)
    rows = torch.arange(p.n_q, device=device)[:, None]
    bias = -slopes[:, None, None] * (rows - torch.arange(p.n_kv, device=device)).abs()  # [H, N_q, N_kv]
    shape = (p.batch, p.heads, p.n_q, p.n_kv)
    banded = bias.to(inputs.q.dtype).masked_fill_(~reference.band(p.n_q, p.n_kv, left=None, right=0, diagonal=0, device=device), -torch.inf)
    return Data(
        truth=replace(inputs, keywords={**inputs.keywords, "mask": bias.expand(shape)}),
        framework=replace(
            inputs, problem=replace(p, features=Features(mask="bias")), keywords={**inputs.keywords, "mask": banded.expand(shape)}
        ),
        tensors=(inputs.q, inputs.k, inputs.v),
        words={**words, "alibi_slopes": slopes},
        slopes=slopes,
    )


def _in_fp8(inputs: Inputs, words: dict[str, Any]) -> Data:
    """e4m3 with a factor for each head of each batch; the oracle sees what the rounded values stand for, the framework bf16."""
    tensors, truth = [], []
    for x in (inputs.q, inputs.k, inputs.v):
        factor = x.float().abs().amax((-2, -1)) / torch.finfo(FP8).max  # [B, H]
        tensors.append((x.float() / factor[..., None, None]).to(FP8))
        truth.append(tensors[-1].float() * factor[..., None, None])
        words = {**words, f"{'qkv'[len(truth) - 1]}_descale": factor}
    q, k, v = tensors
    return Data(truth=replace(inputs, q=truth[0], k=truth[1], v=truth[2]), framework=inputs, tensors=(q, k, v), words=words)


def peers_of(cell: Cell, data: Data) -> tuple[dict[str, Run], dict[str, str]]:
    """The peers that ran once, by name, and why the others did not."""
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    for name in cell.peers:
        try:
            run = _peer(name, cell, data)
            if run is None:
                notes[name] = "can't express it"
                continue
            run()
            runs[name] = run
        except Exception as error:
            _leave_if_sticky(error)
            notes[name] = tasks.one_line(error)
    return runs, notes


def _peer(name: str, cell: Cell, data: Data) -> Run | None:
    inputs = data.framework
    if name == "flex":
        return flex_call(cell, data)
    if name == "copy":
        source = torch.empty(COPY_BYTES, dtype=torch.int8, device=inputs.q.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    if name == "ours in bf16":
        return lambda: dispatch.attention(inputs.q, inputs.k, inputs.v, is_causal=cell.problem.features.causal)
    return framework_call(inputs, name)


def flex_call(cell: Cell, data: Data) -> Run | None:
    """FlexAttention, compiled for this cell alone; None where it can't express it. The mask's blocks are found outside of what is timed."""
    p, words = cell.problem, data.truth.keywords
    if p.features.dropout:
        return None
    score_mod, mask_mod = _score_mod(cell, data), _mask_mod(cell, data)
    q, k, v = data.tensors
    blocks = None if mask_mod is None else create_block_mask(mask_mod, None, None, p.n_q, p.n_kv, device=q.device)
    # What was compiled for other cells counts towards a limit, past which nothing is compiled any more.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=blocks, scale=words["scale"], enable_gqa=p.gqa_ratio > 1)


def _score_mod(cell: Cell, data: Data) -> Callable[..., torch.Tensor] | None:
    """What a cell does to a score, as FlexAttention takes it."""
    if data.slopes is not None:
        slopes = data.slopes
        return lambda score, b, h, i, j: score - slopes[h] * (i - j)
    if cell.problem.features.softcap:
        return lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)
    if cell.problem.features.mask == "bias":
        bias = data.truth.keywords["mask"][0]
        return lambda score, b, h, i, j: score + bias[h, i, j]
    return None


def _mask_mod(cell: Cell, data: Data) -> Callable[..., torch.Tensor] | None:
    """Which pairs a cell keeps, as FlexAttention takes it."""
    if cell.problem.features.mask == "bool":
        mask = data.truth.keywords["mask"][0, 0]
        return lambda b, h, i, j: mask[i, j]
    left, right = cell.problem.features.sides
    if left is not None:
        return lambda b, h, i, j: (j <= i) & (i - j <= left)
    return None if right is None else lambda b, h, i, j: j <= i


def error_of(out: torch.Tensor, expected: list[Expected], bounds: Tolerance) -> Error:
    """The error over the oracle's rows; those with nothing to attend to don't count, since backends differ there."""
    pairs = []
    for want in expected:
        seen = torch.isfinite(want.lse)
        pairs.append((out[want.batch, want.head, want.first : want.first + len(want.lse)][seen].double(), want.out[seen]))
    found, wanted = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    gap = (found - wanted).abs()
    return Error(
        max_abs=float(gap.max()),
        relative_norm=float(gap.norm() / wanted.norm()),
        tolerances=float(
            torch.maximum((gap / (bounds.atol + bounds.rtol * wanted.abs())).max(), gap.norm() / wanted.norm() / bounds.relative_norm)
        ),
    )


def check_cell(cell: Cell, device: str, seed: int) -> Checked:
    """Run our kernel and the peers once (which compiles them) and compare each with the oracle."""
    data = data_of(cell, device, seed)
    try:
        out = data.ours()
    except TypeError as error:
        return Checked(skipped=tasks.one_line(error))
    except Exception as error:
        _leave_if_sticky(error)
        raise
    # Asked afterwards: a kernel that failed has given way to another by then.
    chosen = dispatch.explain(*data.tensors, **data.words)
    p = cell.problem
    expected = oracle(data.truth, everywhere(p) if p.batch * p.heads * p.n_q <= MANY_ROWS else places(p, seed))
    errors = {OURS: error_of(out, expected, TOLERANCES["fp8" if cell.group == "fp8" else p.dtype])}
    runs, notes = peers_of(cell, data)
    if not p.features.dropout and cell.group != "fp8":
        # Dropout's masks and fp8's values are not the framework's.
        errors |= {name: error_of(run(), expected, TOLERANCES[p.dtype]) for name, run in runs.items() if name != "copy"}
    return Checked(
        kind=chosen.kind,
        template=chosen.template,
        variant=chosen.variant_id,
        reason=chosen.reason,
        errors=errors,
        notes=notes,
    )


def time_cell(cell: Cell, device: str, seed: int, seconds: float) -> dict[str, Measurement]:
    """Our kernel and the peers, interleaved."""
    data = data_of(cell, device, seed)
    try:
        runs = {OURS: data.ours, **peers_of(cell, data)[0]}
        timed = stopwatch(device).race(list(runs.values()), budget_s=seconds, least=11)
    except Exception as error:
        _leave_if_sticky(error)
        raise
    return dict(zip(runs, timed, strict=True))


def stopwatch(device: str) -> Stopwatch:
    """A stopwatch whose flush covers the device's L2."""
    return Stopwatch(torch.device(device), torch.cuda.get_device_properties(device).L2_cache_size)


def _leave_if_sticky(error: Exception) -> None:
    """After a CUDA error nothing works in a process any more: end it, and the next cell gets a fresh one."""
    if "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError":
        os._exit(1)
