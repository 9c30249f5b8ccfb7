"""Verdicts and times of all providers for some shapes, in child processes: who is right, wrong, refuses or fails, and how fast.

A provider that hangs, crashes or leaves a GPU unusable costs its own verdict and nothing more.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
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

SHAPES_A_JOB = 2
"""Shapes that a process checks before all are timed: the more, the less it waits for the slowest, and the more an interruption loses."""


def judge(name: str, problem: Problem, target: Target, seed: int) -> Judged | Failed:
    """Task that checks one provider in the process with the problem's inputs on its GPU."""
    import torch

    from flashtune.bench.providers import verdict_on

    try:
        _forget_compiled()
        return verdict_on(name, *tasks.inputs_on_device(problem, target, seed))
    except Exception as error:
        return tasks.failed_on_device(error)
    finally:
        # Other processes use this GPU.
        torch.cuda.empty_cache()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Who judges shapes: child processes on one GPU, the versions here of each provider, the seed of the inputs, and the seconds of timing
    that a shape takes."""

    workers: "Workers"
    target: Target
    versions: Mapping[str, Mapping[str, str]]
    seed: int
    seconds: float

    def ruled(self, asked: Sequence[tuple[Problem, Sequence[str]]], *, jobs: int, enough: Callable[[], bool]) -> Iterator[Ruled]:
        """Rulings on these providers for each shape, until `enough`, and times of those that are right: `jobs` shapes are checked at the
        same time, and their calls timed while nothing else runs."""
        free: SimpleQueue[int] = SimpleQueue()
        for device in range(jobs):
            free.put(device)

        def judged(problem: Problem, names: Sequence[str]) -> tuple[Ruled, int] | None:
            if enough():
                return None
            device = free.get()
            try:
                return self._judged(problem, names, device), device
            finally:
                free.put(device)

        for start in range(0, len(asked), SHAPES_A_JOB * jobs):
            with ThreadPoolExecutor(jobs) as beside:
                found = list(beside.map(judged, *zip(*asked[start : start + SHAPES_A_JOB * jobs], strict=True)))
            crowded = []
            for one, device in filter(None, found):
                crowd = jobs > 1 and bool(one.undecided)
                # Timed by the process that checked it, which has compiled what it calls.
                timed = one if crowd else self._timed(one, device)
                if crowd or (jobs > 1 and timed.untimed):
                    crowded.append(timed)
                else:
                    yield timed
            for device in range(jobs if crowded else 0):
                self.workers.dismiss("device", device)
            # What others left no memory for has the GPU for itself.
            for one in crowded:
                again = self._judged(one.problem, one.undecided, 0)
                yield self._timed(replace(one, rulings={**one.rulings, **again.rulings}, untimed=""), 0)

    def _judged(self, problem: Problem, names: Sequence[str], device: int) -> Ruled:
        """The rulings without times, by one child process."""
        workers, seed = self.workers, self.seed
        rulings: dict[str, Ruling] = {}
        for name in names:
            # After a crash the next process has none of the inputs.
            reply: Ready | Judged | Failed = workers.prepare(problem, self.target, seed, device=device)
            if isinstance(reply, Failed):
                # A GPU that can't take the inputs is no provider's fault.
                reply = replace(reply, inconclusive=True)
            else:
                limit_s = COMPILE_S if name == "flex" or problem.features.mods else JUDGE_S
                reply = workers.submit("device", judge, name, problem, self.target, seed, limit_s=limit_s, device=device).reply()
            rulings[name] = Ruling.of(reply, self.versions[name])
        return Ruled(problem=problem, seed=seed, rulings=rulings, judged_at=now())

    def _timed(self, found: Ruled, device: int) -> Ruled:
        """The rulings with times of those that are right, or with the reason why there are none."""
        problem, workers = found.problem, self.workers
        right = [name for name, one in found.rulings.items() if one.verdict == "right"]
        if not right:
            return found
        reply: Ready | Compared | Failed = workers.prepare(problem, self.target, found.seed, device=device)
        if isinstance(reply, Ready):
            limit_s = (COMPILE_S if problem.features.mods or "flex" in right else JUDGE_S) + 10 * self.seconds
            task = workers.submit(
                "device", time_right, right, problem, self.target, found.seed, self.seconds, limit_s=limit_s, device=device
            )
            reply = task.reply()
        if isinstance(reply, Failed):
            return replace(found, untimed=reply.reason)
        return replace(found, rulings={name: replace(one, time=reply.times.get(name)) for name, one in found.rulings.items()})
