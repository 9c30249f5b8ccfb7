"""Records of shapes that no kernel takes, from a file of `flashtune referee`, into `--db FILE`: who is right, with times and versions.

The referee times whole calls of all in turns, as a search's closing does. Shapes that kernels take are left to searches.
"""

from pathlib import Path

from benchmarks.shared.environment import argument_parser
from flashtune.bench.rulings import Ruled, Ruling, read
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import unfit_heads
from flashtune.core.records.results import PROVIDERS, Baseline, Fate, Outcome, Provenance, SearchResult
from flashtune.core.system.files import read_json
from flashtune.db.store import Store

FATES = {"right": Fate.CORRECT, "wrong": Fate.CORRECTNESS}


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
    """Store the shapes of a file whose head sizes no kernel takes."""
    parser = argument_parser(__doc__)
    parser.add_argument("file", type=Path, help="what `flashtune referee --out` wrote")
    parser.add_argument("--db", required=True, help="the database that gets the records")
    parser.add_argument("--backend", default="efficient", help="PyTorch's own choice at these sizes (default: %(default)s)")
    given = parser.parse_args()
    document = read_json(given.file, 1 << 24)
    made = Provenance(**document["provenance"])
    with Store.open(given.db, writable=True) as store:
        for row in read(given.file, document["gpu"]):
            if unfit_heads(row.problem.d, row.problem.d_v) is not None:
                store.save(result_of(row, document["gpu"], made, given.backend))
                print(row.title)
