"""GPU models (`Target`) and their look-up by any name: those of the table (`flashtune.core.gpus`), and cards of
this machine beside it (`flashtune.core.cards`)."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from flashtune.core.errors import InputError, did_you_mean

Vendor = Literal["nvidia", "amd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One GPU model. Peak figures are the vendor's dense ones (no sparsity), at boost clock.

    `arch` is the argument of Triton's compiler: the compute capability as a number ("90") or a gfx name ("gfx942").
    `peak_tflops` maps fp32, tf32, bf16, fp16 and fp8 to 10^12 operations per second; a missing type has no matrix unit for it.
    `exp_per_clock` is the number of exponentials that one SM (compute unit) starts per clock.
    `driver_names` are the names that drivers report; `aliases` are other names that users may type.
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

    def __reduce__(self) -> tuple[Callable[..., "Target"], tuple[object, ...]]:
        """Pickling by fields; the receiving process registers the GPU (`know`)."""
        return _handed, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def capability(self) -> int | None:
        """The compute capability as a number (90 for Hopper); None for GPUs that aren't NVIDIA's."""
        return int(self.arch) if self.vendor == "nvidia" else None

    @property
    def has_tma(self) -> bool:
        """True if the GPU has the bulk tensor copy engine that descriptor kernels use."""
        return self.capability is not None and self.capability >= 90

    @property
    def has_e4m3(self) -> bool:
        """True if Triton compiles conversions of e4m3 (fp8) for it: on NVIDIA's GPUs from compute capability 8.9 on."""
        return self.capability is None or self.capability >= 89

    @property
    def is_hopper(self) -> bool:
        """True if the GPU has warpgroup matrix instructions (wgmma): compute capability 9.0 alone."""
        return self.capability == 90

    @property
    def exp_per_second(self) -> float:
        """Exponentials per second of the whole GPU."""
        return self.sms * self.exp_per_clock * self.boost_mhz * 1e6


def _handed(*values: Any) -> Target:
    return know(Target(**dict(zip((field.name for field in fields(Target)), values, strict=True))))


@cache
def targets() -> dict[str, Target]:
    """Every known GPU by slug: those of the table, then cards that a driver described (`know`)."""
    # The table imports this module's class.
    from flashtune.core.gpus import GPUS

    return {target.slug: target for target in GPUS}


def know(target: Target) -> Target:
    """Register this GPU for look-ups, unless its slug is known; returns it."""
    targets().setdefault(target.slug, target)
    return target


def plain_words(name: str) -> list[str]:
    """The words of a GPU's name in lower case, without those of brands: `a100`, `sxm4`, `80gb` of NVIDIA A100-SXM4-80GB."""
    words = "".join(c if c.isalnum() else " " for c in name.lower()).split()
    return [word for word in words if word not in ("nvidia", "amd", "geforce", "instinct", "radeon", "tesla")]


def find_target(name: str) -> Target:
    """The GPU with this slug, alias or driver name (case and punctuation don't matter), of the table or of this machine; raises InputError
    with the nearest names."""
    if name in targets():
        return targets()[name]
    plain = "".join(plain_words(name))
    slug = _names().get(plain)
    if slug is None:
        _know_cards_here()
        known = _names()
        slug = known.get(plain)
        if slug is None:
            near = did_you_mean(plain, known, cutoff=0.4)
            hint = f"{near} (flashtune doctor lists them all)" if near else f"use one of {', '.join(targets())}"
            raise InputError(f"unknown GPU {name!r}: {hint}")
    return targets()[slug]


def _names() -> dict[str, str]:
    """Slugs by all names of GPUs, without punctuation."""
    found: dict[str, str] = {}
    for target in targets().values():
        for alias in (target.slug, target.name, *target.aliases, *target.driver_names):
            found.setdefault("".join(plain_words(alias)), target.slug)
    return found


@cache
def _know_cards_here() -> None:
    """Register the cards of this machine that the table lacks, as their driver describes them."""
    from flashtune.core import cards

    known = _names()
    for facts in cards.here():
        if "".join(plain_words(facts.name)) not in known:
            know(cards.described(facts))
