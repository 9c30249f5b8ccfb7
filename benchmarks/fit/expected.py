"""Fit of the terms that the cost model leaves out of a Hopper kernel's time.

Differences of the model's error between configs of one problem are fitted by least squares over all problems, for the constants of
flashtune/templates/expected.py: once over the trials of an H200's records, archived and shipped, and once over those of searches of random
shapes, which were drawn and searched independently of the records.
"""

import json
import math
import statistics
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import GPU, RUNS, Trials, of_rows, shapes_of, tried_in
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import DECODE_ROWS, Problem
from flashtune.db.library import shipped_path
from flashtune.templates import family
from flashtune.templates.cost import predict_us
from flashtune.templates.expected import LEFT_OUT, log_us, shares

FAMILY, STEPS = family("flash_fwd_hopper"), family("flash_decode")

HOPELESS = 1.6
"""Trials that take so many times as long as the best one are left out."""

Times = dict[Config, float]
"""Microseconds of FAMILY's configs."""


def of_family(trials: Trials) -> Times:
    """Trials of FAMILY alone."""
    return {config: us for (name, config), us in trials.items() if name == FAMILY.name}


def of_drawn() -> Iterator[tuple[Problem, Trials]]:
    """Trials of random shapes, where the run kept them."""
    for path in RUNS:
        for problem, _, search in shapes_of(path):
            yield problem, tried_in(search)


def fits(problem: Problem) -> bool:
    """True for a forward of many queries of dense tensors that the family supports."""
    dense = problem.direction == "fwd" and problem.n_q > DECODE_ROWS and not problem.features.packed
    return dense and FAMILY.supports(problem.spec(), GPU) is None


def measured(problems: Iterable[tuple[Problem, Times]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Design matrix and the model's log errors, a line for each trial, less the mean of its problem."""
    rows: list[NDArray[np.float64]] = []
    errors: list[NDArray[np.float64]] = []
    for problem, trials in problems:
        if not fits(problem):
            continue
        spec, logs = problem.spec(), {}
        for config, us in trials.items():
            facts = FAMILY.expected(config, spec, GPU)
            if us < HOPELESS * min(trials.values()) and FAMILY.violated(config, spec, GPU) is None and facts is not None:
                logs[config] = math.log(us / predict_us(config, facts, problem, GPU))
        if len(logs) > 1:
            here, wrong = np.array([shares(config, problem) for config in logs], dtype=float), np.array(list(logs.values()))
            rows.append(here - here.mean(0))
            errors.append(wrong - wrong.mean())
    return np.concatenate(rows), np.concatenate(errors)


CHOSEN_OF = 5
"""Problems with fewer trials say little of a choice."""


def chosen(problems: Iterable[tuple[Problem, Times]]) -> list[float]:
    """Rate of each problem's trial that is predicted to be the fastest, over the best trial's rate."""
    found = []
    for problem, trials in problems:
        if not fits(problem):
            continue
        valid = [config for config in trials if FAMILY.violated(config, problem.spec(), GPU) is None]
        logs = {config: log for config in valid if (log := log_us(FAMILY, config, problem, GPU)) is not None}
        if len(logs) >= CHOSEN_OF:
            found.append(min(trials[config] for config in logs) / trials[min(logs, key=logs.__getitem__)])
    return found


def of_steps() -> list[dict[str, Any]]:
    """Decoding steps of rows and of drawn shapes that flash_decode and another family were tried for: by how much longer the best of that
    one takes, a logarithm, as measured and as the model expects; the one that it is most wrong of first."""
    found = []
    for problem, times in chain(of_rows([shipped_path()]), of_drawn()):
        if problem.n_q > DECODE_ROWS or problem.direction != "fwd":
            continue
        best = {name: min((one for one in times if one[0] == name), key=times.__getitem__) for name in {name for name, _ in times}}
        logs = {name: log_us(family(name), config, problem, GPU) for name, (_, config) in best.items()}
        own = logs.pop(STEPS.name, None)
        for name, log in logs.items():
            if own is not None and log is not None:
                measured = math.log(times[best[name]] / times[best[STEPS.name]])
                sizes = {"step": problem.label(), "batch": problem.batch, "heads": problem.heads, "family": name}
                found.append(sizes | {"measured": round(measured, 3), "expected": round(log - own, 3)})
    return sorted(found, key=lambda one: one["expected"] - one["measured"])


def flattered(steps: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Mean log error of the model by family beside flash_decode, over `of_steps` (for flashtune.templates.learned.steps)."""
    found: dict[str, list[float]] = {}
    for one in steps:
        found.setdefault(one["family"], []).append(one["measured"] - one["expected"])
    return {name: statistics.fmean(of) for name, of in found.items()}


def report() -> dict[str, dict[str, float]]:
    """The constants by rows and by random shapes, how far the model is off in each (a standard deviation of logarithms): without any,
    with its own, and with those of the rows; and in how many problems what it chooses, with the constants of expected.py, is at 0.90 of the
    best trial's rate or more."""
    found = {}
    problems = {name: [(problem, of_family(trials)) for problem, trials in of] for name, of in (("rows", of_rows()), ("drawn", of_drawn()))}
    known = {name: measured(some) for name, some in problems.items()}
    constants = {name: np.linalg.lstsq(*of, rcond=None)[0] for name, of in known.items()}
    for name, (design, wrong) in known.items():
        off = {"without": wrong, "with its own": wrong - design @ constants[name], "with the rows'": wrong - design @ constants["rows"]}
        said = dict(zip(LEFT_OUT, map(float, constants[name]), strict=True)) | {word: float(of.std()) for word, of in off.items()}
        rates = chosen(problems[name])
        shares = {"problems": len(rates), "chosen from 0.90": sum(rate >= 0.9 for rate in rates) / len(rates)}
        found[name] = {**said, "trials": len(wrong), **shares}
    return found


def main() -> None:
    """Print both fits; with --out, keep them, and what is expected of decoding steps by several families."""
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, help="a folder for expected.json and steps.json")
    out = parser.parse_args().out
    found = report()
    steps = of_steps()
    for name, fit in [*found.items(), ("steps, beside flash_decode", flattered(steps))]:
        print(f"{name}: " + ", ".join(f"{what} {value:.3f}" for what, value in fit.items()))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "expected.json").write_text(json.dumps(found, indent=1) + "\n")
        (out / "steps.json").write_text("[\n" + ",\n".join(map(json.dumps, steps)) + "\n]\n")
