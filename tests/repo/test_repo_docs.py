"""The documents agree with the repository: links lead somewhere, commands exist, versions are the same."""

import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtune
from benchmarks import run
from benchmarks.cases.archive import folder
from flashtune import dispatch
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.versions import RUNS
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.decisions import backwards
from flashtune.dispatch.policy.choose import choose
from flashtune.dispatch.state.context import Memo, Settings
from flashtune.templates import families

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks" / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), BENCHMARKS, *(ROOT / "docs").rglob("*.md")])
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


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_every_decision_is_read_in_three_minutes() -> None:
    assert not [page.name for page in DECISIONS if len(page.read_text().split()) > 600]


def test_the_readmes_snippet_runs_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    snippet, *_ = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippet.splitlines()) <= 10
    found: dict[str, torch.Tensor] = {}
    exec(snippet, found)
    assert found["out"].shape == found["q"].shape
    assert "runs the call" in capsys.readouterr().out


def test_the_benchmarks_page_names_every_case_and_runs_that_are_in_the_archive() -> None:
    page = BENCHMARKS.read_text()
    assert run.cases().keys() == set(re.findall(r"\| `([a-z]\w+)[^|]*\|$", page, re.MULTILINE))
    named = re.findall(r"`(20\d\d-[^`]+)`", page)
    assert named and not [name for name in named if not (folder() / name).exists()]


COLUMNS = ("h200", "h100", "b200", "rtx5090", "l4", "l40s", "rtx4090", "mi250x", "mi300x", "a100", "a10", "rtx3090", "v100")
BF16 = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16")
WORDS: list[dict[str, Any]] = [{"window": (1024, 0)}, {"softcap": True}, {"alibi": True}, {"sinks": True}]
MEANT = {
    "full, causal; bf16": [BF16, replace(BF16, features=Features(causal=True))],
    "full, causal; fp16": [replace(BF16, dtype="fp16")],
    "mask, bias, window, ALiBi, soft cap, dropout": [
        *(replace(BF16, features=Features(mask=mask)) for mask in ("bool", "bias")),
        replace(BF16, features=Features(causal=True, window=(1024, 0))),
        *(replace(BF16, features=Features(causal=True, **{name: True})) for name in ("alibi", "softcap", "dropout")),
    ],
    "several query heads to a key head": [replace(BF16, kv_heads=4, features=Features(causal=True))],
    "decoding": [replace(BF16, n_q=1, kv_heads=4)],
    "attention sinks": [replace(BF16, features=Features(causal=True, sinks=True))],
    "float32": [replace(BF16, dtype="fp32")],
    "fp8 (e4m3)": [replace(BF16, dtype="fp8")],
    "D other than 64, 128, 256; another D for V": [replace(BF16, d=80, d_v=80), replace(BF16, d=192, d_v=128)],
    "gradients, full, causal": [
        replace(BF16, direction="bwd", d=d, d_v=d, features=features) for d in (64, 128) for features in (Features(), Features(causal=True))
    ],
    "gradients with a mask, bias, window, ALiBi, soft cap or sinks": [
        *(replace(BF16, direction="bwd", features=Features(mask=mask)) for mask in ("bool", "bias")),
        *(replace(BF16, direction="bwd", features=Features(causal=True, **words)) for words in WORDS),
    ],
    "gradients of a bias itself, or of ALiBi slopes": [
        replace(BF16, direction="bwd", features=Features(mask="bias", dbias=True)),
        replace(BF16, direction="bwd", features=Features(causal=True, alibi=True, dslopes=True)),
    ],
    "gradients with dropout": [
        replace(BF16, direction="bwd", features=Features(dropout=True)),
        replace(BF16, direction="bwd", features=Features(causal=True, dropout=True)),
    ],
    "gradients of D = 256": [replace(BF16, direction="bwd", d=256, d_v=256)],
    "gradients of D = 512": [replace(BF16, direction="bwd", d=512, d_v=512)],
}


SHIPPED = Library.of(shipped_path()).records()
MEMO = Memo(Settings(databases=(str(shipped_path()),), alone=True))


def measured(problem: Problem, gpu: str) -> bool:
    """True if rows of this GPU ship for a problem's features and dtype."""
    key = problem.key(gpu)
    return any(
        (key.gpu, key.d, key.d_v, key.dtype, key.features, key.direction, key.n_q < key.n)
        == (row.key.gpu, row.key.d, row.key.d_v, row.key.dtype, row.key.features, row.key.direction, row.key.n_q < row.key.n)
        and (key.gqa_ratio > 1) == (row.key.gqa_ratio > 1)
        for row in SHIPPED
    )


def test_the_snippet_about_shipping_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "shipping.md").read_text()
    # tests/tuner/test_export_hub.py runs the one about hub folders.
    snippet, *_ = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "model").mkdir()
    shutil.copy(shipped_path(), tmp_path / "model" / "tuned.sqlite")
    monkeypatch.chdir(tmp_path)
    served: list[object] = []
    exec(snippet, {"model": lambda tokens: served.append(dispatch.explain_problem(BF16, "h200").origin), "tokens": None})
    assert served == [str(tmp_path / "model" / "tuned.sqlite")] and dispatch.explain_problem(BF16, "h200").origin == "shipped"


@pytest.mark.parametrize("library", ["transformers", "diffusers"])
def test_a_folder_with_a_database_is_loaded_as_the_page_says(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library)
    text = (ROOT / "docs" / "shipping.md").read_text()
    (snippet,) = (one for one in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if f"from {library} " in one)
    monkeypatch.chdir(tmp_path)
    if library == "transformers":
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained("my-model")
    else:
        from diffusers import DDPMPipeline, DDPMScheduler, UNet2DConditionModel

        blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",), "block_out_channels": (8,)}
        unet = UNet2DConditionModel(8, layers_per_block=1, norm_num_groups=4, cross_attention_dim=8, attention_head_dim=4, **blocks)
        DDPMPipeline(unet, DDPMScheduler()).save_pretrained("my-model")
    shutil.copy(shipped_path(), tmp_path / "my-model" / "tuned.sqlite")
    found: dict[str, Any] = {}
    exec(snippet, found)
    try:
        assert dispatch.explain_problem(BF16, "h200").origin == str(tmp_path / "my-model" / "tuned.sqlite")
        if library == "transformers":
            assert found["model"].config._attn_implementation == found["tuned"].register()
        else:
            assert all(type(one).__name__ == "TunedProcessor" for one in found["pipeline"].unet.attn_processors.values())
    finally:
        found["layer"].remove()


@pytest.mark.parametrize("name", ["your-gpu.md", "guides/packed.md", "guides/paged.md"])
def test_gains_in_guides_are_figures_of_the_benchmarks_page(name: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / name).read_text(), flags=re.DOTALL)
    figures = re.findall(r"\b\d+\.\d+\b(?! \(cuDNN|\.\d)", text.split("## What it gains")[-1])
    assert len(figures) >= 2 and not [figure for figure in figures if figure not in BENCHMARKS.read_text()]


def test_the_home_page_counts_the_shipped_records() -> None:
    assert f"{len(SHIPPED):,} measured records" in (ROOT / "docs" / "index.md").read_text()
    assert {row.outcome.source for row in SHIPPED} == {"measured"}


def served_by_a_row(problem: Problem, target: Target) -> bool:
    if problem.direction == "bwd":
        return backwards.gradient_choice(MEMO, problem, target)[0] is not None
    return choose(problem, target, SHIPPED, families()).record is not None


WORDS = ("tuned", "near", "search", "PyTorch")


def what_serves(problem: Problem, target: Target) -> str:
    """The table's word for a problem on a GPU."""
    if measured(problem, target.slug):
        return "tuned"
    if served_by_a_row(problem, target):
        return "near"
    served = target.compilable and any(family.supports(problem.spec(), target) is None for family in families().values())
    return "search" if served else "PyTorch"


def test_the_table_says_what_runs_where() -> None:
    text = (ROOT / "docs" / "support.md").read_text().split("## By GPU")[1].split("## ")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows] == list(MEANT)
    columns = [[find_target(name).slug for name in cell.split(", ") if name != "CPU"] for cell in head[1:]]
    assert sorted(slug for column in columns for slug in column) == sorted(COLUMNS)
    for name, *cells in rows:
        for slugs, said in zip(columns, cells, strict=True):
            for target in map(find_target, slugs):
                found = [what_serves(problem, target) for problem in MEANT[name]]
                # Where some have rows of their own and others don't, the table promises the less.
                assert said == max(found, key=WORDS.index), (name, target.slug)


def test_ci_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    *_, tests, documents, last = script.read_text().rstrip().splitlines()
    # Nothing is printed after the tests where the documents, which are built beside them, are sound.
    assert tests.startswith("make test") and documents.startswith('wait "$docs" ||') and last == 'exit "$tests"'


def test_every_decision_has_its_own_number_in_name_and_title() -> None:
    assert len({page.name[:4] for page in DECISIONS}) == len(DECISIONS)
    for page in DECISIONS:
        assert re.match(r"\d{4}-[a-z0-9-]+\.md$", page.name)
        assert page.read_text().startswith(f"# {page.name[:4]}: ")


def test_the_changelogs_newest_entry_is_this_version() -> None:
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == flashtune.__version__


def test_the_citation_is_of_this_version_and_the_metadata_name_the_versions_of_python_that_were_run() -> None:
    assert f"\nversion: {flashtune.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert {run.python for run in RUNS} <= {line.rpartition(" :: ")[2] for line in named}


def test_every_dependency_has_its_reason_written_down() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = [*project["dependencies"], *(line for lines in project["optional-dependencies"].values() for line in lines)]
    names = {re.split(r"[^A-Za-z0-9-]", line)[0] for line in everything} - {"flashtune"}
    reasons = "\n".join(
        line.split("|")[1] for line in (ROOT / "docs/decisions/0002-dependencies.md").read_text().splitlines() if "|" in line
    )
    assert not {name for name in names if not re.search(rf"\b{re.escape(name)}\b", reasons)}


def test_the_architecture_page_names_every_folder_and_the_modules_of_dispatch() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.name for path in (ROOT / "flashtune").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert not {folder for folder in folders if f"`flashtune/{folder}/`" not in text}
    table = text.split("| `dispatch/` | holds, from the top down |")[1].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        folder = ROOT / "flashtune" / "dispatch" / (re.match(r"\| `(\w+/)`", row) or [None, ""])[1]
        assert folder.name == "dispatch" or set(re.findall(r"`(\w+\.py)`", row)) == {x.name for x in folder.glob("*.py")} - {"__init__.py"}
    named = set(re.findall(r"`([\w/]+\.py|\w+/)`", table))
    assert {x.name + "/" * x.is_dir() for x in (ROOT / "flashtune" / "dispatch").iterdir()} - {"__init__.py", "__pycache__/"} <= named
