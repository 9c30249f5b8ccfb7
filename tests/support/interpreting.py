"""Work under Triton's interpreter, in processes of its own: it is switched on where Triton is imported.

They are forked off the server that `Workers` forks off, which has imported torch, so that none of them does it anew.
"""

import contextlib
import functools
import importlib
import io
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    mine, its = context.Pipe(duplex=False)
    environment = {**os.environ, "TRITON_INTERPRET": "1", **environment}
    child = context.Process(target=_run, args=(environment, its, work, arguments), daemon=True)
    child.start()
    its.close()
    try:
        found, failure = mine.recv()
    except EOFError:
        found, failure = "", "its process died"
    child.join()
    assert not failure, f"{arguments} (exit code {child.exitcode}): {failure}"
    return found


def _run(environment: Mapping[str, str], answer: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """In the child."""
    # A search's workers, in this process before, may have started the fork server with Triton imported, compiler and all.
    from flashtune.tuner.children.start import forget_triton

    forget_triton()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    try:
        answer.send((work(*arguments), ""))
    except BaseException:
        answer.send(("", traceback.format_exc()))


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
