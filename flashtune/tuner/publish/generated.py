"""Folder of generated kernels: its layout, its index, and writing it without touching other files."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from flashtune.core.code.archive import Archive
from flashtune.core.code.binaries import Manifest, source_digest
from flashtune.core.code.index import FORMAT, INDEX, GeneratedKernel, Index, digest, read_index
from flashtune.core.code.shipped import archive_name, find_archive, manifest_in
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import KernelSpec, Value, Variant
from flashtune.core.problems.dtypes import OTHER_16_BITS
from flashtune.core.records.results import Fate, TuningRecord
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.core.system.files import write_whole
from flashtune.templates import family, unservable
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.publish.machine_code import Built, Order, can_have_binaries, pages_of
from flashtune.tuner.publish.packing import Packed, Shipped, Unpacked, pack_kernels
from flashtune.tuner.publish.winners import variant_for

_PASSES = {"fwd": "forward", "bwd": "backward"}
_FOLDER = b'"""Generated kernels; the topmost README.md lists them."""\n'
"""Content of the `__init__.py` that makes a folder a package."""

_TILE = ("BLOCK_M", "BLOCK_N")

_PREFACE = """# Generated kernels

`flashtune generate` writes this folder from a tuned database; nothing in it is edited by hand. A path says the GPU architecture, the
pass, what is compiled in (head size, element type, features) and the tile, with whatever else tells apart kernels of the same tile.
`index.json` names all kernels, and pins the archive of their machine code (`kernels/` in the repository, docs/decisions/0003-kernels.md).
The package shows one of each family as text; `flashtune show --kernel ID` prints any.

Times are medians in microseconds, of the kernel and of PyTorch's own attention in the same run. A problem's label starts with N
(queries x keys where they differ); `gqa4` means four query heads to a key head. A fallback kernel runs in place of a winner with frozen
row maxima while scores mispredict these.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """Kernel with its path in the folder, the records that it serves, and those in which it is the winner's fallback kernel (as records of
    its own).

    `sibling` is the dtype variant for the other 16-bit type, None where that is arranged by itself.
    """

    kernel: GeneratedKernel
    variant: Variant
    target: Target
    records: tuple[TuningRecord, ...]
    fallbacks: tuple[TuningRecord, ...] = ()
    sibling: Variant | None = None

    @property
    def text(self) -> str:
        """The module's source."""
        return render(family(self.variant.template), self.variant)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Variants whose machine code is shipped: the kernel's own, and its dtype variant."""
        return (self.variant,) if self.sibling is None else (self.variant, self.sibling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Result of writing a folder: new or changed files, removed files, and stale ones left alone because their content was edited."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    left: tuple[str, ...]


def arrange(records: Sequence[TuningRecord]) -> list[Arranged]:
    """Distinct winners of these records and their fallback kernels, one per architecture, in the order of their paths."""
    rows: dict[tuple[str, Variant], list[TuningRecord]] = defaultdict(list)
    fallbacks: dict[tuple[str, Variant], list[TuningRecord]] = defaultdict(list)
    for record in records:
        if record.problem.features.mods:
            # Only a call has the functions.
            continue
        rows[find_target(record.key.gpu).arch, variant_for(record)].append(record)
        if (fallback := record.as_fallback()) is not None and not unservable(fallback):
            fallbacks[find_target(fallback.key.gpu).arch, variant_for(fallback)].append(fallback)
    groups: dict[str, list[tuple[str, Variant]]] = defaultdict(list)
    for arch, variant in dict.fromkeys([*rows, *fallbacks]):
        groups[f"{_folder(arch, variant)}/{_tile(variant)}"].append((arch, variant))
    own = {variant.id for _, variant in (*rows, *fallbacks)}
    arranged = []
    for start, members in groups.items():
        axes = _telling_axes([variant for _, variant in members])
        for arch, variant in members:
            path = "_".join([start, *(_word(axis, variant.config[axis]) for axis in axes if axis in variant.config)]) + ".py"
            kernel = GeneratedKernel(variant_id=variant.id, template=variant.template, arch=arch, path=path)
            served, beside = (tuple(sorted(found[arch, variant], key=_row_order)) for found in (rows, fallbacks))
            target = find_target((*served, *beside)[0].key.gpu)
            sibling = _sibling(variant)
            beside_it = None if sibling is None or sibling.id in own else sibling
            arranged.append(Arranged(kernel=kernel, variant=variant, target=target, records=served, fallbacks=beside, sibling=beside_it))
    return sorted(arranged, key=lambda one: one.kernel.path)


def _sibling(variant: Variant) -> Variant | None:
    """Dtype variant of a kernel for the other 16-bit type, None where there is none."""
    other = OTHER_16_BITS.get(variant.spec.dtype)
    return None if other is None else variant_of(family(variant.template), replace(variant.spec, dtype=other), variant.config)


def _row_order(record: TuningRecord) -> tuple[Any, ...]:
    p = record.problem
    return record.key.gpu, p.n_kv, p.n_q, p.batch * p.heads, p.label(), p.batch, record.median_us


def _folder(arch: str, variant: Variant) -> str:
    kind = "decode" if variant.template.endswith("_decode") else _PASSES[variant.spec.direction]
    return f"{f'sm{arch}' if arch.isdigit() else arch}/{kind}/{_spec_name(variant.spec)}"


def _spec_name(spec: KernelSpec) -> str:
    """Folder name of a spec, as `d128_bf16_causal`."""
    _, dtype, d, *flags = spec.label().split("-")
    return "_".join([d, dtype, *flags])


def _tile(variant: Variant) -> str:
    """File name's start, as `hopper_128x64`: the family without the parts that the folder names, and the tile."""
    name = variant.template.removeprefix("flash_").removeprefix("fwd_").removeprefix("bwd_")
    sizes = [str(variant.config[axis]) for axis in _TILE if axis in variant.config]
    return "_".join([name, "x".join(sizes)]) if sizes else name


def _telling_axes(variants: Sequence[Variant]) -> list[str]:
    """Axes whose values differ among these variants, in the order of the config with the most axes."""
    longest_first = sorted(variants, key=lambda variant: (-len(list(variant.config)), variant.config.label()))
    named = dict.fromkeys(axis for variant in longest_first for axis in variant.config)
    return [axis for axis in named if len({repr(variant.config.as_dict().get(axis)) for variant in variants}) > 1]


def _word(axis: str, value: Value) -> str:
    if isinstance(value, bool):
        return axis if value else f"no_{axis}"
    return f"{axis}{value}" if isinstance(value, int) else re.sub(r"\W", "_", f"{axis}_{value}")


def orders_of(one: Arranged) -> list[Order]:
    """Compile orders of a kernel, its dtype variant last; none where its GPU's machine code can't be made here."""
    if not can_have_binaries(one.target):
        return []
    pages = tuple(sorted({record.problem.features.page for record in (*one.records, *one.fallbacks)} - {0}))
    return [
        Order(
            text=render(family(variant.template), variant),
            stem=_stem(one, variant),
            variant_id=variant.id,
            spec=variant.spec,
            target=one.target,
            pages=pages,
        )
        for variant in one.variants
    ]


def _stem(one: Arranged, variant: Variant) -> str:
    """Path of a kernel, or of its dtype variant, without a suffix."""
    stem = one.kernel.path.removesuffix(".py")
    return stem if variant is one.variant else f"{stem}_in_{variant.spec.dtype}"


def archive_of(arranged: Sequence[Arranged], arch: str, built: Mapping[tuple[str, str], Built], before: Archive | None) -> Packed | None:
    """Archive of these kernels' machine code for an architecture; None where there is none."""
    kernels = [
        Shipped(name=_stem(one, variant), built=built[variant.id, arch])
        for one in arranged
        if one.kernel.arch == arch
        for variant in one.variants
        if (variant.id, arch) in built
    ]
    return pack_kernels(kernels, before) if kernels else None


def present_archive(folder: Path, index: Index, arch: str) -> Unpacked | None:
    """Archive that a folder's index names for an architecture, wherever it is stored; None where it is absent or damaged."""
    with suppress(EnvironmentProblem):
        found = find_archive(folder, index, arch)
        return None if found is None else Unpacked(path=found.path, sha256=found.sha256, groups=found.groups)
    return None


def kept(order: Order, index: Index, archive: Archive | None, triton: str) -> Built | None:
    """Archived machine code of exactly this text, for all the order's page sizes and by this Triton, if its hashes match; else None."""
    try:
        found = manifest_in(archive, index, order.variant_id, order.target.arch)
        if found is None or {found.source_sha256, *(binary.triton for binary in found.binaries)} != {source_digest(order.text), triton}:
            return None
        if set(order.pages) - pages_of(found):
            return None
        codes = tuple(map(found.code, found.binaries))
    except EnvironmentProblem:
        return None
    binaries = tuple(replace(binary, file="") for binary in found.binaries)
    return Built(manifest=Manifest(variant_id=found.variant_id, binaries=binaries, source_sha256=found.source_sha256), codes=codes)


def selected(arranged: Sequence[Arranged]) -> list[Arranged]:
    """Kernels that the package shows as text: of each family and kind of call the one with most records."""
    most: dict[tuple[str, str], Arranged] = {}
    for one in arranged:
        place = one.kernel.template, one.kernel.path.split("/")[1]
        if place not in most or len(one.records) > len(most[place].records):
            most[place] = one
    return sorted(most.values(), key=lambda one: one.kernel.path)


def text_files(arranged: Sequence[Arranged]) -> dict[str, bytes]:
    """Contents by path of the modules, the `__init__.py` files of their folders, and the README."""
    files = {one.kernel.path: one.text.encode() for one in arranged}
    for path in list(files):
        for parent in list(Path(path).parents)[:-1]:
            files[f"{parent.as_posix()}/__init__.py"] = _FOLDER
    files["README.md"] = _readme(arranged).encode()
    return files


def _readme(arranged: Sequence[Arranged]) -> str:
    parts = [_PREFACE]
    for folder, members in groupby(arranged, key=lambda one: Path(one.kernel.path).parent):
        lines = [
            f"## {folder.as_posix()}",
            "",
            "| kernel | variant | GPU | problem | B x H | ours | PyTorch | |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for one in members:
            name, variant = f"[{Path(one.kernel.path).stem}]({one.kernel.path})", f"`{one.kernel.variant_id}`"
            for record, role in [*((record, "") for record in one.records), *((record, ", fallback") for record in one.fallbacks)]:
                pytorch = "" if record.framework_us is None else f"{record.framework_us:.1f}"
                p, ours, unchecked = record.problem, f"{record.median_us:.1f}", ", unchecked" * (record.outcome.fate is Fate.UNCHECKED)
                cells = [
                    name,
                    variant,
                    record.key.gpu,
                    p.label(),
                    f"{p.batch} x {p.heads}",
                    ours,
                    pytorch,
                    record.outcome.source + unchecked + role,
                ]
                lines.append(f"| {' | '.join(cells)} |")
                name = variant = ""
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def index_text(arranged: Iterable[Arranged], files: Mapping[str, bytes], archives: Mapping[str, Packed]) -> str:
    """Index of these kernels, archives by architecture, and files, as JSON."""
    kernels = ",\n".join(f"  {json.dumps(_described(one, archives.get(one.kernel.arch)))}" for one in arranged)
    found = {arch: {"sha256": packed.facts.sha256, "groups": packed.facts.groups} for arch, packed in sorted(archives.items())}
    listed = json.dumps({name: digest(content) for name, content in sorted(files.items())}, indent=1)
    return f'{{"format": {FORMAT},\n "archives": {json.dumps(found)},\n "kernels": [\n{kernels}\n ],\n "files": {listed}}}\n'


def _described(one: Arranged, archive: Packed | None) -> dict[str, Any]:
    """Fields of a kernel in the index, with the places of its manifest and its dtype variant's where the archive has their machine code."""
    found: dict[str, Any] = {name: getattr(one.kernel, name) for name in ("variant_id", "template", "arch", "path")}
    manifests = {} if archive is None else archive.manifests
    if (piece := manifests.get(one.variant.id)) is not None:
        found["manifest"] = [piece.sha256, *piece.place]
    if one.sibling is not None and (piece := manifests.get(one.sibling.id)) is not None:
        found |= {"sibling": one.sibling.id, "sibling_manifest": [piece.sha256, *piece.place]}
    return found


def present(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Contents of those of these files that exist in the folder."""
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def differing(files: Mapping[str, bytes], folder: Path) -> list[str]:
    """Names of files that are missing or different in the folder, or that only its index names."""
    found = present(folder, files.keys() | _own_files(folder, files).files.keys())
    return sorted(name for name in files.keys() | found.keys() if files.get(name) != found.get(name))


def require_writable(folder: Path) -> None:
    """Raise what `write` would, before any work, where the folder can't be made or written, or has another program's index."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error
    _own_files(folder)


def refuse_foreign(files: Mapping[str, bytes], folder: Path) -> None:
    """Raise InputError where one of these files would replace one that the folder's index doesn't name."""
    index = _own_files(folder, files)
    foreign = [name for name, content in present(folder, files).items() if name not in index.files and content != files[name]]
    if foreign:
        raise InputError(f"{folder / foreign[0]} isn't in the index of {folder}, and would be replaced: remove it, or choose another --out")


def _own_files(folder: Path, names: Iterable[str] = ()) -> Index:
    """Index of the folder; raises EnvironmentProblem where the folder, one of these names or the index is a link, through which writes
    would leave the folder."""
    _refuse_links(folder, [INDEX])
    index = read_index(folder)
    _refuse_links(folder, {*index.files, *map(archive_name, index.archives), *names})
    return index


def _refuse_links(folder: Path, names: Iterable[str]) -> None:
    inside = {folder / part for name in names for part in (Path(name), *Path(name).parents)}
    if link := next((path for path in sorted(inside) if path.is_symlink()), None):
        raise EnvironmentProblem(f"{link} is a link, through which kernels would be written elsewhere: remove it, or choose another --out")


def write(files: Mapping[str, bytes], folder: Path) -> Changes:
    """Make the folder hold these files, one of which is the index, in place of those that its present index names.

    Files that the index doesn't name stay, and so do stale ones whose content was edited. Raises EnvironmentProblem where the folder can't
    be written, or where its index isn't one of ours.
    """
    before = _own_files(folder, files)
    stale = present(folder, before.files.keys() - files.keys())
    ours = [name for name, content in stale.items() if digest(content) == before.files[name]]
    found = present(folder, files)
    changed = [name for name, content in files.items() if content != found.get(name)]
    try:
        # The index is written last, so that it never names a missing file.
        for name in sorted(changed, key=lambda name: name == INDEX):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, files[name])
        for name in ours:
            (folder / name).unlink()
        for parent in sorted({parent for name in ours for parent in Path(name).parents[:-1]}, reverse=True):
            # A folder with other files in it stays.
            with suppress(OSError):
                (folder / parent).rmdir()
    except OSError as error:
        raise _unwritable(folder, error) from error
    return Changes(written=tuple(sorted(changed)), removed=tuple(sorted(ours)), left=tuple(sorted(stale.keys() - set(ours))))


def write_archives(places: Mapping[Path, bytes]) -> list[Path]:
    """Write these archives; returns the paths that are new or changed. Raises EnvironmentProblem where one can't be written, or where its
    path is a link."""
    for path in places:
        _refuse_links(path.parent, [path.name])
    changed = [path for path, content in places.items() if not path.is_file() or path.read_bytes() != content]
    for path in changed:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, places[path])
        except OSError as error:
            raise _unwritable(path.parent, error) from error
    return changed


def _unwritable(folder: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(f"can't write kernels to {folder} ({error.strerror}): choose another folder with --out")
