"""Packed sequences with a mask and a score as code: cases, and each sequence's output and gradients by the functions in float64."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from packed_machine import numbers_of
from torch import Tensor
from varlen_cases import Inputs, inputs

from flashtune import dispatch
from flashtune.core.code.launching import provided
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.band import Sides
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.tolerances import LSE_RTOL, TOLERANCES
from flashtune.dispatch.call.sequences import viewed
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions.kernels import Sequences, problem_with_functions
from flashtune.dispatch.functions.trained import types_of
from flashtune.templates.family import Family
from flashtune.templates.loading import load_kernel
from flashtune.templates.mods import known
from flashtune.templates.mods.emit import emitted
from flashtune.templates.rendering import render, variant_of

LENGTHS = ((5, 0, 33, 16, 70, 1, 0), (20, 3, 33, 0, 41, 64, 0))
"""Lengths of queries and of keys; some have no keys, and the last stands for a list that is padded to a capacity."""

LONG = ((300, 1, 0, 129, 64, 515), (200, 40, 7, 129, 0, 640))
MOST = 700
"""Positions of captured tensors."""

Functions = tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]


@dataclass(frozen=True)
class Case:
    """Functions over captured tensors, and other words of the call."""

    functions: Callable[..., Functions]
    captured: Callable[[torch.Generator], list[Tensor]] = lambda generator: []
    words: dict[str, Any] = field(default_factory=dict)


def _numbers(*sizes: int, trained: bool = False) -> Callable[[torch.Generator], list[Tensor]]:
    return lambda generator: [torch.randn(sizes, generator=generator).requires_grad_(trained)]


def _relative(table: Tensor) -> Functions:
    return lambda s, b, h, q, k: s + table[h, (q - k).clamp(-7, 7) + 7] * (b + 1), None


def _prefix(prefix: Tensor) -> Functions:
    return None, lambda b, h, q, k: (k < prefix[b]) | (q >= k)


def _both(bias: Tensor) -> Functions:
    return lambda s, b, h, q, k: torch.tanh(s) * 2 + bias[h, q] * bias[h, k], lambda b, h, q, k: (q + b) % 3 != k % 3


def _root(*_: Tensor) -> Functions:
    # Its derivative is NaN at 0, the score of what lies past the ends.
    return lambda s, b, h, q, k: (s * s).sqrt() * 2, None


def _hidden(*_: Tensor) -> Functions:
    return lambda s, b, h, q, k: torch.where((q + k) % 2 == 0, s, -math.inf), lambda b, h, q, k: (q > 8) & (k < 50)


CASES: dict[str, Case] = {
    "relative": Case(_relative, _numbers(4, 15, trained=True)),
    "causal relative": Case(_relative, _numbers(4, 15), {"is_causal": True}),
    "relative in a window": Case(_relative, _numbers(4, 15, trained=True), {"window_size": (9, 3)}),
    "prefix": Case(_prefix, lambda generator: [torch.tensor([9, 3, 12, 0, 31, 5, 0])]),
    "both": Case(_both, _numbers(4, MOST, trained=True)),
    "both, causal from the first": Case(_both, _numbers(4, MOST), {"is_causal": True, "causal_alignment": "top_left"}),
    "both in a window": Case(_both, _numbers(4, MOST, trained=True), {"window_size": (20, 6)}),
    "used keys": Case(_both, _numbers(4, MOST), {"used": (3, 3, 33, 0, 10, 1, 0), "is_causal": True}),
    "no derivative at 0": Case(_root),
    "hidden": Case(_hidden),
    "score of a causal mask": Case(lambda x: (_relative(x)[0], lambda b, h, q, k: q >= k), _numbers(4, 15, trained=True)),
    "mask in a band": Case(lambda: (None, lambda b, h, q, k: (q >= k) & (q % 3 != k % 5) & (q - k < 40))),
    "built-in band": Case(lambda: (None, lambda b, h, q, k: (q >= k) & (q - k < 12))),
    "built-in cap": Case(lambda: (lambda s, b, h, q, k: 2 * torch.tanh(s / 2), None), words={"is_causal": True}),
    "built-in slopes": Case(lambda x: (lambda s, b, h, q, k: s + x[h] * (k - q), lambda b, h, q, k: q >= k), _numbers(4)),
}
RECOGNISED = tuple(name for name in CASES if name.startswith("built-in"))


def made(name: str, lengths: tuple[tuple[int, ...], ...] = LENGTHS, **more: Any) -> tuple[Inputs, Functions, list[Tensor]]:
    """Inputs of a call with a case's functions, and their captured tensors."""
    case = CASES[name]
    device, words = more.get("device", "cpu"), dict(case.words)
    captured = [x.detach().to(device).requires_grad_(x.requires_grad) for x in case.captured(torch.Generator().manual_seed(3))]
    functions = case.functions(*captured)
    given = inputs(words, lengths, **more)
    return given._replace(words=given.words | dict(zip(("score_mod", "mask_mod"), functions, strict=True))), functions, captured


def wanted(given: Inputs, lengths: tuple[tuple[int, ...], ...], functions: Functions) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Output and LSE of all sequences by calling the functions, the leaves for gradients, and the loss: float64, on the CPU."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in given.tensors]
    q, k, v = leaves
    rows, heads, d = q.shape
    out, lse = torch.zeros(rows, heads, v.shape[2], dtype=torch.float64), torch.full((heads, rows), -math.inf, dtype=torch.float64)
    words, loss = given.words, sum((x[:0].sum() for x in leaves), torch.zeros((), dtype=torch.float64))
    alignment = words.get("causal_alignment", "bottom_right")
    (left, right), score_mod, mask_mod = (
        Sides.of(words.get("window_size", (-1, -1)), words.get("is_causal", False), alignment).window,
        *functions,
    )
    of_q, of_k = (x.tolist() for x in given.bounds)
    for b, (n_q, n_kv) in enumerate(zip(*lengths, strict=True)):
        n_kv = n_kv if "seqused_k" not in words else min(n_kv, int(words["seqused_k"][b]))
        if not n_q or not n_kv:
            continue
        here, there = slice(of_q[b], of_q[b] + n_q), slice(of_k[b], of_k[b] + n_kv)
        one, keys, values = (x[part].transpose(0, 1) for x, part in ((q, here), (k, there), (v, there)))
        keys, values = (x.repeat_interleave(heads // x.shape[0], 0) for x in (keys, values))
        h, i, j = torch.arange(heads)[:, None, None], torch.arange(n_q)[None, :, None], torch.arange(n_kv)[None, None, :]
        scores = one @ keys.mT * d**-0.5
        scores = scores if score_mod is None else score_mod(scores, torch.tensor(b), h, i, j)
        far = j - i - (n_kv - n_q if alignment == "bottom_right" else 0)
        seen = torch.ones(heads, n_q, n_kv, dtype=torch.bool) if mask_mod is None else mask_mod(torch.tensor(b), h, i, j)
        seen = (
            (seen if left is None else seen & (far >= -left)) if right is None else seen & (far <= right) & (far >= -(left or n_q + n_kv))
        )
        scores = scores.masked_fill(~seen, -math.inf)
        sums = scores.logsumexp(-1)
        found = torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0)[..., None]) @ values
        out[here], lse[:, here] = found.detach().transpose(0, 1), sums.detach()
        loss = loss + (found.transpose(0, 1) * given.dout[here].cpu().double()).sum()
        loss = loss + (sums * given.dlse[:, here].cpu().double())[sums.isfinite()].sum()
    return out, lse, leaves, loss


def agrees(
    name: str, lengths: tuple[tuple[int, ...], ...] = LENGTHS, *, kind: str = "fp32", backend: str | None = None, **more: Any
) -> None:
    """Output, LSE and gradients are those of the functions, and exactly 0 and -inf where no sequence is."""
    given, _, captured = made(name, lengths, **more)
    bound = TOLERANCES[kind]
    out, lse = given.call(backend)
    twins = [x.detach().cpu().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x.cpu() for x in captured]
    right, right_lse, leaves, loss = wanted(given, lengths, CASES[name].functions(*twins))
    ended = int(given.bounds[0][-1])
    assert not out[ended:].any() and bool((lse[:, ended:] == -math.inf).all())
    torch.testing.assert_close(out.cpu().double(), right, atol=bound.atol, rtol=bound.rtol)
    torch.testing.assert_close(lse.cpu().double(), right_lse, atol=bound.lse_atol, rtol=LSE_RTOL)
    pairs = [(x, y) for x, y in zip([*given.tensors, *captured], [*leaves, *twins], strict=True) if x.requires_grad]
    found = torch.autograd.grad((out, lse), [x for x, _ in pairs], (given.dout, given.dlse))
    for place, (ours, theirs) in enumerate(
        zip(found, torch.autograd.grad(loss, [y for _, y in pairs], materialize_grads=True), strict=True)
    ):
        gap, norm = float((ours.cpu().double() - theirs).norm()), float(theirs.norm())
        # Terms of both signs cancel in sums over many pairs.
        allowed = bound.gradient_norm * (1 if kind == "fp32" else 2 if place < 3 else 5)
        assert gap <= allowed * norm + 1e-3 * (kind != "fp32"), f"gradient {place} is off by {gap:.3g} of {norm:.3g}"
    for ours, bounds in zip(found, (given.bounds[0], given.bounds[1], given.bounds[1]), strict=False):
        assert not ours[int(bounds[-1]) :].any()


def sequences_are_alone(device: str = "cpu", **more: Any) -> None:
    """The bits of a sequence, of one tile of keys, and of its gradients are the same where all others are NaN."""
    lengths = ((40, 70, 33),) * 2
    given, _, _ = made("both in a window", lengths, device=device, padding=0, **more)
    start, stop = int(given.bounds[0][1]), int(given.bounds[0][2])
    poisoned = [torch.full_like(x, math.nan) for x in given.tensors]
    for x, y in zip(poisoned, given.tensors, strict=True):
        x[start:stop] = y.detach()[start:stop]
        x.requires_grad_()
    grads = []
    for tensors in (given.tensors, poisoned):
        out, _ = given._replace(tensors=tensors).call()
        grads.append([out[start:stop], *torch.autograd.grad(out[start:stop].square().sum(), tensors)])
    for one, other in zip(*grads, strict=True):
        part = slice(None) if one is grads[0][0] else slice(start, stop)
        assert torch.equal(one[part], other[part]), "a neighbour leaks"


def explained(name: str, **more: Any) -> Any:
    """Explanation of a case's call."""
    given, _, _ = made(name, **more)
    return dispatch.explain_varlen(*given.arguments, enable_gqa=True, **given.words)


def kernel_call(
    name: str, family: Family, config_of: Callable[[KernelSpec], Config], lengths: tuple[tuple[int, ...], ...]
) -> Iterator[Any]:
    """Launches of a Hopper family's kernels with a case's functions, for a stand-in to run: first the module and the launches; then, once
    they ran, the largest errors over the largest numbers of what they wrote."""
    given, functions, captured = made(name, lengths, dtype=torch.float16, d=64, padding=70)
    captured = [x.detach() for x in captured]
    backward = family.direction == "bwd"
    traced, found = flex_functions._traced(*functions, torch.device("cpu"))
    mods = emitted(traced.score, traced.mask, types_of(found, [False] * len(found)), backward=backward)
    sequences = Sequences((*given.bounds, given.words.get("seqused_k")), numbers_of(given))
    problem = problem_with_functions(family.direction, *(x.detach() for x in given.tensors), known.keep(mods), sequences)
    assert problem is not None
    spec = problem.spec()
    config = config_of(spec)
    assert family.violated(config, spec, find_target("h200")) is None
    module = load_kernel(render(family, variant_of(family, spec, config)), "coded")
    twins = [x.double() if x.is_floating_point() else x for x in captured]
    right, right_lse, leaves, loss = wanted(given, lengths, CASES[name].functions(*twins))
    q, k, v = (x.detach() for x in given.tensors)
    out, lse = (right.half(), right_lse.float()) if backward else (torch.full_like(q, math.nan), torch.full(right_lse.shape, math.nan))
    ours: list[Tensor] = [torch.full_like(x, math.nan) for x in (q, k, v)] if backward else [out, lse]
    operands = viewed((q, k, v, out, lse, *((given.dout, given.dlse, *ours) if backward else ())))
    words = {"scale": sequences.numbers.scale, "mods": [x.detach() for x in found], "lengths": sequences.bounds, **sequences.words}
    yield module, module.launches(*operands, **words, **provided(module, operands[0], operands[1]) | {"sms": 3})
    theirs = torch.autograd.grad(loss, leaves) if backward else (right, right_lse)
    assert all(torch.equal(x.isfinite(), y.isfinite()) for x, y in zip(ours, theirs, strict=True))
    gaps = [(x.double() - y).nan_to_num(0.0).abs().max() / y[y.isfinite()].abs().max() for x, y in zip(ours, theirs, strict=True)]
    yield [float(x) for x in gaps]
