"""Shares of a model's attention calls in its time, by which they are searched and listed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from flashtune.bench.accounting import Roofline, fused_step
from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import DECODE_ROWS, Problem, next_power_of_two

LAUNCH_US = 4.0
"""Time that any call takes at least, in microseconds: what starting a kernel costs an H100."""


def merged(counts: Mapping[Problem, int]) -> Counter[Problem]:
    """Counts in which decoding steps within one octave of keys are counted as the longest of them, since one record serves them."""
    longest: dict[Problem, Problem] = {}
    for problem in counts:
        group = _group(problem)
        longest[group] = max(longest.get(group, problem), problem, key=lambda one: one.n_kv)
    found: Counter[Problem] = Counter()
    for problem, count in counts.items():
        found[longest[_group(problem)]] += count
    return found


def _group(problem: Problem) -> Problem:
    return replace(problem, n_kv=next_power_of_two(problem.n_kv)) if problem.n_q <= DECODE_ROWS else problem


def floor_us(problem: Problem, target: Target) -> float:
    """Least time that a call of a problem takes on a GPU, by its roofline and the start of a kernel, in microseconds."""
    dtype = problem.dtype if problem.dtype in target.peak_tflops else "fp16"
    return max(LAUNCH_US, Roofline(target, dtype).floor(fused_step(problem))[0])


def ordered(counts: Iterable[Mapping[Problem, int]], target: Target) -> list[Problem]:
    """Problems of several workloads, those first that take the largest share of a workload's attention by their rooflines."""
    share: dict[Problem, float] = {}
    for one in counts:
        times = {problem: count * floor_us(problem, target) for problem, count in one.items()}
        whole = sum(times.values())
        for problem, time_us in times.items():
            share[problem] = max(share.get(problem, 0.0), time_us / whole)
    return sorted(share, key=lambda problem: -share[problem])
