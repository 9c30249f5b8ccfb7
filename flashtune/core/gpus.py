"""Table of GPUs: facts with sources.

Peak figures are dense (no sparsity), with float32 accumulation, 10^12 operations per second, at boost clock. Where a vendor quotes a faster
rate with fp16 accumulation (GeForce), that one is left out: attention accumulates in float32. fp32 is IEEE: NVIDIA's ordinary cores, AMD's
matrix units. Every entry names its sources.
"""

from typing import Any

from flashtune.core.target import Target

_GUIDE = (
    "NVIDIA CUDA C++ Programming Guide, compute capabilities "
    "(shared memory, registers, threads; arithmetic throughput: 16 special functions per clock and SM)"
)

_SCHEDULE = "LLVM AMDGPU scheduling model (SISchedule.td): transcendentals at a quarter of the vector rate: 16 per clock and CU"

_SHARED_AND_THREADS = {
    "70": (98304, 98304, 2048),
    "80": (166912, 167936, 2048),
    "86": (101376, 102400, 1536),
    "89": (101376, 102400, 1536),
    "90": (232448, 233472, 2048),
    "100": (232448, 233472, 2048),
    "120": (101376, 102400, 1536),
}
"""Bytes of shared memory per block and per SM, and threads per SM, by compute capability."""


def _nvidia(*, arch: str, sources: tuple[str, ...], **facts: Any) -> Target:
    """A GPU with the facts of its compute capability."""
    shared_bytes_per_block, shared_bytes_per_sm, max_threads_per_sm = _SHARED_AND_THREADS[arch]
    return Target(
        vendor="nvidia",
        arch=arch,
        shared_bytes_per_block=shared_bytes_per_block,
        shared_bytes_per_sm=shared_bytes_per_sm,
        registers_per_sm=65536,
        max_threads_per_sm=max_threads_per_sm,
        warp_size=32,
        exp_per_clock=16,
        compilable=arch != "70",
        sources=(*sources, _GUIDE),
        **facts,
    )


def _amd(*, sources: tuple[str, ...], **facts: Any) -> Target:
    """A GPU with the facts that AMD's share."""
    return Target(
        vendor="amd",
        shared_bytes_per_block=65536,
        shared_bytes_per_sm=65536,
        registers_per_sm=131072,
        max_threads_per_sm=2048,
        warp_size=64,
        exp_per_clock=16,
        compilable=True,
        sources=(*sources, _SCHEDULE),
        **facts,
    )


GPUS: tuple[Target, ...] = (
    # The PCIe card: 112 TFLOP/s over 900 GB/s put its crossover at about 125 FLOP/byte, the figure that is usually quoted. For
    # rooflines only: Triton no longer supports compute capability 7.0. Volta has no bf16 and no TF32.
    _nvidia(
        slug="v100",
        name="NVIDIA Tesla V100 PCIe",
        arch="70",
        sms=80,
        l2_bytes=6291456,
        bandwidth_gbs=900.0,
        boost_mhz=1380,
        peak_tflops={"fp32": 14.0, "fp16": 112.0},
        driver_names=("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"),
        aliases=("v100-pcie", "v100-pcie-16gb", "v100-pcie-32gb"),
        sources=(
            "NVIDIA Tesla V100 GPU accelerator datasheet (2018): PCIe column",
            "NVIDIA Tesla V100 architecture whitepaper, WP-08608-001",
        ),
    ),
    # 125 TFLOP/s over the same 900 GB/s: crossover near 139 FLOP/byte.
    _nvidia(
        slug="v100-sxm2",
        name="NVIDIA Tesla V100 SXM2",
        arch="70",
        sms=80,
        l2_bytes=6291456,
        bandwidth_gbs=900.0,
        boost_mhz=1530,
        peak_tflops={"fp32": 15.7, "fp16": 125.0},
        driver_names=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
        aliases=("v100-sxm", "v100-sxm2-16gb", "v100-sxm2-32gb"),
        sources=(
            "NVIDIA Tesla V100 GPU accelerator datasheet (2018): NVLink column",
            "NVIDIA Tesla V100 architecture whitepaper, WP-08608-001",
        ),
    ),
    # The 80 GB PCIe card has the same chip and peaks and 5 % less bandwidth (1935 GB/s), so it shares this entry.
    _nvidia(
        slug="a100",
        name="NVIDIA A100 80GB SXM",
        arch="80",
        sms=108,
        l2_bytes=41943040,
        bandwidth_gbs=2039.0,
        boost_mhz=1410,
        peak_tflops={"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0},
        driver_names=("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        aliases=("a100-80gb", "a100-sxm4-80gb", "a100-80gb-pcie"),
        sources=("NVIDIA A100 Tensor Core GPU datasheet (2021)", "NVIDIA A100 architecture whitepaper"),
    ),
    _nvidia(
        slug="a100-40gb",
        name="NVIDIA A100 40GB",
        arch="80",
        sms=108,
        l2_bytes=41943040,
        bandwidth_gbs=1555.0,
        boost_mhz=1410,
        peak_tflops={"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0},
        driver_names=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        aliases=("a100-sxm4-40gb", "a100-pcie-40gb"),
        sources=("NVIDIA A100 Tensor Core GPU datasheet (2020)", "NVIDIA A100 architecture whitepaper"),
    ),
    _nvidia(
        slug="a10",
        name="NVIDIA A10",
        arch="86",
        sms=72,
        l2_bytes=6291456,
        bandwidth_gbs=600.0,
        boost_mhz=1695,
        peak_tflops={"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0},
        driver_names=("NVIDIA A10",),
        aliases=("a10-24gb",),
        sources=("NVIDIA A10 Tensor Core GPU datasheet (2021)", "NVIDIA Ampere GA102 GPU architecture whitepaper"),
    ),
    _nvidia(
        slug="l4",
        name="NVIDIA L4",
        arch="89",
        sms=58,
        l2_bytes=50331648,
        bandwidth_gbs=300.0,
        boost_mhz=2040,
        peak_tflops={"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5},
        driver_names=("NVIDIA L4",),
        aliases=("l4-24gb",),
        sources=("NVIDIA L4 Tensor Core GPU datasheet (2023): its figures with sparsity, halved", "NVIDIA Ada GPU architecture whitepaper"),
    ),
    _nvidia(
        slug="l40s",
        name="NVIDIA L40S",
        arch="89",
        sms=142,
        l2_bytes=100663296,
        bandwidth_gbs=864.0,
        boost_mhz=2520,
        peak_tflops={"fp32": 91.6, "tf32": 183.0, "bf16": 362.05, "fp16": 362.05, "fp8": 733.0},
        driver_names=("NVIDIA L40S",),
        aliases=("l40s-48gb",),
        sources=("NVIDIA L40S GPU datasheet (2023)", "NVIDIA Ada GPU architecture whitepaper"),
    ),
    _nvidia(
        slug="rtx3090",
        name="NVIDIA GeForce RTX 3090",
        arch="86",
        sms=82,
        l2_bytes=6291456,
        bandwidth_gbs=936.0,
        boost_mhz=1695,
        peak_tflops={"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0},
        driver_names=("NVIDIA GeForce RTX 3090",),
        aliases=("3090",),
        sources=("NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A",),
    ),
    _nvidia(
        slug="rtx4090",
        name="NVIDIA GeForce RTX 4090",
        arch="89",
        sms=128,
        l2_bytes=75497472,
        bandwidth_gbs=1008.0,
        boost_mhz=2520,
        peak_tflops={"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
        driver_names=("NVIDIA GeForce RTX 4090",),
        aliases=("4090",),
        sources=("NVIDIA Ada GPU architecture whitepaper, appendix A",),
    ),
    _nvidia(
        slug="rtx5090",
        name="NVIDIA GeForce RTX 5090",
        arch="120",
        sms=170,
        l2_bytes=100663296,
        bandwidth_gbs=1792.0,
        boost_mhz=2407,
        peak_tflops={"fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419.0},
        driver_names=("NVIDIA GeForce RTX 5090",),
        aliases=("5090",),
        sources=("NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A",),
    ),
    _nvidia(
        slug="h100",
        name="NVIDIA H100 SXM",
        arch="90",
        sms=132,
        l2_bytes=52428800,
        bandwidth_gbs=3352.0,
        boost_mhz=1980,
        peak_tflops={"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
        driver_names=("NVIDIA H100 80GB HBM3",),
        aliases=("h100-sxm", "h100-sxm5", "h100-80gb-hbm3"),
        sources=("NVIDIA H100 Tensor Core GPU datasheet (2023)", "NVIDIA H100 architecture whitepaper"),
    ),
    _nvidia(
        slug="h100-pcie",
        name="NVIDIA H100 PCIe",
        arch="90",
        sms=114,
        l2_bytes=52428800,
        bandwidth_gbs=2039.0,
        boost_mhz=1755,
        peak_tflops={"fp32": 51.2, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0},
        driver_names=("NVIDIA H100 PCIe",),
        aliases=("h100-80gb-pcie",),
        sources=("NVIDIA H100 Tensor Core GPU datasheet (2023)", "NVIDIA H100 architecture whitepaper"),
    ),
    _nvidia(
        slug="h200",
        name="NVIDIA H200 SXM",
        arch="90",
        sms=132,
        l2_bytes=62914560,
        bandwidth_gbs=4800.0,
        boost_mhz=1980,
        peak_tflops={"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
        driver_names=("NVIDIA H200",),
        aliases=("h200-sxm", "h200-141gb"),
        sources=(
            "NVIDIA H200 Tensor Core GPU datasheet (2024)",
            "NVIDIA H100 architecture whitepaper",
            "L2 size: as the CUDA driver reports it (60 MB)",
        ),
    ),
    _nvidia(
        slug="b200",
        name="NVIDIA B200",
        arch="100",
        sms=148,
        l2_bytes=132644864,
        bandwidth_gbs=8000.0,
        boost_mhz=1965,
        peak_tflops={"fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
        driver_names=("NVIDIA B200",),
        aliases=("b200-sxm", "b200-180gb"),
        sources=(
            "NVIDIA DGX B200 datasheet (2024): figures for eight GPUs with sparsity, divided by 16; 64 TB/s and 1440 GB divided by 8",
            "NVIDIA HGX B200 specifications",
            "SMs, L2 size and clock: as the CUDA driver and nvidia-smi report them",
        ),
    ),
    # One graphics compute die (GCD), half of the card: the driver shows each as a device of its own. The card has twice every figure
    # that counts units, memory, bandwidth or operations.
    _amd(
        slug="mi250x",
        name="AMD Instinct MI250X, one GCD",
        arch="gfx90a",
        sms=110,
        l2_bytes=8388608,
        bandwidth_gbs=1638.4,
        boost_mhz=1700,
        peak_tflops={"fp32": 47.9, "bf16": 191.5, "fp16": 191.5},
        driver_names=("AMD Instinct MI250X", "AMD Instinct MI250X / MI250"),
        aliases=("mi250x-gcd",),
        sources=("AMD Instinct MI250X datasheet (2021), halved", "AMD CDNA 2 architecture whitepaper"),
    ),
    # l2_bytes is the sum of the eight dies' 4 MB, without the 256 MB of Infinity Cache.
    _amd(
        slug="mi300x",
        name="AMD Instinct MI300X",
        arch="gfx942",
        sms=304,
        l2_bytes=33554432,
        bandwidth_gbs=5300.0,
        boost_mhz=2100,
        peak_tflops={"fp32": 163.4, "tf32": 653.7, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
        driver_names=("AMD Instinct MI300X", "AMD Instinct MI300X OAM"),
        aliases=("mi300x-oam",),
        sources=("AMD Instinct MI300X accelerator datasheet (2023)", "AMD CDNA 3 architecture whitepaper"),
    ),
)
