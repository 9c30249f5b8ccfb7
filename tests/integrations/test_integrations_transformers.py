"""Models of transformers by the shipped integration: logits, gradients, padded batches, caches and greedy tokens as by their own attention.

The models are tiny and random, in float32; nothing is downloaded.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_models import MODELS, cache_argument, made

from flashtune import dispatch
from flashtune.core.system.errors import InputError

# Not else: every worker collects this file, and few run it.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread", "registered")
NAME = "tuned_attention"
WRITERS = [name for name in MODELS if name not in ("bert", "qwen2_moe")]
TOKENS = torch.randint(1, 61, (2, 23), generator=torch.Generator().manual_seed(3))
PADDING = torch.ones_like(TOKENS)
PADDING[0, :9] = 0


@pytest.fixture(scope="module")
def registered() -> None:
    from flashtune.integrations import transformers as tuned

    assert tuned.register() == NAME


@pytest.fixture(scope="module")
def models() -> "dict[str, PreTrainedModel]":
    return {}


@pytest.fixture
def model(models: "dict[str, PreTrainedModel]", request: pytest.FixtureRequest) -> "PreTrainedModel":
    """The model whose name is the parameter, by its own attention."""
    if request.param not in models:
        models[request.param] = made(request.param)
    models[request.param].set_attn_implementation("eager")
    return models[request.param]


def run(model: "PreTrainedModel", **words: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS, **words).logits
    return found


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_that_computes_its_attention_itself_gets_the_mask_that_it_reads(padded: bool) -> None:
    from transformers import AutoModelForCausalLM, BloomConfig

    config = BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3)
    words = {"attention_mask": PADDING} if padded else {}
    found = []
    for implementation in ("eager", NAME):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            found.append(run(model, **words)[PADDING.bool()])
    torch.testing.assert_close(*found)


def of_all(function: Callable[..., None]) -> Any:
    return pytest.mark.parametrize("model", MODELS, indirect=True)(function)


def of(*names: str) -> Any:
    return pytest.mark.parametrize("model", names, indirect=True)


@of_all
def test_logits_and_gradients_are_the_models_own(model: "PreTrainedModel") -> None:
    found = []
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = run(model)
        logits.square().mean().backward()
        found.append((logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}))
    (wanted, wanted_grads), (ours, our_grads) = found
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)
    assert wanted_grads.keys() == our_grads.keys() and any("sinks" in name for name in our_grads) == (model.config.model_type == "gpt_oss")
    for name, gradient in wanted_grads.items():
        torch.testing.assert_close(our_grads[name], gradient, atol=2e-4 * float(gradient.abs().max()) + 1e-6, rtol=1e-3, msg=name)


@of_all
@torch.no_grad()
def test_padded_batches_are_the_models_own(model: "PreTrainedModel") -> None:
    for padding in (PADDING, PADDING.flip(1)):
        model.set_attn_implementation("eager")
        wanted = run(model, attention_mask=padding)[padding > 0]
        model.set_attn_implementation(NAME)
        torch.testing.assert_close(run(model, attention_mask=padding)[padding > 0], wanted, atol=1e-4, rtol=1e-4)


@of(*WRITERS)
@torch.no_grad()
def test_64_greedy_tokens_are_those_of_eager_and_sdpa(model: "PreTrainedModel") -> None:
    words = {"attention_mask": PADDING, "max_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
    written = {}
    for implementation in ("eager", "sdpa", NAME) if model._supports_sdpa else ("eager", NAME):
        model.set_attn_implementation(implementation)
        written[implementation] = model.generate(TOKENS, **words)
    assert written[NAME].shape == (2, TOKENS.shape[1] + 64)
    assert all(torch.equal(written[NAME], tokens) for tokens in written.values())


@of("gpt2", "gemma2")
@torch.no_grad()
def test_a_static_cache_changes_no_token(model: "PreTrainedModel") -> None:
    model.set_attn_implementation(NAME)
    for padding in (torch.ones_like(TOKENS), PADDING):
        words = {"attention_mask": padding, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
        assert torch.equal(model.generate(TOKENS, **words, cache_implementation="static"), model.generate(TOKENS, **words))


@of("llama", "mistral")
@torch.no_grad()
def test_a_prompt_in_two_pieces_is_the_prompt(model: "PreTrainedModel") -> None:
    model.set_attn_implementation(NAME)
    begun = model(input_ids=TOKENS[:, :14], use_cache=True)
    kept = cache_argument(model)
    rest = model(input_ids=TOKENS[:, 14:], **{kept: begun[kept]})
    torch.testing.assert_close(torch.cat([begun.logits, rest.logits], 1), run(model), atol=1e-4, rtol=1e-4)


@of("llama")
@torch.no_grad()
def test_masks_of_callers_and_packed_texts_mean_what_they_mean(model: "PreTrainedModel") -> None:
    packed = torch.cat([torch.arange(9), torch.arange(14)])[None].expand(2, -1)
    own = torch.rand(2, 1, 23, 23, generator=torch.Generator().manual_seed(1)) + torch.eye(23) > 0.5
    added = torch.where(own, 0.0, torch.finfo(torch.float32).min)
    for words in ({"position_ids": packed}, {"attention_mask": added}):
        model.set_attn_implementation("eager")
        wanted = run(model, **words)
        model.set_attn_implementation(NAME)
        torch.testing.assert_close(run(model, **words), wanted, atol=1e-4, rtol=1e-4)


@of("gpt2")
def test_dropout_is_torchs_own_in_training(model: "PreTrainedModel") -> None:
    losses = {}
    model.train()
    for implementation in ("sdpa", NAME, "none"):
        model.set_attn_implementation(NAME if implementation == "none" else implementation)
        torch.manual_seed(5 if implementation != "none" else 6)
        losses[implementation] = run(model).square().mean()
    model.eval()
    torch.testing.assert_close(losses[NAME], losses["sdpa"])
    assert losses[NAME] != losses["none"]


@of("mistral", "bert")
@torch.no_grad()
def test_kernels_get_windows_padding_and_key_heads_as_they_are(model: "PreTrainedModel", monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []

    def recorded(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *others: Any, **words: Any) -> Any:
        given.append((key.shape[1], None if mask is None else tuple(mask.shape), words["window"]))
        return attention(query, key, value, mask, *others, **words)

    attention = dispatch.attention
    monkeypatch.setattr(dispatch, "attention", recorded)
    model.set_attn_implementation(NAME)
    run(model)
    run(model, attention_mask=PADDING)
    heads, window = (2, (6, 0)) if "Mistral" in type(model).__name__ else (4, None)
    assert given == [(heads, None, window)] * 2 + [(heads, (2, 1, 1, 23), window)] * 2


def test_position_biases_large_heads_and_pages() -> None:
    from flashtune.integrations import transformers as tuned

    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 9, 16)
    bias, module = torch.randn(1, 4, 6, 9), torch.nn.Module()
    out, weights = tuned.attention_forward(module, q, k, k, None, position_bias=bias, is_causal=False)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, bias, enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2))
    assert weights is None
    large = torch.randn(1, 2, 6, 300)
    padding = torch.tensor([[True] * 5 + [False]])
    for mask in (None, padding):
        seen = torch.ones(6, 6, dtype=torch.bool).tril() & (True if mask is None else mask[:, None, None])
        seen &= torch.ones(6, 6, dtype=torch.bool).triu(-2)
        out, _ = tuned.attention_forward(module, large, large, large, mask, sliding_window=3)
        torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(large, large, large, seen).transpose(1, 2))
    with pytest.raises(InputError, match="pages"):
        tuned.attention_forward(module, q, k, k, None, cache=object())


@pytest.mark.parametrize("name", ["flashtune", "my/sdpa", ""])
def test_a_name_that_transformers_takes_for_something_else_is_refused(name: str) -> None:
    from flashtune.integrations import transformers as tuned

    with pytest.raises(InputError, match="take another, 'tuned_attention'"):
        tuned.register(name)
