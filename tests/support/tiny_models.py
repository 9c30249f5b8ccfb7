"""Models of transformers that are tiny and random, by their names: made of configurations, nothing is downloaded."""

import inspect
from typing import TYPE_CHECKING, Any

import torch

from flashtune.core.system.versions import minor

# Not else: every worker collects tests that import this, and few run them.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
COMMON = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": None, "pad_token_id": 0}
WINDOWS = {**COMMON, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {**COMMON, "attention_chunk_size": 7, "layer_types": ["chunked_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 2}
GPT2 = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 128,
    "attn_pdrop": 0.3,
    "vocab_size": 61,
    "eos_token_id": None,
    "bos_token_id": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {**GPT2, "initializer_range": 0.3}),
    "llama": ("LlamaConfig", COMMON),
    "mistral": ("MistralConfig", {**COMMON, "sliding_window": 7}),
    "gemma2": ("Gemma2Config", {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0}),
    "qwen3": ("Qwen3Config", {**WINDOWS, "use_sliding_window": True, "head_dim": 16}),
    "gpt_oss": ("GptOssConfig", {**WINDOWS, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "bert": ("BertConfig", {**SIZES, "max_position_embeddings": 128}),
    # The attention of these isn't told of its windows or chunks.
    "llama4": ("Llama4TextConfig", {**CHUNKS, "head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 2, "use_qk_norm": False}),
    "qwen2_moe": ("Qwen2MoeConfig", {**WINDOWS, **EXPERTS, "use_sliding_window": True}),
}
MORE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3TextConfig", {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 20}),
    "phi3": ("Phi3Config", {**COMMON, "sliding_window": 7}),
    "gpt_neox": ("GPTNeoXConfig", {**SIZES, "max_position_embeddings": 128, "eos_token_id": None}),
    "opt": ("OPTConfig", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 128, "eos_token_id": None}),
    "olmo2": ("Olmo2Config", COMMON),
    "cohere2": ("Cohere2Config", {**WINDOWS, "head_dim": 16, "logit_scale": 1.0}),
    "starcoder2": ("Starcoder2Config", {**COMMON, "sliding_window": 7}),
    "granite": ("GraniteConfig", {**COMMON, "attention_multiplier": 0.2}),
}
"""Beside `MODELS`, where there is time for them: on a GPU."""


def made(name: str) -> "PreTrainedModel":
    """The model with its own attention, in float32 and for inference; the same weights at every call."""
    import transformers

    torch.manual_seed(1)
    of_config, words = {**MODELS, **MORE_MODELS}[name]
    config = getattr(transformers, of_config)(**words)
    config._attn_implementation = "eager"
    model = transformers.BertForMaskedLM(config) if name == "bert" else transformers.AutoModelForCausalLM.from_config(config)
    if name == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model.eval()


def cache_argument(model: "PreTrainedModel") -> str:
    """Name of the argument for a cache: transformers has another since 5.24, and drops the older one in 5.40."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def static_cache_fails(name: str) -> bool:
    """True where transformers itself generates nothing with a static cache (docs/support.md)."""
    import transformers

    return name == "llama4" and minor(transformers.__version__) < (5, 20)
