"""`flashtune generate`: the winners of a database as source files."""

from importlib import resources
from pathlib import Path

import click

from flashtune.cli.console import console, messages, print_json
from flashtune.cli.options import db_option, filters_of, json_option


@click.command()
@db_option
@click.option("--gpu-name", metavar="NAME", help="Only winners of this GPU.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder to write to (default: flashtune/kernels_generated).")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 where the folder differs from what would be written.")
@json_option
def generate(location: str | None, gpu_name: str | None, out: Path | None, check: bool, as_json: bool) -> None:
    """Render the winners of a database (default: the shipped one) to source files, one per distinct variant.

    Files of earlier winners are removed; others in the folder are left alone. Rendering twice gives the same bytes. Rows that this version
    can't serve are named and left out.
    """
    from flashtune.db.library import Library, shipped_path
    from flashtune.templates import unservable
    from flashtune.tuner.publish import GENERATED, generated_files, write_generated

    folder = out or Path(str(resources.files("flashtune.kernels_generated")))
    library = Library.of(location or shipped_path())
    records = library.records(passed_over=unservable, **filters_of(gpu_name=gpu_name))
    servable = []
    for record in records:
        if why := unservable(record):
            messages().print(f"left out: {record.key.gpu} {record.problem.label()}: {why}")
        else:
            servable.append(record)
    files = generated_files(servable)
    if check:
        present = {path.name: path.read_text() for path in folder.iterdir() if GENERATED.fullmatch(path.name)} if folder.is_dir() else {}
        differing = sorted(name for name in files.keys() | present.keys() if files.get(name) != present.get(name))
        if as_json:
            print_json({"folder": str(folder), "files": sorted(files), "differing": differing})
        else:
            console().print(f"{len(files)} kernels, {len(differing)} differ from {folder}" + "".join(f"\n  {name}" for name in differing))
        if differing:
            raise SystemExit(1)
        return
    written, removed = write_generated(files, folder)
    if as_json:
        print_json({"folder": str(folder), "files": sorted(files), "written": written, "removed": removed})
    else:
        console().print(f"{len(files)} kernels in {folder}: {len(written)} written, {len(removed)} removed")
