"""Peers of a forward cell, run on the GPU in child processes: inputs, everything that can compute them, errors and times."""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.shared import cudnn_fp8, flash_attention_4
from benchmarks.shared.cells import CUDNN_FP8, RANDOM, Cell
from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.problems.tolerances import Tolerance, tolerance
from flashtune.core.records.results import Measurement
from flashtune.core.system.errors import first_line
from flashtune.templates import family
from flashtune.templates.rendering import variant_of
from flashtune.tuner.children.start import withdraw
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.timing.stopwatch import Run, Stopwatch
from flashtune.tuner.verify.correctness import Expected, everywhere, oracle, places
from flashtune.tuner.verify.distributions import redistribute
from flashtune.tuner.verify.inputs import Inputs, make_inputs

OURS = "flashtune"
OWN = "own search"
"""Name of the kernel that a search of the cell's own found."""

SOFTCAP = 30.0

COPY_BYTES = 1 << 30
"""Bytes that the device copy reads, and writes again: far more than any cache holds."""

NOT_EXPRESSED = "can't express it"
"""Reason of a peer that lacks a feature."""

NO_REFERENCE = ("copy", RANDOM)
"""Peers whose output isn't the cell's."""

WARM_UP = 100
"""Calls on adversarial scores before they are timed."""

DRAWS = 3
"""Number of samples of slices for adversarial scores, whose errors differ more from row to row."""

MUCH, MORE_DRAWS = 1.8, 12
"""Ratio of our largest error to a peer's from which on more samples decide, and their number: few rows' largest error is chance."""

MANY_ROWS = 4096
"""Up to so many rows all are compared with the oracle; beyond it, slices of four heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Error of an output against the oracle: at most, in the norm, and at most in units of the tolerance (up to 1 passes).

    `lse` is the largest error of the LSE over 1 + |LSE|, where it was computed.
    """

    max_abs: float
    relative_norm: float
    tolerances: float
    lse: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Kernel that serves our call of a cell (see dispatch.Explanation), errors of all that ran, and reasons of the others in `notes`."""

    kind: str = ""
    template: str | None = None
    variant: str | None = None
    config: Config | None = None
    reason: str = ""
    twin: str | None = None
    errors: dict[str, Error] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Inputs of a cell, bf16 ones of the same values that PyTorch gets in place of fp8, and the keywords of our call.

    `normal` are the inputs before their scores were given another distribution.
    """

    inputs: Inputs
    framework: Inputs
    words: dict[str, Any]
    normal: Inputs

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v."""
        return self.inputs.q, self.inputs.k, self.inputs.v

    def ours(self) -> torch.Tensor:
        """Our call."""
        found: torch.Tensor = dispatch.attention(*self.tensors, **self.words)
        return found

    def with_lse(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Our call's output and LSE."""
        found: tuple[torch.Tensor, torch.Tensor] = dispatch.attention(*self.tensors, **self.words, return_lse=True)
        return found


def start() -> None:
    """Prepare a child process: silent, killable, and compiling by itself (the parent already runs several)."""
    withdraw()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    flash_attention_4.keep_compiled()
    warnings.simplefilter("ignore")


def data_of(cell: Cell, device: torch.device | str, seed: int) -> Data:
    """Random inputs of a cell on `device`, with its distribution of scores."""
    inputs = normal = make_inputs(cell.problem, device=device, seed=seed)
    if inputs.parameters.descale is not None:
        # cuDNN has one factor for all heads.
        q, k, v = (factor[:1, :1].repeat(factor.shape) for factor in inputs.parameters.descale)
        inputs = normal = replace(inputs, parameters=replace(inputs.parameters, descale=(q, k, v)))
    if cell.scores:
        inputs = normal = _padded(inputs) if cell.problem.features.mask == "bool" else inputs
        inputs = replace(normal, operands=normal.operands | {name: normal.operands[name].clone() for name in ("q", "k")})
        redistribute(inputs, cell.scores)
    f, mask = cell.problem.features, inputs.parameters.mask
    if f.softcap:
        inputs = replace(inputs, parameters=replace(inputs.parameters, softcap=SOFTCAP))
    words = words_of(inputs)
    if mask is not None:
        # As small as it is: expanding it is the callee's business.
        words["attn_mask"] = mask[:1, :1, :1] if cell.scores else mask[0, 0] if f.mask == "bool" else mask[:1]
    framework = inputs if inputs.parameters.descale is None else _widened(inputs)
    return Data(inputs=inputs, framework=framework, words=words, normal=normal)


def words_of(inputs: Inputs) -> dict[str, Any]:
    """The keywords of a call of ours with these inputs."""
    f, given = inputs.problem.features, inputs.parameters
    words: dict[str, Any] = {"is_causal": f.causal, "enable_gqa": inputs.problem.gqa_ratio > 1, "causal_alignment": f.alignment}
    if f.window is not None:
        words["window"] = f.window
    if given.mask is not None:
        words["attn_mask"] = given.mask
        if f.causal:
            # As in torch, `is_causal` stands alone.
            words |= {"is_causal": False, "window": (None if f.window is None else f.window[0], 0)}
    if f.softcap:
        words["softcap"] = given.softcap
    if f.dropout:
        words |= {"dropout_p": given.dropout_p, "seed": given.seed}
    return words | given.per_head()


def _padded(inputs: Inputs) -> Inputs:
    """With a mask that hides the second half of the keys from all rows, as padding does."""
    p = inputs.problem
    seen = torch.arange(p.n_kv, device=inputs.q.device) < p.n_kv // 2
    return replace(inputs, parameters=replace(inputs.parameters, mask=seen.expand(p.batch, p.heads, p.n_q, p.n_kv)))


def _widened(inputs: Inputs) -> Inputs:
    """Values of fp8 inputs, rounded to bf16."""
    factors = dict(zip("qkv", inputs.parameters.descale or (), strict=True))
    wide = {name: (inputs.operands[name].float() * factor[..., None, None]).bfloat16() for name, factor in factors.items()}
    problem, parameters = replace(inputs.problem, dtype="bf16"), replace(inputs.parameters, descale=None)
    return Inputs(problem=problem, operands=inputs.operands | wide, parameters=parameters)


def peers_of(cell: Cell, data: Data) -> tuple[dict[str, Run], dict[str, str]]:
    """Peers that ran once, by name, and the reasons of those that did not."""
    return runnable({name: partial(_peer, name, cell, data) for name in cell.peers})


def runnable(makers: Mapping[str, Callable[[], Run | None]]) -> tuple[dict[str, Run], dict[str, str]]:
    """Calls that ran once, by name, and the reasons of those that did not; a CUDA error ends the process."""
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    for name, make in makers.items():
        try:
            run = make()
            if run is None:
                notes[name] = NOT_EXPRESSED
                continue
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            runs[name] = run
        except Exception as error:
            leave_if_sticky(error)
            notes[name] = first_line(error)
    return runs, notes


def _peer(name: str, cell: Cell, data: Data) -> Run | None:
    inputs = data.framework
    if name == "flex":
        return flex_call(cell, data)
    if name == "fa4":
        words = flash_attention_4.words_of(inputs.problem, inputs.parameters)
        turned = [x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v)]
        return None if words is None else lambda: flash_attention_4.attend(*turned, words).transpose(1, 2)
    if name == "default":
        return pytorch_call(inputs)
    if name == "copy":
        source = torch.empty(COPY_BYTES, dtype=torch.int8, device=inputs.q.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    if name == RANDOM:
        normal = data.normal
        return lambda: as_ever(lambda: dispatch.attention(normal.q, normal.k, normal.v, **data.words))
    if name == "ours in bf16":
        words = {"is_causal": cell.problem.features.causal, "enable_gqa": cell.problem.gqa_ratio > 1}
        return lambda: dispatch.attention(inputs.q, inputs.k, inputs.v, **words)
    if name == CUDNN_FP8:
        return cudnn_fp8.call(data.inputs)
    return pytorch_call(inputs, name)


def as_ever(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A call by its plan's own kernel, never its fallback: in torch's deterministic mode, without the filling of new tensors."""
    fills, before = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch._C._set_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch._C._set_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def flex_call(cell: Cell, data: Data) -> Run | None:
    """FlexAttention, compiled for this cell alone; None where it can't express it. The mask's blocks are found outside of what is timed."""
    p = cell.problem
    if p.features.dropout:
        return None
    score_mod, mask_mod = _score_mod(cell, data), _mask_mod(cell, data)
    q, k, v = data.tensors
    blocks = None if mask_mod is None else create_block_mask(mask_mod, None, None, p.n_q, p.n_kv, device=q.device)
    # Kernels compiled for other cells count towards a limit of Dynamo, past which nothing is compiled any more.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=blocks, scale=data.inputs.parameters.scale, enable_gqa=p.gqa_ratio > 1)


def _score_mod(cell: Cell, data: Data) -> Callable[..., torch.Tensor] | None:
    """FlexAttention's `score_mod` of a cell."""
    if data.inputs.parameters.slopes is not None:
        slopes = data.inputs.parameters.slopes[0]
        return lambda score, b, h, i, j: score - slopes[h] * (i - j)
    if cell.problem.features.softcap:
        return lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)
    if cell.problem.features.mask == "bias":
        bias = data.inputs.keywords["mask"][0]
        return lambda score, b, h, i, j: score + bias[h, i, j]
    return None


def _mask_mod(cell: Cell, data: Data) -> Callable[..., torch.Tensor] | None:
    """FlexAttention's `mask_mod` of a cell."""
    if cell.problem.features.mask == "bool":
        mask = data.inputs.keywords["mask"][0, 0]
        return lambda b, h, i, j: mask[i, j]
    band = cell.problem.band
    if band.left is not None:
        left = band.left
        return lambda b, h, i, j: (j <= i) & (i - j <= left)
    return None if band.right is None else lambda b, h, i, j: j <= i


def cudnn_lse(inputs: Inputs) -> torch.Tensor:
    """cuDNN's LSE (B, H, N_q), float32, by the operation that torch's attention calls; raises where it has none for these inputs."""
    mask, causal = inputs.parameters.mask, inputs.problem.features.causal
    bias = None
    if mask is not None:
        # As torch writes a mask out, and it takes no mask beside a diagonal.
        seen = mask[:1, :1] & reference.visible(inputs.parameters.band, inputs.problem.n_q, inputs.problem.n_kv, mask.device)
        bias = torch.zeros(seen.shape, dtype=inputs.q.dtype, device=mask.device).masked_fill_(~seen, float("-inf"))
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    found = attend(inputs.q, inputs.k, inputs.v, bias, True, is_causal=causal and mask is None, scale=inputs.parameters.scale)
    lse: torch.Tensor = found[1].reshape(inputs.q.shape[:3])
    return lse


def error_of(out: torch.Tensor, expected: list[Expected], bounds: Tolerance, lse: torch.Tensor | None = None) -> Error:
    """The error over the oracle's rows; those with nothing to attend to don't count, since backends differ there."""
    pairs, gaps = [], []
    for want in expected:
        place, right = want.place, want.values["lse"]
        seen = torch.isfinite(right)
        pairs.append((out[place.batch, place.head, place.queries][seen].double(), want.values["out"][seen]))
        if lse is not None:
            gaps.append(((lse[place.batch, place.head, place.queries].double() - right).abs() / (1 + right.abs()))[seen])
    found, wanted = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    gap = (found - wanted).abs()
    return Error(
        max_abs=float(gap.max()),
        relative_norm=float(gap.norm() / wanted.norm()),
        tolerances=float(
            torch.maximum((gap / (bounds.atol + bounds.rtol * wanted.abs())).max(), gap.norm() / wanted.norm() / bounds.relative_norm)
        ),
        lse=float(torch.cat(gaps).max()) if gaps else None,
    )


def _errors(
    cell: Cell, data: Data, outs: Mapping[str, torch.Tensor], lses: Mapping[str, torch.Tensor], seed: int, draws: int
) -> dict[str, Error]:
    """All outputs' errors on so many draws of slices; on all rows of small problems."""
    p = cell.problem
    some = [place for draw in range(draws) for place in places(p, seed + draw)]
    expected = oracle(data.inputs, everywhere(p) if p.batch * p.heads * p.n_q <= MANY_ROWS else some)
    return {name: error_of(found, expected, tolerance(p.spec()), lses.get(name)) for name, found in outs.items()}


def check_cell(cell: Cell, device: str, seed: int) -> Checked:
    """Run our kernel and the peers once (which compiles them) and compare each with the oracle."""
    data = data_of(cell, device, seed)
    lses: dict[str, torch.Tensor] = {}
    try:
        if cell.scores:
            out, lses[OURS] = data.with_lse()
        else:
            out = data.ours()
    except Exception as error:
        leave_if_sticky(error)
        raise
    # After the call: a kernel that failed has been replaced by then.
    chosen = dispatch.explain(*data.tensors, **data.words)
    p = cell.problem
    runs, notes = peers_of(cell, data)
    if cell.scores and "cudnn" in runs:
        try:
            lses["cudnn"] = cudnn_lse(data.inputs)
        except Exception as error:
            leave_if_sticky(error)
            notes["cudnn's LSE"] = first_line(error)
    outs: dict[str, Any] = {OURS: out}
    if not p.features.dropout and p.dtype != "fp8":
        # Dropout's pairs and fp8's roundings are not PyTorch's.
        outs |= {name: run() for name, run in runs.items() if name not in NO_REFERENCE}
    if CUDNN_FP8 in runs:
        outs[CUDNN_FP8] = runs[CUDNN_FP8]().float() / cudnn_fp8.OUTPUTS
    errors = _errors(cell, data, outs, lses, seed, DRAWS if cell.scores else 1)
    if cell.scores and any(errors[OURS].max_abs > MUCH * error.max_abs for error in errors.values()):
        errors = _errors(cell, data, outs, lses, seed, MORE_DRAWS)
    return Checked(
        kind=chosen.kind,
        template=chosen.template,
        variant=chosen.variant_id,
        config=chosen.config,
        reason=chosen.reason,
        twin=_twin_of(chosen, cell.problem),
        errors=errors,
        notes=notes,
    )


def _twin_of(chosen: dispatch.Explanation, problem: Problem) -> str | None:
    if chosen.template is None or chosen.twin is None:
        return None
    return variant_of(family(chosen.template), problem.spec(), chosen.twin).id


def time_cell(cell: Cell, device: str, seed: int, seconds: float) -> dict[str, Measurement]:
    """Our kernel and the peers, interleaved."""
    data = data_of(cell, device, seed)
    try:
        runs = {OURS: data.ours, **peers_of(cell, data)[0]}
        if cell.scores and device != "cpu":
            # Later calls of a model are timed, after which the plan may have gone over to its fallback.
            dispatch.reload()
            for _ in range(WARM_UP):
                data.ours()
            torch.cuda.synchronize()
        timed = stopwatch(device).race(list(runs.values()), budget_s=seconds, least=11)
    except Exception as error:
        leave_if_sticky(error)
        raise
    return dict(zip(runs, timed, strict=True))


def stopwatch(device: str) -> Stopwatch:
    """A stopwatch whose flush covers the device's L2."""
    return Stopwatch(torch.device(device), torch.cuda.get_device_properties(device).L2_cache_size)


def leave_if_sticky(error: Exception) -> None:
    """After a CUDA error nothing works in a process any more: end it, and the next cell gets a fresh one."""
    if "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError":
        os._exit(1)
