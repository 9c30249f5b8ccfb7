"""Scores that `attention` has built in are recognised by their graphs, whatever their spelling, and equal what they stand for."""

import math
import random
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.dispatch import flex
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.functions import blocks as flex_blocks
from flashtune.dispatch.functions import by_torch as flex_torch
from flashtune.dispatch.functions import decided as flex_decided
from flashtune.dispatch.functions import kernels as flex_kernels
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.templates.mods.capture import Dependencies
from flashtune.templates.mods.scores import slopes_of

CPU = torch.device("cpu")
SLOPES = torch.tensor([0.5, -0.25, 0.03125, 1.75])
BY_BATCH = torch.arange(8.0).view(2, 4) / 8
HALVES = SLOPES.bfloat16()
CAP, TEMPERATURE, THIRD = 20.0, torch.tensor(1.5), torch.tensor(1 / 3)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k <= 5)


def future(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k >= q


Mod = Callable[..., Tensor]

KNOWN: list[tuple[Mod, Mod | None]] = [
    (lambda s, b, h, q, k: s, None),
    (lambda s, b, h, q, k: s * 3 / 2 + 0, window),
    (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), causal),
    (lambda s, b, h, q, k: torch.tanh(s * (1 / CAP)) * CAP, None),
    (lambda s, b, h, q, k: torch.div(s, CAP).tanh_().mul_(CAP), None),
    (lambda s, b, h, q, k: -CAP * torch.tanh(-s / CAP), window),
    (lambda s, b, h, q, k: CAP * (2 * torch.sigmoid(s / (CAP / 2)) - 1), None),
    (lambda s, b, h, q, k: 3 * torch.tanh(s), None),
    (lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(), None),
    (lambda s, b, h, q, k: s + -SLOPES[h] * torch.abs(k - q), window),
    (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), causal),
    (lambda s, b, h, q, k: s - SLOPES[h] * q + SLOPES[h] * k, causal),
    (lambda s, b, h, q, k: (SLOPES[h] * (k - q)) + s, window),
    (lambda s, b, h, q, k: s + SLOPES[h] * (q - k), future),
    (lambda s, b, h, q, k: s - BY_BATCH[b, h] * (q - k), causal),
    (lambda s, b, h, q, k: s - HALVES[h].float() * (q - k).float().abs() / 2, None),
    (lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 4)), causal),
    (lambda s, b, h, q, k: s - 0.25 * (q - k).abs(), None),
    (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP) - SLOPES[h] * (q - k), causal),
    (lambda s, b, h, q, k: s + SLOPES[h] * BY_BATCH[b, h] * (k - q) - 0.5 * (q - k).abs(), causal),
    (lambda s, b, h, q, k: s - HALVES[h].float() * 0.3 * (q - k).abs(), None),
    (lambda s, b, h, q, k: s * torch.full((), 0.3, dtype=torch.float16), None),
    (lambda s, b, h, q, k: s * torch.full_like(q, 2.7), None),
    (lambda s, b, h, q, k: s - (h.int() * 1_000_000_000 * 3) * 1e-9 * (q - k).abs(), None),
]

UNKNOWN: list[tuple[Mod, Mod | None]] = [
    (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), None),
    (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), lambda b, h, q, k: q - k <= 5),
    (lambda s, b, h, q, k: s + SLOPES[h] * (k - q + 1), causal),
    (lambda s, b, h, q, k: s + SLOPES[h] * (k - 2 * q), causal),
    (lambda s, b, h, q, k: s + 1, None),
    (lambda s, b, h, q, k: s + SLOPES[h], None),
    (lambda s, b, h, q, k: -s, None),
    (lambda s, b, h, q, k: s * 0, None),
    (lambda s, b, h, q, k: s * s, None),
    (lambda s, b, h, q, k: s * SLOPES[h], None),
    (lambda s, b, h, q, k: s / TEMPERATURE, None),
    (lambda s, b, h, q, k: s / 0.0, None),
    (lambda s, b, h, q, k: s - HALVES[h] * (q - k), causal),
    (lambda s, b, h, q, k: s.half().float(), None),
    (lambda s, b, h, q, k: s + (SLOPES[h] * (k - q)).int(), causal),
    (lambda s, b, h, q, k: s - SLOPES[q % 4] * (q - k), causal),
    (lambda s, b, h, q, k: s - SLOPES[h.clamp(max=2)] * (q - k), causal),
    (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP) + s, None),
    (lambda s, b, h, q, k: CAP * torch.tanh((s - q) / CAP), None),
    (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), lambda b, h, q, k: (q >= k) | (k < 3)),
    (lambda s, b, h, q, k: torch.where(q >= k, s, 2 * s), causal),
]

INDICES = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None], torch.arange(9)[:, None], torch.arange(11)


def assert_equal(score_mod: Mod, mask_mod: Mod | None) -> None:
    """Raises where a recognised score isn't the function itself in float64, where a query sees a key."""
    functions, captured = flex_functions._traced(score_mod, mask_mod, CPU)
    assert functions.known is not None
    band, known = functions.known
    s = torch.randn(2, 4, 9, 11, dtype=torch.float64) * 30
    b, h, q, k = INDICES
    built_in = s * known.factor
    if known.softcap:
        built_in = known.softcap * torch.tanh(built_in / known.softcap)
    slopes = slopes_of(known, captured, 2, 4, CPU)
    if slopes is not None:
        assert slopes.dtype is torch.float32 and slopes.shape in ((4,), (2, 4))
        built_in = built_in - slopes.double().expand(2, 4)[..., None, None] * (q - k).abs()
    left, right = (99 if side is None else side for side in band)
    seen = ((k >= q - left) & (k <= q + right)).expand(2, 4, 9, 11)
    torch.testing.assert_close(score_mod(s, b, h, q, k)[seen], built_in[seen], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("place", range(len(KNOWN)))
def test_scores_that_are_built_in_are_recognised_and_equal(place: int) -> None:
    assert_equal(*KNOWN[place])


@pytest.mark.parametrize("place", range(len(UNKNOWN)))
def test_other_scores_are_not(place: int) -> None:
    assert flex_functions._traced(*UNKNOWN[place], CPU)[0].known is None


def drawn(generator: random.Random, depth: int) -> Callable[..., Any]:
    """A random function of sums, products and squashings of a score, slopes and places."""
    if depth == 0:
        leaves: list[Callable[..., Any]] = [
            lambda s, b, h, q, k: s, lambda s, b, h, q, k: SLOPES[h], lambda s, b, h, q, k: q - k, lambda s, b, h, q, k: (k - q).abs(),
            lambda s, b, h, q, k: 0.5 + 0 * s, lambda s, b, h, q, k: BY_BATCH[b, h],
        ]  # fmt: skip
        return generator.choice([leaves[0], *leaves])
    one, other = drawn(generator, depth - 1), drawn(generator, generator.randrange(depth))
    return generator.choice(
        [
            lambda *x: one(*x) + other(*x), lambda *x: one(*x) - other(*x), lambda *x: one(*x) * other(*x), lambda *x: 2.5 * one(*x) / 5,
            lambda *x: 8 * torch.tanh(one(*x) / 8), lambda *x: -one(*x), lambda *x: torch.abs(one(*x)), lambda *x: 3 + one(*x) - 3,
        ]
    )  # fmt: skip


def plus_nothing(inner: Callable[..., Any]) -> Mod:
    """The function, as a tensor even where it is a number."""
    return lambda s, b, h, q, k: inner(s, b, h, q, k) + 0 * s


def test_whatever_is_recognised_equals_the_function() -> None:
    generator, found = random.Random(4), 0
    for _ in range(60):
        inner = drawn(generator, generator.randint(1, 3))
        mask = generator.choice([None, causal, window, future])

        score = plus_nothing(inner)
        if flex_functions._traced(score, mask, CPU)[0].known is not None:
            found += 1
            assert_equal(score, mask)
    assert found > 2


class Settings:
    """Numbers of functions, as of a model."""

    def __init__(self, factor: float) -> None:
        self.own = factor

    factor = 2.0

    def scaled(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, more: float = 1.0) -> Tensor:
        return s * Settings.factor * self.own * more * simulated_module.factor


simulated_module = ModuleType("simulated")


def test_numbers_of_classes_modules_and_methods_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def factor() -> float:
        known = flex_functions._traced(settings.scaled, None, CPU)[0].known
        assert known is not None
        return known[1].factor

    settings = Settings(3.0)
    simulated_module.factor = 1.0  # type: ignore[attr-defined]
    assert factor() == 6.0
    monkeypatch.setattr(Settings, "factor", 4.0)
    assert factor() == 12.0
    monkeypatch.setattr(simulated_module, "factor", 5.0)
    assert factor() == 60.0


def test_zeros_of_both_signs_are_two_numbers() -> None:
    def divided(zero: float) -> Mod:
        return lambda s, b, h, q, k: s + q / zero

    assert Dependencies(divided(0.0)).key == Dependencies(divided(0.0)).key != Dependencies(divided(-0.0)).key  # type: ignore[arg-type]


def test_slopes_in_float32_are_handed_on_and_get_gradients() -> None:
    slopes = torch.randn(6).requires_grad_()
    functions, captured = flex_functions._traced(lambda s, b, h, q, k: s - slopes[h] * (q - k), causal, CPU)
    assert functions.known is not None
    given = slopes_of(functions.known[1], captured, 2, 4, CPU)
    assert given is not None and given.data_ptr() == slopes.data_ptr() and given.shape == (4,) and given.requires_grad


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, k: s - HALVES[h] * THIRD * (q - k),
        lambda s, b, h, q, k: s - torch.where(h > 1, HALVES[h], torch.full((), 0.3)) * (q - k),
        lambda s, b, h, q, k: s - HALVES[h].float() * 0.3 * (q - k),
    ],
)
def test_slopes_are_rounded_where_scalars_are(score: Mod) -> None:
    functions, captured = flex_functions._traced(score, causal, CPU)
    assert functions.known is not None
    given = slopes_of(functions.known[1], captured, 1, 4, CPU)
    zero, one = torch.tensor(0), torch.tensor(1)
    assert given is not None and given[0].tolist() == [-float(score(torch.zeros(()), zero, torch.tensor(h), one, zero)) for h in range(4)]


@pytest.mark.parametrize("served", [True, False])
def test_built_in_features_serve_where_attention_has_kernels(served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_torch, "served_here", lambda *given: True)
    monkeypatch.setattr(flex_decided, "_unmeasured_too", lambda query: False)
    dispatch.reload()
    answer = Explanation(kind="exact" if served else "framework", template="t", reason="r", gpu="cpu")
    monkeypatch.setattr(flex.api, "explain", lambda *given, **words: answer)
    q, k, v = (torch.randn(2, 4, 130, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))

    def capped(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 1.5 * torch.tanh(s / 1.5) + SLOPES[h] * (k - q)

    mask = create_block_mask(causal, None, None, 130, 130, device="cpu")
    with dispatch.use(unmeasured=False):
        said = dispatch.explain_flex(q, k, v, capped, mask).reason
        assert said.startswith("attention with window=(None, 0), softcap, alibi_slopes: t" if served else "PyTorch's"), said
        if served:
            out = dispatch.flex_attention(q, k, v, capped, mask)
            places = torch.arange(130)
            scores = capped((q @ k.mT) / 4, None, torch.arange(4)[:, None, None], places[:, None], places)  # type: ignore[arg-type]
            expected = torch.where(places[:, None] >= places, scores, -math.inf).softmax(-1) @ v
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
            # A gradient needs a backward's kernel.
            assert dispatch.explain_flex(q.requires_grad_(), k, v, capped, mask).reason.startswith("PyTorch by matrices")


@pytest.mark.parametrize(
    ("version", "d", "learned", "ours"),
    [("2.11.0+cu130", 128, True, True), ("2.11.0", 128, False, False), ("2.11.0", 64, True, False), ("2.12.0", 128, True, False)],
)
def test_learned_tensors_are_served_where_flex_attentions_backward_does_not_fit(
    version: str, d: int, learned: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_torch, "served_here", lambda *given: True)
    monkeypatch.setattr(flex_decided, "_unmeasured_too", lambda query: False)
    monkeypatch.setattr(flex.devices, "target_of", lambda device: find_target("h100"))
    monkeypatch.setattr(torch, "__version__", version)
    module = SimpleNamespace(accepts=lambda *given: True)
    kernel = SimpleNamespace(code=SimpleNamespace(module=module), failed=None, record=None, variant=None, choice=None)
    dispatch.reload()
    monkeypatch.setattr(flex_kernels, "loaded_kernel", lambda choice, *_: "no Gluon" if "hopper" in choice.family.name else kernel)
    q, k, v = (torch.zeros(1, 2, 32, d) for _ in range(3))
    table = torch.zeros(2, 65, requires_grad=learned)
    q.requires_grad_()
    found = flex_decided.call_of(q, k, v, lambda s, b, h, q, k: s + table[h, (q - k).clamp(-32, 32) + 32], None, None, False, None, False)
    assert isinstance(found, flex_decided.FlexCall) if ours else found == flex_kernels.UNMEASURED


@pytest.mark.parametrize("band", [(None, 0), (7, 0), (130, 130), (0, None), (None, None)])
@pytest.mark.parametrize("block", [16, 128])
def test_blocks_of_a_band_are_those_of_its_mask(band: tuple[int | None, int | None], block: int) -> None:
    left, right = (999 if side is None else side for side in band)
    mask = create_block_mask(lambda b, h, q, k: (k >= q - left) & (k <= q + right), None, None, 200, 150, device="cpu", BLOCK_SIZE=block)
    query, key = torch.empty(1, 1, 200, 8), torch.empty(1, 1, 150, 8)
    assert flex_blocks.agrees_with_band(mask, band, query, key)
    foreign = create_block_mask(lambda b, h, q, k: (k < 16) & (q < 16), None, None, 200, 150, device="cpu", BLOCK_SIZE=block)
    assert not flex_blocks.agrees_with_band(foreign, band, query, key)
