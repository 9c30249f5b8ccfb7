"""Verdicts and times of all providers for some shapes, in child processes: who is right, wrong, refuses or fails, and how fast.

A provider that hangs, crashes or leaves a GPU unusable costs its own verdict and nothing more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flashtune.bench.rulings import Ruled, Ruling, now
from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import PROVIDERS, Measurement
from flashtune.tuner.children import tasks
from flashtune.tuner.replies import Compared, Failed, Judged, Ready

if TYPE_CHECKING:
    from flashtune.tuner.children.workers import Workers

JUDGE_S, COMPILE_S = 120.0, 600.0
"""Seconds that a verdict may take, and one for which PyTorch compiles FlexAttention for each case."""


def judge(name: str, problem: Problem, target: Target, seed: int) -> Judged | Failed:
    """Task that checks one provider in the process with the problem's inputs on its GPU."""
    from flashtune.bench.providers import verdict_on

    try:
        _forget_compiled()
        return verdict_on(name, *tasks.inputs_on_device(problem, target, seed))
    except Exception as error:
        return tasks.failed_on_device(error)


def time_right(names: Sequence[str], problem: Problem, target: Target, seed: int, budget_s: float) -> Compared | Failed:
    """Task that times whole calls, or training steps, of providers that are right in turns, as a search's closing does; `torch` is its
    bare function."""
    from flashtune.bench.providers import call_of
    from flashtune.bench.whole_calls import interleaved
    from flashtune.tuner.timing.baseline import pytorch_call

    try:
        inputs, _ = tasks.inputs_on_device(problem, target, seed)
        bare = pytorch_call(inputs, step=True) if "torch" in names else None
        calls = [bare if name == "torch" and bare is not None else call_of(name, inputs) for name in names]
        found = interleaved([(None, call) for call in calls], budget_s=budget_s)
    except Exception as error:
        return tasks.failed_on_device(error)
    return Compared(times={name: Measurement.of(one) for name, one in zip(names, found, strict=True)}, left_out={})


def _forget_compiled() -> None:
    """Have PyTorch's compiler begin anew, which computes by matrices of all scores after some sizes; does nothing where it wasn't used."""
    import sys

    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


def versions_here(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Versions here of all that decides what each of these computes; of dispatch and PyTorch, of all that they may choose."""
    import flashtune
    from flashtune.core.pytorch import devices

    found = {name: {part: str(version) for part, version in devices.versions_of(name).items} for name in PROVIDERS}
    found["torch"] = found["cudnn"]
    found["flashtune"] = {part: version for name in PROVIDERS for part, version in found[name].items()} | {
        "flashtune": flashtune.__version__
    }
    return {name: found[name] for name in names}


def served(name: str, problem: Problem, *, named: bool) -> bool:
    """True for a provider that is judged: FlexAttention of calls without functions only where it was named, since it compiles for each."""
    return named or name != "flex" or bool(problem.features.mods)


def ruled(
    problem: Problem,
    names: Sequence[str],
    versions: Mapping[str, Mapping[str, str]],
    workers: "Workers",
    target: Target,
    *,
    seed: int,
    seconds: float,
) -> Ruled:
    """The rulings on these providers for a shape, and the times of those that are right."""
    rulings: dict[str, Ruling] = {}
    for name in names:
        # After a crash the next process has none of the inputs.
        reply: Ready | Judged | Failed = workers.prepare(problem, target, seed, pytorch=False)
        if isinstance(reply, Failed):
            # A GPU that can't take the inputs is no provider's fault.
            reply = replace(reply, inconclusive=True)
        else:
            limit_s = COMPILE_S if name == "flex" or problem.features.mods else JUDGE_S
            reply = workers.submit("device", judge, name, problem, target, seed, limit_s=limit_s).reply()
        rulings[name] = Ruling.of(reply, versions[name])
    found = Ruled(problem=problem, seed=seed, rulings=rulings, judged_at=now())
    right = [name for name, one in rulings.items() if one.verdict == "right"]
    return _timed(found, right, workers, target, seconds) if right else found


def _timed(found: Ruled, right: Sequence[str], workers: "Workers", target: Target, seconds: float) -> Ruled:
    """The rulings with times, or with the reason why there are none."""
    problem, seed = found.problem, found.seed
    reply: Ready | Compared | Failed = workers.prepare(problem, target, seed, pytorch=False)
    if isinstance(reply, Ready):
        limit_s = (COMPILE_S if problem.features.mods or "flex" in right else JUDGE_S) + 10 * seconds
        reply = workers.submit("device", time_right, right, problem, target, seed, seconds, limit_s=limit_s).reply()
    if isinstance(reply, Failed):
        return replace(found, untimed=reply.reason)
    return replace(found, rulings={name: replace(one, time=reply.times.get(name)) for name, one in found.rulings.items()})
