"""Table of GPUs: facts with sources, a line for each card.

Peak figures are dense (no sparsity), with float32 accumulation, 10^12 operations per second, at boost clock. Where a vendor quotes a faster
rate with fp16 accumulation (GeForce), that one is left out: attention accumulates in float32. fp32 is IEEE: NVIDIA's ordinary cores, AMD's
matrix units. Every entry names its sources.
"""

from typing import NamedTuple

PEAK_TYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
"""Types of a card's peak figures, in their order."""


class Card(NamedTuple):
    """The figures of one card; None for a type without a matrix unit."""

    slug: str
    name: str
    arch: str
    sms: int
    l2_bytes: int
    bandwidth_gbs: float
    boost_mhz: int
    peaks: tuple[float | None, float | None, float | None, float | None, float | None]


CARDS = (
    # 112 TFLOP/s over 900 GB/s put its crossover at about 125 FLOP/byte, the figure that is usually quoted. For rooflines only: Triton no
    # longer supports compute capability 7.0. Volta has no bf16 and no TF32.
    Card("v100", "NVIDIA Tesla V100 PCIe", "70", 80, 6291456, 900.0, 1380, (14.0, None, None, 112.0, None)),
    # 125 TFLOP/s over the same 900 GB/s: crossover near 139 FLOP/byte.
    Card("v100-sxm2", "NVIDIA Tesla V100 SXM2", "70", 80, 6291456, 900.0, 1530, (15.7, None, None, 125.0, None)),
    # The 80 GB PCIe card has the same chip and peaks and 5 % less bandwidth (1935 GB/s), so it shares this entry.
    Card("a100", "NVIDIA A100 80GB SXM", "80", 108, 41943040, 2039.0, 1410, (19.5, 156.0, 312.0, 312.0, None)),
    Card("a100-40gb", "NVIDIA A100 40GB", "80", 108, 41943040, 1555.0, 1410, (19.5, 156.0, 312.0, 312.0, None)),
    Card("a10", "NVIDIA A10", "86", 72, 6291456, 600.0, 1695, (31.2, 62.5, 125.0, 125.0, None)),
    Card("l4", "NVIDIA L4", "89", 58, 50331648, 300.0, 2040, (30.3, 60.0, 121.0, 121.0, 242.5)),
    Card("l40s", "NVIDIA L40S", "89", 142, 100663296, 864.0, 2520, (91.6, 183.0, 362.05, 362.05, 733.0)),
    Card("rtx3090", "NVIDIA GeForce RTX 3090", "86", 82, 6291456, 936.0, 1695, (35.6, 35.6, 71.0, 71.0, None)),
    Card("rtx4090", "NVIDIA GeForce RTX 4090", "89", 128, 75497472, 1008.0, 2520, (82.6, 82.6, 165.2, 165.2, 330.3)),
    Card("rtx5090", "NVIDIA GeForce RTX 5090", "120", 170, 100663296, 1792.0, 2407, (104.8, 104.8, 209.5, 209.5, 419.0)),
    Card("h100", "NVIDIA H100 SXM", "90", 132, 52428800, 3352.0, 1980, (66.9, 494.7, 989.4, 989.4, 1978.9)),
    Card("h100-pcie", "NVIDIA H100 PCIe", "90", 114, 52428800, 2039.0, 1755, (51.2, 378.0, 756.0, 756.0, 1513.0)),
    Card("h200", "NVIDIA H200 SXM", "90", 132, 62914560, 4800.0, 1980, (66.9, 494.7, 989.4, 989.4, 1978.9)),
    Card("b200", "NVIDIA B200", "100", 148, 132644864, 8000.0, 1965, (75.0, 1125.0, 2250.0, 2250.0, 4500.0)),
    # One graphics compute die (GCD), half of the card: the driver shows each as a device of its own. The card has twice every figure
    # that counts units, memory, bandwidth or operations.
    Card("mi250x", "AMD Instinct MI250X, one GCD", "gfx90a", 110, 8388608, 1638.4, 1700, (47.9, None, 191.5, 191.5, None)),
    # Its L2 is the sum of the eight dies' 4 MB, without the 256 MB of Infinity Cache.
    Card("mi300x", "AMD Instinct MI300X", "gfx942", 304, 33554432, 5300.0, 2100, (163.4, 653.7, 1307.4, 1307.4, 2614.9)),
)

NAMES = {
    "v100": (("Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"), ("v100-pcie", "v100-pcie-16gb", "v100-pcie-32gb")),
    "v100-sxm2": (("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), ("v100-sxm", "v100-sxm2-16gb", "v100-sxm2-32gb")),
    "a100": (("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), ("a100-80gb", "a100-sxm4-80gb", "a100-80gb-pcie")),
    "a100-40gb": (("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), ("a100-sxm4-40gb", "a100-pcie-40gb")),
    "a10": (("NVIDIA A10",), ("a10-24gb",)),
    "l4": (("NVIDIA L4",), ("l4-24gb",)),
    "l40s": (("NVIDIA L40S",), ("l40s-48gb",)),
    "rtx3090": (("NVIDIA GeForce RTX 3090",), ("3090",)),
    "rtx4090": (("NVIDIA GeForce RTX 4090",), ("4090",)),
    "rtx5090": (("NVIDIA GeForce RTX 5090",), ("5090",)),
    "h100": (("NVIDIA H100 80GB HBM3",), ("h100-sxm", "h100-sxm5", "h100-80gb-hbm3")),
    "h100-pcie": (("NVIDIA H100 PCIe",), ("h100-80gb-pcie",)),
    "h200": (("NVIDIA H200",), ("h200-sxm", "h200-141gb")),
    "b200": (("NVIDIA B200",), ("b200-sxm", "b200-180gb")),
    "mi250x": (("AMD Instinct MI250X", "AMD Instinct MI250X / MI250"), ("mi250x-gcd",)),
    "mi300x": (("AMD Instinct MI300X", "AMD Instinct MI300X OAM"), ("mi300x-oam",)),
}
"""By slug, the names that drivers report, and other names that users may type."""

SOURCES = {
    "v100": ("NVIDIA Tesla V100 GPU accelerator datasheet (2018): PCIe column", "NVIDIA Tesla V100 architecture whitepaper, WP-08608-001"),
    "v100-sxm2": (
        "NVIDIA Tesla V100 GPU accelerator datasheet (2018): NVLink column",
        "NVIDIA Tesla V100 architecture whitepaper, WP-08608-001",
    ),
    "a100": ("NVIDIA A100 Tensor Core GPU datasheet (2021)", "NVIDIA A100 architecture whitepaper"),
    "a100-40gb": ("NVIDIA A100 Tensor Core GPU datasheet (2020)", "NVIDIA A100 architecture whitepaper"),
    "a10": ("NVIDIA A10 Tensor Core GPU datasheet (2021)", "NVIDIA Ampere GA102 GPU architecture whitepaper"),
    "l4": ("NVIDIA L4 Tensor Core GPU datasheet (2023): its figures with sparsity, halved", "NVIDIA Ada GPU architecture whitepaper"),
    "l40s": ("NVIDIA L40S GPU datasheet (2023)", "NVIDIA Ada GPU architecture whitepaper"),
    "rtx3090": ("NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A",),
    "rtx4090": ("NVIDIA Ada GPU architecture whitepaper, appendix A",),
    "rtx5090": ("NVIDIA RTX Blackwell GPU architecture whitepaper, appendix A",),
    "h100": ("NVIDIA H100 Tensor Core GPU datasheet (2023)", "NVIDIA H100 architecture whitepaper"),
    "h100-pcie": ("NVIDIA H100 Tensor Core GPU datasheet (2023)", "NVIDIA H100 architecture whitepaper"),
    "h200": (
        "NVIDIA H200 Tensor Core GPU datasheet (2024)",
        "NVIDIA H100 architecture whitepaper",
        "L2 size: as the CUDA driver reports it (60 MB)",
    ),
    "b200": (
        "NVIDIA DGX B200 datasheet (2024): figures for eight GPUs with sparsity, divided by 16; 64 TB/s and 1440 GB divided by 8",
        "NVIDIA HGX B200 specifications",
        "SMs, L2 size and clock: as the CUDA driver and nvidia-smi report them",
    ),
    "mi250x": ("AMD Instinct MI250X datasheet (2021), halved", "AMD CDNA 2 architecture whitepaper"),
    "mi300x": ("AMD Instinct MI300X accelerator datasheet (2023)", "AMD CDNA 3 architecture whitepaper"),
}
"""By slug, where its figures come from."""

SHARED_AND_THREADS = {
    "70": (98304, 98304, 2048),
    "80": (166912, 167936, 2048),
    "86": (101376, 102400, 1536),
    "89": (101376, 102400, 1536),
    "90": (232448, 233472, 2048),
    "100": (232448, 233472, 2048),
    "120": (101376, 102400, 1536),
}
"""Bytes of shared memory per block and per SM, and threads per SM, by NVIDIA's compute capability."""

AMD_SHARED_AND_THREADS = (65536, 65536, 2048)
"""The same of AMD's cards."""

GUIDE = (
    "NVIDIA CUDA C++ Programming Guide, compute capabilities "
    "(shared memory, registers, threads; arithmetic throughput: 16 special functions per clock and SM)"
)
"""Source of what NVIDIA's cards of one compute capability share."""

SCHEDULE = "LLVM AMDGPU scheduling model (SISchedule.td): transcendentals at a quarter of the vector rate: 16 per clock and CU"
"""Source of what AMD's cards share."""
