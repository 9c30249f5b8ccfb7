"""`flashtune verify`: check of every record of a database for correctness, on this machine."""

import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.console import console, messages, print_json
from flashtune.cli.functions import FUNCTIONS, register_functions
from flashtune.cli.options import db_option, json_option, record_filters, seconds_of
from flashtune.cli.signing import TRUST_CONFIG, verified
from flashtune.core.records.results import Fate
from flashtune.core.system.errors import EnvironmentProblem, InputError, NoKernelFound
from flashtune.core.system.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashtune.core.gpu.target import Target
    from flashtune.core.records.results import TuningRecord
    from flashtune.db.store import KeyFilter
    from flashtune.tuner.replies import Checked, Failed


@click.command()
@db_option
@record_filters("gpu_name", "d")
@click.option(
    "--sample", type=click.IntRange(min=1), metavar="K", help="Check K records, drawn by the seed from those that can be checked here."
)
@click.option(
    "--requalify", is_flag=True, help="Time this GPU's records again, the most doubtful first, and store what is found in place of them."
)
@click.option("--budget", metavar="TIME", help="Wall time after which --requalify begins no further record: 90s, 10m, 1h.")
@click.option("--identity", metavar="ID", help="Check instead that --db is, to the byte, the file that ID signed: an e-mail, or a URI.")
@click.option("--issuer", metavar="URL", help="With --identity: only as this service confirms it.")
@TRUST_CONFIG
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random inputs.")
@FUNCTIONS[0]
@FUNCTIONS[1]
@json_option
def verify(
    *,
    location: str | None,
    filters: "KeyFilter",
    sample: int | None,
    requalify: bool,
    budget: str | None,
    identity: str | None,
    issuer: str | None,
    trust_config: Path | None,
    seed: int,
    score_mod: str | None,
    mask_mod: str | None,
    as_json: bool,
) -> None:
    """Check every record's kernel against attention in float64: on this GPU, or in Triton's interpreter where there is none.

    Exit code 1 when a record is wrong, 4 when none could be checked here, 5 when there is none. Records that can't be checked here are
    counted as skipped: another architecture's, Gluon kernels without a GPU, and functions that --score-mod and --mask-mod don't name.

    With --requalify, on a GPU, each of its measured records is timed again, beside the runners-up of its problem and PyTorch. That takes
    some seconds a record; --sample and --budget bound it. Records from elsewhere (another torch, Triton, driver or GPU) come first.

    What is found replaces the record in your own database, or --db. If another kernel is faster, or PyTorch, that runs from then on. A
    kernel that no longer compiles, fails or is wrong isn't used any more, also where the shipped database has it, until it is measured
    again. If the machine is at fault (memory that others use, a process that was killed), the record stays: `undecided`.

    With --identity nothing runs, and no record is read. Exit code 3 unless the file is what ID signed (`export --sign`).
    """
    if identity is not None:
        if requalify or sample is not None or any(filters.values()):
            raise InputError("--identity checks a file's signature alone: check its records by another call")
        verified(location, identity, issuer=issuer, config=trust_config, as_json=as_json)
        return
    if issuer is not None or trust_config is not None:
        raise InputError(f"{'--issuer' if issuer is not None else '--trust-config'} says whose signature counts: give --identity, too")
    if budget is not None and not requalify:
        raise InputError("--budget bounds what --requalify times: give both, or bound the records that are checked by --sample")
    register_functions(score_mod, mask_mod)
    if requalify:
        from flashtune.cli.requalify import run_requalify

        budget_s = None if budget is None else seconds_of(budget)
        run_requalify(location, filters, most=sample, budget_s=budget_s, seed=seed, as_json=as_json)
    else:
        _check(location, filters, sample=sample, seed=seed, as_json=as_json)


def _check(location: str | None, filters: "KeyFilter", *, sample: int | None, seed: int, as_json: bool) -> None:
    """Check the kernels of records, print a line for each, and end with the exit codes that `verify` lists."""
    from flashtune.cli.progress import lasting
    from flashtune.db.library import Library
    from flashtune.templates import BITS, without_kernel
    from flashtune.tuner.machine import local_gpu, require_triton
    from flashtune.tuner.publish.winners import recheck

    library = Library.of(location) if location else Library.default()
    records = library.records(passed_over=without_kernel, bits=BITS, **filters)
    require_triton()
    gpu = local_gpu()
    here = gpu.target if gpu else None
    checked, skipped, left_out = _parted(records, here, sample, seed)
    where = f"on {gpu.name}" if gpu else "in Triton's interpreter"
    messages().print(_begun(len(checked), skipped, left_out, where))
    rows = [_row(record, None) for record, _ in skipped]
    started = time.monotonic()
    for count, (record, reply) in enumerate(recheck(checked, here=here, seed=seed), start=1):
        rows.append(_row(record, reply))
        fate, reason = rows[-1]["verdict"], rows[-1]["reason"]
        if fate == "wrong" or not as_json:
            left = (time.monotonic() - started) / count * (len(checked) - count)
            about = f", about {lasting(left)} left" if count < len(checked) else ""
            label = f"{record.key.gpu} {record.problem.label()} {record.outcome.template}"
            messages().print(f"[{count}/{len(checked)}{about}] {label}: {fate} {reason}".rstrip())
    counts = {word: sum(row["verdict"] == word for row in rows) for word in ("correct", "wrong", "skipped")}
    if as_json:
        print_json({"rows": rows, **counts})
    else:
        console().print(f"{counts['correct']} correct, {counts['wrong']} wrong, {counts['skipped']} skipped, checked {where}")
    if counts["wrong"]:
        raise SystemExit(1)
    if not rows:
        raise NoKernelFound("no records match, so nothing was checked: loosen the filters, or search first")
    if not counts["correct"]:
        causes = "; ".join(sorted({why for _, why in skipped}))
        raise EnvironmentProblem(
            f"none of {counted(len(rows), 'record')} could be checked {where} ({causes}): verify them where that doesn't hold"
        )


def _parted(
    records: "Sequence[TuningRecord]", here: "Target | None", sample: int | None, seed: int
) -> "tuple[list[TuningRecord], list[tuple[TuningRecord, str]], int]":
    """Records to check, those that can't be checked here with the reason, and how many the sample leaves out."""
    from flashtune.tuner.publish.winners import unchecked_here

    skipped = [(record, why) for record in records if (why := unchecked_here(record, here))]
    able = [record for record in records if not unchecked_here(record, here)]
    if sample is None or sample >= len(able):
        return able, skipped, 0
    places = sorted(random.Random(seed).sample(range(len(able)), sample))
    return [able[place] for place in places], skipped, len(able) - sample


def _begun(checked: int, skipped: "Sequence[tuple[TuningRecord, str]]", left_out: int, where: str) -> str:
    """Line about the records that are checked, and those that are not."""
    reasons = Counter(why for _, why in skipped)
    others = [f"{number} skipped: {why}" for why, number in reasons.most_common()] + [f"{left_out} left out by --sample"] * (left_out > 0)
    return "; ".join([f"checking {counted(checked, 'record')} {where}", *others])


def _row(record: "TuningRecord", reply: "Checked | Failed | None") -> dict[str, Any]:
    """A record's verdict as JSON; no reply is `skipped`."""
    from flashtune.tuner.replies import Failed

    failed = reply if isinstance(reply, Failed) else None
    return {
        "gpu": record.key.gpu,
        "problem": record.problem.label(),
        "template": record.outcome.template,
        "variant": record.outcome.variant_id,
        "verdict": "skipped" if reply is None else "wrong" if failed else "correct",
        "fate": None if reply is None else str(failed.fate if failed else Fate.CORRECT),
        "max_error": None if reply is None or reply.error in (None, float("inf")) else reply.error,
        "reason": failed.reason if failed else "",
    }
