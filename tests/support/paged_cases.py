"""Paged caches for tests: cases, inputs whose unused memory and table entries are poison, and each sequence by the reference in float64."""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.band import Sides
from flashtune.core.problems.tolerances import LSE_RTOL, TOLERANCES

Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of queries and of keys of each sequence."""

DECODE: Lengths = ((1, 1, 1, 1, 0, 1), (70, 0, 16, 33, 9, 1))
CHUNKS: Lengths = ((5, 0, 33, 1, 70, 2), (20, 3, 33, 65, 90, 0))
LONG: Lengths = ((1, 1, 3, 1), (700, 31, 520, 0))
"""A step with one query to a sequence, chunks at the ends of caches, and caches long enough to be split; some sequences have no keys."""

CASES: dict[str, dict[str, Any]] = {
    "decode": {},
    "decode, causal": {"is_causal": True},
    "pages of one key": {"page": 1},
    "pages of seven keys": {"page": 7, "is_causal": True, "lengths": CHUNKS},
    "pages of 64 keys": {"page": 64, "is_causal": True, "lengths": CHUNKS},
    "pages of 256 keys": {"page": 256, "window_size": (9, 4), "lengths": CHUNKS},
    "heads before keys": {"hnd": True, "is_causal": True, "lengths": CHUNKS},
    "one head a key head": {"kv_heads": 4},
    "eight heads a key head": {"heads": 8, "kv_heads": 1, "is_causal": True, "lengths": CHUNKS},
    "twenty heads a key head": {"heads": 20, "kv_heads": 1},
    "chunks": {"lengths": CHUNKS},
    "chunks, causal": {"is_causal": True, "lengths": CHUNKS},
    "chunks, window": {"window_size": (7, 3), "lengths": CHUNKS},
    "chunks, from the first key": {"is_causal": True, "causal_alignment": "top_left", "lengths": CHUNKS},
    "decode, window": {"window_size": (20, 0)},
    "soft cap": {"softcap": 2.0, "is_causal": True, "lengths": CHUNKS},
    "slopes": {"slopes": "heads"},
    "slopes of sequences": {"slopes": "sequences", "is_causal": True, "lengths": CHUNKS},
    "sinks": {"sinks": True, "is_causal": True, "lengths": CHUNKS},
    "negative scale": {"scale": -0.4},
    "values of another size": {"d_v": 32},
    "padded heads": {"d": 80, "page": 32},
    "wide heads": {"d": 256},
    "split": {"lengths": LONG, "num_splits": 3},
    "split, everything": {"lengths": LONG, "num_splits": 2, "window_size": (600, 0), "softcap": 3.0, "slopes": "heads", "sinks": True},
    "many splits": {"lengths": LONG, "num_splits": 40, "page": 128},
    "unsplit": {"lengths": LONG, "num_splits": 1},
    "fp8": {"cache": torch.float8_e4m3fn, "is_causal": True, "lengths": CHUNKS},
    "fp8 with factors": {"cache": torch.float8_e4m3fn, "descale": "sequences"},
    "fp8 with factors, soft cap": {"cache": torch.float8_e4m3fn, "descale": "heads", "softcap": 2.0, "lengths": LONG, "num_splits": 3},
    "latent": {"latent": True, "d": 96, "d_v": 64, "heads": 16, "kv_heads": 1},
    "latent, padded, two key heads": {"latent": True, "d": 72, "d_v": 24, "heads": 6, "page": 7, "is_causal": True, "lengths": CHUNKS},
    "latent, window, sinks": {"latent": True, "d": 48, "d_v": 32, "kv_heads": 1, "window_size": (7, 3), "sinks": True, "lengths": CHUNKS},
    "latent, split, everything": {
        "latent": True,
        "d": 96,
        "d_v": 64,
        "heads": 20,
        "kv_heads": 1,
        "lengths": LONG,
        "num_splits": 3,
        "is_causal": True,
        "softcap": 3.0,
        "slopes": "heads",
        "sinks": True,
        "page": 64,
    },
    "latent, fp8 with factors": {
        "latent": True,
        "d": 96,
        "d_v": 64,
        "kv_heads": 1,
        "cache": torch.float8_e4m3fn,
        "descale": "sequences",
        "lengths": CHUNKS,
    },
    "latent, values as wide as keys": {"latent": True, "d": 32, "hnd": True},
    "latent, 576 and 512": {"latent": True, "d": 576, "d_v": 512, "heads": 16, "kv_heads": 1, "is_causal": True, "page": 64},
    "wide keys and values": {"d": 576, "d_v": 512, "kv_heads": 1, "is_causal": True, "lengths": CHUNKS},
    "fp8 of another kind": {"cache": torch.float8_e5m2, "descale": "heads", "lengths": CHUNKS},
}


class Inputs(NamedTuple):
    """Arguments of a call, its lengths, and each sequence's keys and values, float64."""

    arguments: dict[str, Any]
    lengths: Lengths
    keys: list[Tensor]
    values: list[Tensor]

    def call(self, **changed: Any) -> tuple[Tensor, Tensor]:
        out, lse = dispatch.attention_varlen(**self.arguments | changed)
        return out, lse


def inputs(
    case: dict[str, Any], *, dtype: torch.dtype = torch.float16, device: str = "cpu", padding: int = 3, seed: int = 1, pages: int = 0
) -> Inputs:
    """Inputs of a case; `pages` are columns of the table beside those that are used."""
    generator = torch.Generator().manual_seed(seed)
    words = dict(case)
    page, lengths, cache, d = words.pop("page", 16), words.pop("lengths", DECODE), words.pop("cache", dtype), words.pop("d", 16)
    latent = words.pop("latent", False)
    heads, kv_heads, d_v = words.pop("heads", 4), words.pop("kv_heads", 2), words.pop("d_v", d)
    n_q, n_kv = lengths
    need = [-(-n // page) for n in n_kv]
    blocks = torch.randperm(sum(need) + 3, generator=generator)
    # Entries behind the used ones are blocks that don't exist.
    table = torch.tensor([-1, 2**31 - 1], dtype=torch.int32).repeat(len(n_kv), max(need) + pages)[:, : max(need) + pages].clone()
    for b, (start, stop) in enumerate(itertools.pairwise([0, *itertools.accumulate(need)])):
        table[b, : stop - start] = blocks[start:stop]
    caches, packed = [], []
    for width in (d, d_v):
        memory = torch.full((len(blocks), kv_heads, page, width), math.nan).to(cache).transpose(1, 2)
        memory = memory if words.get("hnd") else memory.contiguous()
        rows = [torch.randn(n, kv_heads, width, generator=generator).to(cache) for n in n_kv]
        for b, x in enumerate(rows):
            for place in range(0, len(x), page):
                some = x[place : place + page]
                memory[int(table[b, place // page]), : len(some)] = some
        caches.append(memory.to(device))
        packed.append([x.double() for x in rows])
    if latent:
        # Columns behind those of the values are other numbers.
        caches[1], packed[1] = caches[0][..., :d_v], [x[..., :d_v].clone() for x in packed[0]]
    words.pop("hnd", None)
    bounds = torch.tensor([0, *itertools.accumulate(n_q)], dtype=torch.int32, device=device)
    query = torch.randn(int(bounds[-1]) + padding, heads, d, generator=generator)
    query[len(query) - padding :] = math.nan
    if (slopes := words.pop("slopes", None)) is not None:
        words["alibi_slopes"] = torch.rand((heads,) if slopes == "heads" else (len(n_q), heads), generator=generator).to(device)
    if words.pop("sinks", False):
        words["sinks"] = torch.randn(heads, generator=generator).to(device)
    if (descale := words.pop("descale", None)) is not None:
        for name, rows in zip(("k_descale", "v_descale"), packed, strict=True):
            factors = torch.rand((kv_heads,) if descale == "heads" else (len(n_kv), kv_heads), generator=generator) + 0.5
            words[name] = factors.to(device)
            rows[:] = [x * factor.double()[:, None] for x, factor in zip(rows, factors.expand(len(n_kv), -1), strict=True)]
    given = {
        "query": query.to(device, dtype),
        "key": caches[0],
        "value": caches[1],
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": None,
        "max_seqlen_q": max(n_q),
        "max_seqlen_k": max(n_kv),
        "block_table": table.to(device),
        "seqused_k": torch.tensor(n_kv, dtype=torch.int32, device=device),
        "enable_gqa": True,
        "return_lse": True,
    }
    return Inputs(given | words, lengths, *packed)


def agrees(given: Inputs, *, kind: str = "fp16", repeated: bool = True, **changed: Any) -> None:
    """Output and LSE are the reference's, and exactly 0 and -inf where no sequence is, or no key; `repeated` calls by the plan, too."""
    words, bound = given.arguments | changed, TOLERANCES[kind]
    out, lse = given.call(**changed)
    assert not repeated or torch.equal(out, given.call(**changed)[0])
    right, right_lse = right_of(words, given)
    assert out.dtype == words["query"].dtype and lse.dtype == torch.float32
    empty = (right_lse == -math.inf).T
    assert not out.cpu()[empty].any() and bool((lse.cpu().T[empty] == -math.inf).all())
    torch.testing.assert_close(out.cpu().double(), right, atol=bound.atol, rtol=bound.rtol)
    torch.testing.assert_close(lse.cpu().double(), right_lse, atol=bound.lse_atol, rtol=LSE_RTOL)


def right_of(words: dict[str, Any], given: Inputs) -> tuple[Tensor, Tensor]:
    """Output and LSE of a call with these arguments by the reference, float64, on the CPU."""
    query, bounds = words["query"].cpu().double(), words["cu_seqlens_q"].tolist()
    sides = Sides.of(words.get("window_size", (-1, -1)), words.get("is_causal", False), words.get("causal_alignment", "bottom_right"))
    sequences, heads = len(bounds) - 1, query.shape[1]
    slopes, sinks = words.get("alibi_slopes"), words.get("sinks")
    right = torch.zeros(*query.shape[:2], words["value"].shape[3], dtype=torch.float64)
    right_lse = torch.full((heads, len(query)), -math.inf, dtype=torch.float64)
    for b, (n_q, n_kv) in enumerate(zip(*given.lengths, strict=True)):
        here = slice(bounds[b], bounds[b] + n_q)
        one, its_lse = reference.attention(
            *(x.transpose(0, 1)[None] for x in (query[here], given.keys[b], given.values[b])),
            scale=words.get("scale", query.shape[2] ** -0.5),
            band=sides.band(n_q, n_kv),
            softcap=words.get("softcap", 0.0),
            slopes=None if slopes is None else slopes.cpu().double().expand(sequences, heads)[b : b + 1],
            sinks=None if sinks is None else sinks.cpu().double()[None],
        )
        right[here], right_lse[:, here] = one[0].transpose(0, 1), its_lse[0]
    return right, right_lse


def without_gone_keys(given: Inputs, left: int) -> Inputs:
    """The call after the keys before its windows were lost, and the table's entries of their pages, of which one is still a block."""
    words, page = given.arguments, given.arguments["key"].shape[1]
    table = words["block_table"].clone()
    for b, (n_q, n_kv) in enumerate(zip(*given.lengths, strict=True)):
        gone = max(n_kv - n_q - left, 0)
        for cache in (words["key"], words["value"]):
            for first in range(0, gone, page):
                cache[int(table[b, first // page]), : min(gone - first, page)] = math.nan
        table[b, : max(gone // page - 1, 0)] = -1
    return given._replace(arguments=words | {"block_table": table})
