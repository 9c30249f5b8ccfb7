"""Folder that Hugging Face's `kernels` package loads: winners' kernels as text, a table of their records, and a launcher without flashtune.

Layout of such a folder, by the package's own sources (kernels 0.17): `build/torch-universal/` holds `metadata.json` and `__init__.py`,
which is imported under the metadata's `id`; `torch-universal` is the build for every backend, with Python alone.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from flashtune import __version__
from flashtune.core.gpu.target import plain_words
from flashtune.core.problems.config import Variant
from flashtune.core.problems.problem import Features
from flashtune.core.records.faults import FAULTS
from flashtune.core.records.results import TuningRecord
from flashtune.core.standalone import FORMAT, module_of
from flashtune.core.system.errors import DatabaseError, EnvironmentProblem, NoKernelFound
from flashtune.core.system.files import aside_of, read_json
from flashtune.core.system.words import canonical, counted
from flashtune.templates import family, unservable
from flashtune.templates.rendering import render
from flashtune.tuner.machine import target_of
from flashtune.tuner.publish.copied_modules import copies
from flashtune.tuner.publish.winners import variant_for

NAME = "flashtune-attention"
MARK = "flashtune.json"
"""The file by which an earlier export is known."""
VARIANT = "build/torch-universal"
MINVER = "0.17.0"
"""The oldest `kernels` that loads these folders: the one that the tests do it with."""

_EXPRESSED = frozenset(
    canonical(features.as_json()) for features in (Features(), Features(causal=True), Features(mask="bool"), Features(mask="bias"))
)
"""Features that the arguments of scaled_dot_product_attention express, but for dropout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFolder:
    """Result of an export: records in the table, those of them that PyTorch won and that are predicted, distinct kernels, records left out
    (backwards, and what scaled_dot_product_attention can't express), GPUs that are unknown here, whose records are used only on
    GPUs of that name, and the bytes of the build."""

    records: int
    torch: int
    predicted: int
    kernels: int
    inexpressible: int
    by_name: tuple[str, ...]
    bytes: int


def write_hub(folder: Path, records: Sequence[TuningRecord], *, licence: str | None = None) -> HubFolder:
    """Write a folder with the forwards among these records, the best of each key, that PyTorch's arguments express; replaces an earlier
    export there. `licence` is that of the records.

    A winner with frozen row maxima, which loses speed on scores that mislead it, gives way to its fallback kernel: nothing here watches it.

    Raises DatabaseError where the folder holds anything else, NoKernelFound without a record, and EnvironmentProblem where it can't be
    written.
    """
    told = [_unwatched(record) for record in records if _expressed(record)]
    if not told:
        kinds = "a forward that is plain, causal, masked or biased, in fp16, bf16 or fp32"
        raise NoKernelFound(f"none of {counted(len(records), 'record')} is {kinds}, as a hub folder needs: search, or loosen the filters")
    variants = {(variant := variant_for(record)).id: variant for record in told if _wins(record)}
    files = _files(told, variants)
    try:
        _refuse_foreign(folder)
        summary = HubFolder(
            records=len(told),
            torch=sum(not _wins(record) for record in told),
            predicted=sum(record.outcome.source == "predicted" for record in told),
            kernels=len(variants),
            inexpressible=len(records) - len(told),
            by_name=tuple(slug for slug in _gpus(told) if target_of(slug) is None),
            bytes=sum(len(text.encode()) for text in files.values()),
        )
        _write(folder, files, {"README.md": _readme(summary, told, licence), MARK: _json({"format": FORMAT, **asdict(summary)})})
    except OSError as error:
        raise EnvironmentProblem(f"{folder} can't be written ({error.strerror or error}): give a folder that can be written to") from error
    return summary


def _expressed(record: TuningRecord) -> bool:
    problem = record.problem
    return problem.direction == "fwd" and problem.dtype != "fp8" and record.key.features in _EXPRESSED


def _unwatched(record: TuningRecord) -> TuningRecord:
    """The record of its fallback kernel, where it has one that serves."""
    fallback = record.as_fallback()
    return record if fallback is None or unservable(fallback) else fallback


def _wins(record: TuningRecord) -> bool:
    """True if the kernel was faster than PyTorch in its run, or PyTorch wasn't timed."""
    ratio = record.relative_time
    return ratio is None or ratio <= 1


def _files(records: Sequence[TuningRecord], variants: Mapping[str, Variant]) -> dict[str, str]:
    """The texts of the build, by path."""
    hosts = {variant.template: family(variant.template).host for variant in variants.values()}
    named = {name: (host.__module__, host.__qualname__) for name, host in sorted(hosts.items()) if isinstance(host, type)}
    assert named.keys() == hosts.keys(), "families' host code is a class of a module"
    found = copies(["flashtune.core.standalone", *(module for module, _ in named.values())])
    if "core/records/faults.py" in found:
        found["core/records/faults.json"] = FAULTS.read_text()
    found["__init__.py"] = _rendered("hub_entry.py.jinja")
    found["hosts.py"] = _hosts_text(named)
    found["kernels/__init__.py"] = '"""Kernels that flashtune rendered."""\n'
    for variant in variants.values():
        found[f"kernels/{module_of(variant)}.py"] = render(family(variant.template), variant)
    found["table.json"] = _json(_table(records, variants))
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(f"{path}\0{found[path]}\0".encode())
    found["metadata.json"] = _json(
        {
            "id": f"{NAME.replace('-', '_')}_{digest.hexdigest()[:12]}",
            "name": NAME,
            "version": 1,
            "kernels-minver": MINVER,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": "cuda"},
        }
    )
    return found


def _hosts_text(named: Mapping[str, tuple[str, str]]) -> str:
    lines = ['"""Host code of the kernels, by their templates."""\n']
    lines += [f"from .{module.removeprefix('flashtune.')} import {name}" for module, name in sorted(set(named.values()))]
    return "\n".join([*lines, "", "HOSTS = {", *(f'    "{template}": {name},' for template, (_, name) in named.items()), "}", ""])


def _table(records: Sequence[TuningRecord], variants: Mapping[str, Variant]) -> dict[str, Any]:
    """The value that flashtune.core.standalone.Table reads."""
    rows = []
    for record in records:
        key = asdict(record.key)
        kernel = variant_for(record).id if _wins(record) else None
        times = {
            "median_us": round(record.median_us, 3),
            "torch_us": None if record.framework_us is None else round(record.framework_us, 3),
        }
        rows.append({"key": key, "kernel": kernel, "source": record.outcome.source, **times})
    kernels = {
        variant.id: {
            "template": variant.template,
            "spec": variant.spec.as_dict(),
            "config": variant.config.as_dict(),
        }
        for variant in sorted(variants.values(), key=lambda variant: variant.id)
    }
    gpus = {slug: _gpu(slug) for slug in _gpus(records)}
    return {"format": FORMAT, "flashtune": __version__, "gpus": gpus, "kernels": kernels, "records": rows}


def _gpus(records: Iterable[TuningRecord]) -> list[str]:
    return sorted({record.key.gpu for record in records})


def _gpu(slug: str) -> dict[str, Any]:
    """Names by which the launcher tells a GPU; a card that is unknown here only by its slug, which its driver's name gives."""
    target = target_of(slug)
    names = (slug,) if target is None else (target.slug, target.name, *target.aliases, *target.driver_names)
    plain = {"".join(plain_words(name)) for name in names}
    return {"arch": None if target is None else target.arch, "names": sorted(plain)}


def _readme(summary: HubFolder, records: Iterable[TuningRecord], licence: str | None) -> str:
    parts = f"{counted(summary.records, 'record')} with {counted(summary.kernels, 'kernel')}"
    parts += f" (PyTorch won {summary.torch} of them)" if summary.torch else ""
    if summary.predicted:
        parts += f", {summary.predicted} of the records predicted by a cost model and never measured,"
    gpus = ", ".join(sorted(slug if (target := target_of(slug)) is None else target.name for slug in _gpus(records)))
    closing = f"\nThe code is under Apache-2.0, the records under {licence}.\n" if licence else "\nApache-2.0.\n"
    return _rendered("hub_readme.md.jinja", version=__version__, summary=parts, gpus=gpus, variant=VARIANT, licence=closing)


def _rendered(name: str, **words: str) -> str:
    """The text of a template beside this module."""
    folder = Environment(loader=PackageLoader("flashtune.tuner.publish", ""), undefined=StrictUndefined, keep_trailing_newline=True)
    return folder.get_template(name).render(**words)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _refuse_foreign(folder: Path) -> None:
    """Raise DatabaseError unless the folder is missing, empty or an earlier export; hidden files (.git) don't count."""
    if not folder.exists():
        if folder.is_symlink():
            raise DatabaseError(f"{folder} is a link to nothing: give a folder")
        return
    if not folder.is_dir():
        raise DatabaseError(f"{folder} is no folder: give an empty one, or one of an earlier export")
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if not names:
        return
    known = {MARK, "README.md", "build"}
    foreign = sorted(names - known) or ([] if _marked(folder) else sorted(names))
    foreign += [name for name in (*known, VARIANT) if (folder / name).is_symlink()]
    build = folder / "build"
    if not foreign and build.is_dir():
        foreign = sorted(f"build/{path.name}" for path in build.iterdir() if path.name != Path(VARIANT).name)
    if foreign:
        raise DatabaseError(f"{folder} holds {foreign[0]}, which no export wrote: give an empty folder, or one of an earlier export")


def _marked(folder: Path) -> bool:
    try:
        found = read_json(folder / MARK, 1 << 16)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def _write(folder: Path, files: Mapping[str, str], beside: Mapping[str, str]) -> None:
    """Write the build beside the old one, then put it in its place."""
    (folder / "build").mkdir(parents=True, exist_ok=True)
    with aside_of(folder / "build") as aside:
        for path, text in files.items():
            (aside / "new" / path).parent.mkdir(parents=True, exist_ok=True)
            (aside / "new" / path).write_text(text)
        for name, text in beside.items():
            (aside / name).write_text(text)
            os.replace(aside / name, folder / name)
        with suppress(FileNotFoundError):
            os.rename(folder / VARIANT, aside / "old")
        os.rename(aside / "new", folder / VARIANT)
