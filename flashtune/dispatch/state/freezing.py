"""`freeze`: a plan of what ran this process's calls, which other processes then run, too."""

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

    The plan has what ran each kind of call, forward and backward: a kernel by template, config and the SHA-256 of its text, another
    library, or PyTorch's own choice. If a fallback kernel ran, the plan has that. It also has the versions of all that decides. Calls are
    those under this thread's layers (`use`): dense, packed, paged and with functions.

    Args:
        path: the file, which is replaced.

    Returns:
        The SHA-256 of the file's text.

    Raises:
        InputError: if no call ran yet whose choice a plan can fix.
        EnvironmentProblem: if the file can't be written.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a plan is named by its path, not {path!r}")
    entries = context.current().met.entries()
    if not entries:
        raise InputError("no call of this process can be frozen: run the model first, on the job's GPU")
    return plans.write(Path(os.path.expanduser(path)), versions(entries), entries)
