"""GPUs as the tuner sees them: a table of facts with sources (`flashtune.core.gpus`) and the look-up by any of their names."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from flashtune.core.errors import InputError, did_you_mean

Vendor = Literal["nvidia", "amd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One GPU model. Peak figures are the vendor's dense ones (no sparsity), at boost clock.

    `arch` is what Triton's compiler takes: the compute capability as a number ("90") or a gfx name ("gfx942").
    `peak_tflops` maps fp32, tf32, bf16, fp16 and fp8 to 10^12 operations per second; a missing type has no matrix unit for it.
    `exp_per_clock` is how many exponentials one SM (compute unit) starts per clock.
    `driver_names` are the names that drivers report; `aliases` what people write.
    """

    slug: str
    name: str
    vendor: Vendor
    arch: str
    sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    max_threads_per_sm: int
    warp_size: int
    l2_bytes: int
    bandwidth_gbs: float
    boost_mhz: int
    exp_per_clock: int
    peak_tflops: dict[str, float]
    compilable: bool
    driver_names: tuple[str, ...]
    aliases: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def capability(self) -> int | None:
        """The compute capability as a number (90 for Hopper); None for GPUs that aren't NVIDIA's."""
        return int(self.arch) if self.vendor == "nvidia" else None

    @property
    def has_tma(self) -> bool:
        """Whether the GPU has the bulk tensor copy engine that descriptor kernels use."""
        return self.capability is not None and self.capability >= 90

    @property
    def has_e4m3(self) -> bool:
        """Whether Triton compiles conversions of e4m3 (fp8) for it: on NVIDIA's GPUs from compute capability 8.9 on."""
        return self.capability is None or self.capability >= 89

    @property
    def is_hopper(self) -> bool:
        """Whether warpgroup matrix instructions (wgmma) exist: compute capability 9.0 alone."""
        return self.capability == 90

    @property
    def exp_per_second(self) -> float:
        """Exponentials per second of the whole GPU."""
        return self.sms * self.exp_per_clock * self.boost_mhz * 1e6


@cache
def targets() -> dict[str, Target]:
    """Every GPU of the table, by slug."""
    # Its rows are of this module's class.
    from flashtune.core.gpus import GPUS

    return {target.slug: target for target in GPUS}


def _plain(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB` and `a100 sxm4 80gb` alike."""
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return "".join(word for word in words if word not in ("nvidia", "amd", "geforce", "instinct", "radeon", "tesla"))


def find_target(name: str) -> Target:
    """The GPU with this slug, alias or driver name (case and punctuation don't matter); raises InputError with the nearest names."""
    slugs: dict[str, str] = {}
    for target in targets().values():
        for alias in (target.slug, target.name, *target.aliases, *target.driver_names):
            slugs.setdefault(_plain(alias), target.slug)
    slug = slugs.get(_plain(name))
    if slug is None:
        hint = did_you_mean(_plain(name), slugs, cutoff=0.4) or f"use one of {', '.join(targets())}"
        raise InputError(f"unknown GPU {name!r}: {hint} (flashtune doctor lists them all)")
    return targets()[slug]
