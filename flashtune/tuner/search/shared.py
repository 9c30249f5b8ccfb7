"""State that the problems of one search share on all GPUs."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import optuna

from flashtune.core.config import KernelSpec
from flashtune.core.problem import Problem
from flashtune.core.results import Provenance, SearchResult
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.publish.winners import Winners
from flashtune.tuner.search.evaluation import Evaluation, MeasuredEvaluation, PredictedEvaluation, Verdicts
from flashtune.tuner.search.plan import SearchListener, SearchPlan
from flashtune.tuner.search.proposing import Compiling
from flashtune.tuner.search.schedule import Schedule


@dataclass
class SpecState:
    """State of one compiled spec over every N: known and running compilations by variant id, and numeric checks."""

    compiled: dict[str, Compiling]
    verdicts: Verdicts


class Shared:
    """Plan, listener, known records and compilations, and the schedule; `Search` runs it."""

    def __init__(
        self,
        plan: SearchPlan,
        *,
        storage: optuna.storages.BaseStorage,
        provenance: Provenance,
        save: Callable[[SearchResult], None],
        listener: SearchListener,
    ) -> None:
        self.plan, self.storage, self.provenance = plan, storage, provenance
        self.save, self.listener = save, listener
        self._states: dict[KernelSpec, SpecState] = {}
        self.records = list(plan.known)
        # Variants with facts by the installed Triton may have cached machine code.
        self.facts = {
            record.outcome.variant_id: record.outcome.facts
            for record in plan.known
            if plan.source == "measured" and record.outcome.facts is not None and record.provenance.triton == provenance.triton
        }
        self.schedule, self.winners = Schedule(plan), Winners(plan.keep, plan.target, plan.limits.compile_s)
        self.lock, self.stopping = threading.RLock(), threading.Event()
        self._seed = plan.seed if plan.seed is not None else time.time_ns() % (1 << 31)

    def state(self, spec: KernelSpec) -> SpecState:
        """State shared by all problems of a spec."""
        return self._states.setdefault(spec, SpecState({}, {}))

    def evaluation(self, problem: Problem, workers: Workers, device: int) -> Evaluation:
        """Evaluation of a problem's candidates, measured or predicted."""
        plan, verdicts = self.plan, self.state(problem.spec()).verdicts
        if plan.source == "predicted":
            return PredictedEvaluation(problem=problem, target=plan.target, workers=workers, seed=self._seed, verdicts=verdicts)
        return MeasuredEvaluation(
            problem=problem,
            target=plan.target,
            workers=workers,
            seed=self._seed,
            measure_s=plan.measure_s,
            race_s=plan.race_s,
            device=device,
            calls=plan.calls,
        )
