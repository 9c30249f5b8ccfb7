"""Versions of all that decides what a provider computes: as records keep them, and compared with this machine's.

They are a provider's config in a record, by the words of `TITLES`; importing this needs no PyTorch.
"""

from collections.abc import Mapping
from typing import Any

from flashtune.core.problems.config import Config
from flashtune.core.records.results import Finding, Outcome, TuningRecord

TITLES: Mapping[str, str] = {
    "torch": "PyTorch",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "driver": "driver",
    "triton": "Triton",
    "flash_attn": "flash-attn",
    "flash_attn_4": "flash-attn-4",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "cudnn_frontend": "nvidia-cudnn-frontend",
    "ffpa": "ffpa-attn",
}
"""Parts that have a version, with their names for messages; those of packages are the packages' names."""

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "flex": ("triton",),
    "fa4": ("flash_attn_4", "cutlass_dsl"),
    "fa2": ("flash_attn",),
    "cudnn_fe": ("cudnn_frontend",),
    "ffpa": ("ffpa",),
}
"""Packages that decide what a provider computes, beside PyTorch, CUDA and the driver, which decide all of them."""


def is_versions(values: Mapping[str, Any]) -> bool:
    """True for values that a provider's config may hold."""
    return all(name in TITLES and isinstance(value, str) for name, value in values.items())


def release(torch: str) -> str:
    """A version of PyTorch without its build, which names CUDA's, a part of its own."""
    return torch.partition("+")[0]


def versions_in(record: TuningRecord, outcome: Outcome) -> Config:
    """Versions with which a provider of a record was timed or found wrong; of older records those that its run has."""
    run = record.provenance
    return known_by(outcome.config, torch=run.torch, triton=run.triton, driver=run.driver)


def known_by(config: Config, *, torch: str, **run: str) -> Config:
    """Versions in a provider's config; where it has none, as in older records, those of its run."""
    if config.items:
        return config
    return Config.of({name: version for name, version in {"torch": release(torch), **run}.items() if version})


def differing(theirs: Config, ours: Config) -> tuple[str, ...]:
    """Parts with two versions, of those that both know: `cuDNN 9.10.2 (here 9.12.0)`."""
    both = [(name, theirs[name], ours[name]) for name in theirs if name in ours]
    return tuple(f"{TITLES[name]} {there} (here {here})" for name, there, here in both if there != here)


def said(versions: Config) -> str:
    """Versions for messages: `cuDNN 9.10.2, PyTorch 2.11.0`."""
    return ", ".join(f"{TITLES[name]} {versions[name]}" for name in versions)


def suspicion(record: TuningRecord, outcome: Outcome, here: Config) -> str:
    """Why a verdict on a provider may not hold here, where versions differ; empty elsewhere."""
    apart = differing(versions_in(record, outcome), here)
    return f"{outcome.template} was judged with {', '.join(apart)}" if apart else ""


def holding(findings: tuple[Finding, ...], origin: str, here: Config, timed: Config | None) -> Finding | None:
    """The finding because of which a provider doesn't serve by a record of this origin; None where there is none.

    One made with the versions that are here counts always. One made with others is a suspect, and counts only against a time that
    was `timed` with other versions than those here, too: a provider that was right after it serves. The user's own findings and the
    shipped ones count for every record, those of another database for its own.
    """
    for one in findings:
        if one.versions is None or one.origin not in ("", "shipped", origin):
            continue
        if not differing(one.versions, here) or (timed is not None and differing(timed, here)):
            return one
    return None
