"""`flashtune generate`: the winners of a database as source files."""

import re
from importlib import resources
from pathlib import Path

import click

from flashtune.cli.console import console, messages, print_json
from flashtune.cli.options import db_option, filters_of, json_option
from flashtune.core.errors import InputError


@click.command()
@db_option
@click.option("--gpu-name", metavar="NAME", help="Only winners of this GPU.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to write to (in a checkout: flashtune/kernels_generated)."
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 where the folder differs from what would be written.")
@json_option
def generate(location: str | None, gpu_name: str | None, out: Path | None, check: bool, as_json: bool) -> None:
    """Render the winners of a database (default: the shipped one) to source files, one per distinct variant.

    An index names what was written; of that, what no longer belongs is removed, and nothing else is touched. Rendering twice gives the same
    bytes. Rows that this version can't serve are named and left out.
    """
    from flashtune.core.shipped import INDEX
    from flashtune.db.library import Library, shipped_path
    from flashtune.templates import unservable
    from flashtune.tuner.generated import arrange, differing, index_text, text_files, write

    package = shipped_folder()
    if out is None and not check and not in_a_checkout(package):
        raise InputError(f"{package} belongs to an installed flashtune: name a folder of your own with --out")
    folder = out or package
    library = Library.of(location or shipped_path())
    records = library.records(passed_over=unservable, **filters_of(gpu_name=gpu_name))
    servable = []
    for record in records:
        if why := unservable(record):
            messages().print(f"left out: {record.key.gpu} {record.problem.label()}: {why}")
        else:
            servable.append(record)
    arranged = arrange(servable)
    files = text_files(arranged)
    files[INDEX] = index_text(arranged, files).encode()
    kernels = [one.kernel.path for one in arranged]
    if check:
        other = differing(files, folder)
        if as_json:
            print_json({"folder": str(folder), "files": kernels, "differing": other})
        else:
            console().print(f"{len(kernels)} kernels, {len(other)} files differ from {folder}" + "".join(f"\n  {name}" for name in other))
        if other:
            raise SystemExit(1)
        return
    changes = write(files, folder)
    for name in changes.left:
        messages().print(f"left alone: {name} is no longer needed, but someone has changed it")
    if as_json:
        print_json({"folder": str(folder), "files": kernels, "written": list(changes.written), "removed": list(changes.removed)})
    else:
        console().print(f"{len(kernels)} kernels in {folder}: {len(changes.written)} files written, {len(changes.removed)} removed")


def shipped_folder() -> Path:
    """Where the package's own kernels are."""
    return Path(str(resources.files("flashtune.kernels_generated")))


def in_a_checkout(package: Path) -> bool:
    """Whether this folder of kernels is that of flashtune's source tree, where git keeps what is overwritten."""
    project = package.parent.parent / "pyproject.toml"
    return project.is_file() and re.search(r'^name = "flashtune"$', project.read_text(), re.MULTILINE) is not None
