"""Triton kernels that merge parts, and compute their gradients. Rows are independent: a row's bits depend on its own numbers alone."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtune.core.problems.problem import next_power_of_two
from flashtune.dispatch.plans import driver, launch
from flashtune.dispatch.plans.program import Program

_ELEMENTS = 2048
"""Elements of a part that a program holds."""

WARPS = 4
"""Warps of a program."""

_NUMBERS = ["rows", "heads", "per_head", "stride_b", "stride_h", "stride_n"]
"""Numbers that no machine code is compiled for: another layout in registers would add up a row in another order."""


@triton.jit
def _places(
    rows, heads, per_head, stride_b, stride_h, stride_n, D: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Rows of a program, places of their elements, and which of both there are."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    head = row // per_head
    begin = (head // heads).to(tl.int64) * stride_b + (head % heads).to(tl.int64) * stride_h + (row % per_head).to(tl.int64) * stride_n
    begin = tl.multiple_of(begin, ALIGNED)
    return row, row < rows, begin[:, None] + column, column < D


@triton.jit(do_not_specialize=_NUMBERS)
def merge_kernel(
    outs,
    lses,
    out,
    lse,
    rows,
    heads,
    per_head,
    stride_b,
    stride_h,
    stride_n,
    D: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Output and LSE of parts."""
    places = _places(rows, heads, per_head, stride_b, stride_h, stride_n, D, ALIGNED, ROWS, COLUMNS)
    row, there, place, columns = places  # pyright: ignore[reportGeneralTypeIssues]
    hidden = float("-inf")
    top = tl.full((ROWS,), hidden, tl.float32)
    for part in tl.static_range(len(lses)):
        top = tl.maximum(top, tl.load(lses[part] + row, mask=there, other=hidden), propagate_nan=tl.PropagateNan.ALL)
    top = tl.where(top == hidden, 0.0, top)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for part in tl.static_range(len(outs)):
        part_lse = tl.load(lses[part] + row, mask=there, other=hidden)
        weight = tl.exp(part_lse - top)
        # A part's row without keys isn't read: it may hold anything.
        seen = (part_lse != hidden)[:, None] & columns
        sums += weight[:, None] * tl.load(outs[part] + place, mask=seen, other=0.0).to(tl.float32)
        total += weight
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    tl.store(lse + row, tl.where(nothing, hidden, top + tl.log(total)), mask=there)
    tl.store(out + place, (sums / total[:, None]).to(out.dtype.element_ty), mask=there[:, None] & columns)


@triton.jit(do_not_specialize=_NUMBERS)
def gradients_kernel(
    outs,
    lses,
    out,
    lse,
    dout,
    dlse,
    douts,
    dlses,
    rows,
    heads,
    per_head,
    stride_b,
    stride_h,
    stride_n,
    D: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradients of parts: w dO, and w (dO . (part's output - output) + dLSE)."""
    places = _places(rows, heads, per_head, stride_b, stride_h, stride_n, D, ALIGNED, ROWS, COLUMNS)
    row, there, place, columns = places  # pyright: ignore[reportGeneralTypeIssues]
    hidden = float("-inf")
    whole = tl.load(lse + row, mask=there, other=hidden)
    attended = (whole != hidden)[:, None] & columns
    merged = tl.load(out + place, mask=attended, other=0.0).to(tl.float32)
    given = tl.load(dout + place, mask=attended, other=0.0).to(tl.float32)
    of_lse = tl.load(dlse + row, mask=whole != hidden, other=0.0) if dlse is not None else tl.zeros((ROWS,), tl.float32)
    for part in tl.static_range(len(outs)):
        part_lse = tl.load(lses[part] + row, mask=there, other=hidden)
        seen = part_lse != hidden
        weight = tl.where(seen, tl.exp(part_lse - tl.where(seen, whole, 0.0)), 0.0)
        difference = tl.load(outs[part] + place, mask=seen[:, None] & columns, other=0.0).to(tl.float32) - merged
        dot = tl.sum(tl.where(seen[:, None], given * difference, 0.0), axis=1)
        of_out = tl.where(seen[:, None], weight[:, None] * given, 0.0)
        tl.store(douts[part] + place, of_out.to(out.dtype.element_ty), mask=there[:, None] & columns)
        tl.store(dlses[part] + row, tl.where(seen, weight * (dot + of_lse), 0.0), mask=there)


def merged(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor, Program | None]:
    """Output and LSE of parts (batch, heads, rows, columns), all with the same dense strides, and contiguous LSEs; and what the driver
    launched, None where Triton did."""
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    return out, lse, _launch(merge_kernel, out, tuple(outs), tuple(lses), out, lse)


def gradients(
    outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of outputs and LSEs of parts, which needn't be all; every tensor is laid out as `merged` takes and gives it."""
    douts, dlses = [torch.empty_like(out) for _ in outs], [torch.empty_like(lse) for _ in lses]
    _launch(gradients_kernel, out, tuple(outs), tuple(lses), out, lse, dout, dlse, tuple(douts), tuple(dlses))
    return douts, dlses


_PROGRAMS: dict[Hashable, Program] = {}
"""Launches by layout."""

_MOST_PROGRAMS = 256


def _launch(kernel: Any, like: Tensor, *tensors: Any) -> Program | None:
    """Launch a kernel over all rows of tensors that are laid out alike; returns what the driver launched."""
    (batch, heads, rows, columns), strides, device = like.shape, like.stride(), like.device
    count = batch * heads * rows
    if not count * columns:
        return None
    padded = next_power_of_two(columns)
    block = max(1, _ELEMENTS // padded)
    grid = (-(-count // block),)
    # Not of dimensions of one: their strides say nothing, and rows that are alike shall be read alike.
    aligned = math.gcd(16, columns, *(stride for stride, size in zip(strides[:3], like.shape[:3], strict=True) if size > 1))
    arguments = (*tensors, count, heads, rows, *strides[:3], columns, aligned, block, padded)
    if not driver.driven(device):
        kernel[grid](*arguments, num_warps=WARPS)
        return None
    given = [x for one in tensors for x in (one if isinstance(one, tuple) else (one,)) if x is not None]
    addresses = [x.data_ptr() for x in given]
    layout = kernel.__name__, device.index, like.dtype, like.shape, strides, len(given)
    program = _PROGRAMS.get(layout)
    if program is None:
        if len(_PROGRAMS) >= _MOST_PROGRAMS:
            _PROGRAMS.clear()
        with torch.cuda.device(device):
            _PROGRAMS[layout] = program = launch.program_of(kernel, grid, arguments, {"num_warps": WARPS}, device)
    program.run(addresses)
    return program
