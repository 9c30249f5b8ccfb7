"""Search: for every problem, propose, compile, verify, measure or predict, and save the winners.

Problem x Target -> SearchSpace -> Candidate -> Variant -> render -> compile -> verify -> measure -> Outcome -> best -> SearchResult. A
failing candidate is an Outcome; it never ends a search.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeGuard

import optuna

from flashtune.core.config import KernelSpec
from flashtune.core.errors import NoKernelFound
from flashtune.core.results import SearchResult
from flashtune.tuner.children.study_writer import StudyWriter
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.propose.sampling import import_surrogate
from flashtune.tuner.propose.space import SearchSpace
from flashtune.tuner.propose.study import Plan, fingerprint
from flashtune.tuner.search.problem_search import ProblemSearch
from flashtune.tuner.search.schedule import Schedule
from flashtune.tuner.search.shared import Shared

POLL_S = 1.0
"""Seconds between polls for the end of other processes' work."""


class Search(Shared):
    """Runs a plan; `save` receives each problem's result as soon as it is complete (or the search is interrupted).

    Trials are stored in `storage`. An interrupted plan resumes from there, finished problems included; any number of processes may run one
    plan at the same time. `save` may receive a result twice (from a process that was killed just then).
    """

    def run(self, workers: Workers | None = None) -> list[SearchResult]:
        """Search every problem in turn; raises NoKernelFound where one ends without a correct candidate.

        KeyboardInterrupt, and errors of the storage, pass through after the present results were saved. A result that can't be saved ends
        nothing: it stays in the storage, and saving is retried at the end, and by the next run of the same plan. Existing `workers` are
        used in place of new ones, and go on running.
        """
        plan = self.plan
        run = Plan(self.storage, self._identity())
        self.schedule = Schedule(plan)
        if plan.sampler == "gp" and plan.source == "measured":
            # Imported while the children start, or the sampler's thread would import it for a second between two trials.
            threading.Thread(target=import_surrogate, name="surrogate", daemon=True).start()
        with ExitStack() as stack:
            writers = list[StudyWriter | None]([None] * max(1, len(plan.devices)))
            if len(writers) > 1 and _is_shared(self.storage):
                writers = [stack.enter_context(StudyWriter(self.storage)) for _ in writers]
            workers = workers or stack.enter_context(Workers(jobs=plan.jobs, limits=plan.limits, devices=plan.devices))
            device_workers = [_DeviceWorker(self, device, workers, run.suffix, writer) for device, writer in enumerate(writers)]
            if len(device_workers) == 1:
                device_workers[0].run()
            else:
                self._run_all(device_workers)
            self.winners.put()
        found = self.schedule.found
        if len(found) == len(plan.problems):
            run.finish()
        results = [found[index] for index in sorted(found)]
        failed = [result for result in results if result.best is None]
        if failed:
            why = next((o.reason for o in failed[0].outcomes if o.reason), "no candidate was tried: give more trials or a larger budget")
            names = ", ".join(result.problem.label() for result in failed)
            raise NoKernelFound(f"no correct kernel found for {names} on {plan.target.slug}; first reason: {why}")
        return results

    def _run_all(self, device_workers: "Sequence[_DeviceWorker]") -> None:
        """Run each device worker in a thread of its own; an interruption, or an error of one, ends all of them."""
        errors: list[BaseException] = []

        def run(device_worker: _DeviceWorker) -> None:
            try:
                device_worker.run()
            except BaseException as error:
                errors.append(error)
                self.stopping.set()

        threads = [threading.Thread(target=run, args=(one,), name=f"gpu {one.device}", daemon=True) for one in device_workers]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self.stopping.set()
            for thread in threads:
                thread.join()
            raise
        if errors:
            # The error of the worker that failed, not the interruptions that it caused in others.
            raise next((error for error in errors if not isinstance(error, KeyboardInterrupt)), errors[0])

    def _identity(self) -> list[object]:
        """Identity of a plan: GPU, problems, families with their axes, trials, sampler, seed, versions, and the source of times."""
        plan, made_by = self.plan, self.provenance
        spaces = (SearchSpace(plan.families, problem, plan.target, only_suited=plan.only_suited) for problem in plan.problems)
        # Sorted, since records found by a first part of the plan may change the order of the rest (`search --calls`).
        problems = sorted(fingerprint(space, problem) for space, problem in zip(spaces, plan.problems, strict=True))
        return [plan.target.slug, problems, plan.source, plan.sampler, plan.seed, plan.trials, made_by.triton, made_by.gpu_name] + (
            [] if plan.until is None else [plan.until]
        )


def _is_shared(storage: object) -> TypeGuard[optuna.storages.RDBStorage]:
    """True where other processes can read this one's trials."""
    return isinstance(storage, optuna.storages.RDBStorage) and storage.engine.url.database not in (None, "", ":memory:")


class _DeviceWorker:
    """Worker for one GPU, or the only one of a predicted search: problem after problem; at the end it helps with those begun by others."""

    def __init__(self, shared: Shared, device: int, workers: Workers, suffix: str, writer: StudyWriter | None) -> None:
        self.shared, self.device, self.workers, self.suffix, self.writer = shared, device, workers, suffix, writer
        self._following: ProblemSearch | None = None
        self._predicted: ProblemSearch | None = None
        self._spec: KernelSpec | None = None

    def run(self) -> None:
        """Search all problems that this worker can get."""
        shared, todo = self.shared, deque[ProblemSearch]()
        try:
            while (one := self._following or self._next()) is not None:
                self._following = None
                result = one.run(meanwhile=self._begin_next)
                if result is None:
                    todo.append(one)
        except BaseException:
            if self._following is not None:
                self._following.abandon()
            raise
        total = len(shared.plan.problems)
        if len(shared.plan.devices) > 1:
            mine = {one.index for one in todo}
            todo.extend(self._problem(index) for index in range(total) if index not in shared.schedule.found and index not in mine)
        # Problems that other processes were still busy with, and results that couldn't be saved.
        while todo:
            if shared.stopping.is_set():
                raise KeyboardInterrupt
            one = todo.popleft()
            if one.index in shared.schedule.found:
                continue
            if one.run(again=True) is None and not one.late():
                todo.append(one)
                one.at("waiting")
                time.sleep(POLL_S / len(todo))

    def _problem(self, index: int) -> ProblemSearch:
        return ProblemSearch(self.shared, index, self.workers, self.suffix, self.device, self.writer)

    def _next(self) -> ProblemSearch | None:
        if self._predicted is not None:
            found, self._predicted = self._predicted, None
            return found
        index = self.shared.schedule.take(self._spec)
        if index is None:
            return None
        self._spec = self.shared.plan.problems[index].spec()
        return self._problem(index)

    def _begin_next(self) -> None:
        """Begin the next problem, since the compilers are idle during the closing race."""
        self._following = self._next()
        if self._following is not None:
            self._following.begin()
            self._compile_ahead(self._following.problem.spec())

    def _compile_ahead(self, spec: KernelSpec) -> None:
        """Start compiling the initial candidates of the problem after the next, if its spec is new and so nothing of it is compiled."""
        if self.shared.schedule.next_is_new(spec):
            self._predicted = self._next()
            if self._predicted is not None:
                self._predicted.compile_ahead()
