"""Checks configs of flash_bwd_hopper on this machine's GPU and times them beside cuDNN: `python benchmarks/backward_configs.py`.

`--family flash_bwd_hopper_split` does so for the kernels that write the same bits every time, which are also checked for that: at head
size 256 beside cuDNN and FlashAttention-2's deterministic backward, as torch runs it, below beside the latter and flash_bwd_hopper.

`--sweep` takes the plain cells alone, and the configs of SWEPT there in place of starts: what each axis is worth.

Every config compiles first, all at once. Then each is checked against the float64 oracle on ragged little problems, in a process that is
killed when it takes too long, for a kernel whose roles wait for one another hangs. Then cells are timed, cuDNN and some configs in turns,
three rounds: a whole backward as `triton.testing.do_bench` times it, the median. Prints a line for each.
What was wrong or hung isn't timed.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from random_inputs import random_inputs
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from flashtune.core.config import Config, Value
from flashtune.core.launching import launcher
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.core.target import find_target
from flashtune.templates import family
from flashtune.templates.family import Family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiled_kernels
from flashtune.tuner.verify.cases import cases
from flashtune.tuner.verify.correctness import check, differs, everywhere, oracle
from flashtune.tuner.verify.inputs import Inputs

FUSED, SPLIT, GPU = family("flash_bwd_hopper"), family("flash_bwd_hopper_split"), find_target("h200")
CAUSAL = Features(causal=True)
PLAIN = (Features(), CAUSAL)
CHECKED = (
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
TIMED = [
    *((d, n, 1, features) for d in (128, 64) for n, features in ((4096, Features()), (4096, CAUSAL), (16384, CAUSAL))),
    (128, 512, 1, Features()),
    (128, 4096, 4, CAUSAL),
    *((128, 4096, 1, features) for features in (Features(mask="bool"), Features(mask="bias"), Features(dropout=True))),
    *((128, 4096, 1, features) for features in (Features(softcap=True), Features(alibi=True))),
]
"""Head size, length, query heads to a key head, features."""
TIMED_SPLIT = [
    *((256, 4096, ratio, features) for ratio, features in ((1, Features()), (1, CAUSAL), (4, CAUSAL))),
    *((d, 4096, 1, features) for d in (128, 64) for features in (Features(), CAUSAL)),
    *((256, 4096, 1, features) for features in (Features(mask="bool"), Features(dropout=True))),
    (128, 512, 1, Features()),
]
"""The same for the split family."""
SWEPT: dict[int, list[dict[str, Value]]] = {
    128: [{}, {"exp_early": True}, {"held": "k"}, {"held": "v"}, {"persistent": True, "held": "v"}],
    64: [
        {"held": "both"},
        {"persistent": True, "held": "both"},
        {"persistent": "drawn", "held": "both"},
        {"persistent": "drawn", "held": "both", "num_stages": 3},
    ],
}
"""What `--sweep` changes of the default, by head size."""
TIMED_SWEEP = [(d, n, 1, features) for d in (128, 64) for n in (512, 1024, 4096, 16384) for features in PLAIN]
"""The cells of a sweep."""


def problem(d: int, dtype: Any, features: Features, *, n: int = 512, batch: int = 2, heads: int = 4, kv_heads: int = 2) -> Problem:
    """A problem of equal lengths and head sizes."""
    sizes = dict(batch=batch, heads=heads, kv_heads=kv_heads, n_q=n, n_kv=n, d=d, d_v=d)
    return Problem(**sizes, dtype=dtype, features=features, direction="bwd")


def source(chosen: Family, p: Problem, config: Config) -> str:
    """The rendered text."""
    return render(chosen, variant_of(chosen, p.spec(), config))


def starts(chosen: Family, p: Problem) -> list[Config]:
    """The configs of a problem that are looked at; none where the family doesn't take it."""
    return chosen.starts(p.spec(), GPU)[:4] if chosen.supports(p.spec(), GPU) is None else []


def swept(p: Problem) -> list[Config]:
    """The configs of a sweep at a problem."""
    default = FUSED.default(p.spec(), GPU)
    found = [default.replace(**changes) for changes in SWEPT[p.d]]
    return [config for config in found if FUSED.violated(config, p.spec(), GPU) is None]


def raced(chosen: Family, p: Problem, sweep: bool) -> Iterator[tuple[Family, Config]]:
    """What is timed at a problem: some starts, and beside the split family the fused one's first."""
    if sweep:
        yield from ((FUSED, config) for config in swept(p))
        return
    yield from ((chosen, config) for config in starts(chosen, p)[: 4 if chosen is FUSED or p.features in PLAIN else 2])
    if chosen is SPLIT:
        yield from ((FUSED, config) for config in starts(FUSED, p)[:1])


def compile_one(name: str, p: Problem, config: Config) -> str:
    """Empty, or what the compiler said."""
    try:
        compiled_kernels(source(family(name), p, config), name, p, GPU)
    except Exception as error:
        return repr(error)[:300]
    return ""


def check_one(chosen: Family, p: Problem, config: Config) -> None:
    """All that the gate checks at little sizes: ragged problems, scores around 150 and -150, many heads."""
    launch = launcher(load_source(source(chosen, p, config), chosen.name))
    for case in cases(p, device="cuda", seed=0, thorough=True):
        inputs, small = case.inputs, case.inputs.problem
        expected = oracle(inputs, everywhere(small))
        verdict = check(launch, inputs, expected)
        norms = {}
        for operand in small.contract.written:
            pairs = [(inputs.operands[operand.name][operand.at(e.place, small)].double(), e.values[operand.name]) for e in expected]
            gap = sum(float((found - wanted).square().sum()) for found, wanted in pairs)
            norms[operand.name] = round((gap / max(1e-30, sum(float(wanted.square().sum()) for _, wanted in pairs))) ** 0.5, 6)
        reason = verdict.reason or (differs(launch, inputs) if chosen.repeatable else "")
        print(f"check {config.label()} {small.label()}: {reason or 'right'} {norms}", flush=True)


def framework(p: Problem, inputs: Inputs, backend: SDPBackend) -> Callable[[], Any] | None:
    """A backward of torch's; None where it has none of these features. FlashAttention-2's is asked for the same bits every time."""
    if p.features not in PLAIN:
        return None
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=p.features.causal, enable_gqa=p.gqa_ratio > 1)

    def gradients() -> Any:
        torch.use_deterministic_algorithms(backend is SDPBackend.FLASH_ATTENTION)
        found = torch.autograd.grad(out, (q, k, v), inputs.operands["dout"], retain_graph=True)
        torch.use_deterministic_algorithms(False)
        return found

    return gradients


def calls_of(chosen: Family, p: Problem, inputs: Inputs, sweep: bool, without: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is timed at a problem: torch's backward, some configs, and of the split family each of its kernels by itself."""
    backends = [("cudnn", SDPBackend.CUDNN_ATTENTION)] + [("flash deterministic", SDPBackend.FLASH_ATTENTION)] * (chosen is SPLIT)
    for name, backend in backends:
        try:
            call = framework(p, inputs, backend)
        except RuntimeError as error:
            print(f"time {p.label()} {name}: {str(error).splitlines()[0]}", flush=True)
            continue
        if call is not None:
            yield name, call
    for by, config in raced(chosen, p, sweep):
        if config.label() in without:
            continue
        launch = launcher(load_source(source(by, p, config), by.name))
        yield config.label(), partial(launch, *inputs.operands.values(), **inputs.keywords)
        if by is SPLIT and p.features in PLAIN:
            yield f"{config.label()} dK, dV", partial(launch, *{**inputs.operands, "dq": None}.values(), **inputs.keywords)
            yield f"{config.label()} dQ", partial(launch, *{**inputs.operands, "dk": None, "dv": None}.values(), **inputs.keywords)


def time_one(chosen: Family, p: Problem, sweep: bool, without: list[str]) -> None:
    """One line for each of `calls_of`. O and the LSE are random: no kernel's time depends on them."""
    calls = dict(calls_of(chosen, p, random_inputs(p, seed=0), sweep, without))
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for name, call in calls.items():
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


def timed(chosen: Family, heads: list[int], sweep: bool) -> Iterator[Problem]:
    """16384 tokens, 2048 columns; of some head sizes where there are any."""
    for d, n, ratio, features in TIMED_SWEEP if sweep else TIMED_SPLIT if chosen is SPLIT else TIMED:
        if heads and d not in heads:
            continue
        p = problem(d, "bf16", features, n=n, batch=16384 // n, heads=2048 // d, kv_heads=2048 // d // ratio)
        if starts(chosen, p):
            yield p


def checked(chosen: Family, heads: list[int], sweep: bool) -> Iterator[tuple[Problem, Config]]:
    """Each spec with a config of its starts, another one each time; of some head sizes where there are any. Of a sweep each config."""
    if sweep:
        for d in (64, 128):
            for index, config in enumerate(swept(problem(d, "bf16", CAUSAL))[1:] if not heads or d in heads else []):
                yield problem(d, *CHECKED[index % 3]), config
        return
    wanted = [(d, *one) for d in (64, 128) for one in CHECKED]
    if chosen is SPLIT:
        wanted = [(256, *one) for one in CHECKED] + wanted[::3]
    for index, (d, dtype, features) in enumerate(wanted):
        p = problem(d, dtype, features)
        if starts(chosen, p) and (not heads or d in heads):
            yield p, starts(chosen, p)[index % len(starts(chosen, p))]


def main() -> None:
    """Compile, check, time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=FUSED.name, choices=(FUSED.name, SPLIT.name))
    parser.add_argument("--d", type=int, nargs="*", default=[], help="these head sizes alone (default: all)")
    parser.add_argument("--sweep", action="store_true", help="plain cells, and the configs of SWEPT")
    parser.add_argument("--without", nargs="*", default=[], help="configs that aren't timed")
    parser.add_argument("--only", help="the part of one child process")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds after which a child is killed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=12)
    options = parser.parse_args()
    chosen = family(options.family)
    if options.only:
        if options.only == "time":
            torch.utils.deterministic.fill_uninitialized_memory = False
            for p in timed(chosen, options.d, options.sweep):
                time_one(chosen, p, options.sweep, options.without)
        else:
            check_one(chosen, *list(checked(chosen, options.d, options.sweep))[int(options.only)])
        return
    looked_at = list(checked(chosen, options.d, options.sweep))
    jobs = [(chosen, p, config) for p, config in looked_at]
    jobs += [(by, p, config) for p in timed(chosen, options.d, options.sweep) for by, config in raced(chosen, p, options.sweep)]
    unique = list({(p.spec(), config): (by.name, p, config) for by, p, config in jobs}.values())
    with ProcessPoolExecutor(options.jobs) as pool:
        for (_, p, config), why in zip(unique, pool.map(compile_one, *zip(*unique, strict=True)), strict=True):
            if why:
                print(f"compile {config.label()} {p.label()}: {why}", flush=True)
    words = ["--family", chosen.name, "--d", *map(str, options.d), *["--sweep"] * options.sweep]
    without = []
    with ThreadPoolExecutor(options.jobs) as threads:
        places = [[*words, "--only", str(place)] for place, _ in enumerate(looked_at)]
        for (_, config), text in zip(looked_at, threads.map(in_child, places, [options.limit] * len(places)), strict=True):
            print(text, end="", flush=True)
            if (
                any(": right {" not in line for line in text.splitlines() if line.startswith("check "))
                or "check " not in text
                or "killed" in text
            ):
                without.append(config.label())
    print(in_child([*words, "--only", "time", "--without", *without], 3 * options.limit), end="", flush=True)


if __name__ == "__main__":
    main()
