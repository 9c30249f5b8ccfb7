"""`freeze`: a plan of what served this process's calls, for other processes to serve by."""

import os
from pathlib import Path

from flashtune.core.records import plans
from flashtune.core.system.errors import InputError
from flashtune.dispatch.state import context
from flashtune.dispatch.state.frozen import versions


def freeze(path: str | Path) -> str:
    """Plan of what ran the calls of this process so far, written to a file; `use(plan=...)` holds other processes to it.

        dispatch.freeze("plan.json")                  # after a run that makes every shape
        dispatch.use(plan="plan.json", everywhere=True)  # on every rank

    It holds the kernels of each kind of calls by template, config and the SHA-256 of their text; a kernel whose softmax was mispredicted is
    held as its fallback kernel. It also holds providers, PyTorch's own choice where that ran, and the versions of all that decides. Kinds
    of calls are those of this thread's layers (`use`): dense, packed, paged and with functions, forwards and backwards.

    Args:
        path: the file, which is replaced.

    Returns:
        The SHA-256 of the file's text.

    Raises:
        InputError: where no call ran yet that records decide on.
        EnvironmentProblem: where the file can't be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a plan is named by its path, not {path!r}")
    entries = context.current().met.entries()
    if not entries:
        raise InputError("no call was served yet that a plan decides on: run the model first, on the GPU that will serve")
    return plans.write(Path(os.path.expanduser(path)), versions(entries), entries)
