"""The winners of a user's own search, compiled into the user's cache, so that serving them compiles nothing."""

from collections.abc import Iterable

from flashtune.core import kernel_cache
from flashtune.core.binaries import machine_arch
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target
from flashtune.templates import unservable
from flashtune.tuner.machine_code import Order, build_all, can_have_binaries, triton_version, with_files
from flashtune.tuner.publish import source_for, variant_for


def compile_winners(records: Iterable[TuningRecord], target: Target, *, jobs: int) -> dict[str, str]:
    """Keep the machine code of the kernels that these rows name, where the cache lacks it; why it failed, by the kernel's file stem.

    Raises EnvironmentProblem where the cache can't be written.
    """
    if not can_have_binaries(target):
        return {}
    orders = {}
    for record in records:
        if unservable(record) is not None:
            continue
        variant, source = variant_for(record), source_for(record)
        if kernel_cache.find(variant.id, machine_arch(int(target.arch)), triton_version()) is None:
            orders[variant.id] = Order(text=source.text, stem=source.stem, variant_id=variant.id, spec=variant.spec, target=target)
    failures = {}
    for order, built in build_all(list(orders.values()), jobs=jobs):
        if isinstance(built, str):
            failures[order.stem] = built
        else:
            kernel_cache.keep(order.text, *with_files(built, order.stem))
    return failures
