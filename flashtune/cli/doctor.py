"""`flashtune doctor`: checks of this machine, each with its remedy where it fails."""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

import flashtune
from flashtune.cli.console import console, print_json
from flashtune.cli.options import json_option
from flashtune.core.gpu.target import targets
from flashtune.core.system.errors import FlashtuneError
from flashtune.core.system.folders import cache_dir, refused, wanted_cache_dir
from flashtune.core.system.secrets import mask_secrets, mask_url
from flashtune.core.system.versions import LOWEST, not_run, too_old
from flashtune.core.system.words import counted

if TYPE_CHECKING:
    from flashtune.core.records.results import TuningRecord


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Check GPU, packages, compilers, caches and databases of this machine. Exit code 4 when something needed is missing."""
    checks = [
        *_made("packages", lambda: [_versions()]),
        *_made("calls", lambda: [_calls()]),
        *_made("GPU", lambda: [_gpu()]),
        *_made("C compiler", lambda: [_compiler()]),
        *_made("ptxas", lambda: [_ptxas()]),
        *_made("cache", lambda: [_cache()]),
        *_made("machine code", lambda: _machine_code()),
        *_made("databases", lambda: _databases()),
        *_made("records", lambda: _records()),
    ]
    healthy = all(check["ok"] for check in checks)
    if as_json:
        print_json({"ok": healthy, "checks": checks, "gpus": {slug: target.name for slug, target in targets().items()}})
    else:
        table = Table(show_header=False, box=None)
        for check in checks:
            table.add_row(Text("ok", "green") if check["ok"] else Text("wrong", "red"), check["name"], check["found"], check["remedy"])
        console().print(table)
        console().print("GPUs that --gpu-name takes: " + ", ".join(targets()))
    if not healthy:
        raise SystemExit(4)


def _made(name: str, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of some checks; an exception within a check becomes a failed check."""
    try:
        return make()
    except Exception as error:
        said = mask_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
        return [_check(name, False, said, "this check itself failed: fix the cause it names, or report it")]


def _check(name: str, ok: bool, found: str, remedy: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "found": found, "remedy": "" if ok else remedy}


def _versions() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "triton", "optuna", "sqlalchemy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            return _check("packages", False, f"no {package}", f"install it: pip install {package}")
    if (old := too_old(found.__getitem__)) is not None:
        name, here = old
        return _check("packages", False, f"{name} {here}, older than {LOWEST[name]}", f"update it: pip install '{name}>={LOWEST[name]}'")
    said = ", ".join([f"flashtune {flashtune.__version__}", *(f"{name} {v}" for name, v in found.items())])
    if (other := not_run(found.__getitem__)) is not None:
        said += f"; flashtune wasn't run with {other} (docs/support.md)"
    return _check("packages", True, said)


def _calls() -> dict[str, Any]:
    """A call of `dispatch.attention`, whose import needs the most of PyTorch."""
    remedy = "install versions that flashtune was run with (docs/support.md), or report this"
    try:
        import torch

        from flashtune import dispatch

        x = torch.zeros(1, 1, 4, 16)
        dispatch.attention(x, x, x, is_causal=True)
    except Exception as error:
        said = mask_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
        return _check("calls", False, f"dispatch.attention fails: {said}", remedy)
    return _check("calls", True, "dispatch.attention imports and runs")


def _gpu() -> dict[str, Any]:
    from flashtune.tuner.machine import local_gpus

    gpus = local_gpus()
    if not gpus:
        return _check("GPU", True, "none: search predicts, dispatch uses PyTorch")
    unknown = [gpu.name for gpu in gpus if gpu.target is None]
    if unknown:
        return _check("GPU", False, unknown[0], "flashtune doesn't know this GPU yet: add it as CONTRIBUTING.md says")
    return _check("GPU", True, ", ".join(dict.fromkeys(f"{gpu.name} ({gpu.target.slug})" for gpu in gpus if gpu.target is not None)))


def _compiler() -> dict[str, Any]:
    # Triton builds its launchers with a C compiler the first time a kernel runs on a GPU.
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    needed = not _gpu()["found"].startswith("none")
    return _check("C compiler", bool(found) or not needed, found or "none", "install gcc or clang, or name one in CC: Triton needs it")


def _ptxas() -> dict[str, Any]:
    try:
        from triton import knobs

        path = knobs.nvidia.ptxas.path
        return _check("ptxas", Path(path).exists(), path, "reinstall triton, whose wheel carries ptxas, or set TRITON_PTXAS_PATH")
    except (ImportError, RuntimeError) as error:
        return _check("ptxas", False, str(error).splitlines()[0], "reinstall triton, whose wheel carries ptxas, or set TRITON_PTXAS_PATH")


def _cache() -> dict[str, Any]:
    path, why = cache_dir(), refused(wanted_cache_dir())
    free = shutil.disk_usage(path).free
    found = f"{path} ({free >> 20} MiB free)" + (f": a temporary folder for each command, because {why}" if why else "")
    return _check("cache", free > 100 << 20, found, "free some space, or point FLASHTUNE_CACHE elsewhere")


def _machine_code() -> list[dict[str, Any]]:
    from flashtune.core.code.shipped import PACKAGE, distribution, shipped_archive, shipped_index

    found = []
    for arch in shipped_index(PACKAGE).archives:
        try:
            archive = shipped_archive(PACKAGE, arch)
        except FlashtuneError as error:
            found.append(_check("machine code", False, distribution(arch), str(error)))
            continue
        folder = Path(flashtune.__file__).parents[1] / "kernels" / f"sm{arch}"
        source = folder if folder.is_dir() else f"/path/to/flashtune/kernels/sm{arch}"
        without = f"{distribution(arch)} isn't installed, so Triton compiles kernels at first calls: pip install {source}"
        found.append(_check("machine code", True, without if archive is None else str(archive.path)))
    return found


def _databases() -> list[dict[str, Any]]:
    from flashtune.db.library import Library, asked_path, overlay_path, shipped_path
    from flashtune.db.sqlite_file import unwritable

    found = []
    asked, own = asked_path(), overlay_path()
    known: list[tuple[str, str | Path]] = [("shipped database", shipped_path()), ("overlay database", own)]
    for name, path in [*known, *([] if asked is None else [("FLASHTUNE_DB", asked)])]:
        if path == own and "://" not in own and (why := unwritable(Path(own))) is not None:
            found.append(_check(name, False, why, "free some space, or name a file that searches can write in FLASHTUNE_OWN_DB"))
            continue
        if "://" not in str(path) and not Path(path).exists() and path != asked:
            found.append(_check(name, True, f"{path} (none yet)"))
            continue
        try:
            found.append(_check(name, True, f"{mask_url(str(path))} ({counted(len(Library.of(path).records()), 'record')})"))
        except FlashtuneError as error:
            found.append(_check(name, False, mask_url(str(path)), str(error)))
    return found


def _providers(gpu: str, records: Sequence["TuningRecord"]) -> str:
    """Providers of these records that are wrong here, and those whose verdicts are of other versions, in words for the check of records."""
    from flashtune.core.pytorch import devices
    from flashtune.core.records.versions import holding
    from flashtune.db.library import Library
    from flashtune.tuner.search.requalify import suspects

    said = ""
    wrong = {
        one.provider: one
        for (slug, _), findings in Library.default().wrong.items()
        for one in findings
        if slug == gpu and holding((one,), one.origin, devices.versions_of(one.provider), None)
    }
    for name, one in wrong.items():
        said += f"; {name} is wrong here and doesn't run such calls ({one.reason})"
    doubted = [why for record in records for why in suspects(record)]
    if doubted:
        causes = ", ".join(f"{why} ({counted(number, 'record')})" for why, number in Counter(doubted).items())
        said += f"; {causes}: doubtful results, which are used until `flashtune verify --requalify` has checked them again"
    return said


def _records() -> list[dict[str, Any]]:
    """Measured records that are used on this machine's GPUs and were made with other versions or cards, by what differs."""
    from flashtune.db.library import Library
    from flashtune.db.preference import claimed
    from flashtune.tuner.machine import local_gpus, provenance

    # Targets can't be hashed.
    targets_here = {gpu.target.slug: gpu.target for gpu in local_gpus() if gpu.target is not None}
    if not targets_here:
        return []
    from flashtune.tuner.search.requalify import SURROUNDINGS, elsewhere

    found: list[dict[str, Any]] = []
    for target in targets_here.values():
        here = provenance(command="", seed=None, measured=True, target=target)
        try:
            records = [record for record in Library.default().records(gpu=target.slug) if record.outcome.source == "measured"]
        except FlashtuneError:
            # The check of databases says so.
            return found
        apart = [elsewhere(record, here) for record in records]
        said = f"{counted(len(records), 'measured record')} of {target.slug}"
        waiting = sum(map(claimed, records))
        if failed := sum(bool(record.refuted) for record in records) - waiting:
            said += f"; the kernels of {failed} fail here and aren't used (flashtune show)"
        if waiting:
            said += f"; {counted(waiting, 'candidate')} of strangers wait until `flashtune verify --requalify` accepts them"
        if away := sum(map(bool, apart)):
            counts = {part: sum(part in one for one in apart) for part in SURROUNDINGS}
            causes = [f"{part} ({count}; here {getattr(here, SURROUNDINGS[part])})" for part, count in counts.items() if count]
            said += f"; {away} made with another {', '.join(causes)}: they are used, and `flashtune verify --requalify` times them again"
        said += _providers(target.slug, records)
        found.append(_check("records", True, said))
    return found
