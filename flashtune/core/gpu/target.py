"""GPU models (`Target`) and their look-up by any name: those of the table (`flashtune.core.gpu.table`), and cards of
this machine beside it (`flashtune.core.gpu.cards`), under slugs made of their names."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from flashtune.core.gpu.cards import Facts, here
from flashtune.core.gpu.table import AMD_SHARED_AND_THREADS, CARDS, GUIDE, NAMES, PEAK_TYPES, SCHEDULE, SHARED_AND_THREADS, SOURCES, Card
from flashtune.core.system.errors import InputError, did_you_mean

Vendor = Literal["nvidia", "amd"]

MATRIX_TYPES = ("tf32", "bf16", "fp16", "fp8")

SLOWED = {"a10g": 0.5, "l20": 0.5, "l40": 0.5, "h20": 0.25}
"""Share of their architecture's matrix rate that these cards have, by their datasheets; no driver reports it."""

UNREPORTED_GBS = 250.0
"""GB/s of memory whose clock or width the driver doesn't report: that of laptops and boards that share it with the CPU."""


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
        """True if it converts e4m3 (fp8): on NVIDIA's GPUs from compute capability 8.9 on, on AMD's gfx950 and gfx12. For gfx942, whose own
        format is another, Triton emulates it in tens of thousands of instructions."""
        return self.arch.startswith(("gfx95", "gfx12")) if self.capability is None else self.capability >= 89

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
    return {card.slug: _of_table(card) for card in CARDS}


def _of_table(card: Card) -> Target:
    """A card of the table with the facts that its compute capability or vendor shares."""
    amd = card.arch.startswith("gfx")
    shared_bytes_per_block, shared_bytes_per_sm, max_threads_per_sm = AMD_SHARED_AND_THREADS if amd else SHARED_AND_THREADS[card.arch]
    driver_names, aliases = NAMES[card.slug]
    return Target(
        slug=card.slug,
        name=card.name,
        vendor="amd" if amd else "nvidia",
        arch=card.arch,
        sms=card.sms,
        shared_bytes_per_block=shared_bytes_per_block,
        shared_bytes_per_sm=shared_bytes_per_sm,
        registers_per_sm=131072 if amd else 65536,
        max_threads_per_sm=max_threads_per_sm,
        warp_size=64 if amd else 32,
        l2_bytes=card.l2_bytes,
        bandwidth_gbs=card.bandwidth_gbs,
        boost_mhz=card.boost_mhz,
        exp_per_clock=16,
        peak_tflops={kind: peak for kind, peak in zip(PEAK_TYPES, card.peaks, strict=True) if peak is not None},
        compilable=card.arch != "70",
        driver_names=driver_names,
        aliases=aliases,
        sources=(*SOURCES[card.slug], SCHEDULE if amd else GUIDE),
    )


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
    known = _names()
    for facts in here():
        if "".join(plain_words(facts.name)) not in known:
            know(described_by_driver(facts))


def slug_of(name: str) -> str:
    """Slug of a card by the name that its driver reports: `h100-nvl` of NVIDIA H100 NVL, a slice's profile (MIG) included."""
    return "-".join(plain_words(name))[:64]


def described_by_driver(facts: Facts) -> Target:
    """The target of a card from its driver's facts; its matrix rate is its architecture's rate per SM and clock."""
    per_clock, exp_per_clock = _rates(10 * facts.major + facts.minor, facts.name)
    mhz = facts.clock / 1e3
    gbs = 2 * facts.memory_clock * facts.bus_width / 8 / 1e6
    memory = f"{facts.memory_bytes / 1e9:.0f} GB behind {facts.bus_width} bits at {facts.memory_clock / 1e3:.0f} MHz"
    return Target(
        slug=slug_of(facts.name),
        name=facts.name,
        vendor="nvidia",
        arch=f"{facts.major}{facts.minor}",
        sms=facts.sms,
        shared_bytes_per_block=facts.shared_bytes_per_block,
        shared_bytes_per_sm=facts.shared_bytes_per_sm,
        registers_per_sm=facts.registers_per_sm,
        max_threads_per_sm=facts.max_threads_per_sm,
        warp_size=facts.warp_size,
        l2_bytes=facts.l2_bytes,
        bandwidth_gbs=round(gbs, 1) or UNREPORTED_GBS,
        boost_mhz=round(mhz),
        exp_per_clock=exp_per_clock,
        peak_tflops={kind: round(rate * facts.sms * mhz / 1e6, 1) for kind, rate in per_clock.items()},
        compilable=facts.major >= 8,
        driver_names=(facts.name,),
        aliases=(),
        sources=(f"as NVIDIA's driver describes it: {memory}", "rates of an SM and clock: those of the table's cards of its architecture"),
    )


def _rates(arch: int, name: str) -> tuple[dict[str, float], int]:
    """Operations per SM and clock by type, and exponentials, from the table's card of this or the nearest architecture.

    GeForce cards have half the matrix rate of others of their architecture, with sums in float32.
    """
    geforce = "geforce" in name.lower()

    def apart(card: Target) -> tuple[bool, int, bool]:
        theirs = int(card.arch)
        return theirs // 10 != arch // 10, abs(theirs - arch), ("GeForce" in card.name) != geforce

    kin = min((_of_table(card) for card in CARDS if card.arch in SHARED_AND_THREADS), key=apart)
    other = 1.0 if ("GeForce" in kin.name) == geforce else 0.5 if geforce else 2.0
    other *= next((SLOWED[word] for word in plain_words(name)[:1] if word in SLOWED), 1.0)
    clocks = kin.sms * kin.boost_mhz / 1e6
    return {kind: peak / clocks * (other if kind in MATRIX_TYPES else 1.0) for kind, peak in kin.peak_tflops.items()}, kin.exp_per_clock
