"""The rooms import downwards only; what pyproject.toml's contracts can't say is checked here by reading or running."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flashtune"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env={"PATH": "", "PYTHONPATH": str(folder)})


PLANTED = [
    ("core", "flashtune.templates.family", "Rooms import downwards only"),
    ("templates", "flashtune.db", "Rooms import downwards only"),
    ("tuner", "flashtune.dispatch", "Rooms import downwards only"),
    ("kernels_generated", "flashtune.core.problems.dtypes", "Shipped kernels import nothing of flashtune"),
    ("dispatch", "optuna", "Dispatch reaches no tuner and no optuna, not even through others"),
    ("tuner", "sqlalchemy", "SQL stays in flashtune.db"),
    ("core", "rich", "Only the command line knows click and rich"),
    ("dispatch", "transformers", "Only the integrations and whole models know transformers and diffusers"),
    ("integrations", "flashtune.bench", "Rooms import downwards only"),
    ("core/gpu/table.py", "flashtune.core.gpu.target", "A GPU's figures have no circle"),
    ("core/gpu", "flashtune.core.records.results", "The vocabulary is one way through"),
    ("core/problems/passes.py", "flashtune.core.problems.problem", "The vocabulary has no circle"),
    ("dispatch/decisions/soundness.py", "flashtune.dispatch.decisions.resolve", "Decisions are one way through"),
    ("dispatch/state/settings.py", "flashtune.dispatch.state.context", "State is one way through"),
    ("dispatch/plans/pytorch.py", "flashtune.dispatch.plans.forward", "Plans are one way through"),
    ("dispatch/policy/records.py", "flashtune.dispatch.policy.choose", "Choices are made one way"),
    ("dispatch/plans/driver.py", "flashtune.dispatch.plans.launch", "Plans are one way through"),
    ("tuner/propose", "flashtune.tuner.children.workers", "The tuner is one way through"),
    ("tuner/children", "flashtune.tuner.search.trials", "The tuner is one way through"),
    ("tuner/search/plan.py", "flashtune.tuner.search.problem", "A search is one way through"),
    ("tuner/propose/sampling.py", "flashtune.tuner.propose.study", "Candidates are proposed one way"),
    ("tuner/children/tasks.py", "flashtune.tuner.children.workers", "Children run tasks, tasks start no children"),
    ("tuner/timing/racing.py", "flashtune.tuner.timing.conditions", "Final candidates are timed one way"),
    ("tuner/verify/inputs.py", "flashtune.tuner.verify.cases", "Candidates are checked one way"),
    ("tuner/publish/machine_code.py", "flashtune.tuner.publish.winners", "Winners become files one way"),
    ("dispatch/call/call.py", "flashtune.dispatch.call.parse", "A call is read one way"),
    ("dispatch/providers/provider.py", "flashtune.dispatch.providers.libraries", "Providers are one way through"),
    ("dispatch/rows/paged.py", "flashtune.dispatch.rows.packed", "Rows are one way through"),
    ("dispatch/functions/kernels.py", "flashtune.dispatch.functions.decided", "Functions are one way through"),
    ("dispatch/rows/read.py", "flashtune.dispatch.varlen", "Dispatch is one way through"),
]


def copy_of_the_package(folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "flashtune", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder / "flashtune"


def test_every_contract_of_the_layers_holds() -> None:
    linted = lint_imports(ROOT)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Message for each broken contract of a package in which all of PLANTED stands."""
    folder = tmp_path_factory.mktemp("planted")
    package = copy_of_the_package(folder)
    for index, (room, imported, _) in enumerate(PLANTED):
        path = package / room if room.endswith(".py") else package / room / f"planted_{index}.py"
        with path.open("a") as file:
            file.write(f"\nimport {imported}\n")
    linted = lint_imports(folder)
    assert linted.returncode == 1, linted.stdout + linted.stderr
    sections = re.split(r"^(.+)\n-+\n", linted.stdout.partition("Broken contracts")[2], flags=re.MULTILINE)
    # Long lines are wrapped.
    return dict(zip(sections[1::2], (" ".join(section.split()) for section in sections[2::2]), strict=True))


@pytest.mark.parametrize(("index", "contract"), [(index, contract) for index, (*_, contract) in enumerate(PLANTED)])
def test_a_planted_import_breaks_its_contract(broken: dict[str, str], index: int, contract: str) -> None:
    room, imported, _ = PLANTED[index]
    module = room.removesuffix(".py") if room.endswith(".py") else f"{room}/planted_{index}"
    assert f"flashtune.{module.replace('/', '.')} -> {imported}" in broken[contract]


def test_a_new_room_must_be_given_a_layer(tmp_path: Path) -> None:
    package = copy_of_the_package(tmp_path)
    (package / "attic").mkdir()
    (package / "attic" / "__init__.py").write_text('"""A room that no layer names."""\n')
    linted = lint_imports(tmp_path)
    assert linted.returncode == 1
    assert "attic" in linted.stdout


def imported_roots(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or "").split(".")[0])
    return found


def test_shipped_kernels_import_only_torch_triton_and_names_for_tuples() -> None:
    kernels = [path for path in (PACKAGE / "kernels_generated").rglob("*.py") if path.name != "__init__.py"]
    assert kernels
    strangers = {path.name: imported_roots(path) - {"torch", "triton", "typing"} for path in kernels}
    assert not {name: roots for name, roots in strangers.items() if roots}


def test_importing_dispatch_loads_no_jinja_no_optuna_and_no_tuner() -> None:
    code = """
import sys
import torch, triton
before = set(sys.modules)
import flashtune.dispatch
new = {name.split(".")[0] for name in set(sys.modules) - before} | {n for n in sys.modules if n.startswith("flashtune.")}
print(" ".join(sorted(new & {"jinja2", "optuna", "alembic", "click", "rich", "pebble", "flashtune.tuner", "flashtune.cli"})))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
