"""Paged caches by kernels in Triton's interpreter."""

import warnings
from typing import Any

import torch
from interpreting import failures_of
from paged_cases import CASES, CHUNKS, LONG, Inputs, agrees, inputs, without_gone_keys
from varlen_cases import forced

from flashtune import dispatch
from flashtune.core.system.errors import InputError, InputTypeError

warnings.filterwarnings("ignore")


REPEATED = {"slopes of sequences", "split, everything", "fp8 with factors", "chunks, causal"}
"""Cases whose second calls together have every tensor that a plan takes."""


def of_case(name: str) -> None:
    agrees(inputs(CASES[name]), repeated=name in REPEATED)


def of_float32() -> None:
    agrees(inputs({"is_causal": True, "lengths": CHUNKS}, dtype=torch.float32), kind="fp32")


def of_float32_over_fp8() -> None:
    agrees(inputs({"cache": torch.float8_e4m3fn, "descale": "heads", "lengths": CHUNKS}, dtype=torch.float32), kind="fp32")


def of_autocast() -> None:
    given = inputs({"lengths": CHUNKS})
    with torch.autocast("cpu", torch.bfloat16):
        agrees(given)


def of_long_integers() -> None:
    given = inputs({"is_causal": True})
    names = ("cu_seqlens_q", "seqused_k", "block_table")
    agrees(given, **{name: given.arguments[name].long() for name in names})


def of_bounds_of_keys() -> None:
    """Without seqused_k the lengths are those between cu_seqlens_k."""
    given = inputs({"lengths": CHUNKS})
    used = given.arguments["seqused_k"]
    agrees(given, seqused_k=None, cu_seqlens_k=torch.cat((used.new_zeros(1), used.cumsum(0, dtype=torch.int32))))


def of_hundreds_of_sequences() -> None:
    lengths = tuple(1 + i % 2 for i in range(150)), tuple(i % 9 for i in range(150))
    agrees(inputs({"lengths": lengths, "heads": 1, "kv_heads": 1, "page": 4}))


def of_other_lengths_in_as_many_rows() -> None:
    """A later call whose tensors have the same sizes, and whose longest sequence is longer, or has a larger bound."""
    for of_q in ((1,) * 60, (60, *[0] * 59), (30, *[0] * 58, 30)):
        given = inputs({"lengths": (of_q, (9,) * 60), "heads": 1, "kv_heads": 1})
        agrees(given, repeated=False)
        agrees(given, repeated=False, max_seqlen_q=1000, max_seqlen_k=4000)


def of_misuse_after_a_good_call() -> None:
    given = inputs({"lengths": CHUNKS, "cache": torch.float8_e4m3fn, "descale": "heads"})
    for _ in range(2):
        agrees(given)
    factors = given.arguments["k_descale"].clone().requires_grad_()
    for words in ({"max_seqlen_k": -1}, {"max_seqlen_q": "a"}, {"cu_seqlens_q": torch.tensor(3)}, {"k_descale": factors}):
        try:
            given.call(**words)
        except (InputError, InputTypeError):
            continue
        raise AssertionError(f"{words} are taken")


def of_nothing() -> None:
    for lengths in (((0, 0), (3, 4)), ((1, 1), (0, 0)), ((3,), (5,))):
        agrees(inputs({"lengths": lengths}, padding=3, pages=1))


def of_padding() -> None:
    """Rows of no sequence are 0 with -inf as LSE, whatever was in memory and however many heads share a key head."""
    empty = torch.empty
    for group in (3, 4, 7):
        query, cache = torch.randn(32, 2 * group, 16), torch.randn(3, 16, 2, 16)
        bounds, table = torch.arange(4, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32)
        words: dict[str, Any] = {"block_table": table, "num_splits": 1, "seqused_k": torch.full((3,), 20, dtype=torch.int32)}
        torch.empty = lambda size, *others, **more: torch.full(size, 7, **more)
        try:
            out, lse = dispatch.attention_varlen(query, cache, cache, bounds, None, 1, 20, enable_gqa=True, return_lse=True, **words)
        finally:
            torch.empty = empty
        assert not out[3:].any() and bool((lse[:, 3:] == -torch.inf).all()), group


def of_longer_bounds() -> None:
    """Bounds may be larger than lengths, and a table wider than it needs to be."""
    agrees(inputs({"lengths": LONG}, pages=40), max_seqlen_q=64, max_seqlen_k=4096)


def of_windows() -> None:
    """Keys before a window may be gone, and entries of their pages garbage."""
    agrees(without_gone_keys(inputs({"lengths": ((1, 1), (90, 200)), "window_size": (16, 0), "page": 8}), 16))


def alone(given: Inputs, b: int) -> torch.Tensor:
    """Output of one sequence in a call of its own."""
    bounds = given.arguments["cu_seqlens_q"].tolist()
    words = {
        "query": given.arguments["query"][bounds[b] : bounds[b + 1]],
        "cu_seqlens_q": torch.tensor([0, bounds[b + 1] - bounds[b]], dtype=torch.int32),
        "block_table": given.arguments["block_table"][b : b + 1],
        "seqused_k": given.arguments["seqused_k"][b : b + 1],
        "max_seqlen_q": bounds[b + 1] - bounds[b],
        "max_seqlen_k": given.lengths[1][b],
    }
    return given.call(**words)[0]


def of_batches() -> None:
    """With num_splits a sequence's bits don't depend on the sequences beside it: how many, how long, decoding steps or chunks."""
    for splits, lengths in ((1, LONG), (3, ((1, 70, 3, 1), (700, 90, 520, 300)))):
        given = inputs({"lengths": lengths, "num_splits": splits, "is_causal": True, "page": 32})
        out, _ = given.call()
        bounds = given.arguments["cu_seqlens_q"].tolist()
        for b in range(len(lengths[0])):
            assert torch.equal(alone(given, b), out[bounds[b] : bounds[b + 1]]), f"sequence {b} of {lengths} with {splits} splits"


def of_compilers() -> None:
    """A compiler traces calls without a break, whatever the numbers of rows, and gets the same bits."""

    def call(query: torch.Tensor, *rest: torch.Tensor, **words: Any) -> torch.Tensor:
        names = ("key", "value", "cu_seqlens_q", "block_table", "seqused_k")
        out: torch.Tensor = dispatch.attention_varlen(query, cu_seqlens_k=None, **dict(zip(names, rest, strict=True)), **words)
        return out * 2

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in (CHUNKS, LONG):
        given = inputs({"lengths": lengths}, padding=0).arguments
        tensors = [given[name] for name in ("query", "key", "value", "cu_seqlens_q", "block_table", "seqused_k")]
        words = {"max_seqlen_q": 70, "max_seqlen_k": 700, "is_causal": True, "enable_gqa": True}
        assert torch.equal(call(*tensors, **words), compiled(*tensors, **words))


def of_explanations() -> None:
    given = inputs({"is_causal": True})
    said = dispatch.explain_varlen(**given.arguments)
    assert said.template == "flash_paged" and said.config is not None and said.config["BLOCK_M"] == 16


def main(*names: str) -> dict[str, str]:
    """Failures of the named cases, or without names of everything else."""
    return failures_of(globals(), of_case, names, lambda: forced("kernels"))
