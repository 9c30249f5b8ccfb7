"""One attention call for a kernel (`Problem`), and its key in the database (`ProblemKey`)."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from flashtune.core.problems.band import ALIGNMENTS, Alignment, Band, Window, diagonal_of
from flashtune.core.problems.config import Direction, Flags, KernelSpec
from flashtune.core.problems.dtypes import DTYPES, ITEMSIZE, DType
from flashtune.core.problems.lengths import Lengths, shared, spread
from flashtune.core.problems.passes import PASSES, Pass, Sizes, backward_with
from flashtune.core.system.errors import InputError
from flashtune.core.system.words import canonical, shown

DIRECTIONS: tuple[Direction, ...] = tuple(PASSES)
MaskKind = Literal["none", "bool", "bias"]
MASK_KINDS: tuple[MaskKind, ...] = get_args(MaskKind)

MAX_HEAD_DIM, WIDEST_HEAD, LARGEST_HEAD = 256, 576, 1024
"""Largest head sizes of kernels of every family, of those that take wide heads, and of problems, which other providers may have."""

_HASH = re.compile(r"[0-9a-f]{16}")

MOST_SEQUENCES = 1 << 12
"""Most packed sequences of a problem, since all lengths are drawn to count its work; calls of more count as calls of this many."""

DECODE_ROWS = 16
"""Query rows up to which a kernel is bound by reading K and V, and records of more rows don't apply."""


def next_power_of_two(value: int) -> int:
    """The smallest power of two that is >= `value` (1 for value <= 1)."""
    return 1 << max(0, value - 1).bit_length()


def padded(head_dim: int) -> int:
    """The power of two (at least 16, the smallest matrix tile) that a kernel pads a head size to."""
    return max(16, next_power_of_two(head_dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class Features(Flags):
    """Features that are fused into the kernel beside softmax(scale query keyᵀ) value. All are off by default.

    Attributes:
        causal: a query sees the keys up to the diagonal.
        dropout: probabilities are dropped; one problem stands for all rates.
        softcap: scores are capped; one problem stands for all caps.
        tf32: fp32 inputs may be multiplied as TF32.
        alibi: scores fall with the distance, by a slope of each head.
        sinks: a logit of each head joins the softmax's denominator.
        latent: values are the first columns of keys, in the same memory.
        packed: sequences of different lengths lie one after the other.
        dbias: a backward also computes the gradient of the bias.
        dslopes: a backward also computes the gradient of ALiBi's slopes.
        alignment: where the diagonal starts if the numbers of queries and keys differ: "top_left" (as `is_causal` of PyTorch) or
            "bottom_right" (as in flash-attn).
        window: (left, right), with None for unbounded.
        mask: "none", "bool" or "bias".
        mods: the hash of a mask and a score as code; empty without.
        page: the keys of a page, for sequences whose keys and values lie in the pages of a cache; 0 without.
    """

    alignment: Alignment = "top_left"
    window: Window | None = None
    mask: MaskKind = "none"
    mods: str = ""
    page: int = 0

    def __post_init__(self) -> None:
        if self.page < 0 or (self.page and (not self.packed or self.dropout or self.mask != "none" or self.mods)):
            raise InputError(f"page is {self.page}: give 1 or more keys, beside packed and without dropout, mask and functions, or drop it")
        if self.mods and not _HASH.fullmatch(self.mods):
            raise InputError(f"mods is {shown(self.mods)}, no hash of functions: give 16 hexadecimal digits")
        if self.dbias and self.mask != "bias":
            raise InputError(f"dbias requests the gradient of a bias, but the mask is {self.mask!r}: use mask='bias' or drop dbias")
        if self.dslopes and not self.alibi:
            raise InputError("dslopes requests the gradient of ALiBi's slopes, but alibi is off: switch alibi on or drop dslopes")
        if self.alignment not in ALIGNMENTS:
            raise InputError(f"unknown causal alignment {self.alignment!r}: use one of {', '.join(ALIGNMENTS)}")
        if self.mask not in MASK_KINDS:
            raise InputError(f"unknown mask kind {self.mask!r}: use one of {', '.join(MASK_KINDS)}")
        if self.window is not None:
            for side in self.window:
                if side is not None and side < 0:
                    raise InputError(f"window {self.window} is out of range: give sizes >= 0, or None for unbounded")
            if self.causal:
                object.__setattr__(self, "window", (self.window[0], 0))
            if self.window in ((None, None), (None, 0)) and (self.causal or self.window == (None, None)):
                object.__setattr__(self, "window", None)
        if self.mods and not self._alone:
            raise InputError("a mask and a score as code stand beside no other feature: write it into these functions, or drop them")

    @property
    def _alone(self) -> bool:
        # Kernels of packed sequences walk a band of keys, others lists of blocks.
        beside = ("tf32", "packed", "causal") if self.packed else ("tf32",)
        others = any(on for name, on in self.flags().items() if name not in beside)
        return not others and self.mask == "none" and (self.window is None or self.packed)

    @classmethod
    def within(cls, band: Band, **others: Any) -> "Features":
        """The features of a call with this band (see `Band.trimmed`): one that ends at the diagonal is causal, in whatever form it was
        requested. `others` are the other features."""
        aligned = band.diagonal and (band.bounded or others.get("alibi"))
        return cls(
            causal=band.right == 0,
            alignment="bottom_right" if aligned else "top_left",
            window=(band.left, band.right),
            **others,
        )

    @property
    def banded(self) -> bool:
        """True if a band limits the keys of a query."""
        return self.causal or self.window is not None

    @property
    def of_one(self) -> "Features":
        """The features of one packed sequence by itself, as a dense problem, which has no functions beside a band."""
        return replace(self, packed=False, mods="", page=0)

    @property
    def asked(self) -> tuple[str, ...]:
        """The requested gradients, by the names of `ASKED`."""
        return tuple(name for name in ASKED if getattr(self, name))

    def asking(self, names: Sequence[str]) -> "Features":
        """The features with requests for these gradients of `ASKED`, and no others."""
        requested: dict[str, Any] = {name: name in names for name in ASKED}
        return replace(self, **requested)

    @property
    def has_diagonal(self) -> bool:
        """True if a feature counts from the diagonal, so that `alignment` has a meaning."""
        return self.banded or self.alibi

    def band(self, n_q: int, n_kv: int) -> Band:
        """The band of visible keys at these sizes."""
        left, right = self.window if self.window is not None else (None, 0 if self.causal else None)
        return Band(left=left, right=right, diagonal=diagonal_of(self.alignment, n_q, n_kv))

    def as_json(self) -> dict[str, Any]:
        """The features that are on: `{}` when plain, `{"causal": True, "window": 1024}`, ..."""
        found: dict[str, Any] = {}
        if self.causal:
            found["causal"] = True
        if self.window is not None:
            left, right = self.window
            found["window"] = left if self.causal or left == right else [left, right]
        if self.has_diagonal and self.alignment != "top_left":
            found["alignment"] = self.alignment
        named = {"mask": self.mask.replace("none", ""), "mods": self.mods, "page": self.page}
        found |= {name: value for name, value in named.items() if value}
        found |= {name: True for name in (*FLAGS, *ASKED) if getattr(self, name)}
        return found

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Features":
        """The inverse of `as_json`; raises InputError for a name, type or value that it would not write."""
        known = {field.name for field in fields(cls)}
        for name, value in found.items():
            if name not in known:
                raise InputError(f"unknown feature {name!r}: this flashtune knows {', '.join(sorted(known))}")
            expected: Any = {"window": (int, list), "page": int}.get(name, str if name in ("alignment", "mask", "mods") else bool)
            if not isinstance(value, expected) or (expected is not bool and isinstance(value, bool)):
                raise InputError(f"feature {name!r} has the impossible value {value!r}")
        window = found.get("window")
        if isinstance(window, int):
            window = (window, 0 if found.get("causal") else window)
        elif window is not None:
            if len(window) != 2 or any(s is not None and type(s) is not int for s in window):
                raise InputError(f"feature 'window' has the impossible value {window!r}: give a size or [left, right]")
            window = (window[0], window[1])
        return cls(**{**found, "window": window})

    def label(self) -> str:
        """The short form for tables and test ids: `full`, `causal`, `causal+window1024+dropout`, ..."""
        words = ["causal" if self.causal else "full"] if not self.window or self.causal else []
        words = [f"mods-{self.mods}", *["causal"] * self.causal] if self.mods else words
        if self.window is not None:
            left, right = ("inf" if side is None else str(side) for side in self.window)
            words.append(f"window{left}" if self.causal or left == right else f"window{left},{right}")
        words += [{"bool": "mask", "bias": "bias"}[self.mask]] if self.mask != "none" else []
        words += [name for name in (*FLAGS, *ASKED) if getattr(self, name)] + [f"page{self.page}"] * (self.page > 0)
        if self.has_diagonal and self.alignment == "bottom_right":
            words.append("bottom_right")
        return "+".join(words)


ASKED = ("dbias", "dslopes")
"""Gradients that a backward computes on request beside dQ, dK and dV, by extra products: part of its key, and of no forward's."""

FLAGS = tuple(sorted(field.name for field in fields(Flags) if field.name not in ("causal", *ASKED)))
"""Flags beside `causal` and the requests, in the order of labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemKey:
    """The key of the database: the user's (gpu, n, d, dtype) first, then everything else that changes the winner.

    `n` is N_kv; `n_q` equals it unless the two differ. `features` is canonical JSON (sorted keys, window rounded up to a
    power of two). `gqa_ratio` is Hq / Hkv. `bh_bucket` is B*Hq rounded up to a power of two: a measure of how full the GPU is.
    Of packed sequences `n` and `n_q` are means, B is their number, and `spread` is the longest over the mean
    (flashtune.core.problems.lengths.spread); it is 0 of others.
    """

    gpu: str
    n: int
    d: int
    dtype: DType
    direction: Direction
    d_v: int
    n_q: int
    features: str
    gqa_ratio: int
    bh_bucket: int
    spread: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Sizes):
    """One attention call as a tuner sees it: sizes, element type and features, but no data and no GPU.

    Attributes:
        batch: number of batches; of packed sequences, how many there are.
        heads: query heads.
        kv_heads: key and value heads, of which `heads` is a multiple.
        n_q: query tokens; of packed sequences, their mean.
        n_kv: key tokens; of packed sequences, their mean.
        d: head size of query and key, up to 1024. Most kernels of flashtune take up to 256, some 257 to 576, some other providers more.
        d_v: head size of the value, likewise.
        dtype: "fp16", "bf16", "fp32" or "fp8".
        features: what is computed beside softmax(scale query keyᵀ) value.
        direction: "fwd" or "bwd".
        lengths: how lengths of packed sequences differ; None means that they are equal.

    Raises:
        InputError: for sizes or features that make no problem.
    """

    features: Features = Features()
    direction: Direction = "fwd"
    lengths: Lengths | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "n_q", "n_kv", "d", "d_v"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("d", "d_v"):
            if getattr(self, name) > LARGEST_HEAD:
                raise InputError(f"{name}={getattr(self, name)} is too large: give a head size up to {LARGEST_HEAD}")
        for name, known in (("dtype", DTYPES), ("direction", DIRECTIONS)):
            if getattr(self, name) not in known:
                raise InputError(f"unknown {name} {getattr(self, name)!r}: use one of {', '.join(known)}")
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} query heads can't share {self.kv_heads} key heads: make heads a multiple of kv_heads")
        if self.features.tf32 and self.dtype != "fp32":
            raise InputError(f"tf32 needs fp32 inputs, not {self.dtype}: drop tf32 or change the dtype")
        if self.features.latent and self.d_v > self.d:
            raise InputError(f"latent values are columns of keys, which have {self.d}, not {self.d_v}: make d_v smaller, or drop latent")
        if self.features.page and (self.direction, self.dtype) not in (("fwd", "fp16"), ("fwd", "bf16"), ("fwd", "fp32")):
            raise InputError(f"pages have forwards in 16 bits and fp32, not {self.direction} in {self.dtype}: change it, or drop the page")
        if self.direction == "fwd" and (requested := self.features.asked):
            raise InputError(f"{' and '.join(requested)} can't be requested from a forward: use the direction bwd")
        if self.lengths is None and self.features.packed:
            object.__setattr__(self, "lengths", Lengths(law="equal", longest=self.n_kv))
        if self.lengths is not None and not self.features.packed:
            raise InputError("lengths are those of packed sequences: give the feature packed, too, or drop them")
        if self.lengths is not None and self.batch > MOST_SEQUENCES:
            raise InputError(f"{self.batch} packed sequences are too many: give at most {MOST_SEQUENCES}")

    @property
    def band(self) -> Band:
        """The band of visible keys."""
        return self.features.band(self.n_q, self.n_kv)

    def seen(self) -> "Problem":
        """The problem without sides of the band that hide no pair at these sizes, as dispatch runs it."""
        features = self.features
        if self.lengths is not None:
            # Its sizes are means, and the sides of a call are compiled in.
            return self
        others = features.flags()
        del others["causal"]
        band = self.band.trimmed(self.n_q, self.n_kv)
        return replace(self, features=Features.within(band, mask=features.mask, mods=features.mods, **others))

    def spec(self) -> KernelSpec:
        """The part of this problem that is compiled into a kernel; one spec is for every N, batch and head count."""
        features = self.features
        return KernelSpec(
            direction=self.direction,
            dtype=self.dtype,
            d=self.d,
            d_v=self.d_v,
            window=features.window is not None,
            mask=features.mask,
            mods=features.mods,
            **features.flags(),
        )

    def key(self, gpu: str) -> ProblemKey:
        """The database key of this problem on the GPU with the slug `gpu`."""
        features = self.features
        if self.n_q == self.n_kv and features.alignment != "top_left":
            features = replace(features, alignment="top_left")
        if features.window is not None:
            left, right = (side if side is None else next_power_of_two(side) if side else 0 for side in features.window)
            features = replace(features, window=(left, right))
        features = replace(features, page=next_power_of_two(features.page)) if features.page else features
        return ProblemKey(
            gpu=gpu,
            n=self.n_kv,
            d=self.d,
            dtype=self.dtype,
            direction=self.direction,
            d_v=self.d_v,
            n_q=self.n_q,
            features=canonical(features.as_json()),
            gqa_ratio=self.gqa_ratio,
            bh_bucket=next_power_of_two(self.batch * self.heads),
            spread=0 if self.lengths is None else spread(self.lengths.longest, self.batch, self.batch * self.n_kv),
        )

    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each packed sequence, in the order in which they lie; queries in proportion to keys, with pages all alike."""
        assert self.lengths is not None, "only packed sequences have lengths of their own"
        of_keys = self.lengths.drawn(self.batch, self.batch * self.n_kv)
        alike, others = (self.n_q,) * self.batch, of_keys if self.n_q == self.n_kv else shared(self.batch * self.n_q, of_keys)
        return tuple(zip(alike if self.features.page else others, of_keys, strict=True))

    @property
    def longest(self) -> tuple[int, int]:
        """The largest numbers of queries and of keys that lie together, of packed sequences in one."""
        lengths = ((self.n_q, self.n_kv),) if self.lengths is None else self.sequences()
        return max(n_q for n_q, _ in lengths), max(n_kv for _, n_kv in lengths)

    def shapes(self) -> "Sequence[tuple[Problem, int]]":
        """Dense problems, each with the number of batches or packed sequences that have its sizes."""
        return ((self, self.batch),) if self.lengths is None else _shapes(self)

    def visible_pairs(self) -> int:
        """The number of (query, key) pairs of one head within the band (a bias or mask removes none); of packed sequences the mean."""
        return sum(count * one.band.pairs(one.n_q, one.n_kv) for one, count in self.shapes()) // self.batch

    def scores(self) -> int:
        """The number of (query, key) pairs of all heads and batches, whatever the band."""
        return self.heads * sum(count * one.n_q * one.n_kv for one, count in self.shapes())

    @property
    def keys_read(self) -> int:
        """The number of keys that some query sees."""
        return len(self.band.keys(0, self.n_q - 1, self.n_kv))

    @property
    def contract(self) -> Pass:
        """The pass of this problem."""
        return PASSES[self.direction] if self.direction == "fwd" else backward_with(self.features.asked)

    def forward(self) -> "Problem":
        """The forward of this problem's call."""
        return replace(self, direction="fwd", features=self.features.asking(()))

    def flops(self) -> int:
        """Floating-point operations over the visible pairs, see `Pass.flops`."""
        return self.contract.flops(self, self.visible_pairs())

    def io_bytes(self) -> int:
        """The fewest bytes that the pass moves, see `Pass.io_bytes`; values that are columns of keys move with these."""
        found = self.contract.io_bytes(self, self.keys_read)
        return found - self.batch * self.kv_heads * self.keys_read * self.d_v * ITEMSIZE[self.dtype] * self.features.latent

    def label(self) -> str:
        """The short form for tables and test ids: `n4096-d128-bf16-causal`, and `...-bwd` of a backward."""
        n = f"n{self.n_kv}" if self.n_q == self.n_kv else f"n{self.n_q}x{self.n_kv}"
        d = f"d{self.d}" if self.d == self.d_v else f"d{self.d}x{self.d_v}"
        gqa = f"-gqa{self.gqa_ratio}" if self.gqa_ratio > 1 else ""
        direction = "" if self.direction == "fwd" else f"-{self.direction}"
        law = "" if self.lengths is None else f"-{self.batch}{self.lengths.law}"
        return f"{n}{law}-{d}-{self.dtype}-{self.features.label()}{gqa}{direction}"


def wide_heads(d: int, d_v: int) -> bool:
    """True for heads beyond those that every family takes, whose kernels are unlike others, or only providers'."""
    return max(d, d_v) > MAX_HEAD_DIM


def unfit_heads(d: int, d_v: int, most: int = WIDEST_HEAD, whose: str = "kernels") -> str | None:
    """Reason why no kernel, or none of those `whose` heads have up to `most` columns, takes heads of these sizes; None where some may."""
    return None if 0 < d <= most and 0 < d_v <= most else f"{whose} take head sizes of 1 to {most}, not {d_v if 0 < d <= most else d}"


@lru_cache(maxsize=256)
def _shapes(packed: Problem) -> tuple[tuple[Problem, int], ...]:
    plain = replace(packed, batch=1, lengths=None, features=packed.features.of_one)
    return tuple((replace(plain, n_q=n_q, n_kv=n_kv), count) for (n_q, n_kv), count in Counter(packed.sequences()).items())
