"""`flashtune verify --requalify`: records of this GPU are timed again, and what is found takes their places."""

import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashtune.cli.console import console, messages, print_json
from flashtune.core.system.errors import EnvironmentProblem, NoKernelFound
from flashtune.core.system.words import counted

if TYPE_CHECKING:
    from flashtune.core.problems.problem import ProblemKey
    from flashtune.core.records.results import SearchResult
    from flashtune.db.store import KeyFilter
    from flashtune.tuner.search.requalify import Requalified


def run_requalify(
    location: str | None, filters: "KeyFilter", *, most: int | None, budget_s: float | None, seed: int, as_json: bool
) -> None:
    """Time up to `most` records again, the worst suspects first, save what is found, and print a line to each; none is begun after
    `budget_s` seconds."""
    from flashtune.bench import time_calls
    from flashtune.core.system.secrets import command_line
    from flashtune.db.library import Library, overlay_path
    from flashtune.db.store import Store
    from flashtune.tuner.children.workers import Workers
    from flashtune.tuner.machine import cores, local_gpu, provenance
    from flashtune.tuner.search.evaluation import MeasuredEvaluation
    from flashtune.tuner.search.requalify import RACE_S, VERDICTS, elsewhere, requalified, suspects, worst_first

    began = time.monotonic()
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise EnvironmentProblem("verify --requalify times kernels and found no GPU that flashtune knows: run it on the records' own GPU")
    target = gpu.target
    filters = {**filters, "gpu": target.slug}
    library = Library.of(location) if location else Library.default()
    here = provenance(command=command_line(["flashtune", "verify", "--requalify"]), seed=seed, measured=True, target=target)
    records = [record for record in library.records(**filters) if record.outcome.source == "measured"]
    if not records:
        raise NoKernelFound(f"no measured records of {target.slug} match, so nothing was timed: loosen the filters, or search first")
    chosen = worst_first(records, here)[:most]
    away = sum(bool(elsewhere(record, here)) for record in chosen)
    doubted = sum(bool(suspects(record)) for record in chosen)
    messages().print(
        f"timing {counted(len(chosen), 'record')} again on {gpu.name}; {away} from elsewhere (other torch, Triton, driver or GPU), "
        f"{doubted} with verdicts on other versions of a library"
    )
    found: list[Requalified] = []
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(location or overlay_path(), writable=True))
        workers = stack.enter_context(Workers(jobs=max(1, cores() - 1)))
        fixed: dict[str, Any] = {"target": target, "workers": workers, "seed": seed}
        fixed |= {"measure_s": 0.03, "race_s": RACE_S, "calls": time_calls}

        def enough() -> bool:
            return budget_s is not None and time.monotonic() - began > budget_s

        timings = requalified(
            chosen, _results(location, filters), target, here, lambda problem: MeasuredEvaluation(problem=problem, **fixed), enough
        )
        for count, one in enumerate(timings, start=1):
            found.append(one)
            if one.result is not None:
                # A failed kernel's record is kept, so that a later version or driver may find it right again.
                store.save(one.result, replacing=one.result.best is not None)
            messages().print(f"[{count}/{len(chosen)}] {line(one)}")
    left = len(chosen) - len(found)
    if as_json:
        print_json({"rows": [row(one) for one in found], "left": left})
        return
    counts = {word: sum(one.verdict == word for one in found) for word in VERDICTS} | ({"left by --budget": left} if left else {})
    console().print(", ".join(f"{number} {word}" for word, number in counts.items()))


def _results(location: str | None, filters: "KeyFilter") -> "dict[ProblemKey, list[SearchResult]]":
    """Results of each key in a database, or in the user's own and the shipped one."""
    from flashtune.db.inspection import MissingDatabaseError
    from flashtune.db.library import overlay_path, shipped_path
    from flashtune.db.store import Store

    found: dict[ProblemKey, list[SearchResult]] = {}
    places: list[str | Path] = [location] if location else [overlay_path(), shipped_path()]
    for place in places:
        # One's own database may not be there yet.
        with suppress(MissingDatabaseError), Store.open(place, writable=False) as known:
            for result in known.results(**filters):
                found.setdefault(result.problem.key(result.gpu), []).append(result)
    return found


def line(one: "Requalified") -> str:
    """A record's verdict in a line: its ratios to PyTorch's time as stored and as found."""
    ratios = " -> ".join("?" if ratio is None else f"{1 / ratio:.2f}x" for ratio in (one.was, one.found))
    said = f"{one.record.key.gpu} {one.record.problem.label()} {one.record.outcome.template}: {one.verdict}, {ratios} PyTorch"
    return f"{said} ({one.reason})" if one.reason else said


def row(one: "Requalified") -> dict[str, Any]:
    """A record's verdict as JSON; ratios are of times to PyTorch's."""
    return {
        "gpu": one.record.key.gpu,
        "problem": one.record.problem.label(),
        "template": one.record.outcome.template,
        "variant": one.record.outcome.variant_id,
        "verdict": one.verdict,
        "stored_ratio": one.was,
        "found_ratio": one.found,
        "best_variant": one.result.best.variant_id if one.result is not None and one.result.best is not None else None,
        "reason": one.reason,
    }
