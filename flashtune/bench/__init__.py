"""Costs of attention: what its steps have to move and compute, and what they and whole calls take on a GPU."""

from dataclasses import replace
from typing import TYPE_CHECKING

from flashtune.core.records.results import Measurement
from flashtune.core.system.errors import FlashtuneError

if TYPE_CHECKING:
    from flashtune.core.gpu.target import Target
    from flashtune.core.problems.problem import Problem
    from flashtune.tuner.children.tasks import Source
    from flashtune.tuner.replies import Beside, Called, Failed


def time_calls(
    sources: "list[Source]", problem: "Problem", target: "Target", seed: int, budget_s: float, beside: "Beside" = "pytorch"
) -> "Called | Failed":
    """Task that times whole calls of some kernels, and of others `beside` them, some of which compile for seconds, in the process with the
    problem's inputs on its GPU."""
    # Imported here: a search hands this task to others without torch in its own process.
    from flashtune.bench.providers import judged_providers
    from flashtune.bench.whole_calls import call_times
    from flashtune.templates.loading import load_kernel
    from flashtune.tuner.children import tasks
    from flashtune.tuner.replies import Called, Spent
    from flashtune.tuner.timing.baseline import backend_name, pytorch_call

    spent = Spent()
    try:
        inputs, verifier = tasks.inputs_on_device(problem, target, seed)
        modules = [load_kernel(source.text, source.stem) for source in sources]
        providers, calls = judged_providers(inputs, verifier, spent) if beside == "all" else ({}, {})
        with spent.on("calls"):
            found = call_times(modules, inputs, budget_s=budget_s, beside=list(calls.values()), pytorch=beside != "none")
    except (FlashtuneError, RuntimeError, ValueError, TypeError) as error:
        return tasks.failed_on_device(error)
    times = [Measurement.of(one) for one in found]
    ours_and_theirs = len(sources) + len(calls)
    for name, time in zip(calls, times[len(sources) : ours_and_theirs], strict=True):
        providers[name] = replace(providers[name], time=time)
    return Called(
        times=tuple(one.median_us for one in times[: len(sources)]),
        pytorch=times[-1] if len(times) > ours_and_theirs else None,
        providers=providers,
        backend="" if beside == "none" or (own := pytorch_call(inputs, step=True)) is None else backend_name(own),
        spent=spent.take(),
    )
