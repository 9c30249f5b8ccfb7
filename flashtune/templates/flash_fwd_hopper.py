"""`flash_fwd_hopper`: warp-specialised FlashAttention forward for Hopper in Gluon, the fastest path there.

One warp copies tiles with TMA, one to three warpgroups compute (Shah et al., "FlashAttention-3", 2024). Starting points and limits:
FlashAttention-3's and -4's tile sizes for sm90 and the register arithmetic of `AI/SM90_BLOCK_SIZE_TUNING.md` in Dao-AILab/flash-attention.
"""

from flashtune.core.config import Config, KernelSpec
from flashtune.core.target import Target
from flashtune.templates.family import Axis, Constraint, Family, padded

AXES = (
    Axis(name="BLOCK_M", values=(64, 128, 192), why="query rows of a tile: more reuse of K and V against fewer tiles and registers"),
    Axis(name="BLOCK_N", values=(64, 128), why="keys of a block: fewer steps against registers, shared memory and masked waste"),
    Axis(name="stages", values=(2, 3, 4), why="K/V blocks in flight: latency hiding against shared memory"),
    Axis(name="lookahead", values=(0, 1, 2), why="products under way beside a softmax: none, values before it, also the scores after it"),
    Axis(name="pingpong", values=(False, True), why="warpgroups take turns on the tensor cores, against waiting"),
    Axis(name="tiles", values=("one", "loop", "chained"), why="tiles of a program: one, many, or many without draining in between"),
    Axis(name="section", values=(1, 8), why="heads that run side by side: balance against K/V that stay in L2"),
)


def _shared_bytes(config: Config, spec: KernelSpec) -> int:
    block_m, block_n, d, d_v = config.number("BLOCK_M"), config.number("BLOCK_N"), padded(spec.d), padded(spec.d_v)
    chained = config["tiles"] == "chained"
    q_bytes = 2 * block_m * d * (2 if chained else 1)
    out_bytes = 2 * block_m * d_v if chained or d != d_v else 0
    mask_bytes = {"none": 0, "bool": 2, "bias": 4}[spec.mask] * block_m * block_n
    return q_bytes + out_bytes + mask_bytes + 2 * config.number("stages") * block_n * (d + d_v) + 1024


def _consumers(config: Config) -> int:
    return config.number("BLOCK_M") // 64


def _registers_each(config: Config) -> int:
    """What a consumer thread may hold: the register file less the producer's share."""
    return {1: 248, 2: 240, 3: 160}[_consumers(config)]


def _live_registers(config: Config, spec: KernelSpec) -> int:
    """Accumulators and weights that a consumer thread holds at once (scores fp32, weights 16-bit, output fp32)."""
    scores, out = config.number("BLOCK_N") // 2, padded(spec.d_v) // 2
    weights = scores // 2 if config["lookahead"] else 0
    loaded = 24 if spec.mask != "none" else 0
    return scores * (2 if config["lookahead"] == 2 else 1) + weights + out + loaded


CONSTRAINTS = (
    Constraint(
        name="shared memory",
        holds=lambda c, s, t: _shared_bytes(c, s) <= t.shared_bytes_per_block,
        why="queries, the K/V stages and the output tile live in shared memory",
    ),
    Constraint(
        name="registers",
        holds=lambda c, s, t: _live_registers(c, s) + 32 <= _registers_each(c),
        why="scores, weights and output of a warpgroup live in registers, with some 32 for the rest",
    ),
    Constraint(
        name="persistent tiles",
        holds=lambda c, s, t: c["tiles"] == "one" or c["lookahead"] != 0,
        why="tiles are chained by putting the last values of one beside the first scores of the next",
    ),
    Constraint(
        name="one warpgroup takes no turns",
        holds=lambda c, s, t: _consumers(c) > 1 or c["pingpong"] is False,
        why="the axis would change nothing",
    ),
    Constraint(
        name="one warpgroup, one tile",
        holds=lambda c, s, t: _consumers(c) > 1 or c["tiles"] == "one",
        why="64 rows are for problems that don't fill the GPU, where no program has a second tile",
    ),
    Constraint(
        name="loop in place of chained",
        holds=lambda c, s, t: c["tiles"] != "loop" or _shared_bytes(c.replace(tiles="chained"), s) > t.shared_bytes_per_block,
        why="chained tiles drain less, wherever their second query tile fits",
    ),
)


def supports(spec: KernelSpec, target: Target) -> str | None:
    """Why this family can't serve a spec on a target, or None where it can."""
    if not target.is_hopper:
        return f"flash_fwd_hopper needs compute capability 9.0, which {target.name} is not"
    if spec.direction != "fwd":
        return f"flash_fwd_hopper computes the forward pass, not {spec.direction}"
    if spec.dtype not in ("fp16", "bf16"):
        return f"flash_fwd_hopper takes fp16 and bf16, not {spec.dtype}"
    if spec.alibi:
        return "flash_fwd_hopper has no ALiBi"
    if spec.d % 8 or spec.d_v % 8:
        return f"flash_fwd_hopper needs head sizes that are multiples of 8 (TMA), not {spec.d} and {spec.d_v}"
    return None


def _config(block_m: int, block_n: int, stages: int, tiles: str, spec: KernelSpec, **more: int | str | bool) -> Config:
    values: dict[str, int | str | bool] = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "stages": stages,
        "lookahead": 1,
        "pingpong": False,
        "tiles": tiles,
        "section": 8 if spec.causal or spec.window else 1,
    }
    return Config.of(values, **more)


def starts(spec: KernelSpec, target: Target) -> list[Config]:
    """Tiles that the field's fastest Hopper kernels use, those that fit first."""
    wide = max(padded(spec.d), padded(spec.d_v))
    found = []
    if wide <= 64:
        found += [_config(192, 128, stages, tiles, spec) for stages, tiles in ((3, "chained"), (2, "one"))]
        found += [_config(192, 128, 3, "chained", spec, pingpong=True), _config(128, 128, 3, "chained", spec, pingpong=True)]
        found += [_config(128, 128, 3, "chained", spec, lookahead=2, pingpong=pingpong) for pingpong in (False, True)]
    if wide <= 128:
        found += [_config(128, 128, 2, tiles, spec) for tiles in ("chained", "one")]
        found += [_config(128, 128, 2, "chained", spec, pingpong=pingpong) for pingpong in (False, True)]
        found += [_config(128, 64, 4, "chained", spec)]
    found += [_config(128, 64, 2, "one", spec), _config(128, 64, 2, "loop", spec)]
    found += [_config(64, 64, 2, "one", spec), _config(64, 64, 2, "one", spec, lookahead=0), _config(128, 64, 2, "one", spec, lookahead=0)]
    unique = dict.fromkeys(found)
    return [config for config in unique if FAMILY.violated(config, spec, target) is None]


def default(spec: KernelSpec, target: Target) -> Config:
    """The first of `starts`."""
    return starts(spec, target)[0]


FAMILY = Family(
    name="flash_fwd_hopper",
    axes=AXES,
    constraints=CONSTRAINTS,
    supports=supports,
    default=default,
    starts=starts,
    interpretable=False,
    path_axes=("BLOCK_M", "lookahead", "pingpong", "tiles"),
)
