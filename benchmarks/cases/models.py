"""Models: forward and 64 greedy tokens of 4-layer transformers models of random weights, beside torch's attention.

The shipped integration and sdpa take turns on the same prompts. `tokens_ms` is of a prompt that both had before, `tokens_ratio_of_rounds`
the median of its rounds' ratios. `new_tokens_ms` is of prompts whose numbers of keys are new in this process, each way its own, so that
every step has its first call in it: who comes second would find what torch has built for a number of keys. `slow_calls` and `slow_s` are
of the calls of attention among these that took the host 20 ms or more. `steps` and `prefill` count our signatures by what serves them.

Prints a line for each model and writes models.json after each.
"""

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.shared.environment import argument_parser, names_of, this_gpu
from benchmarks.shared.turns import DEVICE, Call, described, guarded, medians, report, timed_in_turns
from flashtune import dispatch
from flashtune.dispatch.resolve import layers

MODELS = ("gpt2", "bert", "llama", "mistral", "qwen3", "gemma2")


SLOW_S = 0.02
"""A call that takes the host so long does something that is done once."""


@contextmanager
def slow_calls() -> Iterator[dict[str, list[float]]]:
    """The seconds of each call of attention, ours (`tuned`) and torch's (`sdpa`), that took the host SLOW_S or more meanwhile."""
    found: dict[str, list[float]] = {"tuned": [], "sdpa": []}

    def watched(way: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **words: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **words)
            finally:
                if (spent := time.perf_counter() - start) >= SLOW_S:
                    found[way].append(spent)

        return call

    ours, theirs = dispatch.attention, torch.nn.functional.scaled_dot_product_attention
    dispatch.attention, torch.nn.functional.scaled_dot_product_attention = watched("tuned", ours), watched("sdpa", theirs)
    try:
        yield found
    finally:
        dispatch.attention, torch.nn.functional.scaled_dot_product_attention = ours, theirs


def model_configs() -> dict[str, Any]:
    """4-layer models of random weights, by name."""
    import transformers

    # Without its soft cap, which sdpa hasn't, Gemma 2 runs by sdpa as well, whatever this version says.
    transformers.Gemma2ForCausalLM._supports_sdpa = transformers.Gemma2Model._supports_sdpa = True
    small = {"vocab_size": 1024, "num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    wide = {**small, "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
    return {
        "gpt2": transformers.GPT2Config(n_layer=4, vocab_size=1024, bos_token_id=1, eos_token_id=2, attn_pdrop=0.0),
        "bert": transformers.BertConfig(**small),
        "llama": transformers.LlamaConfig(**wide),
        "mistral": transformers.MistralConfig(**wide),
        "qwen3": transformers.Qwen3Config(**{**wide, "num_key_value_heads": 8}),
        "gemma2": transformers.Gemma2Config(**{**wide, "num_attention_heads": 8}, attn_logit_softcapping=None),
    }


NEW_TOKENS_FROM = {"mistral": 566}
"""Where the prompts of `new_tokens` begin, but for 170: Mistral's shapes are Llama's, and torch keeps what it builds for a shape."""


def models_part(names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Rows of these models."""
    configs = model_configs()
    for name in names:
        yield from guarded({"model": name}, partial(model_row, name, configs[name]))


def model_row(name: str, config: Any) -> dict[str, Any]:
    """One model both ways."""
    import transformers

    from flashtune.integrations import transformers as tuned

    build = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    models = {}
    for way, implementation in (("sdpa", "sdpa"), ("tuned", tuned.register())):
        torch.manual_seed(0)
        # Of its own: a config remembers the implementation, and all models that share it would run the last one.
        models[way] = build.from_config(copy.deepcopy(config), attn_implementation=implementation).to(DEVICE, torch.bfloat16).eval()
    models["tuned"].load_state_dict(models["sdpa"].state_dict())
    assert models["tuned"].config._attn_implementation != models["sdpa"].config._attn_implementation
    ids = torch.randint(5, 1000, (4, 500), device=DEVICE)
    row: dict[str, Any] = {"model": name}
    # Plans of this model alone are counted at its end.
    dispatch.reload()
    with torch.no_grad():
        logits = {way: model(ids).logits.float() for way, model in models.items()}
        row["difference"] = float((logits["tuned"] - logits["sdpa"]).abs().max() / logits["sdpa"].abs().max())
        row |= paired("forward", timed_in_turns({way: partial(model, ids) for way, model in models.items()}, rounds=15, repeats=8))
        if name == "bert":
            return row
        words = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}

        def tokens(prompt: int) -> dict[str, Call]:
            return {way: partial(model.generate, ids[:, :prompt], **words) for way, model in models.items()}

        ids = torch.randint(5, 1000, (4, 1000), device=DEVICE)
        row |= paired("tokens", timed_in_turns(tokens(100), rounds=15, repeats=1))
        # Each prompt's 64 steps lie beyond those of the one before.
        start = NEW_TOKENS_FROM.get(name, 170)
        news: dict[str, list[float]] = {way: [] for way in models}
        with slow_calls() as slow:
            for place, prompt in enumerate(range(start, start + 6 * 66, 66)):
                way = sorted(models)[place % 2]
                news[way] += timed_in_turns({way: tokens(prompt)[way]}, rounds=1, repeats=1, warm=False)[way]
        row |= pair("new_tokens", {way: statistics.median(new) for way, new in news.items()})
        for way, ending in (("tuned", ""), ("sdpa", "_sdpa")):
            row |= {f"slow_calls{ending}": len(slow[way]), f"slow_s{ending}": round(sum(slow[way]), 3)}
        plans = layers.current().plans.values()
        row["steps"] = dict(Counter(described(plan) for plan in plans if plan.call.n_q == 1))
        row["prefill"] = dict(Counter(described(plan) for plan in plans if plan.call.n_q > 1))
    return row


def paired(what: str, rounds: dict[str, list[float]]) -> dict[str, float]:
    """`pair` of the medians, and the median of the ratios of each round, which a machine whose speed drifts disturbs least."""
    ratios = [ours / theirs for ours, theirs in zip(rounds["tuned"], rounds["sdpa"], strict=True)]
    return pair(what, medians(rounds)) | {f"{what}_ratio_of_rounds": statistics.median(ratios)}


def pair(what: str, times: dict[str, float]) -> dict[str, float]:
    """Milliseconds of ours and of sdpa, and ours over sdpa's, from microseconds."""
    return {
        f"{what}_ms": times["tuned"] / 1e3,
        f"{what}_sdpa_ms": times["sdpa"] / 1e3,
        f"{what}_ratio": times["tuned"] / times["sdpa"],
    }


def main() -> None:
    """Run the models that are named."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", type=lambda text: names_of(text, MODELS, "models"), default=",".join(MODELS), help="(%(default)s)")
    options = parser.parse_args()
    this_gpu()
    report("models", {"models": lambda: models_part(options.models)})
