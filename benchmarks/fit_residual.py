"""Learns what the cost model is wrong by from all trials at hand, without a GPU: `python benchmarks/fit_residual.py --write`.

Gaussian process regression (flashtune/templates/learned) over the trials of an H200's and an H100's rows, archived and shipped, and those
of searches of random shapes there (unprepared.py); of decoding steps also over those of split_counts.py. Prints how good a choice among a
problem's trials is that knows nothing of them, or of the whole run that drew it: by the cost model with its constants alone, with what the
others' trials say, and with the caution that dispatch adds. With --write, what all of them say is kept for dispatch.
"""

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from archived import folder
from drawn import DRAWN, DRAWN_ON_H100, shapes_of, tried_in
from fit_expected import CHOSEN_OF
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from trials import GPU, Trials, of_rows

from flashtune.core.config import Config
from flashtune.core.problem import Features, Problem, ProblemKey
from flashtune.core.target import Target, find_target
from flashtune.dispatch.policy.ranking import CAUTION
from flashtune.templates import family
from flashtune.templates.cost import sharing
from flashtune.templates.decode import flash_decode
from flashtune.templates.expected import LIKENESSES, log_us
from flashtune.templates.learned import residual
from flashtune.templates.learned.forwards import FORWARDS
from flashtune.templates.learned.residual import Likeness, Residual, Tried, alike
from flashtune.templates.learned.steps import STEPS

HOPELESS = 2.5
"""What takes longer than so many times a problem's best trial counts as so much."""

FOLDER = Path(residual.__file__).parent

SPLITS = folder() / "2026-11-24-h200-splits" / "split_counts.json"


GPUS = (GPU, find_target("h100"))
"""Whose rows tell of the architecture."""


class Told(NamedTuple):
    """A problem with the trials that say something: their microseconds, by how much longer than expected each takes, and on what GPU."""

    problem: Problem
    times: Trials
    wrong: dict[Tried, float]
    gpu: Target = GPU


def telling(likeness: Likeness, problem: Problem, tried: Trials, gpu: Target = GPU) -> Told | None:
    """The trials of a problem, what they are wrong by less its mean; None where fewer than two can be told."""
    if problem.direction != "fwd" or problem.dtype == "fp8" or not likeness.serves(problem):
        return None
    trials = {one: us for one, us in tried.items() if one[0] in likeness.families}
    most = HOPELESS * min(trials.values(), default=math.inf)
    logs = {one: math.log(min(trials[one], most)) - log - likeness.families[one[0]] for one, log in expected(problem, trials, gpu).items()}
    mean = statistics.fmean(logs.values()) if logs else 0.0
    return Told(problem, trials, {one: log - mean for one, log in logs.items()}, gpu) if len(logs) > 1 else None


def expected(problem: Problem, trials: Trials, gpu: Target) -> dict[Tried, float]:
    """What the cost model expects of each that keeps the constraints, a logarithm."""
    spec, found = problem.spec(), {}
    for name, config in trials:
        kind = family(name)
        if kind.supports(spec, gpu) is None and kind.violated(config, spec, gpu) is None:
            log = log_us(kind, config, problem, gpu)
            if log is not None:
                found[name, config] = log
    return found


def of_splits() -> Iterator[Told]:
    """Decoding steps by split_counts.py: of the numbers of parts that it timed those that some `programs` leads to."""
    kind = flash_decode.FAMILY
    programs = next(axis for axis in kind.axes if axis.name == "programs").values
    for step in json.loads(SPLITS.read_text()):
        problem = Problem(**step["sizes"], features=Features())
        trials: Trials = {}
        for config in (Config.of(step["config"]).replace(programs=number) for number in programs):
            if (us := step["us"].get(str(sharing(config, problem, GPU).splits))) is not None:
                trials[kind.name, kind.completed(config)] = us
        if (found := telling(STEPS, problem, trials)) is not None:
            yield found


def of_runs(likeness: Likeness) -> Iterator[tuple[str, Told]]:
    """Problems of runs of unprepared.py, with the run's name."""
    for gpu, paths in zip(GPUS, (DRAWN, DRAWN_ON_H100), strict=True):
        for path in paths:
            for problem, _, search in shapes_of(path):
                if (found := telling(likeness, problem, tried_in(search), gpu)) is not None:
                    yield path.stem, found


def learn(likeness: Likeness, trials: Sequence[Told]) -> dict[str, NDArray[Any]]:
    """What `Residual` takes, with what it was learned from."""
    known, covariance = prepared(likeness, trials)
    weights = cho_solve(cho_factor(covariance, lower=True, overwrite_a=True), known["wrong"])
    return {**known, "weights": weights.astype(np.float32), "trials": np.array(digest(trials))}


def prepared(likeness: Likeness, trials: Sequence[Told]) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """What is known of trials but their weights, and the covariance of all."""
    problems = np.array([likeness.problem(one.problem) for one in trials])
    told = [
        (number, tuple(likeness.config(one.problem, config, one.gpu)), wrong)
        for number, one in enumerate(trials)
        for config, wrong in one.wrong.items()
    ]
    places = {coordinates: place for place, coordinates in enumerate(dict.fromkeys(coordinates for _, coordinates, _ in told))}
    problem_of = np.array([number for number, _, _ in told], dtype=np.int16)
    config_of = np.array([places[coordinates] for _, coordinates, _ in told], dtype=np.int16)
    wrong = np.array([wrong for _, _, wrong in told], dtype=np.float32)
    # As they are kept, so that the weights are those of what is read.
    coordinates = {"problems": problems.astype(np.float32), "configs": np.array(list(places), dtype=np.float32)}
    there, same = (alike(coordinates[name].astype(float), coordinates[name].astype(float)) for name in ("problems", "configs"))
    covariance = likeness.together**2 * there[np.ix_(problem_of, problem_of)] + likeness.alone**2
    covariance *= same[np.ix_(config_of, config_of)]
    covariance += likeness.offset**2 * (problem_of[:, None] == problem_of[None, :])
    covariance[np.diag_indices_from(covariance)] += likeness.noise**2
    return {**coordinates, "problem_of": problem_of, "config_of": config_of, "wrong": wrong}, covariance


class LeftOut:
    """What all trials say but those of a key, without solving anew (Rasmussen and Williams, 2006, equation 5.12, for several trials)."""

    def __init__(self, likeness: Likeness, trials: Sequence[Told]) -> None:
        self._likeness = likeness
        self._known, covariance = prepared(likeness, trials)
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ self._known["wrong"]
        self._keys = [one.problem.key(GPU.slug) for one in trials]

    def without(self, key: ProblemKey) -> Residual:
        """Of the trials of other keys."""
        mine = np.isin(self._known["problem_of"], [place for place, one in enumerate(self._keys) if one == key])
        weights = self._weights - self._inverse[:, mine] @ np.linalg.solve(self._inverse[np.ix_(mine, mine)], self._weights[mine])
        others = {name: self._known[name][~mine] for name in ("problem_of", "config_of")}
        return Residual(self._likeness, {**self._known, **others, "weights": weights[~mine]})


def digest(trials: Sequence[Told]) -> str:
    """What tells these trials from others."""
    said = [[one.problem.label(), one.problem.batch, one.problem.heads, sorted(map(repr, one.times.items()))] for one in trials]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def rates(trials: Sequence[Told], wrong: Callable[[Problem, Sequence[Tried]], Sequence[float]]) -> list[float]:
    """Of each problem with enough trials the rate of the one that is expected to be the fastest, of the best one's."""
    found = []
    for one in trials:
        logs = expected(one.problem, one.times, one.gpu)
        if len(logs) >= CHOSEN_OF:
            errors = dict(zip(logs, wrong(one.problem, list(logs)), strict=True))
            first = min(logs, key={tried: logs[tried] + errors[tried] for tried in logs}.__getitem__)
            found.append(min(one.times[tried] for tried in logs) / one.times[first])
    return found


def all_trials(likeness: Likeness) -> tuple[list[Told], list[tuple[str, Told]]]:
    """Those of rows, and of decoding steps those of split_counts.py; and those of runs with the run's name."""
    tried = [(gpu, problem, trials) for gpu in GPUS for problem, trials in of_rows(gpu=gpu)]
    rows = [found for gpu, problem, trials in tried if (found := telling(likeness, problem, trials, gpu)) is not None]
    return [*rows, *(of_splits() if likeness is STEPS else ())], list(of_runs(likeness))


def without_run(likeness: Likeness, rows: Sequence[Told], runs: Sequence[tuple[str, Told]], name: str) -> Residual:
    """What the trials of rows and of all runs but one say."""
    return Residual(likeness, learn(likeness, [*rows, *(one for run, one in runs if run != name)]))


def by_runs(rows: Sequence[Told], runs: Sequence[tuple[str, Told]]) -> None:
    """Prints how well each run's trials are chosen from, by what those of rows and of other runs say."""
    found: dict[str, list[float]] = {"by the model": [], "and by trials": []}
    for name in dict.fromkeys(name for name, _ in runs):
        left_out, known = [one for run, one in runs if run == name], without_run(FORWARDS, rows, runs, name)
        for word, shares in (
            ("by the model", rates(left_out, unlearned)),
            ("and by trials", rates(left_out, partial(known.of, target=GPU))),
        ):
            found[word] += shares
            if shares:
                print(f"{name} {word}: {said(shares)}")
    for word, shares in found.items():
        print(f"all {word}: {said(shares)}")


def by_problems(likeness: Likeness, trials: Sequence[Told]) -> None:
    """Prints how well each problem's trials are chosen from, by what those of other keys say, and with the caution of dispatch."""
    others = LeftOut(likeness, trials)
    known = [others.without(one.problem.key(GPU.slug)) for one in trials]
    print(f"{likeness.file}, by the model: {said(rates(trials, unlearned))}")
    for word, caution in (("and by trials", 0.0), ("with caution", CAUTION)):
        shares = [rates([one], partial(of.of, target=GPU, caution=caution)) for one, of in zip(trials, known, strict=True)]
        print(f"{likeness.file}, {word}: {said([share for of in shares for share in of])}")


def unlearned(_: Problem, tried: Sequence[Tried]) -> Sequence[float]:
    """What the cost model alone knows of its errors."""
    return [0.0] * len(tried)


def main() -> None:
    """Judge by leaving runs or problems out; keep with --write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"keep what all trials say in {FOLDER.name}/")
    options = parser.parse_args()
    for likeness in LIKENESSES:
        rows, runs = all_trials(likeness)
        trials = [*rows, *(one for _, one in runs)]
        print(f"{likeness.file}: {len(rows)} problems with {sum(len(one.wrong) for one in rows)} trials, {len(runs)} with others of runs")
        if likeness is FORWARDS:
            by_runs(rows, runs)
        by_problems(likeness, trials)
        if options.write:
            np.savez_compressed(FOLDER / likeness.file, **learn(likeness, trials))


def said(shares: Sequence[float]) -> str:
    """A run's rates in a line."""
    reached = ", ".join(f"{sum(share >= least for share in shares) / len(shares):.1%} from {least:.2f}" for least in (0.97, 0.9))
    return f"{len(shares)} problems, mean {statistics.geometric_mean(shares):.4f}, {reached}, {min(shares):.2f} at least"


if __name__ == "__main__":
    main()
