"""Gives shipped rows their kernels' new hashes where a change of wording left the machine code as it was: `python benchmarks/rehash.py`.

The text that a row was measured with is the file that the index of kernels_generated names for it, so this comes before `flashtune
generate`. Both texts are compiled for the row's GPU, and PTX without line numbers must be the same in every launch
(docs/decisions/0013-hash-of-the-text.md). Rows whose machine code has changed are named and left alone: they need a search. Exits with 1
where there are any.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import flashtune.kernels_generated
from flashtune.core.config import Variant
from flashtune.core.problem import Problem
from flashtune.core.results import SearchResult, TuningRecord
from flashtune.core.shipped import read_index
from flashtune.core.target import Target, find_target
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.tuner.compile import compiled_kernels
from flashtune.tuner.publish import source_for, variant_for

GENERATED = Path(flashtune.kernels_generated.__path__[0])


def code_of(text: str, problem: Problem, target: Target) -> list[tuple[str, str]]:
    """Name and PTX, without comments and what belongs to debuggers, of every kernel that a launch of `problem` takes."""
    found = [(name, kernel.asm["ptx"].split(".section")[0]) for name, kernel in compiled_kernels(text, "rehash", problem, target)]
    return [(name, " ".join(re.sub(r"^\s*\.(loc|file)\b.*$|//.*$", "", ptx, flags=re.MULTILINE).split())) for name, ptx in found]


def same_code(records: Iterable[TuningRecord], folder: Path = GENERATED) -> tuple[dict[str, Variant], list[TuningRecord]]:
    """Of records whose text is no longer what it was: new variants by old id where the code is the same, and the other records."""
    same: dict[str, Variant] = {}
    changed = []
    for record in records:
        old, new = record.outcome, variant_for(record)
        if old.variant_id in same or old.template_hash == new.template_hash:
            continue
        kept, target = read_index(folder).find(old.variant_id), find_target(record.key.gpu)
        text = source_for(record).text
        if kept and code_of((folder / kept.path).read_text(), record.problem, target) == code_of(text, record.problem, target):
            same[old.variant_id] = new
        else:
            changed.append(record)
    return same, changed


def renamed(results: Collection[SearchResult], same: dict[str, Variant]) -> list[SearchResult]:
    """The results with the ids and hashes of these new variants in place of the old ones."""
    return [
        replace(
            result,
            outcomes=tuple(
                replace(outcome, variant_id=new.id, template_hash=new.template_hash) if (new := same.get(outcome.variant_id)) else outcome
                for outcome in result.outcomes
            ),
        )
        for result in results
    ]


def main() -> None:
    """Compare, rewrite the shipped database, and say what needs a search."""
    with Store.open(shipped_path(), writable=False) as shipped:
        results, records = list(shipped.results()), list(shipped.winners())
    same, changed = same_code(records)
    if same:
        with TemporaryDirectory() as folder:
            with Store.open(Path(folder) / "renamed.sqlite", writable=True) as store:
                for result in renamed(results, same):
                    store.save(result)
                store.export(Path(folder) / "shipped.sqlite", winners_only=False)
            shipped_path().write_bytes((Path(folder) / "shipped.sqlite").read_bytes())
    print(f"{len(same)} kernels have a new hash and the machine code that they had; now `flashtune generate`")
    for record in changed:
        print(f"{record.problem.label()} needs a search: its kernel's machine code has changed, or {record.outcome.variant_id} has no file")
    if changed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
