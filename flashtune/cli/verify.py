"""`flashtune verify`: check of every record of a database for correctness, on this machine."""

from typing import TYPE_CHECKING

import click

from flashtune.cli.console import console, messages, print_json
from flashtune.cli.options import db_option, json_option, record_filters
from flashtune.core.errors import EnvironmentProblem, NoKernelFound
from flashtune.core.results import Fate
from flashtune.core.words import counted

if TYPE_CHECKING:
    from flashtune.db.store import KeyFilter


@click.command()
@db_option
@record_filters("gpu_name", "d")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random inputs.")
@json_option
def verify(*, location: str | None, filters: "KeyFilter", seed: int, as_json: bool) -> None:
    """Check every record's kernel against the float64 oracle: on this GPU, or in Triton's interpreter where there is none.

    Exit code 1 when a record is wrong, 4 when none could be checked here, 5 when there is none. Records that can't be checked here
    (another architecture's, or Gluon kernels without a GPU) are counted as skipped.
    """
    from flashtune.db.library import Library
    from flashtune.templates import BITS, unservable
    from flashtune.tuner.machine import local_gpu, require_triton
    from flashtune.tuner.publish.winners import recheck
    from flashtune.tuner.replies import Failed

    library = Library.of(location) if location else Library.default()
    records = library.records(passed_over=unservable, bits=BITS, **filters)
    require_triton()
    gpu = local_gpu()
    rows = []
    counts = {"correct": 0, "wrong": 0, "skipped": 0}
    for record, reply in recheck(records, here=gpu.target if gpu else None, seed=seed):
        failed = reply if isinstance(reply, Failed) else None
        fate = "skipped" if reply is None else "wrong" if failed else "correct"
        counts[fate] += 1
        rows.append(
            {
                "gpu": record.key.gpu,
                "problem": record.problem.label(),
                "template": record.outcome.template,
                "variant": record.outcome.variant_id,
                "verdict": fate,
                "fate": None if reply is None else str(failed.fate if failed else Fate.CORRECT),
                "max_error": None if reply is None or reply.error in (None, float("inf")) else reply.error,
                "reason": failed.reason if failed else "",
            }
        )
        if fate == "wrong" or not as_json:
            messages().print(f"{record.key.gpu} {record.problem.label()} {record.outcome.template}: {fate} {rows[-1]['reason']}".rstrip())
    if as_json:
        print_json({"rows": rows, **counts})
    else:
        where = f"on {gpu.name}" if gpu else "in Triton's interpreter"
        console().print(f"{counts['correct']} correct, {counts['wrong']} wrong, {counts['skipped']} skipped, checked {where}")
    if counts["wrong"]:
        raise SystemExit(1)
    if not rows:
        raise NoKernelFound("no records match, so nothing was checked: loosen the filters, or search first")
    if not counts["correct"]:
        machine = gpu.name if gpu else "no GPU, and no interpreter runs their templates"
        raise EnvironmentProblem(
            f"none of {counted(len(rows), 'record')} could be checked on this machine ({machine}): verify them on their own GPU"
        )
