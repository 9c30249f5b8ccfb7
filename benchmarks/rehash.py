"""Gives shipped rows their kernels' new hashes where a change of wording left the machine code as it was: `python benchmarks/rehash.py`.

What a row was measured with is the machine code that the package has of its variant, so this comes before `flashtune generate`. Today's
text is compiled for the row's GPU, and every section of its code but names must be the same (docs/decisions/0013-hash-of-the-text.md).
With `--generated FOLDER`, into which today's texts were generated beforehand, nothing is compiled whose machine code is there. With
`--same-work`, code is also taken for the same where only its bookkeeping differs: equal registers, spills and shared memory, and as many
instructions of every kind that computes, moves or waits for tiles; such kernels are named, for a race. Rows whose machine code has changed
are named and left alone: they need a search. Exits with 1 where there are any.

With `--raced FILE` results of race_again.py take the place of those rows of the same problems whose winners' text has changed, or has
a successor, before that:

    python benchmarks/rehash.py --raced settled.sqlite
"""

import argparse
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import flashtune.kernels_generated
from flashtune.core.config import Variant
from flashtune.core.kernel_archive import Archive
from flashtune.core.kernel_index import read_index
from flashtune.core.results import Outcome, SearchResult, TuningRecord
from flashtune.core.target import find_target
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.templates.rendering import variant_of
from flashtune.tuner.children.compile import cuobjdump
from flashtune.tuner.publish.generated import manifest_in, present_archive
from flashtune.tuner.publish.machine_code import Built, Order, build
from flashtune.tuner.publish.sources import source_for, variant_for

GENERATED = Path(flashtune.kernels_generated.__path__[0])


BOOKKEEPING = re.compile(
    r"NOP|U?MOV\w*|R2UR|S2U?R|U?LDC|U?[IL]?ADD3?\w*|VIADD\w*|VIMNMX\w*|IMNMX|U?IADD3\w*|U?IMAD\w*|U?LEA|U?SHF|U?LOP3|U?SEL|U?I?SETP|U?PLOP3|P2R|LDL"
    r"|IABS|I2F\w*|F2I\w*|CS2R|BRA|BSSY|BSYNC|WARPSYNC|VOTEU|ELECT|FENCE|EXIT|RET|CALL"
)
"""Instructions on addresses, indices and predicates, of which the compiler takes a few more or less for the same work."""


def code_of(built: Built) -> object:
    """Every binary of a kernel, without names."""
    pairs = zip(built.manifest.binaries, built.codes, strict=True)
    return [(one.specialization, one.threads, one.shared_bytes, sections_of(code, one.kernel)) for one, code in pairs]


def work_of(built: Built) -> object:
    """Registers and stack of every binary, its threads and shared memory, and how many instructions it has of each kind but BOOKKEEPING."""
    found = []
    for one, code in zip(built.manifest.binaries, built.codes, strict=True):
        lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)", cuobjdump(code, "-sass"))
        usage = re.findall(r"(?:REG|STACK|LOCAL):\d+", cuobjdump(code, "-res-usage"))
        found.append((one.threads, one.shared_bytes, usage, Counter(name for name in lines if not BOOKKEEPING.fullmatch(name))))
    return found


def sections_of(cubin: bytes, name: str) -> Counter[tuple[bytes, bytes]]:
    """Title and content of an ELF's sections, without `name` and without the tables that only name things."""
    (start,), (size, count, titles) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, start + size * index) for index in range(count)]
    found: Counter[tuple[bytes, bytes]] = Counter()
    for place, kind, _, _, offset, length in headers:
        if kind in (2, 3):
            continue
        first = headers[titles][4] + place
        title = cubin[first : cubin.index(0, first)].replace(name.encode(), b"")
        # Kind 8 takes no room in the file.
        found[title, b"" if kind == 8 else cubin[offset : offset + length]] += 1
    return found


@cache
def archive_in(folder: Path, arch: str) -> Archive | None:
    """The machine code of a folder of generated kernels for an architecture."""
    return present_archive(folder, read_index(folder), arch)


def compiled_in(folder: Path, variant_id: str, arch: str) -> Built | None:
    """The machine code that a folder of generated kernels has of a variant; None where there is none."""
    manifest = manifest_in(archive_in(folder, arch), read_index(folder), variant_id, arch)
    return None if manifest is None else Built(manifest=manifest, codes=tuple(map(manifest.code, manifest.binaries)))


def compiled(record: TuningRecord) -> Built:
    """The machine code of a record's kernel, as today's template and compiler make it."""
    source, target = source_for(record), find_target(record.key.gpu)
    return build(Order(text=source.text, stem=source.stem, variant_id=source.variant_id, spec=record.problem.spec(), target=target))


def same_code(
    records: Iterable[TuningRecord], folder: Path = GENERATED, measure: Callable[[Built], object] = code_of, generated: Path | None = None
) -> tuple[dict[str, Variant], list[TuningRecord]]:
    """Of records whose text is no longer what it was: new variants by old id where `measure` finds the same, and the other records.

    What `generated` has machine code of isn't compiled.
    """
    same: dict[str, Variant] = {}
    changed = []
    for record in records:
        old, new = record.outcome, variant_for(record)
        if old.variant_id in same or old.template_hash == new.template_hash:
            continue
        arch = find_target(record.key.gpu).arch
        kept = compiled_in(folder, old.variant_id, arch)
        ready = None if kept is None or generated is None else compiled_in(generated, new.id, arch)
        if kept is not None and measure(kept) == measure(ready or compiled(record)):
            same[old.variant_id] = new
        else:
            changed.append(record)
    return same, changed


def replaced(results: Collection[SearchResult], raced: Iterable[SearchResult]) -> list[SearchResult]:
    """The results with raced ones in the place of those of the same key whose winner isn't what a search of today would measure."""
    newer = {result.problem.key(result.gpu): result for result in raced}
    kept = [result for result in results if result.problem.key(result.gpu) not in newer or is_current(result)]
    return kept + list(newer.values())


def is_current(result: SearchResult) -> bool:
    """Whether a result's winner was measured with the text that its template makes today, and has no successor; True where it has none."""
    best = result.best
    if best is None:
        return True
    kind = family(best.template)
    config = kind.completed(best.config)
    if kind.successor(config) != config:
        return False
    return best.template_hash == variant_of(kind, result.problem.spec(), config).template_hash


def winners_of(results: Collection[SearchResult]) -> list[TuningRecord]:
    """The records of results as they would be read again."""
    with TemporaryDirectory() as folder, Store.open(Path(folder) / "results.sqlite", writable=True) as store:
        for result in results:
            store.save(result)
        return store.winners()


def renamed(results: Collection[SearchResult], same: dict[str, Variant]) -> list[SearchResult]:
    """The results with the ids and hashes of these new variants in place of the old ones; axes that have other names today are renamed."""

    def written(outcome: Outcome) -> Outcome:
        new = same.get(outcome.variant_id)
        if new is None:
            return outcome
        former = any(axis.formerly in outcome.config for axis in family(new.template).axes if axis.formerly is not None)
        config = new.config if former else outcome.config
        return replace(outcome, variant_id=new.id, template_hash=new.template_hash, config=config)

    return [replace(result, outcomes=tuple(map(written, result.outcomes))) for result in results]


def main() -> None:
    """Compare, rewrite the shipped database, and say what needs a search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--same-work", action="store_true", help="take code for the same where only its bookkeeping differs")
    parser.add_argument("--raced", metavar="FILE", help="results of race_again.py that take the place of rows with another text")
    parser.add_argument("--generated", type=Path, metavar="FOLDER", help="kernels of today's texts, whose machine code is compared first")
    options = parser.parse_args()
    with Store.open(shipped_path(), writable=False) as shipped:
        results, records = list(shipped.results()), list(shipped.winners())
    if options.raced:
        with Store.open(options.raced, writable=False) as store:
            raced = store.results()
        results = replaced(results, raced)
        records = winners_of(results)
        print(f"{len(raced)} results of {options.raced} are among {len(results)}")
    # A row's twin serves beside it, by a file of its own.
    records += [twin for record in records if (twin := record.as_twin()) is not None]
    same, changed = same_code(records, generated=options.generated)
    if options.same_work:
        alike, changed = same_code(changed, measure=work_of)
        for old, new in alike.items():
            print(f"{new.spec.label()} {new.config.label()}, once {old}: other bookkeeping, worth a race", flush=True)
        same |= alike
    if same or options.raced:
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
