"""The calls of `guard/calls.py`: words for each axis, of which calls are drawn with a fixed seed."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import call_tensors
from call_tensors import Words
from driven_calls import Given

SEED = 20261129

Axes = dict[str, tuple[str, ...]]
"""Words of each axis; those that come more often are drawn more often, and empty ones aren't said."""

GPUS = ("on h100", "on h200")
SIZES = ("D128", "D128", "D64", "D64", "D32", "D80", "D96", "D192", "D256", "D192 Dv128", "D64 Dv128", "D128 Dv64", "D40")
HEADS = ("16 heads", "16 heads", "5 heads", "16 heads gqa2", "24 heads gqa3", "32 heads gqa4", "64 heads gqa8", "8 heads mqa")
LAYOUTS = ("", "", "", "heads and rows swapped", "heads and rows swapped", "padded rows", "odd rows")
BANDS = ("", "", "causal", "causal", "causal bottom_right", "causal top_left", "window 255 back", "window 100 and 40", "window 4 ahead")

DENSE: Axes = {
    "dtype": ("bf16", "bf16", "bf16", "fp16", "fp16", "fp32"),
    "size": (*SIZES, "D264"),
    "heads": HEADS,
    "batch": ("batch 1", "batch 2", "batch 2", "batch 16", "batches 2x3", "no batch"),
    "lengths": (*call_tensors.LENGTHS, "n1024", "n4096"),
    "band": (*BANDS, "window 1023 back"),
    "numbers": ("", "", "", "", *call_tensors.NUMBERS),
    "extra": (
        "", "", "", "", "", "", "slopes", "slopes of each", "sinks", "narrow sinks", "sinks and slopes", "boolean mask", "mask of batches",
        "mask of keys", "bias", "bias of heads", "wide bias", "trained bias",
    ),
    "layout": (*LAYOUTS, "unaligned"),
    "pass": ("", "", "backward", "backward", "backward of queries", "backward of keys and values"),
    "measured": ("", "", "", "unmeasured"),
    "gpu": GPUS,
}  # fmt: skip

FP8: Axes = DENSE | {
    "dtype": ("fp8",),
    "extra": ("", "factors", "numbers as factors", "sinks"),
    "pass": ("",),
    "numbers": ("", "softcap", "lse", "scale 0.3"),
}

PACKED: Axes = {
    "dtype": ("bf16", "bf16", "fp16", "fp32"),
    "size": SIZES,
    "heads": HEADS,
    "lengths": tuple(call_tensors.SEQUENCES),
    "rows": ("", "", "rows behind", "rows behind, int64 bounds"),
    "band": BANDS,
    "numbers": ("", "", "", "", *call_tensors.NUMBERS),
    "extra": ("", "", "", "", "slopes", "slopes of each", "sinks", "sinks", "narrow sinks", "used keys", "used keys and sinks"),
    "layout": (*LAYOUTS, "one tensor", "unaligned"),
    "pass": ("", "backward", "backward", "backward of queries", "backward of keys and values"),
    "measured": ("", "", "", "unmeasured"),
    "gpu": GPUS,
}

PAGED: Axes = {
    "dtype": ("bf16", "bf16", "fp16", "fp32"),
    "size": SIZES,
    "heads": HEADS,
    "lengths": tuple(call_tensors.CACHED),
    "page": ("page 1", "page 7", "page 16", "page 16", "page 64", "page 128", "page 256"),
    "caches": ("", "", "", "heads first", "heads first", "caches in fp8", "caches in fp8 with factors", "caches in e5m2 with factors"),
    "splits": ("", "", "", "1 split", "3 splits"),
    "band": BANDS,
    "numbers": ("", "", "", "softcap", "lse", "scale 0.3", "negative scale"),
    "extra": ("", "", "", "slopes", "slopes of each", "sinks", "narrow sinks", "sinks and slopes"),
    "layout": LAYOUTS,
    "gpu": GPUS,
}

FLEX: Axes = {
    "functions": tuple(call_tensors.FUNCTIONS),
    "mask": ("", "", "blocks of 128", "blocks of 64"),
    "dtype": ("bf16", "bf16", "fp16", "fp32"),
    "size": ("D64", "D64", "D128", "D128", "D32", "D80", "D96", "D256", "D64 Dv128"),
    "heads": ("4 heads", "4 heads", "16 heads gqa2", "32 heads gqa4"),
    "batch": ("batch 1", "batch 2"),
    "lengths": ("n128", "n577", "n1024", "n4096", "n32768", "n131072", "300 of 4096", "1 of 8192"),
    "numbers": ("", "", "lse", "scale 0.3"),
    "layout": ("", "", "heads and rows swapped", "padded rows"),
    "pass": ("", "", "backward", "backward of queries", "backward, also of captured"),
    "measured": ("", "", "unmeasured"),
    "gpu": GPUS,
}

PACKED_FLEX: Axes = (
    {"functions": FLEX["functions"]}
    | PACKED
    | {
        "size": FLEX["size"],
        "heads": FLEX["heads"],
        "band": ("", "", "causal", "causal top_left", "window 100 and 40"),
        "numbers": ("", "", "lse", "scale 0.3", "deterministic"),
        "extra": ("", "", "used keys"),
        "pass": FLEX["pass"],
    }
)

DOCUMENTS: Axes = (
    {"documents": tuple(call_tensors.DOCUMENTS)}
    | {name: words for name, words in FLEX.items() if name != "functions"}
    | {
        "lengths": ("n577", "n1024", "n1024", "n4096", "n8192"),
    }
)


class Way(NamedTuple):
    """Calls of one kind: how many are drawn, of which axes, by which face, and what makes their arguments."""

    count: int
    axes: Axes
    face: str
    make: Callable[[Words], Given]


WAYS = {
    "dense": Way(620, DENSE, "attention", call_tensors.dense),
    "dense, fp8": Way(60, FP8, "attention", call_tensors.dense),
    "packed": Way(460, PACKED, "attention_varlen", call_tensors.packed),
    "paged": Way(300, PAGED, "attention_varlen", call_tensors.paged),
    "functions": Way(280, FLEX, "flex_attention", call_tensors.functions),
    "packed functions": Way(160, PACKED_FLEX, "attention_varlen", call_tensors.packed),
    "documents": Way(140, DOCUMENTS, "flex_attention", call_tensors.functions),
}

MOST_PAIRS = 1 << 23
"""Most pairs of queries and keys of a mask that lies in memory, or is compared with its blocks."""
MOST_COPIED = 1 << 22
"""Most elements of a tensor that a call copies."""


class Asked(NamedTuple):
    """A call by its name, with its way and words."""

    way: str
    words: Words

    @property
    def name(self) -> str:
        """All that is said of it, in a line."""
        return " ".join([self.way.removesuffix(", fp8"), *filter(None, self.words.values())])

    def arguments(self) -> dict[str, Any]:
        """The arguments of `driven_calls.entry`."""
        way = WAYS[self.way]
        words = dict(self.words)
        return {
            "gpu": words.pop("gpu").removeprefix("on "),
            "unmeasured": bool(words.pop("measured", "")),
            "face": way.face,
            "make": lambda: way.make(words),
        }


def calls() -> Iterator[Asked]:
    """All calls, each once."""
    for name, way in WAYS.items():
        chance, met = random.Random(f"{SEED} {name}"), set[str]()
        while len(met) < way.count:
            # Of `random` alone the sequence is promised to be the same in all versions.
            words = {axis: many[int(chance.random() * len(many))] for axis, many in way.axes.items()}
            asked = Asked(name, words)
            if asked.name not in met and _fits(words):
                met.add(asked.name)
                yield asked


def _fits(words: Words) -> bool:
    """True for calls that make sense, and that touch little memory here: masks and copies are small."""

    def get(axis: str) -> str:
        return words.get(axis, "")

    extra, layout, asked = get("extra"), get("layout"), get("pass")
    masked = "mask" in extra or "bias" in extra
    many = call_tensors.HEADS[words["heads"]][0] * math.prod(call_tensors.BATCHES.get(get("batch"), (1,)))
    n_q, n_kv = call_tensors.LENGTHS.get(get("lengths"), (1, 1))
    rows = max(n_q, n_kv, *map(sum, call_tensors.SEQUENCES.get(get("lengths"), ()) if "rows" in words else ()))
    # Gradients of wide heads take thousands of launches there.
    if asked and get("size") == "D264" and rows > 65536:
        return False
    copied = layout in ("unaligned", "odd rows") or get("numbers") == "negative scale" or ("sinks" in extra and asked)
    if copied and rows * many * 128 > MOST_COPIED:
        return False
    if (get("mask") or masked) and n_q * n_kv * many > MOST_PAIRS:
        return False
    if masked and (get("band") or (get("batch") == "no batch" and "batches" in extra)):
        return False
    if get("batch") == "no batch" and "each" in extra:
        return False
    # A BlockMask is made of whole blocks, and of a mask.
    if get("mask") and (n_q % 64 or get("functions") in ("cap", "relative", "gated", "squared")):
        return False
    # Gradients of captured tensors are added up in no fixed order.
    if "captured" in asked and get("numbers") == "deterministic":
        return False
    return "captured" not in asked or get("functions") in _LEARNED or get("documents") in _LEARNED


_LEARNED = [name for name, case in (call_tensors.FUNCTIONS | call_tensors.DOCUMENTS).items() if case.trained]
"""Functions with captured tensors that may get gradients."""
