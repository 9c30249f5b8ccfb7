"""A hub folder serves attention through the real `kernels` package, in a process where flashtune can't be imported."""

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import db_samples as samples
import pytest
import torch
from commands import flashtune
from forked import python, started

from flashtune.core import standalone
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.problems.tolerances import tolerance
from flashtune.core.records.results import Fate, SearchResult
from flashtune.core.system.errors import DatabaseError
from flashtune.db.library import shipped_path
from flashtune.templates import family
from flashtune.templates.rendering import variant_of
from flashtune.tuner.publish.copied_modules import copies
from flashtune.tuner.publish.hub import write_hub

TESTS = Path(__file__).resolve().parents[1]
H200 = find_target("h200")


def found(template: str, problem: Problem, *, torch_us: float = 200.0, **changes: Any) -> SearchResult:
    """A measured result of a family's default config, that PyTorch took `torch_us` for."""
    chosen = family(template)
    config = chosen.default(problem.spec(), H200)
    variant = variant_of(chosen, problem.spec(), config)
    outcome = samples.outcome(variant.id, 100.0, template=template, config=config, **changes)
    return samples.result(outcome, framework_us=torch_us, of=problem)


PLAIN = Problem(batch=2, heads=2, kv_heads=2, n_q=64, n_kv=64, d=32, d_v=32, dtype="fp16")
RESULTS = (
    found("flash_fwd", PLAIN),
    found("flash_fwd", replace(PLAIN, features=Features(causal=True))),
    found("flash_fwd", replace(PLAIN, features=Features(mask="bias"))),
    found("flash_decode", replace(PLAIN, batch=1, heads=4)),
    found("flash_fwd", replace(PLAIN, d=64, d_v=64), torch_us=50.0),
    found("flash_fwd", replace(PLAIN, features=Features(softcap=True))),
)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.write(tmp_path_factory.mktemp("hub") / "tuned.sqlite", RESULTS)


def exported(folder: Path, database: Path, *words: str) -> dict[str, Any]:
    result = flashtune("export", "--hub", str(folder), "--db", str(database), "--json", *words)
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


CALLS = f"import runpy; runpy.run_path({str(TESTS / 'support' / 'hub_calls.py')!r}, run_name='__main__')"


def called(folder: Path, *words: str, interpret: bool) -> Any:
    result = started(CALLS, folder, *words, folder=folder, environment={"TRITON_INTERPRET": str(int(interpret))}).ended()
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


KERNELS = {"plain", "other lengths", "negative scale", "causal", "bias", "shared heads"}


@pytest.mark.parametrize("interpret", [True, False], ids=["kernels", "torch"])
def test_the_folder_serves_without_flashtune_what_its_records_cover_and_torch_the_rest(
    interpret: bool, database: Path, tmp_path: Path
) -> None:
    summary = exported(tmp_path / "hub", database)
    assert {name: summary[name] for name in ("records", "kernels", "torch", "predicted", "inexpressible")} == {
        "records": 5,
        "kernels": 4,
        "torch": 1,
        "predicted": 0,
        "inexpressible": 1,
    }
    result = called(tmp_path / "hub", interpret=interpret)
    assert result["flashtune"] is False
    spec = KernelSpec(direction="fwd", dtype="fp16", d=32, d_v=32, window=False, mask="none")
    bound = tolerance(spec)
    for name, call in result["calls"].items():
        assert call["error"] <= bound.atol + bound.rtol * 4, (name, call)
        assert call["served"].startswith("flash_") is (interpret and name in KERNELS), (name, call)
    assert result["calls"]["gradients"]["gradient"]
    if interpret:
        assert "flash_decode" in result["calls"]["shared heads"]["served"]
        assert "own attention won at N=64" in result["calls"]["torch won"]["served"]
        assert "gradient is needed" in result["calls"]["gradients"]["served"]
        assert "no record is near" in result["calls"]["far longer"]["served"]


def test_a_kernel_that_does_not_run_warns_once_and_torch_serves(database: Path, tmp_path: Path) -> None:
    exported(tmp_path / "hub", database)
    [broken] = [path for path in (tmp_path / "hub").rglob("kernels/*bias*.py")]
    broken.write_text("raise RuntimeError('no such compiler')\n")
    result = started(CALLS, tmp_path / "hub", environment={"TRITON_INTERPRET": "1"}).ended()
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("no such compiler") == 1
    calls = json.loads(result.stdout)["calls"]
    assert calls["bias"]["served"].startswith("PyTorch") and calls["bias"]["error"] < 0.01
    assert calls["plain"]["served"].startswith("flash_fwd")


def edited(folder: Path, change: Callable[[Any], Any]) -> Path:
    """The folder after a change of its table; a text replaces it."""
    [path] = folder.rglob("table.json")
    table = json.loads(path.read_text())
    found = change(table)
    path.write_text(found if isinstance(found, str) else json.dumps(table))
    return folder


def of(table: Any, features: str, d: int = 32) -> Any:
    [record] = [
        one for one in table["records"] if one["key"]["features"] == features and one["key"]["d"] == d and one["key"]["gqa_ratio"] == 1
    ]
    return record


def swap_ids(table: Any) -> None:
    one, other = of(table, "{}"), of(table, '{"causal":true}')
    one["kernel"], other["kernel"] = other["kernel"], one["kernel"]


def swap_kernels(table: Any) -> None:
    one, other = of(table, "{}")["kernel"], of(table, '{"causal":true}')["kernel"]
    table["kernels"][one], table["kernels"][other] = table["kernels"][other], table["kernels"][one]


EDITS: dict[str, Callable[[Any], Any]] = {
    "a causal row says that it is full": lambda table: (
        table["records"].remove(of(table, "{}")),
        of(table, '{"causal":true}')["key"].update(features="{}"),
    ),
    "a full row says that it is causal": lambda table: (
        table["records"].remove(of(table, '{"causal":true}')),
        of(table, "{}")["key"].update(features='{"causal":true}'),
    ),
    "a biased row says that it is full": lambda table: (
        table["records"].remove(of(table, "{}")),
        of(table, '{"mask":"bias"}')["key"].update(features="{}"),
    ),
    "two ids swapped": swap_ids,
    "two kernels swapped": swap_kernels,
    "a kernel that says another head size": lambda table: table["kernels"][of(table, "{}")["kernel"]]["spec"].update(d=64, d_v=64),
    "a size as a text": lambda table: of(table, "{}")["key"].update(n="64"),
    "a time that is none": lambda table: of(table, "{}").update(median_us="fast"),
    "an id that is a list": lambda table: of(table, "{}").update(kernel=["a"]),
    "a key without a name": lambda table: of(table, "{}")["key"].pop("gpu"),
    "no kernels": lambda table: table.pop("kernels"),
    "another format": lambda table: table.update(format=99),
    "records that are a number": lambda table: table.update(records=7),
    "no JSON": lambda table: json.dumps(table)[:-40],
    "nothing": lambda table: " ",
    "a list": lambda table: "[]",
}

EDITED = """
import json, sys, warnings
from pathlib import Path
import torch
from kernels import get_local_kernel

sdpa = torch.nn.functional.scaled_dot_product_attention
torch.manual_seed(3)
q, k, v, bias = *(torch.randn(2, 2, 64, 32).half() for _ in range(3)), torch.randn(1, 2, 64, 64).half()
calls, found = {"": {}, "causal": {"is_causal": True}, "bias": {"attn_mask": bias}}, {}
for name in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kernel = get_local_kernel(Path(name))
        errors = [(kernel.attention(q, k, v, **words) - sdpa(q, k, v, **words)).abs().max().item() for words in calls.values()]
    told = [str(one.message) for one in said if "table" in str(one.message)]
    served = [kernel.explain(q, k, v, **words) for words in calls.values()]
    found[Path(name).name] = {"errors": errors, "warnings": told, "served": served}
print(json.dumps(found))
"""


def test_a_table_that_says_what_its_kernels_are_not_gives_torchs_numbers_and_one_warning(database: Path, tmp_path: Path) -> None:
    exported(tmp_path / "sound", database)
    for number, change in enumerate(EDITS.values()):
        # Packages of equal ids are one module.
        shutil.copytree(tmp_path / "sound", tmp_path / str(number))
        [about] = (tmp_path / str(number)).rglob("metadata.json")
        about.write_text(about.read_text().replace("flashtune_attention_", f"flashtune_attention_{number}_"))
        edited(tmp_path / str(number), change)
    folders = [str(tmp_path / name) for name in ("sound", *map(str, range(len(EDITS))))]
    result = started(EDITED, *folders, folder=tmp_path, environment={"TRITON_INTERPRET": "1"}).ended()
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    sound = found.pop("sound")
    assert not sound["warnings"] and all(served.startswith("flash_fwd") for served in sound["served"])
    for name, change in zip(EDITS, found.values(), strict=True):
        assert max(change["errors"]) < 0.02, (name, change)
        assert len(change["warnings"]) == 1 and "export the folder again" in change["warnings"][0], (name, change)
        assert any(served.startswith("PyTorch runs the call") for served in change["served"]), (name, change)


def test_the_snippet_about_hub_folders_runs(database: Path, tmp_path: Path) -> None:
    text = (TESTS.parent / "docs" / "shipping.md").read_text()
    *_, snippet = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exported(tmp_path / "my-attention", database)
    given = "import torch\nq = k = v = torch.randn(2, 2, 64, 32, dtype=torch.float16)\n"
    told = python(given + snippet, folder=tmp_path, environment={"TRITON_INTERPRET": "1"})
    assert told.startswith("flash_fwd fwd-fp16-d32-causal runs the call, by a record of h200 at N=64")


def test_folders_of_equal_records_are_equal_and_have_an_id_of_their_content(database: Path, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, words in zip(folders, ([], [], ["--d", "64"]), strict=True):
        exported(folder, database, *words)
    a, b, c = ({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()} for folder in folders)
    assert a == b
    ids = {json.loads(found[Path("build/torch-universal/metadata.json")])["id"] for found in (a, c)}
    assert len(ids) == 2


def test_an_export_replaces_an_earlier_one_and_nothing_else(database: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    (hub / ".git").mkdir(parents=True)
    exported(hub, database)
    (hub / "build/torch-universal/kernels/old.py").write_text("")
    exported(hub, database, "--d", "32")
    assert not (hub / "build/torch-universal/kernels/old.py").exists()
    assert sorted(path.name for path in hub.iterdir()) == [".git", "README.md", "build", "flashtune.json"]


def plant_file(hub: Path) -> str:
    (hub / "weights.bin").write_text("weights")
    return "weights.bin"


def plant_build(hub: Path) -> str:
    (hub / "build").mkdir()
    return "build"


def plant_other_build(hub: Path) -> str:
    (hub / "flashtune.json").write_text('{"format": 1}')
    (hub / "build/torch-cuda").mkdir(parents=True)
    return "build/torch-cuda"


def plant_link(hub: Path) -> str:
    (hub / "flashtune.json").write_text('{"format": 1}')
    (hub / "build").symlink_to(hub.parent)
    return "build"


@pytest.mark.parametrize("plant", [plant_file, plant_build, plant_other_build, plant_link])
def test_a_folder_with_anything_else_is_refused_in_one_sentence_and_left_as_it_is(plant: Any, database: Path, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    name = plant(hub)
    before = sorted(hub.rglob("*"))
    result = flashtune("export", "--hub", str(hub), "--db", str(database))
    assert result.exit_code == DatabaseError.exit_code
    assert f"holds {name}, which no export wrote: give an empty folder" in result.stderr
    assert sorted(hub.rglob("*")) == before


def test_a_file_in_the_folders_place_is_refused(database: Path, tmp_path: Path) -> None:
    (tmp_path / "hub").write_text("notes")
    result = flashtune("export", "--hub", str(tmp_path / "hub"), "--db", str(database))
    assert result.exit_code == DatabaseError.exit_code
    assert "is no folder" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "give PATH for a database, or --hub DIR"),
        (("a.sqlite", "--hub", "b"), "give PATH for a database, or --hub DIR"),
        (("--hub", "b", "--force"), "--force is for databases"),
        (("--hub", "b", "--all-trials"), "--all-trials is for databases"),
        (("a.sqlite", "--predicted"), "--predicted is for --hub"),
    ],
)
def test_an_export_writes_one_thing(
    words: tuple[str, ...], told: str, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = flashtune("export", "--db", str(database), *words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert os.listdir() == []


def test_predicted_records_serve_only_where_that_is_asked_for(tmp_path: Path) -> None:
    predicted = replace(found("flash_fwd", PLAIN, source="predicted", fate=Fate.CORRECT), baseline=None)
    [outcome] = predicted.outcomes
    assert outcome.measurement is not None
    database = samples.write(tmp_path / "p.sqlite", (predicted, RESULTS[1]))
    result = flashtune("export", "--hub", str(tmp_path / "hub"), "--db", str(database))
    assert result.exit_code == 0, result.output
    assert "left out: 1 predicted record (--predicted writes them, too)" in result.stderr
    assert exported(tmp_path / "hub", database, "--predicted")["predicted"] == 1
    assert "1 of the records predicted by a cost model and never measured" in (tmp_path / "hub/README.md").read_text()
    alone = samples.write(tmp_path / "alone.sqlite", (predicted,))
    refused = flashtune("export", "--hub", str(tmp_path / "hub"), "--db", str(alone))
    assert refused.exit_code == 5
    assert "only predicted records, which --predicted exports" in refused.stderr


def test_records_of_a_card_that_no_table_has_go_along_and_serve_on_that_card_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvl = replace(RESULTS[1], gpu="h100-nvl")
    database = samples.write(tmp_path / "s.sqlite", (RESULTS[0], nvl))
    result = flashtune("export", "--hub", str(tmp_path / "hub"), "--db", str(database))
    assert result.exit_code == 0, result.output
    assert "2 records, 2 kernels" in result.stdout
    assert "unknown here: h100-nvl, whose records are used only on GPUs of that name" in result.stderr
    assert "NVIDIA H200" in (text := (tmp_path / "hub/README.md").read_text()) and "h100-nvl" in text
    [path] = (tmp_path / "hub").rglob("table.json")
    folder = standalone.Standalone(path, {}, lambda name: pytest.fail(name))
    for name, serves in (("NVIDIA H100 NVL", {"h200", "h100-nvl"}), ("NVIDIA H200", {"h200"}), ("NVIDIA H100 PCIe", {"h200"})):
        facts = SimpleNamespace(name=name, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, facts=facts: facts)
        found = [row.key.gpu for one in (nvl.problem, RESULTS[0].problem) for row in folder._ranked_on(one, torch.device("cuda"))]
        assert set(found) == serves, name
    alone = flashtune("export", "--hub", str(tmp_path / "alone"), "--json", "--db", str(samples.write(tmp_path / "a.sqlite", (nvl,))))
    assert json.loads(alone.stdout)["by_name"] == ["h100-nvl"]


def test_no_forward_that_torch_can_ask_for_is_one_line(tmp_path: Path) -> None:
    database = samples.write(tmp_path / "s.sqlite", RESULTS[-1:])
    result = flashtune("export", "--hub", str(tmp_path / "hub"), "--db", str(database))
    assert result.exit_code == 5
    assert "none of 1 record is a forward that is plain, causal, masked or biased" in result.stderr
    assert not (tmp_path / "hub").exists()


def test_the_shipped_records_export_and_every_import_of_the_folder_is_in_it(tmp_path: Path) -> None:
    from flashtune.db.store import Store

    with Store.open(shipped_path(), writable=False) as store:
        records = store.records(gpu="h200", d=128, dtype="bf16")
    summary = write_hub(tmp_path / "hub", records)
    assert summary.kernels > 20
    build = tmp_path / "hub/build/torch-universal"
    for path in build.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1]
                assert node.module is not None
                target = folder / node.module.replace(".", "/")
                assert target.with_suffix(".py").is_file() or target.is_dir(), (path, node.module)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                roots = {name.partition(".")[0] for name in names}
                assert roots <= {"torch", "triton", *sys.stdlib_module_names}, (path, roots)
    assert called(tmp_path / "hub", "--plan", interpret=False) == [summary.kernels, summary.kernels]


def test_a_module_that_imports_a_packages_own_code_is_not_copied() -> None:
    with pytest.raises(ImportError, match=r"flashtune\.templates is no module"):
        copies(["flashtune.templates.loading"])
