"""What the problems of one search share, whichever GPU takes them."""

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
    """What one compiled spec shares over every N: facts and numeric checks by variant id, what is being compiled included."""

    compiled: dict[str, Compiling]
    verdicts: Verdicts


class Shared:
    """The plan, who hears of its results, the rows and compilations that are known so far, and whose turn it is; `Search` runs it."""

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
        self.rows = list(plan.known)
        # By variant, what the Triton of today made of it: where that is known, its machine code may be at hand.
        self.facts = {
            row.outcome.variant_id: row.outcome.facts
            for row in plan.known
            if plan.source == "measured" and row.outcome.facts is not None and row.provenance.triton == provenance.triton
        }
        self.schedule, self.winners = Schedule(plan), Winners(plan.keep, plan.target, plan.limits.compile_s)
        self.lock, self.stopping = threading.RLock(), threading.Event()
        self._seed = plan.seed if plan.seed is not None else time.time_ns() % (1 << 31)

    def state(self, spec: KernelSpec) -> SpecState:
        """What is shared by all problems of a spec."""
        return self._states.setdefault(spec, SpecState({}, {}))

    def evaluation(self, problem: Problem, workers: Workers, device: int) -> Evaluation:
        """What gives candidates of a problem their times."""
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
