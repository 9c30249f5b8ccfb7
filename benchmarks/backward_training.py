"""What backward.py says of training, in child processes on the GPU: NaN under a mask, memory, losses, and a step of a model."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashtune import dispatch

Attention = Callable[..., torch.Tensor]


def masked_nan(seed: int) -> list[dict[str, Any]]:
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
    """The framework's math backend."""
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


def curves(seed: int) -> dict[str, Any]:
    """Losses by our kernels and by the framework's math backend, with two seeds each: how far apart seeds are is the noise."""
    names = {"ours": dispatch.attention, "math": math_attention}
    found = {name: [losses(attend, seed + place) for place in range(2)] for name, attend in names.items()}
    ends = {name: [sum(one[-20:]) / 20 for one in runs] for name, runs in found.items()}
    return {"curves": found, "mean of the last 20": ends}


def step_times(d: int, seed: int, *, layers: int = 24, n: int = 2048, rounds: int = 10) -> dict[str, float]:
    """Seconds of a whole training step of a GPT-like model of random weights, by our attention and torch's default, taken in turn."""
    torch.manual_seed(seed)
    model = Model(layers=layers, width=2048, heads=2048 // d, tokens=32768).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 32768, (4, n + 1), device="cuda")
    spent: dict[str, list[float]] = {"ours": [], "default": []}
    for turn in range(rounds + 2):
        for name, attend in (("ours", dispatch.attention), ("default", scaled_dot_product_attention)):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            optimizer.zero_grad()
            model.loss(tokens, attend).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            torch.cuda.synchronize()
            if turn > 1:
                spent[name].append(time.perf_counter() - begun)
    medians = {name: sorted(times)[len(times) // 2] for name, times in spent.items()}
    return {**medians, "ratio": medians["default"] / medians["ours"] if medians["ours"] else math.nan}
