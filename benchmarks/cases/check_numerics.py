"""Code paths of every template family, compared with float64 on this machine's GPU.

For a table of specs (features, head sizes, element types) configs that show every tile size and code path are compiled, run on
unaligned, poisoned little problems in both layouts, and compared with the float64 oracle; hangs and crashes cost one row. Writes
numerics.json and exits with 1 where a row is wrong.
"""

import json
import os
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from benchmarks.shared.environment import argument_parser, made_by, output_folder, this_gpu
from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, Direction
from flashtune.core.problems.problem import DIRECTIONS, Features, Problem
from flashtune.core.records.results import Fate
from flashtune.templates import families
from flashtune.templates.family import Family
from flashtune.templates.rendering import variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.replies import Answer, Checked, Compiled, Failed, Ready

CAUSAL = Features(causal=True)
FEATURES = [
    Features(),
    CAUSAL,
    Features(window=(64, 32)),
    Features(causal=True, window=(100, 0)),
    Features(mask="bool"),
    Features(mask="bias"),
    Features(causal=True, dropout=True),
    Features(causal=True, softcap=True),
    Features(causal=True, window=(100, 0), mask="bias", dropout=True, softcap=True),
    Features(alibi=True, alignment="bottom_right"),
    Features(causal=True, alibi=True),
    Features(causal=True, alibi=True, mask="bool", softcap=True),
    Features(sinks=True),
    Features(causal=True, window=(100, 0), sinks=True),
    Features(mask="bias", dbias=True),
    Features(causal=True, alibi=True, dslopes=True),
    Features(causal=True, window=(100, 0), mask="bias", dropout=True, softcap=True, alibi=True, dbias=True, dslopes=True),
]
SPECS: list[dict[str, Any]] = [
    *({"d": 64, "dtype": dtype, "features": features} for features in FEATURES for dtype in ("bf16", "fp16")),
    *({"d": 128, "dtype": "bf16", "features": features} for features in (Features(), CAUSAL)),
    *({"d": d, "dtype": "bf16", "features": Features(mask="bias", dbias=True)} for d in (96, 128, 256)),
    {"d": 64, "dtype": "fp32", "features": Features(mask="bias", dbias=True)},
    *(
        {"d": d, "d_v": d_v, "dtype": "bf16", "features": CAUSAL}
        for d, d_v in ((96, 96), (160, 160), (192, 192), (192, 128), (256, 256), (64, 128), (40, 72), (512, 512))
    ),
    *({"d": d, "dtype": "fp8", "features": features} for features in (Features(), CAUSAL) for d in (64, 128)),
    {"d": 128, "dtype": "fp8", "features": Features(causal=True, alibi=True, mask="bool", dropout=True, softcap=True)},
    {"d": 128, "dtype": "fp8", "features": Features(causal=True, alibi=True, sinks=True)},
    {"d": 64, "dtype": "fp32", "features": CAUSAL},
    {"d": 64, "dtype": "fp32", "features": Features(causal=True, tf32=True)},
]


def problem_of(*, d: int, dtype: Any, features: Features, d_v: int | None = None, direction: Direction = "fwd") -> Problem:
    """A little problem with shared heads; the verifier adds its ragged ones."""
    sizes = dict(batch=2, heads=4, kv_heads=2, n_q=257, n_kv=300, d=d, d_v=d_v or d)
    return Problem(**sizes, dtype=dtype, features=features, direction=direction)


def every_problem() -> Iterator[Problem]:
    """All specs of all passes."""
    for direction in DIRECTIONS:
        for words in SPECS:
            if direction == "bwd" or not words["features"].asked:
                yield problem_of(**words, direction=direction)


def paths(family: Family, problem: Problem, target: Target) -> list[Config]:
    """A few configs that show every tile size and every choice of code path; for plain specs, every pair of such choices."""
    plain = problem.features in (Features(), CAUSAL) and problem.d == 64 and problem.dtype == "bf16"
    seen: set[object] = set()
    found = []
    for config in [*family.starts(problem.spec(), target), *family.configs(problem.spec(), target)]:
        choices = [(axis, config[axis]) for axis in family.path_axes]
        shown: set[object] = {*choices, ("BLOCK_M", config["BLOCK_M"]), ("BLOCK_N", config["BLOCK_N"])}
        if plain:
            shown |= set(combinations(choices, 2))
        elif ("v_columns", "pieces") in choices:
            # Sums of every path come in pieces.
            shown |= {("pieces", choice) for choice in shown}
        if not shown <= seen:
            seen |= shown
            found.append(config)
    return found


def main() -> None:
    """Compile all in parallel, check one after another, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--template", help="only this family")
    parser.add_argument("-k", default="", help="only problems whose label holds this (sinks, d64, causal)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    target, rows = this_gpu(), []
    with Workers(jobs=options.jobs) as workers:
        waiting = []
        for problem in (problem for problem in every_problem() if options.k in problem.label()):
            for family in families().values():
                if options.template in (None, family.name) and family.supports(problem.spec(), target) is None:
                    for config in paths(family, problem, target):
                        source = Source.of(family, variant_of(family, problem.spec(), config))
                        limit_s = workers.limits.compile_s
                        waiting.append(
                            (problem, source, workers.submit("compile", tasks.compile_candidate, source, problem, target, limit_s=limit_s))
                        )
        for problem, source, compiling in waiting:
            reply: Answer | Failed = compiling.reply()
            if isinstance(reply, Compiled):
                reply = workers.prepare(problem, target, options.seed)
            if isinstance(reply, Ready):
                reply = workers.submit(
                    "device", tasks.recheck_on_device, source, problem, target, options.seed, limit_s=workers.limits.device_s
                ).reply()
            assert isinstance(reply, Checked | Failed)
            fate, reason = (reply.fate, reply.reason) if isinstance(reply, Failed) else (Fate.CORRECT, "")
            rows.append({"problem": problem.label(), "kernel": source.stem, "fate": str(fate), "reason": reason, "error": reply.error})
            if reason:
                print(f"{problem.label()} {source.stem}: {fate}: {reason}", flush=True)
    wrong = [row for row in rows if row["fate"] != "correct"]
    (output_folder() / "numerics.json").write_text(json.dumps({"provenance": made_by(options.seed), "rows": rows}, indent=1))
    worst = max((row["error"] or 0.0 for row in rows if row["fate"] == "correct"), default=0.0)
    print(f"{len(rows) - len(wrong)} correct (largest error {worst:.2f} of the tolerance), {len(wrong)} wrong")
    if wrong:
        raise SystemExit(1)
