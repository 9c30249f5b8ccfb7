"""The site: its menu names every page, and what the hook makes of the repository is whole."""

import re
from pathlib import Path

import click
import pytest

from flashtune.cli.main import COMMANDS, main
from tools import pictures, site_pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MENU = (ROOT / "mkdocs.yml").read_text()


def test_the_menu_names_every_page_once() -> None:
    named = re.findall(r": ([\w/-]+\.md)$", MENU, re.MULTILINE)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(site_pages.INCLUDED.values())
    assert sorted(named) == sorted(pages)
    assert re.findall(r"^  - ([A-Z]\w+):$", MENU, re.MULTILINE) == ["Start", "Guides", "Reference", "Figures", "Design"]


def test_the_menu_has_the_pages_own_titles() -> None:
    for title, place in re.findall(r'^ +- "?(.+?)"?: ([\w/-]+\.md)$', MENU, re.MULTILINE):
        source = next((ROOT / path for path, included in site_pages.INCLUDED.items() if included == place), DOCS / place)
        heading = re.search(r"^# (.+)$", source.read_text(), re.MULTILINE)
        assert heading and (title == heading[1] or title == "Home"), place


def test_the_page_of_commands_has_every_option() -> None:
    text = site_pages.commands()
    for name in COMMANDS:
        part = text.split(f"## flashtune {name}\n")[1].split("\n## ")[0]
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for parameter in command.params:
            assert all(f"`{option}`" in part for option in parameter.opts if isinstance(parameter, click.Option)), (name, parameter.opts)
    assert (DOCS / "commands.md").read_text().count("<!-- commands -->") == 1


def test_options_within_a_command_of_a_help_text_stay_within_its_code() -> None:
    assert site_pages._cell("ID signed (`export --sign`); --db names it") == "ID signed (`export --sign`); `--db` names it"
    assert not re.search(r"`[a-z]+ ?`--", site_pages.commands())


def variables_of(folder: Path) -> set[str]:
    return {name for path in folder.rglob("*.py") for name in re.findall(r"\bFLASHTUNE_[A-Z_]+\b", path.read_text())}


def test_the_page_of_environment_variables_has_all_that_the_source_names() -> None:
    page = set(re.findall(r"^\| `(FLASHTUNE_[A-Z_]+)` \|", (DOCS / "environment.md").read_text(), re.MULTILINE))
    assert page == variables_of(ROOT / "flashtune")


def test_a_variable_without_a_line_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text('os.environ["FLASHTUNE_NEW"]')
    assert variables_of(tmp_path) == {"FLASHTUNE_NEW"}


def test_the_gallery_has_twelve_masks_with_their_pictures_and_what_runs_them() -> None:
    drawn = site_pages.masks_drawn()
    assert len(drawn) == 12 and len(set(drawn.values())) == 12
    assert site_pages.runs("causal") == ("Built in: `dispatch.attention` runs it.", "--causal")
    assert site_pages.runs("same_document")[0].startswith("Documents")
    assert "`flash_fwd_hopper`" in site_pages.runs("tree")[0] and "--mask-mod examples/masks.py:tree" in site_pages.runs("tree")[1]
    text = site_pages.gallery()
    for name in site_pages.functions_of(site_pages.masks()):
        part = text.split(f"### {name}\n")[1].split("\n### ")[0]
        assert f"def {name}(" in part and "Speed: " in part and "flashtune search --d 128 --n " in part
    assert "alibi" in site_pages.CASES and "(timed with the slopes of 16 heads)" in text.split("### alibi\n")[1].split("\n### ")[0]
    assert "not measured" not in text.split("### relative\n")[1]


def test_a_masks_picture_has_a_row_for_each_query() -> None:
    assert 'd="M0 0h4v4h-4zM0 4h8v4h-8z"' in pictures.mask_picture([[True, False], [True, True]], "causal")


def test_every_diagram_can_be_drawn() -> None:
    found = [
        text for page in DOCS.rglob("*.md") for text in re.findall(r"^```mermaid\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(found) >= 3
    for text in found:
        labels, edges = pictures.read(text)
        drawn = pictures.diagram(text)
        assert drawn.count('class="node"') == len(labels) and drawn.count('class="arrow') == len(edges)


def test_arrows_lead_down_but_for_dashed_ones_that_lead_back() -> None:
    labels, edges = pictures.read(
        'flowchart LR\n    A["one, two"] -->|then| B[(base)]\n    A -.-> C{how}\n    B -. fails .-> C --> D\n    D -.->|again| A\n'
    )
    assert labels == {"A": "one, two", "B": "base", "C": "how", "D": "D"}
    assert [edge.label for edge in edges] == ["then", "", "fails", "", "again"]
    assert pictures.ranks(labels, edges) == {"A": 0, "B": 1, "C": 2, "D": 3}
    with pytest.raises(ValueError, match="no arrow"):
        pictures.read("flowchart LR\n    A ==> B\n")


@pytest.mark.parametrize(
    ("link", "source", "repository", "found"),
    [
        ("[figures](../benchmarks/README.md#training)", "docs/index.md", None, "[figures](figures.md#training)"),
        ("[page](docs/support.md)", "CONTRIBUTING.md", None, "[page](support.md)"),
        ("[all](../../examples/masks.py)", "docs/guides/gallery.md", None, "[all](../examples.md#maskspy)"),
        ("[guards](../guard/README.md)", "docs/architecture.md", None, "guards (`guard/README.md` in a checkout)"),
        ("[guards](../guard/README.md)", "docs/architecture.md", "https://x.org/f", "[guards](https://x.org/f/blob/main/guard/README.md)"),
        ("[web](https://x.org) and [here](#there)", "docs/index.md", None, "[web](https://x.org) and [here](#there)"),
        ("```\n[x](y.md)\n```", "docs/index.md", None, "```\n[x](y.md)\n```"),
    ],
)
def test_links_lead_to_pages_or_to_the_repository_or_become_paths(link: str, source: str, repository: str | None, found: str) -> None:
    assert site_pages.linked(link, source, repository) == found


def test_the_home_page_shows_the_four_in_one_run() -> None:
    chart = site_pages.home_chart()
    assert chart.count("<polyline") == 8 and all(name in chart for name in site_pages.PEERS.values())
