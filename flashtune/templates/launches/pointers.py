"""Launches of the forward families that Triton lays out: flash_fwd and flash_decode."""

from typing import Any

from flashtune.core.code.launches import Descriptor, Launch, LaunchInputs, Operand, Scratch, copyable
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.problem import padded
from flashtune.templates.columns import key_pieces
from flashtune.templates.launches.common import LengthArguments, cdiv, outer_strides, per_head, score_numbers, strides_divide, wide
from flashtune.templates.launches.mods import FORWARD, mod_arguments
from flashtune.templates.mods.known import functions_of

NARROW_TILE_BYTES = 128
"""Bytes of a tile's row below which Triton 3.6 misreads it beside wider ones, unless Q and K are aligned."""


def raw_maxima(spec: KernelSpec) -> bool:
    """True if a forward takes row maxima of raw scores, which needs a positive scale."""
    mods = functions_of(spec.mods)
    return not spec.softcap and not (mods is not None and mods.score) and not (spec.mask == "bias" or spec.alibi or spec.dtype == "fp8")


class PointerHost:
    """Host side of a forward with one program per tile of queries."""

    counts_misses = False

    def __init__(self, spec: KernelSpec, config: Config) -> None:
        self.spec, self.config = spec, config
        self._described = config.get("loads", "pointer") == "tma"
        """True if K and V are loaded through descriptors."""
        self.block_d, self.block_dv = padded(spec.d), padded(spec.d_v)
        self.narrowest = min([self.block_dv, *(piece.width for piece in key_pieces(spec)[1:])])
        """Columns of the narrowest tile beside wider ones."""
        self.positive_scale = raw_maxima(spec)

    def accepts(self, q: Operand, k: Operand, v: Operand, mask: Operand | None, *, interpreted: bool = False) -> bool:
        """True if the kernel takes these strides and alignments."""
        if interpreted and not interpretable(self.spec):
            return False
        if self._described:
            return all(map(copyable, (q, k, v)))
        return interpreted or accepts_narrow(self.narrowest, q, k)

    def counts_needed(self, q: Operand, k: Operand) -> int:
        """0: the kernel needs no counts."""
        return 0

    def narrowed_bias(self, mask: Operand) -> Operand | None:
        """None: masks are read by pointer."""
        return None

    def launches(self, inputs: LaunchInputs, scratch: Scratch) -> list[Launch]:
        """The launch of the kernel."""
        lengths = LengthArguments.of(self.spec, inputs)
        tiles = lengths.tiles(inputs, inputs.n_q, self.config.number("BLOCK_M")) * inputs.heads
        return [Launch("attention_forward", (tiles,), self._arguments(inputs, ()), self._options())]

    def _options(self) -> dict[str, Any]:
        options = {name: self.config[name] for name in ("num_warps", "num_stages")}
        return options | ({"maxnreg": self.config["maxnreg"]} if self.config.get("maxnreg", 0) else {})

    def _arguments(self, inputs: LaunchInputs, parts: tuple[Operand, ...]) -> tuple[Any, ...]:
        named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": inputs.out}
        lengths = LengthArguments.of(self.spec, inputs)
        found: list[Any] = [inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, *lengths.pointers, *parts]
        if self._described:
            rows = self.config.number("BLOCK_N")
            found[1:3] = [_descriptor(named.pop("k"), rows, self.block_d), _descriptor(named.pop("v"), rows, self.block_dv)]
        found += mod_arguments(self.spec, inputs, FORWARD)
        if self.spec.mask != "none":
            assert inputs.mask is not None, "a kernel with a mask needs one"
            found.append(inputs.mask)
            named["mask"] = inputs.mask
        found += [stride for x in named.values() for stride in x.strides]
        found += per_head(self.spec, inputs)
        found += [inputs.heads, inputs.heads // inputs.kv_heads, inputs.n_q, inputs.n_kv, *lengths.sizes]
        found += [*score_numbers(self.spec, inputs), *lengths.flags]
        if not self._described:
            found += [wide((inputs.k, inputs.v)), *strides_divide(self.spec, (inputs.q, inputs.k, inputs.v, inputs.out))]
        return tuple(found)


class DecodeHost(PointerHost):
    """Host side of flash_decode: several programs split the keys of a tile, and their partial results are combined."""

    def __init__(self, spec: KernelSpec, config: Config) -> None:
        super().__init__(spec, config)
        self._last_combines = config["combine"] in ("last", "rows")

    def counts_needed(self, q: Operand, k: Operand) -> int:
        """One per tile where the last program of a tile combines the parts."""
        group = q.shape[1] // k.shape[1]
        return cdiv(q.shape[2] * group, self.config.number("BLOCK_M")) * q.shape[0] * k.shape[1] if self._last_combines else 0

    def launches(self, inputs: LaunchInputs, scratch: Scratch) -> list[Launch]:
        """The launch of the kernel, and of `combine_splits` where no program of the first combines."""
        group = inputs.heads // inputs.kv_heads
        tiles = cdiv(inputs.n_q * group, self.config.number("BLOCK_M")) * inputs.batch * inputs.kv_heads
        blocks = cdiv(self._most_keys(inputs, group), self.config.number("BLOCK_N"))
        splits = split_count(max(blocks, 1), tiles, self.config.number("programs") * inputs.sms)
        # A tile with one split writes its output itself.
        part_out, part_sums = inputs.lse, inputs.lse
        rows = inputs.batch * inputs.heads * inputs.n_q
        if splits > 1:
            part_out = scratch.empty((splits * rows, self.block_dv), "fp32")
            part_sums = scratch.empty((2 * splits * rows,), "fp32")
        parts = (part_out, part_sums)
        if self._last_combines:
            assert inputs.counts is not None, "a kernel whose programs count needs counts"
            parts = (*parts, inputs.counts)  # type: ignore[assignment]
        found = [Launch("attention_forward", (tiles, splits), self._arguments(inputs, parts), self._options())]
        if splits > 1 and not self._last_combines:
            out, lse = inputs.out, inputs.lse
            arguments = (part_out, part_sums, out, lse, *out.strides, inputs.heads, group, inputs.n_q, splits)
            found.append(Launch("combine_splits", (rows,), arguments, {"num_warps": 4}))
        return found

    def _most_keys(self, inputs: LaunchInputs, group: int) -> int:
        """The greatest number of keys that a tile sees."""
        n_q, n_kv = inputs.n_q, inputs.n_kv
        if self.spec.window:
            left, right = (side if side >= 0 else n_kv + n_q for side in (inputs.window_left, inputs.window_right))
            return min(n_kv, inputs.diagonal + n_q + right, left + right + self.config.number("BLOCK_M") // group + 2)
        return min(n_kv, inputs.diagonal + n_q) if self.spec.causal else n_kv


def split_count(blocks: int, tiles: int, programs: int) -> int:
    """The number of programs that share a tile's blocks of keys: the fewest with the longest share of `programs` over all tiles."""
    splits = min(max(programs // tiles, 1), blocks)
    return cdiv(blocks, cdiv(blocks, splits))


def interpretable(spec: KernelSpec) -> bool:
    """True if Triton's interpreter, which can't multiply bf16, runs a kernel with plain pointers."""
    return spec.dtype != "bf16"


def accepts_narrow(columns: int, q: Operand, k: Operand) -> bool:
    """True if a kernel with plain pointers takes Q and K: any strides, unless a tile of `columns` is narrow."""
    if columns * q.item_bytes >= NARROW_TILE_BYTES:
        return True
    return all(x.aligned and x.strides[3] == 1 and all(step * x.item_bytes % 16 == 0 for step in x.strides[:3]) for x in (q, k))


def _descriptor(x: Operand, rows: int, columns: int) -> Descriptor:
    return Descriptor(x, x.shape, (*outer_strides(x.shape[:3], x.strides[:3]), x.strides[3]), (1, 1, rows, columns), "triton")
