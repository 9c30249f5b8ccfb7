"""Calls of an exported folder without flashtune; prints each call's error against float64 and who served it, as JSON.

`python tests/support/hub_calls.py FOLDER`, under Triton's interpreter where TRITON_INTERPRET is 1. With `--plan` after it, it prints the
number of kernels in the folder, and of those whose text loads and whose host code plans a call.
"""

import functools
import importlib.abc
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class NoFlashtune(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("flashtune", "jinja2", "optuna", "sqlalchemy"):
            raise ImportError(f"{name} isn't here")


sys.meta_path.insert(0, NoFlashtune())

import torch  # noqa: E402

from kernels import get_local_kernel  # noqa: E402


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Attention in float64, by its definition."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask.double()
    return scores.softmax(-1) @ v


def tensors(batch: int, heads: int, kv_heads: int, n_q: int, n_kv: int, d: int, dtype: torch.dtype) -> list[torch.Tensor]:
    sizes = ((batch, n_q, heads, d), (batch, n_kv, kv_heads, d), (batch, n_kv, kv_heads, d))
    # Rows inside of poisoned memory, heads next to each other as projections leave them.
    made = []
    for size in sizes:
        poisoned = torch.full((size[0], size[1] + 2, *size[2:]), math.nan, dtype=dtype)
        inner = poisoned[:, 1:-1]
        inner.copy_(torch.randn(size, dtype=torch.float32))
        made.append(inner.transpose(1, 2))
    return made


def cases() -> dict[str, tuple[list[torch.Tensor], dict[str, Any]]]:
    torch.manual_seed(17)
    half, single = torch.float16, torch.float32
    plain = tensors(2, 2, 2, 70, 70, 32, half)
    grown = tensors(2, 2, 2, 101, 66, 32, half)
    bias = torch.randn(1, 2, 70, 70).half()
    allowed = (torch.rand(2, 1, 70, 70) < 0.7).logical_or(torch.eye(70).bool())
    gradients = [x.clone().requires_grad_() for x in plain]
    return {
        "plain": (plain, {}),
        "other lengths": (grown, {"scale": 0.3}),
        "negative scale": (plain, {"scale": -0.2}),
        "causal": (plain, {"is_causal": True}),
        "bias": (plain, {"attn_mask": bias}),
        "shared heads": (tensors(1, 4, 2, 64, 64, 32, half), {"enable_gqa": True}),
        "boolean mask": (plain, {"attn_mask": allowed}),
        "float32": (tensors(1, 2, 2, 64, 64, 32, single), {}),
        "far longer": (tensors(1, 1, 1, 400, 400, 32, half), {}),
        "torch won": (tensors(1, 2, 2, 64, 64, 64, half), {}),
        "gradients": (gradients, {}),
        "three dimensions": ([x[0] for x in plain], {}),
    }


def planned(kernel: Any, name: str) -> bool:
    """True if a kernel's text loads and its host code plans a call."""
    part = functools.partial(getattr, sys.modules[f"{kernel.__name__}.core.standalone"])
    loaded = kernel.attention.__self__._loaded(name)
    spec = loaded.host.spec
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[spec.dtype]
    q, v = (torch.zeros(1, 2, 256, d, dtype=dtype) for d in (spec.d, spec.d_v))
    mask = {"none": None, "bool": torch.ones(1, 2, 256, 256).bool(), "bias": torch.ones(1, 2, 256, 256, dtype=dtype)}[spec.mask]
    band = part("Sides").of(None, spec.causal, "top_left").band(256, 256)
    words = part("CallParameters")(scale=1.0, band=band, mask=mask).keywords()
    provided = sys.modules[f"{kernel.__name__}.core.code.launching"].provided(loaded, q, q)
    launches = loaded.launches(q, q, v, torch.zeros_like(v), torch.zeros(1, 2, 256), **words, **provided)
    return bool(loaded.accepts(q, q, v, mask) and launches)


def main() -> None:
    kernel = get_local_kernel(Path(sys.argv[1]))
    if "--plan" in sys.argv:
        names = list(kernel.attention.__self__._table.kernels)
        print(json.dumps([len(names), sum(planned(kernel, name) for name in names)]))
        return
    found: dict[str, Any] = {}
    for name, (operands, words) in cases().items():
        out = kernel.attention(*operands, **words)
        four = [x if x.dim() == 4 else x[None] for x in operands]
        wanted = exact(*four, mask=words.get("attn_mask"), is_causal=words.get("is_causal", False), scale=words.get("scale"))
        error = (out.detach().double().reshape(wanted.shape) - wanted).abs().max().item()
        found[name] = {"error": error, "dtype": str(out.dtype), "served": kernel.explain(*operands, **words)}
        if name == "gradients":
            out.sum().backward()
            found[name]["gradient"] = bool(operands[0].grad is not None and operands[0].grad.isfinite().all())
    print(json.dumps({"calls": found, "flashtune": any(name.startswith("flashtune.") for name in sys.modules)}))


main()
