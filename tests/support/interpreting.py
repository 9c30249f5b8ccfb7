"""Work under Triton's interpreter, in processes of its own: it is switched on where Triton is imported.

They are forked off a server that has imported torch, its compiler and Triton, so that none of them does it anew.
"""

import contextlib
import functools
import importlib
import io
import pickle
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from forked import started

from flashtune.tuner.children.interpreter import quicken

ROOT = Path(__file__).resolve().parents[2]


def interpreted(module: str, *arguments: Any, quick: bool = True) -> Any:
    """Result of `main` of a module of this folder; fails where it raises. `quick` is False for Triton's interpreter as it is."""
    return _in_a_child({}, _result if quick else _result_slowly, module, arguments)


def output_of_tests(*words: str, **environment: str) -> str:
    """Output of pytest with these words; fails where a test does."""
    return str(_in_a_child(environment, _output, words))


def failures_of(
    scope: Mapping[str, Any], of_case: Callable[[str], None], names: Sequence[str], context: Callable[[], AbstractContextManager[None]]
) -> dict[str, str]:
    """Failures of the named cases, or without names of a module's other checks, its functions `of_...`; empty where they pass."""
    checks = {name: functools.partial(of_case, name) for name in names}
    if not names:
        checks = {name: check for name, check in dict(scope).items() if name.startswith("of_") and check is not of_case}
    return {name: _failure(check, context) for name, check in checks.items()}


def _failure(check: Callable[[], object], context: Callable[[], AbstractContextManager[None]]) -> str:
    """Empty where a check passes, else its failure."""
    try:
        with context():
            check()
    except Exception:
        return traceback.format_exc()
    return ""


def _in_a_child(environment: Mapping[str, str], work: Callable[..., Any], *arguments: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "work"
        place.write_bytes(pickle.dumps((work, arguments)))
        code = "import sys, interpreting; interpreting.answer(sys.argv[1])"
        ended = started(code, place, folder=ROOT, environment=environment, interpret=True).ended()
        assert ended.returncode == 0, f"{arguments} (exit code {ended.returncode}): {ended.stderr[-4000:]}"
        return pickle.loads(place.read_bytes())


def answer(place: str) -> None:
    """In the child: replaces the work that lies there by its result."""
    work, arguments = pickle.loads(Path(place).read_bytes())
    Path(place).write_bytes(pickle.dumps(work(*arguments)))


def _result(module: str, arguments: tuple[Any, ...]) -> Any:
    quicken()
    return _result_slowly(module, arguments)


def _result_slowly(module: str, arguments: tuple[Any, ...]) -> Any:
    return importlib.import_module(module).main(*arguments)


def _output(words: list[str]) -> str:
    import pytest

    quicken()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        ended = pytest.main(list(words))
    assert ended == 0, output.getvalue()[-4000:]
    return output.getvalue()
