"""Scripts under Triton's interpreter, in processes of their own: it is switched on where Triton is imported.

They are forked off the server that `Workers` forks off, which has imported torch, so that none of them does it anew.
"""

import contextlib
import functools
import inspect
import io
import json
import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


def interpreted(script: str, *words: str) -> Any:
    """The JSON that `script` of this folder prints."""
    return json.loads(printed(script, *words))


def printed(script: str, *words: str, **environment: str) -> str:
    """Output of `script` of this folder (`-m NAME`: a module), run with these words; fails where it ends with an error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    mine, its = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=({**os.environ, "TRITON_INTERPRET": "1", **environment}, script, words, its), daemon=True)
    child.start()
    its.close()
    try:
        text, failure = mine.recv()
    except EOFError:
        text, failure = "", "its process died"
    child.join()
    assert not failure, f"{script} {' '.join(words)} (exit code {child.exitcode}): {failure}\n{text[-4000:]}"
    return str(text)


def _run(environment: Mapping[str, str], script: str, words: tuple[str, ...], answer: Connection) -> None:
    """In the child."""
    # A search's workers, in this process before, may have started the fork server with Triton imported, compiler and all.
    from flashtune.tuner.children.start import forget_triton

    forget_triton()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(TESTS.parent)
    sys.argv = [script, *words]
    output, complaints, failure = io.StringIO(), io.StringIO(), ""
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(complaints):
        try:
            quicken()
            if script.startswith("-m "):
                runpy.run_module(script.removeprefix("-m "), run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(TESTS / script), run_name="__main__")
        except SystemExit as ended:
            failure = f"exit code {ended.code}" if ended.code else ""
        except BaseException:
            failure = traceback.format_exc()
    answer.send((output.getvalue(), failure and complaints.getvalue()[-2000:] + failure))


def quicken() -> None:
    """Spare Triton 3.6's interpreter what it finds out anew at each call: the functions of the language, and numpy's types for its own."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtype_of, builtins = interpreter._get_np_dtype, functools.cache(_builtins)
    scalar_of = functools.cache(dtype_of)
    interpreter._get_np_dtype = lambda t: dtype_of(t) if isinstance(t.scalar, tl.pointer_type) else scalar_of(t.scalar)

    def patch(package: Any, builder: Any, scope: Any) -> None:
        for name in builtins(package):
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch


def _builtins(package: Any) -> list[str]:
    """The names of a package's functions that the interpreter replaces, asked for while they are Triton's own."""
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]
