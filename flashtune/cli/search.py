"""`flashtune search`: find the fastest kernel for each problem and store it."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashtune.cli.console import console, log_of, messages, print_json, silent
from flashtune.cli.interrupts import INTERRUPTED
from flashtune.cli.options import GPU, TEMPLATE, ListCommand, gpu_of, json_option, seconds_of, share_of
from flashtune.cli.plots import check_page, plot_option, write_search
from flashtune.cli.problem_options import ProblemOptions, problem_options
from flashtune.cli.tracing import logger, process_age_s, trace_times
from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Source, TuningRecord
from flashtune.core.system.errors import EnvironmentProblem, FlashtuneError, InputError, NoKernelFound
from flashtune.core.system.secrets import command_line, mask_secrets
from flashtune.core.system.threads import begun
from flashtune.core.system.words import counted
from flashtune.tuner.search.stopping import UNTIL

if TYPE_CHECKING:
    from rich.console import Console

    from flashtune.tuner.children.workers import Workers
    from flashtune.tuner.replies import Spent
    from flashtune.tuner.search.plan import SearchPlan

DEFAULT_TRIALS = 60

SWITCH_S = 5e-4
"""Switch interval of Python threads during a search, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of a search by the names of the command line; None is the default of this machine or of the user's folders."""

    trials: int = DEFAULT_TRIALS
    budget_s: float | None = None
    until: float = UNTIL
    sampler: str = "gp"
    templates: tuple[str, ...] = ()
    seed: int | None = None
    storage: str | None = None
    location: str | None = None
    jobs: int | None = None
    gpus: str = "1"
    predict: bool = False
    plot: Path | None = None


@click.command(cls=ListCommand)
@click.option(
    "--gpu-name",
    type=GPU,
    metavar="NAME",
    help="The GPU to tune for: a slug (a100, h200) or the driver's name of it (default: the one in this machine).",
)
@problem_options(many=True)
@click.option(
    "--trials", type=click.IntRange(min=1), default=DEFAULT_TRIALS, show_default=True, metavar="K", help="Candidates per problem."
)
@click.option(
    "--until",
    metavar="SHARE",
    default="0.5%",
    show_default=True,
    help="Stop after 8 trials without an improvement of this fraction, if the model expects none; 0: never.",
)
@click.option(
    "--gpus",
    metavar="WHICH",
    default="1",
    show_default=True,
    help="GPUs of this machine that measure in parallel: all, a number, or their indices (0,2).",
)
@click.option("--budget", metavar="TIME", help="Wall time for the whole command: 90s, 10m, 1h.")
@click.option(
    "--sampler",
    type=click.Choice(["gp", "tpe", "random", "exhaustive"]),
    default="gp",
    show_default=True,
    help="Proposal of candidates: gp, a Gaussian process over the cost model's error; tpe, Optuna's; random; exhaustive, all in order.",
)
@click.option(
    "--template",
    "templates",
    type=TEMPLATE,
    multiple=True,
    metavar="NAME",
    help="Search only these template families, at any sizes (default: all families, each at the sizes that suit it).",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    help="Makes a predicted search repeatable; without it, inputs and samples differ each time.",
)
@click.option(
    "--storage", metavar="URL", help="Optuna storage for the study (default: SQLite in the cache directory); workers may share one."
)
@click.option("--db", "location", metavar="PATH|URL", help="Write to this database (default: your own).")
@click.option("--jobs", type=click.IntRange(min=1), help="Number of parallel compilers (default: one per core).")
@click.option("--predict", is_flag=True, help="Rank by the cost model even where another GPU, or this one, is present.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors, for timers and cron.")
@click.option(
    "--log", "log", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Add progress and records to this file."
)
@plot_option
@json_option
def search(
    *,
    requested: ProblemOptions,
    gpu_name: str | None,
    until: str,
    budget: str | None,
    quiet: bool,
    log: Path | None,
    as_json: bool,
    **others: Any,
) -> None:
    """Find the fastest kernel for each problem on a GPU, and store it.

    On the named GPU, candidates are compiled, checked against attention in float64 and timed: records are `measured`.
    On a machine without a GPU they are compiled for the named GPU and ranked by a cost model: records are `predicted`.

    \b
    flashtune search --d 64
    flashtune search --gpu-name h200 --model llama-3-8b --n 8192 --plot llama.html
    flashtune search --gpu-name h200 --calls calls.json --budget 10m
    flashtune search --gpu-name h200 --d 128 --n 4096 --causal --dtype bf16 --trials 200
    flashtune search --gpu-name h200 --d 128 --window 1024 --causal --db my-model.sqlite
    flashtune search --gpu-name h200 --d 128 --n 1024 --batch 16 --causal --packed lognormal --direction bwd
    flashtune search --d 128 --paged 16 --n 8192 --n-q 1 --batch 64 --heads 32 --kv-heads 8 --causal
    flashtune search --d 64 --n 4096 --mask-mod examples/masks.py:dilated --score-mod examples/masks.py:relative
    flashtune search --d 64 --n 1024 --batch 16 --packed uniform --mask-mod examples/masks.py:prefix_lm

    With --calls FILE, problems without a record on this GPU come first, then those with a predicted record, then the others; problems
    that no template takes are named and left out.

    An interruption (Ctrl-C, SIGTERM, a crash) loses nothing: the same command resumes where it stopped, without finished problems.
    Commands are the same if GPU, problems, templates, --trials, --until, --sampler and --seed are; the others (--budget, --jobs,
    --gpus, --db, --quiet, --log, --plot, --json) may differ. After a search has ended, the same command starts a new one.

    Several processes of the same command, on several machines with one --storage and --db on a server, share the problems.
    """
    target = gpu_of(gpu_name)
    problems = requested.problems()
    budget_s = None if budget is None else seconds_of(budget)
    options = SearchOptions(until=share_of("--until", until), budget_s=budget_s, **others)
    _refuse_files(log, options, requested.calls)
    with nullcontext() if log is None else log_of(log) as lines:
        notes = lines or (silent() if quiet else messages())
        with _logged(lines):
            records = _found(target, problems, requested, options, quiet=lines is None and (quiet or as_json), notes=notes)
        if as_json:
            from flashtune.cli.records import record_row

            print_json([record_row(record) for record in records])
        for out in (*([] if quiet or as_json else [console()]), *([] if lines is None else [lines])):
            _print(records, target, options.location, out)


def _refuse_files(log: Path | None, options: SearchOptions, calls: Path | None) -> None:
    """Raise InputError where the files of a search are one, or the log is a file of another kind, before anything is written."""
    from flashtune.cli.outputs import STAMP, refuse_foreign, refuse_shared
    from flashtune.cli.storage import storage_file
    from flashtune.db.library import file_of, overlay_path

    database = file_of(options.location or overlay_path())
    refuse_shared({"--db": database, "--storage": storage_file(options.storage), "--calls": calls, "--log": log, "--plot": options.plot})
    check_page(options.plot)
    if log is not None:
        refuse_foreign("--log", log, STAMP, "log of a search")


def _found(
    target: Target, problems: list[Problem], requested: ProblemOptions, options: SearchOptions, *, quiet: bool, notes: "Console"
) -> list[TuningRecord]:
    """Records of a search of these problems, of recorded calls those worth a search first; raises NoKernelFound where there are none."""
    if requested.calls is not None:
        from flashtune.cli.problems import worth_searching

        problems = worth_searching(problems, target, templates=options.templates, location=options.location, notes=notes)
    records = run_search(target, problems, options, quiet=quiet, notes=notes)
    if not records:
        none = f"no correct kernel was found for {counted(len(problems), 'problem')}"
        raise NoKernelFound(f"{none}, so PyTorch runs the calls: give more --budget or --trials")
    return records


def _print(records: list[TuningRecord], target: Target, location: str | None, out: "Console") -> None:
    """Print a table of records, and a line about them where some are predicted."""
    from flashtune.cli.records import predicted_only, print_records

    print_records(records, title=f"Best known on {target.name}", out=out)
    if any(record.outcome.source == "predicted" for record in records):
        out.print(predicted_only(location), soft_wrap=True)


@contextmanager
def _logged(log: "Console | None") -> Iterator[None]:
    """Context of a search that adds the error that ends it to the log, if there is one, and says that an interrupted one resumes."""
    try:
        yield
    except KeyboardInterrupt:
        # Printed after the live display has ended, which would hide it.
        said = "interrupted; results are kept, and the same command resumes from here"
        click.echo(f"flashtune: {said}", err=True)
        if log is not None:
            log.print(said)
        raise SystemExit(INTERRUPTED) from None
    except FlashtuneError as error:
        if log is not None:
            log.print(mask_secrets(str(error)), soft_wrap=True)
        raise


def run_search(
    target: Target,
    problems: list[Problem],
    options: SearchOptions,
    *,
    quiet: bool,
    notes: "Console | None" = None,
) -> list[TuningRecord]:
    """Search these problems and return the records that the database then has for them.

    Progress, unless `quiet`, and notes go to the console `notes` (None: standard error).
    """
    from flashtune.tuner.children.start import start_server

    trace_times()
    # In parallel: the server imports torch, this process the rest, and a thread looks for GPUs.
    start_server()
    looking = begun(choose_source, target, options.predict)
    from flashtune.tuner.children.workers import Workers
    from flashtune.tuner.machine import cores, devices_of, numbered, require_interpreter
    from flashtune.tuner.replies import Spent

    spent = Spent()
    spent.add({"start": process_age_s()})
    with spent.on("rest"):
        with spent.on("look for GPUs"):
            source = looking.result()
        if source == "predicted":
            require_interpreter()
            # The same command may run on a machine with GPUs, so only the option's form is checked.
            numbered(options.gpus)
        devices = devices_of(options.gpus, target) if source == "measured" else ()
        # A core stays free for each process that launches timed kernels.
        jobs = options.jobs or max(1, cores() - (max(1, len(devices)) if source == "measured" else 0))
        input_seed = time.time_ns() % (1 << 31) if options.seed is None else options.seed
        with Workers(jobs=jobs, devices=devices) as workers:
            if source == "measured":
                # Long before its first trial: a GPU's process imports torch, starts the GPU, and makes inputs and oracles.
                for device in range(max(1, len(devices))):
                    workers.preparing(problems[0], target, input_seed, device=device)
            with spent.on("plan"):
                plan = _plan(target, problems, options, source=source, devices=devices, jobs=jobs, input_seed=input_seed)
            logger.debug("planned")
            records = _run(plan, options, workers, spent, quiet=quiet, notes=notes or messages())
        logger.debug("searched")
        if source == "measured":
            with spent.on("machine code"):
                keep_machine_code(records, target, jobs=plan.jobs, notes=notes)
    logger.debug("done: %.2f s; command: %s", spent.total, spent)
    return records


def _plan(target: Target, problems: list[Problem], options: SearchOptions, *, source: Source, **found: Any) -> "SearchPlan":
    """The plan of a search that these options ask for, with what was `found` of this machine."""
    from flashtune.bench import time_calls
    from flashtune.cli.problems import stored
    from flashtune.templates import every_family, family
    from flashtune.tuner.search.plan import SearchPlan

    plan = SearchPlan(
        target=target,
        problems=tuple(problems),
        families={name: family(name) for name in options.templates} or every_family(),
        source=source,
        trials=options.trials,
        budget_s=options.budget_s,
        until=options.until,
        sampler=options.sampler,
        seed=options.seed,
        # A named family is searched at all sizes, also where it isn't expected to be good.
        only_suited=not options.templates,
        known=tuple(stored(options.location)),
        calls=time_calls if source == "measured" else None,
        keep=source == "measured",
        **found,
    )
    _refuse_unsearchable(plan)
    return plan


def _refuse_unsearchable(plan: "SearchPlan") -> None:
    """Raise InputError for problems that no template takes, before anything is written."""
    from flashtune.tuner.propose.space import SearchSpace

    for problem in plan.problems:
        space = SearchSpace(plan.families, problem, plan.target, only_suited=plan.only_suited)
        if plan.source == "predicted" and not space.families:
            why = f"no kernel takes {problem.label()} with head sizes of {problem.d} and {problem.d_v}"
            raise InputError(f"{why}, and other providers can't be predicted: search on the GPU, where they are timed")


def _run(
    plan: "SearchPlan", options: SearchOptions, workers: "Workers", spent: "Spent", *, quiet: bool, notes: "Console"
) -> list[TuningRecord]:
    """Run the search into its database, draw it where that was asked for, and return its records of the problems."""
    with spent.on("imports"):
        from flashtune.cli.progress import SearchProgress
        from flashtune.cli.storage import study_storage
        from flashtune.db.library import overlay_path
        from flashtune.db.store import Store
        from flashtune.tuner.machine import provenance
        from flashtune.tuner.searching import Search

    # The thread of a GPU waits for others at each trial: Python's five milliseconds for each would be a tenth of a trial.
    sys.setswitchinterval(SWITCH_S)
    command = command_line(["flashtune", *sys.argv[1:]])
    with spent.on("provenance"):
        made_by = provenance(command=command, seed=plan.seed, measured=plan.source == "measured", target=plan.target)
    trials = None if plan.sampler == "exhaustive" else plan.trials
    with ExitStack() as stack:
        with spent.on("open"):
            storage = stack.enter_context(study_storage(options.storage))
            store = stack.enter_context(Store.open(options.location or overlay_path(), writable=True))
            shown = SearchProgress(notes, problems=plan.problems, trials=trials, budget_s=plan.budget_s, quiet=quiet)
            progress = stack.enter_context(shown)
        search = Search(plan, storage=storage, provenance=made_by, save=partial(store.save, once=True), listener=progress)
        with spent.on("problems"):
            results = search.run(workers)
        if (left := len(plan.problems) - len(results)) > 0:
            notes.print(f"time is up before {left} of {counted(len(plan.problems), 'problem')}: the same command goes on with them")
        found = (store.best(problem.key(plan.target.slug)) for problem in plan.problems)
        records = [record for record in found if record is not None]
    if options.plot is not None:
        write_search(options.plot, progress.timeline, records, made_by, plan.target.name)
        notes.print(f"wrote {options.plot}")
    return records


def keep_machine_code(records: list[TuningRecord], target: Target, *, jobs: int, notes: "Console | None" = None) -> None:
    """Compile these records into the user's cache, for later calls; a failure is printed, and only makes a first call slower."""
    from flashtune.tuner.publish.winners import compile_winners

    notes = notes or messages()
    try:
        failures = compile_winners(records, target, jobs=jobs)
    except EnvironmentProblem as error:
        notes.print(str(error))
        return
    for stem, why in failures.items():
        notes.print(f"no machine code cached of {stem}: {why}")


def choose_source(target: Target, predict: bool) -> Source:
    """Source of this machine's records, measured or predicted; raises EnvironmentProblem for another GPU without --predict."""
    from flashtune.tuner.machine import local_gpus

    gpus = () if predict else local_gpus()
    if not gpus:
        return "predicted"
    if all(gpu.target is None or gpu.target.slug != target.slug for gpu in gpus):
        names = " and ".join(dict.fromkeys(gpu.name if gpu.target is None else f"{gpu.name} ({gpu.target.slug})" for gpu in gpus))
        own = "leave --gpu-name out to search for this one" if gpus[0].target is not None else "search on the GPU itself"
        raise EnvironmentProblem(f"this machine's GPU is {names}, not {target.name}: {own}, or add --predict to rank by the cost model")
    return "measured"
