"""What rows lose that stand in for others, without a GPU: `python benchmarks/stand_in.py --out benchmarks/results/2026-11-23-stand-in`.

Each row of a database in turn is left out and its key is served by the rest, in the policy's own order. The config that would serve is
looked up among the trials of the left-out row: its time over the best of these, less 1, is the loss. A config that was never tried
there has no time and is counted apart. What the row's own trials told of the cost model's errors is left out, too. By kind of nearness
only rows count of which that is the farthest difference, so that a row of another head size is judged even where one of the same is at
hand.

The gain over the framework is looked at, too: how its times on the GPU change from row to row with an octave of N, and what the policy
now decides where benchmarks/calls.py measured both (grid.json), for keys without a row of their own.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from archived import folder
from drawn import DRAWN, shapes_of
from fit_residual import LeftOut, all_trials
from trials import ARCHIVED, GPU, times_of

from flashtune.core.nearness import octaves
from flashtune.core.problem import DECODE_ROWS, Features, Problem, ProblemKey
from flashtune.core.results import SearchResult, TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.db.store import Store
from flashtune.dispatch.policy import Pool, choose, losses, torch_has
from flashtune.templates import expected, families
from flashtune.templates.expected import LIKENESSES
from flashtune.templates.learned.residual import Likeness
from flashtune.tuner.propose.carrying import record_of

RESULTS = folder()
GRID = RESULTS / "2026-11-22-h200-calls" / "grid.json"

LONG_STEP = 2048
"""Keys from which on the GPU hardly waits for the host."""

CLOSE = 0.02
"""Where torch and a kernel are so close, a logarithm, either is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A left-out row and what served its key; `loss` is None where the config was never tried there."""

    kind: str
    left_out: str
    served_by: str
    loss: float | None


def kind_between(theirs: ProblemKey, ours: ProblemKey) -> str | None:
    """The farthest kind of difference, as `losses.estimate` counts them; None where one can't stand in for the other."""
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
    """A row in a few words."""
    return f"{record.problem.label()} b*h {record.key.bh_bucket}"


def replayed(results: Iterable[SearchResult], trials: Mapping[Likeness, LeftOut]) -> list[Case]:
    """Every row of a database left out in turn, by each kind of nearness and (kind `any`) as the policy would serve it."""
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
        # Nothing is asked of the other.
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
    """By kind: median, 90th percentile and largest of the losses, how many of how many rows reach 0.97 and 0.90 of their best trial's
    rate, and for how many the config was never tried."""
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


def drift(rows: list[TuningRecord]) -> dict[str, float]:
    """How much the GPU's time over the framework's differs between rows that an octave of N lies between, as a factor less 1."""
    ratios = {row.key: row.median_us / row.framework_us for row in rows if row.framework_us is not None}
    pairs = [(a, b) for a in ratios for b in ratios if a.n < b.n and kind_between(a, b) == "n, 1 octaves"]
    steps = sorted(abs(math.log(ratios[a] / ratios[b])) / octaves(a.n, b.n) for a, b in pairs)
    return {"median": math.expm1(statistics.median(steps)), "pairs": len(steps)}


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


def decisions(rows: list[TuningRecord]) -> list[dict[str, object]]:
    """What the policy decides for the cells of grid.json that have no row of their own, beside what was measured there.

    `kernel_over_torch` is None where the policy of that run had torch serve: no kernel was measured.
    """
    found: list[dict[str, object]] = []
    for cell in json.loads(GRID.read_text())["grid"]:
        problem = Problem(
            batch=cell["b"], heads=cell["h"], kv_heads=cell["kv_heads"], n_q=cell["n"], n_kv=cell["n_kv"], d=cell["d"], d_v=cell["d"],
            dtype="bf16", features=Features(causal=cell["causal"]),
        )  # fmt: skip
        if any(row.key == problem.key(GPU.slug) for row in rows):
            continue
        chosen = choose(problem, GPU, rows, families())
        measured = None if cell["template"] is None else cell["speedup"]
        found.append({"cell": f"{cell['cell']} {problem.label()} b{cell['b']}", "chosen": chosen.kind, "kernel_over_torch": measured})
    return found


def torch_steps(rows: list[TuningRecord]) -> list[dict[str, object]]:
    """Decoding steps of rows and of drawn shapes by their key heads in all batches: the bytes of K and V that torch reads a second, in TB,
    and the share of its rate that it is thought to reach."""
    times = [(row.problem, row.framework_us) for row in rows if row.framework_us is not None]
    times += [
        (problem, row["times"]["default"]["median_us"])
        for path in DRAWN
        for problem, row, _ in shapes_of(path)
        if "default" in row["times"]
    ]
    found: list[dict[str, object]] = []
    for problem, us in times:
        heads = problem.batch * problem.kv_heads
        if problem.n_q == 1 and problem.n_kv >= LONG_STEP and problem.dtype != "fp8":
            rate = 2 * heads * problem.n_kv * (problem.d + problem.d_v) / us / 1e6
            said = {"step": problem.label(), "key heads": heads, "TB/s": round(rate, 2)}
            found.append({**said, "share of the rate": round(losses.torch_fills(problem, GPU.sms), 2)})
    return sorted(found, key=lambda one: (one["key heads"], one["step"]))


def report(
    say: Callable[[str], object],
    tables: dict[str, dict[str, dict[str, float]]],
    torch: dict[str, dict[str, float]],
    served: list[dict[str, object]],
) -> None:
    """The tables for people."""
    for name, table in tables.items():
        say(f"{name}: loss of a stand-in against the best of the left-out row's trials")
        say(f"  {'nearness':16} {'median':>8} {'p90':>8} {'most':>8} {'>=0.97':>8} {'>=0.90':>8} {'rows':>6} {'untried':>8}")
        for kind, line in table.items():
            shares = "".join(f"{line[f'from {least}'] / line['cases']:9.1%}" for least in ("0.97", "0.90"))
            losses = f"{line['median']:8.1%} {line['worst']:8.1%} {line['most']:8.1%}{shares}"
            say(f"  {kind:16} {losses} {line['cases']:6.0f} {line['untried']:8.0f}")
    say("shipped: who would serve a left-out row, and the sum of what is lost by that, a logarithm")
    for kind, line in torch.items():
        say(f"  {kind:16} " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(line.items())))
    say("what serves where a whole call was measured, and how fast a kernel was there, times torch's rate")
    for line in served:
        ratio = line["kernel_over_torch"]
        say(f"  {line['cell']:48} {line['chosen']!s:10} {'not measured' if ratio is None else f'{ratio:.2f}x'}")


def main() -> None:
    """Print the tables; with --out, keep them and every case beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder for losses.json, cases.json, losses.txt and torch_steps.txt")
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
    served = decisions(shipped)
    lines: list[str] = []
    torch = torch_or_kernel(shipped)
    report(lines.append, tables, torch, served)
    print("\n".join(lines))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        found = {"gpu": GPU.slug, **tables, "drift": drift(shipped), "torch": torch, "served": served}
        (out / "losses.json").write_text(json.dumps(found, indent=1) + "\n")
        kept = {name: [asdict(case) for case in of] for name, of in cases.items()}
        (out / "cases.json").write_text(json.dumps(kept) + "\n")
        (out / "losses.txt").write_text("\n".join(lines) + "\n")
        steps = [" ".join(f"{name} {value}" for name, value in one.items()) for one in torch_steps(shipped)]
        (out / "torch_steps.txt").write_text("\n".join(steps) + "\n")


if __name__ == "__main__":
    main()
