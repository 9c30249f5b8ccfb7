"""Packed sequences for tests: cases, inputs with poisoned padding, and each sequence's output and gradients by the reference in float64."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from branches import Branch
from torch import Tensor

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.band import Sides
from flashtune.core.problems.tolerances import LSE_RTOL, TOLERANCES
from flashtune.dispatch.rows import operators as packed_ops
from flashtune.dispatch.rows import packed
from flashtune.dispatch.rows import run as packed_run
from flashtune.dispatch.state.context import current

SEED = 11

RAGGED = ((5, 0, 33, 16, 70, 1, 0), (20, 3, 33, 0, 41, 64, 0))
SQUARE = ((1, 64, 0, 17, 128, 31, 0, 0),) * 2
"""Lengths of queries and of keys; the last ones of zero stand for a list that is padded to a capacity."""

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal from the first": {"is_causal": True, "causal_alignment": "top_left"},
    "window": {"window_size": (7, 3)},
    "window from the first": {"window_size": (7, 3), "causal_alignment": "top_left"},
    "causal window": {"window_size": (9, 0)},
    "soft cap": {"softcap": 2.0, "is_causal": True},
    "slopes": {"slopes": "heads"},
    "slopes of sequences": {"slopes": "sequences", "is_causal": True},
    "sinks": {"sinks": True, "is_causal": True},
    "dropout": {"dropout_p": 0.3, "seed": SEED},
    "causal dropout": {"dropout_p": 0.7, "seed": SEED, "is_causal": True},
    "used keys": {"used": (3, 3, 33, 0, 10, 1, 0)},
    "causal used keys": {"used": (3, 3, 33, 0, 10, 1, 0), "is_causal": True},
    "one head a key head": {"kv_heads": 4},
    "negative scale": {"scale": -0.4},
    "values of another size": {"d_v": 32},
    "everything": {"window_size": (30, 0), "softcap": 3.0, "slopes": "heads", "sinks": True, "dropout_p": 0.2, "seed": SEED},
}


EMPTY: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "no sequences": ((), ()),
    "no tokens": ((0,), (0,)),
    "no tokens of several": ((0, 0, 0), (0, 0, 0)),
    "no queries": ((0, 0), (3, 5)),
    "no keys": ((3, 5), (0, 0)),
}
"""Lengths with which there is nothing to compute."""


class Inputs(NamedTuple):
    """Tensors of a call, and its keywords; padding is NaN, in gradients of the output, too."""

    tensors: list[Tensor]
    bounds: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    words: dict[str, Any]
    dout: Tensor
    dlse: Tensor

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Positional arguments of a call."""
        return (*self.tensors, *self.bounds, *self.longest)

    def call(self, backend: str | None = None) -> tuple[Tensor, Tensor]:
        """Output and LSE, of a function compiled by a backend of torch.compile where one is named."""

        def attend(*given: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = dispatch.attention_varlen(*given, *self.longest, enable_gqa=True, return_lse=True, **self.words)
            return out, lse

        call = attend if backend is None else torch.compile(attend, backend=backend, fullgraph=True)
        return call(*self.tensors, *self.bounds)


def inputs(
    case: dict[str, Any], lengths: tuple[tuple[int, ...], ...] = RAGGED, *, dtype: torch.dtype = torch.float32, device: str = "cpu",
    d: int = 16, heads: int = 4, padding: int = 7,
) -> Inputs:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    words = dict(case)
    kv_heads, d_v = words.pop("kv_heads", 2), words.pop("d_v", d)
    of_q, of_k = (torch.tensor([0, *itertools.accumulate(one)], dtype=torch.int32, device=device) for one in lengths)
    rows, columns = (int(x[-1]) + padding for x in (of_q, of_k))

    def made(size: int, of_heads: int, width: int) -> Tensor:
        found = torch.randn(size, of_heads, width, generator=generator)
        found[size - padding :] = math.nan
        return found.to(device, dtype)

    tensors = [made(rows, heads, d), made(columns, kv_heads, d), made(columns, kv_heads, d_v)]
    dout, dlse = made(rows, heads, d_v), torch.randn(heads, rows, generator=generator).to(device)
    dlse[:, rows - padding :] = math.nan
    if (slopes := words.pop("slopes", None)) is not None:
        sizes = (heads,) if slopes == "heads" else (len(lengths[0]), heads)
        words["alibi_slopes"] = torch.rand(sizes, generator=generator).to(device)
    if words.pop("sinks", False):
        words["sinks"] = torch.randn(heads, generator=generator).to(device).requires_grad_()
    if (used := words.pop("used", None)) is not None:
        words["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)
    longest = max(lengths[0], default=0), max(lengths[1], default=0)
    return Inputs([x.requires_grad_() for x in tensors], (of_q, of_k), longest, words, dout, dlse)


def wanted(given: Inputs, lengths: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, LSE, and gradients of query, key, value and sinks, of all sequences: float64, on the CPU."""
    words = given.words
    leaves = [x.detach().cpu().double().requires_grad_() for x in given.tensors]
    sinks = None if "sinks" not in words else words["sinks"].detach().cpu().double().requires_grad_()
    q, k, v = leaves
    rows, heads, _ = q.shape
    out, lse = torch.zeros(rows, heads, v.shape[2], dtype=torch.float64), torch.full((heads, rows), -math.inf, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    alignment = words.get("causal_alignment", "bottom_right")
    sides = Sides.of(words.get("window_size", (-1, -1)), words.get("is_causal", False), alignment)
    of_q, of_k = (x.tolist() for x in given.bounds)
    for b, (n_q, n_kv) in enumerate(zip(*lengths, strict=True)):
        n_kv = n_kv if "seqused_k" not in words else min(n_kv, int(words["seqused_k"][b]))
        here, there = slice(of_q[b], of_q[b] + n_q), slice(of_k[b], of_k[b] + n_kv)
        keep, p = None, words.get("dropout_p", 0.0)
        if p:
            keep = torch.stack([reference.dropout_keep_rows(SEED, 0, b * heads + h, 0, n_q, n_kv, p) for h in range(heads)])[None]
        slopes = words.get("alibi_slopes")
        slopes = None if slopes is None else slopes.cpu().expand(len(lengths[0]), heads)[b : b + 1].double()
        one, its_lse = reference.attention(
            *(x[part].transpose(0, 1)[None] for x, part in ((q, here), (k, there), (v, there))),
            scale=words.get("scale", q.shape[2] ** -0.5),
            band=sides.band(n_q, n_kv),
            softcap=words.get("softcap", 0.0),
            keep=keep,
            dropout_p=p,
            slopes=slopes,
            sinks=None if sinks is None else sinks[None],
        )
        out[here], lse[:, here] = one[0].detach().transpose(0, 1), its_lse[0].detach()
        loss = loss + (one[0].transpose(0, 1) * given.dout[here].cpu().double()).sum()
        loss = loss + (its_lse[0] * given.dlse[:, here].cpu().double())[its_lse[0].isfinite()].sum()
    asked = leaves if sinks is None else [*leaves, sinks]
    return out, lse, list(torch.autograd.grad(loss, asked))


def agrees(given: Inputs, lengths: tuple[tuple[int, ...], ...], *, kind: str = "fp32") -> None:
    """Output, LSE and gradients are the reference's, and exactly 0 and -inf where no sequence is."""
    bound = TOLERANCES[kind]
    out, lse = given.call()
    right, right_lse, right_gradients = wanted(given, lengths)
    ended = int(given.bounds[0][-1])
    assert not out[ended:].any() and bool((lse[:, ended:] == -math.inf).all())
    torch.testing.assert_close(out.cpu().double(), right, atol=bound.atol, rtol=bound.rtol)
    torch.testing.assert_close(lse.cpu().double(), right_lse, atol=bound.lse_atol, rtol=LSE_RTOL)
    asked = [*given.tensors, *([given.words["sinks"]] if "sinks" in given.words else [])]
    found = torch.autograd.grad((out, lse), asked, (given.dout, given.dlse))
    for name, ours, theirs, x in zip(("query", "key", "value", "sinks"), found, right_gradients, asked, strict=False):
        assert ours.shape == x.shape and ours.dtype == x.dtype
        gap, norm = float((ours.cpu().double() - theirs).norm()), float(theirs.norm())
        assert gap <= bound.gradient_norm * norm + 1e-3 * (kind != "fp32"), f"{name}'s gradient is off by {gap:.3g} of {norm:.3g}"
    for ours, bounds in zip(found, (given.bounds[0], given.bounds[1], given.bounds[1]), strict=False):
        assert not ours[int(bounds[-1]) :].any()


@contextmanager
def forced(branch: Branch) -> Iterator[None]:
    """All packed calls are served by a call for each sequence, or by kernels, which then have to take them."""
    with pytest.MonkeyPatch.context() as patch:
        # Plans of earlier calls would serve in either case.
        current().plans.clear()
        choose = packed.served

        def served(*given: Any) -> Any:
            found = choose(*given) if branch == "kernels" else None
            assert found is not None or branch == "torch", "no kernel takes the call"
            return found

        for module in (packed_run, packed_ops, packed):
            patch.setattr(module, "served", served)
        yield


def without_tokens(case: str) -> None:
    """Output and LSE of calls with nothing to compute, and gradients of all that asks for one: 0, whatever padding holds."""
    for padding, words in itertools.product(
        (0, 4), ({}, {"slopes": "heads"}, {"slopes": "sequences"}, {"sinks": True}, {"score_mod": True})
    ):
        given = inputs(words, EMPTY[case], padding=padding)
        asked = [*given.tensors, *(x.requires_grad_() for name, x in given.words.items() if isinstance(x, Tensor))]
        if given.words.pop("score_mod", None):
            asked.append(table := torch.zeros(4, 5, requires_grad=True))
            given.words["score_mod"] = lambda score, b, h, i, j, table=table: score + table[h, (i - j).clamp(-2, 2) + 2].sqrt()
        out, lse = given.call()
        ended = int(given.bounds[0][-1])
        assert not out.any() and bool((lse[:, ended:] == -math.inf).all()), words
        for x, gradient in zip(asked, torch.autograd.grad(out.sum(), asked), strict=True):
            assert gradient.shape == x.shape and not gradient.any(), words
        for one in asked[3:]:
            alone = given._replace(tensors=[x.detach() for x in given.tensors])
            assert not torch.autograd.grad(alone.call()[0].sum(), one)[0].any(), words
