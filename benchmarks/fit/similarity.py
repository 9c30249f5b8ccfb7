"""Fit of a learned regression's length scales and deviations to committed trials, by their marginal likelihood.

The likelihood of a Gaussian process over `--most` trials of whole problems, drawn evenly, is maximised by L-BFGS from the scales in
`flashtune/templates/learned`; torch differentiates it. Prints what to write there, rounded to two digits, and the log likelihood of trials
that weren't drawn before and after.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.fit.residual import Observed, all_trials
from benchmarks.shared.environment import argument_parser
from flashtune.templates.expected import LIKENESSES
from flashtune.templates.learned.residual import Likeness

DEVIATIONS = ("together", "alone", "noise", "offset")
BOUNDS = (0.2, 50.0)
"""Least and greatest length scale."""


@dataclass(frozen=True, slots=True)
class Data:
    """Trials as arrays: coordinates of each one's problem and config without scales, the number of its problem, and its log error."""

    problems: torch.Tensor
    configs: torch.Tensor
    place: torch.Tensor
    wrong: torch.Tensor


def data_of(likeness: Likeness, trials: Sequence[Observed]) -> Data:
    """Arrays of these trials."""
    rows = [
        (likeness.of_problem(one.problem), likeness.of_config(one.problem, tried, one.gpu), place, wrong)
        for place, one in enumerate(trials)
        for tried, wrong in one.wrong.items()
    ]
    problems, configs, places, wrong = zip(*rows, strict=True)
    double = torch.float64
    return Data(
        torch.tensor(np.array(problems, dtype=float), dtype=double),
        torch.tensor(np.array(configs, dtype=float), dtype=double),
        torch.tensor(places),
        torch.tensor(wrong, dtype=double),
    )


def likelihood(logs: torch.Tensor, data: Data) -> torch.Tensor:
    """Log marginal likelihood of all trials by the logarithms of deviations, then of the scales of problems and configs."""
    together, alone, noise, offset = torch.exp(2 * logs[:4])
    scales = torch.exp(logs[4:])
    count = data.problems.shape[1]

    def alike(points: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        # Of tensors without repeats, which cdist differentiates soundly.
        scaled = points / lengths
        norms = scaled.square().sum(1)
        return torch.exp(-0.5 * (norms[:, None] + norms[None, :] - 2 * scaled @ scaled.T).clamp_min(0.0))

    covariance = (together * alike(data.problems, scales[:count]) + alone) * alike(data.configs, scales[count:])
    covariance = covariance + offset * (data.place[:, None] == data.place[None, :])
    covariance = covariance + (noise + 1e-8) * torch.eye(len(data.wrong), dtype=torch.float64)
    factor = torch.linalg.cholesky(covariance)
    explained = torch.cholesky_solve(data.wrong[:, None], factor)[:, 0]
    found: torch.Tensor = -0.5 * data.wrong @ explained - factor.diagonal().log().sum() - 0.5 * len(data.wrong) * math.log(2 * math.pi)
    return found


def start_of(likeness: Likeness) -> torch.Tensor:
    """Logarithms of today's deviations and scales."""
    deviations = [getattr(likeness, name) for name in DEVIATIONS]
    return torch.tensor(np.log([*deviations, *likeness.problem_scales.values(), *likeness.config_scales.values()]), dtype=torch.float64)


def fitted(likeness: Likeness, data: Data, rounds: int) -> torch.Tensor:
    """Logarithms of the deviations and scales with the greatest likelihood, the scales within BOUNDS."""
    logs = start_of(likeness).clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS([logs], max_iter=rounds, history_size=20, line_search_fn="strong_wolfe")
    low, high = map(math.log, BOUNDS)

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        outside = (logs[4:] - high).clamp_min(0.0).square().sum() + (low - logs[4:]).clamp_min(0.0).square().sum()
        value = (outside * 100 - likelihood(logs, data)) / len(data.wrong)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    return logs.detach()


def split(trials: Sequence[Observed], most: int) -> tuple[list[Observed], list[Observed]]:
    """Problems drawn evenly until they have `most` trials, and as many of the others."""
    mixed = list(trials)
    random.Random(0).shuffle(mixed)
    drawn: list[Observed] = []
    while mixed and sum(len(one.wrong) for one in drawn) < most:
        drawn.append(mixed.pop())
    others: list[Observed] = []
    while mixed and sum(len(one.wrong) for one in others) < most:
        others.append(mixed.pop())
    return drawn, others


def main() -> None:
    """Fit and print, regression by regression."""
    parser = argument_parser(__doc__)
    parser.add_argument("--most", type=int, default=2000, help="trials that are fitted to (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="steps of the optimiser (default: %(default)s)")
    parser.add_argument("--only", help="part of a regression's file name")
    options = parser.parse_args()
    for likeness in LIKENESSES:
        if options.only and options.only not in likeness.file:
            continue
        rows, runs = all_trials(likeness)
        drawn, others = split([*rows, *(one for _, one in runs)], options.most)
        data = data_of(likeness, drawn)
        logs = fitted(likeness, data, options.rounds)
        names = [*DEVIATIONS, *likeness.problem_scales, *likeness.config_scales]
        print(likeness.file)
        for name, value in zip(names, torch.exp(logs).tolist(), strict=True):
            print(f"    {name}: {float(f'{value:.2g}')}")
        for word, of in (("drawn", data), *((("others", data_of(likeness, others)),) if others else ())):
            before, after = (float(likelihood(one, of)) / len(of.wrong) for one in (start_of(likeness), logs))
            print(f"    log likelihood of a trial, {word}: {before:.3f} before, {after:.3f} after", flush=True)
