"""Winners of searches: their text, their machine code in the user's cache, and checks of stored ones.

A search compiles each by `compile_winner` while others are searched; at its end it compiles the missing ones, and reports failures.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from flashtune.core.code import cache as kernel_cache
from flashtune.core.code.binaries import machine_arch, source_digest
from flashtune.core.gpu.target import Target, targets
from flashtune.core.problems.config import Variant
from flashtune.core.records.results import PROVIDERS, Fate, TuningRecord
from flashtune.core.system.errors import EnvironmentProblem, first_line
from flashtune.templates import family, without_kernel, written_here
from flashtune.templates.rendering import variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.children.workers import Pending, Workers
from flashtune.tuner.publish.machine_code import Order, build, build_all, can_have_binaries, pages_of, triton_version, with_files
from flashtune.tuner.replies import Checked, Failed, MachineCode


def variant_for(record: TuningRecord) -> Variant:
    """Variant of a record's config by the installed template; raises InputError for a config outside the declared space.

    Its hash, id and file name are those of the present template: where the text or an axis has changed since the record was written, they
    are not the record's.
    """
    chosen = family(record.outcome.template)
    return variant_of(chosen, record.problem.spec(), record.outcome.config)


def source_for(record: TuningRecord) -> Source:
    """Rendered source of a record."""
    variant = variant_for(record)
    return Source.of(family(variant.template), variant)


def unchecked_here(record: TuningRecord, here: Target | None) -> str:
    """The reason why a record can't be checked on the GPU `here`, or without one in Triton's interpreter, or ""."""
    if record.outcome.template in PROVIDERS:
        return f"{record.outcome.template} is no kernel of flashtune"
    if not written_here(record.problem.spec()):
        return "its functions are of another process: name them by --score-mod and --mask-mod"
    if here is None:
        return "" if family(record.outcome.template).interpretable else f"no interpreter runs {record.outcome.template}"
    measured_on = targets().get(record.key.gpu)
    return "" if measured_on is not None and measured_on.arch == here.arch else f"{record.key.gpu} is of another architecture"


def recheck(records: Sequence[TuningRecord], *, here: Target | None, seed: int) -> Iterator[tuple[TuningRecord, Checked | Failed]]:
    """Check the kernels of records that can be checked here (`unchecked_here`) against the float64 oracle: on the GPU `here`, else in
    Triton's interpreter.

    A record whose config the declared space refuses fails at `constraint`, and one whose inputs the GPU can't take fails with that reason.
    """
    with Workers(jobs=1) as workers:
        for record in records:
            yield record, _rechecked(record, workers, here, seed)


def _rechecked(record: TuningRecord, workers: Workers, here: Target | None, seed: int) -> Checked | Failed:
    if here is None:
        record = replace(record, problem=tasks.interpretable(record.problem))
    try:
        source = source_for(record)
    except ValueError as error:
        return Failed(fate=Fate.CONSTRAINT, reason=str(error))
    fixed, limits = (source, record.problem), workers.limits
    if here is None:
        return workers.submit("interpret", tasks.interpret_candidate, *fixed, seed, limit_s=limits.interpret_s).reply()
    ready = workers.prepare(record.problem, here, seed)
    if isinstance(ready, Failed):
        return ready
    return workers.submit("device", tasks.recheck_on_device, *fixed, here, seed, limit_s=3 * limits.device_s).reply()


def compile_winners(records: Iterable[TuningRecord], target: Target, *, jobs: int) -> dict[str, str]:
    """Store the machine code of these records' kernels where the cache lacks it; returns the reasons of failures by the kernel's file stem.

    Raises EnvironmentProblem where the cache can't be written.
    """
    failures = {}
    for order, built in build_all(_missing(records, target), jobs=jobs):
        if isinstance(built, str):
            failures[order.stem] = built
        else:
            kernel_cache.keep(order.text, *with_files(built, order.stem))
    return failures


def compile_winner(record: TuningRecord, target: Target) -> MachineCode | Failed:
    """Compile a record's missing kernel for `keep`, in a child process of a search, as it was raced. After a failure `compile_winners`
    tries again and reports the reason."""
    try:
        for order in _missing([record], target):
            manifest, files = with_files(build(order, fresh=False), order.stem)
            return MachineCode(text=order.text, manifest=manifest, files=files)
    except Exception as error:
        return Failed(fate=Fate.COMPILE, reason=first_line(error))
    return MachineCode()


def keep(code: MachineCode) -> None:
    """Put machine code into the user's cache; `compile_winners` reports where that isn't possible."""
    if code.manifest is not None:
        with suppress(EnvironmentProblem):
            kernel_cache.keep(code.text, code.manifest, code.files)


def _missing(records: Iterable[TuningRecord], target: Target) -> list[Order]:
    """Compile orders for the kernels of these records, and those beside them, where the cache lacks them, each once."""
    orders: dict[str, Order] = {}
    records = list(records) if can_have_binaries(target) else []
    for record in [*records, *(other for one in records for other in one.beside())]:
        # Captured tensors are a call's: kernels of functions are compiled where they are first called.
        if without_kernel(record) is not None or record.problem.features.mods:
            continue
        variant, source = variant_for(record), source_for(record)
        cached = kernel_cache.find(variant.id, machine_arch(int(target.arch)), triton_version())
        known, page = None, record.problem.features.page
        if cached is not None and cached.source_sha256 == source_digest(source.text):
            known = pages_of(cached)
        if known is None or (page and page not in known):
            before = orders[variant.id].pages if variant.id in orders else ()
            pages = tuple(sorted({page, *(known or ()), *before} - {0}))
            fixed = {"text": source.text, "stem": source.stem, "variant_id": variant.id}
            orders[variant.id] = Order(**fixed, spec=variant.spec, target=target, pages=pages)
    return list(orders.values())


class Winners:
    """Kernels that one search compiles for later calls on `target`, each variant once, within `limit_s` seconds; none unless
    `kept`."""

    def __init__(self, target: Target, limit_s: float, *, kept: bool) -> None:
        self._target, self._limit_s, self._kept = target, limit_s, kept
        self._codes: dict[str, Pending[MachineCode]] = {}
        self._won: set[str] = set()
        self._lock = threading.RLock()

    def compile_ahead(self, records: Sequence[TuningRecord], workers: Workers) -> None:
        """Start compiling likely winners."""
        with self._lock:
            for record in records if self._kept else ():
                if record.outcome.variant_id not in self._codes:
                    pending = workers.submit("compile", compile_winner, record, self._target, limit_s=self._limit_s)
                    self._codes[record.outcome.variant_id] = pending

    def won(self, record: TuningRecord, workers: Workers) -> None:
        """Compile a winner, and the kernels beside it, and store them at the end; another provider compiles its own."""
        if record.outcome.template in PROVIDERS:
            return
        records = [replace(record, fallback=None, in_graphs=None), *record.beside()]
        self.compile_ahead(records, workers)
        with self._lock:
            self._won.update(one.outcome.variant_id for one in records)

    def put(self) -> None:
        """Store the machine code of winners; other compilations are dropped."""
        for variant_id in self._codes.keys() - self._won:
            self._codes[variant_id].forget()
        for variant_id, pending in self._codes.items():
            if variant_id in self._won and isinstance(code := pending.reply(), MachineCode):
                keep(code)
