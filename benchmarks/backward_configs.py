"""Checks configs of flash_bwd_hopper on this machine's GPU and times them beside cuDNN: `python benchmarks/backward_configs.py`.

Every config compiles first, all at once. Then each is checked against the float64 oracle on ragged little problems, in a process that is
killed when it takes too long, for a kernel whose roles wait for one another hangs. Then cells are timed, cuDNN and some configs in turns,
three rounds: a whole backward as `triton.testing.do_bench` times it, the median. Prints a line for each.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from flashtune.core.config import Config
from flashtune.core.launching import launcher
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.core.target import find_target
from flashtune.core.torch_dtypes import TORCH_DTYPES
from flashtune.templates import family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.cases import cases
from flashtune.tuner.compile import compiled_kernels
from flashtune.tuner.correctness import check, everywhere, oracle
from flashtune.tuner.inputs import Inputs, make_inputs

FAMILY, GPU = family("flash_bwd_hopper"), find_target("h200")
CAUSAL = Features(causal=True)
CHECKED = [
    (d, dtype, features)
    for d in (64, 128)
    for dtype, features in (
        ("bf16", Features()),
        ("fp16", CAUSAL),
        ("bf16", Features(window=(64, 32), sinks=True)),
        ("bf16", Features(mask="bool")),
        ("bf16", Features(causal=True, mask="bias")),
        ("bf16", Features(causal=True, dropout=True)),
        ("bf16", Features(causal=True, softcap=True)),
        ("bf16", Features(causal=True, alibi=True)),
        ("bf16", Features(window=(70, 30), mask="bool", dropout=True, softcap=True, alibi=True)),
    )
]
TIMED = [
    *((d, n, 1, features) for d in (128, 64) for n, features in ((4096, Features()), (4096, CAUSAL), (16384, CAUSAL))),
    (128, 512, 1, Features()),
    (128, 4096, 4, CAUSAL),
    *((128, 4096, 1, features) for features in (Features(mask="bool"), Features(mask="bias"), Features(dropout=True))),
    *((128, 4096, 1, features) for features in (Features(softcap=True), Features(alibi=True))),
]
"""Head size, length, query heads to a key head, features."""


def problem(d: int, dtype: Any, features: Features, *, n: int = 512, batch: int = 2, heads: int = 4, kv_heads: int = 2) -> Problem:
    """A problem of equal lengths and head sizes."""
    sizes = dict(batch=batch, heads=heads, kv_heads=kv_heads, n_q=n, n_kv=n, d=d, d_v=d)
    return Problem(**sizes, dtype=dtype, features=features, direction="bwd")


def source(p: Problem, config: Config) -> str:
    """The rendered text."""
    return render(FAMILY, variant_of(FAMILY, p.spec(), config))


def starts(p: Problem) -> list[Config]:
    """The configs of a problem that are looked at; none where the family doesn't take it."""
    return FAMILY.starts(p.spec(), GPU)[:4] if FAMILY.supports(p.spec(), GPU) is None else []


def compile_one(p: Problem, config: Config) -> str:
    """Empty, or what the compiler said."""
    try:
        compiled_kernels(source(p, config), "flash_bwd_hopper", p, GPU)
    except Exception as error:
        return repr(error)[:300]
    return ""


def check_one(p: Problem, config: Config) -> None:
    """All that the gate checks at little sizes: ragged problems, scores around 150 and -150, many heads."""
    launch = launcher(load_source(source(p, config), "flash_bwd_hopper"))
    for case in cases(p, device="cuda", seed=0, thorough=True):
        inputs, small = case.inputs, case.inputs.problem
        expected = oracle(inputs, everywhere(small))
        verdict = check(launch, inputs, expected)
        norms = {}
        for operand in small.contract.written:
            pairs = [(inputs.operands[operand.name][operand.at(e.place, small)].double(), e.values[operand.name]) for e in expected]
            gap = sum(float((found - wanted).square().sum()) for found, wanted in pairs)
            norms[operand.name] = round((gap / max(1e-30, sum(float(wanted.square().sum()) for _, wanted in pairs))) ** 0.5, 6)
        print(f"check {config.label()} {small.label()}: {verdict.reason or 'right'} {norms}", flush=True)


def framework(p: Problem, inputs: Inputs) -> Callable[[], Any] | None:
    """cuDNN's backward; None where it has none of these features."""
    if p.features not in (Features(), CAUSAL):
        return None
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=p.features.causal, enable_gqa=p.gqa_ratio > 1)
    return lambda: torch.autograd.grad(out, (q, k, v), inputs.operands["dout"], retain_graph=True)


def time_one(p: Problem) -> None:
    """One line for cuDNN, where it serves, and one for each config. O and the LSE are random: no kernel's time depends on them."""
    # The forward's oracle would take longer than all that is timed.
    inputs = make_inputs(replace(p, direction="fwd"), device="cuda", seed=0)
    shapes = {operand.name: (operand.shape(p), TORCH_DTYPES[operand.dtype(p)]) for operand in p.contract.operands}
    operands = {name: torch.randn(shape, device="cuda").to(dtype) for name, (shape, dtype) in shapes.items()}
    operands["lse"] = operands["lse"].abs() + 9.0
    inputs = replace(inputs, problem=p, operands=operands)
    calls = {"cudnn": framework(p, inputs)}
    for config in starts(p):
        launch = launcher(load_source(source(p, config), "flash_bwd_hopper"))
        calls[config.label()] = partial(launch, *operands.values(), **inputs.keywords)
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name, call in calls.items():
            if call is not None:
                found.setdefault(name, []).append(do_bench(call, warmup=5, rep=20, return_mode="median") * 1e3)
    for name, us in found.items():
        rounds = ", ".join(f"{x:.0f}" for x in us)
        print(f"time {p.label()} b{p.batch} {name}: {median(us):.1f} us, {p.flops() / median(us) / 1e6:.0f} TFLOP/s ({rounds})", flush=True)


def in_child(words: list[str], limit_s: float) -> str:
    """What this script prints in a process of its own."""
    child = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        return child.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        child.kill()
        return f"{child.communicate()[0]}{' '.join(words)}: killed after {limit_s:g} s\n"


def timed() -> Iterator[Problem]:
    """16384 tokens, 2048 columns."""
    for d, n, ratio, features in TIMED:
        p = problem(d, "bf16", features, n=n, batch=16384 // n, heads=2048 // d, kv_heads=2048 // d // ratio)
        if starts(p):
            yield p


def checked() -> Iterator[tuple[Problem, int]]:
    """Each spec with the place of a config among its starts, another one each time."""
    for index, (d, dtype, features) in enumerate(CHECKED):
        p = problem(d, dtype, features)
        if starts(p):
            yield p, index % len(starts(p))


def main() -> None:
    """Compile, check, time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the part of one child process")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds after which a child is killed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=12)
    options = parser.parse_args()
    if options.only:
        if options.only == "time":
            for p in timed():
                time_one(p)
        else:
            p, chosen = list(checked())[int(options.only)]
            check_one(p, starts(p)[chosen])
        return
    jobs = [(p, starts(p)[chosen]) for p, chosen in checked()] + [(p, config) for p in timed() for config in starts(p)]
    unique = list({(p.spec(), config): (p, config) for p, config in jobs}.values())
    with ProcessPoolExecutor(options.jobs) as pool:
        for (p, config), why in zip(unique, pool.map(compile_one, *zip(*unique, strict=True)), strict=True):
            if why:
                print(f"compile {config.label()} {p.label()}: {why}", flush=True)
    with ThreadPoolExecutor(6) as threads:
        words = [["--only", str(place)] for place, _ in enumerate(checked())]
        for text in threads.map(in_child, words, [options.limit] * len(words)):
            print(text, end="", flush=True)
    print(in_child(["--only", "time"], 3 * options.limit), end="", flush=True)


if __name__ == "__main__":
    main()
