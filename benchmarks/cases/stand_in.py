"""Losses of substitute records: each record left out in turn and its key served by the rest, in dispatch's own order.

The config that would serve is looked up among the trials of the left-out record: its time over the best of these, less 1, is the loss. A
config that was never tried there has no time and is counted apart. The regression of the cost model's error is without the record's trials,
too. By kind of nearness only records count of which that is the farthest difference, so that one of another head size is judged even where
one of the same is near. Needs no GPU.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from benchmarks.fit.residual import LeftOut, all_trials
from benchmarks.shared.environment import argument_parser
from benchmarks.shared.trials import ARCHIVED, GPU, times_of
from flashtune.core.nearness import octaves
from flashtune.core.problem import DECODE_ROWS, ProblemKey
from flashtune.core.results import SearchResult, TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.db.store import Store
from flashtune.dispatch.policy import Pool, choose, losses, torch_has
from flashtune.templates import expected, families
from flashtune.templates.expected import LIKENESSES
from flashtune.templates.learned.residual import Likeness
from flashtune.tuner.propose.space import record_of

CLOSE = 0.02
"""Where torch and a kernel are so close, a logarithm, either is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A left-out record and the one that served its key; `loss` is None where the config was never tried there."""

    kind: str
    left_out: str
    served_by: str
    loss: float | None


def kind_between(theirs: ProblemKey, ours: ProblemKey) -> str | None:
    """The farthest kind of difference, as `losses.estimate` counts them; None where one can't serve the other."""
    if not losses.comparable(theirs, ours) or theirs == ours:
        return None
    if (theirs.d, theirs.d_v) != (ours.d, ours.d_v):
        return "head size"
    if theirs.gqa_ratio != ours.gqa_ratio:
        return "shared heads"
    if not losses.same_features(theirs, ours):
        return "features"
    if theirs.dtype != ours.dtype:
        return "dtype"
    if (far := round(octaves(theirs.n, ours.n))) > 0:
        return f"n, {min(far, 5)} octaves"
    return "a full GPU" if losses.full(theirs) != losses.full(ours) else "heads alone"


def named(record: TuningRecord) -> str:
    """Short name of a record."""
    return f"{record.problem.label()} b*h {record.key.bh_bucket}"


def replayed(results: Iterable[SearchResult], trials: Mapping[Likeness, LeftOut]) -> list[Case]:
    """Cases of every record, by each kind of nearness and (kind `any`) as dispatch would serve it."""
    results = list(results)
    rows = [record for record in map(record_of, results) if record is not None]
    cases = []
    for row, result in zip(rows, results, strict=True):
        others = defaultdict(list)
        for other in rows:
            if (kind := kind_between(other.key, row.key)) is not None:
                others[kind].append(other)
                others["any"].append(other)
        times, likeness = times_of(result), next(one for one in LIKENESSES if one.serves(row.problem))
        learned = {likeness: trials[likeness].without(row.key)}
        for kind, near in others.items():
            with patch.object(expected, "learned", learned.get):
                chosen = choose(row.problem, GPU, Pool(row.key, GPU, near, families()), families(), framework_serves=False)
            if chosen.record is None or chosen.family is None or chosen.config is None:
                continue
            time_us = times.get((chosen.family.name, chosen.config))
            loss = None if time_us is None else time_us / min(times.values()) - 1
            cases.append(Case(kind=kind, left_out=named(row), served_by=named(chosen.record), loss=loss))
    return cases


def summary(cases: Iterable[Case]) -> dict[str, dict[str, float]]:
    """Table by kind: median, 90th percentile and largest of the losses, records that reach 0.97 and 0.90 of their best trial's rate, all of
    known loss, and those whose config was never tried."""
    found: dict[str, list[float | None]] = defaultdict(list)
    for case in cases:
        found[case.kind].append(case.loss)
    table = {}
    for kind in sorted(found):
        lost = sorted(loss for loss in found[kind] if loss is not None)
        if lost:
            worst = lost[math.ceil(0.9 * len(lost)) - 1]
            untried = len(found[kind]) - len(lost)
            reached = {f"from {least:.2f}": sum(1 / (1 + loss) >= least for loss in lost) for least in (0.97, 0.9)}
            table[kind] = {"median": statistics.median(lost), "worst": worst, "most": lost[-1], **reached, "cases": len(lost)}
            table[kind]["untried"] = untried
    return table


def torch_or_kernel(rows: list[TuningRecord]) -> dict[str, dict[str, float]]:
    """Every row that knows torch's time left out in turn: how often the rest give its key to torch or to a kernel, rightly or wrongly by
    more than CLOSE, and what that loses in all, a logarithm; by whole calls of torch and the row's own kernel."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.relative_time is None or row.key.direction != "fwd" or not torch_has(row.problem):
            continue
        table = found.setdefault("steps" if row.key.n_q <= DECODE_ROWS else "more rows", defaultdict(float))
        others = [other for other in rows if other.key != row.key]
        served = "torch" if choose(row.problem, GPU, others, families()).kind == "framework" else "a kernel"
        lost = math.log(row.relative_time) * (-1 if served == "torch" else 1)
        table[f"{served}, {'wrongly' if lost > CLOSE else 'rightly'}"] += 1
        table["lost"] += max(0.0, lost)
    return found


def report(tables: dict[str, dict[str, dict[str, float]]], torch: dict[str, dict[str, float]]) -> list[str]:
    """Lines of the tables."""
    lines = []
    for name, table in tables.items():
        lines.append(f"{name}: loss of a substitute record against the best of the left-out record's trials")
        lines.append(f"  {'nearness':16} {'median':>8} {'p90':>8} {'most':>8} {'>=0.97':>8} {'>=0.90':>8} {'records':>7} {'untried':>8}")
        for kind, line in table.items():
            shares = "".join(f"{line[f'from {least}'] / line['cases']:9.1%}" for least in ("0.97", "0.90"))
            losses = f"{line['median']:8.1%} {line['worst']:8.1%} {line['most']:8.1%}{shares}"
            lines.append(f"  {kind:16} {losses} {line['cases']:7.0f} {line['untried']:8.0f}")
    lines.append("shipped: who would serve a left-out record's key, and the sum of what is lost by that, a logarithm")
    for kind, line in torch.items():
        lines.append(f"  {kind:16} " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(line.items())))
    return lines


def main() -> None:
    """Print the tables; with --out, write them and every case."""
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, help="a folder for losses.json, cases.json and losses.txt")
    out = parser.parse_args().out
    shipped = Library.of(shipped_path()).records(gpu=GPU.slug)
    trials = {}
    for likeness in LIKENESSES:
        rows, runs = all_trials(likeness)
        trials[likeness] = LeftOut(likeness, [*rows, *(one for _, one in runs)])
    tables, cases = {}, {}
    for name, path in (("archived", ARCHIVED), ("shipped", shipped_path())):
        with Store.open(path, writable=False) as store:
            cases[name] = replayed((result for result in store.results() if result.gpu == GPU.slug), trials)
        tables[name] = summary(cases[name])
    torch = torch_or_kernel(shipped)
    lines = report(tables, torch)
    print("\n".join(lines))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "losses.json").write_text(json.dumps({"gpu": GPU.slug, **tables, "torch": torch}, indent=1) + "\n")
        (out / "cases.json").write_text(json.dumps({name: [asdict(case) for case in of] for name, of in cases.items()}) + "\n")
        (out / "losses.txt").write_text("\n".join(lines) + "\n")
