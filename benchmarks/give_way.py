"""Writes a database anew without the rows of a GPU that races on another GPU of its architecture speak against, and these into another:
`python benchmarks/give_way.py --of h200 --by h100 --axis column_unit --stay FILE --gone FILE`. Needs no GPU.

A row whose kernel's text isn't rendered any more gives way to a later one of its GPU and problem. A row gives way to the other GPU's row of
the same problem, which then stands in for it (`near_gpu`), where no text of its own is rendered any more, or where it was raced before an
axis was there and the other's race says that the axis is worth more than two GPUs of an architecture differ by: the winner has a value of
the axis that the row never tried, and the best kernel with a value that it did try took LEAST times as long or longer. Of the other GPU's
races that tried several values of the axis it prints, by pass and head size, what each value is worth beside the usual one.
"""

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

from race_twins import is_rendered

from flashtune.core.results import Outcome, SearchResult
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates import family

LEAST = 1.03


def gain_of(axis: str, row: SearchResult, other: SearchResult) -> float:
    """How many times as fast the other race's winner is as its best kernel with a value of the axis that the row tried; 1 where the winner
    has such a value itself, and where none with another raced."""
    tried = {value_of(axis, outcome) for outcome in row.outcomes}
    times = [(outcome.measurement.median_us, value_of(axis, outcome)) for outcome in other.outcomes if outcome.measurement is not None]
    known, best = [us for us, value in times if value in tried], other.best
    if not known or best is None or best.measurement is None or value_of(axis, best) in tried:
        return 1.0
    return min(known) / best.measurement.median_us


def value_of(axis: str, outcome: Outcome) -> object:
    """An outcome's value of an axis, which its config may be older than."""
    return family(outcome.template).completed(outcome.config).get(axis, None)


def worth(results: Sequence[SearchResult], axis: str) -> Iterator[str]:
    """By pass, head sizes and value: in how many races it is beside the usual value, which configs without the axis have, and how many
    times as fast its best kernel is as that one's: the median of the races, the least and the greatest."""
    found: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for result in results:
        times: dict[object, float] = {}
        for outcome in result.outcomes:
            value = value_of(axis, outcome)
            if outcome.measurement is not None and value is not None:
                times[value] = min(outcome.measurement.median_us, times.get(value, math.inf))
        kinds = {outcome.template for outcome in result.outcomes}
        usual = next((known.absent for name in kinds for known in family(name).axes if known.name == axis), None)
        for value in times.keys() - {usual} if usual in times else ():
            found[result.problem.direction, result.problem.d, result.problem.d_v, value].append(times[usual] / times[value])
    for (direction, d, d_v, value), gains in sorted(found.items(), key=str):
        spread = f"median {statistics.median(gains):.3f}, {min(gains):.3f} to {max(gains):.3f}"
        yield f"{direction} d={d} d_v={d_v} {axis}={value}: {len(gains)} races, {spread}"


def leaving(results: Sequence[SearchResult], of: str, by: str, axis: str) -> Iterator[tuple[SearchResult, str]]:
    """The rows that give way, and why."""
    others = {result.problem.key(of): result for result in results if result.gpu == by and result.best is not None}
    rendered = {result.problem.key(result.gpu) for result in results if is_rendered(result)}
    for result in results:
        other, known = others.get(result.problem.key(of)), result.problem.key(result.gpu) in rendered
        if known and not is_rendered(result):
            yield result, f"its text isn't rendered any more, that of a later row of {result.gpu} is"
        if result.gpu != of or other is None:
            continue
        gain = gain_of(axis, result, other)
        if not known:
            yield result, "its text isn't rendered any more"
        elif gain >= LEAST:
            yield result, f"another {axis} took 1/{gain:.3f} of the time"


def main() -> None:
    """Print what leaves, and write what stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", required=True, metavar="GPU", help="whose rows give way")
    parser.add_argument("--by", required=True, metavar="GPU", help="whose races speak against them")
    parser.add_argument("--axis", required=True, help="the axis that came after those rows")
    parser.add_argument("--raced-by", default="", metavar="WORD", help="only races whose command has this say what a value is worth")
    parser.add_argument("--rows", default=str(shipped_path()), help="the database (default: the shipped one)")
    parser.add_argument("--stay", required=True, help="the database to write")
    parser.add_argument("--gone", required=True, help="the database of what gives way")
    options = parser.parse_args()
    with Store.open(options.rows, writable=False) as store:
        results = store.results()
    gone = {id(result): why for result, why in leaving(results, options.of, options.by, options.axis)}
    with Store.open(options.stay, writable=True) as stay, Store.open(options.gone, writable=True) as left:
        for result in results:
            (left if id(result) in gone else stay).save(result)
            if id(result) in gone:
                print(f"{result.problem.label()}: {gone[id(result)]}")
    for line in worth([r for r in results if r.gpu == options.by and options.raced_by in r.provenance.command], options.axis):
        print(line)
    print(f"{len(gone)} of {len(results)} rows gave way")


if __name__ == "__main__":
    main()
