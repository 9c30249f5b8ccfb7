"""`flashtune explain`: what would run a call, and why."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click

from flashtune.cli.console import console, print_json
from flashtune.cli.options import GPU, db_option, gpu_of, json_option, using
from flashtune.cli.problem_options import ProblemOptions, problem_options
from flashtune.core.problems.problem import LARGEST_HEAD, Problem, unfit_heads
from flashtune.templates.mods.known import PackedInstead

if TYPE_CHECKING:
    from flashtune.dispatch import Explanation


@click.command()
@click.option("--gpu-name", type=GPU, metavar="NAME", help="The GPU of the call (default: the one in this machine).")
@problem_options(many=False)
@db_option
@json_option
def explain(*, requested: ProblemOptions, gpu_name: str | None, location: str | None, as_json: bool) -> None:
    """Say what would run a call, and why.

    The first line ends in how near the record is: exact, near_n (other lengths), near_gpu (a related GPU), stand_in (other features or
    heads), predicted, or default (a config without a record). framework is PyTorch, provider a named backend or another library.

    \b
    flashtune explain --gpu-name h200 --n 3000 --d 128 --causal
    """
    from flashtune.dispatch import Explanation, explain_problem

    target = gpu_of(gpu_name)
    large = max(requested.d[0], requested.d_v or 0)
    if large > LARGEST_HEAD:
        # What else was given is checked with a size that a problem may have.
        requested = replace(requested, d=(min(requested.d[0], LARGEST_HEAD),), d_v=requested.d_v and min(requested.d_v, LARGEST_HEAD))
    packed = ""
    try:
        problem = requested.problems()[0]
    except PackedInstead as instead:
        # Calls with this mask are these.
        problem, packed = instead.problem, str(instead)
    seen = problem.seen()
    if large > LARGEST_HEAD:
        found = Explanation(
            kind="framework", reason=f"{unfit_heads(large, large)}, so PyTorch's own attention runs the call", gpu=target.slug
        )
    else:
        with using(location):
            found = explain_problem(seen, target.slug)
    found = replace(found, reason=f"{packed}; {found.reason}") if packed else found
    range_us = None
    if found.source == "predicted" and found.template is not None and found.median_us is not None:
        from flashtune.templates.expected import likely

        range_us = likely(found.template, seen.direction, found.median_us)
    if as_json:
        row = asdict(found)
        row["likely_us"] = None if range_us is None else [round(us, 3) for us in range_us]
        row["config"] = None if found.config is None else found.config.as_dict()
        row["twin"] = None if found.twin is None else found.twin.as_dict()
        print_json(row)
        return
    what = seen.label() if large <= LARGEST_HEAD else f"heads of {large}"
    console().print(f"{what} on {target.slug}: {found.kind}", style="bold")
    if seen.features != problem.features:
        console().print(f"{problem.label()}: masks that hide no key at these sizes are left out, as in calls")
    if nearest := _nearest(found, seen):
        console().print(nearest)
    console().print(found.reason)
    if found.template is not None:
        config = "" if found.config is None else found.config.label()
        console().print(f"{found.template} {found.variant_id or ''}\n  {config}")
    timed = [one for one in found.providers if one.us is not None]
    if timed:
        console().print("whole calls, us: " + ", ".join(f"{one.name} {one.us:.1f}" for one in sorted(timed, key=lambda one: one.us or 0.0)))
    if found.twin is not None:
        console().print(f"fallback after softmax mispredictions:\n  {found.twin.label()}")


def _nearest(found: "Explanation", problem: Problem) -> str:
    """Sentences on the sizes at which the kernel of a nearest record was measured; empty for other choices."""
    key = found.record_key
    if found.kind not in ("near_n", "stand_in") or key is None or found.median_us is None:
        return ""
    missing = f"N={problem.n_kv}" if problem.n_kv != key.n else "this problem"
    other = f", D={key.d}" if key.d != problem.d else ""
    other += f", {key.gqa_ratio} query heads per key head" if key.gqa_ratio != problem.gqa_ratio else ""
    size = "" if problem.n_kv == key.n else f"; your call is {'larger' if problem.n_kv > key.n else 'smaller'}"
    return f"No record for {missing}. Using the kernel measured at N={key.n}{other} ({found.median_us:.1f} us there{size})."
