"""Candidates of a race: configs of stored records with their near relatives, the order of problems, and the rule that ranks the result.

Where a candidate has the fast softmax, which expects row maxima to settle, one with a running maximum races beside it: the record's
fallback for scores that the fast softmax mispredicts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from benchmarks.shared.cells import cells
from benchmarks.shared.searches import first_candidates, shipped
from benchmarks.shared.trials import todays
from flashtune.core.code.shipped import PACKAGE, shipped_index
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import Value, asks_first, settles
from flashtune.core.problems.problem import Problem, unfit_heads
from flashtune.core.records.results import PROVIDERS, Fate, Outcome, SearchResult
from flashtune.templates import family
from flashtune.templates.rendering import text_hash, variant_of
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.timing.racing import by_mispredicted

Candidates = list[Candidate] | Callable[[], list[Candidate]]
"""Candidates of a problem, or a slow function that finds them, called in the process that checks them."""

Work = list[tuple[Problem, Candidates]]

VARIED: dict[str, tuple[Value, ...]] = {
    "combine": ("kernel", "last", "rows"),
    "persistent": (False, True, "dynamic"),
    "held": ("none", "k", "v", "both"),
    "exp_poly": (False, True),
    "wait_early": (False, True),
}
"""Axes of a stored config whose every value races."""

PLAIN_SIZES = (64, 128, 256)
"""Head sizes of plain problems in their order."""

SHIPPED_GAIN = 0.01
"""Gain over a shipped kernel from which on another is worth its machine code."""


def measured(result: SearchResult) -> list[Outcome]:
    """Correct outcomes with a time, the best of the closing race first, then by time."""
    known = [o for o in result.outcomes if o.measurement is not None and o.fate is Fate.CORRECT]
    return sorted(known, key=lambda o: (o.rank or 99, o.measurement.median_us if o.measurement else 0.0))


def is_current(result: SearchResult) -> bool:
    """True where the winner, if any, is still the kernel that was measured."""
    best = result.best
    if best is None:
        return True
    tried = todays(best.template, best.config)
    return (
        tried is not None and text_hash(kind := family(tried[0]), variant_of(kind, result.problem.spec(), tried[1])) == best.template_hash
    )


def importance(problem: Problem) -> tuple[int, int]:
    """Sort key of problems: plain ones in bf16 by head size, then in fp16, decoding, plain gradients, and all else."""
    p, f = problem, problem.features.as_json().keys() - {"causal"}
    plain = not f and p.d == p.d_v and p.d in PLAIN_SIZES and p.gqa_ratio == 1 and p.n_q == p.n_kv
    place = PLAIN_SIZES.index(p.d) if p.d in PLAIN_SIZES else len(PLAIN_SIZES)
    if p.n_q == 1:
        return 2, place
    if p.direction == "bwd":
        return (3 if plain else 5), place
    if plain and p.dtype in ("bf16", "fp16"):
        return (0 if p.dtype == "bf16" else 1), place
    return 4, place


def stored(result: SearchResult, target: Target, *, most: int) -> list[Candidate]:
    """The best configs of a record that are valid today, best first."""
    found = []
    for outcome in measured(result)[:most]:
        tried = todays(outcome.template, outcome.config)
        if tried is not None and (kind := family(tried[0])).violated(tried[1], result.problem.spec(), target) is None:
            found.append(Candidate(family=kind, config=tried[1]))
    return found


def candidates_of(result: SearchResult, target: Target, *, most: int) -> list[Candidate]:
    """Stored configs with the other values of VARIED, a backward's starts, and a fallback beside the fast softmax."""
    spec, found = result.problem.spec(), dict[Candidate, None]()
    for one in stored(result, target, most=most):
        relatives = [one.config]
        if "maximum" in one.config and result.problem.dtype != "fp8":
            relatives += [one.config.replace(maximum="first", rescale="grown"), one.config.replace(maximum="running")]
        for axis, values in VARIED.items():
            if axis in one.config:
                relatives += [one.config.replace(**{axis: value}) for value in values]
        found |= {Candidate(family=one.family, config=c): None for c in relatives if one.family.violated(c, spec, target) is None}
    if result.problem.direction == "bwd":
        # Few were tried of each, and the best may not fit the kernel of today.
        kinds = {family(outcome.template) for outcome in measured(result)[:most] if outcome.template not in PROVIDERS}
        starts = [Candidate(family=kind, config=config) for kind in kinds for config in kind.starts(spec, target)[:7]]
        return list(dict.fromkeys([*list(found)[: 4 * most + 3], *starts]))
    # Decoding kernels are checked and timed in no time, and each way to add up has configs that suit it.
    chosen = list(found)[: 3 * most if any("combine" in candidate.config for candidate in found) else most + 1]
    return with_fallback(chosen, result.problem, target, stored(result, target, most=99))


def with_fallback(chosen: Sequence[Candidate], problem: Problem, target: Target, known: Sequence[Candidate] = ()) -> list[Candidate]:
    """`chosen`, and where some have the fast softmax: the best of `known` with a running maximum, and where none is left the starts."""
    found = dict.fromkeys(chosen)
    fast = next((one for one in chosen if settles(one.config)), None)
    if fast is None:
        return list(found)
    found |= dict.fromkeys([one for one in known if "maximum" in one.config and not settles(one.config)][:1])
    if all(settles(one.config) for one in found):
        spec, kind = problem.spec(), fast.family
        running = [fast.config.replace(maximum="running"), *(config for config in kind.starts(spec, target) if not settles(config))]
        valid = [Candidate(family=kind, config=config) for config in running if kind.violated(config, spec, target) is None]
        found |= dict.fromkeys(valid[:2])
    return list(found)


def first_to_race(problem: Problem, target: Target, *, most: int, seed: int) -> list[Candidate]:
    """The first candidates of a search of this problem, with a fallback."""
    return with_fallback(first_candidates(problem, target, count=most, seed=seed), problem, target)


def of_records(results: Iterable[SearchResult], target: Target, *, most: int) -> Work:
    """This GPU's records of kernels in their order."""
    own = (one for one in results if one.gpu == target.slug and not any(outcome.template in PROVIDERS for outcome in measured(one)[:1]))
    return [(result.problem, candidates_of(result, target, most=most)) for result in own]


def of_another_gpu(results: Sequence[SearchResult], gpu: str, target: Target, *, most: int) -> Work:
    """Problems of another GPU's records that have none of this one, the most important first, with the best configs there."""
    known = {result.problem.key(target.slug) for result in results if result.gpu == target.slug}
    fitting = (one for one in results if one.gpu == gpu and unfit_heads(one.problem.d, one.problem.d_v) is None)
    theirs = [result for result in fitting if result.problem.key(target.slug) not in known]
    return [(r.problem, candidates_of(r, target, most=most)) for r in sorted(theirs, key=lambda result: importance(result.problem))]


def of_changed(results: Iterable[SearchResult], target: Target, *, most: int) -> Work:
    """Problems of records of this architecture whose kernel has changed since, with each record's best configs as they are."""
    found: dict[Problem, dict[Candidate, None]] = {}
    for result in results:
        if find_target(result.gpu).arch == target.arch and not is_current(result):
            found.setdefault(result.problem, {}).update(dict.fromkeys(stored(result, target, most=most)))
    return sorted([(problem, list(racing)) for problem, racing in found.items()], key=lambda one: importance(one[0]))


def of_models(target: Target, *, most: int, seed: int) -> Work:
    """Models' attentions that have no record, with the first candidates of a search of each."""
    known = {record.key for record in shipped()}
    missing = [cell.problem for cell in cells(("models",)) if cell.problem.key(target.slug) not in known]
    return [(problem, partial(first_to_race, problem, target, most=most, seed=seed)) for problem in missing]


def ships(candidate: Candidate, problem: Problem) -> bool:
    """True where the package holds machine code of a candidate."""
    return candidate.variant(problem.spec()).id in {kernel.variant_id for kernel in shipped_index(PACKAGE).kernels}


def shipped_first(
    ranks: Sequence[Candidate], times: Mapping[Candidate, float], ships: Callable[[Candidate], bool], *, d: int
) -> list[Candidate]:
    """`ranks` with a winner and a fallback that are worth most: of kernels within SHIPPED_GAIN of the first the one that takes least
    where scores mispredict the fast softmax (its fallback serves there), or else one with a running maximum, or one that ships.

    `d` is the head size.
    """
    running = by_mispredicted({one: times[one] for one in ranks if not settles(one.config)}, d)
    adverse = dict(running)
    adverse |= {one: min(running.values(), default=0.0) for one in ranks if settles(one.config)}

    def among(some: Sequence[Candidate], by: Mapping[Candidate, float]) -> Candidate:
        near = [one for one in some if by[one] <= (1 + SHIPPED_GAIN) * by[some[0]]]
        least = min(adverse[one] for one in near)
        return min(
            near,
            key=lambda one: (
                adverse[one] > (1 + SHIPPED_GAIN) * least,
                settles(one.config),
                not asks_first(one.config),
                not ships(one),
            ),
        )

    winner = among(ranks, times)
    others = [one for one in ranks if one != winner]
    if rest := [one for one in running if one != winner]:
        fallback = among(rest, adverse)
        first = next(place for place, one in enumerate(others) if not settles(one.config))
        others.remove(fallback)
        others.insert(first, fallback)
    return [winner, *others]
