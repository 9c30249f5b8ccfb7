"""What race_again.py races beside the rows of this GPU: another GPU's rows here, attentions of models that no row is of, other head sizes,
short calls, features at head sizes that have them without a row, kernels with running maxima for rows whose twin is far behind, and plain
and masked rows with all ways to rescale."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

from drawn import DRAWN, shapes_of
from forward_cells import TOKENS
from forward_report import LONG
from race_shapes import brief_shapes, few_shapes, short_shapes, sparse_shapes
from race_twins import is_rendered, measured
from searches import first_candidates, shipped
from tune import wanting

from flashtune.core.config import Config, Value, settles
from flashtune.core.nearness import distance, nearest
from flashtune.core.problem import DECODE_ROWS, Features, Problem, ProblemKey
from flashtune.core.results import Outcome, SearchResult
from flashtune.core.target import Target, find_target
from flashtune.dispatch.policy import choose, torch_has
from flashtune.templates import families
from flashtune.tuner.propose.space import Candidate

Candidates = list[Candidate] | Callable[[], list[Candidate]]
"""Those that race for a problem, or what finds them, which takes a while, in the process that checks them."""

Work = list[tuple[Problem, Candidates]]
"""Problems with their candidates."""

PLAIN_SIZES = (64, 128, 256)
"""Head sizes of plain problems in their order."""


def importance(problem: Problem) -> tuple[int, int]:
    """What sorts problems, those first that most calls are near to: plain ones in bf16 by head size, then in fp16, decoding, plain
    gradients, and all else."""
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


def of_another_gpu(
    results: Sequence[SearchResult], gpu: str, target: Target, candidates_of: Callable[[SearchResult], list[Candidate]]
) -> Work:
    """The problems of another GPU's rows that have no row of this one, the most important first, with what was best there."""
    known = {result.problem.key(target.slug) for result in results if result.gpu == target.slug}
    theirs = [result for result in results if result.gpu == gpu and result.problem.key(target.slug) not in known]
    return [(result.problem, candidates_of(result)) for result in sorted(theirs, key=lambda result: importance(result.problem))]


def of_models(target: Target, *, most: int, seed: int) -> Work:
    """Attentions of models that have no row, with LONG keys and queries or more or where torch serves, and their decoding steps: those of
    most worth first (`tune.wanting`), then those whose stand-ins gained least over the framework. What races is what a search of each
    would try first."""
    records, known = shipped(), families()
    found: list[tuple[float, float, Problem]] = []
    for problem, worth in wanting(records=records):
        choice = choose(problem, target, records, known, framework_serves=torch_has(problem))
        if problem.n_q == 1 or min(problem.n_q, problem.n_kv) >= LONG or choice.family is None:
            row = choice.record
            gain = 1.0 if row is None or row.relative_time is None else 1 / row.relative_time
            found.append((-round(worth, 2), gain, problem))
    found.sort(key=lambda one: one[:2])
    return [(problem, partial(first_to_race, problem, target, most=most, seed=seed)) for *_, problem in found]


TWINS_OF_NEAR_ROWS = 2
"""So many kernels with running maxima race beside those that settle them, of the nearest rows that have such a twin."""


def first_to_race(problem: Problem, target: Target, stored: Sequence[Candidate] = (), *, most: int, seed: int) -> list[Candidate]:
    """What is `stored` of a problem, then what a search of it would try first, `most` in all; where some of these settle maxima, also
    twins of near rows, for the row shall have a good one."""
    found = list(dict.fromkeys([*stored, *first_candidates(problem, target, count=most, seed=seed)]))[:most]
    return beside_settled(found, problem, target)


def beside_settled(found: Sequence[Candidate], problem: Problem, target: Target) -> list[Candidate]:
    """`found`, and where some of them settle maxima, the twins of the nearest rows, or of the first itself where there are none."""
    first = next((candidate for candidate in found if settles(candidate.config)), None)
    if first is None:
        return list(found)
    spec, kind, twins = problem.spec(), first.family, dict[Candidate, None]()
    for _, record in nearest(problem.key(target.slug), shipped()):
        if record.twin is not None and record.twin.template == kind.name and len(twins) < TWINS_OF_NEAR_ROWS:
            moved = kind.refitted(kind.completed(record.twin.config), spec, target)
            if moved is not None and not settles(moved):
                twins[Candidate(family=kind, config=kind.resized(moved, problem, target))] = None
    own = first.config.replace(maximum="running")
    if not twins and kind.violated(own, spec, target) is None:
        twins[Candidate(family=kind, config=own)] = None
    return list(dict.fromkeys([*found, *twins]))


LEAST_TWIN = 0.86
"""A twin should reach this share of its row's rate: the best that long searches found do so for most plain problems."""


def of_twins(results: Sequence[SearchResult], target: Target) -> Work:
    """Rows whose winner settles maxima while the best measured kernel that doesn't is far behind, or was never measured: those that lose
    most first, with both of these, twins of near rows, and the family's starts with running maxima."""
    found: list[tuple[float, Problem, Candidates]] = []
    for result in _latest(results, target).values():
        known = measured([result])
        if not known or not settles(known[0].config):
            continue
        winner, twin = known[0], next((outcome for outcome in known if not settles(outcome.config)), None)
        assert winner.measurement is not None
        share = 0.0 if twin is None or twin.measurement is None else winner.measurement.median_us / twin.measurement.median_us
        if share < LEAST_TWIN:
            stored = [_valid(outcome, result.problem, target) for outcome in (winner, twin) if outcome is not None]
            racing = beside_settled([one for one in stored if one is not None], result.problem, target)
            kind, spec = families()[winner.template], result.problem.spec()
            starts = [config for config in kind.starts(spec, target) if not settles(config)][:2]
            racing += [Candidate(family=kind, config=config) for config in starts]
            found.append((share, result.problem, list(dict.fromkeys(racing))))
    found.sort(key=lambda one: one[0])
    return [(problem, racing) for _, problem, racing in found]


RESCALED_LENGTHS = (4096, 1024, 16384, 2048, 8192, 512)
"""Lengths of plain rows in the order in which they race with all ways to rescale."""

RUNNING_ONES = 1
"""So many of a row's kernels with running maxima race all ways."""

MASKED = Features(mask="bool")
"""Rows with a boolean mask race so, too, behind the plain ones."""


def of_rescaled(results: Sequence[SearchResult], target: Target) -> Work:
    """Plain and MASKED rows in 16 bits, those of one length after those of another: winner and best kernels with running maxima, the latter
    and the winner's tiles with every other way to rescale what came before a maximum that grew. A kernel's successor races beside it."""
    work: Work = []
    for result in _latest(results, target).values():
        problem, spec = result.problem, result.problem.spec()
        plain = importance(problem)[0] <= 1 and problem.n_kv in RESCALED_LENGTHS and problem.d_v == problem.d
        if problem.direction == "bwd" or not (plain or problem.features == MASKED):
            continue
        known = measured([result])
        stored = [one for one in _winner_and_running(known, problem, target) if "rescale" in one.config]
        ways = [replace(one, config=config) for one in stored for config in (one.config, one.family.successor(one.config))]
        for one in stored:
            ways.append(replace(one, config=one.config.replace(rescale="outgrown")))
            # Maxima that settle are those that rarely grow: running ones that are rescaled where they grew are hardly faster than the twin.
            tried = ("always", "outgrown") if settles(one.config) else ("always", "grown", "outgrown")
            ways += [replace(one, config=one.config.replace(maximum="running", rescale=way)) for way in tried]
        found = [one for one in dict.fromkeys(ways) if one.family.violated(one.config, spec, target) is None]
        work.append((problem, found))
    return sorted(work, key=lambda item: (item[0].features == MASKED, _place(item[0].n_kv), importance(item[0])))


def _place(length: int) -> int:
    return RESCALED_LENGTHS.index(length) if length in RESCALED_LENGTHS else len(RESCALED_LENGTHS)


CHUNKED: tuple[dict[str, Value], ...] = (
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3, "tiles": "loop", "pingpong": True},
    {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "tiles": "loop", "pingpong": True},
    {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3, "tiles": "one", "pingpong": True},
    {"BLOCK_M": 192, "BLOCK_N": 64, "num_stages": 2, "tiles": "loop", "pingpong": True},
    {"BLOCK_M": 192, "BLOCK_N": 64, "num_stages": 2, "tiles": "loop", "pingpong": False},
    {"BLOCK_M": 192, "BLOCK_N": 64, "num_stages": 3, "tiles": "one", "pingpong": False},
    {"BLOCK_M": 192, "BLOCK_N": 64, "num_stages": 3, "tiles": "one", "pingpong": False, "intra_wg_overlap": 0},
)
"""What the room that chunks of columns leave is good for: more blocks in flight, larger ones, or more queries; what wins most first."""

MAXIMA: tuple[dict[str, Value], ...] = (
    {"maximum": "first", "rescale": "grown"},
    {"maximum": "running", "rescale": "always"},
    {"maximum": "running", "rescale": "outgrown"},
    {"maximum": "running", "rescale": "grown"},
)
"""Ways to hold row maxima: of CHUNKED tiles the first that is valid races with each, the others with the row's own."""


def of_chunks(results: Sequence[SearchResult], target: Target) -> Work:
    """Forward rows of head sizes between 128 and 256: winner and best kernel with running maxima, each with its tiles in
    chunks of columns, and the first of these with all ways to hold row maxima; where the winner has chunks already, these ways alone."""
    work: Work = []
    for result in _latest(results, target).values():
        problem, spec, known = result.problem, result.problem.spec(), measured([result])
        if problem.direction == "bwd" or problem.n_q <= DECODE_ROWS or not 128 < problem.d < 256 or not known:
            continue
        own = [one for one in _winner_and_running(known, problem, target) if "rescale" in one.config]
        columns: dict[str, Value] = {"smem_columns": "chunks", "v_columns": "padded" if problem.d_v in PLAIN_SIZES else "pieces"}
        again, ways = known[0].config.get("smem_columns", "padded") == "chunks", list[Candidate]()
        for one in own[:1] if again else own:
            base = one.config.replace(**columns, intra_wg_overlap=1)
            orders = {"one": "fixed", "loop": "drawn" if spec.banded else "fixed"}
            tiled = [base.replace(**tiles).replace(order=orders[str(tiles["tiles"])]) for tiles in (CHUNKED[:2] if again else CHUNKED)]
            tiled = [config for config in tiled if one.family.violated(config, spec, target) is None]
            ways += [replace(one, config=one.family.successor(config)) for config in tiled if not again]
            ways += [replace(one, config=config.replace(**maxima)) for config in (tiled if again else tiled[:1]) for maxima in MAXIMA]
        found = [one for one in dict.fromkeys(own + ways) if one.family.violated(one.config, spec, target) is None]
        work.append((problem, found))
    return sorted(work, key=lambda item: (_place(item[0].n_kv), importance(item[0])))


def of_units(results: Sequence[SearchResult], target: Target) -> Work:
    """Rows of head sizes of which products leave out columns by a unit of 16, of this GPU or another one: winner and best kernel with
    running maxima, of a backward the best two, each with both units, and in a forward with V in pieces of the smaller one or not."""
    work: Work = []
    mine_last = sorted(results, key=lambda result: result.gpu == target.slug)
    for result in {result.problem.key(target.slug): result for result in mine_last}.values():
        problem, known = result.problem, measured([result])
        backward = problem.direction == "bwd"
        if backward:
            own = [one for outcome in known[:2] if (one := _valid(outcome, problem, target)) is not None]
        else:
            own = _winner_and_running(known, problem, target)
        columns = ("",) if backward else ("padded", "pieces")
        units = [(32, columns[0]), *((16, kind) for kind in columns)]
        changed: list[dict[str, Value]] = [{"column_unit": unit} | ({"v_columns": kind} if kind else {}) for unit, kind in units]
        ways = [replace(one, config=one.config.replace(**more)) for one in own if "column_unit" in one.config for more in changed]
        found = [one for one in dict.fromkeys(own + ways) if one.family.violated(one.config, problem.spec(), target) is None]
        if {one.config.get("column_unit", 32) for one in found} == {16, 32}:
            work.append((problem, found))
    return sorted(work, key=lambda item: (_place(item[0].n_kv), importance(item[0])))


def of_changed(results: Sequence[SearchResult], target: Target, *, most: int) -> Work:
    """Problems of rows of this GPU, or of another one of its architecture, whose kernel's text has changed since: the best configs of each
    row as they are, and nothing else."""
    stale = [r for r in results if find_target(r.gpu).arch == target.arch and not is_rendered(r)]
    found: dict[ProblemKey, tuple[Problem, dict[Candidate, None]]] = {}
    for result in stale:
        _, racing = found.setdefault(result.problem.key(target.slug), (result.problem, {}))
        own = [one for outcome in measured([result]) if (one := _valid(outcome, result.problem, target)) is not None]
        racing.update(dict.fromkeys(own[:most]))
    return sorted([(problem, list(racing)) for problem, racing in found.values()], key=lambda one: importance(one[0]))


NEAR_WINNERS = 2
"""So many winners of the nearest rows of a head size race beside an older row's own."""


def of_older(results: Sequence[SearchResult], target: Target) -> Work:
    """Forward rows of many query rows whose kernels were raced before any could rescale only what grew, other head sizes than plain ones
    first, those without features before others, and kernels with running maxima, which gain most, before those that settle: winner and best
    kernel with running maxima, each both ways, and winners of near rows of the head size. Dropout is left out, whose checks compile for
    longest."""
    latest = _latest(results, target)
    found: list[tuple[tuple[bool, bool, bool], Problem, Candidates]] = []
    for key, result in latest.items():
        problem, spec, known = result.problem, result.problem.spec(), measured([result])
        new = any("rescale" in outcome.config for outcome in known)
        if (
            problem.direction == "bwd"
            or problem.n_q <= DECODE_ROWS
            or problem.dtype == "fp8"
            or problem.features.dropout
            or not known
            or new
        ):
            continue
        same = [(distance(key, k), r) for k, r in latest.items() if k != key and (k.d, k.d_v, k.direction) == (key.d, key.d_v, "fwd")]
        near = [measured([r])[:1] for _, r in sorted(same, key=lambda one: one[0]) if r.problem.n_q > DECODE_ROWS][:NEAR_WINNERS]
        own = _winner_and_running(known, problem, target)
        moved = [one for others in near for outcome in others if (one := _moved(outcome, problem, target)) is not None]
        ways = [
            replace(one, config=one.config.replace(rescale=way)) for way in ("always", "grown") for one in own if "rescale" in one.config
        ]
        ways += [replace(one, config=one.config.replace(rescale="grown")) for one in moved if "rescale" in one.config]
        racing = [one for one in dict.fromkeys([*own, *ways]) if one.family.violated(one.config, spec, target) is None]
        if len(racing) > len(own):
            features = bool(problem.features.as_json().keys() - {"causal"})
            plain = problem.d == problem.d_v and problem.d in PLAIN_SIZES
            found.append(((plain, features, settles(known[0].config)), problem, racing))
    return [(problem, racing) for _, problem, racing in sorted(found, key=lambda one: one[0])]


def _moved(outcome: Outcome, problem: Problem, target: Target) -> Candidate | None:
    """Another problem's config where this one's constraints hold."""
    kind = families()[outcome.template]
    if kind.supports(problem.spec(), target) is not None:
        return None
    config = kind.refitted(kind.completed(outcome.config), problem.spec(), target)
    return None if config is None else Candidate(family=kind, config=config)


def _latest(results: Sequence[SearchResult], target: Target) -> dict[ProblemKey, SearchResult]:
    """A GPU's results by their keys: of one that was raced again the later."""
    return {result.problem.key(target.slug): result for result in results if result.gpu == target.slug}


def _winner_and_running(known: Sequence[Outcome], problem: Problem, target: Target) -> list[Candidate]:
    """Of measured outcomes, best first, the winner and RUNNING_ONES with running maxima, where they are valid today."""
    chosen = [*known[:1], *[outcome for outcome in known if not settles(outcome.config)][:RUNNING_ONES]]
    return [one for outcome in chosen if (one := _valid(outcome, problem, target)) is not None]


def _valid(outcome: Outcome, problem: Problem, target: Target) -> Candidate | None:
    """The candidate of a stored outcome, completed, where it is valid today."""
    kind = families()[outcome.template]
    config = kind.completed(outcome.config)
    return None if kind.violated(config, problem.spec(), target) is not None else Candidate(family=kind, config=config)


def of_short(target: Target, results: Sequence[SearchResult], *, most: int, seed: int) -> Work:
    """All of `short_shapes`; what is stored of those that have a row races again beside what a search of today would try first."""
    known = {result.problem.key(target.slug): _stored(result, target) for result in results}
    problems = short_shapes()
    return [(p, partial(first_to_race, p, target, tuple(known.get(p.key(target.slug), ())), most=most, seed=seed)) for p in problems]


def _stored(result: SearchResult, target: Target) -> list[Candidate]:
    """The best two of what is stored."""
    return [one for outcome in measured([result])[:2] if (one := _valid(outcome, result.problem, target)) is not None]


def of_few(target: Target, results: Sequence[SearchResult], *, most: int, seed: int) -> Work:
    """Those of `few_shapes` that have no row."""
    return _without_row(few_shapes(), target, results, most=most, seed=seed)


def of_brief(target: Target, results: Sequence[SearchResult], *, most: int, seed: int) -> Work:
    """Those of `brief_shapes` that have no row."""
    return _without_row(brief_shapes(), target, results, most=most, seed=seed)


def _without_row(problems: Sequence[Problem], target: Target, results: Sequence[SearchResult], *, most: int, seed: int) -> Work:
    known = _latest(results, target)
    missing = (problem for problem in problems if problem.key(target.slug) not in known)
    return [(problem, partial(first_to_race, problem, target, most=most, seed=seed)) for problem in missing]


FOUND_NEAR = 4
"""So many of their winners race, those of the nearest problems."""


def of_sparse(target: Target, results: Sequence[SearchResult], *, most: int, seed: int) -> Work:
    """All of `sparse_shapes`: what is stored of those that have a row and what searches found for drawn shapes near them race beside what
    a search of today would try first."""
    known = {result.problem.key(target.slug): _stored(result, target) for result in results}

    def racing(problem: Problem) -> Candidates:
        stored = known.get(problem.key(target.slug), [])
        beside = tuple(dict.fromkeys([*stored, *found_near(problem, target)]))
        return partial(first_to_race, problem, target, beside, most=most + len(beside) // 2, seed=seed)

    return [(problem, racing(problem)) for problem in sparse_shapes()]


def found_near(problem: Problem, target: Target) -> list[Candidate]:
    """What searches found for the drawn shapes that are nearest to `problem`, moved to its constraints where it has to be."""
    found: dict[Candidate, None] = {}
    key, spec = problem.key(target.slug), problem.spec()
    for other, template, config in sorted(_drawn_and_found(), key=lambda one: distance(key, one[0].key(target.slug))):
        kind = families()[template]
        if other.n_q > 1 and problem.n_q > 1 and kind.supports(spec, target) is None and len(found) < FOUND_NEAR:
            moved = kind.refitted(kind.completed(config), spec, target)
            if moved is not None:
                found[Candidate(family=kind, config=moved)] = None
    return list(found)


@cache
def _drawn_and_found() -> tuple[tuple[Problem, str, Config], ...]:
    """Each drawn shape with what its search found."""
    kept = (one for path in DRAWN for one in shapes_of(path))
    return tuple((problem, search["template"], Config.of(search["config"])) for problem, _, search in kept if search.get("config"))


SIZES = ((40, 40), (72, 72), (80, 80), (96, 96), (192, 128), (160, 160), (192, 192), (112, 112))
"""Head sizes of K and of V that models have beside those of plain cells."""

WINDOW, MASK = Features(causal=True, window=(1024, 0)), Features(mask="bool")


def of_sizes(target: Target, results: Sequence[SearchResult], *, most: int, seed: int) -> Work:
    """Problems of other head sizes that have no row: full and causal at two lengths, then with a window and with a mask, then decoding."""
    known = {result.problem.key(target.slug) for result in results}
    plain = [(n, features) for n in (4096, 1024) for features in (Features(), Features(causal=True))]
    wanted = [_of_size(d, d_v, n, features) for n, features in [*plain, (4096, WINDOW), (2048, MASK)] for d, d_v in SIZES]
    steps = [(d, d_v, sharing) for d, d_v in ((192, 128), (96, 96), (64, 64), (128, 128)) for sharing in (1, 4)]
    wanted += [
        replace(_of_size(d, d_v, n, Features()), batch=8, heads=32, kv_heads=32 // sharing, n_q=1)
        for d, d_v, sharing in steps
        for n in (512, 4096)
    ]
    return [(p, partial(first_to_race, p, target, most=most, seed=seed)) for p in wanted if p.key(target.slug) not in known]


def _of_size(d: int, d_v: int, n: int, features: Features) -> Problem:
    """As many tokens as plain cells have, in 16 heads."""
    return Problem(batch=TOKENS // n, heads=16, kv_heads=16, n_q=n, n_kv=n, d=d, d_v=d_v, dtype="bf16", features=features)
