"""Launches of flash_bwd, and of the kernels with plain pointers that all backward families share."""

import math
from typing import Any

from flashtune.core.code.launches import Launch, LaunchInputs, Operand, Scratch
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.problem import padded
from flashtune.templates.launches.common import LengthArguments, cdiv, score_numbers, strides_divide, wide
from flashtune.templates.launches.mods import KEYS, QUERIES, gradient_arguments, mod_arguments
from flashtune.templates.launches.pointers import accepts_narrow, interpretable

FUSED = {"enable_fp_fusion": True}
SMALL = {"num_warps": 4, **FUSED}
"""Compiler options of the small kernels before and after the products."""

MOST_PARTS = 512
"""Most programs that share the gradient of a small bias; equal on every GPU, since it fixes the order of the additions."""


class PointerBackward:
    """Launches that read a call's tensors by plain pointers; gradients of a bias and of slopes are computed in tiles of
    `tile`, those of captured tensors in square ones of its shorter side."""

    def __init__(self, spec: KernelSpec, inputs: LaunchInputs, tile: tuple[int, int], options: dict[str, Any]) -> None:
        self.spec, self.inputs, self.tile, self.options = spec, inputs, tile, options
        i = inputs
        self.lengths = LengthArguments.of(spec, inputs)
        self.aligned = strides_divide(spec, (i.q, i.k, i.v, i.out, i.dout, i.dq, i.dk, i.dv))

    def row_deltas(self, deltas: Operand) -> Launch:
        """rowsum(dO * O) - dLSE of every row."""
        i = self.inputs
        dout = needed(i.dout)
        arguments = (
            *(i.out, dout, i.lse, i.lse if i.dlse is None else i.dlse, deltas, *i.out.strides, *dout.strides),
            *(i.heads, i.n_q, i.dlse is not None, *self.aligned),
        )
        return Launch("row_deltas", (cdiv(i.n_q, 32) * i.batch * i.heads,), arguments, SMALL)

    def tensors(self, deltas: Operand, blocks: int = KEYS) -> tuple[Any, ...]:
        """Kernel arguments before the output tensors; `blocks` is the place of the list of blocks."""
        i = self.inputs
        masks = [] if self.spec.mask == "none" else [needed(i.mask)]
        read = (i.q, i.k, i.v, needed(i.dout))
        found: list[Any] = [*read, i.lse, deltas, *self.lengths.pointers, *masks]
        found += [stride for x in (*read, *masks) for stride in x.strides]
        if self.spec.alibi:
            slopes = needed(i.slopes)
            found += [slopes, *slopes.strides]
        found += mod_arguments(self.spec, i, blocks)
        return tuple(found)

    def numbers(self) -> tuple[Any, ...]:
        """Kernel arguments after the output tensors."""
        i = self.inputs
        sizes = (i.heads, i.heads // i.kv_heads, i.n_q, i.n_kv, *self.lengths.sizes, i.scale)
        scores = (*score_numbers(self.spec, i), *self.lengths.flags)
        return (*sizes, *scores, wide((i.q, i.k, i.v, needed(i.dout))), *self.aligned)

    def score_gradients(self, deltas: Operand, scratch: Scratch) -> list[Launch]:
        """The gradients of a bias, of slopes and of captured tensors, where they are requested."""
        i = self.inputs
        found = self._captured_gradients(deltas)
        if i.dbias is not None:
            found += self._bias_gradients(i.dbias, deltas, scratch)
        if i.dslopes is not None:
            steps = (0, *i.dslopes.strides, 0)
            arguments = (*self.tensors(deltas), i.dslopes, *steps, i.batch, 1, 1, 1, *self.numbers(), False, True, True)
            tiles = cdiv(i.n_q, self.tile[0]) * i.batch * i.heads
            found.append(Launch("score_gradients", (tiles,), arguments, self.options))
        return found

    def _captured_gradients(self, deltas: Operand) -> list[Launch]:
        """The launch of the kernel, with a program for each diagonal of square tiles of a head, where captured tensors get gradients."""
        i, sums = self.inputs, gradient_arguments(self.spec, self.inputs)
        if not sums:
            return []
        size = min(self.tile)
        if self.lengths.sizes:
            diagonals = i.n_q // size + i.n_kv // size + self.lengths.sizes[0] + 1
        else:
            diagonals = (cdiv(i.n_q, size) + cdiv(i.n_kv, size) - 1) * i.batch
        return [Launch("captured_gradients", (diagonals * i.heads,), (*self.tensors(deltas), *sums, *self.numbers()), self.options)]

    def _bias_gradients(self, dbias: Operand, deltas: Operand, scratch: Scratch) -> list[Launch]:
        """The launch of the kernel; for a small bias it makes partial sums, which a second launch adds up, to fill the GPU."""
        i, (m, n) = self.inputs, self.tile
        repeats = [size > 1 and not stride for size, stride in zip(dbias.shape, dbias.strides, strict=True)]
        own = [1 if repeated else size for size, repeated in zip(dbias.shape, repeats, strict=True)]
        tiles = own[0] * own[1] * cdiv(own[2], m) * cdiv(own[3], n)
        members = i.batch * i.heads // (own[0] * own[1])
        members *= cdiv(i.n_q, m) if repeats[2] else 1
        members *= cdiv(i.n_kv, n) if repeats[3] else 1
        parts = max(1, min(members, MOST_PARTS // tiles))
        grads, steps = dbias, (0, *dbias.strides)
        if parts > 1:
            grads = scratch.empty((parts, *own), "fp32")
            steps = grads.strides
        arguments = (
            *(*self.tensors(deltas), grads, *steps, i.batch, i.batch // own[0], i.heads // own[1], parts),
            *(*self.numbers(), *repeats[2:], *([False] if self.spec.alibi else [])),
        )
        found = [Launch("score_gradients", (tiles * parts,), arguments, self.options)]
        if parts > 1:
            count = math.prod(own)
            summed = (grads, dbias, *dbias.strides, parts, count, *own[1:])
            found.append(Launch("sum_parts", (cdiv(count, 256),), summed, SMALL))
        return found


class BackwardHost:
    """Host side of flash_bwd."""

    positive_scale = False
    counts_misses = False

    def __init__(self, spec: KernelSpec, config: Config) -> None:
        self.spec, self.config = spec, config

    def accepts(self, q: Operand, k: Operand, v: Operand, mask: Operand | None, *, interpreted: bool = False) -> bool:
        """True if the kernel takes these strides: any, unless tiles are narrow."""
        if interpreted:
            return interpretable(self.spec)
        return accepts_narrow(min(padded(self.spec.d), padded(self.spec.d_v)), q, k)

    def counts_needed(self, q: Operand, k: Operand) -> int:
        """0: the kernel needs no counts."""
        return 0

    def narrowed_bias(self, mask: Operand) -> Operand | None:
        """None: masks are read by pointer."""
        return None

    def launches(self, inputs: LaunchInputs, scratch: Scratch) -> list[Launch]:
        """Launches of row deltas, then of the requested gradients."""
        i, number = inputs, self.config.number
        deltas = scratch.empty((i.batch, i.heads, i.n_q), "fp32")
        dq_options = {"num_warps": number("DQ_num_warps"), "num_stages": number("DQ_num_stages"), **FUSED}
        pointers = PointerBackward(self.spec, i, (number("DQ_BLOCK_M"), number("DQ_BLOCK_N")), dq_options)
        found = [pointers.row_deltas(deltas)]
        tensors, numbers = pointers.tensors(deltas), pointers.numbers()
        if i.dk is not None:
            dv = needed(i.dv)
            arguments = (*tensors, i.dk, dv, *i.dk.strides, *dv.strides, *numbers)
            options = {"num_warps": number("num_warps"), "num_stages": number("num_stages"), **FUSED}
            tiles = pointers.lengths.tiles(i, i.n_kv, number("BLOCK_N")) * i.kv_heads
            found.append(Launch("key_gradients", (tiles,), arguments, options))
        if i.dq is not None:
            tensors = pointers.tensors(deltas, QUERIES)
            arguments = (*tensors, i.dq, *i.dq.strides, *numbers)
            tiles = pointers.lengths.tiles(i, i.n_q, number("DQ_BLOCK_M")) * i.heads
            found.append(Launch("query_gradients", (tiles,), arguments, dq_options))
        return found + pointers.score_gradients(deltas, scratch)


def needed(x: Operand | None) -> Operand:
    """An operand that every call of a spec has."""
    assert x is not None, "the spec promises this operand"
    return x
