"""`flashtune generate`: the winners of a database as source files and machine code."""

import random
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flashtune.cli.console import console, messages, print_json
from flashtune.cli.options import db_option_beside, json_option, record_filters
from flashtune.cli.records import servable
from flashtune.core.system.errors import InputError, NoKernelFound
from flashtune.core.system.words import counted

if TYPE_CHECKING:
    from flashtune.db.store import KeyFilter
    from flashtune.tuner.publish.generated import Arranged
    from flashtune.tuner.publish.packing import Packed


@click.command()
@db_option_beside("the shipped one")
@record_filters("gpu_name")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to write to (in a checkout: flashtune/kernels_generated)."
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 where the folder differs from the generated files.")
@click.option("--sample", type=click.IntRange(min=0), metavar="N", help="Recompile only N kernels, sampled by the index.")
@click.option("--rebuild", is_flag=True, help="Recompile even where the folder has machine code of the same source and Triton.")
@click.option("--jobs", type=click.IntRange(min=1), help="Number of parallel compilers (default: one per core).")
@json_option
def generate(
    *,
    location: str | None,
    filters: "KeyFilter",
    out: Path | None,
    check: bool,
    sample: int | None,
    rebuild: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Write the winners of a database (default: the shipped one) as source and as machine code, one module per distinct variant.

    Machine code goes into one archive per architecture. An index lists the written files; files of the last index that are no longer
    needed are removed, and no others are touched. In a checkout the package gets a selection of modules, and `kernels/` the archive.
    The same database always gives the same source and machine code. Records that this version can't use are named and left out; where
    none is left, nothing is touched.

    Machine code is compiled where the folder has none of the same source and Triton; --check recompiles all of it, or a --sample.
    """
    from flashtune.core.code.index import INDEX, read_index
    from flashtune.core.code.shipped import archive_name, checkout_folder
    from flashtune.tuner.machine import cores
    from flashtune.tuner.publish.generated import index_text, refuse_foreign, require_writable, selected, text_files

    package = shipped_folder()
    if out is None and not check and not in_a_checkout(package):
        raise InputError(f"{package} belongs to an installed flashtune: name a folder of your own with --out")
    if sample is not None and not check:
        raise InputError("--sample is the number of kernels that a check recompiles: add --check, or leave --sample out")
    folder = out or package
    if not check:
        require_writable(folder)
    # Errors of the folder are reported before kernels are compiled.
    read_index(folder)
    arranged = _arranged(location, filters)
    kernels = [one.kernel.path for one in arranged]
    anew = set(kernels) if rebuild or check else set()
    if sample is not None:
        anew = set(random.Random(repr(kernels)).sample(kernels, min(sample, len(kernels))))
    files = text_files(selected(arranged) if folder == package else arranged)
    if not check:
        refuse_foreign(files, folder)
    archives = _archives(arranged, anew, folder, jobs or cores())
    files[INDEX] = index_text(arranged, files, archives).encode()
    in_checkout = folder == package and in_a_checkout(package)
    places = {
        (checkout_folder(folder, arch) if in_checkout else folder) / archive_name(arch): packed.content for arch, packed in archives.items()
    }
    found, words, details = (_compared if check else _written)(files, places, folder)
    if as_json:
        print_json({"folder": str(folder), "files": kernels, **found})
    else:
        console().print("\n  ".join([f"{counted(len(kernels), 'kernel')}{words}", *details]))
    if check and details:
        raise SystemExit(1)


Report = tuple[dict[str, list[str]], str, list[str]]
"""Written, unchanged and removed files for JSON, then a sentence and details for people."""


def _compared(files: dict[str, bytes], places: dict[Path, bytes], folder: Path) -> Report:
    """Report of files and archives that differ from those in `folder`."""
    from flashtune.tuner.publish.generated import differing

    other = differing(files, folder)
    other += [str(path) for path, content in places.items() if not path.is_file() or path.read_bytes() != content]
    return {"differing": other}, f", {counted(len(other), 'file')} unlike those in {folder}", other


def _written(files: dict[str, bytes], places: dict[Path, bytes], folder: Path) -> Report:
    """Write files and archives, and report them."""
    from flashtune.tuner.publish.generated import write, write_archives

    new = write_archives(places)
    changes = write(files, folder)
    for name in changes.left:
        messages().print(f"left alone: {name} is no longer needed, but someone has changed it")
    written, removed = [*map(str, new), *changes.written], list(changes.removed)
    words = f" in {folder}: {counted(len(written), 'file')} written, {len(removed)} removed"
    return {"written": written, "removed": removed}, words, []


def _arranged(location: str | None, filters: "KeyFilter") -> "list[Arranged]":
    """Winners of a database and where they go; raises NoKernelFound where there are none that could be used."""
    from flashtune.core.records.results import PROVIDERS
    from flashtune.db.library import Library, shipped_path
    from flashtune.templates import BITS, without_kernel
    from flashtune.tuner.publish.generated import arrange

    database = location or shipped_path()
    records = Library.of(database).records(passed_over=without_kernel, bits=BITS, **filters)
    found = arrange(servable([one for one in records if one.outcome.template not in PROVIDERS]))
    if not found:
        wanted = "no record" + (f" of gpu {filters.get('gpu')}" if filters.get("gpu") else "")
        raise NoKernelFound(f"{database} holds {wanted} with a kernel to generate: search first, or name another database")
    return found


def _archives(arranged: Sequence["Arranged"], anew: set[str], folder: Path, jobs: int) -> dict[str, "Packed"]:
    """The archive of each architecture: entries of the folder's archive, and recompiled ones for paths in `anew` or without an entry."""
    from flashtune.core.code.index import read_index
    from flashtune.tuner.publish.generated import archive_of, kept, orders_of, present_archive
    from flashtune.tuner.publish.machine_code import Built, build_all, triton_version

    index = read_index(folder)
    before = {arch: present_archive(folder, index, arch) for arch in {one.kernel.arch for one in arranged}}
    found: dict[tuple[str, str], Built] = {}
    waiting = []
    for one in arranged:
        for order in orders_of(one):
            kept_one = None if one.kernel.path in anew else kept(order, index, before[one.kernel.arch], triton_version())
            if kept_one is None:
                waiting.append(order)
            else:
                found[order.variant_id, order.target.arch] = kept_one
    for number, (order, built) in enumerate(build_all(waiting, jobs=jobs), start=1):
        if isinstance(built, str):
            messages().print(f"no machine code: {order.stem}: {built}")
        else:
            messages().print(f"compiled {number} of {len(waiting)}: {order.stem}")
            found[order.variant_id, order.target.arch] = built
    packed = {arch: archive_of(arranged, arch, found, archive) for arch, archive in sorted(before.items())}
    return {arch: one for arch, one in packed.items() if one is not None}


def shipped_folder() -> Path:
    """Folder of the package's own kernels."""
    return Path(str(resources.files("flashtune.kernels_generated")))


def in_a_checkout(package: Path) -> bool:
    """True if this folder of kernels lies in flashtune's source tree, where git keeps overwritten files."""
    project = package.parent.parent / "pyproject.toml"
    return project.is_file() and re.search(r'^name = "flashtune"$', project.read_text(), re.MULTILINE) is not None
