"""Padding-free training of transformers by kernels: sequences in one row are as each alone, change no neighbour, and nothing waits."""

import os
from typing import Any

import pytest
import torch
from tiny_models import MODELS, MORE_MODELS, made

pytest.importorskip("transformers")
DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
NAMES = [name for name in (*MODELS, *MORE_MODELS) if name != "bert"]
LENGTHS = (40, 7, 1, 100, 12)
TOKENS = torch.randint(1, 61, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3)).to(DEVICE)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("registered")]


@pytest.fixture(scope="module")
def registered() -> None:
    from flashtune.integrations import transformers as tuned

    assert tuned.register() == "tuned_attention"


def model_of(name: str, implementation: str = "tuned_attention") -> Any:
    model = made(name).to(DEVICE)
    model.set_attn_implementation(implementation)
    return model


def flattened(tokens: torch.Tensor, *, bounds: bool, **words: Any) -> dict[str, Any]:
    """Batch of transformers' collator on the GPU."""
    from transformers import DataCollatorWithFlattening

    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)
    batch = collator([{"input_ids": part.tolist()} for part in tokens[0].split(LENGTHS)], return_tensors="pt")
    moved = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in batch.items() if name != "labels"}
    return {"use_cache": False, **moved, **words}


def step(model: Any, batches: list[dict[str, Any]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of these batches, one after the other, and the weights' gradients."""
    model.zero_grad()
    logits = torch.cat([model(**batch).logits[0] for batch in batches])
    logits.float().square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bounds", [False, True], ids=["positions", "bounds"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_each_sequence_by_eager(name: str, bounds: bool) -> None:
    wanted, wanted_gradients = step(model_of(name, "eager"), [{"input_ids": part, "use_cache": False} for part in TOKENS.split(LENGTHS, 1)])
    if bounds and name == "qwen2_moe":
        pytest.skip("its attention isn't told of its windows, and bounds alone don't say them")
    found, gradients = step(model_of(name), [flattened(TOKENS, bounds=bounds)])
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    for weight, gradient in wanted_gradients.items():
        torch.testing.assert_close(gradients[weight], gradient, atol=3e-4 * float(gradient.abs().max()) + 1e-6, rtol=1e-3, msg=weight)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_autocast_computes_in_its_dtype(name: str) -> None:
    exact, _ = step(model_of(name, "eager"), [{"input_ids": part, "use_cache": False} for part in TOKENS.split(LENGTHS, 1)])
    model = model_of(name)
    for _ in range(2):
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(**flattened(TOKENS, bounds=True)).logits[0]
        logits.float().square().mean().backward()
        assert float((logits.float() - exact).norm() / exact.norm()) < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
@torch.no_grad()
def test_a_sequence_changes_no_bit_of_its_neighbours(name: str, dtype: torch.dtype) -> None:
    model, other = model_of(name).to(dtype), TOKENS.clone()
    other[0, 48:148] = 61 - other[0, 48:148]
    before, after = (model(**flattened(tokens, bounds=False)).logits[0].split(LENGTHS) for tokens in (TOKENS, other))
    assert [torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [True, True, True, False, True]


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has nothing to wait for")
def test_a_step_with_bounds_waits_for_nothing() -> None:
    # Beside a cache, since transformers waits for positions where it makes a mask; a cache of windows waits, too.
    model, batch = model_of("llama").to(torch.bfloat16), flattened(TOKENS, bounds=True, use_cache=True)
    for _ in range(2):
        model(**batch).logits.sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch).logits.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
