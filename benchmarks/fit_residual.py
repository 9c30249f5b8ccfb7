"""Learns what the cost model is wrong by from all trials at hand, without a GPU: `python benchmarks/fit_residual.py --write`.

Gaussian process regression (flashtune/templates/residual.py) over the trials of an H200's rows, archived and shipped, and those of
searches of random shapes (unprepared.py). Prints how good a choice among a random shape's trials is that knows nothing of that run: by
the cost model with its constants alone, and with what the others' trials say. With --write, what all of them say is kept for dispatch.
"""

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drawn import DRAWN, shapes_of
from fit_expected import CHOSEN_OF, FAMILY, Trials, of_rows, told
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from trials import GPU

from flashtune.core.config import Config
from flashtune.core.problem import Problem, ProblemKey
from flashtune.templates import residual
from flashtune.templates.expected import log_us
from flashtune.templates.residual import ALONE, NOISE, OFFSET, TOGETHER, Residual, alike, of_config, of_problem

HOPELESS = 2.5
"""What takes longer than so many times a problem's best trial counts as so much."""

OUT = Path(residual.__file__).with_suffix(".npz")


class Told(NamedTuple):
    """A problem with the trials that say something: their microseconds, and by how much longer than expected each takes."""

    problem: Problem
    times: Trials
    wrong: dict[Config, float]


def telling(problem: Problem, trials: Trials) -> Told | None:
    """The trials of a problem, what they are wrong by less its mean; None where fewer than two can be told."""
    if not told(problem) or problem.dtype == "fp8" or not trials:
        return None
    spec, least = problem.spec(), min(trials.values())
    logs = {
        config: math.log(min(us, HOPELESS * least)) - expected
        for config, us in trials.items()
        if FAMILY.violated(config, spec, GPU) is None and (expected := log_us(FAMILY, config, problem, GPU)) is not None
    }
    mean = statistics.fmean(logs.values()) if logs else 0.0
    return Told(problem, trials, {config: log - mean for config, log in logs.items()}) if len(logs) > 1 else None


def of_runs() -> Iterator[tuple[str, Told]]:
    """Problems of runs of unprepared.py, with the run's name."""
    for path in DRAWN:
        for problem, _, search in shapes_of(path):
            tried = search.get("tried", [])
            trials = {FAMILY.completed(Config.of(one["config"])): one["us"] for one in tried if one["template"] == FAMILY.name}
            if (found := telling(problem, trials)) is not None:
                yield path.stem, found


def learn(trials: Sequence[Told]) -> dict[str, NDArray[Any]]:
    """What `Residual` takes, with what it was learned from."""
    known, covariance = prepared(trials)
    weights = cho_solve(cho_factor(covariance, lower=True, overwrite_a=True), known["wrong"])
    return {**known, "weights": weights.astype(np.float32), "trials": np.array(digest(trials))}


def prepared(trials: Sequence[Told]) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64]]:
    """What is known of trials but their weights, and the covariance of all."""
    problems = np.array([of_problem(one.problem) for one in trials])
    places = {config: place for place, config in enumerate(dict.fromkeys(config for one in trials for config in one.wrong))}
    pairs = [(number, places[config], wrong) for number, one in enumerate(trials) for config, wrong in one.wrong.items()]
    problem_of, config_of = (np.array([pair[side] for pair in pairs], dtype=np.int16) for side in (0, 1))
    wrong = np.array([pair[2] for pair in pairs], dtype=np.float32)
    # As they are kept, so that the weights are those of what is read.
    coordinates = {"problems": problems.astype(np.float32), "configs": np.array(list(map(of_config, places)), dtype=np.float32)}
    there, same = (alike(coordinates[name].astype(float), coordinates[name].astype(float)) for name in ("problems", "configs"))
    covariance = TOGETHER**2 * there[np.ix_(problem_of, problem_of)] + ALONE**2
    covariance *= same[np.ix_(config_of, config_of)]
    covariance += OFFSET**2 * (problem_of[:, None] == problem_of[None, :])
    covariance[np.diag_indices_from(covariance)] += NOISE**2
    return {**coordinates, "problem_of": problem_of, "config_of": config_of, "wrong": wrong}, covariance


class LeftOut:
    """What all trials say but those of a key, without solving anew (Rasmussen and Williams, 2006, equation 5.12, for several trials)."""

    def __init__(self, trials: Sequence[Told]) -> None:
        self._known, covariance = prepared(trials)
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ self._known["wrong"]
        self._keys = [one.problem.key(GPU.slug) for one in trials]

    def without(self, key: ProblemKey) -> Residual:
        """Of the trials of other keys."""
        mine = np.isin(self._known["problem_of"], [place for place, one in enumerate(self._keys) if one == key])
        weights = self._weights
        if mine.any():
            weights = weights - self._inverse[:, mine] @ np.linalg.solve(self._inverse[np.ix_(mine, mine)], weights[mine])
            weights[mine] = 0.0
        return Residual({**self._known, "weights": weights})


def digest(trials: Sequence[Told]) -> str:
    """What tells these trials from others."""
    said = [[one.problem.label(), one.problem.batch, one.problem.heads, sorted(map(repr, one.times.items()))] for one in trials]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def rates(trials: Sequence[Told], wrong: Callable[[Problem, Sequence[Config]], Sequence[float]]) -> list[float]:
    """Of each problem with enough trials the rate of the one that is expected to be the fastest, of the best one's."""
    found = []
    for one in trials:
        spec = one.problem.spec()
        valid = [config for config in one.times if FAMILY.violated(config, spec, GPU) is None]
        logs = {config: log for config in valid if (log := log_us(FAMILY, config, one.problem, GPU)) is not None}
        if len(logs) >= CHOSEN_OF:
            expected = {config: logs[config] + more for config, more in zip(logs, wrong(one.problem, list(logs)), strict=True)}
            found.append(min(one.times[config] for config in logs) / one.times[min(expected, key=expected.__getitem__)])
    return found


def all_trials() -> tuple[list[Told], list[tuple[str, Told]]]:
    """Those of rows, and those of runs with the run's name."""
    return [found for of in of_rows() if (found := telling(*of)) is not None], list(of_runs())


def without_run(rows: Sequence[Told], runs: Sequence[tuple[str, Told]], name: str) -> Residual:
    """What the trials of rows and of all runs but one say."""
    return Residual(learn([*rows, *(one for run, one in runs if run != name)]))


def main() -> None:
    """Judge by leaving runs out; keep with --write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"keep what all trials say in {OUT.name}")
    options = parser.parse_args()
    rows, runs = all_trials()
    print(f"{len(rows)} problems with {sum(len(one.wrong) for one in rows)} trials of rows, {len(runs)} with others of runs")
    found: dict[str, list[float]] = {"by the model": [], "and by trials": []}
    for name in dict.fromkeys(name for name, _ in runs):
        left_out = [one for run, one in runs if run == name]
        for word, shares in (
            ("by the model", rates(left_out, lambda _, configs: [0.0] * len(configs))),
            ("and by trials", rates(left_out, without_run(rows, runs, name).of)),
        ):
            found[word] += shares
            print(f"{name} {word}: {said(shares)}")
    for word, shares in found.items():
        print(f"all {word}: {said(shares)}")
    if options.write:
        np.savez_compressed(OUT, **learn(rows + [one for _, one in runs]))


def said(shares: Sequence[float]) -> str:
    """A run's rates in a line."""
    reached = ", ".join(f"{sum(share >= least for share in shares) / len(shares):.0%} from {least:.2f}" for least in (0.97, 0.9))
    return f"{len(shares)} problems, mean {statistics.geometric_mean(shares):.3f}, {reached}, {min(shares):.2f} at least"


if __name__ == "__main__":
    main()
