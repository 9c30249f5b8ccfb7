"""Kernel Tuner's strategies over the candidates of a committed sweep, in its own simulation mode (`pip install kernel-tuner`, version 1.5).

Its spaces are products of axes, so that it searches one family alone. Restrictions leave the sweep's candidates.
"""

import contextlib
import io
import json
import random
import signal
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from flashtune.core.problems.config import Config

LIMIT_S = 1.0
"""Seconds of CPU time that end a search, several times what one takes: in a small space strategies never stop looking for new points."""


def tried(times: Mapping[Config, float | None], strategy: str, trials: int, seed: int) -> list[Config]:
    """Configs of one family in the order in which a strategy tries them, each once, up to `trials`; `times` are microseconds, None for a
    candidate that failed."""
    import kernel_tuner

    axes = {name: sorted({config[name] for config in times}, key=str) for name in next(iter(times))}
    configs = {tuple(str(config[name]) for name in axes): config for config in times}
    phases = dict.fromkeys(("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time"), 0.0)
    cached = {}
    for values, config in configs.items():
        us = times[config]
        timed: dict[str, object] = {"time": "RuntimeFailedConfig"} if us is None else {"time": us, "times": [us]}
        cached[",".join(values)] = {**config.as_dict(), **phases, **timed, "timestamp": ""}

    # Kernel Tuner parses lambdas as text, without the names that they close over.
    def valid(point: dict[str, object]) -> bool:
        return tuple(str(point[name]) for name in axes) in configs

    found: list[Config] = []

    def count(point: dict[str, object]) -> float:
        """A metric of every try, which keeps their order."""
        found.append(configs[tuple(str(point[name]) for name in axes)])
        return 0.0

    head = {"device_name": "gpu", "kernel_name": "k", "problem_size": [1], "tune_params_keys": list(axes), "tune_params": axes}
    random.seed(seed)
    np.random.seed(seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = Path(folder) / "cache.json"
        cache.write_text(json.dumps({**head, "objective": "time", "cache": cached}))
        options = {"strategy": strategy, "strategy_options": {"max_fevals": trials}, "restrictions": valid, "cache": str(cache)}
        kernel = ("k", "__global__ void k() {}", 1, [], axes)
        # The signal ends a search without a result.
        signal.signal(signal.SIGVTALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
        with contextlib.suppress(KeyboardInterrupt):
            kernel_tuner.tune_kernel(*kernel, **options, metrics={"count": count}, simulation_mode=True, lang="CUDA", quiet=True)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    return list(dict.fromkeys(found))[:trials]
