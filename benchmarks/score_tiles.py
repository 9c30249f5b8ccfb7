"""Times the kernel of a bias's and of slopes' gradients by its tile, alone, on this machine's GPU: `python benchmarks/score_tiles.py`.

The tiles are those that flash_bwd's axes of dQ have and an H200 has room for; Hopper's families give the kernel one tile for each head
size (templates/backward/_score_tile.jinja). Every tile compiles first, several at once. Prints the median of each beside the time that its
products take at the peak, best first; what asks for nothing else launches delta, this kernel and, of small biases, a last sum.
"""

import argparse
import os
from functools import lru_cache, partial
from itertools import product

from children import Children
from forward_cells import problem_of
from random_inputs import random_inputs

from flashtune.core.config import Config
from flashtune.core.launching import launcher
from flashtune.core.modules import load_source
from flashtune.core.problem import Features, Problem
from flashtune.core.target import find_target
from flashtune.templates import family
from flashtune.templates.backward.flash_bwd import tile_of_scores_fits
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.inputs import Inputs

PLAIN, TARGET = family("flash_bwd"), find_target("h200")
FEATURES = {"dbias": Features(mask="bias", dbias=True), "dslopes": Features(causal=True, alibi=True, dslopes=True)}
TILES = list(product((64, 128), (32, 64, 128), (4, 8), (1, 2)))


def config_of(problem: Problem, tile: tuple[int, int, int, int]) -> Config:
    """The default config with this tile for the kernel of dQ."""
    names = ("DQ_BLOCK_M", "DQ_BLOCK_N", "DQ_num_warps", "DQ_num_stages")
    return PLAIN.default(problem.spec(), TARGET).replace(**dict(zip(names, tile, strict=True)))


@lru_cache(maxsize=1)
def inputs_of(problem: Problem) -> Inputs:
    """Random inputs, kept for the next tile."""
    return random_inputs(problem, seed=0)


def time_tile(problem: Problem, tile: tuple[int, int, int, int], once: bool) -> float:
    """Milliseconds of all that a launch for this gradient alone takes, the median; of `once` nothing is timed."""
    import torch
    from triton.testing import do_bench

    inputs = inputs_of(problem)
    module = load_source(render(PLAIN, variant_of(PLAIN, problem.spec(), config_of(problem, tile))), "tile")
    operands = inputs.operands | dict.fromkeys(("dlse", "dq", "dk", "dv"))
    run = partial(launcher(module), *operands.values(), **inputs.keywords)
    run()
    torch.cuda.synchronize()
    return 0.0 if once else float(do_bench(run, warmup=10, rep=60, return_mode="median"))


def main() -> None:
    """Compile, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d", type=int, nargs="*", default=(64, 128, 256), help="head sizes (default: 64 128 256)")
    parser.add_argument("--of", choices=FEATURES, nargs="*", default=["dbias"], help="whose gradients (default: dbias)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="tiles that compile at once")
    parser.add_argument("--limit-s", type=float, default=60.0, help="for each tile (default: %(default)s)")
    options = parser.parse_args()
    problems = [problem_of(d, 4096, features) for d in options.d for features in map(FEATURES.__getitem__, options.of)]
    work = [(p, tile) for p in problems for tile in TILES if tile_of_scores_fits.holds(config_of(p, tile), p.spec(), TARGET)]
    with Children(count=options.jobs, limit_s=options.limit_s) as many:
        ready = [why == "" for _, why in many.each([(time_tile, (*one, True)) for one in work])]
    runs = [one for one, right in zip(work, ready, strict=True) if right]
    with Children(limit_s=options.limit_s) as alone:
        times = list(zip(runs, alone.each([(time_tile, (*one, False)) for one in runs]), strict=True))
    for problem in problems:
        # S and dP, of all visible pairs.
        peak_ms = 0.4 * problem.flops() / TARGET.peak_tflops["bf16"] / 1e9
        print(f"{problem.label()}: {peak_ms:.3f} ms at the peak")
        for ms, tile in sorted((ms, tile) for (p, tile), (ms, why) in times if p == problem and not why):
            print(f"  {ms:.3f} ms  {tile[0]}x{tile[1]}, {tile[2]} warps, {tile[3]} stages", flush=True)


if __name__ == "__main__":
    main()
