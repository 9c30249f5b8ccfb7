"""Search: for every problem, propose, compile, verify, measure or predict, and save the winners.

Problem x Target -> SearchSpace -> Candidate -> Variant -> render -> compile -> verify -> measure -> Outcome -> best -> SearchResult. A
failing candidate is an Outcome; it never ends a search.
"""

import math
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

from flashtune.core.problems.config import KernelSpec
from flashtune.core.records.results import SearchResult
from flashtune.core.system.errors import FlashtuneError, NoKernelFound
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.propose.claims import Claims
from flashtune.tuner.propose.sampling import import_surrogate
from flashtune.tuner.propose.space import record_of
from flashtune.tuner.propose.study import fingerprint
from flashtune.tuner.search.problem import ProblemSearch, Shared

POLL_S = 1.0
"""Seconds between two looks at the problems that other processes hold."""


class Search(Shared):
    """Runs a plan; `save` receives each problem's result as soon as it is complete (or the search is interrupted).

    Trials are stored in `storage`. An interrupted plan resumes from there, finished problems included; any number of processes may run one
    plan at the same time, each problem in one of them. `save` receives a result with a winner before other providers are timed, and may
    receive one twice (from a process that was killed just then).
    """

    def run(self, workers: Workers | None = None) -> list[SearchResult]:
        """Search every problem in turn; raises NoKernelFound where one ends without a correct candidate.

        KeyboardInterrupt, and errors of the storage, pass through after the present results were saved. A result that can't be saved ends
        nothing: it stays in the storage, and saving is retried at the end, and by the next run of the same plan. Existing `workers` are
        used in place of new ones, and go on running.
        """
        plan = self.plan
        self.names = [fingerprint(self.space(problem), problem) for problem in plan.problems]
        self._unsaved: dict[int, SearchResult] = {}
        self._taken = False
        if plan.sampler == "gp" and plan.source == "measured":
            # Imported while the children start, or the sampler's thread would import it for a second between two trials.
            threading.Thread(target=import_surrogate, name="surrogate", daemon=True).start()
        with Claims(self.storage, self._identity()) as self.claims, ExitStack() as stack:
            workers = workers or stack.enter_context(Workers(jobs=plan.jobs, limits=plan.limits, devices=plan.devices))
            device_workers = [_DeviceWorker(self, device, workers) for device in range(max(1, len(plan.devices)))]
            if len(device_workers) == 1:
                device_workers[0].run()
            else:
                self._run_all(device_workers)
            self.winners.put()
            for index, result in self._unsaved.items():
                self.save(result)
                self.schedule.found[index] = result
                self.listener.problem_finished(result)
            if len(self.schedule.found) == len(plan.problems):
                self.claims.finish()
        return self._results()

    def _results(self) -> list[SearchResult]:
        found = self.schedule.found
        results = [found[index] for index in sorted(found)]
        failed = [result for result in results if result.best is None]
        if failed:
            why = next((o.reason for o in failed[0].outcomes if o.reason), "no candidate was tried: give more trials or a larger budget")
            names = ", ".join(result.problem.label() for result in failed)
            raise NoKernelFound(f"no correct kernel found for {names} on {self.plan.target.slug}; first reason: {why}")
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
        """Identity of a plan: GPU, problems, families with their axes, trials, sampler, seed, versions, source of times."""
        plan, made_by = self.plan, self.provenance
        # Sorted, since records found by a first part of the plan may change the order of the rest (`search --calls`).
        how = [plan.source, plan.sampler, plan.seed, plan.trials, plan.until]
        return [plan.target.slug, sorted(self.names), *how, made_by.triton, made_by.gpu_name]

    def take(self, spec: KernelSpec | None) -> int | None:
        """Claim the next problem for a device worker whose last one had `spec`; None where others hold all that is left."""
        with self.lock:
            self._take_over_decided()
            if self.schedule.late and self._taken:
                # The first one gets its record however small the budget is.
                return None
            order = self.schedule.order(spec)
            name = self.claims.take([self.names[index] for index in order])
            if name is None:
                return None
            index = next(index for index in order if self.names[index] == name)
            self.schedule.begin(index)
            self._taken = True
            return index

    def _take_over_decided(self) -> None:
        """Save the results that earlier runs of this plan, or other processes, have decided."""
        left = self.schedule.order(None)
        decided = self.claims.decided() if left else set()
        for index in left:
            if self.names[index] in decided:
                problem = self.plan.problems[index]
                result = self.study(problem, self.claims.suffix).decided(problem)
                assert result is not None, "it is decided before its claim says so"
                self.schedule.begin(index)
                self.publish(index, result)

    def publish(self, index: int, result: SearchResult, workers: Workers | None = None) -> None:
        """Save a problem's result and report it; `workers` compile the winner for later calls where this process has searched it."""
        # Saved or not, the next problem's search starts from this winner.
        if (record := record_of(result)) is not None:
            self.records.insert(0, record)
        try:
            if result.outcomes:
                self.save(result)
        except FlashtuneError as error:
            self._unsaved[index] = result
            with self.lock:
                self.listener.save_failed(result.problem, error)
            return
        with self.lock:
            self.schedule.found[index] = result
            if workers is None:
                self.listener.problem_known(result, index, len(self.plan.problems))
                return
            if record is not None:
                self.winners.won(record, workers)
            self.listener.problem_finished(result)


class _DeviceWorker:
    """Worker for one GPU, or the only one of a predicted search: problem after problem, until none is left for it."""

    def __init__(self, search: Search, device: int, workers: Workers) -> None:
        self.search, self.device, self.workers = search, device, workers
        self._following: ProblemSearch | None = None
        self._spec: KernelSpec | None = None

    def run(self) -> None:
        """Search all problems that this worker can get; waits for those that other processes hold."""
        search = self.search
        try:
            while (one := self._following or self._next() or self._after_others()) is not None:
                self._following = None
                result = one.run(self._begin_next)
                if result is None:
                    search.schedule.put_back(one.index)
                    continue
                best = record_of(result)
                search.claims.decide(search.names[one.index], math.inf if best is None else best.median_us)
                search.publish(one.index, result, self.workers)
        except BaseException:
            if self._following is not None:
                self._following.abandon()
            raise

    def _next(self) -> ProblemSearch | None:
        search = self.search
        index = search.take(self._spec)
        if index is None:
            return None
        self._spec = search.plan.problems[index].spec()
        name = search.names[index]
        return ProblemSearch(search, index, self.workers, self.device, search.claims.suffix, lambda: search.claims.holds(name))

    def _after_others(self) -> ProblemSearch | None:
        """Next problem that another process gives back; None once each is decided, or the time is up."""
        schedule = self.search.schedule
        while (left := schedule.order(None)) and not schedule.late:
            if self.search.stopping.is_set():
                raise KeyboardInterrupt
            with self.search.lock:
                self.search.listener.stage_started(self.search.plan.problems[left[0]], "waiting", 0)
            time.sleep(POLL_S)
            if (one := self._next()) is not None:
                return one
        return None

    def _begin_next(self) -> None:
        """Begin the next problem, since the compilers are idle during the closing race."""
        self._following = self._next()
        if self._following is not None:
            self._following.begin()
