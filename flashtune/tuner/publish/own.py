"""Machine code of the winners of a user's own search, compiled into the user's cache, so that serving them compiles nothing.

A search compiles each by `compile_winner` while others are searched; at its end it compiles the missing ones, and reports failures.
"""

from collections.abc import Iterable
from contextlib import suppress

from flashtune.core import kernel_cache
from flashtune.core.binaries import machine_arch, source_digest
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.results import Fate, TuningRecord
from flashtune.core.target import Target
from flashtune.templates import unservable
from flashtune.tuner.children.tasks import one_line
from flashtune.tuner.publish.machine_code import Order, build, build_all, can_have_binaries, triton_version, with_files
from flashtune.tuner.publish.sources import source_for, variant_for
from flashtune.tuner.replies import Failed, MachineCode


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
        return Failed(fate=Fate.COMPILE, reason=one_line(error))
    return MachineCode()


def keep(code: MachineCode) -> None:
    """Put machine code into the user's cache; `compile_winners` reports where that isn't possible."""
    if code.manifest is not None:
        with suppress(EnvironmentProblem):
            kernel_cache.keep(code.text, code.manifest, code.files)


def _missing(records: Iterable[TuningRecord], target: Target) -> list[Order]:
    """Compile orders for the kernels of these records, and their fallback kernels, where the cache lacks them, each once."""
    orders: dict[str, Order] = {}
    records = list(records) if can_have_binaries(target) else []
    for record in [*records, *(fallback for record in records if (fallback := record.as_fallback()) is not None)]:
        if unservable(record) is not None:
            continue
        variant, source = variant_for(record), source_for(record)
        cached = kernel_cache.find(variant.id, machine_arch(int(target.arch)), triton_version())
        if cached is None or cached.source_sha256 != source_digest(source.text):
            orders[variant.id] = Order(text=source.text, stem=source.stem, variant_id=variant.id, spec=variant.spec, target=target)
    return list(orders.values())
