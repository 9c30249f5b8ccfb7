"""What a caller meets: host time a call, throughput of an eager loop, models of random weights and a new process, beside torch's own.

    python benchmarks/calls.py --out results.json                # everything, on the GPU
    python benchmarks/calls.py --parts host,grid                 # some of it

Ours and torch's take turns on the same tensors; figures are medians of rounds. Every output is compared with torch's first.
"""

import argparse
import copy
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashtune import dispatch
from flashtune.tuner.machine import provenance

Call = Callable[[], Any]


def timed_in_turns(calls: dict[str, Call], *, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds a call, of `repeats` back to back, for each of `rounds` and each of `calls`: wall time until the GPU is done."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in sorted(calls, reverse=turn % 2 == 1):
            call = calls[name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
            # The first round warms up.
            if turn:
                found[name].append((time.perf_counter() - start) / repeats * 1e6)
    return found


def host_in_turns(calls: dict[str, Call], *, rounds: int = 40, repeats: int = 48) -> dict[str, list[float]]:
    """Microseconds of host time a call: the GPU catches up between groups of calls that its queue holds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name in sorted(calls, reverse=turn % 2 == 1):
            call = calls[name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            spent = time.perf_counter() - start
            if turn > 1:
                found[name].append(spent / repeats * 1e6)
    torch.cuda.synchronize()
    return found


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: round(statistics.median(times), 2) for name, times in found.items()}


def tensors(
    b: int, h: int, n: int, d: int, *, kv_heads: int | None = None, n_kv: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Random q, k, v."""
    q = torch.randn(b, h, n, d, device="cuda", dtype=dtype)
    k, v = (torch.randn(b, kv_heads or h, n_kv or n, d, device="cuda", dtype=dtype) for _ in range(2))
    return q, k, v


def host_cases() -> dict[str, tuple[Call, Call | None]]:
    """Calls that leave the GPU idle: ours, and torch's where it has the feature."""
    q, k, v = tensors(1, 8, 512, 128)
    gq, gk, gv = tensors(1, 32, 256, 128, kv_heads=8)
    dq, dk, dv = tensors(1, 32, 1, 128, kv_heads=8, n_kv=512)
    mask = torch.rand(1, 1, 512, 512, device="cuda") > 0.3
    window = torch.ones(512, 512, device="cuda", dtype=torch.bool).tril().triu(-128)
    attend = dispatch.attention
    return {
        "plain": (lambda: attend(q, k, v), lambda: sdpa(q, k, v)),
        "causal": (lambda: attend(q, k, v, is_causal=True), lambda: sdpa(q, k, v, is_causal=True)),
        "gqa": (lambda: attend(gq, gk, gv, enable_gqa=True), lambda: sdpa(gq, gk, gv, enable_gqa=True)),
        "boolean mask": (lambda: attend(q, k, v, mask), lambda: sdpa(q, k, v, mask)),
        "window": (lambda: attend(q, k, v, is_causal=True, window=128), lambda: sdpa(q, k, v, window)),
        "softcap": (lambda: attend(q, k, v, softcap=30.0), lambda: sdpa(q, k, v)),
        "dropout": (lambda: attend(q, k, v, dropout_p=0.1), lambda: sdpa(q, k, v, dropout_p=0.1)),
        "decoding": (lambda: attend(dq, dk, dv, enable_gqa=True), lambda: sdpa(dq, dk, dv, enable_gqa=True)),
    }


def host_part() -> list[dict[str, Any]]:
    """Host time of calls that leave the GPU idle."""
    found = []
    with torch.no_grad():
        for name, (ours, theirs) in host_cases().items():
            times = medians(host_in_turns({"ours": ours, "torch": theirs or ours}))
            found.append({"case": name, "ours_us": times["ours"], "torch_us": times["torch"], "ratio": times["ours"] / times["torch"]})
    return found


GRID: list[tuple[str, int, int, int, int, int, bool]] = [
    ("ViT-B/16", 64, 12, 12, 197, 64, False),
    ("ViT-L/14", 16, 16, 16, 257, 64, False),
    ("SigLIP", 8, 16, 16, 577, 64, False),
    ("CLIP text", 64, 12, 12, 77, 64, True),
    ("Bert", 1, 12, 12, 128, 64, False),
    ("Bert", 32, 12, 12, 384, 64, False),
    ("Bert", 64, 12, 12, 512, 64, False),
    ("GPT-2", 1, 12, 12, 1024, 64, True),
    ("GPT-2", 8, 12, 12, 1024, 64, True),
    ("Whisper encoder", 1, 20, 20, 1500, 64, False),
    ("Whisper encoder", 8, 20, 20, 1500, 64, False),
    ("odd", 1, 4, 4, 700, 128, False),
    ("Llama 3 8B", 1, 32, 8, 128, 128, True),
    ("Llama 3 8B", 1, 32, 8, 512, 128, True),
    ("Llama 3 8B", 4, 32, 8, 512, 128, True),
    ("Llama 3 8B", 1, 32, 8, 2048, 128, True),
    ("Llama 3 8B", 8, 32, 8, 2048, 128, True),
    ("Qwen3 0.6B", 1, 16, 8, 300, 128, True),
    ("Qwen3 0.6B", 4, 16, 8, 2048, 128, True),
    ("plain 2048", 8, 16, 16, 2048, 128, True),
    ("Gemma", 1, 8, 4, 1024, 256, True),
    ("Gemma", 4, 8, 4, 2048, 256, True),
]
"""Model, batch, query heads, key heads, tokens, head size, causal."""

DECODING = [(1, 32, 8, 500, 128), (1, 32, 8, 4096, 128), (8, 32, 8, 2048, 128), (64, 32, 8, 1024, 128), (1, 32, 8, 131072, 128)]
DECODING += [(16, 12, 12, 1024, 64), (1, 12, 12, 8192, 64), (64, 32, 8, 4096, 128), (4, 16, 8, 32768, 128)]
"""Batch, query heads, key heads, keys, head size."""


def grid_part() -> list[dict[str, Any]]:
    """Back-to-back throughput: the slower of host and GPU decides."""
    found = []
    cells = [(*cell, cell[4]) for cell in GRID] + [("decoding", b, h, kv, 1, d, False, n) for b, h, kv, n, d in DECODING]
    with torch.no_grad():
        for name, b, h, kv, n, d, causal, n_kv in cells:
            q, k, v = tensors(b, h, n, d, kv_heads=kv, n_kv=n_kv)
            words = {"is_causal": causal, "enable_gqa": h != kv}

            def ours(q: Any = q, k: Any = k, v: Any = v, words: Any = words) -> Any:
                return dispatch.attention(q, k, v, **words)

            def theirs(q: Any = q, k: Any = k, v: Any = v, words: Any = words) -> Any:
                return sdpa(q, k, v, **words)

            error = float((ours().float() - theirs().float()).abs().max())
            explained = dispatch.explain(q, k, v, **words)
            first = timed_in_turns({"ours": ours, "torch": theirs}, rounds=1, repeats=20)
            repeats = max(20, min(400, int(15_000 / max(first["torch"][0], 1))))
            times = medians(timed_in_turns({"ours": ours, "torch": theirs}, rounds=9, repeats=repeats))
            found.append(
                {
                    "cell": name, "b": b, "h": h, "kv_heads": kv, "n": n, "n_kv": n_kv, "d": d, "causal": causal, "error": error,
                    "served": explained.kind, "template": explained.template, "ours_us": times["ours"], "torch_us": times["torch"],
                    "speedup": times["torch"] / times["ours"],
                }
            )  # fmt: skip
    return found


def tuned_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **words: Any) -> tuple[Any, None]:
    """transformers' interface, as its own sdpa_attention_forward decides."""
    causal = words.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    out = dispatch.attention(
        query,
        key,
        value,
        attention_mask,
        words.get("dropout") or 0.0,
        is_causal=query.shape[2] > 1 and attention_mask is None and bool(causal),
        scale=words.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


def models_part() -> list[dict[str, Any]]:
    """Forward and 64 greedy tokens of 4-layer models of random weights, ours and sdpa in turns."""
    import transformers
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("tuned", tuned_attention)
    AttentionMaskInterface.register("tuned", sdpa_mask)
    small = {"vocab_size": 1024, "num_hidden_layers": 4}
    configs = {
        "gpt2": transformers.GPT2Config(n_layer=4, vocab_size=1024, attn_pdrop=0.0),
        "bert": transformers.BertConfig(**small),
        "llama": transformers.LlamaConfig(**small, hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, intermediate_size=4096),
        "mistral": transformers.MistralConfig(
            **small, hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, intermediate_size=4096
        ),
        "qwen3": transformers.Qwen3Config(**small, hidden_size=2048, num_attention_heads=16, num_key_value_heads=8, intermediate_size=4096),
        "gemma2": transformers.Gemma2Config(
            **small, hidden_size=2048, num_attention_heads=8, num_key_value_heads=4, intermediate_size=4096
        ),
    }
    found = []
    ids = torch.randint(5, 1000, (4, 500), device="cuda")
    for name, config in configs.items():
        build = transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
        models = {}
        for way in ("sdpa", "tuned"):
            torch.manual_seed(0)
            # Of its own: a config remembers the implementation, and all models that share it would run the last one.
            models[way] = build.from_config(copy.deepcopy(config), attn_implementation=way).to("cuda", torch.bfloat16).eval()
        models["tuned"].load_state_dict(models["sdpa"].state_dict())
        row: dict[str, Any] = {"model": name}
        assert models["tuned"].config._attn_implementation != models["sdpa"].config._attn_implementation
        with torch.no_grad():
            logits = {way: model(ids).logits.float() for way, model in models.items()}
            row["difference"] = float((logits["tuned"] - logits["sdpa"]).abs().max() / logits["sdpa"].abs().max())
            times = medians(timed_in_turns({way: (lambda m=model: m(ids)) for way, model in models.items()}, rounds=15, repeats=8))
            row |= {
                "forward_ms": times["tuned"] / 1e3,
                "forward_sdpa_ms": times["sdpa"] / 1e3,
                "forward_ratio": times["tuned"] / times["sdpa"],
            }
            if name != "bert":
                words = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False, "pad_token_id": 0}
                calls = {way: partial(model.generate, ids[:, :100], **words) for way, model in models.items()}
                times = medians(timed_in_turns(calls, rounds=3, repeats=1))
                row |= {
                    "tokens_ms": times["tuned"] / 1e3,
                    "tokens_sdpa_ms": times["sdpa"] / 1e3,
                    "tokens_ratio": times["tuned"] / times["sdpa"],
                }
        found.append(row)
        del models
        torch.cuda.empty_cache()
    return found


FIRST_CALL = """
import os, sys, time
if {hidden}:
    # As where there is neither Triton nor a C compiler.
    sys.modules["triton"] = None
    os.environ["PATH"] = "/nowhere"
start = time.perf_counter()
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
q = torch.ones(4, 16, 1024, 128, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
ready = time.perf_counter()
if {ours}:
    from flashtune import dispatch
    imported = time.perf_counter()
    dispatch.attention(q, q, q, is_causal=True)
    assert dispatch.explain(q, q, q, is_causal=True).kind != "framework"
else:
    imported = time.perf_counter()
    sdpa(q, q, q, is_causal=True)
torch.cuda.synchronize()
print(ready - start, imported - ready, time.perf_counter() - imported)
"""


def process_part() -> list[dict[str, Any]]:
    """Seconds of a new process beyond importing torch: importing us, and the first result."""
    found = []
    for name, ours, hidden in (("ours", True, False), ("ours, no Triton, no compiler", True, True), ("torch", False, False)):
        runs = []
        for _ in range(4):
            done = subprocess.run(
                [sys.executable, "-c", FIRST_CALL.format(ours=ours, hidden=hidden)], capture_output=True, text=True, timeout=120
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            runs.append([float(x) for x in done.stdout.split()])
        # The first one meets cold caches.
        for label, some in (("first run", runs[:1]), ("later runs", runs[1:])):
            middle = [statistics.median(column) for column in zip(*some, strict=True)]
            found.append({"process": name, "runs": label, "import_s": round(middle[1], 4), "first_call_s": round(middle[2], 4)})
    return found


STEPS = [
    (1, 8, 512, 128),
    (4, 16, 512, 64),
    (4, 16, 1024, 128),
    (8, 16, 1024, 64),
    (2, 16, 2048, 128),
    (4, 16, 4096, 128),
    (4, 32, 4096, 64),
]
"""(B, H, N, D) of attention's part of training steps."""


def training_part() -> list[dict[str, Any]]:
    """A causal forward and its gradients, back to back: by our kernels, whether they would serve or not, and by torch's."""
    found = []
    for b, h, n, d in STEPS:
        q, k, v = (x.requires_grad_() for x in tensors(b, h, n, d))
        grad = torch.randn_like(q)

        def step(attend: Callable[..., Any], q: Any = q, k: Any = k, v: Any = v, grad: Any = grad) -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(attend(q, k, v, is_causal=True), (q, k, v), grad)

        serves = dispatch.explain(q, k, v, is_causal=True).backward is not None
        with dispatch.use(unmeasured=True):
            gaps = [(a.float() - b.float()).abs().max().item() for a, b in zip(step(dispatch.attention), step(sdpa), strict=True)]
            calls = {"ours": partial(step, dispatch.attention), "torch": partial(step, sdpa)}
            host = medians(host_in_turns(calls, rounds=12, repeats=8))
            times = medians(timed_in_turns(calls, rounds=8, repeats=30))
        words = {"b": b, "h": h, "n": n, "d": d, "serves": serves, "difference": max(gaps), "speedup": times["torch"] / times["ours"]}
        found.append(words | {f"{name}_us": us for name, us in times.items()} | {f"{name}_host_us": us for name, us in host.items()})
    return found


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "host": host_part,
    "grid": grid_part,
    "models": models_part,
    "process": process_part,
    "training": training_part,
}


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of: " + ", ".join(PARTS))
    parser.add_argument("--out", type=Path, help="write all figures here as JSON")
    options = parser.parse_args()
    command = shlex.join(["python", *sys.argv])
    results: dict[str, Any] = {"command": command, "machine": asdict(provenance(command=command, seed=None, measured=True))}
    for part in options.parts.split(","):
        started = time.perf_counter()
        results[part] = PARTS[part]()
        print(f"{part} ({time.perf_counter() - started:.0f} s)")
        for row in results[part]:
            print("  " + "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()))
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
