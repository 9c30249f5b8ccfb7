"""Tasks of the child processes that tune FlexAttention: each compiles its own candidate, and times it when told to, alone on the GPU."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashtune.core.problem import Problem
from flashtune.core.results import Fate
from flashtune.core.target import Target
from flashtune.tuner.children.tasks import failed_on_device
from flashtune.tuner.replies import Failed, FlexCompiled, FlexReady, FlexTimed

if TYPE_CHECKING:
    from flashtune.tuner.timing.flex import FlexBench

_kept: list["FlexBench"] = []

CONTEXT_BYTES = 1 << 30
"""Memory of a process on the GPU beside its tensors: the driver's, and the flushed buffer of the stopwatch."""


def prepare_flex(problem: Problem, target: Target, seed: int) -> FlexReady | Failed:
    """Make a problem's inputs and run FlexAttention's defaults on them, unless this process has them."""
    import torch

    from flashtune.tuner.timing.flex import FlexBench

    try:
        if not _kept or _kept[0].problem != problem:
            _kept.clear()
            torch.compiler.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            _kept.append(FlexBench(problem, target.l2_bytes, "cuda", seed))
        free, most = torch.cuda.mem_get_info()[0], torch.cuda.max_memory_allocated()
    except Exception as error:
        return failed_on_device(error)
    # A candidate's tensors come beside the defaults'.
    return FlexReady(processes=1 + int(0.8 * free / (2 * most + CONTEXT_BYTES)))


def compile_flex(problem: Problem, options: Mapping[str, int]) -> FlexCompiled | Failed:
    """Compile a candidate and compare it with the defaults."""
    if not _kept or _kept[0].problem != problem:
        return Failed(fate=Fate.RUNTIME, reason="FlexAttention's defaults aren't ready in this process")
    try:
        return FlexCompiled(failed=_kept[0].load(options))
    except Exception as error:
        return failed_on_device(error)


def time_flex(options: Mapping[str, int], budget_s: float, calls: bool) -> FlexTimed | Failed:
    """Time the candidate that this process compiled last, interleaved with the defaults."""
    if not _kept or _kept[0].options != options:
        return Failed(fate=Fate.RUNTIME, reason="its process compiled other options")
    try:
        return FlexTimed(times=_kept[0].times(budget_s, calls=calls))
    except Exception as error:
        return failed_on_device(error)
