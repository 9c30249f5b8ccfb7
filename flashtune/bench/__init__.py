"""Costs of attention: what its steps have to move and compute, and what they and whole calls take on a GPU."""

from typing import TYPE_CHECKING

from flashtune.core.records.results import Fate, Measurement
from flashtune.core.system.errors import FlashtuneError, first_line

if TYPE_CHECKING:
    from flashtune.core.gpu.target import Target
    from flashtune.core.problems.problem import Problem
    from flashtune.tuner.children.tasks import Source
    from flashtune.tuner.replies import Called, Failed


def time_calls(sources: "list[Source]", problem: "Problem", target: "Target", seed: int, budget_s: float) -> "Called | Failed":
    """Task that times whole calls of some kernels, other providers and PyTorch, in the process with the problem's inputs on its GPU."""
    # Imported here: a search hands this task to others without torch in its own process.
    from flashtune.bench.whole_calls import call_times, providers_calls
    from flashtune.templates.loading import load_kernel
    from flashtune.tuner.children import tasks
    from flashtune.tuner.replies import Called, Failed

    try:
        inputs = tasks.inputs_on_device(problem, target, seed)
        modules = [load_kernel(source.text, source.stem) for source in sources]
        others = providers_calls(inputs)
        found = call_times(modules, inputs, budget_s=budget_s, beside=list(others.values()))
    except (FlashtuneError, RuntimeError, ValueError, TypeError) as error:
        return Failed(fate=Fate.RUNTIME, reason=first_line(error))
    times = [Measurement.of(one) for one in found]
    medians, beside = [one.median_us for one in times], len(sources) + len(others)
    return Called(
        times=tuple(medians[: len(sources)]),
        pytorch=medians[-1] if len(times) > beside else None,
        providers=dict(zip(others, times[len(sources) : beside], strict=True)),
    )
