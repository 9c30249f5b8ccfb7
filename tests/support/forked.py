"""Python processes that needn't import torch: forked off a server that has, one for all tests of a process.

They run their code as `python -c` does, and end as it does, with exit functions and finalizers. Nothing but torch is imported before; those
of Triton's interpreter have a server of their own, which has imported Triton with the interpreter switched on, torch's compiler and this
package, too.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

INTERPRETER = (
    "torch._dynamo, torch._functorch.aot_autograd, triton.experimental.gluon, pytest, "
    "flashtune.dispatch, flashtune.templates.rendering, flashtune.tuner.verify.cases"
)
"""What the server of processes of Triton's interpreter has imported beside torch: all that most of them need."""

SERVER = """
import gc, json, os, sys
import torch

# What was imported stays: a child's collector needn't go through it, and copy its pages.
gc.freeze()
gc.set_threshold(20_000, 50, 100)
gc.enable()

def served():
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            reply = os.waitstatus_to_exitcode(os.waitpid(request["pid"], 0)[1])
        elif not (reply := os.fork()):
            return request
        print(reply, flush=True)
    os._exit(0)

request = served()
for number, name in enumerate((os.devnull, request["stdout"], request["stderr"])):
    os.dup2(file := os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.close(file)
os.environ.clear()
os.environ.update(request["environment"])
os.chdir(request["folder"])
sys.path[:], sys.argv[:] = request["path"], ["-c", *request["words"]]
exec(compile(request["code"], "<string>", "exec"))
"""


class Child:
    """A process that was started."""

    def __init__(self, request: dict[str, object], interpret: bool) -> None:
        self._place, self._interpret = tempfile.TemporaryDirectory(), interpret
        names = {name: str(Path(self._place.name) / name) for name in ("stdout", "stderr")}
        self._pid = _answer(request | names, interpret)

    def ended(self) -> "subprocess.CompletedProcess[str]":
        """Wait for its end."""
        code = _answer({"pid": self._pid}, self._interpret)
        stdout, stderr = ((Path(self._place.name) / name).read_text() for name in ("stdout", "stderr"))
        self._place.cleanup()
        return subprocess.CompletedProcess(["python", "-c"], code, stdout, stderr)


def started(
    code: str, *words: object, folder: Path | None = None, environment: Mapping[str, str] | None = None, interpret: bool = False
) -> Child:
    """A process that runs `code` with these arguments, this process's path of imports, and its environment under `environment`.

    With `interpret` Triton's interpreter is switched on in it.
    """
    environment = {**(environment or {}), **({"TRITON_INTERPRET": "1"} if interpret else {})}
    request: dict[str, object] = {"code": code, "words": list(map(str, words)), "path": sys.path}
    request |= {"folder": str(folder or Path.cwd()), "environment": {**os.environ, **environment}}
    return Child(request, interpret)


def python(code: str, *words: object, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Output of such a process; fails where it does."""
    ended = started(code, *words, folder=folder, environment=environment).ended()
    assert ended.returncode == 0, f"exit code {ended.returncode}: {ended.stderr}"
    return ended.stdout


@functools.cache
def _server(interpret: bool) -> "subprocess.Popen[str]":
    # A process with threads must not fork.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"TRITON_INTERPRET": "1"} if interpret else {})}
    code = f"import gc; gc.disable()\n{f'import {INTERPRETER}' if interpret else ''}\n{SERVER}"
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _answer(request: dict[str, object], interpret: bool) -> int:
    server = _server(interpret)
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return int(server.stdout.readline())
