"""Predicates over (config, spec, target) that the forward families share, and the estimates behind them."""

from flashtune.core.config import Config, KernelSpec
from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.target import Target
from flashtune.templates.family import Constraint, padded


def live_registers(config: Config, spec: KernelSpec, target: Target) -> float:
    """Registers a thread needs for scores, probs in the input type and acc at once.

    The rule of FlashAttention's `AI/SM90_BLOCK_SIZE_TUNING.md`.
    """
    rows = config.number("BLOCK_M") / (config.number("num_warps") * target.warp_size)
    return rows * (config.number("BLOCK_N") * (1 + ITEMSIZE[spec.dtype] / 4) + padded(spec.d_v))


def shared_bytes(config: Config, spec: KernelSpec, target: Target) -> int:
    """A lower bound of the shared memory that Triton 3.6 gives to Q and to the K and V blocks in flight, read off its allocations.

    Tensor cores that take operands from shared memory (sm_90 and sm_100) keep Q and `num_stages` blocks there; older ones, and
    those of sm_120, copy the block at work to registers first and need one block less.
    """
    stages, block_n, size = config.number("num_stages"), config.number("BLOCK_N"), ITEMSIZE[spec.dtype]
    q_row, kv_row = padded(spec.d) * size, (padded(spec.d) + padded(spec.d_v)) * size
    if target.capability is None or not 90 <= target.capability < 120:
        return (stages - 1) * block_n * kv_row
    return config.number("BLOCK_M") * q_row + (stages * block_n * kv_row if stages > 1 else block_n * q_row)


def _warps_own_rows(config: Config, spec: KernelSpec, target: Target) -> bool:
    return 16 <= config.number("BLOCK_M") // config.number("num_warps") <= 64


def _registers_fit(config: Config, spec: KernelSpec, target: Target) -> bool:
    # CDNA's accumulation registers double what a thread has.
    return live_registers(config, spec, target) <= (232 if target.vendor == "nvidia" else 448)


def _shared_memory_fits(config: Config, spec: KernelSpec, target: Target) -> bool:
    return shared_bytes(config, spec, target) <= target.shared_bytes_per_block


def _register_cap_helps(config: Config, spec: KernelSpec, target: Target) -> bool:
    cap = config.number("maxnreg")
    if cap == 0:
        return True
    return target.vendor == "nvidia" and live_registers(config, spec, target) <= cap - 24


def _stages_exist(config: Config, spec: KernelSpec, target: Target) -> bool:
    return target.vendor == "nvidia" or config.number("num_stages") <= 2


def _order_matters(config: Config, spec: KernelSpec, target: Target) -> bool:
    return spec.causal or config["ORDER"] in ("rows", "heads")


def _early_v_matters(config: Config, spec: KernelSpec, target: Target) -> bool:
    return not config["LOAD_V_EARLY"] or config.number("num_stages") == 1


def _dropout_block_is_whole(config: Config, spec: KernelSpec, target: Target) -> bool:
    return not spec.dropout or config.number("BLOCK_N") >= 32


def _scalar_products_are_short(config: Config, spec: KernelSpec, target: Target) -> bool:
    if spec.dtype != "fp32" or spec.tf32:
        return True
    products = config.number("BLOCK_M") * config.number("BLOCK_N") * max(padded(spec.d), padded(spec.d_v))
    return products <= 4096 * config.number("num_warps") * target.warp_size


WARPS_OWN_ROWS = Constraint(name="warps_own_rows", holds=_warps_own_rows, why="each warp takes 16 to 64 rows of the tile")
REGISTERS_FIT = Constraint(name="registers_fit", holds=_registers_fit, why="scores, probs and acc fit into a thread's registers")
SHARED_MEMORY_FITS = Constraint(name="shared_memory_fits", holds=_shared_memory_fits, why="K and V blocks in flight fit into shared memory")
REGISTER_CAP_HELPS = Constraint(name="register_cap_helps", holds=_register_cap_helps, why="maxnreg is NVIDIA's, and must not force spills")
STAGES_EXIST = Constraint(name="stages_exist", holds=_stages_exist, why="AMD pipelines two stages at most")
ORDER_MATTERS = Constraint(name="order_matters", holds=_order_matters, why="sorting tiles by length needs a causal triangle")
EARLY_V_MATTERS = Constraint(name="early_v_matters", holds=_early_v_matters, why="in a pipelined loop V is in flight long before")
DROPOUT_BLOCK_IS_WHOLE = Constraint(
    name="dropout_block_is_whole", holds=_dropout_block_is_whole, why="dropout's counters come in groups of 32 columns"
)
SCALAR_PRODUCTS_ARE_SHORT = Constraint(
    name="scalar_products_are_short",
    holds=_scalar_products_are_short,
    why="IEEE fp32 products are unrolled multiply-adds: more of them a thread make code and compile time explode",
)

ORDERS = ("rows", "reversed", "heads", "longest_first", "grouped")
"""Values of the axis ORDER; `_program_order.jinja` says what each does."""
