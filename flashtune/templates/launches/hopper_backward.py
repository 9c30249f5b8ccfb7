"""Launches of flash_bwd_hopper and flash_bwd_hopper_split: preparation, the products, and kernels that add up or finish partial sums."""

from collections.abc import Mapping
from typing import Any

from flashtune.core.code.launches import Descriptor, Launch, LaunchInputs, Operand, Scratch
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.parameters import DROPOUT_STEPS, dropout_threshold
from flashtune.templates.backward.hopper.layout import BackwardLayout, HopperBackward, SplitLayout, query_divisions
from flashtune.templates.launches.backward import FUSED, SMALL, PointerBackward, needed
from flashtune.templates.launches.common import LOG2_E, LengthArguments, band_sizes, cdiv, strides_divide
from flashtune.templates.launches.hopper_forward import accepts_tiles, matrix_steps, pack_mask, ragged, swizzled
from flashtune.templates.launches.mods import KEYS, captured_of, list_arguments
from flashtune.templates.mods.known import trains


class HopperBackwardHost:
    """Base of both families' hosts."""

    positive_scale = False
    counts_misses = False

    def __init__(self, spec: KernelSpec, config: Config, layout: HopperBackward) -> None:
        self.spec, self.config, self._layout = spec, config, layout
        self.block_m, self.block_n = config.number("BLOCK_M"), config.number("BLOCK_N")
        self._tiled = ragged if spec.packed else swizzled

    def accepts(self, q: Operand, k: Operand, v: Operand, mask: Operand | None, *, interpreted: bool = False) -> bool:
        """True if the copy engine takes these tensors."""
        return accepts_tiles(self.spec, (q, k, v), mask)

    def counts_needed(self, q: Operand, k: Operand) -> int:
        """0: the kernel needs no counts."""
        return 0

    def narrowed_bias(self, mask: Operand) -> Operand | None:
        """One matrix of each batch and head that the bias repeats, and a tile of repeated rows or columns."""
        return mask.narrowed((1, 1, 128, 128)) if self.spec.mask == "bias" else None

    def keep(self, inputs: LaunchInputs) -> float:
        """The share of pairs that dropout keeps, by whose inverse gradients of scores grow."""
        return 1 - inputs.dropout_p if dropout_threshold(inputs.dropout_p) < DROPOUT_STEPS else 1.0

    def numbers(self, call: "BackwardCall", bits: Operand | None, m_tiles: int, n_tiles: int) -> list[Any]:
        """Arguments of a kernel of gradients after its tensors; `bits` is the packed mask."""
        i, spec, layout = call.inputs, self.spec, self._layout
        found: list[Any] = [i.n_q, i.n_kv, i.kv_heads, i.heads // i.kv_heads, m_tiles, n_tiles]
        found += [n_tiles * i.batch * i.kv_heads] if layout.persistent else []
        found += [call.divisions] if layout.divides else []
        found += [*call.lengths.sizes, *map(int, call.lengths.flags)]
        # 0 where the bias repeats.
        found += [int(stride > 0) for stride in needed(i.mask).strides] if spec.mask == "bias" else []
        found += [*band_sizes(spec, i), *list_arguments(spec, i, KEYS), i.scale, (i.softcap if spec.softcap else i.scale) * LOG2_E]
        found += [2 * LOG2_E * i.scale / i.softcap] if spec.softcap else []
        found += [i.seed, i.offset, dropout_threshold(i.dropout_p), 1 / self.keep(i)] if spec.dropout else []
        found += [needed(i.slopes), *needed(i.slopes).strides] if spec.alibi else []
        if spec.mask == "bool":
            found += [bits, *matrix_steps(call.matrices())]
        elif "bias_ptr" in layout.params:
            found += [needed(i.mask), *needed(i.mask).strides]
        return found

    def add_divisions(self, call: "BackwardCall") -> Launch:
        """The launch that adds up partial dK and dV of split-Q."""
        i = call.inputs
        keys = call.n_tiles * self.block_n
        dk, dv = needed(i.dk), needed(i.dv)
        arguments = (
            *(*call.parts, dk, dv, *dk.strides, *dv.strides, i.kv_heads, i.n_kv, keys, call.divisions),
            *((i.scale / self.keep(i), 1 / self.keep(i)) if self.spec.dropout else (i.scale,)),
            *call.aligned,
        )
        return Launch("add_divisions", (keys // 16 * i.batch * i.kv_heads,), arguments, SMALL)

    def score_gradients(self, call: "BackwardCall", found: list[Launch]) -> list[Launch]:
        """The launches `found`, followed by those for gradients of a bias, of slopes and of captured tensors by plain pointers."""
        i, captured = call.inputs, trains(self.spec)
        if not (self.spec.dbias or self.spec.dslopes or captured):
            return found
        width = self._layout.block_d + self._layout.block_dv
        warps, staged = (4, 128) if captured else (8, 256)
        options = {"num_warps": warps, "num_stages": 1 if width > staged else 2, **FUSED}
        pointers = PointerBackward(self.spec, i, (64, 64) if width > 256 else (128, 64), options)
        deltas = call.scratch.empty((i.batch, i.heads, i.n_q), "fp32")
        # Without dQ, dK and dV the earlier launches aren't needed.
        before = [] if i.dq is None and i.dk is None else found
        return [*before, pointers.row_deltas(deltas), *pointers.score_gradients(deltas, call.scratch)]


class BackwardCall:
    """Sizes and scratch memory that several launches of a call share."""

    def __init__(self, host: HopperBackwardHost, inputs: LaunchInputs, scratch: Scratch) -> None:
        i = inputs
        self.host, self.inputs, self.scratch = host, inputs, scratch
        self.lengths = LengthArguments.of(host.spec, i)
        self.m_tiles = self.lengths.tiles(i, i.n_q, host.block_m) // i.batch
        self.n_tiles = self.lengths.tiles(i, i.n_kv, host.block_n) // i.batch
        self.rows = self.m_tiles * host.block_m
        self.lse_2 = scratch.empty((i.batch * i.heads * self.rows,), "fp32")
        self.deltas = scratch.empty((i.batch * i.heads * self.rows,), "fp32")
        self.aligned = strides_divide(host.spec, (i.q, i.k, i.v, i.out, i.dout, i.dq, i.dk, i.dv))
        self.divisions = 1
        self.parts: tuple[Operand, ...] = ()

    def divide(self, layout: HopperBackward) -> None:
        """Choose the number of split-Q programs, and allocate their partial dK and dV."""
        i, host = self.inputs, self.host
        tiles = self.n_tiles * i.batch * i.kv_heads
        sides = (i.window_left, i.window_right)
        self.divisions = query_divisions(self.m_tiles, i.heads // i.kv_heads, tiles, *sides, host.block_m, host.block_n, i.sms)
        # A kernel that also makes dQ takes partial sums at every call, unwritten without dK and dV.
        if i.dk is not None or not isinstance(layout, SplitLayout):
            keys = tiles * self.divisions * host.block_n if i.dk is not None else 1
            self.parts = tuple(self.scratch.empty((keys, columns), "fp32") for columns in layout.divided_columns.values())

    def preprocess(self, *more: Any, tail: tuple[Any, ...] = (), options: Mapping[str, Any] = SMALL) -> Launch:
        """The launch that computes each row's delta and its LSE in units of log 2, padded to whole tiles."""
        i = self.inputs
        dout = needed(i.dout)
        arguments = (
            *(i.out, dout, i.lse, i.lse if i.dlse is None else i.dlse, self.lse_2, self.deltas),
            *(*self.lengths.pointers[:1], *more, *i.out.strides, *dout.strides),
            *(
                i.heads,
                i.n_q,
                self.rows,
                *self.lengths.sizes,
                *([self.host.keep(i)] if self.host.spec.dropout else []),
                i.dlse is not None,
                *tail,
                *self.aligned,
            ),
        )
        return Launch("preprocess", (self.rows // 64 * i.batch * i.heads,), arguments, options)

    def matrices(self) -> Operand:
        """The boolean mask as bytes, one matrix where it repeats over batches or heads."""
        return needed(self.inputs.mask).narrowed((1, 1, None, None)).viewed("u8")

    def bits_of_keys(self, found: list[Launch]) -> Operand:
        """The packed mask with keys as rows."""
        m, i = self.matrices(), self.inputs
        (b, h, n_q, n_kv), (step_b, step_h, step_m, step_n) = m.shape, m.strides
        transposed = Operand(m.source, (b, h, n_kv, n_q), (step_b, step_h, step_n, step_m), m.dtype, m.aligned)
        return pack_mask(transposed, i.n_kv, self.n_tiles * self.host.block_n, self.host.block_m, self.scratch, found, fusion=True)

    def numbers_of(self, x: Operand) -> Descriptor:
        """A descriptor of one number per row."""
        return Descriptor(x, x.shape, (1,), (self.host.block_m,), "plain")

    def bias(self) -> list[Descriptor]:
        """The descriptor of a bias, where there is one."""
        return [swizzled(needed(self.inputs.bias), self.host.block_m, 64)] if self.host.spec.mask == "bias" else []


class BackwardHopperHost(HopperBackwardHost):
    """Host side of flash_bwd_hopper."""

    def __init__(self, spec: KernelSpec, config: Config) -> None:
        self.layout = BackwardLayout(spec, config)
        super().__init__(spec, config, self.layout)

    def launches(self, inputs: LaunchInputs, scratch: Scratch) -> list[Launch]:
        """Launches of the requested gradients."""
        i, layout = inputs, self.layout
        call = BackwardCall(self, inputs, scratch)
        whole = self._whole(call)
        sums = self._sums(call, whole)
        if layout.divides:
            call.divide(layout)
        # The index of the next tile, which each program of the preparation clears with the number behind its own.
        work = [scratch.empty((call.rows // 64 * i.batch * i.heads + 1,), "i32")] if layout.dynamic else []
        found = [call.preprocess(sums, *work, tail=(i.dq is not None and not whole,))]
        bits = call.bits_of_keys(found) if self.spec.mask == "bool" else None
        found.append(Launch("flash_bwd_hopper", (self._programs(call),), self._arguments(call, sums, work, bits, whole), SMALL))
        if layout.divides and i.dk is not None:
            found.append(self.add_divisions(call))
        if i.dq is not None and not whole:
            scale = i.scale / self.keep(i) if self.spec.dropout else i.scale
            sizes = (i.heads, i.n_q, call.m_tiles, *call.lengths.sizes)
            arguments = (sums, i.dq, *call.lengths.pointers[:1], *i.dq.strides, *sizes, scale, *call.aligned)
            found.append(Launch("finish_dq", (call.m_tiles * i.batch * i.heads,), arguments, SMALL))
        return self.score_gradients(call, found)

    def _whole(self, call: BackwardCall) -> bool:
        """True if a program computes all of dQ for every query, each of which sees a key."""
        i, layout = call.inputs, self.layout
        if not layout.owns:
            return False
        seen = i.window_right < 0 or i.diagonal + i.window_right >= 0
        seen = seen and (i.window_left < 0 or i.n_q - 1 + i.diagonal - i.window_left < i.n_kv)
        return call.n_tiles == 1 and seen and all(call.aligned)

    def _programs(self, call: BackwardCall) -> int:
        i, layout = call.inputs, self.layout
        tiles = call.n_tiles * i.batch * i.kv_heads
        return (min(tiles, i.sms) if layout.persistent else tiles) * call.divisions

    def _sums(self, call: BackwardCall, whole: bool) -> Operand:
        """Memory for sums of dQ, in rows of 256, unwritten in calls without them."""
        i, layout = call.inputs, self.layout
        least = self.block_m * layout.part_d // 256
        unneeded = i.dq is None or whole
        return call.scratch.empty((least if unneeded else i.batch * i.heads * call.rows * layout.summed_d // 256, 256), "fp32")

    def _arguments(self, call: BackwardCall, sums: Operand, work: list[Operand], bits: Operand | None, whole: bool) -> tuple[Any, ...]:
        i, layout = call.inputs, self.layout
        d, d_v = layout.block_d, layout.block_dv
        tiled = self._tiled
        tiles = [tiled(i.q, self.block_m, d), tiled(i.k, 64, d), tiled(i.v, 64, d_v), tiled(needed(i.dout), self.block_m, d_v)]
        found: list[Any] = [*tiles, call.numbers_of(call.lse_2), call.numbers_of(call.deltas)]
        if not layout.divides:
            # Substitutes for gradients without a request stay unwritten.
            found += [tiled(i.dk or i.k, 64, d), tiled(i.dv or i.v, 64, d_v)]
        found += [*call.bias(), *call.parts, sums, *work, *call.lengths.pointers, *self.numbers(call, bits, call.m_tiles, call.n_tiles)]
        if layout.owns:
            dq = i.dq or i.q
            found += [dq, *dq.strides[:3]]
        found += captured_of(self.spec, i)
        found += [i.dq is not None, i.dk is not None]
        return (*found, whole) if layout.owns else tuple(found)


class BackwardHopperSplitHost(HopperBackwardHost):
    """Host side of flash_bwd_hopper_split."""

    def __init__(self, spec: KernelSpec, config: Config) -> None:
        self.layout = SplitLayout(spec, config)
        super().__init__(spec, config, self.layout)
        self._d, self._d_v = (self.layout.chunk, self.layout.chunk) if self.layout.chunked else (self.layout.block_d, self.layout.block_dv)

    def launches(self, inputs: LaunchInputs, scratch: Scratch) -> list[Launch]:
        """Launches of the requested gradients."""
        i = inputs
        call = BackwardCall(self, inputs, scratch)
        found = [call.preprocess()]
        if self.layout.divides:
            call.divide(self.layout)
        if i.dk is not None:
            self._key_gradients(call, found)
        if i.dq is not None:
            self._query_gradients(call, i.dq, found)
        return self.score_gradients(call, found)

    def _key_gradients(self, call: BackwardCall, found: list[Launch]) -> None:
        i, d, d_v = call.inputs, self._d, self._d_v
        bits = call.bits_of_keys(found) if self.spec.mask == "bool" else None
        tiled = self._tiled
        tiles = [tiled(i.q, self.block_m, d), tiled(i.k, 64, d), tiled(i.v, 64, d_v), tiled(needed(i.dout), self.block_m, d_v)]
        outputs = [] if self.layout.divides else [tiled(needed(i.dk), 64, d), tiled(needed(i.dv), 64, d_v)]
        arguments = (
            *(*tiles, call.numbers_of(call.lse_2), call.numbers_of(call.deltas), *outputs, *call.bias(), *call.parts),
            *call.lengths.pointers,
            *self.numbers(call, bits, call.m_tiles, call.n_tiles),
        )
        found.append(Launch("key_gradients", (call.n_tiles * i.batch * i.kv_heads * call.divisions,), arguments, SMALL))
        if self.layout.divides:
            found.append(self.add_divisions(call))

    def _query_gradients(self, call: BackwardCall, dq: Operand, found: list[Launch]) -> None:
        i, d, d_v = call.inputs, self._d, self._d_v
        block_m, block_n = self.config.number("DQ_BLOCK_M"), self.config.number("DQ_BLOCK_N")
        m_tiles, n_tiles = call.lengths.tiles(i, i.n_q, block_m) // i.batch, cdiv(i.n_kv, block_n)
        bits = None
        if self.spec.mask == "bool":
            bits = pack_mask(call.matrices(), i.n_q, m_tiles * block_m, block_n, call.scratch, found, fusion=True)
        tiles = [self._tiled(i.q, 64, d), self._tiled(i.k, block_n, d), self._tiled(i.v, block_n, d_v)]
        outputs = [self._tiled(needed(i.dout), 64, d_v), self._tiled(dq, 64, d)]
        numbers = self.numbers(call, bits, m_tiles, n_tiles)
        arguments = (*tiles, *outputs, call.lse_2, call.deltas, call.rows, *call.lengths.pointers, *numbers)
        found.append(Launch("query_gradients", (m_tiles * i.batch * i.heads,), arguments, SMALL))
