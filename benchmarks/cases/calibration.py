"""Calibration of the losses that dispatch estimates: how often they hold on the committed runs of random shapes, without a GPU.

Each shape is served by today's dispatch over the shipped records, with a regression of the cost model's error that is without the run's own
trials. The loss is the time of dispatch's choice over the best of the shape's own search, less 1, where that search tried it; the
estimate's 90th percentile holds where it isn't smaller. It is calibrated where it holds in 85 to 95 % of cases, whatever it says; until
then no estimate is shown (`flashtune.dispatch.explain`).
"""

from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

from benchmarks.fit.residual import all_trials, without_run
from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import RUNS, RUNS_ON_H100, shapes_of, tried_as
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target, find_target
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.policy import Pool, choose
from flashtune.templates import expected, families
from flashtune.templates.expected import LIKENESSES

BOUNDS = (0.02, 0.1, 0.2)
"""Bounds of the 90th percentiles of each line."""

Case = tuple[float, float | None]
"""Estimated 90th percentile of a choice's loss, and its loss; None where its search never tried it."""


def replayed(path: Path, target: Target, rows: list[TuningRecord]) -> list[Case]:
    """Every shape of a run that another shape's record serves."""
    cases: list[Case] = []
    for problem, _, search in shapes_of(path):
        key = problem.seen().key(target.slug)
        known = {tried: one["us"] for one in search.get("tried", []) if one["config"] and (tried := tried_as(one)) is not None}
        if not known or problem.direction != "fwd":
            continue
        choice = choose(problem.seen(), target, Pool(key, target, rows, families()), families(), framework_serves=False)
        if choice.estimate is not None and choice.family is not None and choice.config is not None:
            us = known.get((choice.family.name, choice.config))
            cases.append((choice.estimate.worst, None if us is None else us / min(known.values()) - 1))
    return cases


def coverage(cases: list[Case]) -> dict[str, tuple[int, int, int]]:
    """Ranges of the estimate: cases in which it holds, cases of known loss, and cases of unknown loss."""
    found: dict[str, list[Case]] = defaultdict(list)
    for worst, loss in cases:
        place = sum(worst > bound for bound in BOUNDS)
        low, high = (0.0, *BOUNDS)[place], (*BOUNDS, None)[place]
        found[f"above {low:.0%}" if high is None else f"{low:.0%} to {high:.0%}"].append((worst, loss))
        found["all"].append((worst, loss))
    table = {}
    for said, of in sorted(found.items()):
        known_losses = [(worst, loss) for worst, loss in of if loss is not None]
        table[said] = sum(loss <= worst for worst, loss in known_losses), len(known_losses), len(of) - len(known_losses)
    return table


def main() -> None:
    """Print a line to each range of estimates."""
    argument_parser(__doc__).parse_args()
    cases: list[Case] = []
    rows = [record for record in Library.of(shipped_path()).records() if record.key.direction == "fwd"]
    trials = {likeness: all_trials(likeness) for likeness in LIKENESSES}
    for gpu, paths in (("h200", RUNS), ("h100", RUNS_ON_H100)):
        for path in paths:
            known = {likeness: without_run(likeness, own, runs, path.stem) for likeness, (own, runs) in trials.items()}
            with patch.object(expected, "learned", known.__getitem__):
                cases += replayed(path, find_target(gpu), rows)
    print("90th percentile   holds in    of  share  never tried")
    for said, (held, known_losses, unknown) in coverage(cases).items():
        print(f"{said:16s} {held:9d} {known_losses:5d} {held / max(1, known_losses):6.1%} {unknown:12d}")
