"""Ranking of kernels for a problem: a pure function of the problem, the GPU and the records; no tensors, no I/O, no clock."""

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
"""Configs of the nearest records that the cost model compares."""

PER_DISTANCE, PER_DISTANCE_STEP = 0.001, 0.005
"""Expected gain (logarithm) required per unit of distance: for more rows, whose trials corrected the cost model
(flashtune.templates.learned), and for a decode step, with fewer such trials."""

CAUTION = 1.0
"""Standard deviations of the residual's uncertainty added to expected times (`Residual.of`, benchmarks/run.py fit_residual)."""

LEAST_GAIN = 0.01
"""Minimum expected gain (logarithm)."""

OTHER_KIND = 0.02
"""Extra expected gain required before a record with other features (or another head size) overrides one that matches.

From leaving records out (benchmarks/run.py stand_in) and from random shapes (run.py replay_random); half and twice of each give nearly the
same.
"""


def choose(
    problem: Problem, target: Target, records: Sequence[TuningRecord] | Pool, families: Mapping[str, Family], **words: bool
) -> Choice:
    """Best choice of `rank`, which has the same arguments; PyTorch where nothing else serves."""
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
    5. `framework`: PyTorch's own attention.

    Kernels of steps 3 and 4 have no measurement on this architecture. They serve where PyTorch can't
    (`framework_serves` is True where it has the features), and elsewhere only if `unmeasured` allows it.

    Distance is `flashtune.core.nearness.distance`, with head sizes as kernels pad them and another GPU as far as two octaves of N (for
    backwards see `losses.kinds_apart`, `losses.OTHER_GPU_OF_GRADIENTS`); ties go to the same alignment, then among records of one key to
    the preferred one (flashtune.db.preference), then to records of the user over shipped ones, the larger sizes, the shorter time and the
    lower variant id, so that equal libraries choose equally everywhere. Decode steps aren't near more rows, nor are other passes, nor
    element types of other sizes.

    A record with a faster PyTorch makes that the choice, provided that `framework_serves`. For its own key this is decided by its whole
    calls where they were measured, host included; for another by `losses.expected_ratio`, and only if the mean of the records that best
    inform about PyTorch's time (`Pool.reference_records`) agrees. For decode steps both are corrected by PyTorch's bandwidth with as many
    key heads (`losses.torch_fills`). A record never serves when its config, completed by axes that came later, is outside the family's
    declared space or breaks a constraint on this target; the next one may serve. For another kernel a config is first moved to the nearest
    one that satisfies the constraints (`Family.refit`), within MOST_LOOKED changes per choice (flashtune.dispatch.policy.choices).
    The best config at its own sizes may not be the best here: of the first COMPARED configs those come first that the cost model expects
    to be faster than the nearest record's (`_gain`).
    A family's suitable sizes are a rule of thumb, which measurements override: step 1 ignores it. A record of any other step
    serves only where the problem's sizes suit its family, and serves other sizes only where every family that suits these was
    tried at its own: an untried one may be far better here.
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
        why = f"no kernel for this problem was measured on GPUs like {target.name}"
        note = f"{why}, so PyTorch's own attention serves (FLASHTUNE_UNMEASURED=1 lets {suited[0].name} serve)"
        yield Choice(kind="framework", spec=spec, note=note)
        return
    yield from (default_choice(family, problem, target) for family in computing)
    yield Choice(kind="framework", spec=spec, note="no template serves this problem here, PyTorch's own attention does")


def _steps(context: Context, suited: frozenset[str], source: Source) -> Iterator[Choice | Refusal]:
    """Records of exactly the key first, then the others."""
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
    """Choices by the first records of `near`, up to COMPARED configs: those with an expected gain over the nearest first, then the others
    in their order."""
    distinct: dict[Tried, Fit] = {}
    found: list[tuple[float, Fit | Refusal]] = []
    while len(distinct) < COMPARED and (record := next(near, None)) is not None:
        fit = fit_of(record[1], context)
        found.append((record[0], fit))
        if isinstance(fit, Fit):
            first = not distinct
            distinct.setdefault(_config(fit), fit)
            if first and not _informs(fit, context):
                break
    step = context.problem.n_q <= DECODE_ROWS
    logs = logs_us([(fit.family, fit.config) for fit in distinct.values()], context.problem, context.target, caution=CAUTION)
    # A kernel that ends before the host has made the next call gains nothing by being faster.
    here = {config: None if log is None else max(log, LOG_HOST) for config, log in zip(distinct, logs, strict=True)}
    fits = [(apart, fit) for apart, fit in found if isinstance(fit, Fit)]
    ahead: dict[Tried, tuple[float, Fit, float]] = {}
    for apart, fit in fits[1:]:
        if _reads_otherwise(fit, fits[0][1], context):
            continue
        gain = _gain(fit, fits[0][1], here)
        mismatches = losses.mismatches(fit.record.key, fits[0][1].record.key, context.key)
        per_distance = PER_DISTANCE_STEP if step else PER_DISTANCE
        worth = gain - per_distance * (apart - fits[0][0]) - OTHER_KIND * mismatches
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


def _informs(nearest: Fit, context: Context) -> bool:
    """True where the cost model informs: not of backwards, for which it isn't fitted, nor of calls that wait for the host."""
    log = log_us(nearest.family, nearest.config, context.problem, context.target)
    return context.problem.direction == "fwd" and log is not None and log >= LOG_HOST


def _reads_otherwise(fit: Fit, nearest: Fit, context: Context) -> bool:
    """True where only its record has a bias of another alignment than the call's: the model doesn't know of that."""
    theirs, near, ours = (losses.unaligned(key) for key in (fit.record.key, nearest.record.key, context.key))
    return near == ours != theirs


def _config(fit: Fit) -> Tried:
    return fit.family.name, fit.config


def _gain(fit: Fit, nearest: Fit, here: Mapping[Tried, float | None]) -> float:
    """Expected gain (logarithm) of `fit` over the nearest record's config, 0 where one of them has no estimate."""
    nearest_us, us = here[_config(nearest)], here[_config(fit)]
    return 0.0 if nearest_us is None or us is None else nearest_us - us
