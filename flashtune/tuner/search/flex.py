"""Search for FlexAttention's kernel options of one problem: candidates in waves, compiled side by side and timed one by one.

Each process of a wave compiles a candidate (seconds to tens of seconds), and keeps it; once all have ended, each in turn times its own
interleaved with PyTorch's defaults, alone on the GPU.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flashtune.core.config import Config, Variant
from flashtune.core.errors import NoKernelFound
from flashtune.core.problem import Problem
from flashtune.core.results import Outcome, Provenance, SearchResult
from flashtune.core.target import Target
from flashtune.tuner.children.flex_tasks import compile_flex, prepare_flex, time_flex
from flashtune.tuner.children.workers import Pending, Workers
from flashtune.tuner.propose.flex import Options, Proposals, finals
from flashtune.tuner.replies import Failed, FlexCompiled, FlexReady, FlexTimed

COMPILE_S, PREPARE_S, TIME_S = 90.0, 240.0, 60.0
"""Seconds after which a process is killed that compiles a candidate, prepares, or times one."""

LOOK_S, RACE_S = 0.15, 0.7
"""Seconds for which each kernel of a candidate is timed in the search, and in the closing race."""

NO_GAIN = 0.99
"""Ratio of whole calls to the defaults' from which on options aren't stored: from one process to the next times differ by as much."""


class FlexProcesses:
    """Processes on PyTorch's default GPU that hold a candidate each, told apart by the number that `Workers` has for a GPU elsewhere."""

    def __init__(self, workers: Workers, problem: Problem, target: Target, seed: int, most: int) -> None:
        self._workers, self._problem, self._target, self._seed, self._most = workers, problem, target, seed, most

    def prepare(self) -> int:
        """Number of processes, after the defaults ran in each; raises NoKernelFound where they fail. The others find the first one's
        machine code of the defaults in the compiler's caches."""
        reply = self._preparing(0).reply()
        if isinstance(reply, Failed):
            raise NoKernelFound(f"FlexAttention can't take {self._problem.label()} ({reply.reason}): free the GPU, or give a smaller batch")
        wide = max(1, min(self._most, reply.processes))
        for one in [self._preparing(place) for place in range(1, wide)]:
            one.reply()
        return wide

    def compile(self, wave: Sequence[Options]) -> list[FlexCompiled | Failed]:
        """Compile a candidate in each process, side by side; a process that was killed is prepared anew first."""
        for place in range(len(wave)):
            self._preparing(place)
        submit = self._workers.submit
        pending = [
            submit("device", compile_flex, self._problem, options, limit_s=COMPILE_S, device=place) for place, options in enumerate(wave)
        ]
        return [one.reply() for one in pending]

    def time(self, place: int, options: Options, budget_s: float, *, calls: bool) -> FlexTimed | Failed:
        """Time a process's candidate, while no other one runs."""
        return self._workers.submit("device", time_flex, options, budget_s, calls, limit_s=TIME_S, device=place).reply()

    def _preparing(self, place: int) -> Pending[FlexReady]:
        submit = self._workers.submit
        return submit("device", prepare_flex, self._problem, self._target, self._seed, limit_s=PREPARE_S, device=place)


@dataclass(kw_only=True)
class FlexFound:
    """Result of a problem: the options with the ratio of their times to the defaults' (`fwd`, `bwd`, `call`), and the result to store, None
    where nothing gains; `tried` candidates, and the reasons of those that failed."""

    problem: Problem
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    options: Options | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    result: SearchResult | None = None


def tune(
    processes: FlexProcesses,
    problem: Problem,
    target: Target,
    provenance: Provenance,
    *,
    trials: int,
    deadline: float | None,
    listener: Callable[[int, float | None], None] = lambda tried, best: None,
) -> FlexFound:
    """Try so many candidates, or as many as end before `deadline` (of time.monotonic), and race the fastest as whole calls.

    The forward's options and, for a backward, those of the gradients are independent, so that a candidate has some of each, and each is
    timed alone. `listener` gets the number of candidates and the least ratio of the last kernel's time to the defaults'. Raises
    NoKernelFound where the defaults fail, or every candidate does.
    """
    found = FlexFound(problem=problem)
    parts = [Proposals(which, problem, target, provenance.seed) for which in (("fwd", "bwd") if problem.direction == "bwd" else ("fwd",))]
    wide, last = processes.prepare(), 0.0
    # The closing race takes about as long as a wave.
    while found.tried < trials and not (deadline is not None and found.tried and time.monotonic() + 2 * last > deadline):
        begun = time.monotonic()
        wave: list[Options] = []
        while len(wave) < min(wide, trials - found.tried) and any(one.left for one in parts) and (options := _joined(parts)):
            wave.append(options)
        if not wave:
            break
        for options, reply in _run(processes, wave, LOOK_S, calls=False):
            _observe(parts, options, reply, found)
        found.tried += len(wave)
        last = time.monotonic() - begun
        listener(found.tried, parts[-1].best[0][0] if parts[-1].best else None)
    best: tuple[float, Options, FlexTimed] | None = None
    closing = list(finals(parts))[: max(1, wide)]
    for options, reply in _run(processes, closing, RACE_S, calls=True):
        ratio = reply.ratio("call") if isinstance(reply, FlexTimed) else None
        if isinstance(reply, FlexTimed) and ratio is not None and (best is None or ratio < best[0]):
            best = ratio, options, reply
    if best is None:
        why = found.failures[0] if found.failures else "the closing race failed"
        raise NoKernelFound(f"no options of FlexAttention's work for {problem.label()} on {target.slug}: {why}")
    found.options, found.ratios = best[1], {which: best[2].ratio(which) or 1.0 for which in best[2].times}
    if best[0] < NO_GAIN:
        found.result = _result(problem, target, provenance, best[1], best[2])
    return found


def _joined(parts: Sequence[Proposals]) -> Options | None:
    """Options of all kernels; None where one has none left to try."""
    chosen = [one.next() for one in parts]
    return None if None in chosen else {name: value for options in chosen if options for name, value in options.items()}


def _run(
    processes: FlexProcesses, wave: Sequence[Options], budget_s: float, *, calls: bool
) -> Iterator[tuple[Options, FlexCompiled | FlexTimed | Failed]]:
    """The candidates with their times, or with the reasons of their failures before, then with the times of what didn't fail."""
    replies = processes.compile(wave)
    for place, (options, reply) in enumerate(zip(wave, replies, strict=True)):
        if isinstance(reply, Failed) or reply.failed:
            yield options, reply
        if isinstance(reply, FlexCompiled):
            yield options, processes.time(place, options, budget_s, calls=calls)


def _observe(parts: Sequence[Proposals], options: Options, reply: FlexCompiled | FlexTimed | Failed, found: FlexFound) -> None:
    """Tell each kernel's sampler its ratio, and note failures."""
    if isinstance(reply, Failed):
        found.failures.append(reply.reason)
    elif isinstance(reply, FlexCompiled):
        found.failures += reply.failed.values()
    else:
        for one in parts:
            if (ratio := reply.ratio(one.which)) is not None:
                one.tell({name: value for name, value in options.items() if name.startswith(one.which)}, ratio)


def _result(problem: Problem, target: Target, provenance: Provenance, options: Options, timed: FlexTimed) -> SearchResult:
    """The options and the defaults as outcomes of the provider, by whole calls."""
    outcomes = []
    for config, rank, time_us in zip((Config.of(options), Config.of()), (1, None), timed.times["call"], strict=True):
        variant_id = Variant(template="flex", spec=problem.spec(), config=config).id
        outcomes.append(Outcome.of_provider("flex", variant_id, time_us, config=config, rank=rank))
    return SearchResult(gpu=target.slug, problem=problem, outcomes=tuple(outcomes), provenance=provenance)
