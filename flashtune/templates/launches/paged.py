"""Launches of flash_paged: attention over pages, and the combination of its splits."""

from typing import Any

from flashtune.core.code.launches import Launch, LaunchInputs, Operand, Scratch
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.templates.launches.common import cdiv, score_numbers, strides_divide
from flashtune.templates.launches.pointers import PointerHost, accepts_narrow, split_count

LEAST_KEYS = 256
"""Fewest keys of a split, a multiple of every BLOCK_N: the partial outputs of 16 rows then have an eighth of the keys' bytes."""

MOST_KEYS = 8192
"""Keys that a split should have at most while splits are few: of sequences of different lengths the longest ends last."""

MOST_WAVES = 8
"""Most waves of programs into which long sequences are split (`MOST_KEYS`)."""

COMBINE_WARPS = 4
"""Warps of a program of the combining launch."""


class PagedHost(PointerHost):
    """Host side of flash_paged. Its k and v are (blocks, Hkv, page, D), q and out (1, Hq, T, D), lse (1, Hq, T)."""

    def __init__(self, spec: KernelSpec, config: Config) -> None:
        super().__init__(spec, config)
        self.positive_scale = False

    def accepts(self, q: Operand, k: Operand, v: Operand, mask: Operand | None, *, interpreted: bool = False) -> bool:
        """True if the kernel takes these strides and alignments."""
        if interpreted:
            return super().accepts(q, k, v, mask, interpreted=True)
        columns = min(self.block_d, self.narrowest)
        return accepts_narrow(columns, k, k) and accepts_narrow(self.block_dv, v, v) and accepts_narrow(columns, q, q)

    def launches(self, inputs: LaunchInputs, scratch: Scratch) -> list[Launch]:
        """The launch of the kernel, and of `combine_splits` where keys are split."""
        pages, lengths = inputs.pages, inputs.lengths
        assert pages is not None and lengths is not None, "a kernel for pages needs a table and lengths"
        sequences, group, rows = lengths[0].shape[0] - 1, inputs.heads // inputs.kv_heads, self.config.number("BLOCK_M")
        longest = cdiv(min(pages.max_q, inputs.n_q) * group, rows)
        by_bounds = inputs.n_q * group // rows + sequences + 1 < longest * sequences
        tiles = inputs.n_q * group // rows + sequences + 1 if by_bounds else longest
        working = min(inputs.n_q * group // rows + sequences, longest * sequences) * inputs.kv_heads
        splits = self._splits(inputs, working) if pages.splits is None else pages.splits
        programs = tiles * inputs.kv_heads * (1 if by_bounds else sequences + (splits == 1))
        part_out, part_sums = inputs.lse, inputs.lse
        if splits > 1:
            part_out = scratch.empty((splits * inputs.n_q * inputs.heads, self.block_dv), "fp32")
            part_sums = scratch.empty((2 * splits * inputs.n_q * inputs.heads,), "fp32")
        arguments = self._paged_arguments(inputs, (part_out, part_sums), tiles, by_bounds)
        found = [Launch("attention_forward", (programs, splits), arguments, self._options())]
        if splits > 1:
            more = (part_out, part_sums, inputs.out, inputs.lse, lengths[0], inputs.heads, inputs.n_q, sequences, splits)
            found.append(Launch("combine_splits", (inputs.n_q * inputs.heads,), more, {"num_warps": COMBINE_WARPS}))
        return found

    def _splits(self, inputs: LaunchInputs, working: int) -> int:
        """As many splits as keep the device busy with `working` programs at once, and more where a split would be long."""
        assert inputs.pages is not None
        keys, room = inputs.pages.max_k, self.config.number("programs") * inputs.sms
        if self.spec.window and inputs.window_left >= 0:
            keys = min(keys, inputs.window_left + self.config.number("BLOCK_M") + max(inputs.window_right, 0) + 1)
        busy = split_count(max(cdiv(keys, LEAST_KEYS), 1), max(working, 1), room)
        return max(busy, min(cdiv(keys, MOST_KEYS), MOST_WAVES * room // max(working, 1)))

    def _paged_arguments(self, inputs: LaunchInputs, parts: tuple[Operand, Operand], tiles: int, by_bounds: bool) -> tuple[Any, ...]:
        assert inputs.pages is not None and inputs.lengths is not None
        of_q, _, used = inputs.lengths
        table, descale = inputs.pages.table, inputs.descale or (None,) * 3
        factors = [inputs.lse if x is None else x for x in descale[1:]]
        found: list[Any] = [inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, of_q, used, table, *parts, *factors]
        numbers = [x for x in (inputs.slopes, inputs.sinks) if x is not None]
        found += numbers
        found += [inputs.q.strides[place] for place in (2, 1, 3)]
        found += [x.strides[place] for x in (inputs.k, inputs.v) for place in (0, 2, 1, 3)]
        found += [stride for x in (table, *numbers) for stride in x.strides]
        found += [stride for x in descale[1:] for stride in ((0, 0) if x is None else x.strides)]
        found += [inputs.heads, inputs.heads // inputs.kv_heads, inputs.n_q, tiles, of_q.shape[0] - 1, table.shape[1]]
        found += score_numbers(self.spec, inputs)
        found += [inputs.k.shape[2], by_bounds, inputs.k.item_bytes == 1, descale[1] is not None, descale[2] is not None, LEAST_KEYS]
        return (*found, *strides_divide(self.spec, (inputs.q, inputs.k, inputs.v)))
