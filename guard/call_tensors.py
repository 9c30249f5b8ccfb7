"""Tensors and other arguments of the calls that `guard/call_list.py` names, by the words of each."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from call_functions import DOCUMENTS, FUNCTIONS, Case, kinds_of
from driven_calls import Given
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

Words = dict[str, str]
"""A word of each axis of a call; empty for what is usual."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
SIZES = {
    "D32": (32, 32), "D40": (40, 40), "D64": (64, 64), "D72": (72, 72), "D80": (80, 80), "D96": (96, 96), "D128": (128, 128),
    "D192": (192, 192), "D256": (256, 256), "D192 Dv128": (192, 128), "D64 Dv128": (64, 128), "D128 Dv64": (128, 64), "D264": (264, 264),
}  # fmt: skip
HEADS = {
    "4 heads": (4, 4), "5 heads": (5, 5), "16 heads": (16, 16), "16 heads gqa2": (16, 8), "24 heads gqa3": (24, 8),
    "32 heads gqa4": (32, 8), "64 heads gqa8": (64, 8), "8 heads mqa": (8, 1),
}  # fmt: skip
BATCHES: dict[str, tuple[int, ...]] = {"no batch": (), "batch 1": (1,), "batch 2": (2,), "batch 16": (16,), "batches 2x3": (2, 3)}
LENGTHS = {
    "n1": (1, 1), "n17": (17, 17), "n128": (128, 128), "n577": (577, 577), "n1024": (1024, 1024), "n2048": (2048, 2048),
    "n4096": (4096, 4096), "n8192": (8192, 8192), "n32768": (32768, 32768), "n131072": (131072, 131072), "1 of 300": (1, 300),
    "1 of 8192": (1, 8192), "1 of 131072": (1, 131072), "4 of 2000": (4, 2000), "300 of 4096": (300, 4096), "2048 of 100": (2048, 100),
}  # fmt: skip
SEQUENCES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "even": ((512,) * 8,) * 2,
    "uneven": ((700, 33, 1, 250, 900, 64, 128, 5),) * 2,
    "one long": ((8192, *(64,) * 15),) * 2,
    "short": ((33,) * 64,) * 2,
    "long": ((65536, 65536),) * 2,
    "one sequence": ((3000,),) * 2,
    "padded list": ((300, 200, 0, 0, 0),) * 2,
    "more keys": ((5, 130, 1, 64), (700, 130, 33, 1000)),
    "fewer keys": ((500, 130, 40), (7, 130, 0)),
    "steps": ((1,) * 32, tuple(range(100, 3300, 100))),
}
CACHED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "steps": ((1,) * 16, tuple(range(200, 8200, 500))),
    "one step": ((1,), (131072,)),
    "drafts": ((4,) * 8, (3000,) * 8),
    "chunks": ((130, 5, 1, 64), (700, 5, 33, 2000)),
    "prefill": ((1024, 2048), (1024, 2048)),
    "many steps": ((1,) * 256, (900,) * 256),
}
BANDS: dict[str, dict[str, Any]] = {
    "": {},
    "causal": {"is_causal": True},
    "causal bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "causal top_left": {"is_causal": True, "causal_alignment": "top_left"},
    "window 255 back": {"window": (255, 0)},
    "window 1023 back": {"window": (1023, 0)},
    "window 100 and 40": {"window": (100, 40)},
    "window 4 ahead": {"window": (None, 4)},
}
NUMBERS: dict[str, dict[str, Any]] = {
    "": {},
    "lse": {"return_lse": True},
    "softcap": {"softcap": 20.0},
    "scale 0.3": {"scale": 0.3},
    "negative scale": {"scale": -0.2},
    "dropout": {"dropout_p": 0.1, "seed": 5},
    "dropout and lse": {"dropout_p": 0.25, "seed": 2**40 + 3, "return_lse": True},
    "deterministic": {"deterministic": True},
    "tf32": {"allow_tf32": True},
}


def _random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A small tensor, whose values nobody reads."""
    return torch.full(size, 0.5).to(dtype)


def _laid(shape: tuple[int, ...], dtype: torch.dtype, layout: str, rows: int) -> Tensor:
    """A tensor of a shape in memory of a layout, where `rows` is the dimension of rows and that of heads lies beside it."""
    heads = rows - 1 if rows == len(shape) - 2 else rows + 1
    if layout in ("heads and rows swapped", "padded rows", "unaligned") and len(shape) < 3:
        layout = ""
    if layout == "heads and rows swapped":
        turned = list(shape)
        turned[rows], turned[heads] = turned[heads], turned[rows]
        return torch.empty(turned, dtype=dtype).transpose(rows, heads)
    if layout == "padded rows":
        return torch.empty((*shape[:-1], shape[-1] + 16), dtype=dtype)[..., : shape[-1]]
    if layout == "unaligned":
        return torch.empty(math.prod(shape) + 1, dtype=dtype)[1:].view(shape)
    if layout == "odd rows":
        return torch.empty((*shape[:-1], shape[-1] + 1), dtype=dtype)[..., : shape[-1]]
    return torch.empty(shape, dtype=dtype)


def _trained(tensors: list[Tensor], asked: str) -> None:
    """Have tensors ask for gradients: all, or those that a pass names."""
    wanted = {"backward of queries": (0,), "backward of keys and values": (1, 2)}.get(
        asked, (0, 1, 2) if asked.startswith("backward") else ()
    )
    for place in wanted:
        tensors[place].requires_grad_()


def _per_head(word: str, heads: int, batch: tuple[int, ...], *, trained: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Slopes or sinks."""
    found: dict[str, Tensor] = {}
    if "slopes" in word:
        found["alibi_slopes"] = _random(*(batch if "each" in word else ()), heads)
    if "sinks" in word:
        found["sinks"] = _random(heads, dtype=dtype if "narrow" in word else torch.float32).requires_grad_(trained)
    return found


def dense(words: Words) -> Given:
    """A call of `attention`."""
    dtype, (d, d_v), (heads, kv_heads) = DTYPES[words["dtype"]], SIZES[words["size"]], HEADS[words["heads"]]
    (n_q, n_kv), batch, extra = LENGTHS[words["lengths"]], BATCHES[words["batch"]], words["extra"]
    shapes = ((*batch, heads, n_q, d), (*batch, kv_heads, n_kv, d), (*batch, kv_heads, n_kv, d_v))
    tensors = [_laid(shape, dtype, words["layout"], len(shape) - 2) for shape in shapes]
    trains = words["pass"].startswith("backward")
    _trained(tensors, words["pass"])
    given: dict[str, Any] = dict(zip(("query", "key", "value"), tensors, strict=True))
    given |= _per_head(extra, heads, batch, trained=trains, dtype=torch.bfloat16 if dtype is DTYPES["fp8"] else dtype)
    kinds = {
        "boolean mask": ((n_q, n_kv), torch.bool), "mask of batches": ((*batch, 1, n_q, n_kv), torch.bool),
        "mask of keys": ((*batch, 1, 1, n_kv), torch.bool), "bias": ((*batch, heads, n_q, n_kv), dtype),
        "bias of heads": ((heads, n_q, n_kv), dtype), "wide bias": ((n_q, n_kv), torch.float32),
        "trained bias": ((heads, n_q, n_kv), dtype),
    }  # fmt: skip
    if extra in kinds:
        shape, kind = kinds[extra]
        given["attn_mask"] = torch.empty(shape, dtype=kind).requires_grad_(extra == "trained bias" and trains)
    if extra == "factors":
        given |= {"q_descale": _random(heads), "k_descale": _random(kv_heads), "v_descale": _random(kv_heads)}
    numbers: dict[str, Any] = {"q_descale": 0.5, "k_descale": 2.0, "v_descale": 0.25} if extra == "numbers as factors" else {}
    return Given(given, {"enable_gqa": heads != kv_heads, **BANDS[words["band"]], **NUMBERS[words["numbers"]], **numbers})


def _bounds(lengths: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def _varlen_words(words: Words) -> dict[str, Any]:
    """Other arguments of `attention_varlen`, whose window is a pair."""
    found = {**BANDS[words["band"]], **NUMBERS[words["numbers"]]}
    if "window" in found:
        left, right = found.pop("window")
        found["window_size"] = tuple(-1 if side is None else side for side in (left, right))
    return found


def packed(words: Words) -> Given:
    """A call of `attention_varlen`."""
    dtype, (d, d_v), (heads, kv_heads) = DTYPES[words["dtype"]], SIZES[words["size"]], HEADS[words["heads"]]
    of_q, of_k = SEQUENCES[words["lengths"]]
    layout, sequences, trains = words["layout"], len(of_q), words["pass"].startswith("backward")
    # Behind the last sequence are rows of none.
    behind = 7 if words["rows"] else 0
    rows_q, rows_k = sum(of_q) + behind, sum(of_k) + behind
    shapes = ((rows_q, heads, d), (rows_k, kv_heads, d), (rows_k, kv_heads, d_v))
    if layout == "one tensor" and of_q == of_k and d == d_v:
        whole = torch.empty((rows_q, heads + 2 * kv_heads, d), dtype=dtype)
        tensors = list(whole.split((heads, kv_heads, kv_heads), 1))
    else:
        tensors = [_laid(shape, dtype, layout, 0) for shape in shapes]
    _trained(tensors, words["pass"])
    kind = torch.int64 if words["rows"] == "rows behind, int64 bounds" else torch.int32
    given: dict[str, Any] = dict(zip(("query", "key", "value"), tensors, strict=True))
    given |= {"cu_seqlens_q": _bounds(of_q, kind), "cu_seqlens_k": _bounds(of_k, kind)}
    given |= _per_head(words["extra"], heads, (sequences,), trained=trains, dtype=dtype)
    if "used keys" in words["extra"]:
        given["seqused_k"] = torch.tensor([n // 2 for n in of_k], dtype=torch.int32)
    others = {"max_seqlen_q": max(of_q), "max_seqlen_k": max(of_k), "enable_gqa": heads != kv_heads}
    others |= _varlen_words(words)
    mods, captured = _coded(words, sequences, heads, (max(of_q), max(of_k)))
    return Given(given, others | mods, captured)


def paged(words: Words) -> Given:
    """A call of `attention_varlen` over paged caches."""
    dtype, (d, d_v), (heads, kv_heads) = DTYPES[words["dtype"]], SIZES[words["size"]], HEADS[words["heads"]]
    (of_q, of_k), page = CACHED[words["lengths"]], int(words["page"].split()[-1])
    sequences, narrow = len(of_q), words["caches"].startswith("caches in")
    cache = {"caches in fp8": torch.float8_e4m3fn, "caches in e5m2": torch.float8_e5m2}.get(
        words["caches"].removesuffix(" with factors"), dtype
    )
    pages = -(-max(of_k) // page)
    shapes = [(sequences * pages + 3, page, kv_heads, width) for width in (d, d_v)]
    swapped = "heads and rows swapped" if words["caches"] == "heads first" else ""
    key, value = (_laid(shape, cache, swapped, 1) for shape in shapes)
    given: dict[str, Any] = {
        "query": _laid((sum(of_q), heads, d), dtype, words["layout"], 0), "key": key, "value": value, "cu_seqlens_q": _bounds(of_q),
        "block_table": torch.zeros((sequences, pages), dtype=torch.int32), "seqused_k": torch.tensor(of_k, dtype=torch.int32),
    }  # fmt: skip
    given |= _per_head(words["extra"], heads, (sequences,), trained=False, dtype=dtype)
    if narrow and words["caches"].endswith("with factors"):
        given |= {"k_descale": _random(kv_heads), "v_descale": _random(sequences, kv_heads)}
    splits = {"": None, "1 split": 1, "3 splits": 3}[words["splits"]]
    others = {"max_seqlen_q": max(of_q), "max_seqlen_k": max(of_k), "enable_gqa": heads != kv_heads, "num_splits": splits}
    return Given(given, others | {"cu_seqlens_k": None} | _varlen_words(words))


def _coded(words: Words, batch: int, heads: int, sizes: tuple[int, int]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The functions of a call of packed sequences as its arguments, and the tensors that they capture."""
    if "functions" not in words:
        return {}, {}
    score, mask, captured = _made(FUNCTIONS[words["functions"]], words, (batch, heads, *sizes))
    return {name: one for name, one in (("score_mod", score), ("mask_mod", mask)) if one is not None}, captured


def _made(case: Case, words: Words, sizes: tuple[int, int, int, int]) -> tuple[Any, Any, dict[str, Tensor]]:
    """Functions with tensors that they capture, some of which ask for gradients where the call's pass says so."""
    captured = case.captured(*sizes)
    for name in case.trained if "captured" in words["pass"] else ():
        captured[name].requires_grad_()
    return *case.functions(captured), captured


def functions(words: Words) -> Given:
    """A call of `flex_attention`, with a mask as a function or as a BlockMask."""
    dtype, (d, d_v), (heads, kv_heads) = DTYPES[words["dtype"]], SIZES[words["size"]], HEADS[words["heads"]]
    (n_q, n_kv), [batch] = LENGTHS[words["lengths"]], BATCHES[words["batch"]]
    case = DOCUMENTS[words["documents"]] if "documents" in words else FUNCTIONS[words["functions"]]
    shapes = ((batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, d_v))
    tensors = [_laid(shape, dtype, words["layout"], 2) for shape in shapes]
    _trained(tensors, words["pass"])
    score, mask, captured = _made(case, words, (batch, heads, n_q, n_kv))
    others: dict[str, Any] = {"enable_gqa": heads != kv_heads, "score_mod": score}
    block_mask: Any = mask
    if mask is not None and words["mask"]:
        size = int(words["mask"].split()[-1])
        block_mask = create_block_mask(mask, batch, heads, n_q, n_kv, device="cpu", BLOCK_SIZE=size)
    others |= {name: x for name, x in NUMBERS[words["numbers"]].items() if name in ("return_lse", "scale")}
    kinds: Callable[..., None] = kinds_of(mask) if mask is not None and words["mask"] else lambda launch: None
    return Given(dict(zip(("query", "key", "value"), tensors, strict=True)), others | {"block_mask": block_mask}, captured, kinds)
