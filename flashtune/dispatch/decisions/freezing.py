"""`freeze`: a plan of what served this process's calls, for other processes to serve by."""

import os
from pathlib import Path

from flashtune.core.records import plans
from flashtune.core.system.errors import InputError
from flashtune.dispatch.decisions import context
from flashtune.dispatch.decisions.frozen import versions


def freeze(path: str | Path) -> str:
    """Plan of what served the calls of this process so far, written to the file at `path`, which is replaced.

        dispatch.freeze("plan.json")                  # after a run that makes every shape
        dispatch.use(plan="plan.json", everywhere=True)  # on every rank

    It holds the kernels of each kind of calls by template, config and the SHA-256 of their text, a kernel whose softmax was mispredicted as
    its fallback kernel; providers; PyTorch's own choice where that served; and the versions of all that decides. Kinds of calls are those
    of this thread's layers (`use`): dense, packed, paged and with functions, forwards and backwards.

    Returns the SHA-256 of the file's text. Raises InputError where no call was served yet that records decide on, and EnvironmentProblem
    where the file can't be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a plan is named by its path, not {path!r}")
    entries = context.current().met.entries()
    if not entries:
        raise InputError("no call was served yet that a plan decides on: run the model first, on the GPU that will serve")
    return plans.write(Path(os.path.expanduser(path)), versions(entries), entries)
