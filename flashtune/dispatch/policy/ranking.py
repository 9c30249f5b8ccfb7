"""Which kernel serves a problem: a pure function of the problem, the GPU and the records; no tensors, no I/O, no clock."""

from collections.abc import Iterator, Mapping, Sequence

from flashtune.core.problem import DECODE_ROWS, Problem
from flashtune.core.results import Source, TuningRecord
from flashtune.core.target import Target
from flashtune.dispatch.policy import losses
from flashtune.dispatch.policy.choices import (
    Choice,
    Context,
    Fit,
    Preferred,
    Refusal,
    Work,
    default_choice,
    exact_choice,
    fit_of,
    near_choice,
)
from flashtune.dispatch.policy.pool import Pool
from flashtune.templates.expected import LOG_HOST, log_us, logs_us
from flashtune.templates.family import Family
from flashtune.templates.learned.residual import Tried

COMPARED = 24
"""So many configs of the nearest records the cost model compares."""

PER_DISTANCE, PER_DISTANCE_STEP = 0.001, 0.005
"""What a unit of distance counts against what the cost model expects to gain, a logarithm: of more rows, whose trials it was corrected by
(flashtune.templates.learned), and of a decoding step, which fewer are of."""

CAUTION = 1.0
"""So many standard deviations of what the most alike trial leaves open are added to what is expected (`Residual.of`). Problems
left out one by one, the trial that is expected to be the fastest reaches 0.90 of the best one's rate in 93.9 % of 542 steps, without it in
91.7 %, and of 1349 others in 98.3 and 98.0 % (benchmarks/run.py fit_residual)."""

LEAST_GAIN = 0.01
"""So much it must be expected to gain."""

OTHER_KIND = 0.02
"""And so much more where the nearest record is of the call's own features, and the other isn't, and again of head sizes.

These from leaving rows out (benchmarks/run.py stand_in) and from random shapes (run.py replay_random); half and twice of each come
to nearly the same."""


def choose(
    problem: Problem, target: Target, records: Sequence[TuningRecord] | Pool, families: Mapping[str, Family], **words: bool
) -> Choice:
    """The best choice that `rank` finds, which takes the same; the framework where nothing else serves."""
    return next(choice for choice in rank(problem, target, records, families, **words) if isinstance(choice, Choice))


def rank(
    problem: Problem,
    target: Target,
    records: Sequence[TuningRecord] | Pool,
    families: Mapping[str, Family],
    *,
    framework_serves: bool = True,
    unmeasured: bool = False,
) -> Iterator[Choice | Refusal]:
    """Every way to serve `problem` on `target`, best first, with the refused ones where they would have stood.

    The order of fallbacks, the only one there is:

    1. `exact`: a measured record of exactly this key;
    2. a measured record of another key of the architecture, the nearest first: `near_n` where only the sizes N_kv, N_q and batch * heads
       differ, `near_gpu` where the GPU does and perhaps these, `stand_in` where the head size, the heads to a key head, the features or
       the 16-bit type do;
    3. `predicted`: the same two steps over records that a cost model ranked;
    4. `default`: the default config of each family that supports the problem and suits its sizes, in the families' order;
    5. `framework`: torch's own attention.

    Steps 3 and 4 hold kernels behind which nothing was measured on this architecture. They serve where the framework can't
    (`framework_serves` says whether torch has the features), and elsewhere only if `unmeasured` allows it.

    Near is `flashtune.core.nearness.distance`, with head sizes as kernels pad them and another GPU as far as two octaves of N (of
    backwards see `losses.kinds_apart`, `losses.OTHER_GPU_OF_GRADIENTS`); ties go to the same alignment, then among records of one key to
    the preferred one (flashtune.db.preference), then to records of the user over shipped ones, the larger sizes, the shorter time and the
    lower variant id, so that equal libraries choose equally everywhere. Between a decoding step and more rows, between passes, and
    between element types of other sizes nothing is near.

    A record that says that the framework was faster makes it the choice, provided that `framework_serves`. For its own key a record says
    so by its whole calls where they were measured, host included; for another by `losses.expected_ratio`, and only if the mean of those
    says so, too, that tell most of what the framework takes (`Pool.tellers`). Of decoding steps both are corrected by what torch reaches
    with as many key heads (`losses.torch_fills`). A record is never served when
    its config, completed by axes that came later, is outside the family's declared space or breaks a constraint on this target; the next
    one may serve. In another kernel's place a config is first moved to the nearest one that keeps the constraints (`Family.refit`),
    which may take a decision no more than MOST_LOOKED (flashtune.dispatch.policy.choices).
    What was best at its own sizes may not be here: of the first COMPARED configs those come first that the cost model expects to be faster
    than the nearest record's (`_gain`).
    Which sizes suit a family is a rule of thumb, which gives way to measurements: step 1 doesn't ask for it. A record of any other step
    is served only where the problem's sizes suit its family, and stands in for other sizes only where every family that suits these was
    tried at its own: one that never was may be far better here.
    """
    spec, key = problem.spec(), problem.key(target.slug)
    computing = [family for family in families.values() if family.direction == problem.direction]
    suited = [family for family in computing if family.refusal(problem, spec, target) is None]
    pool = records if isinstance(records, Pool) else Pool(key, target, records, families)
    context = Context(problem=problem, target=target, key=key, pool=pool, families=families, framework_serves=framework_serves, work=Work())
    names = frozenset(family.name for family in suited)
    yield from _steps(context, names, "measured")
    if unmeasured or not framework_serves:
        yield from _steps(context, names, "predicted")
    elif suited:
        why = f"nothing that was measured on GPUs like {target.name} stands behind a kernel for this problem"
        note = f"{why}, so torch's own attention serves (FLASHTUNE_UNMEASURED=1 lets {suited[0].name} serve)"
        yield Choice(kind="framework", spec=spec, note=note)
        return
    yield from (default_choice(family, problem, target) for family in computing)
    yield Choice(kind="framework", spec=spec, note="no template serves this problem here, torch's own attention does")


def _steps(context: Context, suited: frozenset[str], source: Source) -> Iterator[Choice | Refusal]:
    """Records of the key itself first, then the others."""
    for record in context.pool.exact(context.key, suited):
        if record.outcome.source == source:
            fit = fit_of(record, context)
            yield fit if isinstance(fit, Refusal) else exact_choice(fit, context)
    near = ((apart, record) for apart, record in context.pool.near(context.key, suited) if record.outcome.source == source)
    yield from _compared(near, context)
    for _, record in near:
        fit = fit_of(record, context)
        yield fit if isinstance(fit, Refusal) else near_choice(fit, context)


def _compared(near: Iterator[tuple[float, TuningRecord]], context: Context) -> Iterator[Choice | Refusal]:
    """The first of the records that are `near`, so many that COMPARED configs are among them: those that the cost model expects to gain
    over the nearest come first, then the nearest, all others in their order."""
    distinct: dict[Tried, Fit] = {}
    found: list[tuple[float, Fit | Refusal]] = []
    while len(distinct) < COMPARED and (record := next(near, None)) is not None:
        fit = fit_of(record[1], context)
        found.append((record[0], fit))
        if isinstance(fit, Fit):
            first = not distinct
            distinct.setdefault(_config(fit), fit)
            if first and not _tells(fit, context):
                break
    step = context.problem.n_q <= DECODE_ROWS
    logs = logs_us([(fit.family, fit.config) for fit in distinct.values()], context.problem, context.target, caution=CAUTION)
    # What is over before the host has made the next call gains nothing by being over sooner.
    here = {config: None if log is None else max(log, LOG_HOST) for config, log in zip(distinct, logs, strict=True)}
    fits = [(apart, fit) for apart, fit in found if isinstance(fit, Fit)]
    ahead: dict[Tried, tuple[float, Fit, float]] = {}
    for apart, fit in fits[1:]:
        if _reads_otherwise(fit, fits[0][1], context):
            continue
        gain = _gain(fit, fits[0][1], here)
        strayed = losses.strayed(fit.record.key, fits[0][1].record.key, context.key)
        per_distance = PER_DISTANCE_STEP if step else PER_DISTANCE
        worth = gain - per_distance * (apart - fits[0][0]) - OTHER_KIND * strayed
        if worth > LEAST_GAIN and (_config(fit) not in ahead or worth > ahead[_config(fit)][0]):
            ahead[_config(fit)] = worth, fit, gain
    most = max((gain for _, _, gain in ahead.values()), default=0.0)
    for _, fit, gain in sorted(ahead.values(), key=lambda one: -one[0]):
        yield near_choice(fit, context, preferred=Preferred(nearest=fits[0][1].record, gain=gain), behind=most - gain)
    passed = {id(fit) for _, fit, _ in ahead.values()}
    for _, fit in found:
        if isinstance(fit, Refusal):
            yield fit
        elif id(fit) not in passed:
            said = len(here) > 1 and here[_config(fit)] is not None
            yield near_choice(fit, context, behind=most - _gain(fit, fits[0][1], here) if said else None)


def _tells(nearest: Fit, context: Context) -> bool:
    """Whether the cost model is asked: no backward had a part in it, and of a call that waits for the host it tells little."""
    log = log_us(nearest.family, nearest.config, context.problem, context.target)
    return context.problem.direction == "fwd" and log is not None and log >= LOG_HOST


def _reads_otherwise(fit: Fit, nearest: Fit, context: Context) -> bool:
    """Whether its record is of a bias that is read unlike the call's, and the nearest one's isn't: the model knows nothing of that."""
    theirs, near, ours = (losses.ragged(key) for key in (fit.record.key, nearest.record.key, context.key))
    return near == ours != theirs


def _config(fit: Fit) -> Tried:
    return fit.family.name, fit.config


def _gain(fit: Fit, nearest: Fit, here: Mapping[Tried, float | None]) -> float:
    """The logarithm of what `fit` is expected to gain over the nearest record's config, 0 where nothing is said of one of them."""
    nearest_us, us = here[_config(nearest)], here[_config(fit)]
    return 0.0 if nearest_us is None or us is None else nearest_us - us
