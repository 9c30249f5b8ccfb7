"""What a caller meets: host time a call, throughput of an eager loop, models of random weights and a new process, beside torch's own.

    python benchmarks/calls.py --out results.json                # everything, on the GPU
    python benchmarks/calls.py --parts host,grid                 # some of it
    python benchmarks/calls.py --parts decoding                  # only the decoding cells of the grid
    python benchmarks/calls.py --parts training --profile        # and where the host time of a training step goes

Ours and torch's take turns on the same tensors; figures are medians of rounds. Every output is compared with torch's first.
"""

import argparse
import copy
import cProfile
import json
import os
import pstats
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashtune import dispatch
from flashtune.dispatch.plans.forward import FrameworkPlan, KernelPlan
from flashtune.dispatch.resolve import layers
from flashtune.tuner.machine import provenance

Call = Callable[[], Any]

DEVICE = "cuda"


def timed_in_turns(calls: dict[str, Call], *, rounds: int, repeats: int, warm: bool = True) -> dict[str, list[float]]:
    """Microseconds a call, of `repeats` back to back, for each of `rounds` and each of `calls`: wall time until the GPU is done.

    A round before these isn't counted, unless they are not to be `warm`.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(0 if warm else 1, rounds + 1):
        for name in sorted(calls, reverse=turn % 2 == 1):
            call = calls[name]
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            torch.cuda.synchronize()
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


def guarded(cell: dict[str, Any], measure: Callable[[], dict[str, Any]], *, limit_s: float = 90.0) -> Iterator[dict[str, Any]]:
    """What `measure` finds of a cell; where it fails or takes longer than `limit_s`, the cell with a line on why."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no result within {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield measure()
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no word of why"]
        yield cell | {"failed": f"{type(error).__name__}: {lines[0][:300]}"}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def tensors(
    b: int, h: int, n: int, d: int, *, kv_heads: int | None = None, n_kv: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Random q, k, v."""
    q = torch.randn(b, h, n, d, device=DEVICE, dtype=dtype)
    k, v = (torch.randn(b, kv_heads or h, n_kv or n, d, device=DEVICE, dtype=dtype) for _ in range(2))
    return q, k, v


def described(plan: Any) -> str:
    """What serves: `framework`, or a kernel's module, its launches a call and where its machine code is from."""
    if not isinstance(plan, KernelPlan):
        return "framework" if isinstance(plan, FrameworkPlan) else "kernels with gradients"
    name = plan.module.__name__.rpartition(".")[2].removeprefix("flashtune_host_")
    if plan.program is None:
        return f"{name} by Triton's launcher"
    source = "compiled here"
    if plan.manifest is not None and (plan.manifest.archive or plan.manifest.folder) is not None:
        source = "cache" if plan.manifest.archive is None else "package"
    return f"{name}, {len(plan.program.recorded)} launches, {source}"


def served_by(call: Call) -> str:
    """What serves a call of ours, decided anew."""
    dispatch.reload()
    call()
    return "; ".join(sorted({described(plan) for plan in layers.current().plans.values()}))


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


def host_cases() -> dict[str, tuple[Call, Call | None]]:
    """Calls that leave the GPU idle: ours, and torch's where it has the feature."""
    q, k, v = tensors(1, 8, 512, 128)
    gq, gk, gv = tensors(1, 32, 256, 128, kv_heads=8)
    dq, dk, dv = tensors(1, 32, 1, 128, kv_heads=8, n_kv=512)
    mask = torch.rand(1, 1, 512, 512, device=DEVICE) > 0.3
    window = torch.ones(512, 512, device=DEVICE, dtype=torch.bool).tril().triu(-128)
    attend = dispatch.attention
    return {
        "plain": (lambda: attend(q, k, v), lambda: sdpa(q, k, v)),
        "causal": (lambda: attend(q, k, v, is_causal=True), lambda: sdpa(q, k, v, is_causal=True)),
        "gqa": (lambda: attend(gq, gk, gv, enable_gqa=True), lambda: sdpa(gq, gk, gv, enable_gqa=True)),
        "boolean mask": (lambda: attend(q, k, v, mask), lambda: sdpa(q, k, v, mask)),
        "window": (lambda: attend(q, k, v, is_causal=True, window=128), lambda: sdpa(q, k, v, window)),
        "softcap": (lambda: attend(q, k, v, softcap=30.0), lambda: sdpa(q, k, v)),
        "dropout": (lambda: attend(q, k, v, dropout_p=0.1), lambda: sdpa(q, k, v, dropout_p=0.1)),
        "dropout, inference mode": (lambda: attend(q, k, v, dropout_p=0.1), lambda: sdpa(q, k, v, dropout_p=0.1)),
        "dropout, seeded": (lambda: attend(q, k, v, dropout_p=0.1, seed=7), lambda: sdpa(q, k, v, dropout_p=0.1)),
        "decoding": (lambda: attend(dq, dk, dv, enable_gqa=True), lambda: sdpa(dq, dk, dv, enable_gqa=True)),
    }


def host_part() -> Iterator[dict[str, Any]]:
    """Host time of calls that leave the GPU idle."""

    def measured(name: str, ours: Call, theirs: Call | None) -> dict[str, Any]:
        times = medians(host_in_turns({"ours": ours, "torch": theirs or ours}))
        row = {"case": name, "ours_us": times["ours"], "torch_us": times["torch"], "ratio": times["ours"] / times["torch"]}
        return row | {"served_by": served_by(ours)}

    for name, (ours, theirs) in host_cases().items():
        with torch.inference_mode() if name.endswith("inference mode") else torch.no_grad():
            yield from guarded({"case": name}, partial(measured, name, ours, theirs))


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


def decoding_part() -> Iterator[dict[str, Any]]:
    """The decoding cells of the grid alone."""
    yield from grid_cells([("decoding", b, h, kv, 1, d, False, n) for b, h, kv, n, d in DECODING])


def grid_part() -> Iterator[dict[str, Any]]:
    """The whole grid, decoding first."""
    yield from decoding_part()
    yield from grid_cells([(*cell, cell[4]) for cell in GRID])


def grid_cells(cells: list[tuple[str, int, int, int, int, int, bool, int]]) -> Iterator[dict[str, Any]]:
    """Back-to-back throughput: the slower of host and GPU decides."""
    names = ("cell", "b", "h", "kv_heads", "n", "d", "causal", "n_kv")
    with torch.no_grad():
        for cell in cells:
            sizes: dict[str, Any] = dict(zip(names, cell, strict=True))
            yield from guarded(sizes, partial(grid_row, sizes))


def grid_row(cell: dict[str, Any]) -> dict[str, Any]:
    """One cell: both ways compared, then timed in turns."""
    q, k, v = tensors(cell["b"], cell["h"], cell["n"], cell["d"], kv_heads=cell["kv_heads"], n_kv=cell["n_kv"])
    words = {"is_causal": cell["causal"], "enable_gqa": cell["h"] != cell["kv_heads"]}
    calls: dict[str, Call] = {"ours": lambda: dispatch.attention(q, k, v, **words), "torch": lambda: sdpa(q, k, v, **words)}
    error = float((calls["ours"]().float() - calls["torch"]().float()).abs().max())
    explained = dispatch.explain(q, k, v, **words)
    first = timed_in_turns(calls, rounds=1, repeats=20)
    repeats = max(20, min(400, int(15_000 / max(first["torch"][0], 1))))
    times = medians(timed_in_turns(calls, rounds=9, repeats=repeats))
    found = {"error": error, "served": explained.kind, "template": explained.template, "served_by": served_by(calls["ours"])}
    return cell | found | {"ours_us": times["ours"], "torch_us": times["torch"], "speedup": times["torch"] / times["ours"]}


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


def models_part(names: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Forward and 64 greedy tokens of 4-layer models of random weights (of these `names`, if there are any), the shipped integration and
    sdpa in turns.

    `tokens_ms` is of a prompt that both had before, and `tokens_ratio_of_rounds` the median of its rounds' ratios; `new_tokens_ms` is of
    prompts whose numbers of keys nobody in this process had met, each way its own, so that every step has its first call in it: who comes
    second would find what torch has built for a number of keys.
    `slow_calls` and `slow_s` are of the calls of attention in `new_tokens` that took the host 20 ms or more. `steps` and `prefill` say what
    serves how many of our signatures.
    """
    configs = model_configs()
    if strange := set(names) - configs.keys():
        raise SystemExit(f"unknown model {sorted(strange)[0]!r}: use {', '.join(configs)}")
    for name in names or configs:
        config = configs[name]
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
    # What serves this model, and no other, is told at its end.
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


FIRST_CALL = """
import os, sys, time
if {hidden}:
    # As where there is neither Triton nor a C compiler.
    sys.modules["triton"] = None
    os.environ["PATH"] = "/nowhere"
start = time.perf_counter()
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
q = torch.ones({sizes}, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
ready = time.perf_counter()
if {ours}:
    from flashtune import dispatch
    imported = time.perf_counter()
    dispatch.attention(q, q, q, is_causal=True)
else:
    imported = time.perf_counter()
    sdpa(q, q, q, is_causal=True)
torch.cuda.synchronize()
called = time.perf_counter()
if {ours}:
    assert dispatch.explain(q, q, q, is_causal=True).kind != "framework"
print(ready - start, imported - ready, called - imported)
"""


USUAL, OF_A_ROW, APART = "4, 16, 1024, 128", "4, 16, 2048, 128", "4, 16, 900, 80"
"""Sizes of a new process's call: of another number of heads than the nearest row has, a row's own, and far from all rows."""

WAYS = (
    ("torch", False, False, USUAL),
    ("ours", True, False, USUAL),
    ("ours, no Triton, no compiler", True, True, USUAL),
    ("torch, at a row's sizes", False, False, OF_A_ROW),
    ("ours, at a row's sizes", True, False, OF_A_ROW),
    ("torch, far from rows", False, False, APART),
    ("ours, far from rows", True, False, APART),
)
"""What a new process does: its name, whether our attention serves, whether Triton and compilers are hidden from it, and the sizes."""


def process_part() -> Iterator[dict[str, Any]]:
    """Seconds of a new process beyond importing torch: importing us, and the first result; for ours also beyond torch's own first result
    of the same sizes.

    Bytecode is written as for an installed package, by the first run of each, which meets cold caches and is told apart.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs: dict[str, list[list[float]]] = {name: [] for name, *_ in WAYS}
    failed: dict[str, str] = {}
    # In turns, since the machine's load drifts.
    for _ in range(6):
        for name, ours, hidden, sizes in WAYS:
            if name not in failed:
                command = [sys.executable, "-c", FIRST_CALL.format(ours=ours, hidden=hidden, sizes=sizes)]
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
                except subprocess.TimeoutExpired:
                    failed[name] = "no result within 120 s"
                    continue
                if done.returncode:
                    failed[name] = (done.stderr.strip().splitlines() or ["no word of why"])[-1][:300]
                else:
                    runs[name].append([float(x) for x in done.stdout.split()])
    of_torch: dict[tuple[str, str], float] = {}
    for name, ours, _, sizes in WAYS:
        if name in failed:
            yield {"process": name, "failed": failed[name]}
        for label, some in (("first run", runs[name][:1]), ("later runs", runs[name][1:])):
            if some:
                imported, called = (statistics.median(run[place] for run in some) for place in (1, 2))
                row: dict[str, Any] = {"process": name, "runs": label, "import_s": round(imported, 4), "first_call_s": round(called, 4)}
                if ours and (sizes, label) in of_torch:
                    row["beyond_torch_s"] = round(imported + called - of_torch[sizes, label], 4)
                elif not ours:
                    of_torch[sizes, label] = called
                yield row


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


def training_part(*, profiled: bool = False) -> Iterator[dict[str, Any]]:
    """A causal forward and its gradients, with dropout and without, back to back: by our kernels, whether they would serve or not, and by
    torch's."""
    for dropout_p in (0.1, 0.0):
        for sizes in STEPS:
            cell = dict(zip(("b", "h", "n", "d"), sizes, strict=True))
            yield from guarded(cell | {"dropout_p": dropout_p}, partial(training_row, cell, dropout_p, profiled=profiled))


def training_row(cell: dict[str, Any], dropout_p: float, *, profiled: bool) -> dict[str, Any]:
    """One size: both ways compared, then timed in turns; where it is `profiled`, with where our host time goes. What torch drops isn't what
    ours do, so that with dropout sizes of gradients are compared and not the gradients."""
    q, k, v = (x.requires_grad_() for x in tensors(**cell))
    grad = torch.randn_like(q)

    def step(attend: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v, dropout_p=dropout_p, is_causal=True), (q, k, v), grad)

    def gap(ours: torch.Tensor, of_torch: torch.Tensor) -> float:
        if dropout_p:
            return (ours.float().norm() / of_torch.float().norm() - 1).abs().item()
        return (ours.float() - of_torch.float()).abs().max().item()

    serves = dispatch.explain(q, k, v, dropout_p=dropout_p, is_causal=True).backward is not None
    with dispatch.use(unmeasured=True):
        gaps = [gap(a, b) for a, b in zip(step(dispatch.attention), step(sdpa), strict=True)]
        calls = {"ours": partial(step, dispatch.attention), "torch": partial(step, sdpa)}
        host = medians(host_in_turns(calls, rounds=12, repeats=8))
        times = medians(timed_in_turns(calls, rounds=8, repeats=30))
        more = {"profile": host_profile(calls["ours"])} if profiled else {}
    words = {"serves": serves, "difference": max(gaps), "speedup": times["torch"] / times["ours"]}
    timed = {f"{name}_us": us for name, us in times.items()} | {f"{name}_host_us": us for name, us in host.items()}
    return cell | {"dropout_p": dropout_p} | words | timed | more


def host_profile(call: Call, *, repeats: int = 200, most: int = 16) -> dict[str, float]:
    """Microseconds a call of the functions that take the most host time themselves, as the profiler sees them, which makes Python's own
    look longer. A backward runs on the calling thread here, where the profiler looks."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        call()
        torch.cuda.synchronize()
        for _ in range(repeats):
            profile.enable()
            call()
            profile.disable()
            torch.cuda.synchronize()
    rows: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    spent = {f"{Path(file).stem}:{line} {name}": row[2] for (file, line, name), row in rows.items()}
    longest = sorted(spent, key=lambda name: -spent[name])[:most]
    return {name: round(spent[name] / repeats * 1e6, 2) for name in longest}


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "host": host_part,
    "grid": grid_part,
    "decoding": decoding_part,
    "models": models_part,
    "process": process_part,
    "training": training_part,
}


def started_part(part: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of a part, as the options want it."""
    if part == "training":
        return training_part(profiled=options.profile)
    return models_part(options.models.split(",") if options.models else ()) if part == "models" else PARTS[part]()


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ",".join(part for part in PARTS if part != "decoding")
    parser.add_argument("--parts", default=usual, help="comma-separated, of: " + ", ".join(PARTS) + " (%(default)s)")
    parser.add_argument("--models", help="comma-separated, of the models part: gpt2, bert, llama, mistral, qwen3, gemma2 (all)")
    parser.add_argument("--profile", action="store_true", help="say of training steps where the host time goes")
    parser.add_argument("--out", type=Path, help="write all figures here as JSON")
    options = parser.parse_args()
    command = shlex.join(["python", *sys.argv])
    results: dict[str, Any] = {"command": command, "machine": asdict(provenance(command=command, seed=None, measured=True))}
    if strange := set(options.parts.split(",")) - PARTS.keys():
        parser.error(f"unknown part {sorted(strange)[0]!r}: use {', '.join(PARTS)}")
    failed = 0
    for part in options.parts.split(","):
        started = time.perf_counter()
        rows = results[part] = []
        print(part, flush=True)
        for row in started_part(part, options):
            rows.append(row)
            failed += "failed" in row
            said = "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
            print(f"  {said}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
        print(f"  ({time.perf_counter() - started:.0f} s)", flush=True)
    if failed:
        raise SystemExit(f"{failed} of the figures could not be had")


if __name__ == "__main__":
    main()
