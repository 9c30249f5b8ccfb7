"""The folder of generated kernels: what lies where, its index, and how it is written without touching anything else."""

import json
import re
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any

from flashtune.core.binaries import CODE, Manifest, Sibling, difference, parse_manifest, read_manifest, source_digest
from flashtune.core.config import KernelSpec, Value, Variant
from flashtune.core.dtypes import OTHER_16_BITS
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.files import write_whole
from flashtune.core.kernel_index import FORMAT, INDEX, GeneratedKernel, Index, digest, read_index
from flashtune.core.results import Fate, TuningRecord
from flashtune.core.target import Target, find_target
from flashtune.templates import family, unservable
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.publish.machine_code import Built, Order, can_have_binaries, with_files
from flashtune.tuner.publish.sources import variant_for

_PASSES = {"fwd": "forward", "bwd": "backward"}
_FOLDER = b'"""Generated kernels; the topmost README.md lists them."""\n'
"""What makes a folder a package."""

_TILE = ("BLOCK_M", "BLOCK_N")

_PREFACE = """# Generated kernels

`flashtune generate` writes this folder from a tuned database; nothing in it is edited by hand. A path says the GPU architecture, the
pass, what is compiled in (head size, element type, features) and the tile, with whatever else tells apart kernels of the same tile.
Machine code of all lies in `code`, by its hash; the manifest beside a module, a `.json`, names what the module launches.
`index.json` says the same for programs, with the full keys of the rows.

Times are medians in microseconds, of the kernel and of the framework's own attention in the same run. A row's label starts with N
(queries x keys where they differ); `gqa4` means four query heads to a key head. A twin serves in place of its row's winner, a kernel that
settles row maxima, while scores mislead that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """A kernel with its place in the folder, the rows that it serves, and those in which it is the winner's twin (as its own records).

    `sibling` is the same kernel for the other 16-bit type, where none of these is that.
    """

    kernel: GeneratedKernel
    variant: Variant
    target: Target
    records: tuple[TuningRecord, ...]
    twins: tuple[TuningRecord, ...] = ()
    sibling: Variant | None = None

    @property
    def text(self) -> str:
        """The module's source."""
        return render(family(self.variant.template), self.variant)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What machine code is wanted of: the kernel's own variant, and its sibling."""
        return (self.variant,) if self.sibling is None else (self.variant, self.sibling)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What writing a folder did: files that are new or other, files that were removed, and stale ones that someone else has changed."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    left: tuple[str, ...]


def arrange(records: Sequence[TuningRecord]) -> list[Arranged]:
    """The distinct winners of these records and their twins, each for the architectures of its rows, in the order of their paths."""
    rows: dict[tuple[str, Variant], list[TuningRecord]] = defaultdict(list)
    twins: dict[tuple[str, Variant], list[TuningRecord]] = defaultdict(list)
    for record in records:
        rows[find_target(record.key.gpu).arch, variant_for(record)].append(record)
        if (twin := record.as_twin()) is not None and not unservable(twin):
            twins[find_target(twin.key.gpu).arch, variant_for(twin)].append(twin)
    groups: dict[str, list[tuple[str, Variant]]] = defaultdict(list)
    for arch, variant in dict.fromkeys([*rows, *twins]):
        groups[f"{_folder(arch, variant)}/{_tile(variant)}"].append((arch, variant))
    own = {variant.id for _, variant in (*rows, *twins)}
    arranged = []
    for start, members in groups.items():
        told = _telling_axes([variant for _, variant in members])
        for arch, variant in members:
            path = "_".join([start, *(_word(axis, variant.config[axis]) for axis in told if axis in variant.config)]) + ".py"
            kernel = GeneratedKernel(variant_id=variant.id, template=variant.template, arch=arch, path=path)
            served, beside = (tuple(sorted(found[arch, variant], key=_row_order)) for found in (rows, twins))
            target = find_target((*served, *beside)[0].key.gpu)
            sibling = _sibling(variant)
            beside_it = None if sibling is None or sibling.id in own else sibling
            arranged.append(Arranged(kernel=kernel, variant=variant, target=target, records=served, twins=beside, sibling=beside_it))
    return sorted(arranged, key=lambda one: one.kernel.path)


def _sibling(variant: Variant) -> Variant | None:
    """The same kernel for the other 16-bit type."""
    other = OTHER_16_BITS.get(variant.spec.dtype)
    return None if other is None else variant_of(family(variant.template), replace(variant.spec, dtype=other), variant.config)


def _row_order(record: TuningRecord) -> tuple[Any, ...]:
    p = record.problem
    return record.key.gpu, p.n_kv, p.n_q, p.batch * p.heads, p.label(), p.batch, record.median_us


def _folder(arch: str, variant: Variant) -> str:
    kind = "decode" if variant.template.endswith("_decode") else _PASSES[variant.spec.direction]
    return f"{f'sm{arch}' if arch.isdigit() else arch}/{kind}/{_spec_name(variant.spec)}"


def _spec_name(spec: KernelSpec) -> str:
    """`d128_bf16_causal`."""
    _, dtype, d, *flags = spec.label().split("-")
    return "_".join([d, dtype, *flags])


def _tile(variant: Variant) -> str:
    """`hopper_128x64`: the family without what the folder says, and the tile."""
    name = variant.template.removeprefix("flash_").removeprefix("fwd_").removeprefix("bwd_")
    sizes = [str(variant.config[axis]) for axis in _TILE if axis in variant.config]
    return "_".join([name, "x".join(sizes)]) if sizes else name


def _telling_axes(variants: Sequence[Variant]) -> list[str]:
    """The axes in which these differ, in the order of the config that names most of them."""
    longest_first = sorted(variants, key=lambda variant: (-len(list(variant.config)), variant.config.label()))
    said = dict.fromkeys(axis for variant in longest_first for axis in variant.config)
    return [axis for axis in said if len({repr(variant.config.as_dict().get(axis)) for variant in variants}) > 1]


def _word(axis: str, value: Value) -> str:
    if isinstance(value, bool):
        return axis if value else f"no_{axis}"
    return f"{axis}{value}" if isinstance(value, int) else re.sub(r"\W", "_", f"{axis}_{value}")


def orders_of(one: Arranged) -> list[Order]:
    """What to compile for a kernel, its sibling last; nothing where its GPU's machine code can't be made here."""
    if not can_have_binaries(one.target):
        return []
    stem = one.kernel.path.removesuffix(".py")
    return [
        Order(
            text=render(family(variant.template), variant),
            stem=stem if variant is one.variant else f"{stem}_in_{variant.spec.dtype}",
            variant_id=variant.id,
            spec=variant.spec,
            target=one.target,
        )
        for variant in one.variants
    ]


def machine_files(one: Arranged, built: Built, sibling: Built | None = None) -> dict[str, bytes]:
    """Path to content of a kernel's manifest, beside its module, and of its machine code, in a folder for all kernels of the architecture
    and by its hash, so that equal code is there once; with what makes its sibling's of it."""
    manifest, codes = with_files(built, PurePosixPath(one.kernel.path).stem)
    names = {binary.file: f"{binary.kernel}.{binary.sha256[:16]}.cubin.gz" for binary in manifest.binaries}
    manifest = replace(manifest, binaries=tuple(replace(binary, file=f"../../{CODE}/{names[binary.file]}") for binary in manifest.binaries))
    if sibling is not None:
        manifest = replace(manifest, sibling=_beside(built, sibling))
    folder = PurePosixPath(one.kernel.path).parents[2] / CODE
    return {
        one.kernel.manifest: manifest.as_json().encode(),
        f"{folder}/__init__.py": _FOLDER,
        **{f"{folder}/{names[file]}": code for file, code in codes.items()},
    }


def _beside(built: Built, sibling: Built) -> Sibling | None:
    """The sibling by its differences; None where more of its binaries differs than types and code, or where one difference would have to
    make equal code of two."""
    if len(built.codes) != len(sibling.codes):
        return None
    hashes = (binary.sha256 for binary in sibling.manifest.binaries)
    codes = tuple(zip(hashes, map(difference, built.codes, sibling.codes), strict=True))
    if len(set(codes)) != len(dict(codes)):
        return None
    found = Sibling(variant_id=sibling.manifest.variant_id, source_sha256=sibling.manifest.source_sha256, codes=codes)
    follows = replace(built.manifest, sibling=found).of_sibling()
    return found if follows is not None and follows.binaries == sibling.manifest.binaries else None


def kept(order: Order, manifest: Path, triton: str) -> Built | None:
    """What this Triton compiled from the very text, as the files of a manifest have it, if their hashes hold; else None."""
    try:
        own = read_manifest(manifest)
        found = next((one for one in (own, own.of_sibling()) if one is not None and one.variant_id == order.variant_id), None)
        if found is None or {found.source_sha256, *(binary.triton for binary in found.binaries)} != {source_digest(order.text), triton}:
            return None
        codes = tuple(map(found.code, found.binaries))
    except EnvironmentProblem:
        return None
    binaries = tuple(replace(binary, file="") for binary in found.binaries)
    return Built(manifest=Manifest(variant_id=found.variant_id, binaries=binaries, source_sha256=found.source_sha256), codes=codes)


def text_files(arranged: Sequence[Arranged]) -> dict[str, bytes]:
    """Path to content of the modules, of what makes their folders packages, and of the list for people."""
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
            "| kernel | variant | GPU | row | B x H | ours | framework | |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for one in members:
            name, variant = f"[{Path(one.kernel.path).stem}]({one.kernel.path})", f"`{one.kernel.variant_id}`"
            for record, twin in [*((record, "") for record in one.records), *((record, ", twin") for record in one.twins)]:
                framework = "" if record.framework_us is None else f"{record.framework_us:.1f}"
                p, ours = record.problem, f"{record.median_us:.1f}"
                cells = [name, variant, record.key.gpu, p.label(), f"{p.batch} x {p.heads}", ours, framework, _standing(record) + twin]
                lines.append(f"| {' | '.join(cells)} |")
                name = variant = ""
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _standing(record: TuningRecord) -> str:
    """Where a row's time comes from, and whether its numbers were checked."""
    return record.outcome.source + (", unchecked" if record.outcome.fate is Fate.UNCHECKED else "")


def index_text(arranged: Iterable[Arranged], files: Mapping[str, bytes]) -> str:
    """The index of these kernels and files."""
    fields = {
        "format": FORMAT,
        "kernels": [
            {**_told(one, files), "rows": [_row(record) for record in one.records], "twins": [_row(record) for record in one.twins]}
            for one in arranged
        ],
        "files": {name: digest(name, content) for name, content in sorted(files.items())},
    }
    return json.dumps(fields, indent=1) + "\n"


def _told(one: Arranged, files: Mapping[str, bytes]) -> dict[str, Any]:
    """The kernel's own fields, with its sibling where these files have machine code of it."""
    manifest = files.get(one.kernel.manifest)
    found = None if manifest is None else parse_manifest(manifest, Path(one.kernel.manifest)).sibling
    fields = one.kernel._asdict()
    return {name: fields[name] for name in fields if name != "sibling"} | ({} if found is None else {"sibling": found.variant_id})


def _row(record: TuningRecord) -> dict[str, Any]:
    key = asdict(record.key)
    return {**key, "features": json.loads(key["features"]), "median_us": record.median_us, "framework_us": record.framework_us} | {
        "standing": _standing(record)
    }


def present(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Content of those of these files that exist in the folder."""
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def same_digest(name: str, content: bytes, expected: str) -> bool:
    """Whether a file's content has this digest; damaged ones have none."""
    try:
        return digest(name, content) == expected
    except zlib.error:
        return False


def same(name: str, wanted: bytes | None, found: bytes | None) -> bool:
    """Whether a file's content is what is wanted (None for no file); compressed ones by what they hold."""
    if wanted is None or found is None:
        return wanted is found
    return wanted == found or (name.endswith(".gz") and same_digest(name, found, digest(name, wanted)))


def differing(files: Mapping[str, bytes], folder: Path) -> list[str]:
    """Names of files that aren't in the folder as given, or that its index names beside these."""
    found = present(folder, files.keys() | _own_files(folder, files).files.keys())
    return sorted(name for name in files.keys() | found.keys() if not same(name, files.get(name), found.get(name)))


def require_writable(folder: Path) -> None:
    """Raise what `write` would, before work is done for it, where the folder can't be made or written, or has another's index."""
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error
    _own_files(folder)


def _own_files(folder: Path, names: Iterable[str] = ()) -> Index:
    """The folder's index; raises EnvironmentProblem where a link stands at the folder, or at one of these names or the index's in it: what
    is written and removed there would be elsewhere."""
    _refuse_links(folder, [INDEX])
    index = read_index(folder)
    _refuse_links(folder, {*index.files, *(kernel.manifest for kernel in index.kernels), *names})
    return index


def _refuse_links(folder: Path, names: Iterable[str]) -> None:
    inside = {folder / part for name in names for part in (Path(name), *Path(name).parents)}
    if link := next((path for path in sorted(inside) if path.is_symlink()), None):
        raise EnvironmentProblem(f"{link} is a link, and kernels are written to no other place: remove it, or choose another --out")


def write(files: Mapping[str, bytes], folder: Path) -> Changes:
    """Make the folder hold these files, one of which is the index, in place of those that its present index names.

    Nothing else is touched: a file that the index doesn't name stays, and so does a stale one whose content isn't what was written. Raises
    EnvironmentProblem where the folder can't be written, or where its index isn't one of ours.
    """
    before = _own_files(folder, files)
    stale = present(folder, before.files.keys() - files.keys())
    ours = [name for name, content in stale.items() if same_digest(name, content, before.files[name])]
    found = present(folder, files)
    changed = [name for name, content in files.items() if not same(name, content, found.get(name))]
    try:
        # The index goes last, so that it names nothing that isn't there.
        for name in sorted(changed, key=lambda name: name == INDEX):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, files[name])
        for name in ours:
            (folder / name).unlink()
        for parent in sorted({parent for name in ours for parent in Path(name).parents[:-1]}, reverse=True):
            # Not where anything else lies in it.
            with suppress(OSError):
                (folder / parent).rmdir()
    except OSError as error:
        raise _unwritable(folder, error) from error
    return Changes(written=tuple(sorted(changed)), removed=tuple(sorted(ours)), left=tuple(sorted(stale.keys() - set(ours))))


def _unwritable(folder: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(f"can't write kernels to {folder} ({error.strerror}): choose another folder with --out")
