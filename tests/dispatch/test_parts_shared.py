"""Requests over one prefix, and drafts that form a tree, both by merged parts: gradients, padding, pages, and refusals."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune import dispatch
from flashtune.core.pytorch import devices
from flashtune.core.system.errors import InputError, InputTypeError

pytestmark = pytest.mark.usefixtures("one_thread", "kernels")
DTYPE, FINE = (torch.float32, 3e-5) if devices.INTERPRETING else (torch.float64, 2e-6)
WORDS: list[dict[str, Any]] = [{}, {"is_causal": True}, {"softcap": 5.0}, {"sinks": True}, {"scale": 0.3, "is_causal": True}]


@pytest.fixture
def kernels() -> Iterator[None]:
    """Kernels serve wherever they run, gradients of LSEs too."""
    with dispatch.use(unmeasured=True):
        yield


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, requires_grad=True)


def same(found: Any, wanted: Any, leaves: list[Tensor]) -> None:
    """Equal outputs and LSEs, and gradients of a loss of both."""
    grads = []
    for out, lse in (found, wanted):
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        loss = (out * weights).sum() + lse.masked_fill(lse == -math.inf, 0.0).sin().sum()
        grads.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(found[0], wanted[0], atol=FINE, rtol=FINE)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-5, rtol=1e-6)
    for mine, true in zip(*grads, strict=True):
        torch.testing.assert_close(mine, true, atol=FINE, rtol=1e-5 + FINE)


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("count", [0, 11])
def test_requests_of_equal_sizes_over_one_prefix(words: dict[str, Any], count: int) -> None:
    q, prefix, suffix = normal(3, 4, 5, 16), [normal(1, 2, count, 16) for _ in range(2)], [normal(3, 2, 7, 16) for _ in range(2)]
    leaves = [q, *prefix, *suffix]
    words = words | {"enable_gqa": True, "return_lse": True}
    if "sinks" in words:
        leaves.append(normal(4))
        words["sinks"] = leaves[-1]
    whole = [torch.cat([x.expand(3, -1, -1, -1), y], 2) for x, y in zip(prefix, suffix, strict=True)]
    wanted = dispatch.attention(q, *whole, causal_alignment="bottom_right", **words)
    same(dispatch.cascade(q, tuple(prefix), tuple(suffix), **words), wanted, leaves)


LENGTHS = ((3, 0, 1, 4), (5, 2, 1, 9))
"""Queries and keys of each request's suffix."""


def starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]).int()


@pytest.mark.parametrize("words", WORDS, ids=str)
@pytest.mark.parametrize("count", [0, 11])
def test_packed_requests_over_one_prefix_whatever_padding_holds(words: dict[str, Any], count: int) -> None:
    if devices.INTERPRETING and count and not words:
        assert dispatch.explain_varlen(*map(torch.zeros_like, PACKED), CU.int(), CU.int(), 3, 3).kind != "framework"
    padding, (queries, keys) = 3, map(sum, LENGTHS)
    q, prefix = normal(queries + padding, 4, 16), [normal(count, 2, 16) for _ in range(2)]
    suffix = [normal(keys + padding, 2, 16) for _ in range(2)]
    for x in (q, *suffix):
        x.data[-padding:] = math.nan
    bounds = [starts(one) for one in LENGTHS]
    leaves = [q, *prefix, *suffix]
    words = words | {"enable_gqa": True, "return_lse": True}
    if "sinks" in words:
        leaves.append(normal(4))
        words["sinks"] = leaves[-1]
    # Each request's keys with the prefix before them.
    parts = [torch.cat([torch.cat([x, one]) for one in y[:keys].split(LENGTHS[1])]) for x, y in zip(prefix, suffix, strict=True)]
    longer = starts(tuple(n + count for n in LENGTHS[1]))
    wanted = dispatch.attention_varlen(q, *parts, bounds[0], longer, 4, 9 + count, **words)
    found = dispatch.cascade(q, tuple(prefix), tuple(suffix), *bounds, 4, 9, **words)
    assert (found[0][-padding:] == 0).all() and (found[1][:, -padding:] == -math.inf).all()
    same(found, wanted, leaves)


@pytest.mark.parametrize("prefix_in_pages", [False, True])
def test_paged_suffixes(prefix_in_pages: bool) -> None:
    keys, values = (torch.randn(20, 4, 2, 16) for _ in range(2))
    table, used = torch.randperm(16)[:12].view(4, 3).int(), torch.tensor([5, 0, 12, 9]).int()
    q, bounds = torch.randn(9, 4, 16), starts((3, 0, 1, 5))
    pages = torch.tensor([17, 19])
    prefix = tuple(x[pages].flatten(0, 1) for x in (keys, values))
    words = {"seqused_k": used, "block_table": table, "is_causal": True, "enable_gqa": True, "num_splits": 2}
    more = {"prefix_table": pages} if prefix_in_pages else {}
    found = dispatch.cascade(q, (keys, values) if prefix_in_pages else prefix, (keys, values), bounds, None, 5, 12, **words, **more)
    whole = torch.cat([pages.expand(4, -1).int(), table], 1)
    wanted = dispatch.attention_varlen(q, keys, values, bounds, None, 5, 20, **words | {"seqused_k": used + 8, "block_table": whole})
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def chains(parents: list[int]) -> Tensor:
    """The tree's mask, one draft after the other."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for place in range(len(parents)):
        at = place
        while at >= 0:
            mask[place, at] = True
            at = parents[at]
    return mask


TREES = [[-1], [-1, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 1, 2, -1, 6], [-1, -1, -1]]


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_drafts_see_the_cache_their_ancestors_and_themselves(parents: list[int]) -> None:
    count = len(parents)
    q, cache = normal(2, 4, count, 16), [normal(2, 2, 9, 16) for _ in range(2)]
    drafts, sinks = [normal(2, 2, count, 16) for _ in range(2)], normal(4)
    mask = torch.cat([torch.ones(count, 9, dtype=torch.bool), chains(parents)], 1)
    words: dict[str, Any] = {"enable_gqa": True, "return_lse": True, "sinks": sinks}
    whole = [torch.cat(pair, 2) for pair in zip(cache, drafts, strict=True)]
    found = dispatch.tree(q, tuple(cache), tuple(drafts), torch.tensor(parents), **words)
    same(found, dispatch.attention(q, *whole, attn_mask=mask, **words), [q, *cache, *drafts, sinks])


def test_drafts_over_caches_with_lengths_and_pages() -> None:
    trees = torch.tensor([TREES[1], TREES[2][:7]])
    q, drafts = torch.randn(2, 4, 7, 16), tuple(torch.randn(2, 2, 7, 16) for _ in range(2))
    cache, used = tuple(torch.randn(2, 2, 12, 16) for _ in range(2)), torch.tensor([12, 5]).int()
    wanted = []
    for one, parents in enumerate(trees.tolist()):
        mine = [torch.cat([x[one, :, : used[one]], y[one]], 1) for x, y in zip(cache, drafts, strict=True)]
        mask = torch.cat([torch.ones(7, int(used[one]), dtype=torch.bool), chains(parents)], 1)
        wanted.append(dispatch.attention(q[one], *mine, attn_mask=mask, enable_gqa=True))
    with torch.no_grad():
        found = dispatch.tree(q, cache, drafts, trees, seqused_k=used, enable_gqa=True)
        table = torch.tensor([[3, 0, 1], [2, 5, 4]]).int()
        pages = [torch.empty(6, 4, 2, 16) for _ in range(2)]
        for x, y in zip(pages, cache, strict=True):
            x[table.long()] = y.transpose(1, 2).unflatten(1, (3, 4))
        paged = dispatch.tree(q, tuple(pages), drafts, trees, seqused_k=used, block_table=table, enable_gqa=True, num_splits=2)
    for x in (found, paged):
        torch.testing.assert_close(x, torch.stack(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(devices.INTERPRETING, reason="says nothing of kernels")
def test_compilers_trace_both() -> None:
    q, cache, drafts = torch.randn(2, 4, 5, 16), *(tuple(torch.randn(2, 4, n, 16) for _ in range(2)) for n in (9, 5))
    parents = torch.tensor([-1, 0, 0, 1, 2])
    compiled = torch.compile(lambda *x: dispatch.tree(*x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, cache, drafts, parents), dispatch.tree(q, cache, drafts, parents))
    prefix = tuple(x[:1] for x in cache)
    compiled = torch.compile(lambda *x: dispatch.cascade(*x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, prefix, drafts), dispatch.cascade(q, prefix, drafts))


Q, PAIR, ROWS = torch.zeros(2, 4, 3, 8), (torch.zeros(2, 4, 3, 8),) * 2, (torch.zeros(6, 4, 8),) * 2
PACKED = [torch.zeros(6, 4, 16)] * 3
ONE = (PAIR[0][:1],) * 2
CU = torch.tensor([0, 3, 6])
REFUSED: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    (dispatch.cascade, (Q, ONE[0], PAIR), {}, InputTypeError, "prefix must be keys and values, not Tensor: give a pair"),
    (dispatch.cascade, (Q, ONE, (Q, None)), {}, InputTypeError, "suffix must be keys and values, not tuple: give a pair"),
    (dispatch.cascade, (Q, PAIR, PAIR), {}, InputError, r"the prefix's keys are \(2, 4, 3, 8\): give .* one prefix \(1, Hkv, P, D\)"),
    (dispatch.cascade, (Q[0], ONE, PAIR), {}, InputError, r"query are \(4, 3, 8\): give queries \(requests, Hq, N, D\)"),
    (dispatch.cascade, (Q, ONE, PAIR), {"seqused_k": CU}, InputError, "of packed requests: give cu_seqlens_q"),
    (dispatch.cascade, (ROWS[0], ONE, ROWS, CU, CU, 3, 3), {}, InputError, r"the prefix's keys are \(1, 4, 3, 8\): give \(P, Hkv, D\)"),
    (
        dispatch.cascade,
        (ROWS[0], ROWS, ROWS, CU, CU, 3, 3),
        {"prefix_table": CU},
        InputError,
        r"prefix_table is \(3,\) for keys \(6, 4, 8\)",
    ),
    (dispatch.tree, (Q, PAIR, Q, CU), {}, InputTypeError, "drafts must be keys and values, not Tensor"),
    (dispatch.tree, (Q[0], PAIR, PAIR, CU), {}, InputError, r"query is \(4, 3, 8\): give the drafts' queries"),
    (dispatch.tree, (Q, PAIR, PAIR, [-1, 0, 0]), {}, InputTypeError, "parents are list: give int32 or int64"),
    (dispatch.tree, (Q, PAIR, PAIR, CU.float()), {}, InputTypeError, "parents are torch.float32: give int32 or int64"),
    (dispatch.tree, (Q, PAIR, PAIR, CU[:2]), {}, InputError, r"parents are \(2,\) on cpu for 3 drafts: give \(N,\)"),
    (dispatch.tree, (Q, PAIR, PAIR, torch.tensor([-1, 1, 0])), {}, InputError, "parents name 1, no draft before the one it is for"),
    (dispatch.tree, (Q, PAIR, PAIR, torch.tensor([-1, -2, 0])), {}, InputError, "parents name -2, no draft before"),
    (dispatch.tree, (Q, PAIR, PAIR, torch.tensor([-1, 0, 0])), {"num_splits": 2}, InputError, "are of caches with lengths: give seqused_k"),
]


@pytest.mark.parametrize(("function", "given", "words", "kind", "said"), REFUSED)
def test_what_makes_no_sense_is_refused_in_a_sentence(function: Any, given: Any, words: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        function(*given, **words)
