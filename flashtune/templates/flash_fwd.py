"""The family `flash_fwd`: attention forward with plain pointers, for every GPU that Triton compiles for."""

from flashtune.core.config import Config, KernelSpec
from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.target import Target
from flashtune.templates.family import Axis, Constraint, Family, padded

AXES = (
    Axis(name="BLOCK_M", values=(16, 32, 64, 128, 256), why="query rows of a program: reuse of K and V against registers and waves"),
    Axis(name="BLOCK_N", values=(16, 32, 64, 128), why="key rows of a step: fewer, larger products against registers and shared memory"),
    Axis(name="num_warps", values=(1, 2, 4, 8), why="warps that share a query tile: registers a row against programs in flight"),
    Axis(name="num_stages", values=(1, 2, 3, 4), why="key blocks in flight: latency hidden against shared memory"),
    Axis(name="maxnreg", values=(0, 128, 168), why="a cap on registers a thread (0: the compiler's choice): occupancy against spills"),
    Axis(
        name="ORDER",
        values=("rows", "reversed", "heads", "longest_first", "grouped"),
        why="which tiles run first: balance of a triangle's rows, and whose K and V stay in L2",
    ),
    Axis(name="LOAD_V_EARLY", values=(False, True), why="V before the softmax: its latency hidden, its registers held longer"),
)


def warps_own_rows(config: Config, spec: KernelSpec, target: Target) -> bool:
    """Every warp has between 16 and 64 rows of its own."""
    return 16 <= config.number("BLOCK_M") // config.number("num_warps") <= 64


def live_registers(config: Config, spec: KernelSpec, target: Target) -> float:
    """Registers a thread needs for scores, probs in the input type, and acc at once."""
    rows = config.number("BLOCK_M") / (config.number("num_warps") * target.warp_size)
    return rows * (config.number("BLOCK_N") * (1 + ITEMSIZE[spec.dtype] / 4) + padded(spec.d_v))


def registers_fit(config: Config, spec: KernelSpec, target: Target) -> bool:
    """Live values leave room for addresses; CDNA's accumulation registers double what a thread has."""
    return live_registers(config, spec, target) <= (232 if target.vendor == "nvidia" else 448)


def shared_bytes(config: Config, spec: KernelSpec) -> int:
    """A lower bound of shared memory: key and value blocks in flight."""
    row = padded(spec.d) + padded(spec.d_v)
    return (config.number("num_stages") - 1) * config.number("BLOCK_N") * row * ITEMSIZE[spec.dtype]


def shared_memory_fits(config: Config, spec: KernelSpec, target: Target) -> bool:
    """The blocks in flight fit into a program's shared memory."""
    return shared_bytes(config, spec) <= target.shared_bytes_per_block


def register_cap_helps(config: Config, spec: KernelSpec, target: Target) -> bool:
    """A cap is tried only where it lets one more program onto an SM and doesn't force spills."""
    cap = config.number("maxnreg")
    if cap == 0:
        return True
    threads = config.number("num_warps") * target.warp_size
    return target.vendor == "nvidia" and threads <= 256 and live_registers(config, spec, target) <= cap - 24


def stages_exist(config: Config, spec: KernelSpec, target: Target) -> bool:
    """AMD's pipeline has two stages at most."""
    return target.vendor == "nvidia" or config.number("num_stages") <= 2


def order_matters(config: Config, spec: KernelSpec, target: Target) -> bool:
    """Only a causal triangle has rows of unequal length to sort by."""
    return spec.causal or config["ORDER"] in ("rows", "heads")


def early_v_matters(config: Config, spec: KernelSpec, target: Target) -> bool:
    """In a pipelined loop V is in flight long before; only without stages does its place matter."""
    return not config["LOAD_V_EARLY"] or config.number("num_stages") == 1


def dropout_block_is_whole(config: Config, spec: KernelSpec, target: Target) -> bool:
    """Dropout's counters come in groups of 32 columns."""
    return not spec.dropout or config.number("BLOCK_N") >= 32


def scalar_products_are_short(config: Config, spec: KernelSpec, target: Target) -> bool:
    """IEEE fp32 products run as unrolled multiply-adds: a bound on their number a thread keeps code and compile time small."""
    if spec.dtype != "fp32" or spec.tf32:
        return True
    products = config.number("BLOCK_M") * config.number("BLOCK_N") * max(padded(spec.d), padded(spec.d_v))
    return products <= 4096 * config.number("num_warps") * target.warp_size


CONSTRAINTS = (
    Constraint(name="warps_own_rows", holds=warps_own_rows, why="each warp takes 16 to 64 rows of the tile"),
    Constraint(name="registers_fit", holds=registers_fit, why="scores, probs and acc fit into a thread's registers"),
    Constraint(name="shared_memory_fits", holds=shared_memory_fits, why="K and V blocks in flight fit into shared memory"),
    Constraint(name="register_cap_helps", holds=register_cap_helps, why="maxnreg is NVIDIA's, and must not force spills"),
    Constraint(name="stages_exist", holds=stages_exist, why="AMD pipelines two stages at most"),
    Constraint(name="order_matters", holds=order_matters, why="sorting tiles by length needs a causal triangle"),
    Constraint(name="early_v_matters", holds=early_v_matters, why="V's place matters only without pipelining"),
    Constraint(name="dropout_block_is_whole", holds=dropout_block_is_whole, why="dropout's counters come in groups of 32 columns"),
    Constraint(name="scalar_products_are_short", holds=scalar_products_are_short, why="IEEE fp32 products are unrolled multiply-adds"),
)


def supports(spec: KernelSpec, target: Target) -> str | None:
    """Why this family can't serve `spec` on `target`, or None."""
    if not target.compilable:
        return f"Triton doesn't compile for {target.name}"
    if spec.direction != "fwd":
        return f"flash_fwd computes the forward pass, not {spec.direction!r}"
    if spec.tf32 and target.vendor == "amd" and target.arch != "gfx942":
        return f"{target.name} has no TF32 products"
    return None


def _config(block_m: int, block_n: int, num_warps: int, num_stages: int, order: str) -> Config:
    return Config.of(
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, num_stages=num_stages, maxnreg=0, ORDER=order, LOAD_V_EARLY=False
    )


def starts(spec: KernelSpec, target: Target) -> list[Config]:
    """The field's published tiles, as far as they keep this target's constraints; the first is the default."""
    order = "longest_first" if spec.causal else "rows"
    tiles = [(128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 1)]
    tiles += [(32, 32, 2, 1), (16, 32, 1, 1), (64, 16, 4, 1)]
    found = [_config(*tile, order) for tile in tiles]
    return [config for config in found if FAMILY.violated(config, spec, target) is None]


def default(spec: KernelSpec, target: Target) -> Config:
    """The first of `starts`."""
    return starts(spec, target)[0]


FAMILY = Family(
    name="flash_fwd",
    axes=AXES,
    constraints=CONSTRAINTS,
    supports=supports,
    default=default,
    starts=starts,
    interpretable=True,
    path_axes=("ORDER", "LOAD_V_EARLY"),
)
"""Attention forward with plain pointers."""
