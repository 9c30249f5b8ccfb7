"""Fixtures that every test shares: no user's directory is touched, and golden files change only on request."""

import contextlib
import difflib
import gc
import importlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

GOLDEN = Path(__file__).parent / "golden"

# Set before anything is imported or collected, so that child processes and module-level code see them too.
_SCRATCH = Path(tempfile.mkdtemp(prefix="flashtune-tests-"))
os.environ["FLASHTUNE_CACHE"] = str(_SCRATCH / "cache")
os.environ["FLASHTUNE_OWN_DB"] = str(_SCRATCH / "overlay.sqlite")
os.environ.pop("FLASHTUNE_DB", None)
# Compiled without lines of the source, as searches do and what ships is: a sixth of the time less.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
_NUMBERS = itertools.count()
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers are as many as the cores: more threads in each would only get into each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Modules and tests stay: the collector's repeated passes over them take a quarter of the time that collecting tests takes.
gc.disable()

# No limits of time, since a busy machine is no failure; in CI the same examples every time, so that red means a change.
settings.register_profile("flashtune", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI")))
settings.load_profile("flashtune")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files under tests/golden anew instead of comparing")
    parser.addoption("--newest", action="store_true", help="also the tests that only `make newest` runs")
    parser.addoption("--table", metavar="FILE", help="write how many tests of each file passed and failed, and who served their calls")


def pytest_configure(config: pytest.Config) -> None:
    if (table := config.getoption("--table")) and not hasattr(config, "workerinput"):
        from served_table import ServedTable

        config.pluginmanager.register(ServedTable(Path(table)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In a fresh clone no bytecode is kept yet: of all modules, each worker imports a share first, and finds the others' of the rest."""
    count, name = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    if count > 1 and [Path(one).resolve() for one in session.config.args] == [GOLDEN.parent]:
        for path in sorted(GOLDEN.parent.glob("*/test_*.py"))[int(name.removeprefix("gw")) :: count]:
            # What a module raises is told where it is collected.
            with contextlib.suppress(Exception, pytest.skip.Exception):
                importlib.import_module(path.stem)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--newest"):
        left_out = [item for item in items if item.get_closest_marker("newest")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    gc.freeze()
    # Short-lived tuples and frames of 700 at a time (Python's default) took a twentieth of the time of tests.
    gc.set_threshold(20_000, 50, 100)
    gc.enable()


def pytest_unconfigure() -> None:
    shutil.rmtree(_SCRATCH, ignore_errors=True)


@pytest.fixture(autouse=True)
def own_database(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of this test's own overlay database, which doesn't exist yet; no two tests share one."""
    # In a folder of all: thousands of tests need none of their own, which takes pytest 4 ms.
    path = _SCRATCH / f"overlay{next(_NUMBERS)}.sqlite"
    monkeypatch.setenv("FLASHTUNE_OWN_DB", str(path))
    return path


@pytest.fixture(autouse=True)
def own_compilations() -> Iterator[None]:
    """No test meets what another one compiled: to say why it compiles anew, PyTorch reads the earlier call's captured tensors in the new
    function, and fails where that has none."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A tuned database with one record that can be served, in a folder of its own."""
    import db_samples as samples

    from flashtune.core.gpu.target import find_target
    from flashtune.templates import family

    config = family("flash_fwd").default(samples.PROBLEM.spec(), find_target("h200"))
    return samples.write(tmp_path / "in" / "a.sqlite", (samples.result(samples.outcome("aaaa000000000001", config=config)),))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` equals tests/golden/<name>, which `pytest --update-golden` (make golden) writes anew."""
    updating: bool = request.config.getoption("--update-golden")

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if updating:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        if not path.is_file():
            pytest.fail(f"tests/golden/{name} doesn't exist: run `make golden`, and read what it wrote before you commit it")
        expected = path.read_text()
        if text != expected:
            lines = difflib.unified_diff(expected.splitlines(), text.splitlines(), f"golden/{name}", "now", lineterm="")
            pytest.fail("\n".join(["differs from the golden file; if that is meant, run `make golden` and review the diff", *lines]))

    return compare


@pytest.fixture
def anew() -> Iterator[None]:
    """Records are read and choices made anew, and no call is recorded yet; nothing of it stays."""
    from flashtune import dispatch
    from flashtune.dispatch.state.recorded import CALLS

    def forget() -> None:
        dispatch.reload()
        CALLS.forget()

    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Matrices of a few rows only wait for each other's threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def planted() -> Iterator[None]:
    """The planted families' templates can be rendered."""
    # Only here: most tests need nothing of the tuner.
    from jinja2 import ChoiceLoader
    from planted import planted_templates

    from flashtune.templates import rendering

    environment = rendering.environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "loader", ChoiceLoader([planted_templates(), environment.loader]))
        yield
    rendering.sources_hash.cache_clear()
    rendering.text_hash.cache_clear()


@pytest.fixture(scope="module")
def quick(planted: None) -> Iterator[None]:
    """The planted families, with stand-ins for the compiler, the interpreter and their processes, for tests of what is kept of a search."""
    from planted import HereAndNow
    from stand_ins import quick_compile, quick_interpret

    from flashtune.tuner import searching
    from flashtune.tuner.children import tasks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "compile_candidate", quick_compile)
        patch.setattr(tasks, "interpret_candidate", quick_interpret)
        patch.setattr(searching, "Workers", HereAndNow)
        yield
