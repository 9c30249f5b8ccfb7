"""Stages of a trial: compiled, checked, and measured or predicted; each can end it."""

from collections.abc import Callable, Mapping

from flashtune.core.problem import Problem
from flashtune.core.results import CompileFacts, Fate, Measurement, Outcome
from flashtune.templates.rendering import text_hash
from flashtune.tuner.children import tasks
from flashtune.tuner.children.workers import Pending, Workers
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Compiled, Failed, Timed
from flashtune.tuner.search.evaluation import Evaluation
from flashtune.tuner.search.plan import SearchPlan, Stage
from flashtune.tuner.search.proposing import Compiling
from flashtune.tuner.spent import Spent


class Trials:
    """Trials of one problem. `compiled` are the known and the running compilations by variant; `at` receives the stages; `duplicates` are
    candidates with the same machine code and launches as a timed one, whose time they get. `facts` are those of variants that the installed
    Triton compiled before, whose machine code may be cached."""

    def __init__(
        self,
        plan: SearchPlan,
        problem: Problem,
        workers: Workers,
        compiled: dict[str, Compiling],
        evaluation: Evaluation,
        spent: Spent,
        at: Callable[[Stage], None],
        *,
        facts: Mapping[str, CompileFacts],
    ) -> None:
        self._plan, self._problem, self._spec = plan, problem, problem.spec()
        self._workers, self._compiled, self._evaluation = workers, compiled, evaluation
        self._spent, self._at, self._facts = spent, at, facts
        self._measured = plan.source == "measured"
        self._by_code: dict[str, list[tuple[Candidate, Timed]]] = {}
        self._launched: dict[Candidate, str | None] = {}
        self.duplicates: set[Candidate] = set()

    def compile(self, candidate: Candidate) -> Compiling:
        """Start compiling a candidate, unless that was begun; its result where that is known."""
        variant = candidate.variant(self._spec)
        known = self._compiled.get(variant.id)
        if known is not None and (not isinstance(known, Pending) or known.shared()):
            return known
        try:
            source = tasks.Source.of(candidate.family, variant)
        except Exception as error:
            return Failed(fate=Fate.COMPILE, reason=tasks.one_line(error))
        facts = self._facts.get(variant.id)
        fixed = (source, self._problem, self._plan.target, *([] if facts is None else [facts]))
        found = self._workers.submit("compile", tasks.compile_candidate, *fixed, limit_s=self._plan.limits.compile_s)
        if self._measured:
            self._compiled[variant.id] = found
        return found

    def outcome(self, candidate: Candidate, compiling: Compiling, incumbent: tuple[Candidate, Measurement] | None) -> Outcome:
        """Run one candidate through the stages; `incumbent` is the best so far with its time, in whose scale the candidate's is."""
        variant = candidate.variant(self._spec)
        self._at("compiling")
        compiled = compiling if isinstance(compiling, Compiled | Failed) else compiling.reply()
        self._compiled[variant.id] = compiled
        reply: Timed | Failed
        if isinstance(compiled, Failed):
            reply = compiled
        elif (duplicate := self._duplicate(candidate, compiled)) is not None:
            reply = duplicate
        else:
            self._at("measuring" if self._measured else "checking")
            with self._spent.on("trials"):
                reply = self._evaluation.evaluate(candidate, compiled.facts, incumbent)
            if compiled.code and isinstance(reply, Timed):
                self._by_code.setdefault(compiled.code, []).append((candidate, reply))
        time = None if isinstance(reply, Failed) else reply.time
        return Outcome(
            template=variant.template,
            template_hash=text_hash(candidate.family, variant),
            variant_id=variant.id,
            config=candidate.config,
            fate=reply.fate,
            source=self._plan.source,
            reason=reply.reason if isinstance(reply, Failed) else "",
            measurement=time,
            trial=time if self._measured else None,
            facts=compiled.facts,
            max_error=reply.error,
        )

    def _duplicate(self, candidate: Candidate, compiled: Compiled) -> Timed | None:
        """Time of a timed candidate with equal machine code and launches, or None; measured searches only."""
        if not self._measured or not compiled.code:
            return None
        for other, reply in self._by_code.get(compiled.code, []):
            if (launches := self._launches(candidate)) is not None and launches == self._launches(other):
                self.duplicates.add(candidate)
                return reply
        return None

    def _launches(self, candidate: Candidate) -> str | None:
        """Hash of a candidate's launches; None where it can't be computed."""
        if candidate not in self._launched:
            source = tasks.Source.of(candidate.family, candidate.variant(self._spec))
            fixed = (source, self._problem, self._plan.target)
            reply = self._workers.submit("compile", tasks.describe_launches, *fixed, limit_s=self._plan.limits.compile_s).reply()
            self._launched[candidate] = None if isinstance(reply, Failed) else reply.launches
        return self._launched[candidate]
