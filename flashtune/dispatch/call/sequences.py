"""Packed sequences and paged caches as one kind of call: its tensors, its numbers, and the problem that it is."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from flashtune.core.problems.band import Alignment, Band
from flashtune.core.problems.config import Direction
from flashtune.core.problems.lengths import Lengths, spread
from flashtune.core.problems.parameters import CallParameters
from flashtune.core.problems.problem import MOST_SEQUENCES, Features, Problem, next_power_of_two, unfit_heads
from flashtune.core.pytorch.attention import in_columns
from flashtune.core.pytorch.dtypes import KERNEL_DTYPES


class Packed(NamedTuple):
    """Tensors of a call: query (T_q, Hq, D), key (T_k, Hkv, D), value (T_k, Hkv, D_v); (sequences + 1,) integers where each sequence's
    queries and keys begin and the last one's end; (sequences,) numbers of keys that are used of each, or None for all; slopes
    (sequences, Hq) and sinks (Hq,), or None.

    With a table (sequences, pages) of blocks key is (blocks, page, Hkv, D) and value (blocks, page, Hkv, D_v), with any strides, `cu_k` is
    `cu_q`, `used` are all lengths, and key and value have factors (Hkv,) or (sequences, Hkv), float32, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_q: Tensor
    cu_k: Tensor
    used: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    table: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return self.cu_q.shape[0] - 1

    @property
    def latent(self) -> bool:
        """True if paged values are the first columns of keys, in the same memory.

        Of fp8 caches, whose keys Triton wouldn't load ahead then, reading both takes 0.76 of the time (16 heads of 576/512 on an H200).
        """
        return self.table is not None and self.key.dtype.itemsize > 1 and in_columns(self.key, self.value)

    @property
    def empty(self) -> bool:
        """True where there is nothing to compute."""
        return 0 in (self.sequences, *self.query.shape, *self.key.shape, *self.value.shape)


class Numbers(NamedTuple):
    """Numbers of a call: bounds of the lengths, the scale, the sides of the band (-1: unbounded), its diagonal, features, and the splits of
    pages, None for as many as suit."""

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
    splits: int | None = None

    @property
    def band(self) -> Band:
        """Band of each sequence, whose diagonal is 1 where it ends at the last key, else 0."""
        left, right = (None if side < 0 else side for side in (self.left, self.right))
        return Band(left=left, right=right, diagonal=int(self.bottom_right))

    @property
    def alignment(self) -> Alignment:
        """Where the diagonal of each sequence begins."""
        return "bottom_right" if self.bottom_right else "top_left"

    def parameters(self, seed: int = 0) -> CallParameters:
        """Parameters of a launch beside tensors."""
        return CallParameters(scale=self.scale, band=self.band, softcap=self.softcap, dropout_p=self.dropout_p, seed=seed)

    def of_launch(self) -> dict[str, Any]:
        """Numbers of a launch without dropout."""
        return {"scale": self.scale, "softcap": self.softcap, **self.band.keywords()}

    def words(self) -> dict[str, Any]:
        """Arguments of `attention` that mean the same for one sequence, but for dropout's."""
        found = {"window": (self.left, self.right), "causal_alignment": self.alignment, "scale": self.scale, "softcap": self.softcap}
        return found | {"allow_tf32": self.tf32}


def parameters_of(packed: Packed, numbers: Numbers, seed: int) -> CallParameters:
    """Parameters of a launch beside its operands."""
    return replace(
        numbers.parameters(seed),
        slopes=packed.slopes,
        sinks=None if packed.sinks is None else packed.sinks.expand(packed.sequences, -1),
        lengths=(packed.cu_q, packed.cu_k, packed.used),
    )


def most_keys(packed: Packed, numbers: Numbers) -> int:
    """Bound of a sequence's keys in pages, at least 1."""
    assert packed.table is not None, "pages have a table"
    return max(1, min(numbers.max_k, packed.table.shape[1] * packed.key.shape[1]))


def octaves_of(packed: Packed, numbers: Numbers) -> tuple[int, int, int]:
    """Lengths of a call as its host knows them, to powers of two: the means of queries and of keys, and the longest over the mean. Of keys
    in pages it knows a bound alone, which counts as the length of each sequence."""
    if packed.table is not None:
        return _octaves(packed.sequences, packed.query.shape[0], None, most_keys(packed, numbers))
    return _octaves(packed.sequences, packed.query.shape[0], packed.key.shape[0], numbers.max_k)


def _octaves(sequences: int, of_q: int, of_k: int | None, longest: int) -> tuple[int, int, int]:
    """`octaves_of` of so many rows of queries and of keys, the latter None in pages, and the bound of a sequence's keys."""
    mean_q = spread(of_q, 1, sequences)
    if of_k is None:
        return mean_q, next_power_of_two(longest), 1
    return mean_q, spread(of_k, 1, sequences), spread(longest, sequences, of_k)


def problem_of(packed: Packed, numbers: Numbers, direction: Direction = "fwd", *, exact: bool = False, mods: str = "") -> Problem | None:
    """The problem of calls like this one, by octaves of lengths (`octaves_of`) or an `exact` one, and with the hash of functions; None
    where no kernel takes such tensors."""
    query, key, value = packed[:3]
    dtype, d, d_v, kv_heads = KERNEL_DTYPES.get(query.dtype), query.shape[2], value.shape[-1], key.shape[-2]
    if dtype is None or dtype == "fp8" or unfit_heads(d, d_v) is not None or 0 in (packed.sequences, kv_heads):
        return None
    band = numbers.band
    features = Features(
        causal=band.right == 0,
        window=(band.left, band.right),
        alignment=numbers.alignment,
        softcap=numbers.softcap > 0.0,
        dropout=numbers.dropout_p > 0.0,
        alibi=packed.slopes is not None,
        sinks=packed.sinks is not None,
        tf32=numbers.tf32 and dtype == "fp32",
        packed=True,
        latent=packed.latent,
        mods=mods,
        page=0 if packed.table is None else key.shape[1],
    )
    n_q, n_kv, ratio = octaves_of(packed, numbers)
    longest = ratio * n_kv
    if exact:
        n_q, n_kv = (max(1, round(x.shape[0] / packed.sequences)) for x in (query, key))
        longest = numbers.max_k
        if packed.table is not None:
            longest = n_kv = most_keys(packed, numbers)
    sequences = min(packed.sequences, MOST_SEQUENCES)
    return Problem(
        batch=sequences,
        heads=query.shape[1],
        kv_heads=kv_heads,
        n_q=n_q,
        n_kv=n_kv,
        d=d,
        d_v=d_v,
        dtype=dtype,
        features=features,
        direction=direction,
        lengths=Lengths.met(longest, sequences, sequences * n_kv),
    )


def by_octaves(problem: Problem) -> Problem:
    """The problem that `problem_of` makes of calls of this one: of packed sequences, with lengths to powers of two (`octaves_of`)."""
    assert problem.lengths is not None, "packed sequences have lengths"
    sequences, longest = problem.batch, problem.lengths.longest
    rows_k = None if problem.features.page else problem.n_kv * sequences
    of_q, of_k, ratio = _octaves(sequences, problem.n_q * sequences, rows_k, longest)
    return replace(problem, n_q=of_q, n_kv=of_k, lengths=Lengths.met(ratio * of_k, sequences, sequences * of_k))


def rows_last(x: Tensor) -> Tensor:
    """Packed rows (T, H, D) as kernels take them: (1, H, T, D) with stride 0 of the batch."""
    rows, heads, columns = x.shape
    of_rows, of_heads, of_columns = x.stride()
    return x.as_strided((1, heads, rows, columns), (0, of_heads, of_rows, of_columns))


def viewed(operands: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Operands as kernels take them: with a batch in front, and rows behind heads."""
    return tuple(None if x is None else rows_last(x) if x.dim() == 3 else x[None] for x in operands)
