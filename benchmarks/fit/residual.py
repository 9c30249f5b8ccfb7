"""Fit of the cost model's error by Gaussian process regression over all committed trials; `--write` alone keeps it for dispatch.

Trials are those of an H200's and an H100's records, archived and shipped, and of searches of random shapes there; of decoding steps also a
sweep over numbers of splits. Prints the quality of choices among a problem's trials by a model that saw none of them, or nothing of the
whole run that drew it: by the cost model alone, with the regression, and with the caution that dispatch adds. Lines that begin with
`held out` have, for each kind of problem, the loss and Spearman's rank correlation of problems with at least RANKED_OF trials; steps over
pages are predicted by the cost model alone, and of functions there are too few trials with known configs.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.linalg.lapack import dpotrf, dpotri
from scipy.stats import spearmanr

from benchmarks.fit.expected import CHOSEN_OF
from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import GPU, RESULTS, RUNS, RUNS_ON_H100, Trials, of_pages, of_rows, shapes_of, tried_in
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.words import canonical
from flashtune.dispatch.policy.choose import CAUTION
from flashtune.templates import family
from flashtune.templates.cost import sharing
from flashtune.templates.decode import flash_decode
from flashtune.templates.expected import LIKENESSES, log_us
from flashtune.templates.learned import residual
from flashtune.templates.learned.forwards import FORWARDS
from flashtune.templates.learned.gradients import GRADIENTS
from flashtune.templates.learned.residual import Likeness, Residual, Tried, alike
from flashtune.templates.learned.steps import STEPS

HOPELESS = 2.5
"""Largest ratio to a problem's best trial: slower trials count as this slow."""

FOLDER = Path(residual.__file__).parent

SPLITS = RESULTS / "2026-11-24-h200-splits" / "split_counts.json"
"""Times of decoding steps by their number of splits."""


GPUS = (GPU, find_target("h100"))
"""GPUs of the architecture whose trials are used."""


class Observed(NamedTuple):
    """Trials of a problem: their microseconds, log errors of the cost model less their mean, the logs of its times, and the GPU."""

    problem: Problem
    times: Trials
    wrong: dict[Tried, float]
    logs: dict[Tried, float]
    gpu: Target = GPU


def observations(likeness: Likeness, problem: Problem, tried: Trials, gpu: Target = GPU) -> Observed | None:
    """Trials of a problem with the cost model's errors; None where fewer than two can be predicted."""
    if problem.dtype == "fp8" or not likeness.serves(problem):
        return None
    trials = {one: us for one, us in tried.items() if one[0] in likeness.families}
    most = HOPELESS * min(trials.values(), default=math.inf)
    logs = expected(problem, trials, gpu)
    if len(logs) < 2:
        return None
    wrong = {one: math.log(min(trials[one], most)) - log - likeness.families[one[0]] for one, log in logs.items()}
    mean = statistics.fmean(wrong.values())
    return Observed(problem, trials, {one: error - mean for one, error in wrong.items()}, logs, gpu)


def expected(problem: Problem, trials: Trials, gpu: Target) -> dict[Tried, float]:
    """Log of the cost model's time of each trial that is valid today."""
    spec, found = problem.spec(), {}
    for name, config in trials:
        kind = family(name)
        if kind.supports(spec, gpu) is None and kind.violated(config, spec, gpu) is None:
            log = log_us(kind, config, problem, gpu)
            if log is not None:
                found[name, config] = log
    return found


def of_splits() -> Iterator[Observed]:
    """Decoding steps of SPLITS: of the numbers of splits that were timed those that some `programs` leads to."""
    kind = flash_decode.FAMILY
    programs = next(axis for axis in kind.axes if axis.name == "programs").values
    for step in json.loads(SPLITS.read_text()):
        problem = Problem(**step["sizes"], features=Features())
        trials: Trials = {}
        for config in (Config.of(step["config"]).replace(programs=number) for number in programs):
            if (us := step["us"].get(str(sharing(config, problem, GPU).splits))) is not None:
                trials[kind.name, config] = us
        if (found := observations(STEPS, problem, trials)) is not None:
            yield found


def of_runs(likeness: Likeness) -> Iterator[tuple[str, Observed]]:
    """Problems of runs on random shapes, with the run's name."""
    for gpu, paths in zip(GPUS, (RUNS, RUNS_ON_H100), strict=True):
        for path in paths:
            for problem, _, search in shapes_of(path):
                if (found := observations(likeness, problem, tried_in(search), gpu)) is not None:
                    yield path.stem, found


def learn(likeness: Likeness, trials: Sequence[Observed]) -> dict[str, NDArray[Any]]:
    """Arrays of a `Residual`, with a digest of its trials."""
    known, covariance, _ = prepared(likeness, trials)
    weights = cho_solve(cho_factor(covariance, lower=True, overwrite_a=True), known["wrong"])
    return {**known, "weights": weights.astype(np.float32), "trials": np.array(digest(trials))}


def prepared(
    likeness: Likeness, trials: Sequence[Observed], *, sample: int | None = None
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float64], NDArray[np.intp]]:
    """Arrays of a `Residual` without its weights; covariances (rows, trials) of all trials, or of a random `sample`; and these rows."""
    problems = np.array([likeness.problem(one.problem) for one in trials])
    observed = [
        (number, tuple(likeness.config(one.problem, config, one.gpu)), wrong)
        for number, one in enumerate(trials)
        for config, wrong in one.wrong.items()
    ]
    places = {coordinates: place for place, coordinates in enumerate(dict.fromkeys(coordinates for _, coordinates, _ in observed))}
    problem_of = np.array([number for number, _, _ in observed], dtype=np.int16)
    config_of = np.array([places[coordinates] for _, coordinates, _ in observed], dtype=np.int16)
    wrong = np.array([wrong for _, _, wrong in observed], dtype=np.float32)
    # As they are kept, so that the weights are those of what is read.
    coordinates = {"problems": problems.astype(np.float32), "configs": np.array(list(places), dtype=np.float32)}
    everything = np.arange(len(wrong))
    rows = everything if sample is None else np.random.default_rng(0).permutation(everything)[:sample]

    def between(name: str, place_of: NDArray[np.int16]) -> NDArray[np.float64]:
        every = coordinates[name].astype(float)
        of_rows, place = np.unique(place_of[rows], return_inverse=True)
        return alike(every[of_rows], every)[np.ix_(place, place_of)]

    covariance = likeness.together**2 * between("problems", problem_of) + likeness.alone**2
    covariance *= between("configs", config_of)
    covariance += likeness.offset**2 * (problem_of[rows, None] == problem_of[None, :])
    covariance[np.arange(len(rows)), rows] += likeness.noise**2
    return {**coordinates, "problem_of": problem_of, "config_of": config_of, "wrong": wrong}, covariance, rows


class LeftOut:
    """Regressions over all trials but some problems', without solving anew (Rasmussen and Williams, 2006, equation 5.12)."""

    def __init__(self, likeness: Likeness, trials: Sequence[Observed]) -> None:
        self._likeness = likeness
        self._known, covariance, _ = prepared(likeness, trials)
        self._inverse = inverse(covariance)
        self._weights = self._inverse @ self._known["wrong"]
        self._trials = trials
        self._found: dict[tuple[object, ...], Residual] = {}

    def without(self, problem: Problem) -> Residual:
        """Regression without the trials of problems with the same sizes and features, of either GPU, any dtype and any number of heads."""
        sizes = sizes_of(problem)
        if sizes not in self._found:
            self._found[sizes] = self._without(problem)
        return self._found[sizes]

    def _without(self, problem: Problem) -> Residual:
        same = [place for place, one in enumerate(self._trials) if sizes_of(one.problem) == sizes_of(problem)]
        mine = np.isin(self._known["problem_of"], same)
        weights = self._weights - self._inverse[:, mine] @ np.linalg.solve(self._inverse[np.ix_(mine, mine)], self._weights[mine])
        others = {name: self._known[name][~mine] for name in ("problem_of", "config_of", "wrong")}
        return Residual(self._likeness, {**self._known, **others, "weights": weights[~mine]})


def inverse(covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse of a positive definite matrix, from its Cholesky factor."""
    factor, wrong = dpotrf(covariance, lower=True, overwrite_a=True)
    half, singular = dpotri(factor, lower=True, overwrite_c=True)
    if wrong or singular:
        raise np.linalg.LinAlgError(f"row {wrong or singular} of the covariances isn't positive definite")
    return half + np.tril(half, -1).T


@cache
def sizes_of(problem: Problem) -> tuple[object, ...]:
    """Lengths, head sizes and features; of packed sequences those of dense ones as long as their mean."""
    features = {name: value for name, value in problem.features.as_json().items() if name != "packed"}
    return problem.n_q, problem.n_kv, problem.d, problem.d_v, canonical(features)


def neighbours(one: Problem, other: Problem) -> bool:
    """True for problems that differ in GPU, dtype, heads, the diagonal's corner, a window's size and packing alone, and in lengths by less
    than a factor of two: what is learned from one gives the other away."""
    lengths = ((one.n_q, other.n_q), (one.n_kv, other.n_kv))
    return kind_of(one) == kind_of(other) and all(max(pair) < 2 * min(pair) for pair in lengths)


@cache
def kind_of(problem: Problem) -> tuple[object, ...]:
    """Direction, head sizes and features that `neighbours` have in common."""
    features = {name: value for name, value in problem.features.as_json().items() if name not in ("alignment", "window", "packed")}
    return problem.direction, problem.d, problem.d_v, problem.features.window is None, canonical(features)


def without_neighbours(likeness: Likeness, trials: Sequence[Observed], problem: Problem, most: int = 1500) -> Residual:
    """Regression over the trials of the problems most alike to this one, at least `most` where there are so many, without its own and
    those of its neighbours."""
    others = [one for one in trials if not neighbours(one.problem, problem)]
    there = alike(np.array([likeness.problem(problem)]), np.array([likeness.problem(one.problem) for one in others]))[0]
    kept: list[Observed] = []
    for place in np.argsort(-there, kind="stable"):
        if sum(len(one.wrong) for one in kept) >= most:
            break
        kept.append(others[place])
    return Residual(likeness, learn(likeness, kept))


def digest(trials: Sequence[Observed]) -> str:
    """Digest of the trials."""
    said = [[one.problem.label(), one.problem.batch, one.problem.heads, sorted(map(repr, one.times.items()))] for one in trials]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def rates(trials: Sequence[Observed], wrong: Callable[[Problem, Sequence[Tried]], Sequence[float]], least: int = CHOSEN_OF) -> list[float]:
    """Rate of each problem's trial that is predicted to be the fastest, over the best trial's rate; of problems with at least so many
    trials."""
    found = []
    for one in trials:
        if len(one.logs) >= least:
            errors = dict(zip(one.logs, wrong(one.problem, list(one.logs)), strict=True))
            first = min(one.logs, key={tried: one.logs[tried] + errors[tried] for tried in one.logs}.__getitem__)
            found.append(min(one.times[tried] for tried in one.logs) / one.times[first])
    return found


@cache
def all_trials(likeness: Likeness) -> tuple[list[Observed], list[tuple[str, Observed]]]:
    """Trials of records (of decoding steps also SPLITS), and those of runs with the run's name."""
    tried = [(gpu, problem, trials) for gpu in GPUS for problem, trials in of_rows(gpu=gpu)]
    rows = [found for gpu, problem, trials in tried if (found := observations(likeness, problem, trials, gpu)) is not None]
    return [*rows, *(of_splits() if likeness is STEPS else ())], list(of_runs(likeness))


def without_run(likeness: Likeness, rows: Sequence[Observed], runs: Sequence[tuple[str, Observed]], name: str) -> Residual:
    """Regression over the trials of records and of all runs but one."""
    return Residual(likeness, learn(likeness, [*rows, *(one for run, one in runs if run != name)]))


def by_runs(rows: Sequence[Observed], runs: Sequence[tuple[str, Observed]]) -> None:
    """Print the quality of choices among each run's trials, by a regression over records and other runs."""
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


def by_problems(likeness: Likeness, trials: Sequence[Observed]) -> None:
    """Print the quality of choices among each problem's trials, by a regression over other sizes and features, without and with dispatch's
    caution, of problems without and with features beside a diagonal."""
    others = LeftOut(likeness, trials)
    known = [others.without(one.problem) for one in trials]
    for kind, of in kinds(trials).items():
        by_trials = [known[place].of(trials[place].problem, list(trials[place].logs), trials[place].gpu) for place in of]
        for word, errors in (("by the model", [[0.0] * len(one) for one in by_trials]), ("and by trials", by_trials)):
            print(f"held out, {likeness.file}, {kind}, {word}: {ranked([trials[place] for place in of], errors)}")
        print(f"{likeness.file}, {kind}, by the model: {said(rates([trials[place] for place in of], unlearned, LEAST[likeness]))}")
        print(f"{likeness.file}, {kind}, {held_out(likeness, [trials[place] for place in of], [known[place] for place in of])}", flush=True)
        for word, caution in (("and by trials", 0.0), ("with caution", CAUTION)):
            shares = [chosen(likeness, trials[place], known[place], caution) for place in of]
            print(f"{likeness.file}, {kind}, {word}: {said([share for one in shares for share in one])}", flush=True)


def held_out(likeness: Likeness, trials: Sequence[Observed], known: Sequence[Residual], least: int = 5) -> str:
    """Errors that regressions leave which didn't see these problems, and by problem how much of what they say is so."""
    left, slopes = [], []
    for one, regression in zip(trials, known, strict=True):
        if len(one.wrong) < least:
            continue
        found = regression.of(one.problem, list(one.wrong), one.gpu)
        said = np.array([more - likeness.families[name] for (name, _), more in zip(one.wrong, found, strict=True)])
        said, wrong = said - said.mean(), np.array(list(one.wrong.values()))
        left += (wrong - wrong.mean() - said).tolist()
        # Where next to nothing is said, its slope is that of noise.
        slopes.append(float(said @ wrong / (said @ said + 1e-4)))
    if not slopes:
        return "too few trials of a problem for slopes"
    low, middle, high = np.quantile(slopes, (0.1, 0.5, 0.9))
    return f"deviation left {np.std(left):.3f}, slopes of {len(slopes)} problems {middle:.2f} ({low:.2f} to {high:.2f} in eight of ten)"


LEAST = {FORWARDS: CHOSEN_OF, STEPS: CHOSEN_OF, GRADIENTS: 3}
"""Fewest trials of a problem whose first choice counts; few backwards have more than four."""


def chosen(likeness: Likeness, one: Observed, known: Residual, caution: float = 0.0) -> list[float]:
    """Rate of a problem's first choice by a regression, where it has enough trials."""
    return rates([one], partial(known.of, target=one.gpu, caution=caution), LEAST[likeness])


def kinds(trials: Sequence[Observed]) -> dict[str, list[int]]:
    """Places of problems without and with features beside a diagonal, and of packed ones."""
    found: dict[str, list[int]] = {}
    for place, one in enumerate(trials):
        features = one.problem.features
        plain = features.as_json().keys() <= {"causal", "alignment"}
        found.setdefault("packed" if features.packed else "plain" if plain else "with features", []).append(place)
    return found


RANKED_OF = 10
"""Fewest trials of a problem whose ranking counts."""


def ranked(trials: Sequence[Observed], errors: Sequence[Sequence[float]]) -> str:
    """Loss of first choices and rank correlation of predicted with measured times, among trials with these predicted errors."""
    losses, correlations, count = [], [], 0
    for one, wrong in zip(trials, errors, strict=True):
        if len(one.logs) < RANKED_OF:
            continue
        times = np.array([one.times[tried] for tried in one.logs])
        predicted = np.array(list(one.logs.values())) + wrong
        losses.append(float(times[predicted == predicted.min()].mean() / times.min() - 1))
        # Of equal predictions there is no correlation.
        correlations.append(float(spearmanr(times, predicted).statistic) if np.ptp(predicted) else 0.0)
        count += len(times)
    if not losses:
        return f"no problem has {RANKED_OF} trials"
    loss, most = np.quantile(losses, 0.9, method="inverted_cdf"), max(losses)
    said = f"90th percentile of the loss {loss:.1%}, mean {np.mean(losses):.1%}, at most {most:.1%}"
    return f"{len(losses)} problems with {count} trials, {said}, Spearman {np.median(correlations):.2f}"


def by_pages() -> None:
    """Print the quality of the cost model's choices among configs of steps over pages, which no regression knows, nor functions."""
    steps = [Observed(problem, trials, {}, expected(problem, trials, gpu), gpu) for gpu, problem, trials in of_pages()]
    print(f"held out, pages, by the model: {ranked(steps, [[0.0] * len(one.logs) for one in steps])}")
    print("held out, functions: too few trials with known configs")


def percentile(shares: Sequence[float], share: float = 0.9) -> float:
    """This percentile of the losses of choices with these rates."""
    losses = sorted(1 / rate - 1 for rate in shares)
    return losses[math.ceil(share * len(losses)) - 1]


def unlearned(_: Problem, tried: Sequence[Tried]) -> Sequence[float]:
    """No error: the cost model alone."""
    return [0.0] * len(tried)


def main() -> None:
    """Print the quality with runs or problems left out, or with --write write the regressions."""
    parser = argument_parser(__doc__)
    parser.add_argument("--write", action="store_true", help=f"write the regression over all trials into {FOLDER.name}/")
    parser.add_argument("--only", default="", help="part of a regression's file name")
    options = parser.parse_args()
    for likeness in LIKENESSES:
        if options.only not in likeness.file:
            continue
        rows, runs = all_trials(likeness)
        trials = [*rows, *(one for _, one in runs)]
        print(f"{likeness.file}: {len(rows)} problems with {sum(len(one.wrong) for one in rows)} trials, {len(runs)} with others of runs")
        if options.write:
            np.savez_compressed(FOLDER / likeness.file, **learn(likeness, trials))
            continue
        if likeness is FORWARDS:
            by_runs(rows, runs)
        by_problems(likeness, trials)
    if not options.write and not options.only:
        by_pages()


def said(shares: Sequence[float]) -> str:
    """A run's rates in a line."""
    reached = ", ".join(f"{sum(share >= least for share in shares) / len(shares):.1%} from {least:.2f}" for least in (0.97, 0.9))
    loss = f"90th percentile of the loss {percentile(shares):.1%}"
    return f"{len(shares)} problems, mean {statistics.geometric_mean(shares):.4f}, {reached}, {min(shares):.2f} at least, {loss}"
