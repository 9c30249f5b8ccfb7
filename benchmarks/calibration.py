"""How often the losses hold that stand-ins are estimated to have, without a GPU: `python benchmarks/calibration.py`.

Each shape of the committed runs of unprepared.py is served by today's policy over the shipped rows, without what the run's own trials told
of the cost model's errors. The loss is the time of what serves over the best of the shape's own search, less 1, where that search tried
it; the estimate's 90th percentile holds where it isn't smaller. It is calibrated where it holds in 85 to 95 % of cases, whatever it says;
until then no estimate is shown (`flashtune.dispatch.explain`).
"""

from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

from drawn import DRAWN, DRAWN_ON_H100, shapes_of, tried_as
from fit_residual import all_trials, without_run

from flashtune.core.results import TuningRecord
from flashtune.core.target import Target, find_target
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.policy import Pool, choose
from flashtune.templates import expected, families
from flashtune.templates.expected import LIKENESSES

BOUNDS = (0.02, 0.1, 0.2)
"""Between these lie the 90th percentiles of each line."""

Case = tuple[float, float | None]
"""The 90th percentile that a choice is estimated to lose, and what it lost; None where its search never tried it."""


def replayed(path: Path, target: Target, rows: list[TuningRecord]) -> list[Case]:
    """Every shape of a run that another shape's row serves."""
    cases: list[Case] = []
    for problem, _, search in shapes_of(path):
        key = problem.seen().key(target.slug)
        known = {tried_as(one): one["us"] for one in search.get("tried", []) if one["config"]}
        if not known or problem.direction != "fwd":
            continue
        choice = choose(problem.seen(), target, Pool(key, target, rows, families()), families(), framework_serves=False)
        if choice.estimate is not None and choice.family is not None and choice.config is not None:
            us = known.get((choice.family.name, choice.config))
            cases.append((choice.estimate.worst, None if us is None else us / min(known.values()) - 1))
    return cases


def coverage(cases: list[Case]) -> dict[str, tuple[int, int, int]]:
    """By what the estimate says: in how many of how many cases it holds, and how many can't be told."""
    found: dict[str, list[Case]] = defaultdict(list)
    for worst, loss in cases:
        place = sum(worst > bound for bound in BOUNDS)
        low, high = (0.0, *BOUNDS)[place], (*BOUNDS, None)[place]
        found[f"above {low:.0%}" if high is None else f"{low:.0%} to {high:.0%}"].append((worst, loss))
        found["all"].append((worst, loss))
    table = {}
    for said, of in sorted(found.items()):
        told = [(worst, loss) for worst, loss in of if loss is not None]
        table[said] = sum(loss <= worst for worst, loss in told), len(told), len(of) - len(told)
    return table


def main() -> None:
    """Print a line to each range of estimates."""
    cases: list[Case] = []
    rows = [record for record in Library.of(shipped_path()).records() if record.key.direction == "fwd"]
    trials = {likeness: all_trials(likeness) for likeness in LIKENESSES}
    for gpu, paths in (("h200", DRAWN), ("h100", DRAWN_ON_H100)):
        for path in paths:
            known = {likeness: without_run(likeness, own, runs, path.stem) for likeness, (own, runs) in trials.items()}
            with patch.object(expected, "learned", known.__getitem__):
                cases += replayed(path, find_target(gpu), rows)
    print("90th percentile   holds in    of  share  never tried")
    for said, (held, told, untold) in coverage(cases).items():
        print(f"{said:16s} {held:9d} {told:5d} {held / max(1, told):6.1%} {untold:12d}")


if __name__ == "__main__":
    main()
