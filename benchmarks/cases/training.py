"""Training: finite gradients under a mask, memory, loss curves, and whole steps of transformers models beside torch's attention.

`masks` counts gradients that aren't finite where rows' LSE is very low, `memory` the peak of a long call over what its tensors need,
`curves` the losses of a small model by our kernels and by PyTorch's math backend. `models` are whole steps (forward, loss, gradients and
AdamW, the host included) of models of random weights on few sequences, as they are fine-tuned on one GPU, both ways in turn on the same
tokens; padded batches have sequences of 50 to 100 % of the length. Layers that don't fit the time are left out, all alike.

Prints each part and writes training.json.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.shared.environment import argument_parser, made_by, names_of, output_folder, this_gpu
from flashtune import dispatch

Attention = Callable[..., torch.Tensor]


def masks(seed: int = 0) -> list[dict[str, Any]]:
    """Non-finite gradients under a boolean mask where rows' LSE is below -89, by sequence length: ours, torch's default and cuDNN's."""
    found = []
    for n in (128, 192, 256, 320, 448):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, 4, n, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        shift = (150 / 64**0.5) ** 0.5
        q, k = q - shift, k + shift
        mask = torch.rand(n, n, device="cuda") > 0.3
        mask[:, 0] = True
        row: dict[str, Any] = {"n": n}
        for name, attend in {"ours": dispatch.attention, "default": scaled_dot_product_attention, "cudnn": _cudnn}.items():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            try:
                grads = torch.autograd.grad(attend(*leaves, attn_mask=mask).float().square().sum(), leaves)
                row[name] = sum(int((~torch.isfinite(g)).sum()) for g in grads)
            except RuntimeError as error:
                row[name] = str(error).splitlines()[0][:200]
        found.append(row)
    return found


def _cudnn(*tensors: torch.Tensor, **words: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(*tensors, **words)


def memory(d: int = 128, n: int = 16384, heads: int = 16) -> dict[str, float]:
    """Peak bytes of a forward and a backward, and by counting: inputs, output, their gradients, dQ's sums in float32, the LSE and delta."""
    leaves = [torch.randn(1, heads, n, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    dout = torch.randn(1, heads, n, d, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(dispatch.attention(*leaves, is_causal=True), leaves, dout)
        torch.cuda.synchronize()
    tensor, vector = heads * n * d * 2, heads * n * 4
    counted = (3 + 1 + 1 + 3 + 2) * tensor + 2 * vector
    peak = torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak, "counted_bytes": counted, "ratio": peak / counted}


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


def curves(seed: int = 0) -> dict[str, Any]:
    """Losses by our kernels and by PyTorch's math backend, with two seeds each, whose distance is the noise."""
    names = {"ours": dispatch.attention, "math": math_attention}
    found = {name: [losses(attend, seed + place) for place in range(2)] for name, attend in names.items()}
    ends = {name: [sum(one[-20:]) / 20 for one in runs] for name, runs in found.items()}
    return {"curves": found, "mean of the last 20": ends}


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


def model_steps(rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of models' steps both ways, with the ratio of the medians."""
    found = {}
    for case in cases():
        times, losses = measured_steps(case, rounds)
        name = f"{case.name}, {case.batch} x {case.n}"
        found[name] = {"speedup": times["sdpa"][1] / times["flashtune"][1], "quartiles_s": times, "first_losses": losses}
        shown = ", ".join(
            f"{way} {middle:.4f} s ({low:.4f} to {high:.4f}), first loss {losses[way]:.4f}" for way, (low, middle, high) in times.items()
        )
        print(f"{name}: {found[name]['speedup']:.2f} times as fast; {shown}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return found


PARTS = ("masks", "memory", "curves", "models")


def main() -> None:
    """Run, print and write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--parts", type=lambda text: names_of(text, PARTS, "parts"), default=",".join(PARTS), help="parts (%(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each model that count, each way (default: %(default)s)")
    options = parser.parse_args()
    this_gpu()
    found: dict[str, Any] = {"provenance": made_by()}
    parts = {"masks": masks, "memory": memory, "curves": curves, "models": lambda: model_steps(options.rounds)}
    for name in options.parts:
        # Models meet what users meet; the other parts measure our kernels wherever dispatch would leave gradients to PyTorch.
        with nullcontext() if name == "models" else dispatch.use(unmeasured=True, everywhere=True):
            found[name] = parts[name]()
        if name != "models":
            print(f"{name}: {json.dumps(found[name]['mean of the last 20'] if name == 'curves' else found[name])}", flush=True)
        (output_folder() / "training.json").write_text(json.dumps(found, indent=1))
    if any(row["ours"] for row in found.get("masks", [])):
        raise SystemExit("gradients under a mask aren't finite: see training.json")
