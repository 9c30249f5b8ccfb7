"""Disks that are full or may not be written, at every write of every command that makes files: one line, and nothing half-written."""

import errno
import json
import os
import resource
from pathlib import Path

import db_samples as samples
import pytest
from click.testing import CliRunner
from commands import flashtune
from test_cli_folders import kernel_files
from test_core_files import Failing
from test_db_disk import in_child
from test_tuner_generated import decodes, generated, snapshot

from flashtune.cli.main import main
from flashtune.core.code.index import INDEX, digest
from flashtune.core.records import calls
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.db.card import card_path, check_card
from flashtune.db.library import Library
from flashtune.tuner.publish.generated import write

LIMITS = (0, 1, 300, 600, 4096, 20_000, 50_000, 1 << 30)
"""Bytes that a file may have. A card takes some 400, a database some 30,000."""


@pytest.mark.parametrize("command", ["export", "merge", "forced"])
def test_an_export_is_whole_or_not_there_however_little_fits(command: str, tmp_path: Path, database: Path) -> None:
    out = tmp_path / "out" / "b.sqlite"
    out.parent.mkdir()
    words = ["merge", str(database), "--out", str(out)] if command == "merge" else ["export", str(out), "--db", str(database)]
    words += ["--licence", "MIT", "--json"]
    if command == "forced":
        assert CliRunner().invoke(main, words).exit_code == 0
        words.append("--force")
    before = snapshot(out.parent)
    codes = []
    for limit in LIMITS:

        def limited(pipe: object, limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            result = CliRunner().invoke(main, words)
            pipe.send((result.exit_code, result.stderr))  # type: ignore[attr-defined]

        code, said = in_child(limited)  # type: ignore[misc]
        codes.append(code)
        assert code == 0 or (code == 4 and said.count("\n") == 1 and "space" in said), said
        if code == 0:
            break
        assert snapshot(out.parent) == before
    assert codes[-1] == 0 and len(codes) > 3
    check_card(out)
    assert len(Library.of(out).records()) == 1 and sorted(snapshot(out.parent)) == ["b.sqlite", "b.sqlite.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=["full", "read-only", "broken"])
def test_a_folder_of_kernels_is_never_half_written_whichever_write_fails(code: int, tmp_path: Path) -> None:
    """The index, which goes last, names nothing that isn't there, and the next time all is well."""
    former, number, done = generated(decodes()[1:3]), 0, False
    while not done:
        number += 1
        folder = tmp_path / str(number)
        write(former, folder)
        with pytest.MonkeyPatch.context() as patch:
            failing, said = Failing(patch, number, code), None
            try:
                write(kernel_files(), folder)
            except EnvironmentProblem as error:
                said = str(error)
            done = failing.calls < number
        found = snapshot(folder)
        named = json.loads(found[INDEX])["files"]
        # That a folder can't be made again that is there is nobody's loss.
        assert said is None or (str(folder) in said and "\n" not in said)
        assert said is None or not done
        assert not [name for name in named if digest(found[name]) not in (named[name], digest(kernel_files().get(name, b"")))]
        assert not [name for name in found if name.endswith(".new")]
        write(kernel_files(), folder)
        assert {name: content for name, content in snapshot(folder).items() if name in kernel_files()} == kernel_files()
    assert number > 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=["full", "read-only", "forbidden"])
def test_calls_and_cards_that_cannot_be_written_leave_what_was_there(
    code: int, tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "calls.json", tmp_path / "out" / "b.sqlite"
    out.parent.mkdir()
    calls.add(path, [samples.PROBLEM])
    before = path.read_bytes()
    replace = os.replace

    def refused(source: Path, target: Path) -> None:
        if str(target).endswith(".json"):
            raise OSError(code, os.strerror(code))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(EnvironmentProblem, match=r"calls\.json can't be written"):
        calls.add(path, [samples.problem(4096)])
    assert path.read_bytes() == before
    result = flashtune("export", str(out), "--db", str(database), "--licence", "MIT")
    assert result.exit_code == 4 and result.stderr.count("\n") == 1 and "the metadata file" in result.stderr
    assert not card_path(out).exists() and len(Library.of(out).records()) == 1
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["calls.json", "in", "out"]
    assert [entry.name for entry in out.parent.iterdir()] == ["b.sqlite"]
