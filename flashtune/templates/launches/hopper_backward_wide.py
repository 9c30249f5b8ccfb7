"""Launches of flash_bwd_hopper_wide: preparation, then chunk by chunk the scores' gradients and the products with them."""

from typing import Any

from flashtune.core.code.launches import Descriptor, Launch, LaunchInputs, Operand, Scratch
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.templates.backward.hopper.wide import MOST_SCRATCH, Chunk, WideBackwardLayout, chunks
from flashtune.templates.launches.backward import FUSED, SMALL, needed
from flashtune.templates.launches.common import cdiv
from flashtune.templates.launches.hopper_backward import BackwardCall, HopperBackwardHost
from flashtune.templates.launches.hopper_forward import pack_mask, swizzled

HALF = 64
"""Queries, or keys, of a step of products, and of a warpgroup."""


class WideBackwardHost(HopperBackwardHost):
    """Host side of flash_bwd_hopper_wide."""

    most_scratch = MOST_SCRATCH

    def __init__(self, spec: KernelSpec, config: Config) -> None:
        self.layout = WideBackwardLayout(spec, config)
        super().__init__(spec, config, self.layout)

    def launches(self, inputs: LaunchInputs, scratch: Scratch) -> list[Launch]:
        """Launches of the requested gradients."""
        i = inputs
        call = BackwardCall(self, inputs, scratch)
        # A row's sum over 512 columns is a warp's work.
        found = [call.preprocess(options={**FUSED, "num_warps": 16})]
        bits = None
        if self.spec.mask == "bool":
            bits = pack_mask(call.matrices(), i.n_q, call.rows, self.block_n, scratch, found, fusion=True)
        numbers = self.numbers(call, bits, call.m_tiles, call.n_tiles)
        tile_bytes = 2 * 2 * self.block_m * call.n_tiles * self.block_n
        parts = list(chunks(i.batch * i.kv_heads, i.heads // i.kv_heads, call.m_tiles, tile_bytes, self.most_scratch))
        slots, rows = max(one.places * one.members for one in parts), max(one.m_tiles for one in parts) * self.block_m
        of_scores = slots, rows, call.n_tiles * self.block_n
        scores = scratch.empty(of_scores, self.spec.dtype), scratch.empty(of_scores, self.spec.dtype)
        sums = scratch.empty((1 if parts[0].ends else self._key_programs(call) * 128 * self.layout.columns,), "fp32")
        for one in parts:
            found.append(self._scores(call, one, scores, numbers))
            if i.dk is not None:
                found.append(self._keys(call, one, scores, sums, numbers))
            if i.dq is not None:
                found.append(self._queries(call, one, scores[1], i.dq, numbers))
        return found

    def _key_programs(self, call: BackwardCall) -> int:
        """Programs of a key head."""
        return call.n_tiles * (self.layout.d_tiles + self.layout.dv_tiles)

    def _sizes(self, numbers: list[Any]) -> list[Any]:
        return numbers[: len(self.layout.sizes)]

    def _scores(self, call: BackwardCall, chunk: Chunk, scores: tuple[Operand, Operand], numbers: list[Any]) -> Launch:
        i, part = call.inputs, self.layout.part
        tiles = [
            swizzled(i.q, HALF, part),
            swizzled(i.k, self.block_n, part),
            swizzled(i.v, self.block_n, part),
            swizzled(needed(i.dout), HALF, part),
        ]
        outputs = [_tiled(one, self.block_n) for one in scores]
        arguments = (*tiles, *outputs, call.lse_2, call.deltas, call.rows, *chunk.arguments, *numbers)
        programs = chunk.places * chunk.members * chunk.m_tiles * cdiv(call.n_tiles, self.layout.run)
        return Launch("score_gradients", (programs,), arguments, SMALL)

    def _keys(self, call: BackwardCall, chunk: Chunk, scores: tuple[Operand, Operand], sums: Operand, numbers: list[Any]) -> Launch:
        i, columns = call.inputs, self.layout.columns
        operands = [*(_tiled(one, HALF) for one in scores)]
        operands += [swizzled(needed(one), HALF, columns) for one in (i.q, i.dout, i.dk, i.dv)]
        factors = i.scale / self.keep(i), 1 / self.keep(i)
        flags = int(chunk.starts), int(chunk.ends)
        arguments = (*operands, sums, *factors, *flags, *chunk.arguments, *self._sizes(numbers))
        return Launch("key_gradients", (chunk.places * self._key_programs(call),), arguments, SMALL)

    def _queries(self, call: BackwardCall, chunk: Chunk, dscores: Operand, dq: Operand, numbers: list[Any]) -> Launch:
        i, columns = call.inputs, self.layout.columns
        operands = [_tiled(dscores, HALF), swizzled(i.k, HALF, columns), swizzled(dq, HALF, columns)]
        arguments = (*operands, i.scale / self.keep(i), *chunk.arguments, *self._sizes(numbers))
        programs = chunk.places * chunk.members * chunk.m_tiles * self.layout.d_tiles
        return Launch("query_gradients", (programs,), arguments, SMALL)


def _tiled(x: Operand, columns: int) -> Descriptor:
    """A descriptor of a chunk's scores with tiles of 64 queries."""
    return Descriptor(x, x.shape, x.strides, (1, HALF, columns), "swizzled")
