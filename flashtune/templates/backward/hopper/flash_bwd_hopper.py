"""The family `flash_bwd_hopper`: warp-specialised attention backward for Hopper in Gluon, in five products.

Tiles and roles are those of FlashAttention-3's backward (Shah et al., 2024) as far as Triton can express them; the roles of a
program's warpgroups are in `_roles.jinja`.
"""

from flashtune.core.config import Config, KernelSpec, Value
from flashtune.core.problem import Problem
from flashtune.core.results import CompileFacts
from flashtune.core.target import Target
from flashtune.templates.backward.hopper.layout import DIVIDED_QUERIES, BackwardLayout, divided, refusal
from flashtune.templates.family import Axis, Constraint, Family
from flashtune.templates.hopper.layout import COLUMN_UNIT
from flashtune.templates.launches.hopper_backward import BackwardHopperHost
from flashtune.templates.predicates import warpgroup_facts

AXES = (
    Axis(name="BLOCK_M", values=(64, 128), why="query rows of a block: fewer steps and barriers against registers"),
    Axis(name="BLOCK_N", values=(128,), why="keys of a program, 64 for each of its warpgroups"),
    Axis(name="num_stages", values=(1, 2, 3), why="blocks of Q and dO in flight: latency hidden against shared memory"),
    Axis(
        name="dq_sums",
        values=("registers", "tma", "own"),
        why="how dQ is added up: by atomics, by the copy engine, or exclusively in programs with all keys of a head",
    ),
    Axis(
        name="exp_early",
        values=(False, True),
        why="whether all exponentials run under dP, or the compiler leaves most for after it, against a branch",
        absent=False,
    ),
    Axis(
        name="exp_poly",
        values=(False, True),
        why="whether a quarter of exponentials is made of multiply-adds, which spares the special unit, against instructions",
        absent=False,
    ),
    Axis(
        name="wait_early",
        values=(False, True),
        why="whether the wait for a block and its LSE precede the addition of the last dQ, which occupies registers for longer",
        absent=False,
    ),
    Axis(
        name="persistent",
        values=(False, True, "drawn", "taken"),
        why="whether programs take many tiles: in fixed shares, or dynamically with (drawn) or without (taken) two warps that finish dQ",
        absent=False,
    ),
    Axis(
        name="held",
        values=("none", "k", "v", "both"),
        why="operands with 64 columns in registers: fewer reads of shared memory against products that the issuing warps wait for",
        absent="none",
    ),
    COLUMN_UNIT,
    DIVIDED_QUERIES,
    Axis(name="section", values=(1, 2, 4, 8, 16), why="heads that run side by side: a triangle's balance against queries that stay in L2"),
)


CONSTRAINTS = (
    Constraint(
        name="shared memory",
        holds=lambda c, s, t: BackwardLayout.of(s, c).shared_bytes <= t.shared_bytes_per_block,
        why="keys, values, the stages of queries and dO, and dS live in shared memory",
        axes=("BLOCK_M", "BLOCK_N", "num_stages", "dq_sums", "persistent"),
    ),
    Constraint(
        name="registers",
        holds=lambda c, s, t: BackwardLayout.of(s, c).live_registers <= BackwardLayout.of(s, c).consumer_registers - 16,
        why="both scores and the sums of dK and dV live in a warpgroup's registers",
        axes=("BLOCK_M", "BLOCK_N", "held", "column_unit"),
    ),
    Constraint(
        name="unit of columns",
        holds=lambda c, s, t: BackwardLayout.of(s, c).unit_fits,
        why="another unit is for head sizes whose padding it shortens",
        axes=("column_unit",),
    ),
    Constraint(
        name="blocks ahead",
        holds=lambda c, s, t: c["num_stages"] != 1 or not BackwardLayout.of(s, c).wait_early,
        why="a block can't be waited for while the one before has the only stage",
        axes=("num_stages", "wait_early"),
    ),
    Constraint(
        name="tile after tile",
        holds=lambda c, s, t: not BackwardLayout.of(s, c).persistent or s.mask != "bias",
        why="a bias's tiles come for one tile of keys",
        axes=("persistent",),
    ),
    Constraint(
        name="finished dQ",
        holds=lambda c, s, t: not BackwardLayout.of(s, c).drawn or c["dq_sums"] != "tma",
        why="additions of the copy engine have no completion signal, and its warp doesn't know dynamic tiles",
        axes=("dq_sums", "persistent"),
    ),
    Constraint(
        name="divided queries",
        holds=lambda c, s, t: not BackwardLayout.of(s, c).divides or (c["dq_sums"] != "tma" and not c.get("persistent", False)),
        why="split-Q programs fill the GPU once, so none takes a second tile, and only sums go to memory",
        axes=("dq_sums", "persistent", "divided_queries"),
    ),
    Constraint(
        name="own sums",
        holds=lambda c, s, t: not (BackwardLayout.of(s, c).owns and BackwardLayout.of(s, c).finishes),
        why="a program with exclusive dQ finishes it itself",
        axes=("dq_sums", "persistent"),
    ),
    Constraint(
        name="parts of dQ",
        holds=lambda c, s, t: BackwardLayout.of(s, c).part_d >= 32,
        why="a tile of keys can be divided by no fewer columns",
        axes=("BLOCK_M", "BLOCK_N"),
    ),
)


def supports(spec: KernelSpec, target: Target) -> str | None:
    """The reason why this family can't serve `spec` on `target`, or None."""
    return refusal("flash_bwd_hopper", 128, spec, target)


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Tiles that fit, with dQ's sums by threads and by the copy engine."""
    # Changes to the first config.
    tiles: list[dict[str, Value]] = [
        {},
        {"held": "k"},
        {"held": "k", "wait_early": True},
        {"held": "v"},
        {"exp_early": True},
        {"dq_sums": "tma"},
        {"persistent": "taken"} if spec.causal else {"persistent": True},
    ]
    layout = BackwardLayout.of(spec, Config.of())
    if layout.block_d == 64:
        tiles = [
            {},
            {"held": "both"},
            {"held": "both", "exp_poly": True},
            {"held": "both", "persistent": "drawn"},
            {"held": "both", "persistent": "drawn", "num_stages": 3, "exp_poly": True},
            {"held": "both", "persistent": True},
            {"held": "both", "dq_sums": "tma", "num_stages": 3},
        ]
    elif min(len(pieces) for pieces in (layout.pieces, layout.v_pieces)) > 1:
        # Sums of fewer columns leave registers for K and V.
        tiles = [
            {},
            {"held": "both"},
            {"held": "both", "wait_early": True},
            {"held": "k", "wait_early": True},
            {"held": "both", "exp_early": True},
            {"held": "both", "persistent": "taken"} if spec.causal else {"held": "both", "persistent": True},
            {"held": "both", "exp_poly": True},
        ]
    first: dict[str, Value] = {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 2, "dq_sums": "registers"}
    first |= {"held": "none", "exp_early": False, "exp_poly": False, "wait_early": False, "persistent": False}
    first |= {"column_unit": 32, "divided_queries": False}
    usual, others = ([Config.of(first | tile, section=section) for tile in tiles] for section in ((4, 16) if spec.causal else (2, 1)))
    return usual + [config.replace(column_unit=16) for config in usual[1:4]] + others


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage."""
    layout = BackwardLayout.of(spec, config)
    return warpgroup_facts(target, registers=168, shared=layout.shared_bytes, consumers=layout.consumers)


def resized(config: Config, problem: Problem, target: Target) -> Config:
    """The config with split-Q where tiles are few, by programs that take no second tile, else with exclusive dQ (all tiles of a head for
    one program) where that pays."""
    config, spec = divided(config, problem, target, dq_sums="registers", persistent=False), problem.spec()
    if not every_query_sees_a_key(problem):
        return shared(config)
    one_tile, divides = problem.n_kv <= config.number("BLOCK_N"), config.get("divided_queries", False)
    by_heads = config.replace(dq_sums="own", persistent=True)
    if divides or spec.mask == "bias" or BackwardLayout.of(spec, by_heads).shared_bytes > target.shared_bytes_per_block:
        return config.replace(dq_sums="own", persistent=False) if one_tile else shared(config)
    pays = BackwardLayout.of(spec, by_heads).block_d <= 64 and problem.n_kv <= MOST_OWN_KEYS and heads_fill(problem, target)
    return by_heads if one_tile or pays else shared(config)


def shared(config: Config) -> Config:
    """The config with shared sums of dQ in place of exclusive ones."""
    return config.replace(dq_sums="registers") if config["dq_sums"] == "own" else config


MOST_OWN_KEYS = 512
"""Most keys of exclusive dQ over several tiles (race.txt in benchmarks/results/2026-11-26-h200-own-sums)."""

LEAST_FILLED = 0.9
"""Least share of busy programs for exclusive dQ."""


def heads_fill(problem: Problem, target: Target) -> bool:
    """True if key heads keep a program on each multiprocessor busy."""
    heads = problem.batch * problem.kv_heads
    return heads >= LEAST_FILLED * target.sms * -(-heads // target.sms)


def every_query_sees_a_key(problem: Problem) -> bool:
    """True if each query sees a key, which holds if the first and the last do."""
    return all(problem.band.keys(row, row, problem.n_kv) for row in (0, problem.n_q - 1))


FAMILY = Family(
    name="flash_bwd_hopper",
    folder="backward/hopper",
    direction="bwd",
    axes=AXES,
    constraints=CONSTRAINTS,
    supports=supports,
    tried_first=tried_first,
    expected=expected,
    interpretable=False,
    layout=BackwardLayout.of,
    resized=resized,
    path_axes=(
        "BLOCK_M",
        "num_stages",
        "dq_sums",
        "exp_early",
        "exp_poly",
        "wait_early",
        "persistent",
        "held",
        "column_unit",
        "divided_queries",
    ),
    gone={"ahead": False, "release": "memory"},
    repeatable=False,
    host=BackwardHopperHost,
)
"""Attention backward for Hopper."""
