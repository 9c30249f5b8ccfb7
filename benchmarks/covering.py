"""Which shapes' rows would bring most random calls nearer to a row, without a GPU: `python benchmarks/covering.py`.

Draws calls as unprepared.py does, adds those of models (`tune.wanting`), and looks how far each is from the nearest row, by the distance by
which stand-ins are chosen (flashtune.dispatch.policy). Of a lattice of shapes (head sizes, features, lengths, heads) the one is chosen
that takes most off these distances, then the next, as if it had a row. Writes covering.json beside this file, which
`race_again.py --covering` races, as many as `--budget-s` leaves time for. `--worst 20` prints the calls farthest from any row instead, and
`--uncompiled` how many of the calls Triton would have to compile.

Dropout has a few shapes for each head size: to check one takes compilers a minute and a half.
"""

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from forward_cells import TOKENS
from numpy.typing import NDArray
from race_work import Work, first_to_race, found_near
from searches import shipped
from tune import wanting
from unprepared import FEATURES, HEAD_SIZES, drawn, guess_us

from flashtune import dispatch
from flashtune.core.config import Config
from flashtune.core.problem import Features, Problem, ProblemKey
from flashtune.core.results import SearchResult
from flashtune.core.shipped_kernels import PACKAGE, shipped_index
from flashtune.core.target import Target, find_target
from flashtune.db.store import Store
from flashtune.dispatch.policy import choose, losses
from flashtune.templates import families
from flashtune.tuner.propose.candidates import Candidates
from flashtune.tuner.propose.space import Candidate, SearchSpace

LIST = Path(__file__).with_suffix(".json")
GPU = "h200"

SEED, DRAWN = 1002, 1200
"""Of the calls; no run of unprepared.py has this seed."""

FAR = 12.0
"""What lies further is no worse served than this: left-out rows lose 1.8 % on the mean by all others, 2.5 % by those at least 6 away, and
3.4, 3.1 and 3.6 % by those at least 10, 15 and 20 away."""

IN_PLACE = 4
"""So many configs of flash_fwd race for a bias that isn't aligned."""

EXPECTED = 3
"""So many tiles race with the config that is expected to be the fastest of each."""

LONGEST_US = 1500.0
"""A row of more is dear to race, by unprepared's guess."""


def lattice() -> Iterator[Problem]:
    """Shapes that may be chosen, in bf16."""
    kinds = [Features(**words) for words in {json.dumps(words): words for words in FEATURES}.values() if "dropout" not in words]
    for d, d_v in HEAD_SIZES:

        def shape(batch: int, heads: int, sharing: int, n_q: int, n_kv: int, features: Features, d: int = d, d_v: int = d_v) -> Problem:
            kv_heads = heads // sharing
            return Problem(batch=batch, heads=heads, kv_heads=kv_heads, n_q=n_q, n_kv=n_kv, d=d, d_v=d_v, dtype="bf16", features=features)

        for features in kinds:
            for n in (256, 512, 1024, 2048, 4096, 8192):
                for tokens in (TOKENS, TOKENS // 4) if n >= 1024 else (TOKENS,):
                    yield from (shape(max(1, tokens // n), 16, sharing, n, n, features) for sharing in (1, 4))
                if n >= 1024:
                    yield shape(1, 8, 1, n, n, features)
            below = Features.from_json({**features.as_json(), "alignment": "bottom_right"}) if features.causal else features
            yield from (shape(16, 16, 1, n_q, n_kv, below) for n_q, n_kv in ((256, 512), (512, 2048), (256, 4096)))
        for n in (256, 512, 1024, 2048, 4096, 16384):
            yield from (shape(batch, 32, sharing, 1, n, Features()) for batch, sharing in ((64, 1), (64, 4), (8, 1), (8, 8)))


def ill_served() -> Iterator[Problem]:
    """Shapes near those, of as many tiles, whose stand-ins took 7 % longer than a search's own best, or more, in runs of unprepared.py
    (seed59.json, seed83.json, seed101.json, seed127.json and seed211.json in benchmarks/results/2026-11-23-h200-unprepared)."""
    sinks, mask, window = Features(causal=True, sinks=True), Features(mask="bool"), Features(causal=True, window=(1024, 0))
    causal, below = Features(causal=True), Features(causal=True, alignment="bottom_right")
    capped, capped_below = replace(causal, softcap=True), replace(below, softcap=True)
    for batch, heads, kv_heads, n_q, n_kv, d, d_v, features in (
        (4, 32, 32, 1, 16384, 160, 160, Features()),
        (16, 64, 8, 1, 4096, 192, 192, Features()),
        (32, 32, 16, 1, 512, 192, 192, Features()),
        (8, 32, 32, 1, 16384, 192, 192, Features()),
        (1, 16, 16, 8192, 8192, 128, 128, sinks),
        (4, 16, 16, 4096, 4096, 128, 128, sinks),
        (2, 32, 8, 4096, 4096, 128, 128, sinks),
        (32, 32, 32, 512, 512, 40, 40, Features(causal=True)),
        (16, 8, 8, 1536, 1536, 192, 192, Features()),
        (8, 8, 4, 2048, 2048, 192, 192, Features()),
        (16, 32, 4, 3072, 3072, 192, 128, window),
        (16, 32, 32, 256, 256, 96, 96, mask),
        (4, 8, 1, 1024, 1024, 96, 96, Features()),
        (1, 4, 4, 4096, 4096, 96, 96, Features(causal=True, alibi=True)),
        (8, 12, 6, 2816, 2816, 160, 160, Features(causal=True)),
        (4, 32, 8, 8192, 8192, 40, 40, Features(causal=True)),
        (1, 8, 8, 3072, 3072, 192, 192, causal),
        (64, 32, 32, 128, 128, 96, 96, causal),
        (8, 4, 4, 768, 768, 192, 192, Features()),
        (2, 24, 24, 768, 768, 80, 80, mask),
        (16, 12, 3, 512, 8192, 40, 40, below),
        (1, 4, 4, 4608, 4608, 72, 72, Features()),
        (2, 12, 12, 2304, 2304, 96, 96, causal),
        (8, 24, 24, 512, 512, 192, 192, Features()),
        (4, 16, 4, 256, 1280, 192, 128, below),
        (64, 24, 24, 128, 144, 72, 72, below),
        (16, 4, 4, 192, 8192, 256, 256, capped_below),
        (16, 16, 16, 384, 384, 192, 192, capped),
        (4, 8, 8, 4096, 4096, 192, 192, replace(causal, window=(300, 0))),
        (2, 20, 20, 4352, 4352, 96, 96, Features()),
        (1, 20, 20, 1024, 12288, 112, 112, below),
        (2, 16, 16, 4096, 4096, 160, 160, mask),
        (1, 12, 12, 2432, 2432, 128, 128, Features()),
        (1, 8, 8, 2816, 2816, 128, 128, causal),
        (1, 16, 16, 3328, 3328, 64, 64, Features()),
        (1, 20, 20, 2560, 2560, 64, 64, causal),
        (1, 16, 16, 2560, 2560, 80, 80, Features()),
        (1, 24, 24, 1536, 1536, 112, 112, causal),
        (64, 8, 8, 326, 512, 40, 40, Features()),
        (1, 4, 4, 10240, 14336, 128, 128, below),
        (1, 4, 4, 8192, 8192, 128, 128, causal),
        (12, 4, 1, 4096, 4096, 72, 72, causal),
        (64, 20, 20, 184, 184, 160, 160, Features()),
        (99, 4, 4, 644, 644, 160, 160, Features()),
        (24, 24, 24, 1, 320, 128, 128, Features()),
        (56, 32, 4, 288, 288, 128, 128, causal),
        (40, 8, 8, 168, 168, 192, 128, causal),
        (20, 8, 8, 480, 480, 96, 96, Features(mask="bias")),
        (1, 24, 3, 2048, 2048, 128, 128, causal),
        (16, 40, 10, 320, 320, 72, 72, replace(causal, window=(300, 0))),
        (64, 64, 64, 152, 256, 96, 96, capped_below),
        (48, 24, 3, 432, 768, 192, 192, capped_below),
        (28, 16, 16, 336, 336, 96, 96, replace(causal, dropout=True)),
        (80, 16, 16, 384, 384, 96, 96, replace(causal, alibi=True)),
        (60, 4, 4, 2880, 2880, 80, 80, capped),
        (16, 4, 4, 960, 960, 128, 128, replace(causal, window=(300, 0))),
        (2, 40, 40, 920, 952, 112, 112, replace(below, alibi=True)),
        (9, 24, 24, 1984, 1984, 256, 256, Features()),
        (2, 4, 4, 5344, 5344, 112, 112, replace(causal, alibi=True)),
        (1, 64, 64, 1088, 1088, 192, 192, Features()),
    ):
        yield Problem(batch=batch, heads=heads, kv_heads=kv_heads, n_q=n_q, n_kv=n_kv, d=d, d_v=d_v, dtype="bf16", features=features)


def between_tiles() -> Iterator[Problem]:
    """Lengths that leave tiles of 128 and 192 rows part empty, of many short sequences, and calls of medium length with few tiles for each
    multiprocessor: rows of powers of two say little of which tiles suit these."""
    for d, d_v in HEAD_SIZES:
        for features in (Features(), Features(causal=True)):
            for batch, heads, n in ((64, 16, 160), (48, 16, 320), (4, 16, 896)):
                yield Problem(batch=batch, heads=heads, kv_heads=heads, n_q=n, n_kv=n, d=d, d_v=d_v, dtype="bf16", features=features)


def dropped() -> Iterator[Problem]:
    """Dropout at every head size, so that machine code of it ships."""
    features = Features(causal=True, dropout=True)
    for d, d_v in HEAD_SIZES:
        for batch, n in ((4, 2048), (32, 512)):
            yield Problem(batch=batch, heads=16, kv_heads=16, n_q=n, n_kv=n, d=d, d_v=d_v, dtype="bf16", features=features)


def distances(ours: Sequence[ProblemKey], theirs: Sequence[ProblemKey], far: float = FAR) -> NDArray[np.float64]:
    """How far a row of each of `theirs` is from each of `ours`, as `Pool.near` counts it."""
    kinds, others = (list(dict.fromkeys(map(losses.kind_of, keys))) for keys in (ours, theirs))
    apart = np.array([[losses.kinds_apart(b, a) if losses.comparable(b, a) else np.inf for b in others] for a in kinds])
    found = apart[np.ix_([kinds.index(losses.kind_of(a)) for a in ours], [others.index(losses.kind_of(b)) for b in theirs])]
    for place in range(4):
        mine, other = (np.array([losses.places(key)[place] for key in keys]) for keys in (ours, theirs))
        found += np.abs(mine[:, None] - other[None, :])
    ragged = np.array([losses.ragged(a) for a in ours])[:, None] != np.array([losses.ragged(b) for b in theirs])[None, :]
    return np.asarray(np.minimum(found + losses.RAGGED_BIAS * ragged, far))


def measured() -> list[ProblemKey]:
    """The keys that have a row."""
    return list({record.key for record in shipped() if record.key.gpu == GPU and record.key.direction == "fwd"})


def called() -> list[Problem]:
    """Calls without a row: drawn ones, and those of models."""
    return [cell.problem for cell in drawn(DRAWN, seed=SEED, gpu=GPU, known=measured())] + [problem for problem, _ in wanting()]


def farthest(count: int) -> list[tuple[Problem, float]]:
    """The calls that are farthest from any row, with how far."""
    calls = called()
    near = distances([problem.key(GPU) for problem in calls], measured(), far=math.inf).min(1)
    return [(calls[place], float(near[place])) for place in np.argsort(-near)[:count]]


def uncompiled() -> tuple[int, Counter[str]]:
    """How many calls there are, and by their specs those that have no machine code in the package."""
    dispatch.reload(alone=True)
    calls, index = called(), shipped_index(PACKAGE)
    ids = {name for kernel in index.kernels for name in (kernel.variant_id, kernel.sibling)}
    served = ((problem, dispatch.explain_problem(problem, GPU).variant_id) for problem in calls)
    return len(calls), Counter(problem.spec().label() for problem, variant_id in served if variant_id is not None and variant_id not in ids)


def chosen(count: int) -> list[tuple[Problem, float]]:
    """Ill-served shapes, those between tiles and those with dropout, then those that help most, drawn calls among them, the first alone
    most of all, each with the mean distance of the calls from then on."""
    known, calls = measured(), [problem.key(GPU) for problem in called()]
    found = [(problem, math.nan) for problem in (*ill_served(), *between_tiles(), *dropped()) if problem.key(GPU) not in known]
    known += [problem.key(GPU) for problem, _ in found]
    # A window that hides nothing is none to a call.
    drawn_too = [replace(problem, dtype="bf16") for problem in called() if not problem.features.dropout]
    shapes = [problem for problem in (*lattice(), *drawn_too) if problem.seen() == problem]
    shapes = [problem for problem in shapes if guess_us(problem) < LONGEST_US and problem.key(GPU) not in known]
    near, to = distances(calls, known).min(1), distances(calls, [problem.key(GPU) for problem in shapes])
    for _ in range(count - len(found)):
        best = int(np.maximum(near[:, None] - to, 0.0).sum(0).argmax())
        near = np.minimum(near, to[:, best])
        found.append((shapes[best], float(near.mean())))
    return found


def of_covering(target: Target, results: Sequence[SearchResult], *, most: int, seed: int) -> Work:
    """The shapes of covering.json that have no row: what a search would try first, and what searches found for drawn shapes near them."""
    known = {result.problem.key(target.slug) for result in results}
    listed = [Problem(**row["problem"], features=Features.from_json(row["features"])) for row in json.loads(LIST.read_text())["shapes"]]
    wanted = [problem for problem in listed if problem.key(target.slug) not in known]
    racing = {p: _in_place_too if losses.ragged(p.key(target.slug)) else _racing for p in wanted}
    return [(p, partial(racing[p], p, target, most=most, seed=seed)) for p in wanted]


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


def _racing(problem: Problem, target: Target, *, most: int, seed: int) -> list[Candidate]:
    """In the process that checks them: what would be served, too."""
    served = choose(problem, target, shipped(), families(), framework_serves=False)
    own = [] if served.family is None or served.config is None else [Candidate(family=served.family, config=served.config)]
    beside = [*own, *expected_first(problem, target)[:EXPECTED], *found_near(problem, target)[:1]]
    return first_to_race(problem, target, beside, most=most + 1, seed=seed)


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


def main() -> None:
    """Choose, print and write; or judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=110, help="shapes (default: %(default)s)")
    parser.add_argument("--worst", type=int, metavar="K", help="instead: print the K calls that are farthest from any row")
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
    if options.worst is not None:
        for problem, apart in farthest(options.worst):
            print(f"b{problem.batch} h{problem.heads}/{problem.kv_heads} {problem.label()}: {apart:.1f}")
        return
    rows = []
    for problem, mean in chosen(options.count):
        print(f"b{problem.batch} h{problem.heads}/{problem.kv_heads} {problem.label()}: {mean:.2f}")
        sizes = {name: getattr(problem, name) for name in ("batch", "heads", "kv_heads", "n_q", "n_kv", "d", "d_v", "dtype")}
        rows.append(
            {"problem": sizes, "features": problem.features.as_json(), "mean_distance": None if math.isnan(mean) else round(mean, 2)}
        )
    LIST.write_text("\n".join(['{"shapes": [', ",\n".join(map(json.dumps, rows)), "]}"]) + "\n")


if __name__ == "__main__":
    main()
