"""Figures of a file of `flashtune referee`: verdicts by provider, and how fast whole calls of ours are beside the fastest of all others.

With `--db FILE` the shapes whose head sizes no kernel takes become records there: who is right, with times and versions. The referee times
whole calls of all in turns, as a search's closing does. Shapes that kernels take are left to searches.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared.environment import argument_parser
from flashtune.bench.rulings import VERDICTS, Ruled, Ruling, read
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import DECODE_ROWS, unfit_heads
from flashtune.core.records.results import PROVIDERS, Baseline, Fate, Outcome, Provenance, SearchResult
from flashtune.core.system.files import read_json
from flashtune.db.store import Store
from flashtune.dispatch.policy.offers import OURS

FATES = {"right": Fate.CORRECT, "wrong": Fate.CORRECTNESS}


def large(row: Ruled) -> bool:
    """True for head sizes that no kernel takes."""
    return unfit_heads(row.problem.d, row.problem.d_v) is not None


def kind_of(row: Ruled) -> str:
    """Kind of call that a shape is of."""
    if large(row):
        return f"D = {row.problem.d}, {row.problem.direction}"
    return "training steps" if row.problem.direction == "bwd" else "decoding" if row.problem.n_q <= DECODE_ROWS else "forward"


def gains(rows: Sequence[Ruled]) -> dict[str, list[float]]:
    """Times of the fastest of all others over ours, by kind, where both are right; of large heads PyTorch's over the fastest one's."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        times = {name: one.time.median_us for name, one in row.rulings.items() if one.time is not None}
        ours, others = times.pop(OURS, None), times
        if large(row) and "torch" in others:
            found[kind_of(row)].append(others["torch"] / min(others.values()))
        elif ours is not None and others:
            found[kind_of(row)].append(min(others.values()) / ours)
    return dict(found)


def show(rows: Sequence[Ruled]) -> None:
    """Print the figures."""
    counts = Counter((name, one.verdict) for row in rows for name, one in row.rulings.items())
    print(f"{len(rows)} shapes, {counts.total()} rulings, ours the fastest in {sum(row.fastest == OURS for row in rows)}")
    for name in dict.fromkeys(name for name, _ in counts):
        print(f"  {name}: {', '.join(f'{counts[name, verdict]} {verdict}' for verdict in VERDICTS if counts[name, verdict])}")
    for kind, found in gains(rows).items():
        print(f"  {kind}: {statistics.geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f}), {len(found)} shapes")


def _outcome(row: Ruled, name: str, ruling: Ruling) -> Outcome:
    variant = Variant(template=name, spec=row.problem.spec(), config=Config.of())
    return Outcome.of_provider(
        *(name, variant.id, ruling.time),
        versions=Config.of(dict(ruling.versions)),
        fate=FATES[ruling.verdict],
        reason=ruling.reason,
        max_error=ruling.error,
    )


def result_of(row: Ruled, gpu: str, provenance: Provenance, backend: str) -> SearchResult:
    """The result of a search of a shape that only others take; `backend` is PyTorch's choice there."""
    torchs = row.rulings["torch"].time
    assert torchs is not None, "PyTorch takes every shape"
    given = [(name, one) for name, one in row.rulings.items() if name in PROVIDERS and one.verdict in FATES and name != backend]
    return SearchResult(
        gpu=gpu,
        problem=row.problem,
        outcomes=tuple(_outcome(row, name, one) for name, one in given),
        provenance=provenance,
        baseline=Baseline(backend=backend, measurement=torchs, call_us=torchs.median_us),
    )


def main() -> None:
    """Print a file's figures, or store its shapes whose head sizes no kernel takes."""
    parser = argument_parser(__doc__)
    parser.add_argument("file", type=Path, help="what `flashtune referee --out` wrote")
    parser.add_argument("--db", help="a database that gets records of the head sizes that no kernel takes")
    parser.add_argument("--backend", default="efficient", help="PyTorch's own choice at these sizes (default: %(default)s)")
    given = parser.parse_args()
    document = read_json(given.file, 1 << 24)
    rows = read(given.file, document["gpu"])
    if given.db is None:
        show(rows)
        return
    made = Provenance(**document["provenance"])
    with Store.open(given.db, writable=True) as store:
        for row in filter(large, rows):
            store.save(result_of(row, document["gpu"], made, given.backend))
            print(row.title)
