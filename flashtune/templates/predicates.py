"""Predicates over (config, spec, target) that families share, and the estimates behind them."""

from collections.abc import Callable

from flashtune.core.gpu.target import Target
from flashtune.core.problems.band import ALIGNMENTS
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.core.problems.dtypes import ITEMSIZE
from flashtune.core.problems.problem import Features, Problem, padded, wide_heads
from flashtune.core.records.results import CompileFacts
from flashtune.templates.columns import loaded_columns
from flashtune.templates.family import constraint

_PLAIN = (Features(), *(Features(causal=True, alignment=one) for one in ALIGNMENTS))


def plain(problem: Problem, least: int) -> bool:
    """True for at least `least` queries and keys, full or causal, without other features."""
    return min(problem.n_q, problem.n_kv) >= least and problem.features in _PLAIN


def operand_bytes(spec: KernelSpec) -> int:
    """Bytes per element of the products' operands: fp8 is multiplied as fp16, which represents it exactly."""
    return 2 if spec.dtype == "fp8" else ITEMSIZE[spec.dtype]


def live_registers(config: Config, spec: KernelSpec, target: Target) -> float:
    """Registers per thread for scores, probs in the operands' type and acc at once.

    The rule of FlashAttention's `AI/SM90_BLOCK_SIZE_TUNING.md`. With wide heads warps may be more than there are rows for: by what Triton
    3.6 does then, warpgroups have the same scores and a share of the output's columns each; other warps have both alike, unless a tile
    has more columns than rows.
    """
    m, n, warps = config.number("BLOCK_M"), config.number("BLOCK_N"), config.number("num_warps")
    of_scores = of_out = m / (warps * target.warp_size)
    if wide_heads(spec.d, spec.d_v) and target.vendor == "nvidia" and not has_scalar_products(spec, target):
        alike = m / (min(warps, m // 16) * target.warp_size)
        of_groups = multiplies_by_warpgroups(spec, target) and m >= 64
        of_scores, of_out = (alike if of_groups or m >= n else of_scores), (alike if m >= n and not of_groups else of_out)
    return of_scores * n * (1 + operand_bytes(spec) / 4) + of_out * padded(spec.d_v)


def multiplies_by_warpgroups(spec: KernelSpec, target: Target) -> bool:
    """True where tiles of 64 rows are multiplied by warpgroups (sm_90), of which each takes a share of the output's columns."""
    return target.is_hopper and not has_scalar_products(spec, target)


def has_scalar_products(spec: KernelSpec, target: Target) -> bool:
    """True if products are multiply-adds of single threads: NVIDIA's tensor cores take no IEEE fp32 (AMD's matrix cores do)."""
    return target.vendor == "nvidia" and spec.dtype == "fp32" and not spec.tf32


def shared_bytes(config: Config, spec: KernelSpec, target: Target) -> int:
    """Shared memory that Triton 3.6 allocates for Q, the K and V blocks in flight, and P where its layout has to change.

    By its observed allocations. Tensor cores that read operands from shared memory (sm_90 and sm_100) keep Q and `num_stages` blocks
    there; others copy the block at work to registers first and need one block less. Barriers come on top, less than 1 KiB, and on
    older tensor cores P at some tile sizes.
    """
    stages, block_n = config.number("num_stages"), config.number("BLOCK_N")
    size, loaded = operand_bytes(spec), ITEMSIZE[spec.dtype]
    d, d_v = loaded_columns(spec.d, spec.d_v, latent=spec.latent)
    q, v, kv = config.number("BLOCK_M") * d * size, block_n * d_v * size, block_n * (d + d_v) * loaded
    in_flight = kv * (stages - 1) if stages > 1 else block_n * max(d, d_v) * loaded
    if target.vendor == "amd":
        # Q passes through before the loop.
        return max(q, in_flight + probs_bytes(config, spec))
    if has_scalar_products(spec, target):
        return q + in_flight + probs_bytes(config, spec)
    if wide_heads(spec.d, spec.d_v) and config.number("BLOCK_M") < 64:
        # Warps share the rows of such tiles.
        return q + in_flight + probs_bytes(config, spec)
    if target.capability is not None and 90 <= target.capability < 120:
        if spec.dtype == "fp8":
            # Converted operands lie beside blocks in flight: K and V in turn on sm_90, both on sm_100.
            return q + kv * (stages - 1) + block_n * size * (d + d_v if target.capability >= 100 else max(d, d_v))
        # sm_100 reads TF32 operands in one order only, so a transposed V is stored, too.
        transposed = 2 * v if spec.tf32 and target.capability >= 100 else 0
        return q + transposed + (kv * stages if stages > 1 else in_flight)
    return q + in_flight


def split_bytes(config: Config, spec: KernelSpec, target: Target) -> int:
    """The same where programs split keys: K and V in flight, Q, and P where warps share its rows."""
    if config.number("BLOCK_M") >= 64 or target.vendor == "amd" or has_scalar_products(spec, target):
        return shared_bytes(config, spec, target)
    # Tensor cores take small tiles from registers, so the current block has left shared memory.
    (d, d_v), size = loaded_columns(spec.d, spec.d_v, latent=spec.latent), ITEMSIZE[spec.dtype]
    in_flight = config.number("BLOCK_N") * (d + d_v) * size * max(1, config.number("num_stages") - 1)
    return config.number("BLOCK_M") * d * size + probs_bytes(config, spec) + in_flight


def address_registers(config: Config, spec: KernelSpec, target: Target) -> float:
    """Registers per thread for the addresses of a block of K and V: in Triton 3.6's code six for each 16 bytes that a thread loads."""
    columns = loaded_columns(spec.d, spec.d_v, latent=spec.latent)
    # In wide heads' code K's are gone before V's are made.
    together = max(columns) if wide_heads(spec.d, spec.d_v) else sum(columns)
    return 6 * config.number("BLOCK_N") * together * ITEMSIZE[spec.dtype] / 16 / (config.number("num_warps") * target.warp_size)


def probs_bytes(config: Config, spec: KernelSpec) -> int:
    """Bytes of P in shared memory for its conversion between the products' layouts."""
    return config.number("BLOCK_M") * config.number("BLOCK_N") * operand_bytes(spec)


def expected_facts(config: Config, spec: KernelSpec, target: Target, *, shared: int, beside: int) -> CompileFacts:
    """Expected resource usage of a kernel of `shared` bytes, with `beside` registers per thread beside `live_registers`.

    `beside` is the median over benchmarks/results/2026-11-22-h200-sweeps, by family.
    """
    return capped_facts(config, target, needed=live_registers(config, spec, target) + beside, shared=shared)


def capped_facts(config: Config, target: Target, *, needed: float, shared: int) -> CompileFacts:
    """Expected resource usage of a kernel with `needed` registers per thread, the excess spilled."""
    threads = config.number("num_warps") * target.warp_size
    most = int(config.get("maxnreg", 0)) or (255 if target.vendor == "nvidia" else 512)
    cap = min(most, target.registers_per_sm // threads)
    return CompileFacts(
        registers=int(min(needed, cap)),
        spills=int(4 * max(0.0, needed - cap)),
        shared_bytes=min(shared, target.shared_bytes_per_block),
        threads=threads,
    )


def warpgroup_facts(target: Target, *, registers: int, shared: int, consumers: int = 2) -> CompileFacts:
    """Expected resource usage of a warp-specialised kernel of a producer and `consumers` warpgroups, whose shared memory are its
    tiles."""
    shared = min(shared, target.shared_bytes_per_block)
    return CompileFacts(registers=registers, spills=0, shared_bytes=shared, threads=128 * (consumers + 1))


def first_with_room(
    configs: list[Config], spec: KernelSpec, target: Target, of_tiles: Callable[[Config, KernelSpec, Target], int] = shared_bytes
) -> Config:
    """The first of `configs` (best first, smallest last) that fits with room to spare, for use without tuning; `of_tiles` are its bytes of
    shared memory."""

    def fits(config: Config) -> bool:
        return of_tiles(config, spec, target) + probs_bytes(config, spec) + 1024 <= target.shared_bytes_per_block

    return next(filter(fits, configs), configs[-1])


@constraint("BLOCK_M", "BLOCK_N", "num_warps")
def warps_own_rows(config: Config, spec: KernelSpec, target: Target) -> bool:
    """each warp takes 16 to 64 rows of the tile (a row of matrix instructions), or of wide heads a share of the columns"""
    if wide_heads(spec.d, spec.d_v) and not has_scalar_products(spec, target):
        m, n, warps = config.number("BLOCK_M"), config.number("BLOCK_N"), config.number("num_warps")
        if m >= 64:
            # Elsewhere, and on sm_100 in tensor memory, scores and output of so many rows don't fit.
            return multiplies_by_warpgroups(spec, target) and warps <= m // 8
        return 8 * warps <= n > m
    fewest = 4 if has_scalar_products(spec, target) else 16
    return fewest <= config.number("BLOCK_M") // config.number("num_warps") <= 64


@constraint("BLOCK_M", "BLOCK_N", "num_warps")
def registers_fit(config: Config, spec: KernelSpec, target: Target) -> bool:
    """scores, probs, acc, and with wide heads the addresses of K or V, fit into a thread's registers"""
    wide = wide_heads(spec.d, spec.d_v)
    addresses = address_registers(config, spec, target) if wide else 0
    # CDNA's accumulation registers double a thread's. Addresses of wide heads may spill: latent tiles of 64 x 64 did, and were the fastest
    # for 128 heads on an H200 (248 TFLOP/s; 208 of 64 x 32).
    most = 448 if target.vendor != "nvidia" else 288 if wide else 232
    return live_registers(config, spec, target) + addresses <= most


@constraint("BLOCK_M", "BLOCK_N", "num_stages")
def shared_memory_fits(config: Config, spec: KernelSpec, target: Target) -> bool:
    """K and V blocks in flight fit into shared memory"""
    return shared_bytes(config, spec, target) <= target.shared_bytes_per_block


@constraint("BLOCK_M", "BLOCK_N", "num_warps", "maxnreg")
def register_cap_helps(config: Config, spec: KernelSpec, target: Target) -> bool:
    """maxnreg is NVIDIA's, and must not force spills"""
    cap = config.number("maxnreg")
    if cap == 0:
        return True
    return target.vendor == "nvidia" and live_registers(config, spec, target) <= cap - 24


@constraint("num_stages")
def stages_exist(config: Config, spec: KernelSpec, target: Target) -> bool:
    """AMD pipelines two stages at most"""
    return target.vendor == "nvidia" or config.number("num_stages") <= 2


@constraint("ORDER")
def order_matters(config: Config, spec: KernelSpec, target: Target) -> bool:
    """a causal triangle wants its long rows first; elsewhere there is nothing to sort"""
    return config["ORDER"] in (("longest_first", "grouped") if spec.causal else ("rows", "heads"))


@constraint("num_stages", "LOAD_V_EARLY")
def early_v_matters(config: Config, spec: KernelSpec, target: Target) -> bool:
    """in a pipelined loop V is in flight long before"""
    return not config["LOAD_V_EARLY"] or config.number("num_stages") == 1


@constraint("BLOCK_N")
def narrow_block_is_needed(config: Config, spec: KernelSpec, target: Target) -> bool:
    """16 keys a step waste the tensor cores where 32 fit"""
    return config.number("BLOCK_N") >= 32 or spec.dtype == "fp32" or padded(spec.d) > 128


@constraint("BLOCK_N")
def dropout_block_is_whole(config: Config, spec: KernelSpec, target: Target) -> bool:
    """dropout's counters come in groups of 32 columns"""
    return not spec.dropout or config.number("BLOCK_N") >= 32


@constraint("BLOCK_M", "BLOCK_N", "num_warps")
def scalar_products_are_short(config: Config, spec: KernelSpec, target: Target) -> bool:
    """IEEE fp32 products are unrolled multiply-adds: with many of them a thread, registers and compile time explode"""
    if not has_scalar_products(spec, target):
        return True
    columns = max(padded(spec.d_v), *loaded_columns(spec.d, spec.d_v, latent=spec.latent))
    products = config.number("BLOCK_M") * config.number("BLOCK_N") * columns
    # With more a thread spills kilobytes, and unrolling slows the compiler.
    return products <= 1024 * config.number("num_warps") * target.warp_size


ORDERS = ("rows", "heads", "longest_first", "grouped")
"""Values of the axis ORDER; `_program_order.jinja` implements them."""
