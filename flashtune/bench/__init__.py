"""Costs of attention: what its steps have to move and compute, and what they and whole calls take on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from flashtune.core.records.results import Measurement
from flashtune.core.system.errors import FlashtuneError, first_line

if TYPE_CHECKING:
    from flashtune.core.gpu.target import Target
    from flashtune.core.problems.problem import Problem
    from flashtune.tuner.children.tasks import Source
    from flashtune.tuner.replies import Beside, Called, Compared, Failed


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


def bench_problem(source: "Source", problem: "Problem", target: "Target", seed: int, budget_s: float) -> "Compared | Failed":
    """Task that times a kernel interleaved with PyTorch's default and each of its backends, on the same inputs."""
    from flashtune.core.pytorch.attention import BACKENDS
    from flashtune.tuner.children import tasks
    from flashtune.tuner.replies import Compared
    from flashtune.tuner.timing.baseline import pytorch_call

    try:
        inputs, _ = tasks.inputs_on_device(problem, target, seed)
        runs: dict[str, Callable[[], object]] = {"tuned": tasks.launch_of(source, inputs)}
        runs["tuned"]()
    except Exception as error:
        return tasks.failed_on_device(error)
    left_out = {}
    for name in ("default", *BACKENDS):
        call = pytorch_call(inputs, None if name == "default" else name)
        if call is None:
            left_out[name] = "can't express this problem"
            continue
        try:
            call()
            runs[name] = call
        except (RuntimeError, ValueError) as error:
            left_out[name] = first_line(error)
    times = tasks.stopwatch(target.l2_bytes).race(list(runs.values()), budget_s=budget_s, least=11)
    return Compared(times=dict(zip(runs, times, strict=True)), left_out=left_out)
