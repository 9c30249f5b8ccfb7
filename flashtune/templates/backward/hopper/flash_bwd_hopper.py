"""The family `flash_bwd_hopper`: warp-specialised attention backward for Hopper in Gluon, in five products.

Tiles and roles are those of FlashAttention-3's backward (Shah et al., 2024) as far as Triton can express them; the roles of a
program's warpgroups are in `_roles.jinja`.
"""

from functools import partial

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec, Value
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts
from flashtune.templates.backward.hopper.layout import DIVIDED_QUERIES, BackwardLayout, divided, refusal
from flashtune.templates.family import Axis, Constraint, Family
from flashtune.templates.launches.hopper_backward import BackwardHopperHost
from flashtune.templates.predicates import warpgroup_facts

AXES = (
    Axis(name="BLOCK_M", values=(64,), why="query rows of a block: more leave no registers"),
    Axis(name="BLOCK_N", values=(128,), why="keys of a program, 64 for each of its warpgroups"),
    Axis(name="num_stages", values=(1, 2, 3), why="blocks of Q and dO in flight: latency hidden against shared memory"),
    Axis(
        name="dq_sums",
        values=("registers", "own"),
        why="how dQ is added up: by atomics, or not at all in programs with all keys of a head",
    ),
    Axis(
        name="exp_poly",
        values=(False, True),
        why="whether a quarter of exponentials is made of multiply-adds, which spares the special unit, against instructions",
    ),
    Axis(
        name="wait_early",
        values=(False, True),
        why="whether the wait for a block and its LSE precede the addition of the last dQ, which occupies registers for longer",
    ),
    Axis(
        name="persistent",
        values=(False, True, "dynamic"),
        why="whether programs take many tiles, in fixed shares or dynamically, and prefetch the next one's keys",
    ),
    Axis(
        name="held",
        values=("none", "k", "v", "both"),
        why="operands with 64 columns in registers: fewer reads of shared memory against products that the issuing warps wait for",
    ),
    DIVIDED_QUERIES,
    Axis(name="section", values=(1, 2, 4, 8, 16), why="heads that run side by side: a triangle's balance against queries that stay in L2"),
)


CONSTRAINTS = (
    Constraint(
        name="shared memory",
        holds=lambda c, s, t: BackwardLayout.of(s, c).shared_bytes <= t.shared_bytes_per_block,
        why="keys, values, the stages of queries and dO, and dS live in shared memory",
        axes=("BLOCK_M", "BLOCK_N", "num_stages", "persistent"),
    ),
    Constraint(
        name="registers",
        holds=lambda c, s, t: BackwardLayout.of(s, c).live_registers <= BackwardLayout.of(s, c).consumer_registers - 16,
        why="both scores and the sums of dK and dV live in a warpgroup's registers",
        axes=("BLOCK_M", "BLOCK_N", "held"),
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
        name="packed sequences",
        holds=lambda c, s, t: not s.packed or not (BackwardLayout.of(s, c).owns or BackwardLayout.of(s, c).divides),
        why="programs don't know how many tiles a sequence has",
        axes=("dq_sums", "divided_queries"),
    ),
    Constraint(
        name="divided queries",
        holds=lambda c, s, t: not BackwardLayout.of(s, c).divides or not c["persistent"],
        why="split-Q programs fill the GPU once, so none takes a second tile",
        axes=("persistent", "divided_queries"),
    ),
)


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Tiles that fit, with operands in registers and without, and schedulers."""
    # Changes to the first config.
    tiles: list[dict[str, Value]] = [
        {},
        {"held": "k"},
        {"held": "k", "wait_early": True},
        {"held": "v"},
        {"persistent": "dynamic"} if spec.causal else {"persistent": True},
    ]
    layout = BackwardLayout.of(spec, Config.of())
    if layout.block_d == 64:
        tiles = [
            {},
            {"held": "both"},
            {"held": "both", "exp_poly": True},
            {"held": "both", "persistent": "dynamic"},
            {"held": "both", "persistent": "dynamic", "num_stages": 3, "exp_poly": True},
            {"held": "both", "persistent": True},
        ]
    elif min(len(pieces) for pieces in (layout.pieces, layout.v_pieces)) > 1:
        # Sums of fewer columns leave registers for K and V.
        tiles = [
            {},
            {"held": "both"},
            {"held": "both", "wait_early": True},
            {"held": "k", "wait_early": True},
            {"held": "both", "persistent": "dynamic"} if spec.causal else {"held": "both", "persistent": True},
            {"held": "both", "exp_poly": True},
        ]
    first: dict[str, Value] = {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 2, "dq_sums": "registers"}
    first |= {"held": "none", "exp_poly": False, "wait_early": False, "persistent": False, "divided_queries": False}
    usual, others = (
        [Config.of(first | tile, section=section) for tile in tiles] for section in ((4, 16) if spec.causal or layout.lists else (2, 1))
    )
    return usual + others


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage."""
    layout = BackwardLayout.of(spec, config)
    return warpgroup_facts(target, registers=168, shared=layout.shared_bytes, consumers=layout.consumers)


def resized(config: Config, problem: Problem, target: Target) -> Config:
    """The config with split-Q where tiles are few, by programs that take no second tile, else with exclusive dQ where one tile has all
    keys of a head."""
    if problem.features.mods:
        # Lists of blocks aren't divided, and a mask may hide all keys of a query.
        return config.replace(divided_queries=False, dq_sums="registers")
    config = divided(config, problem, target, dq_sums="registers", persistent=False)
    owns = not problem.features.packed and every_query_sees_a_key(problem) and problem.n_kv <= config.number("BLOCK_N")
    if not owns:
        return config.replace(dq_sums="registers") if config["dq_sums"] == "own" else config
    persistent = config.replace(dq_sums="own", persistent=True)
    broken = problem.features.mask == "bias" or BackwardLayout.of(problem.spec(), persistent).shared_bytes > target.shared_bytes_per_block
    return config.replace(dq_sums="own", persistent=False) if broken or config["divided_queries"] else persistent


def every_query_sees_a_key(problem: Problem) -> bool:
    """True if each query sees a key, which holds if the first and the last do."""
    return all(problem.band.keys(row, row, problem.n_kv) for row in (0, problem.n_q - 1))


FAMILY = Family(
    name="flash_bwd_hopper",
    folder="backward/hopper",
    direction="bwd",
    axes=AXES,
    constraints=CONSTRAINTS,
    functions=True,
    refuses=partial(refusal, "flash_bwd_hopper", 128),
    tried_first=tried_first,
    expected=expected,
    interpretable=False,
    layout=BackwardLayout.of,
    resized=resized,
    path_axes=(
        "num_stages",
        "dq_sums",
        "exp_poly",
        "wait_early",
        "persistent",
        "held",
        "divided_queries",
    ),
    repeatable=False,
    host=BackwardHopperHost,
)
"""Attention backward for Hopper."""
