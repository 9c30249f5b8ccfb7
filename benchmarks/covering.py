"""Which kernels' machine code random calls lack the most, and of which calls, without a GPU: `python benchmarks/covering.py`.

Draws calls as unprepared.py does and adds those of models (`tune.wanting`). Of each the cost model, with what was learned of its errors
(flashtune.templates.expected), says what it loses by the best kernel whose machine code ships for its head size, features and type,
beside the best of all winners' configs. The kernel is chosen that takes most off these losses, with the call for which it takes the most,
then the next, as if that had machine code; ahead of them some decoding steps (`odd_steps`). Writes covering.json beside this file, which
`race_again.py --covering` races, as many as `--budget-s` leaves time for. `--uncompiled` prints how many of the calls Triton would have to
compile instead.
"""

import argparse
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fit_expected import FAMILY
from forward_report import sizes_of
from numpy.typing import NDArray
from race_work import Work, first_to_race, found_near
from random_shapes import drawn, guess_us
from searches import shipped
from tune import wanting

from flashtune import dispatch
from flashtune.core.config import Config, KernelSpec
from flashtune.core.problem import DECODE_ROWS, Features, Problem, ProblemKey
from flashtune.core.results import SearchResult
from flashtune.core.shipped_kernels import PACKAGE, shipped_index
from flashtune.core.target import Target, find_target
from flashtune.db.store import Store
from flashtune.dispatch.policy import choose, losses
from flashtune.templates import families
from flashtune.templates.expected import LOG_HOST, logs_us
from flashtune.templates.rendering import variant_of
from flashtune.tuner.propose.candidates import Candidates
from flashtune.tuner.propose.space import Candidate, SearchSpace

LIST = Path(__file__).with_suffix(".json")
GPU = "h200"

SEED, DRAWN = 1002, 2400
"""Of the calls; no run of unprepared.py has this seed."""

COMPILED = 0.05
"""What a call without machine code counts for, beside what others lose, a logarithm: it then waits for a compiler once."""

IN_PLACE = 4
"""So many configs of flash_fwd race for a bias that isn't aligned."""

EXPECTED = 3
"""So many tiles race with the config that is expected to be the fastest of each."""

BESIDE_DROPOUT = 1
"""So many where dropout is checked, which takes compilers a minute and a half."""

LONGEST_US = 1500.0
"""A row of more is dear to race, by unprepared's guess."""


def measured() -> list[ProblemKey]:
    """The keys that have a row."""
    return list({record.key for record in shipped() if record.key.gpu == GPU and record.key.direction == "fwd"})


def called() -> list[Problem]:
    """Calls without a row: drawn ones, and those of models."""
    return [cell.problem for cell in drawn(DRAWN, seed=SEED, gpu=GPU, known=measured())] + [problem for problem, _ in wanting()]


def odd_steps() -> list[Problem]:
    """Decoding steps whose rows of K are an odd number of 16 bytes, of which four rows say that torch is the faster: a search of 12288
    keys, four heads to a key head, found 0.69 of torch's time (benchmarks/results/2026-11-24-h200-unprepared/seed401.json)."""
    return [
        Problem(batch=batch, heads=16, kv_heads=16 // sharing, n_q=1, n_kv=n, d=d, d_v=d, dtype="bf16", features=Features())
        for d in (72, 40)
        for batch, n in ((16, 12288), (4, 6144), (48, 3072), (64, 1024))
        for sharing in (4, 1, 8)
    ]


class Lost(NamedTuple):
    """The calls that one kernel spec serves, by its machine code in either 16-bit type: what each loses by each config, (calls, configs),
    and by those that have machine code, logarithms."""

    calls: list[Problem]
    configs: list[Config]
    by: NDArray[np.float64]
    now: NDArray[np.float64]

    def best(self, taken: set[ProblemKey]) -> tuple[float, int, int]:
        """By how much a config would serve all of them better, the most, its place and that of the call for which it takes the most."""
        gains = np.maximum(self.now[:, None] - self.by, 0.0)
        free = np.array([guess_us(call) < LONGEST_US and call.key(GPU) not in taken for call in self.calls])
        raced = np.where(free[:, None], gains, 0.0)
        # A config that is of no use to a call that may race has to wait for one.
        whole = np.where(raced.max(0) > 0.0, gains.sum(0), 0.0)
        config = int(whole.argmax())
        return float(whole[config]), config, int(raced[:, config].argmax())


def losing(calls: Sequence[Problem]) -> list[Lost]:
    """What is lost by kernels without machine code, by what is compiled in; calls that wait for the host lose nothing."""
    target, index = find_target(GPU), shipped_index(PACKAGE)
    ids = {name for kernel in index.kernels for name in (kernel.variant_id, kernel.sibling)}
    winners = dict.fromkeys(FAMILY.completed(row.outcome.config) for row in shipped() if row.outcome.template == FAMILY.name)
    groups: dict[KernelSpec, list[Problem]] = defaultdict(list)
    for call in calls:
        one = replace(call, dtype="bf16") if call.dtype == "fp16" else call
        if call.n_q > DECODE_ROWS and FAMILY.supports(one.spec(), target) is None:
            groups[one.spec()].append(one)
    found = []
    for spec, alike in groups.items():
        moved = (FAMILY.refitted(config, spec, target) for config in winners)
        configs = list(dict.fromkeys(config for config in moved if config is not None))
        ready = np.array([variant_of(FAMILY, spec, config).id in ids for config in configs])
        pairs = [(FAMILY, config) for config in configs]
        logs = np.array([[math.inf if log is None else log for log in logs_us(pairs, call, target)] for call in alike])
        by = np.maximum(logs, LOG_HOST)
        by -= by.min(1, keepdims=True)
        now = np.minimum(by[:, ready].min(1, initial=COMPILED), COMPILED)
        found.append(Lost(calls=alike, configs=configs, by=by, now=now))
    return found


def chosen(count: int) -> Iterator[tuple[Problem, Config, float]]:
    """The calls to race, each with the config whose machine code is lacked, and what all calls lose on the mean from then on."""
    lost, taken = losing(called()), set(measured())
    calls = sum(len(one.calls) for one in lost)
    bests = [one.best(taken) for one in lost]
    for _ in range(count):
        place = max(range(len(lost)), key=lambda one: bests[one][0])
        (gain, config, call), one = bests[place], lost[place]
        if gain <= 0.0:
            return
        taken.add(one.calls[call].key(GPU))
        one.now[:] = np.minimum(one.now, one.by[:, config])
        bests[place] = one.best(taken)
        yield one.calls[call], one.configs[config], sum(float(one.now.sum()) for one in lost) / calls


def uncompiled() -> tuple[int, Counter[str]]:
    """How many calls there are, and by their specs those that have no machine code in the package."""
    dispatch.reload(alone=True)
    calls, index = called(), shipped_index(PACKAGE)
    ids = {name for kernel in index.kernels for name in (kernel.variant_id, kernel.sibling)}
    served = ((problem, dispatch.explain_problem(problem, GPU).variant_id) for problem in calls)
    return len(calls), Counter(problem.spec().label() for problem, variant_id in served if variant_id is not None and variant_id not in ids)


def of_covering(target: Target, results: Sequence[SearchResult], *, most: int, seed: int) -> Work:
    """The calls of covering.json that have no row: the config that they are listed with, what a search would try first, and what searches
    found for drawn shapes near them; dropout last."""
    known = {result.problem.key(target.slug) for result in results}
    work: Work = []
    for row in sorted(json.loads(LIST.read_text())["shapes"], key=lambda row: "dropout" in row["features"]):
        problem = Problem(**row["problem"], features=Features.from_json(row["features"]))
        if problem.key(target.slug) not in known:
            listed = [Candidate(family=FAMILY, config=FAMILY.completed(Config.of(row["config"])))] if "config" in row else []
            racing = _in_place_too if losses.ragged(problem.key(target.slug)) else partial(_racing, listed=listed)
            work.append((problem, partial(racing, problem, target, most=most, seed=seed)))
    return work


def ragged_biases() -> list[Problem]:
    """Calls with a bias whose rows the copy engine doesn't take.

    Those of N = 2001 have rows, of which flash_fwd, that reads it in place, was never tried: a search of N = 2713, D = 128 found that 1.3
    times as fast as torch, and these rows say that torch is faster (benchmarks/results/2026-11-22-h200-unprepared/seed11.json).
    """
    shapes = [(1, 16, 2001, 128), (1, 16, 2001, 64), (16, 12, 577, 64), (32, 16, 333, 128), (16, 16, 1023, 64), (8, 16, 1023, 96)]
    # With rows of an even number of elements torch was the faster: 139 us where flash_fwd took 186, at N = 2226 (seed127.json).
    shapes += [(1, 12, 2226, 112), (1, 16, 2002, 128), (8, 16, 1026, 64), (16, 12, 578, 64)]
    return [
        Problem(batch=b, heads=h, kv_heads=h, n_q=n, n_kv=n, d=d, d_v=d, dtype="bf16", features=Features(mask="bias"))
        for b, h, n, d in shapes
    ]


def of_ragged(target: Target, *, most: int, seed: int) -> Work:
    """All of `ragged_biases`, with the family that reads them in place."""
    return [(p, partial(_in_place_too, p, target, most=most, seed=seed)) for p in ragged_biases()]


def _in_place_too(problem: Problem, target: Target, *, most: int, seed: int) -> list[Candidate]:
    plain = families()["flash_fwd"]
    starts = [Candidate(family=plain, config=config) for config in plain.starts(problem.spec(), target)[:IN_PLACE]]
    return list(dict.fromkeys([*starts, *_racing(problem, target, most=most, seed=seed)]))


def _racing(problem: Problem, target: Target, *, most: int, seed: int, listed: Sequence[Candidate] = ()) -> list[Candidate]:
    """In the process that checks them: what would be served, too."""
    served = choose(problem, target, shipped(), families(), framework_serves=False)
    own = [] if served.family is None or served.config is None else [Candidate(family=served.family, config=served.config)]
    if problem.features.dropout:
        return list(dict.fromkeys([*own, *listed, *expected_first(problem, target)[:BESIDE_DROPOUT]]))
    beside = [*own, *listed, *expected_first(problem, target)[:EXPECTED], *found_near(problem, target)[:1]]
    return first_to_race(problem, target, beside, most=most + 2, seed=seed)


def expected_first(problem: Problem, target: Target) -> list[Candidate]:
    """What is expected to be the fastest of each tile, the fastest first."""
    pool, found = Candidates(SearchSpace(families(), problem, target), problem), dict[tuple[str, Any, Any], Candidate]()
    for place in np.argsort(pool.log_times, kind="stable"):
        one = pool.candidates[place]
        found.setdefault((one.family.name, one.config.get("BLOCK_M", None), one.config.get("BLOCK_N", None)), one)
    return list(found.values())


def judged(path: Path) -> list[dict[str, Any]]:
    """Of each problem of a database of races what would serve by the shipped rows of other keys, and the share of the race's best rate that
    this had; none where it didn't race. How a kernel rescales isn't told apart: most rows are older than that axis."""
    with Store.open(path, writable=False) as store:
        results = store.results()
    target, rows, found = find_target(GPU), [record for record in shipped() if record.key.direction == "fwd"], []
    for result in results:
        problem, key = result.problem, result.problem.key(GPU)
        choice = choose(problem, target, [row for row in rows if row.key != key], families(), framework_serves=False)
        times: dict[tuple[str, Config], float] = {}
        for outcome in result.outcomes:
            if outcome.measurement is not None:
                one = outcome.template, _but_for_rescaling(families()[outcome.template].completed(outcome.config))
                times[one] = min(times.get(one, math.inf), outcome.measurement.median_us)
        assert choice.family is not None and choice.config is not None and choice.record is not None, "kernels serve these"
        us = times.get((choice.family.name, _but_for_rescaling(choice.config)))
        said = {"shape": f"b{problem.batch} h{problem.heads}/{problem.kv_heads} {problem.label()}", "row": choice.record.problem.label()}
        found.append(
            {**said, "share": None if us is None else round(min(times.values()) / us, 3), "best_us": round(min(times.values()), 1)}
        )
    return found


def _but_for_rescaling(config: Config) -> Config:
    return config.replace(rescale="always") if "rescale" in config else config


def _listed(problem: Problem) -> dict[str, Any]:
    return {"problem": sizes_of(problem), "features": problem.features.as_json()}


def main() -> None:
    """Choose, print and write; or judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=110, help="shapes (default: %(default)s)")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="instead: what stand-ins would have lost in the races of this database")
    parser.add_argument("--out", type=Path, help="a folder for shares.json of --judge")
    parser.add_argument("--uncompiled", action="store_true", help="instead: how many calls have no machine code, by what is compiled in")
    options = parser.parse_args()
    if options.judge is not None:
        cases = judged(options.judge)
        shares = [case["share"] for case in cases if case["share"] is not None]
        for case in cases:
            print(f"{case['shape']:56s} {'untried' if case['share'] is None else case['share']} by {case['row']}")
        print(
            f"median {statistics.median(shares):.3f}, least {min(shares):.2f}, {sum(x >= 0.9 for x in shares)} from 0.90, of {len(shares)}"
        )
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "shares.json").write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")
        return
    if options.uncompiled:
        calls, missing = uncompiled()
        print("\n".join(f"{count} {label}" for label, count in missing.most_common()))
        print(f"{missing.total()} of {calls} calls, {missing.total() / calls:.1%}")
        return
    known = set(measured())
    rows = [_listed(problem) for problem in odd_steps() if problem.key(GPU) not in known]
    for problem, config, mean in chosen(options.count):
        print(f"b{problem.batch} h{problem.heads}/{problem.kv_heads} {problem.label()}: {config.label()}, {mean:.4f}", flush=True)
        rows.append({**_listed(problem), "config": config.as_dict(), "mean_loss": round(mean, 4)})
    LIST.write_text("\n".join(['{"shapes": [', ",\n".join(map(json.dumps, rows)), "]}"]) + "\n")


if __name__ == "__main__":
    main()
