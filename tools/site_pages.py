"""Pages and parts of pages that the site makes of the repository when it is built: a hook of MkDocs.

Whole pages: the changelog, the figures, CONTRIBUTING and the examples. Parts, each in place of a marker: the commands with every option,
the gallery of masks, a template's text, and the chart of the home page. Diagrams become pictures. Links that leave the documents lead to
such a page, or to the repository where the project's metadata names one; else they become the file's path in a checkout.
"""

import html
import inspect
import json
import posixpath
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import pictures  # noqa: E402

INCLUDED = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "figures.md",
    "examples/README.md": "examples.md",
}
"""Files outside of docs/ that are pages of the site, by their places there."""

CHART_RUN = "2026-11-22-h200-forward/forward_plain_features.json"
PEERS = {"flashtune": "flashtune", "cudnn": "cuDNN", "fa4": "FlashAttention-4", "flash": "FlashAttention-2"}

MASKS = ROOT / "examples" / "masks.py"
MASKS_RUN, BIASES_RUN = "2026-11-28-h100-functions/long.json", "2026-11-28-h100-biases/biases-16384.json"
CASES = {
    "causal": ("causal", ""),
    "sliding_window": ("window", ""),
    "prefix_lm": ("prefix", "timed with a prompt of 4096 tokens"),
    "same_document": ("document", "timed with 8 documents of random lengths"),
    "global_window": ("global_window", ""),
    "dilated": ("dilated", ""),
    "neighbourhood": ("natten", "timed with windows that move inwards at the edges"),
    "tree": ("tree", "timed with a random tree whose tokens see their ancestors"),
    "block_diffusion": ("block_diffusion", ""),
    "alibi": ("alibi", "timed with the slopes of 16 heads"),
    "soft_cap": ("softcap", "timed beside a causal mask"),
    "relative": ("relative", "FlexAttention with one pipeline stage, since its defaults fail there; `2026-11-28-h100-biases`, 3 rounds"),
}
"""Functions of the gallery that `MASKS_RUN` or `BIASES_RUN` timed: the case of the run, and how it differs."""


def commands() -> str:
    """Markdown of every command: its help, and a table of all its arguments and options."""
    from flashtune.cli.main import COMMANDS, main

    parts = []
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        context = click.Context(command, info_name=f"flashtune {name}")
        parts += [f"## flashtune {name}", "", *_help(command.help or ""), "```text", context.get_usage(), "```", ""]
        parts += ["| option | meaning |", "|---|---|"]
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                parts.append(f"| {_option(record[0])} | {_cell(record[1])} |")
        parts.append("")
    return "\n".join(parts)


def _option(words: str) -> str:
    """An option's names and the value that it takes: `-h, --help` and the like."""
    *first, last = words.split(", ")
    name, _, value = last.partition(" ")
    return ", ".join(f"`{word}`" for word in [*first, name]) + f" {_cell(value)}" * bool(value)


def _cell(text: str) -> str:
    escaped = html.escape(" ".join(text.split()), quote=False).replace("|", "&#124;<wbr>").replace("*", "&#42;")
    spans = re.split(r"(`[^`]*`)", escaped)
    return "".join(part if part.startswith("`") else re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", part) for part in spans)


def _help(text: str) -> Iterator[str]:
    """Paragraphs of a help text; those that click prints as they stand are examples."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield from ("```sh", *paragraph.splitlines()[1:], "```", "")
        else:
            yield from (_cell(paragraph), "")


@cache
def masks_drawn() -> dict[str, str]:
    """Pictures of the masks of examples/masks.py, made by calling them with the small numbers that the file names."""
    import torch

    def small(line: re.Match[str]) -> str:
        return f"{line[1]} = {line[2]}"

    text = re.sub(r"^([\w, ]+) = [\d, ]+  # drawn with ([\d, ]+)$", small, MASKS.read_text(), flags=re.MULTILINE)
    module = ModuleType("masks_drawn")
    exec(text.replace("N, HEADS = 16384, 32", "N, HEADS = 64, 1"), vars(module))
    place, zero = torch.arange(64), torch.tensor(0)
    found = {}
    for name, function in functions_of(module).items():
        if not takes_score(function):
            seen = function(zero, zero, place[:, None], place[None, :]).expand(64, 64)
            found[name] = pictures.mask_picture(seen.tolist(), f"{name}: a row for each query, a column for each key")
    return found


def functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The masks and scores of a module, in order."""
    return {name: one for name, one in vars(module).items() if inspect.isfunction(one)}


def takes_score(function: Callable[..., Any]) -> bool:
    """True for scores, False for masks."""
    return next(iter(inspect.signature(function).parameters)) == "score"


@cache
def masks() -> ModuleType:
    """examples/masks.py as it stands."""
    module = ModuleType("masks")
    module.__file__ = str(MASKS)
    exec(compile(MASKS.read_text(), str(MASKS), "exec"), vars(module))
    return module


def runs(name: str) -> tuple[str, str]:
    """Sentence on what runs calls with a function of the gallery, as explanations say it, and the options that search it."""
    from flashtune.core.problems.problem import Problem
    from flashtune.core.system.errors import InputError
    from flashtune.dispatch import explain_problem
    from flashtune.templates.mods.documents import documents_of
    from flashtune.templates.mods.known import Named
    from flashtune.tuner import functions

    kind = "score" if takes_score(functions_of(masks())[name]) else "mask"
    named = Named(**{kind: f"{MASKS}:{name}"})
    found = functions.loaded(named, "cpu")
    if documents_of(found.score, found.mask) is not None:
        return "Documents: the kernels of packed sequences run it if the tokens of each document lie together.", "--packed uniform --causal"
    problem = Problem(batch=1, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=64, d_v=64, dtype="bf16")
    try:
        coded = functions.with_functions(problem, named)
    except InputError as error:
        options = str(error).rpartition("search with ")[2]
        return "Built in: `dispatch.attention` runs it.", options
    option = f"--{kind}-mod examples/masks.py:{name}"
    here, there = (explain_problem(coded, gpu) for gpu in ("h100", "a100"))
    elsewhere = "PyTorch's FlexAttention runs it until you search" if there.kind == "framework" else f"`{there.template}`"
    return f"Compiled: on an H100 or H200 `{here.template}` runs it in fp16 and bf16; on other GPUs {elsewhere}.", option


def gallery() -> str:
    """Markdown of the gallery: for each function its picture, code, what runs it, and its speed where it was measured."""
    from benchmarks.cases.archive import folder

    rows = [row for run in (MASKS_RUN, BIASES_RUN) for row in json.loads((folder() / run).read_text())["rows"]]
    timed = {(row["case"], row["d"]): row for row in rows if "forward" in row}
    drawn = masks_drawn()
    head = MASKS.read_text().partition("import torch\n")[2].partition("\n\n\n")[0].strip()
    parts = ["## Numbers and tensors", "", "The functions below read these:", "", "```python", head, "```", ""]
    for name, function in functions_of(masks()).items():
        if name == "alibi":
            parts += ["## Scores", "", "A score function takes the score of a pair and returns the one that the softmax takes.", ""]
        elif name == "causal":
            parts += ["## Masks", "", "A mask function returns True for each pair of a query and a key that it sees.", ""]
        sentence, options = runs(name)
        text = inspect.cleandoc(function.__doc__ or "")
        code = "".join(inspect.getsourcelines(function)[0]).replace(f'    """{text}"""\n', "")
        picture = f'<div class="drawn">{drawn[name]}</div>' if name in drawn else ""
        parts += [f"### {name}", "", text, "", "```python", code + "```", "", picture, "", sentence, ""]
        sizes = "--d 128 --n 1024 --batch 16" if "--packed" in options else f"--d 128 --n {masks().N}"
        parts += ["Search:", "", "```sh", f"flashtune search {sizes} \\\n    {options}", "```", ""]
        case, note = CASES.get(name, ("", ""))
        row = timed.get((case, 128))
        ratios = [row[way]["flex"] / row[way]["ours"] for way in ("forward", "backward")] if row else []
        speed = "not measured" if not ratios else f"{ratios[0]:.2f} times FlexAttention's rate forward, {ratios[1]:.2f} times backward"
        parts += [f"Speed: {speed}{f' ({note})' if ratios and note else ''}.", ""]
    return "\n".join(parts)


def home_chart() -> str:
    """Charts of the home page: rates of one committed run."""
    from benchmarks.cases.archive import folder

    rows = json.loads((folder() / CHART_RUN).read_text())["rows"]
    charts = []
    for case in ("full", "causal"):
        found = {row["problem"]["n_kv"]: row["rates"] for row in rows if row["group"] == "plain" and row["case"] == case and _is_d128(row)}
        lines = [pictures.Line(name, peer, [found[n][peer] for n in sorted(found)]) for peer, name in PEERS.items()]
        charts.append(pictures.chart(f"{case} attention", sorted(found), lines))
    return f'<div class="charts">{"".join(charts)}</div>'


def _is_d128(row: dict[str, Any]) -> bool:
    return bool(row["problem"]["d"] == 128 and row["problem"]["dtype"] == "bf16")


def rows_template() -> str:
    """Text of the smallest family's template."""
    return (ROOT / "examples" / "own_template" / "rows.py.jinja").read_text().rstrip()


BOOSTS = {
    **{"install": 3, "quickstart": 2, "masks-and-scores": 2, "shipping": 2, "environment": 3, "commands": 2, "guides/": 1.5},
    **{"decisions/": 0.4, "contributing": 0.4, "constants": 0.4},
}
"""Weights of pages in the site's search, by how their places begin; that of others is 1."""

MARKERS = {"commands": commands, "gallery": gallery, "chart": home_chart, "rows": rows_template}
"""Makers of the parts of pages, by their markers."""


def version() -> str:
    """The package's version."""
    import flashtune

    return flashtune.__version__


def examples() -> str:
    """The page of examples: the README, then the text of each program."""
    parts = [(ROOT / "examples" / "README.md").read_text()]
    for path in sorted((ROOT / "examples").rglob("*.py")):
        parts += [f"## {path.relative_to(ROOT / 'examples')}", "", "```python", path.read_text() + "```", ""]
    return "\n".join(parts)


LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def linked(markdown: str, source: str, repository: str | None) -> str:
    """The text of a file, at `source` in the repository, with links that lead to pages of the site, the repository, or nowhere."""

    def link(found: re.Match[str]) -> str:
        picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        here = INCLUDED.get(source, source.removeprefix("docs/"))
        place = INCLUDED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") and (ROOT / path).is_file() else None)
        if path == "README.md":
            place = "index.md"
        if path.startswith("examples/") and path.endswith(".py"):
            place, anchor = "examples.md", "#" + re.sub(r"[^\w]", "", path.removeprefix("examples/"))
        if path == "docs/decisions":
            place = "decisions/0001-layout.md"
        if place is not None:
            return f"{picture}[{text}]({posixpath.relpath(place, posixpath.dirname(here) or '.')}{anchor})"
        if repository:
            return f"{picture}[{text}]({repository}/blob/main/{path}{anchor})"
        return text if path in text or text.strip("`") == target else f"{text} (`{path}` in a checkout)"

    outside = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in outside)


def drawn(markdown: str) -> str:
    """The text with pictures in place of diagrams."""
    return re.sub(r"^```mermaid\n(.*?)^```$", lambda found: pictures.diagram(found[1]), markdown, flags=re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """The version below every page, and the repository where the project's metadata names one."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url = urls.get("Repository", "")
    config.copyright = f"flashtune {version()}, Apache License 2.0"
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Whole pages of files outside of docs/."""
    from mkdocs.structure.files import File

    for source, place in INCLUDED.items():
        text = examples() if place == "examples.md" else (ROOT / source).read_text()
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The hook of MkDocs for each page."""
    place = page.file.src_uri
    page.meta["search"] = {"boost": next((weight for start, weight in BOOSTS.items() if place.startswith(start)), 1)}
    source = next((path for path, included in INCLUDED.items() if included == place), f"docs/{place}")
    markdown = drawn(linked(markdown.replace("<!-- version -->", version()), source, config.repo_url or None))
    for name, make in MARKERS.items():
        if f"<!-- {name} -->" in markdown:
            markdown = markdown.replace(f"<!-- {name} -->", make())
    return markdown
