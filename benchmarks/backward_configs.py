"""Checks configs of flash_bwd_hopper on this machine's GPU and times them beside cuDNN: `python benchmarks/backward_configs.py`.

Every config compiles first, all at once. Then each is checked against the float64 oracle on ragged little problems, in a process that is
killed when it takes too long, for a kernel whose roles wait for one another hangs. Then cells are timed, cuDNN and all configs of a cell in
turns, three rounds: a whole backward as `triton.testing.do_bench` times it, the median. Prints a line for each.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
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
    (d, n, kv_heads, features)
    for d, heads in ((64, 32), (128, 16))
    for n, kv_heads, features in (
        (512, heads, Features()),
        (4096, heads, Features()),
        (4096, heads, CAUSAL),
        (16384, heads, CAUSAL),
        (4096, heads // 4, CAUSAL),
    )
]


def problem(d: int, dtype: Any, features: Features, *, n: int = 512, batch: int = 2, heads: int = 4, kv_heads: int = 2) -> Problem:
    """A problem of equal lengths and head sizes."""
    sizes = dict(batch=batch, heads=heads, kv_heads=kv_heads, n_q=n, n_kv=n, d=d, d_v=d)
    return Problem(**sizes, dtype=dtype, features=features, direction="bwd")


def source(p: Problem, config: Config) -> str:
    """The rendered text."""
    return render(FAMILY, variant_of(FAMILY, p.spec(), config))


def starts(p: Problem) -> list[Config]:
    """The configs of a problem that are looked at; none where the family doesn't take it."""
    return FAMILY.starts(p.spec(), GPU) if FAMILY.supports(p.spec(), GPU) is None else []


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


def calls(p: Problem) -> tuple[Callable[[], Any], dict[str, Callable[[], Any]]]:
    """cuDNN's backward and that of each config, on the same inputs."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def drawn(heads: int) -> torch.Tensor:
        return torch.randn(p.batch, heads, p.n_q, p.d, device="cuda", dtype=TORCH_DTYPES[p.dtype], generator=generator)

    leaves = [drawn(p.heads), drawn(p.kv_heads), drawn(p.kv_heads)]
    dout = drawn(p.heads)
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=p.features.causal, enable_gqa=p.gqa_ratio > 1)
    shared = [x.repeat_interleave(p.gqa_ratio, 1) for x in leaves[1:]]
    lse = torch.ops.aten._scaled_dot_product_flash_attention(leaves[0], *shared, 0.0, p.features.causal)[1]
    given = dict(mask=None, scale=p.d**-0.5, softcap=0.0, dropout_p=0.0, seed=0, offset=0, **p.band.keywords())
    kept = out.detach(), lse.contiguous(), dout, None, *map(torch.empty_like, leaves)
    ours = {}
    for config in starts(p):
        launch = launcher(load_source(source(p, config), "flash_bwd_hopper"))
        ours[config.label()] = lambda launch=launch: launch(*leaves, *kept, **given)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), ours


def time_one(p: Problem) -> None:
    """One line for cuDNN and one for each config."""
    framework, ours = calls(p)
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name, call in {"cudnn": framework, **ours}.items():
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
    for d, n, kv_heads, features in TIMED:
        yield problem(d, "bf16", features, n=n, batch=16384 // n, heads=2048 // d, kv_heads=kv_heads)


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
        part, place = options.only.split("-")
        if part == "check":
            p, chosen = list(checked())[int(place)]
            check_one(p, starts(p)[chosen])
        else:
            time_one(list(timed())[int(place)])
        return
    jobs = [(p, starts(p)[chosen]) for p, chosen in checked()] + [(p, config) for p in timed() for config in starts(p)]
    unique = list({(p.spec(), config): (p, config) for p, config in jobs}.values())
    with ProcessPoolExecutor(options.jobs) as pool:
        for (p, config), why in zip(unique, pool.map(compile_one, *zip(*unique, strict=True)), strict=True):
            if why:
                print(f"compile {config.label()} {p.label()}: {why}", flush=True)
    with ThreadPoolExecutor(6) as threads:
        words = [["--only", f"check-{place}"] for place, _ in enumerate(checked())]
        for text in threads.map(in_child, words, [options.limit] * len(words)):
            print(text, end="", flush=True)
    for place, _ in enumerate(timed()):
        print(in_child(["--only", f"time-{place}"], options.limit), end="", flush=True)


if __name__ == "__main__":
    main()
