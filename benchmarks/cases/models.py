"""Models beside torch's attention: greedy tokens, whole training steps, loss curves, and the memory of a long training call.

`generate` are a forward and 64 greedy tokens of 4-layer transformers models of random weights by the shipped integration and by sdpa, in
turns on the same prompts. `tokens_ms` is of a prompt that both had before, `tokens_ratio_of_rounds` the median of its rounds' ratios.
`new_tokens_ms` is of prompts whose numbers of keys are new in this process, each way its own, so that every step has its first call in it:
who comes second would find what torch has built for a number of keys. `slow_calls` and `slow_s` are of the calls of attention among these
that took the host 20 ms or more. `steps` and `prefill` count our signatures by what serves them.

`train` are whole steps (forward, loss, gradients and AdamW, the host included) of models of random weights on few sequences, as they are
fine-tuned on one GPU, both ways in turn on the same tokens; padded batches have sequences of 50 to 100 % of the length. Layers that don't
fit the time are left out, all alike. `curves` are the losses of a small model by our kernels and by PyTorch's math backend, `memory` the
peak of a long call over what its tensors need.

Prints a line for each figure and writes models.json after each.
"""

import copy
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.shared.environment import argument_parser, names_of, this_gpu
from benchmarks.shared.turns import DEVICE, Call, described, guarded, medians, report, timed_in_turns
from flashtune import dispatch
from flashtune.dispatch.state import context

Attention = Callable[..., torch.Tensor]

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


def generate_part() -> Iterator[dict[str, Any]]:
    """Tokens of each model."""
    for name, config in model_configs().items():
        yield from guarded({"model": name}, partial(model_row, name, config))


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
        plans = context.current().plans.values()
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


def _llama(layers: int = 4) -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=VOCABULARY, max_position_embeddings=16384,
    )  # fmt: skip


def _qwen(layers: int = 24) -> Any:
    import transformers

    return transformers.Qwen2Config(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=16384,
    )  # fmt: skip


def _gemma(layers: int = 8) -> Any:
    import transformers

    return transformers.Gemma2Config(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        vocab_size=VOCABULARY, max_position_embeddings=8192, attn_logit_softcapping=50.0,
    )  # fmt: skip


def cases() -> list[Case]:
    """Models by the kind of their attention."""
    import transformers

    found = [Case(name="Qwen2.5-0.5B", config=_qwen(), batch=1, n=n) for n in (1024, 2048, 4096, 8192)]
    found += [Case(name="Llama-3-8B, 4 layers", config=_llama(), batch=1, n=n) for n in (1024, 2048, 4096, 8192)]
    found += [Case(name="Gemma-2-2B, 8 layers", config=_gemma(), batch=1, n=n) for n in (2048, 4096)]
    found += [Case(name="GPT-2", config=transformers.GPT2Config(vocab_size=VOCABULARY), batch=8, n=1024)]
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


def measured_steps(case: Case, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Quartiles of a step's seconds and the first losses, by way."""
    from transformers import AutoModelForCausalLM

    from flashtune.integrations import transformers as tuned

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


def train_part(rounds: int) -> Iterator[dict[str, Any]]:
    """Seconds of models' steps both ways, with the ratio of the medians."""
    for case in cases():
        times, losses = measured_steps(case, rounds)
        speedup = times["sdpa"][1] / times["flashtune"][1]
        yield {"model": f"{case.name}, {case.batch} x {case.n}", "speedup": speedup, "quartiles_s": times, "first_losses": losses}
        gc.collect()
        torch.cuda.empty_cache()


class Block(nn.Module):
    """A layer of a GPT-like model; its attention is given for each call."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, attend: Attention, dropout_p: float) -> torch.Tensor:
        """One layer on (B, N, width)."""
        batch, n, width = x.shape
        q, k, v = self.projections(self.first(x)).view(batch, n, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v, dropout_p=dropout_p, is_causal=True).transpose(1, 2).reshape(batch, n, width)
        x = x + self.output(out)
        found: torch.Tensor = x + self.mlp(self.second(x))
        return found


class Model(nn.Module):
    """Layers between an embedding and a softmax over tokens."""

    def __init__(self, *, layers: int, width: int, heads: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, tokens, bias=False)

    def loss(self, tokens: torch.Tensor, attend: Attention, dropout_p: float = 0.0) -> torch.Tensor:
        """Cross entropy of the next token."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, attend, dropout_p)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def math_attention(*tensors: torch.Tensor, **words: Any) -> torch.Tensor:
    """PyTorch's math backend."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*tensors, **words)


def losses(attend: Attention, seed: int, *, device: str = "cuda", steps: int = 200, width: int = 256, n: int = 256) -> list[float]:
    """The loss at each step of training two layers with dropout on sequences that count up from a random token."""
    torch.manual_seed(seed)
    model = Model(layers=2, width=width, heads=4, tokens=64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(steps):
        tokens = (torch.randint(0, 64, (8, 1), device=device) + torch.arange(n + 1, device=device)) % 64
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model.loss(tokens, attend, 0.1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def curves_part(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Losses by our kernels, chosen or not, and by PyTorch's math backend, with two seeds each, whose distance is the noise."""
    for way, attend in {"ours": dispatch.attention, "math": math_attention}.items():
        for place in range(2):
            with dispatch.use(unmeasured=True, everywhere=True):
                found = losses(attend, seed + place)
            yield {"way": way, "seed": seed + place, "mean of the last 20": sum(found[-20:]) / 20, "losses": found}


def memory_part(d: int = 128, n: int = 16384, heads: int = 16) -> Iterator[dict[str, Any]]:
    """Peak bytes of a forward and a backward, and by counting: inputs, output, their gradients, dQ's sums in float32, the LSE and delta."""
    leaves = [torch.randn(1, heads, n, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    dout = torch.randn(1, heads, n, d, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with dispatch.use(unmeasured=True, everywhere=True):
            torch.autograd.grad(dispatch.attention(*leaves, is_causal=True), leaves, dout)
        torch.cuda.synchronize()
    tensor, vector = heads * n * d * 2, heads * n * 4
    counted = (3 + 1 + 1 + 3 + 2) * tensor + 2 * vector
    peak = torch.cuda.max_memory_allocated()
    yield {"peak_bytes": peak, "counted_bytes": counted, "ratio": peak / counted}


PARTS = ("generate", "train", "curves", "memory")


def main() -> None:
    """Run the parts that are named."""
    parser = argument_parser(__doc__)
    parser.add_argument("--parts", type=lambda text: names_of(text, PARTS, "parts"), default=",".join(PARTS), help="parts (%(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="training steps that count, each way (default: %(default)s)")
    options = parser.parse_args()
    this_gpu()
    parts = {"generate": generate_part, "train": partial(train_part, options.rounds), "curves": curves_part, "memory": memory_part}
    report("models", {name: parts[name] for name in options.parts})
