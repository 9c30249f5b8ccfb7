"""The documents agree with the repository: links lead somewhere, commands exist, versions are the same."""

import re
import tomllib
from pathlib import Path

import pytest

import flashtune

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def targets_of_the_makefile() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_local_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)\s#]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_make_command_exists(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    assert named <= targets_of_the_makefile()


def test_the_readme_opens_with_the_two_commands() -> None:
    screen = (ROOT / "README.md").read_text().splitlines()[:30]
    assert [line.split("#")[0].strip() for line in screen if line.startswith("make ")] == ["make search", "make test"]


def test_ci_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().rstrip().splitlines()[-1] == "make test"


def test_every_decision_has_its_own_number_in_name_and_title() -> None:
    assert len({page.name[:4] for page in DECISIONS}) == len(DECISIONS)
    for page in DECISIONS:
        assert re.match(r"\d{4}-[a-z0-9-]+\.md$", page.name)
        assert page.read_text().startswith(f"# {page.name[:4]}: ")


def test_the_changelogs_newest_entry_is_this_version() -> None:
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == flashtune.__version__


def test_every_dependency_has_its_reason_written_down() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    names = {re.split(r"[^A-Za-z0-9-]", line)[0] for line in everything} - {"flashtune"}
    reasons = "\n".join(
        line.split("|")[1] for line in (ROOT / "docs/decisions/0002-dependencies.md").read_text().splitlines() if "|" in line
    )
    assert not {name for name in names if not re.search(rf"\b{re.escape(name)}\b", reasons)}


def test_the_architecture_page_names_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.name for path in (ROOT / "flashtune").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert not {room for room in rooms if f"`flashtune/{room}/`" not in text}
