"""The family `flash_bwd_hopper`: warp-specialised attention backward for Hopper in Gluon, in five products.

Tiles and roles are those of FlashAttention-3's backward (Shah et al., 2024) as far as Triton can express them; what is shared, a program's
tile of keys and two warpgroups of 64 of them, is in `_hopper_roles.jinja`.
"""

from flashtune.core.config import Config, KernelSpec, Value
from flashtune.core.results import CompileFacts
from flashtune.core.target import Target
from flashtune.templates.backward.hopper_layout import BackwardLayout
from flashtune.templates.family import Axis, Constraint, Family, padded

AXES = (
    Axis(name="BLOCK_M", values=(64, 128), why="query rows of a block: fewer steps and barriers against registers"),
    Axis(name="BLOCK_N", values=(128,), why="keys of a program, 64 for each of its warpgroups"),
    Axis(name="num_stages", values=(1, 2, 3), why="blocks of Q and dO in flight: latency hidden against shared memory"),
    Axis(name="dq_sums", values=("registers", "tma"), why="who adds dQ up in memory: threads at once, or the copy engine by shared memory"),
    Axis(
        name="exp_early",
        values=(False, True),
        why="whether all exponentials run under dP, or the compiler leaves most for after it, against a branch",
        absent=False,
        unsaid=True,
    ),
    Axis(
        name="ahead",
        values=(False, True),
        why="whether exponentials of a block run under products of the one before, against registers and a product for nothing at the end",
        absent=False,
        unsaid=True,
    ),
    Axis(
        name="persistent",
        values=(False, True),
        why="whether programs take tile after tile, so that copies and stores hide, against shared memory and a fixed share of tiles",
        absent=False,
        unsaid=True,
    ),
    Axis(
        name="release",
        values=("memory", "hardware"),
        why="who says that a stage is read: a warpgroup whose warps have met, or each warp by itself at one of few hardware barriers",
        absent="memory",
        unsaid=True,
    ),
    Axis(
        name="held",
        values=("none", "k", "v", "both"),
        why="of which 64 columns stay in registers: fewer reads of shared memory against products that the issuing warps wait for",
        absent="none",
        unsaid=True,
    ),
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
        axes=("BLOCK_M", "BLOCK_N", "ahead", "held"),
    ),
    Constraint(
        name="hardware barriers",
        holds=lambda c, s, t: (
            not BackwardLayout.of(s, c).hardware_release or BackwardLayout.of(s, c).empty_barriers[1] + c.number("num_stages") <= 16
        ),
        why="a program has sixteen of them",
        axes=("num_stages", "dq_sums", "release"),
    ),
    Constraint(
        name="ahead",
        holds=lambda c, s, t: not c.get("ahead", False) or (c.number("num_stages") > 1 and not c.get("exp_early", False) and plain(s)),
        why="its order has two blocks of queries at once, its own place for exponentials, and no registers for features",
        axes=("num_stages", "ahead", "exp_early"),
    ),
    Constraint(
        name="tile after tile",
        holds=lambda c, s, t: not BackwardLayout.of(s, c).persistent or s.mask != "bias",
        why="a bias's tiles come for one tile of keys",
        axes=("persistent",),
    ),
    Constraint(
        name="parts of dQ",
        holds=lambda c, s, t: BackwardLayout.of(s, c).part_d >= 32,
        why="a tile of keys can be divided by no fewer columns",
        axes=("BLOCK_M", "BLOCK_N"),
    ),
)


def plain(spec: KernelSpec) -> bool:
    """Whether scores are hidden by nothing but their places, and turned into probabilities by nothing but an exponential."""
    return spec.mask == "none" and not (spec.dropout or spec.softcap or spec.alibi)


def supports(spec: KernelSpec, target: Target) -> str | None:
    """Why this family can't serve `spec` on `target`, or None."""
    if spec.direction != "bwd":
        return f"flash_bwd_hopper computes the backward pass, not {spec.direction!r}"
    if not target.is_hopper:
        return f"flash_bwd_hopper needs compute capability 9.0, which {target.name} is not"
    if spec.dtype not in ("fp16", "bf16"):
        return f"flash_bwd_hopper takes fp16 and bf16, not {spec.dtype}"
    if spec.d % 8 or spec.d_v % 8:
        return f"flash_bwd_hopper needs head sizes that are multiples of 8 (TMA), not {spec.d} and {spec.d_v}"
    if padded(spec.d) not in (64, 128) or padded(spec.d_v) not in (64, 128) or padded(spec.d_v) > padded(spec.d):
        return f"flash_bwd_hopper has registers for head sizes from 33 to 128, those of v no larger, not {spec.d} and {spec.d_v}"
    return None


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """The tiles that fit, with both ways for dQ."""
    # BLOCK_M, num_stages, dq_sums, held, ahead, exp_early.
    tiles: list[tuple[int, int, str, str, bool, bool]] = [
        (64, 2, "registers", "none", False, False),
        (64, 2, "registers", "none", False, True),
        (64, 3, "registers", "none", False, False),
        (64, 2, "tma", "none", False, False),
    ]
    if padded(spec.d) == 64:
        tiles = [
            (64, 2, "registers", "none", False, False),
            (64, 2, "registers", "both", False, False),
            (64, 3, "registers", "v", True, False),
            (64, 3, "registers", "both", False, False),
            (128, 2, "tma", "none", False, False),
            (64, 3, "tma", "both", False, False),
            (128, 2, "registers", "none", False, False),
        ]
    names = ("BLOCK_M", "num_stages", "dq_sums", "held", "ahead", "exp_early")
    others: dict[str, Value] = {"BLOCK_N": 128, "persistent": False, "release": "memory"}
    return [
        Config.of(others | dict(zip(names, tile, strict=True)), section=section)
        for section in ((4, 16) if spec.causal else (2, 1))
        for tile in tiles
    ]


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """What the compiler will say: the register file is shared out by the kernel itself, and its tiles are all of its memory."""
    layout = BackwardLayout.of(spec, config)
    return CompileFacts(
        registers=168,
        spills=0,
        shared_bytes=min(layout.shared_bytes, target.shared_bytes_per_block),
        threads=128 * (layout.consumers + 1),
    )


FAMILY = Family(
    name="flash_bwd_hopper",
    folder="backward",
    direction="bwd",
    axes=AXES,
    constraints=CONSTRAINTS,
    supports=supports,
    tried_first=tried_first,
    expected=expected,
    interpretable=False,
    layout=BackwardLayout.of,
    path_axes=("BLOCK_M", "num_stages", "dq_sums", "exp_early", "ahead", "persistent", "release", "held"),
    repeatable=False,
)
"""Attention backward for Hopper."""
