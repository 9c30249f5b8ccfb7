"""Times changes of flash_bwd_hopper's text on this machine's GPU: `python benchmarks/backward_changes.py --d 128 --names whole 'no adds'`.

Each change is the rendered kernel with a few lines replaced, beside the text as it is (`whole`). CHANGES might be worth an axis; those of
NONSENSE leave something out, which shows what it costs. `'no adds|held=none'` is a change of another config, `'|held=none'` that config
alone, `'dk shared + uneven'` two changes. Every text compiles first, all at once; then a process for each cell compares gradients with
those of the first name and races all, as a search's closing race does. A process that takes too long is killed.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_inputs import random_inputs

from flashtune.core.config import Value
from flashtune.core.launching import provided
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.core.target import find_target
from flashtune.templates import family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiled_kernels
from flashtune.tuner.timing.stopwatch import Stopwatch

FAMILY, GPU = family("flash_bwd_hopper"), find_target("h200")
Change = tuple[tuple[str, str], ...]
"""Pairs of texts: what is there, and what comes in its place."""

BASES: dict[int, dict[str, Value]] = {128: {"held": "k"}, 64: {"held": "both"}}
"""What every config has of its own, by head size."""

DK_SHARED: Change = (
    (
        "dk = warpgroup_mma(dscores, q_tile, dk, is_async=True)",
        "dk = warpgroup_mma(smem.dscores.index(number % 2 * CONSUMERS + W + zero), q_tile, dk, is_async=True)",
    ),
    ("        dscores = gl.convert_layout(dscores, DSCORES_LAYOUT)\n", ""),
)
"""dK takes dS from shared memory, too, so that no warp waits for it to be read."""


def uneven(text: str) -> str:
    """The second warpgroup starts dV after dQ, so that its products last into the exponentials of the first one's next block."""
    start = "        if HAS_DKDV:\n            dv = warpgroup_mma(probs, dout_tile, dv, is_async=True)"
    rest = (
        r"            if HAS_DKDV:\n(                dv = warpgroup_mma_wait\(CONSUMERS.*?)(                dk = [^\n]*\n)(.*?)"
        r"(                part = warpgroup_mma_wait\(1, deps=\[part\]\)\n)(            else:\n.*?)            (add_dq\([^\n]*\n)"
    )
    found = re.search(rest, text, flags=re.DOTALL)
    if start not in text or found is None:
        raise ValueError("uneven: the kernel has other products")
    waits, dk, ahead, last, otherwise, add = found.groups()
    second = (
        "            if HAS_DKDV and W == 1:\n"
        f"                dv = warpgroup_mma(probs, dout_tile, dv, is_async=True)  # [KEYS, BLOCK_DV]\n{dk}{ahead}"
        f"                part = warpgroup_mma_wait(2, deps=[part])\n                {add}"
        "                dv = warpgroup_mma_wait(1, deps=[dv])\n                release(smem.dout, number)\n"
    )
    first = f"            elif HAS_DKDV:\n{waits}{dk}{ahead}{last}{otherwise}"
    both = f"{second}{first}            if not HAS_DKDV or W == 0:\n                {add}"
    before = text[: found.start()].replace(start, start.replace("HAS_DKDV", "HAS_DKDV and (W == 0 or not HAS_DQ)"))
    return before + both + text[found.end() :]


CHANGES: dict[str, Change | Callable[[str], str]] = {"whole": (), "dk shared": DK_SHARED, "uneven": uneven}
"""What leaves gradients as they are."""

NO_ADDS: Change = (("    gl.atomic_add(start + gl.arange", "    if place < 0:\n        gl.atomic_add(start + gl.arange"),)
NO_EXP: Change = (("gl.exp2(", "("),)
NO_MEETING: Change = (("            named_barrier_sync(5, 128 * CONSUMERS)\n", ""),)
NO_STORE: Change = (("            smem.dscores.index(number % 2 * CONSUMERS + W + zero).store(dscores)\n", "            pass\n"),)
NO_FENCE: Change = (("            fence_async_shared()\n            # Behind it both", "            # Behind it both"),)
NONSENSE: dict[str, Change] = {
    "no adds": NO_ADDS,
    "no exponentials": NO_EXP,
    "no meeting": NO_MEETING,
    "no store of dS": NO_STORE,
    "no fence": NO_FENCE,
}
"""What leaves something out."""


def problem(d: int, n: int, causal: bool, dropout: bool = False) -> Problem:
    """16384 tokens, 2048 columns."""
    sizes = dict(batch=16384 // n, heads=2048 // d, kv_heads=2048 // d, n_q=n, n_kv=n, d=d, d_v=d)
    return Problem(**sizes, dtype="bf16", features=Features(causal=causal, dropout=dropout), direction="bwd")


def text_of(p: Problem, name: str) -> str:
    """The rendered kernel of a name; raises ValueError where it no longer holds what a change replaces, or a config breaks a constraint."""
    changes, _, axes = name.partition("|")
    chosen: dict[str, Value] = dict(BASES[p.d])
    for axis, value in (word.split("=") for word in axes.split()):
        chosen[axis] = {"True": True, "False": False}.get(value, int(value) if value.isdigit() else value)
    config = FAMILY.default(p.spec(), GPU).replace(**chosen)
    if broken := FAMILY.violated(config, p.spec(), GPU):
        raise ValueError(f"{config.label()} breaks {broken.name}")
    text = render(FAMILY, variant_of(FAMILY, p.spec(), config))
    for part in (changes.strip() or "whole").split(" + "):
        change = (CHANGES | NONSENSE)[part]
        if callable(change):
            text = change(text)
            continue
        for before, after in change:
            if before not in text:
                raise ValueError(f"{part}: the kernel has no {before!r}")
            text = text.replace(before, after)
    return text


def compile_one(p: Problem, name: str) -> str:
    """Empty, or what was wrong."""
    try:
        compiled_kernels(text_of(p, name), "backward", p, GPU)
    except Exception as error:
        return repr(error)[:300]
    return ""


def time_cell(p: Problem, names: list[str], seconds: float) -> None:
    """One line for each name at a problem. O and the LSE are random: no kernel's time depends on them."""
    inputs = random_inputs(p, seed=0)
    calls: dict[str, Callable[[], None]] = {}
    wanted: dict[str, torch.Tensor] = {}

    def run(launches: list[Any]) -> None:
        for kernel, grid, args, options in launches:
            kernel[grid](*args, **options)

    for name in names:
        module = load_source(text_of(p, name), "backward")
        launches = module.launches(*inputs.operands.values(), **inputs.keywords, **provided(module, inputs.q, inputs.k))
        calls[name] = partial(run, launches)
        inputs.poison()
        calls[name]()
        found = {written.name: inputs.operands[written.name].double() for written in p.contract.written}
        wanted = wanted or found
        gaps = [float((found[grad] - wanted[grad]).norm() / wanted[grad].norm()) for grad in wanted]
        if not all(gap < 3e-3 for gap in gaps):
            print(f"{p.label()} {name}: gradients differ {[f'{gap:.1e}' for gap in gaps]}", flush=True)
            if not any(part in NONSENSE for part in name.partition("|")[0].strip().split(" + ")):
                del calls[name]
    watch = Stopwatch(torch.device("cuda"), GPU.l2_bytes)
    times = dict(zip(calls, watch.samples(list(calls.values()), budget_s=seconds * len(calls)), strict=True))
    first = times[names[0]]
    for name, us in times.items():
        ratio = median(mine / other for mine, other in zip(us, first, strict=True))
        rate = p.flops() / median(us) / 1e6
        print(f"{p.label()} {name}: {median(us):.1f} us, {rate:.0f} TFLOP/s, {ratio:.3f} of the first, {len(us)} rounds", flush=True)


def main() -> None:
    """Compile, compare, time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, default=128, choices=BASES, help="head size (default: %(default)s)")
    parser.add_argument("--n", type=int, nargs="*", default=[4096], help="sequence lengths (default: 4096)")
    parser.add_argument("--masks", nargs="*", default=["full", "causal"], choices=("full", "causal"))
    parser.add_argument("--names", nargs="*", default=[*CHANGES, *NONSENSE], help="what is timed (default: all changes)")
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.15, help="of timing for each name of a cell (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds after which a cell is given up (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--child", action="store_true", help="time one cell in this process")
    options = parser.parse_args()
    cells = [problem(options.d, n, mask == "causal", options.dropout) for n in options.n for mask in options.masks]
    if options.child:
        time_cell(cells[0], options.names, options.seconds)
        return
    specs = {p.spec(): p for p in cells}
    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = {(spec, name): pool.submit(compile_one, p, name) for spec, p in specs.items() for name in options.names}
        wrong = {key: job.result() for key, job in jobs.items() if job.result()}
    for (spec, name), why in wrong.items():
        print(f"{specs[spec].label()} {name}: {why}", flush=True)
    for p in cells:
        mask = "causal" if p.features.causal else "full"
        words = [sys.executable, __file__, "--child", "--d", str(options.d), "--n", str(p.n_q), "--masks", mask]
        words += ["--seconds", str(options.seconds), *["--dropout"] * options.dropout]
        words += ["--names", *(name for name in options.names if (p.spec(), name) not in wrong)]
        child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parent)
        try:
            print(child.communicate(timeout=options.limit)[0], end="", flush=True)
        except subprocess.TimeoutExpired:
            child.kill()
            print(f"{child.communicate()[0]}{p.label()}: killed", flush=True)


if __name__ == "__main__":
    main()
