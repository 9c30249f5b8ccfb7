"""Whole training steps of transformers models of random weights, by our attention and torch's: `python benchmarks/fine_tuning.py`.

Few sequences, as they are fine-tuned on one GPU: forward, loss, gradients and AdamW, the host included, both ways taken in turn on the same
tokens. A padded batch has sequences of unequal lengths, which its mask says. Layers that don't fit the time are left out, all alike.

Prints seconds of a step, with the first and third quartile, and their ratio, and the loss of the first step of both.
"""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Qwen2Config

from flashtune.integrations import transformers as tuned

WAYS = ("sdpa", "flashtune")
VOCABULARY = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model's config and the batch that it is trained on; `padded` batches have sequences of 50 to 100 % of the length."""

    name: str
    config: Any
    batch: int
    n: int
    padded: bool = False


def _llama(layers: int = 4) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=VOCABULARY, max_position_embeddings=16384,
    )  # fmt: skip


def _qwen(layers: int = 24) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=16384,
    )  # fmt: skip


def _gemma(layers: int = 8) -> Gemma2Config:
    return Gemma2Config(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        vocab_size=VOCABULARY, max_position_embeddings=8192, attn_logit_softcapping=50.0,
    )  # fmt: skip


def cases() -> list[Case]:
    """Models by what their attention is."""
    found = [Case(name="Qwen2.5-0.5B", config=_qwen(), batch=1, n=n) for n in (1024, 2048, 4096, 8192)]
    found += [Case(name="Llama-3-8B, 4 layers", config=_llama(), batch=1, n=n) for n in (1024, 2048, 4096, 8192)]
    found += [Case(name="Gemma-2-2B, 8 layers", config=_gemma(), batch=1, n=n) for n in (2048, 4096)]
    found += [Case(name="GPT-2", config=GPT2Config(vocab_size=VOCABULARY), batch=8, n=1024)]
    found += [Case(name="Qwen2.5-0.5B, padded", config=_qwen(), batch=4, n=2048, padded=True)]
    found += [Case(name="Llama-3-8B, 4 layers, padded", config=_llama(), batch=4, n=2048, padded=True)]
    return found


def tokens_of(case: Case) -> dict[str, torch.Tensor]:
    """A batch on the GPU."""
    tokens = torch.randint(0, VOCABULARY, (case.batch, case.n), device="cuda")
    words = {"input_ids": tokens, "labels": tokens}
    if case.padded:
        lengths = torch.linspace(case.n // 2, case.n, case.batch, device="cuda").long()
        words["attention_mask"] = (torch.arange(case.n, device="cuda") < lengths[:, None]).long()
        words["labels"] = tokens.masked_fill(words["attention_mask"] == 0, -100)
    return words


def measure(case: Case, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Quartiles of a step's seconds and the first losses, by way."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(case.config, attn_implementation="sdpa").to("cuda", torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    words = tokens_of(case)
    names = dict(zip(WAYS, ("sdpa", tuned.register()), strict=True))
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, float] = {}
    for turn in range(rounds + 2):
        for way in WAYS:
            model.set_attn_implementation(names[way])
            torch.cuda.synchronize()
            begun = time.perf_counter()
            optimizer.zero_grad()
            loss = model(**words, use_cache=False).loss
            loss.backward()
            if turn:
                optimizer.step()
            torch.cuda.synchronize()
            losses.setdefault(way, loss.item())
            if turn > 1:
                spent[way].append(time.perf_counter() - begun)
    return {way: statistics.quantiles(times, n=4) for way, times in spent.items()}, losses


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each way that count (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("fine_tuning.py trains models on a GPU and found none: run it on the GPU's machine")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    for case in cases():
        times, losses = measure(case, options.rounds)
        shown = ", ".join(
            f"{way} {middle:.4f} s ({low:.4f} to {high:.4f}), first loss {losses[way]:.4f}" for way, (low, middle, high) in times.items()
        )
        print(f"{case.name}, {case.batch} x {case.n}: {times['sdpa'][1] / times['flashtune'][1]:.2f} times as fast; {shown}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
