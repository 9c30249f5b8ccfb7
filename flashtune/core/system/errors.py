"""Errors a user can act on: one sentence with the cause, the offending value and the remedy."""

import difflib
import errno
import os
from collections.abc import Mapping

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class FlashtuneError(Exception):
    """Base of every error that flashtune raises on purpose; the CLI prints it without a traceback.

    `exit_code` is the command line's exit status for it.
    """

    exit_code = 1


class InputError(FlashtuneError, ValueError, RuntimeError):
    """An argument is invalid or out of range (also a `ValueError`, and a `RuntimeError` as torch raises it)."""

    exit_code = 2


class InputTypeError(FlashtuneError, TypeError, RuntimeError):
    """An argument has the wrong type (also a `TypeError`, and a `RuntimeError` as torch raises it for dtypes)."""

    exit_code = 2


class DatabaseError(FlashtuneError):
    """A tuned database is damaged, foreign, newer than this flashtune, or can't be written."""

    exit_code = 3


class EnvironmentProblem(FlashtuneError):
    """This machine lacks something the request needs: a GPU, a compiler, disk space, a permission."""

    exit_code = 4


class NoKernelFound(FlashtuneError):
    """A search ended without one correct candidate, or a database has no record for the request."""

    exit_code = 5


def environment_fault(error: BaseException) -> str | None:
    """Reason why this machine can't compile kernels, where no kernel is to blame; None for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return os.strerror(cause.errno) if cause.filename is not None else cause.strerror
        cause = cause.__cause__
    # Triton quotes the errors of its assembler, which writes files, too.
    return next((said for code in _OF_DISKS if (said := os.strerror(code)) in str(error)), None)


def first_line(error: BaseException) -> str:
    """Type and first informative line of an exception, at most 300 characters; compilers append pages of output.

    For Triton's own errors, which quote a kernel from its start, the line comes from the error that caused them. A line that ends in a
    colon has the next one behind it.
    """
    while type(error).__name__ == "CompilationError" and error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return f"{type(error).__name__}: {said or 'no message'}"[:300]


def did_you_mean(name: str, known: Mapping[str, str], *, cutoff: float) -> str:
    """`did you mean a100, h200?`: the values of the known names nearest to `name`; empty where none is near."""
    near = dict.fromkeys(known[match] for match in difflib.get_close_matches(name, known, n=8, cutoff=cutoff))
    return f"did you mean {', '.join(list(near)[:3])}?" if near else ""
