"""`flash_fwd_hopper`: warp-specialised FlashAttention forward for Hopper in Gluon, the fastest path there.

One warp copies tiles with TMA, one to three warpgroups compute (Shah et al., "FlashAttention-3", 2024). Starting points and limits:
FlashAttention-3's and -4's tile sizes for sm90 and the register arithmetic of `AI/SM90_BLOCK_SIZE_TUNING.md` in Dao-AILab/flash-attention.
"""

from functools import lru_cache

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec, rescales_grown
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import Problem, padded
from flashtune.core.records.results import CompileFacts
from flashtune.templates.family import Axis, Constraint, Family
from flashtune.templates.hopper.layout import HopperLayout, packed_heads, tiles_of
from flashtune.templates.launches.hopper_forward import HopperForwardHost
from flashtune.templates.predicates import warpgroup_facts

PACKED_HEADS = (1, 2, 4, 8)
"""Numbers of heads in one tile with pack_gqa."""

PACKED_TILES, PACKED_TILES_OF_PROMPTS = 0.9, 0.67
"""Greatest share of tiles that pack_gqa may leave: FlashAttention-3's bound (`should_pack_gqa` in hopper/heuristics.h of
Dao-AILab/flash-attention), and a lower one for prompts, whose kernels ship unpacked and would have to be compiled."""

LONG_CACHE = 4
"""Keys per query from which a problem isn't a prompt."""

AXES = (
    Axis(name="BLOCK_M", values=(64, 128, 192, 256), why="query rows of a tile: more reuse of K and V against fewer tiles and registers"),
    Axis(name="BLOCK_N", values=(64, 128, 256), why="keys of a block: fewer steps against registers, shared memory and masked waste"),
    Axis(name="num_stages", values=(2, 3, 4), why="K/V blocks in flight: latency hiding against shared memory"),
    Axis(name="intra_wg_overlap", values=(0, 1), why="values of the block before beside the softmax of a block, against registers"),
    Axis(name="pingpong", values=(False, True), why="warpgroups take turns on the tensor cores, against waiting"),
    Axis(name="tiles", values=("one", "loop", "chained"), why="tiles of a program: one, many, or many without draining in between"),
    Axis(name="section", values=(1, 8, 32), why="heads that run side by side: balance against K/V that stay in L2"),
    Axis(name="order", values=("fixed", "drawn"), why="schedule of a band's tiles: fixed at launch, or dynamic as programs become free"),
    Axis(
        name="ctas_per_sm",
        values=(1, 2, 3, 4),
        why="programs on an SM: one starts while another ends, against registers and shared memory",
    ),
    Axis(
        name="maximum",
        values=("running", "first"),
        why="running row maxima, or frozen after a tile's first blocks until exceeded: no wait for maxima, against a vote",
    ),
    Axis(
        name="rescale",
        values=("always", "grown", "outgrown"),
        why="rescale for a new maximum: always, where it grew past 2^2, or (running) where a score exceeds all before: work against votes",
    ),
    Axis(
        name="v_columns",
        values=("padded", "pieces"),
        why="the output's accumulator: padded to a power of two, or split by powers of two: less padding against narrow products",
    ),
    Axis(
        name="packed_heads",
        values=PACKED_HEADS,
        why="heads of a key head in one tile (pack_gqa): fewer empty rows with few queries, against tiles of many heads",
    ),
)


def _may_freeze_maxima(spec: KernelSpec) -> bool:
    """True if row maxima may be frozen after a tile's first blocks, the diagonal's or the last keys'.

    Those blocks predict the size of scores, except with biases, which often hide keys by huge negative numbers, and ALiBi without a
    band, which is smallest at the last keys.
    """
    return spec.dtype != "fp8" and spec.mask != "bias" and not spec.mods and not (spec.alibi and not spec.causal)


def _can_pack_gqa(spec: KernelSpec) -> bool:
    """True if pack_gqa is possible, by which values per head become values per row."""
    return spec.dtype != "fp8" and spec.mask == "none" and not (spec.alibi or spec.dropout or spec.packed or spec.mods)


def _uneven(spec: KernelSpec) -> bool:
    """True if tiles may have unequal numbers of blocks."""
    return spec.banded or bool(HopperLayout.of(spec, Config.of()).lists)


def _registers_fit(layout: HopperLayout) -> bool:
    # 0 where the constraint on programs is broken.
    allowed = layout.consumer_registers or 0
    return layout.live_registers + (16, 24)[layout.overlap] <= allowed


CONSTRAINTS = (
    Constraint(
        name="programs on an SM",
        holds=lambda c, s, t: HopperLayout.of(s, c).consumer_registers is not None,
        why="the register file holds so many warpgroups",
        axes=("BLOCK_M", "ctas_per_sm"),
    ),
    Constraint(
        name="shared memory",
        holds=lambda c, s, t: (
            (needed := HopperLayout.of(s, c).shared_bytes) <= t.shared_bytes_per_block
            and (needed + 1024) * c.number("ctas_per_sm") <= t.shared_bytes_per_sm
        ),
        why="queries, the K/V stages and the output tile live in shared memory",
        axes=("BLOCK_M", "BLOCK_N", "num_stages", "tiles", "ctas_per_sm", "v_columns"),
    ),
    Constraint(
        name="registers",
        holds=lambda c, s, t: _registers_fit(HopperLayout.of(s, c)),
        why="scores, probs and output of a warpgroup live in registers, with 16 to 24 for the rest",
        axes=("BLOCK_M", "BLOCK_N", "intra_wg_overlap", "ctas_per_sm", "v_columns"),
    ),
    Constraint(
        name="registers at entry",
        holds=lambda c, s, t: (layout := HopperLayout.of(s, c)).product_registers <= layout.entry_registers,
        why="ptxas compiles no product that needs more registers than a thread has before warpgroups exchange theirs",
        axes=("BLOCK_M", "BLOCK_N", "ctas_per_sm", "v_columns"),
    ),
    Constraint(
        name="columns in pieces",
        holds=lambda c, s, t: c.get("v_columns", "padded") == "padded" or len(HopperLayout.of(s, c).v_pieces) > 1,
        why="head sizes of values that are powers of two when rounded up to the unit have no padding to leave out, nor has fp8 up to 128",
        axes=("v_columns",),
    ),
    Constraint(
        name="persistent tiles",
        holds=lambda c, s, t: c["tiles"] == "one" or c["intra_wg_overlap"] != 0,
        why="tiles are chained by putting the last values of one beside the first scores of the next",
        axes=("intra_wg_overlap", "tiles"),
    ),
    Constraint(
        name="one warpgroup takes no turns",
        holds=lambda c, s, t: HopperLayout.of(s, c).consumers > 1 or c["pingpong"] is False,
        why="the axis would change nothing",
        axes=("BLOCK_M", "pingpong"),
    ),
    Constraint(
        name="one warpgroup, one tile",
        holds=lambda c, s, t: HopperLayout.of(s, c).consumers > 1 or c["tiles"] == "one",
        why="64 rows are for problems that don't fill the GPU, where no program has a second tile",
        axes=("BLOCK_M", "tiles"),
    ),
    Constraint(
        name="heads side by side",
        holds=lambda c, s, t: c.number("section") <= 8 or _uneven(s),
        why="all tiles are equally long without a band, and more heads than eight would only leave L2",
        axes=("section",),
    ),
    Constraint(
        name="order of a band",
        holds=lambda c, s, t: c["order"] == "fixed" or (c["tiles"] != "one" and (_uneven(s) or s.packed)),
        why="dynamic scheduling needs many tiles of unequal length per program",
        axes=("order", "tiles"),
    ),
    Constraint(
        name="maxima that settle",
        holds=lambda c, s, t: c["maximum"] == "running" or _may_freeze_maxima(s),
        why="probs grow far above 1 where a row's largest score comes late, which e4m3 can't represent",
        axes=("maximum",),
    ),
    Constraint(
        name="rescaled where maxima grew",
        holds=lambda c, s, t: not rescales_grown(c) or s.dtype != "fp8",
        why="fp8 rescales as it adds products up, and probs that grow above 1 leave e4m3 fewer digits",
        axes=("rescale",),
    ),
    Constraint(
        name="rescale of maxima that settle",
        holds=lambda c, s, t: c["maximum"] == "running" or c["rescale"] == "grown",
        why="blocks before the maxima settle also count tiles with peaked rows, and one such kernel is enough",
        axes=("maximum", "rescale"),
    ),
    Constraint(
        name="packed heads",
        holds=lambda c, s, t: packed_heads(c) == 1 or _can_pack_gqa(s),
        why="rows of several heads have no mask, bias, ALiBi or dropout of their own",
        axes=("packed_heads",),
    ),
    Constraint(
        name="loop in place of chained",
        holds=lambda c, s, t: (
            c["tiles"] != "loop" or HopperLayout.of(s, c.replace(tiles="chained")).shared_bytes > t.shared_bytes_per_block
        ),
        why="chained tiles drain less, wherever their second query tile fits",
        axes=("BLOCK_M", "BLOCK_N", "num_stages", "tiles", "v_columns"),
    ),
)


def resized(config: Config, problem: Problem, target: Target) -> Config:
    """The config with pack_gqa of the fewest tiles, or without where that saves too few, or where all tiles run
    at once anyway; for packed sequences, whose tiles are unequally long, with dynamic scheduling."""
    if problem.features.packed:
        return config.replace(packed_heads=1, order="fixed" if config["tiles"] == "one" else "drawn")
    packed = _heads_to_pack(config.number("BLOCK_M"), problem, target.sms)
    return config if packed_heads(config) == packed else config.replace(packed_heads=packed)


@lru_cache(maxsize=4096)
def _heads_to_pack(block_m: int, problem: Problem, sms: int) -> int:
    if problem.gqa_ratio == 1 or not _can_pack_gqa(problem.spec()):
        return 1
    tiles = {heads: tiles_of(Config.of(BLOCK_M=block_m, packed_heads=heads), problem) for heads in PACKED_HEADS}
    fewest = min(tiles, key=lambda heads: (tiles[heads], heads))
    share = PACKED_TILES if problem.n_kv >= LONG_CACHE * problem.n_q else PACKED_TILES_OF_PROMPTS
    return fewest if tiles[1] > sms and tiles[fewest] <= share * tiles[1] else 1


def refuses(spec: KernelSpec, target: Target) -> str | None:
    """The reason why this family can't serve a spec on a target, or None where it can."""
    if not target.is_hopper:
        return f"flash_fwd_hopper needs compute capability 9.0, which {target.name} is not"
    if spec.dtype not in ("fp16", "bf16", "fp8"):
        return f"flash_fwd_hopper takes fp16, bf16 and fp8, not {spec.dtype}"
    if spec.packed and (spec.dtype == "fp8" or spec.mask != "none"):
        return "flash_fwd_hopper takes no fp8 and no mask beside packed sequences"
    step = 16 // ITEMSIZE[spec.dtype]
    if spec.d % step or spec.d_v % 8:
        return f"flash_fwd_hopper needs head sizes that are multiples of {step} (TMA), not {spec.d} and {spec.d_v}"
    if spec.dtype == "fp8" and padded(spec.d_v) > 128:
        # Its products need another accumulator beside the output's.
        return f"flash_fwd_hopper has registers for fp8 values of head sizes up to 128, not {spec.d_v}"
    return None


def _config(block_m: int, block_n: int, num_stages: int, tiles: str, spec: KernelSpec, **more: int | str | bool) -> Config:
    values: dict[str, int | str | bool] = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_stages": num_stages,
        "intra_wg_overlap": 1,
        "pingpong": False,
        "tiles": tiles,
        "section": 8 if _uneven(spec) else 1,
        "order": "drawn" if tiles != "one" and (_uneven(spec) or spec.packed) else "fixed",
        "ctas_per_sm": 1,
        "v_columns": "padded",
        "packed_heads": 1,
        **more,
    }
    values.setdefault("maximum", "first" if _may_freeze_maxima(spec) else "running")
    values.setdefault("rescale", "grown" if values["maximum"] == "first" else "always")
    return Config.of(values)


def tried_first(spec: KernelSpec, target: Target) -> list[Config]:
    """Tiles of the field's fastest Hopper kernels, and winners of searches on an H200, the most general first."""
    wide = max(padded(spec.d), padded(spec.d_v))
    found = []
    if spec.dtype == "fp8":
        found += [_config(192, 128, 3, "one", spec, intra_wg_overlap=0), _config(64, 128, 2, "one", spec, ctas_per_sm=2)]
        found += [_config(128, 256, 2, "one", spec, intra_wg_overlap=0)]
    if wide <= 64:
        found += [_config(256, 64, 3, "one", spec, intra_wg_overlap=0), _config(64, 64, 2, "one", spec, intra_wg_overlap=0, ctas_per_sm=4)]
        found += [_config(128, 64, 3, "one", spec, intra_wg_overlap=0, ctas_per_sm=2), _config(64, 64, 2, "one", spec, ctas_per_sm=3)]
        found += [_config(128, 128, 2, "chained", spec, pingpong=True, order="fixed"), _config(192, 128, 3, "chained", spec, pingpong=True)]
        found += [_config(192, 128, 3, "one", spec, intra_wg_overlap=0), _config(128, 64, 3, "chained", spec, pingpong=True, ctas_per_sm=2)]
        found += [
            _config(64, 64, 2, "one", spec, intra_wg_overlap=0, ctas_per_sm=4, section=32),
            _config(256, 64, 3, "one", spec, intra_wg_overlap=0, section=32),
        ]
    if wide <= 128:
        found += [_config(128, 128, 2, "chained", spec, pingpong=True), _config(128, 128, 2, "chained", spec)]
        found += [_config(128, 128, 2, "chained", spec, pingpong=True, section=32)]
        found += [_config(128, 128, 2, "chained", spec, pingpong=True, order="fixed"), _config(128, 128, 2, "one", spec)]
        found += [_config(128, 64, 4, "chained", spec), _config(128, 64, 4, "chained", spec, order="fixed")]
        found += [_config(64, 64, 2, "one", spec, ctas_per_sm=2)]
    found += [_config(128, 64, 2, "loop", spec), _config(128, 64, 2, "one", spec), _config(128, 64, 2, "loop", spec, pingpong=True)]
    found += [
        _config(128, 64, 2, "loop", spec, section=32),
        _config(128, 64, 2, "one", spec, pingpong=True),
        _config(64, 64, 2, "one", spec),
        _config(64, 64, 2, "one", spec, intra_wg_overlap=0),
    ]
    if wide <= 64 and not spec.banded:
        found += [_config(192, 128, 3, "chained", spec, maximum="running")]
    if wide <= 128:
        found += [_config(128, 128, 2, "chained", spec, pingpong=True, maximum="running")]
    found += [_config(128, 64, 2, "loop", spec, maximum="running"), _config(128, 64, 2, "one", spec, maximum="running")]
    if spec.dtype != "fp8":
        found += [_config(128, 64, 2, "loop", spec, pingpong=not spec.banded, maximum="running", rescale="grown")]
    found += [_config(64, 64, 2, "one", spec, intra_wg_overlap=0, maximum="running")]
    # Fewer columns leave registers for larger tiles; no default uses them.
    usual = [config for config in found if config["maximum"] == "first"][:4]
    found += [config.replace(v_columns="pieces") for config in usual]
    found += [_config(192, 64, 2, "one", spec, intra_wg_overlap=overlap, v_columns="pieces") for overlap in (1, 0)]
    if wide > 128 and spec.dtype != "fp8":
        # Last, so that the order of padded tiles stays.
        columns = "padded" if spec.d_v <= 128 else "pieces"
        found += [_config(128, 64, 3, tiles, spec, pingpong=True, v_columns=columns) for tiles in ("loop", "one")]
        found += [_config(128, 64, 3, "loop", spec, pingpong=True, maximum="running", rescale="grown", v_columns=columns)]
        found += [_config(128, 128, 2, "loop", spec, pingpong=True, v_columns=columns)] if spec.d_v <= 128 else []
    return list(dict.fromkeys(found))


def pick(starts: list[Config], spec: KernelSpec, target: Target) -> Config:
    """The first config with running maxima: the simpler kernel, since nothing unmeasured was verified.

    With functions it is the first with two warpgroups that have all of an SM's registers, and a tile to a program, since lists of blocks
    have unequal lengths.
    """
    running = [config for config in starts if config["maximum"] == "running"]
    if spec.mods:
        roomy = [
            config.replace(tiles="one", order="fixed") for config in running if config["BLOCK_M"] == 128 and config["intra_wg_overlap"]
        ]
        running = [config for config in roomy if FAMILY.violated(config, spec, target) is None] or running
    return running[0]


def expected(config: Config, spec: KernelSpec, target: Target) -> CompileFacts:
    """Expected resource usage."""
    layout = HopperLayout.of(spec, config)
    return warpgroup_facts(target, registers=layout.entry_registers, shared=layout.shared_bytes, consumers=layout.consumers)


FAMILY = Family(
    name="flash_fwd_hopper",
    folder="hopper",
    axes=AXES,
    constraints=CONSTRAINTS,
    functions=True,
    refuses=refuses,
    tried_first=tried_first,
    pick=pick,
    expected=expected,
    interpretable=False,
    layout=HopperLayout.of,
    resized=resized,
    path_axes=(
        "BLOCK_M",
        "intra_wg_overlap",
        "pingpong",
        "tiles",
        "order",
        "maximum",
        "rescale",
        "v_columns",
    ),
    host=HopperForwardHost,
    uncompilable=lambda spec, config: HopperLayout.of(spec, config).uncompilable,
)
