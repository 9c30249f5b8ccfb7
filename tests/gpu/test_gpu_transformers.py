"""Sixteen tiny models of transformers on a GPU by the integration, on both branches: logits, gradients, padding, caches, tokens."""

import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from branches import BRANCHES, Branch, forced, served
from tiny_models import MODELS, MORE_MODELS, made, static_cache_fails

pytest.importorskip("transformers")
DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
NAME = "tuned_attention"
NAMES = (*MODELS, *MORE_MODELS)
WRITERS = tuple(name for name in NAMES if name != "bert")
TOKENS = torch.randint(1, 61, (2, 23), generator=torch.Generator().manual_seed(3)).to(DEVICE)
LEFT = torch.ones_like(TOKENS)
LEFT[0, :9] = 0
SIDES = {"left": LEFT, "right": LEFT.flip(1)}

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.parametrize("branch", BRANCHES)]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    from flashtune.integrations import transformers as tuned

    assert tuned.register() == NAME


@pytest.fixture
def record(branch: Branch, record_property: Callable[[str, str], None]) -> Iterator[None]:
    """The branch is in force, and who served is kept."""
    with forced(branch):
        yield
        by = served()
        record_property("served", by)
        assert (by == "torch") == (branch == "torch"), f"{by} served"


@functools.cache
def model_of(name: str) -> Any:
    return made(name).to(DEVICE)


def logits(model: Any, implementation: str, **words: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    found: torch.Tensor = model(input_ids=TOKENS, **words).logits
    return found


@functools.cache
def by_eager(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the weights' gradients."""
    return _with_gradients(model_of(name), "eager")


def _with_gradients(model: Any, implementation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    found = logits(model, implementation)
    found.float().square().mean().backward()
    return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_eagers(name: str, record: None) -> None:
    wanted, wanted_gradients = by_eager(name)
    found, gradients = _with_gradients(model_of(name), NAME)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    assert gradients.keys() == wanted_gradients.keys()
    for weight, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[weight], gradient, atol=3e-4 * float(gradient.abs().max()) + 1e-6, rtol=1e-3, msg=weight)


@pytest.mark.parametrize("name", NAMES)
def test_in_half_precision_logits_are_no_further_off_than_with_torchs_attention(name: str, record: None) -> None:
    exact, _ = by_eager(name)
    half = copy.deepcopy(model_of(name)).half()
    with torch.no_grad():
        theirs = logits(half, "sdpa" if half._supports_sdpa else "eager")
        ours = logits(half, NAME)
    # Experts are chosen by comparing, and a rounded score may choose another.
    if "moe" in name or name == "gpt_oss":
        assert torch.isfinite(ours).all()
        return
    off, torchs = (float((x.float() - exact).norm() / exact.norm()) for x in (ours, theirs))
    assert off <= 2 * torchs + 1e-3, f"off by {off:.3g} of the norm, torch's by {torchs:.3g}"


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_padded_batches_are_eagers(name: str, side: str, record: None) -> None:
    model, padding = model_of(name), SIDES[side]
    ours, wanted = (logits(model, implementation, attention_mask=padding)[padding > 0] for implementation in (NAME, "eager"))
    torch.testing.assert_close(ours, wanted, atol=2e-4, rtol=2e-4)


def written(name: str, implementation: str, **words: Any) -> torch.Tensor:
    """32 tokens, the likeliest each."""
    model = model_of(name)
    model.set_attn_implementation(implementation)
    asked = {"attention_mask": LEFT, "max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    found: torch.Tensor = model.generate(TOKENS, **asked, **words)
    return found


@functools.cache
def written_by_eager(name: str) -> torch.Tensor:
    return written(name, "eager")


def _caches() -> Iterator[Any]:
    for name in WRITERS:
        yield pytest.param(name, "dynamic")
        fails = pytest.mark.skipif(static_cache_fails(name), reason="transformers itself fails")
        yield pytest.param(name, "static", marks=fails)


@pytest.mark.parametrize(("name", "cache"), _caches())
@torch.no_grad()
def test_32_greedy_tokens_are_eagers_with_growing_and_with_static_caches(name: str, cache: str, record: None) -> None:
    tokens = written(name, NAME, **({} if cache == "dynamic" else {"cache_implementation": cache}))
    assert tokens.shape == (2, TOKENS.shape[1] + 32)
    assert torch.equal(tokens, written_by_eager(name))
