"""Kernel Tuner's strategies on the committed sweeps, in its simulation mode: `python benchmarks/replay.py --kernel-tuner`.

Its spaces are products of axes, so it searches the Hopper family alone, which holds the best of every sweep: a smaller space than the other
search is given. Restrictions leave the candidates that are valid, as everywhere here, and no strategy knows a start or a cost model.
"""

import contextlib
import io
import json
import math
import random
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from replay import Run, Swept

FAMILY = "flash_fwd_hopper"
STRATEGIES = ("random_sample", "genetic_algorithm", "simulated_annealing", "greedy_ils", "bayes_opt")


def runs(places: Sequence["Swept"], *, trials: int, seeds: int) -> list["Run"]:
    """Every strategy on every sweep."""
    return [_run(place, strategy, trials, seed) for strategy in STRATEGIES for place in places for seed in range(seeds)]


def _run(place: "Swept", strategy: str, trials: int, seed: int) -> "Run":
    import kernel_tuner
    from replay import NOISE, Run

    candidates = [candidate for candidate in place.space.every() if candidate.family.name == FAMILY]
    axes = {
        axis.name: [value for value in axis.values if any(c.config[axis.name] == value for c in candidates)]
        for axis in candidates[0].family.axes
    }
    rng = random.Random(seed)
    timed: dict[tuple[str, ...], dict[str, object]] = {}
    regret: dict[tuple[str, ...], float] = {}
    for candidate in candidates:
        outcome = place.answers[FAMILY, candidate.config]
        values = {name: candidate.config[name] for name in axes}
        key = tuple(map(str, values.values()))
        if outcome.measurement is None:
            timed[key] = {**values, "time": "RuntimeFailedConfig"}
            continue
        regret[key] = outcome.measurement.median_us / place.best_us - 1
        time = outcome.measurement.median_us * math.exp(rng.gauss(0.0, NOISE))
        phases = dict.fromkeys(("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time"), 0.0)
        timed[key] = {**values, "time": time, "times": [time], "timestamp": "2026-11-22 00:00:00+00:00", **phases}

    def valid(point: dict[str, object]) -> bool:
        return tuple(str(point[name]) for name in axes) in timed

    random.seed(seed)
    np.random.seed(seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = Path(folder) / "cache.json"
        head = {
            "device_name": "H200",
            "kernel_name": "k",
            "problem_size": [1],
            "tune_params_keys": list(axes),
            "tune_params": axes,
            "objective": "time",
        }
        cache.write_text(json.dumps({**head, "cache": {",".join(key): value for key, value in timed.items()}}))
        results, _ = kernel_tuner.tune_kernel(
            "k",
            "__global__ void k() {}",
            1,
            [],
            axes,
            restrictions=valid,
            strategy=strategy,
            strategy_options={"max_fevals": trials},
            simulation_mode=True,
            cache=str(cache),
            lang="CUDA",
            quiet=True,
        )
    regrets: list[float] = []
    seen: set[tuple[str, ...]] = set()
    for result in results:
        key = tuple(str(result[name]) for name in axes)
        if key not in seen:
            seen.add(key)
            regrets.append(min([*regrets[-1:], regret.get(key, math.inf)]))
    regrets = (regrets + regrets[-1:] * trials)[:trials]
    return Run(problem=place.problem.label(), sampler=strategy, starts="none", seed=seed, regrets=tuple(regrets))
