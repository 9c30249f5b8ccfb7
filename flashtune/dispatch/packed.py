"""Packed sequences by kernels: the kernel that serves them, its launches forward and backward, and the reasons for the choice."""

import contextlib
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core import launching
from flashtune.core.band import Band
from flashtune.core.config import Config, Direction, Variant
from flashtune.core.launching import LoadedKernel
from flashtune.core.parameters import CallParameters
from flashtune.core.problem import MAX_HEAD_DIM, Features, Problem, next_power_of_two
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target
from flashtune.core.torch_dtypes import KERNEL_DTYPES
from flashtune.dispatch.launch import devices, kernels, prepared
from flashtune.dispatch.launch.program import Program
from flashtune.dispatch.plans.memory import placed
from flashtune.dispatch.resolve import layers
from flashtune.dispatch.resolve.code import code_of
from flashtune.dispatch.resolve.explanation import Explanation
from flashtune.dispatch.resolve.memo import Memo
from flashtune.templates import families
from flashtune.templates.family import Family

MOST_RECORDS = 64
"""Dense records that are looked at for one whose config fits packed sequences."""

MOST_PROGRAMS = 256
"""Prepared launches of a kernel, one for each number of rows; beyond it all are dropped."""


class Packed(NamedTuple):
    """Tensors of a call: query (T_q, Hq, D), key (T_k, Hkv, D), value (T_k, Hkv, D_v); (sequences + 1,) integers where each sequence's
    queries and keys begin and the last one's end; (sequences,) numbers of keys that are used of each, or None for all; slopes
    (sequences, Hq) and sinks (Hq,), or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_q: Tensor
    cu_k: Tensor
    used: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.cu_q.shape[0] - 1


class Numbers(NamedTuple):
    """Numbers of a call: bounds of the lengths, the scale, the sides of the band (-1: unbounded), its diagonal, and features."""

    max_q: int
    max_k: int
    scale: float
    left: int
    right: int
    bottom_right: bool
    softcap: float
    dropout_p: float
    tf32: bool
    deterministic: bool


def problem_of(packed: Packed, numbers: Numbers, direction: Direction = "fwd") -> Problem | None:
    """The problem of a call, with the bounds of its lengths rounded up to powers of two; None where no kernel takes such tensors."""
    query, key, value = packed[:3]
    dtype, d, d_v = KERNEL_DTYPES.get(query.dtype), query.shape[2], value.shape[2]
    if dtype is None or dtype == "fp8" or not (0 < d <= MAX_HEAD_DIM and 0 < d_v <= MAX_HEAD_DIM) or 0 in (packed.sequences, key.shape[1]):
        return None
    left, right = (None if side < 0 else side for side in (numbers.left, numbers.right))
    features = Features(
        causal=right == 0,
        window=(left, right),
        alignment="bottom_right" if numbers.bottom_right else "top_left",
        softcap=numbers.softcap > 0.0,
        dropout=numbers.dropout_p > 0.0,
        alibi=packed.slopes is not None,
        sinks=packed.sinks is not None,
        tf32=numbers.tf32 and dtype == "fp32",
        packed=True,
    )
    return Problem(
        batch=packed.sequences,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        n_q=next_power_of_two(numbers.max_q),
        n_kv=next_power_of_two(numbers.max_k),
        d=d,
        d_v=d_v,
        dtype=dtype,
        features=features,
        direction=direction,
    )


class Served(NamedTuple):
    """A kernel for packed sequences, the dense record whose config it has, or None with its family's default, and its prepared launches."""

    variant: Variant
    record: TuningRecord | None
    kernel: LoadedKernel
    programs: dict[Hashable, Program]


def served(packed: Packed, numbers: Numbers, direction: Direction = "fwd", memo: Memo | None = None) -> Served | None:
    """The best kernel that takes a call; None where none does."""
    memo, device = memo or layers.current(), packed.query.device
    problem = problem_of(packed, numbers, direction)
    if problem is None or not devices.TRITON or not (device.type == "cuda" or devices.INTERPRETING):
        return None
    if device.type == "cpu" and problem.dtype == "bf16":
        # Triton's interpreter can't multiply it.
        return None
    known = (problem, device)
    if known not in memo.packed:
        with memo.lock:
            memo.packed[known] = list(_loaded(memo, problem, device))
    found: list[Served] = memo.packed[known]
    return next((one for one in found if _takes(one, packed, numbers, direction)), None)


def _takes(found: Served, packed: Packed, numbers: Numbers, direction: Direction) -> bool:
    """True if a kernel takes these tensors, and repeats its bits where that is required."""
    varies = direction == "bwd" and not families()[found.variant.template].repeatable
    # Kernels whose bits vary know no unused keys either.
    if varies and (packed.used is not None or numbers.deterministic or torch.are_deterministic_algorithms_enabled()):
        return False
    return found.kernel.accepts(rows_last(packed.query), rows_last(packed.key), rows_last(packed.value), None)


def _loaded(memo: Memo, problem: Problem, device: torch.device) -> Iterator[Served]:
    """Kernels of a problem that can be loaded, best first."""
    target = devices.target_of(device)
    for family, config, record in _configs(memo, problem, target, tuned=device.type == "cuda"):
        variant = kernels.variant(family, problem.spec(), config)
        kernel, _, whole, _ = code_of(memo, family, variant, device, target)
        if kernel is not None:
            yield Served(variant, record, kernel if whole is None else whole(), {})


def _configs(memo: Memo, problem: Problem, target: Target, *, tuned: bool) -> Iterator[tuple[Family, Config, TuningRecord | None]]:
    """Families with configs: of the nearest dense records, moved to what packed sequences allow, then their defaults."""
    spec = problem.spec()
    able = {name: one for name, one in families().items() if one.refusal(problem, spec, target) is None}
    if tuned:
        dense = replace(problem, features=replace(problem.features, packed=False))
        pool = memo.pool(dense.key(target.slug), target)
        key = dense.key(target.slug)
        near = (record for _, record in pool.near(key, frozenset()))
        for _, record in zip(range(MOST_RECORDS), (*pool.exact(key, frozenset()), *near), strict=False):
            family = able.get(record.outcome.template)
            if family is None:
                continue
            config = pool.refit(family, family.completed(record.outcome.config), spec).config
            if config is not None:
                yield family, family.resized(config, problem, target), record
                break
    for family in able.values():
        yield family, family.default(spec, target), None


def explained(packed: Packed, numbers: Numbers, why_torch: str | None = None, direction: Direction = "fwd") -> Explanation:
    """Explanation of the choice of a call: its kernel's config is a dense record's or its family's default, since none was tuned for
    packed sequences. `why_torch` is the reason why no kernel serves, if there is one."""
    device = packed.query.device
    found = None if why_torch is not None else served(packed, numbers, direction)
    gpu = devices.target_of(device).slug if device.type == "cuda" else "cpu"
    if found is None:
        reason = why_torch or "no kernel takes packed sequences of this kind here"
        return Explanation(kind="framework", reason=f"{reason}, so each sequence is a call of its own", gpu=gpu)
    record, variant = found.record, found.variant
    problem = problem_of(packed, numbers, direction)
    return Explanation(
        kind="default" if record is None else "stand_in",
        reason=f"packed sequences take the config of {'the family' if record is None else 'the nearest dense record'}",
        gpu=gpu,
        key=None if device.type != "cuda" or problem is None else problem.key(gpu),
        template=variant.template,
        variant_id=variant.id,
        config=variant.config,
        record_key=None if record is None else record.key,
        origin=None if record is None else record.origin,
        differences=() if record is None else ("packed=False for True",),
    )


def rows_last(x: Tensor) -> Tensor:
    """Packed rows (T, H, D) as kernels take them: (1, H, T, D) with stride 0 of the batch."""
    rows, heads, columns = x.shape
    of_rows, of_heads, of_columns = x.stride()
    return x.as_strided((1, heads, rows, columns), (0, of_heads, of_rows, of_columns))


def forward(found: Served, packed: Packed, numbers: Numbers, seed: int) -> tuple[Tensor, Tensor]:
    """Output (T_q, Hq, D_v) and LSE (Hq, T_q), float32: 0 and -inf in rows that no sequence has."""
    query, _, value = packed[:3]
    rows, heads, _ = query.shape
    out = torch.empty((rows, heads, value.shape[2]), dtype=query.dtype, device=query.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=query.device)
    operands = (*(rows_last(x) for x in (*packed[:3], out)), lse[None])
    _launch(found, operands, packed, numbers, seed)
    return out, lse


def backward(
    found: Served, packed: Packed, numbers: Numbers, seed: int, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value: 0 in rows that no sequence has, and of keys that aren't used."""
    # Gradients may be expanded scalars, whose rows can't be loaded as whole words.
    dout = dout.contiguous()
    grads = [torch.empty_like(x) if _dense(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in packed[:3]]
    dq, dk, dv = map(rows_last, grads)
    q, k, v = (rows_last(x) for x in packed[:3])
    lse_gradient = None if dlse is None else dlse.contiguous()[None]
    operands = (q, k, v, rows_last(out), lse[None], rows_last(dout), lse_gradient, dq, dk, dv)
    _launch(found, operands, packed, numbers, seed)
    return grads[0], grads[1], grads[2]


def _dense(x: Tensor) -> bool:
    """True if no element of it lies under another."""
    return 0 not in (stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)


def _launch(found: Served, operands: Sequence[Tensor | None], packed: Packed, numbers: Numbers, seed: int) -> None:
    """Launch a kernel on the tensors' device and its current stream."""
    device = packed.query.device
    sinks = None if packed.sinks is None else packed.sinks.expand(packed.sequences, -1)
    parameters = CallParameters(
        scale=numbers.scale,
        band=Band(
            left=None if numbers.left < 0 else numbers.left,
            right=None if numbers.right < 0 else numbers.right,
            diagonal=int(numbers.bottom_right),
        ),
        softcap=numbers.softcap,
        dropout_p=numbers.dropout_p,
        seed=seed,
        slopes=packed.slopes,
        sinks=sinks,
        lengths=(packed.cu_q, packed.cu_k, packed.used),
    )
    if device.type != "cuda" or torch.version.cuda is None:
        launching.launcher(found.kernel)(*operands, **parameters.keywords())
        return
    with torch.cuda.device(device) if torch._C._cuda_getDevice() != device.index else contextlib.nullcontext():
        _run(found, operands, parameters, numbers)


def _run(found: Served, operands: Sequence[Tensor | None], parameters: CallParameters, numbers: Numbers) -> None:
    """Launch by the driver, with launches that are prepared once for tensors of these sizes and strides."""
    kernel, query, key = found.kernel, operands[0], operands[1]
    assert query is not None and key is not None, "a call has these"
    tensors = named(operands, None, parameters)
    signature = (numbers, *(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors))
    program = found.programs.get(signature)
    if program is None:
        program = prepared.program(kernel, None, operands, parameters, compiles=True)
        assert program is not None, "families of packed sequences have host code"
        if len(found.programs) >= MOST_PROGRAMS:
            found.programs.clear()
        found.programs[signature] = program
    counts = launching.counts_of(query.device, kernel.counts_needed(query, key))
    if kernel.host is not None:
        query, _ = launching.positive_scale(kernel.host, query, parameters.scale)
    offsets, size = placed(program.temporaries)
    # From a graph's pool under capture: nothing outlives the call.
    scratch = torch.empty(size, dtype=torch.uint8, device=query.device) if size else None
    start = 0 if scratch is None else scratch.data_ptr()
    held = named((query, *operands[1:]), counts, parameters)
    addresses = [0 if x is None else x.data_ptr() for x in held]
    addresses += [start + offset for offset in offsets]
    program.run(addresses, torch._C._cuda_getCurrentRawStream(query.device.index), (parameters.seed, 0))


def named(operands: Sequence[Tensor | None], counts: Tensor | None, parameters: CallParameters) -> tuple[Tensor | None, ...]:
    """The tensors of a call in the order in which a plan's launches name them, without their scratch memory."""
    assert parameters.lengths is not None, "a packed call has lengths"
    # In the places of a mask, of fp8's factors and of a bias there is nothing.
    return (*operands, counts, None, parameters.slopes, None, None, None, parameters.sinks, None, *parameters.lengths)


def sink_gradient(packed: Packed, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Gradient of `sinks` (Hq,), float32: each row adds -exp(sink - LSE) (rowsum(dO * O) - dLSE)."""
    assert packed.sinks is not None, "a gradient of sinks needs them"
    delta = (out.float() * dout.float()).sum(-1).T
    if dlse is not None:
        delta = delta - dlse
    probs = torch.exp(packed.sinks.float()[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
    # Padding, whose gradients may be anything, has no probabilities.
    return -(probs * delta).masked_fill(probs == 0.0, 0.0).sum(1)
