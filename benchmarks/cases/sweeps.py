"""Replay of searches on the committed sweeps: regret by trials of the shipped search and of other samplers, without a GPU.

A sweep holds the outcome of every candidate of a problem, written by `flashtune search --sampler exhaustive`; four are among the archived
runs. Trials of a replayed search are answered by the sweep, with some noise that a seed draws. Regret is the sweep's time of the best
candidate so far over the best time of the space, less one. What trials of other problems say of the cost model's error is learned without
those of the sweep's problem and of its neighbours, for every replay. Beside the sampler names of `flashtune search` there is
`kernel_tuner:STRATEGY`, which searches the family of a sweep's best alone.
"""

import csv
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from unittest.mock import patch

import optuna

from benchmarks.cases.archive import folder
from benchmarks.fit.residual import Observed, all_trials, without_neighbours
from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import todays
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.records.results import Fate, Outcome, SearchResult
from flashtune.db.store import Store
from flashtune.templates import expected, families
from flashtune.templates.cost import predict_us
from flashtune.templates.family import Constraint, Family
from flashtune.templates.learned.residual import Likeness, Residual
from flashtune.tuner.propose import sampling
from flashtune.tuner.propose.space import Array, Candidate, SearchSpace
from flashtune.tuner.propose.study import Study
from flashtune.tuner.search.stopping import UNTIL, StoppingRule

SWEEPS = tuple(folder() / name for name in ("2026-11-22-h200-sweeps", "2026-11-27-h100-sweeps"))
STARTS = {"all": 0, "less5": 5, "less20": 20, "none": 10**6}
"""Number of a sweep's fastest candidates that are struck from the hand-written starts."""
NOISE = 0.005
"""Standard deviation of a trial's median around the sweep's, as a share."""
AHEAD = 8
"""Candidates under way at a time, as with eight compilers side by side."""
SHOWN = (5, 10, 20, 30, 40)
OPTUNA = "optuna.samplers:"
"""Prefix of the names of Optuna's samplers but TPE, in whose place in a search they are."""
KERNEL_TUNER = "kernel_tuner:"
"""Prefix of the names of Kernel Tuner's strategies among those of samplers."""


@cache
def sweeps() -> list[SearchResult]:
    """Every recorded sweep, by problem."""
    found: list[SearchResult] = []
    for path in (path for place in SWEEPS for path in sorted(place.glob("*.sqlite"))):
        with Store.open(path, writable=False) as store:
            found += [_completed(sweep) for sweep in store.results()]
    return found


def _completed(sweep: SearchResult) -> SearchResult:
    """A sweep under today's axes, without the configs that no kernel has today."""
    outcomes = ((outcome, todays(outcome.template, outcome.config)) for outcome in sweep.outcomes)
    return replace(sweep, outcomes=tuple(replace(outcome, config=tried[1]) for outcome, tried in outcomes if tried is not None))


def best_us(outcomes: Sequence[Outcome]) -> float:
    """The fastest correct outcome's time, in microseconds."""
    return min(o.measurement.median_us for o in outcomes if o.fate is Fate.CORRECT and o.measurement is not None)


def top_by_cost(sweep: SearchResult, count: int) -> list[Outcome]:
    """The `count` candidates that the cost model ranks first, from what the compiler said of each."""
    target = find_target(sweep.gpu)
    known = [o for o in sweep.outcomes if o.facts is not None]
    return sorted(known, key=lambda o: (predict_us(o.config, o.facts, sweep.problem, target), o.variant_id))[:count]  # type: ignore[arg-type]


def cost_ratio(sweep: SearchResult, count: int = 10) -> float:
    """The best measured time among the cost model's first `count` over the sweep's best (1 is perfect)."""
    return best_us(top_by_cost(sweep, count)) / best_us(list(sweep.outcomes))


class Swept:
    """A sweep to search in: its space, as far as today's constraints allow it, and what became of each candidate."""

    def __init__(self, sweep: SearchResult) -> None:
        self.problem, self.label = sweep.problem, f"{sweep.gpu} {sweep.problem.label()}"
        self.space = SearchSpace(_as_swept(sweep), sweep.problem, find_target(sweep.gpu))
        self.answers = {(o.template, o.config): o for o in sweep.outcomes}
        candidates = list(self.space.every())
        ranked = sorted(
            (o.measurement.median_us, c.family.name, c.config.as_json())
            for c in candidates
            if (o := self.answers[c.family.name, c.config]).measurement is not None and o.fate is Fate.CORRECT
        )
        self.best_us, self.size = ranked[0][0], len(candidates)
        self._error: Residual | None = None
        self._order = [(name, text) for _, name, text in ranked]
        self._only = self._single_values(candidates)

    def starts(self, without: int = 0) -> list[Candidate]:
        """Today's starts that the sweep has, but for those among its `without` fastest.

        Axes on which the sweep holds one value take that value.
        """
        fastest = set(self._order[:without])
        found: dict[tuple[str, str], Candidate] = {}
        for start in SearchSpace(families(), self.problem, self.space.target).starts():
            family = self.space.families.get(start.family.name)
            if family is None:
                continue
            config = start.config.replace(**self._only[family.name])
            if family.violated(config, self.space.spec, self.space.target) is None:
                found.setdefault((family.name, config.as_json()), Candidate(family=family, config=config))
        return [] if without >= len(self._order) else [candidate for key, candidate in found.items() if key not in fastest]

    def learned(self, likeness: Likeness) -> Residual | None:
        """In place of what ships: the cost model's error, learned without this problem and its neighbours."""
        if self._error is None:
            self._error = without_neighbours(likeness, _trials(likeness), self.problem)
        return self._error

    def outcome(self, candidate: Candidate, noise: random.Random) -> Outcome:
        """Outcome of a trial."""
        known = self.answers[candidate.family.name, candidate.config]
        if known.measurement is None:
            return known
        return replace(known, measurement=known.measurement.scaled(math.exp(noise.gauss(0.0, NOISE))))

    def regret(self, outcomes: Sequence[Outcome]) -> float:
        """Regret of the best of these, by the sweep's own times."""
        own = [self.answers[o.template, o.config] for o in outcomes]
        timed = [o for o in own if o.fate is Fate.CORRECT]
        return best_us(timed) / self.best_us - 1 if timed else math.inf

    @staticmethod
    def _single_values(candidates: Sequence[Candidate]) -> dict[str, dict[str, int | str | bool]]:
        held: dict[str, dict[str, set[int | str | bool]]] = {}
        for candidate in candidates:
            for name, value in candidate.config.items:
                held.setdefault(candidate.family.name, {}).setdefault(name, set()).add(value)
        return {family: {name: next(iter(kinds)) for name, kinds in axes.items() if len(kinds) == 1} for family, axes in held.items()}


@cache
def _trials(likeness: Likeness) -> list[Observed]:
    rows, runs = all_trials(likeness)
    return [*rows, *(one for _, one in runs)]


@lru_cache(maxsize=16)
def _swept(index: int) -> Swept:
    return Swept(sweeps()[index])


def swept(sweep: SearchResult) -> Swept:
    """Made once for each sweep."""
    return _swept(next(index for index, other in enumerate(sweeps()) if other is sweep))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A search's end by its own rule: its trials, its true regret, and samples of it by the surrogate, None without one."""

    trials: int
    regret: float
    sampled: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search of one sweep, with its regret after each trial, and where its own rule stops it (at the last trial in any case)."""

    problem: str
    sampler: str
    starts: str
    seed: int
    regrets: tuple[float, ...]
    stop: Stop
    cpu_s: float = 0.0


def replayed(place: Swept, sampler: str, starts: str, trials: int, seed: int, *, ahead: int = AHEAD, beyond: bool = True) -> Run:
    """A search of the sweep with up to `ahead` candidates under way, whose outcomes come in the order of proposal; `beyond` the end that
    its own rule finds it goes on, to compare searches at a number of trials."""
    if sampler.startswith(KERNEL_TUNER):
        return _by_kernel_tuner(place, sampler, trials, seed)
    with patch.object(expected, "learned", place.learned):
        return _replayed(place, sampler, starts, trials, seed, ahead, beyond)


def _by_kernel_tuner(place: Swept, sampler: str, trials: int, seed: int) -> Run:
    from benchmarks.shared.kernel_tuner import tried

    noise, started = random.Random(seed), time.process_time()
    everything = [place.outcome(candidate, noise) for candidate in place.space.every()]
    best = min(everything, key=lambda one: place.regret([one])).template
    mine = {one.config: one for one in everything if one.template == best}
    times = {config: one.measurement.median_us if one.measurement else None for config, one in mine.items()}
    found = [mine[config] for config in tried(times, sampler.removeprefix(KERNEL_TUNER), trials, seed)]
    regrets = [place.regret(found[: count + 1]) for count in range(len(found))]
    # No rule stops the strategies.
    return _run_of(place, sampler, "none", seed, regrets, trials, Stop(trials=trials, regret=regrets[-1]), time.process_time() - started)


def _run_of(place: Swept, sampler: str, starts: str, seed: int, regrets: Sequence[float], trials: int, stop: Stop, cpu_s: float) -> Run:
    """A search whose last regret stays, where its candidates were exhausted before."""
    padded = (*regrets, *regrets[-1:] * (trials - len(regrets)))
    return Run(problem=place.label, sampler=sampler, starts=starts, seed=seed, regrets=padded, stop=stop, cpu_s=cpu_s)


def study_of(place: Swept, sampler: str, starts: str, seed: int) -> Study:
    """A study of a sweep's problem in memory."""
    optunas = sampler.removeprefix(OPTUNA)
    name = sampler if optunas == sampler else "tpe"
    by = sampling.sampler_of(name, place.space, place.problem, seed=seed, starts=place.starts(STARTS[starts]))
    if name != sampler and isinstance(by, sampling.ByTpe):
        by.study = optuna.create_study(direction="minimize", sampler=getattr(optuna.samplers, optunas)(seed=seed))
    storage = optuna.storages.InMemoryStorage()
    return Study(place.space, place.problem, sampler="gp", seed=seed, source="measured", storage=storage, by=by)


def _replayed(place: Swept, sampler: str, starts: str, trials: int, seed: int, ahead: int, beyond: bool) -> Run:
    study = study_of(place, sampler, starts, seed)
    noise, rule = random.Random(seed), StoppingRule(UNTIL)
    waiting: list[Candidate] = []
    found: list[Outcome] = []
    regrets: list[float] = []
    stop: Stop | None = None
    started = time.process_time()
    while len(found) < trials and (beyond or stop is None):
        waiting += study.ask(ahead - len(waiting), limit=trials)
        if not waiting:
            break
        candidate = waiting.pop(0)
        found.append(place.outcome(candidate, noise))
        study.tell(candidate, found[-1])
        rule.add(found[-1])
        regrets.append(place.regret(found))
        if stop is None and rule.nearly:
            sampled = study.regrets()
            if rule.verdict(study.left_to_gain(), 0.0 if sampled is None else float(sampled.mean())) is not None:
                stop = Stop(trials=len(found), regret=regrets[-1], sampled=sampled)
    stop = stop or Stop(trials=len(found), regret=regrets[-1], sampled=study.regrets())
    return _run_of(place, sampler, starts, seed, regrets, trials, stop, time.process_time() - started)


def _as_swept(sweep: SearchResult) -> dict[str, Family]:
    """The families of a sweep, without what their spaces have gained since."""
    held: dict[str, set[Config]] = {}
    for outcome in sweep.outcomes:
        held.setdefault(outcome.template, set()).add(outcome.config)
    return {
        name: replace(family, constraints=(*family.constraints, _known(held[name]))) for name, family in families().items() if name in held
    }


def _known(configs: set[Config]) -> Constraint:
    return Constraint(name="swept", holds=lambda config, spec, target: config in configs, why="the sweep has no answer for others")


def summary(runs: Sequence[Run]) -> list[dict[str, str | int]]:
    """A row to each choice of starts, sampler and sweep: median, mean and 90th percentile of the regret after `SHOWN` trials and at the
    searches' own stop, with the median number of trials there."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.starts, run.sampler, run.problem), []).append(run)
    rows: list[dict[str, str | int]] = []
    for (starts, sampler, problem), group in groups.items():
        row: dict[str, str | int] = {"starts": starts, "sampler": sampler, "sweep": problem, "seeds": len(group)}
        at: dict[str, list[float]] = {
            str(count): [run.regrets[count - 1] for run in group] for count in SHOWN if count <= len(group[0].regrets)
        }
        for name, regrets in {**at, "stop": [run.stop.regret for run in group]}.items():
            row[f"median at {name}"] = f"{statistics.median(regrets):.2%}"
            row[f"mean at {name}"] = f"{statistics.fmean(regrets):.2%}"
            row[f"90th at {name}"] = f"{sorted(regrets)[math.ceil(0.9 * len(regrets)) - 1]:.2%}"
        row["trials at stop"] = f"{statistics.median(run.stop.trials for run in group):.0f}"
        rows.append({**row, "cpu s": f"{statistics.median(run.cpu_s for run in group):.2f}"})
    return rows


def main() -> None:
    """Print a line to each row of the table, and write it to the file of `--csv`."""
    parser = argument_parser(__doc__)
    parser.add_argument("--samplers", default="gp,random,tpe", help="samplers (%(default)s)")
    parser.add_argument("--starts", default="none", help="all, less5, less20 (without those among a sweep's fastest), none (%(default)s)")
    parser.add_argument("--trials", type=int, default=40, help="of each search (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=20, help="searches of each kind (default: %(default)s)")
    parser.add_argument("--ahead", type=int, default=AHEAD, help="candidates under way at a time")
    parser.add_argument("--csv", type=Path, help="file for the table")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    rows: list[dict[str, str | int]] = []
    for starts, sampler in itertools.product(options.starts.split(","), options.samplers.split(",")):
        for sweep in sweeps():
            place = swept(sweep)
            rows += summary([replayed(place, sampler, starts, options.trials, seed, ahead=options.ahead) for seed in range(options.seeds)])
            print(*rows[-1].values(), flush=True)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
