"""Loading of a choice's kernel, its module and machine code, and the record of kernels that failed."""

import errno
import functools
import os
from collections.abc import Callable
from typing import TypeVar

import torch

from flashtune.core.binaries import Manifest
from flashtune.core.config import Variant
from flashtune.core.errors import FlashtuneError
from flashtune.core.launching import LoadedKernel
from flashtune.core.target import Target
from flashtune.dispatch.choose import Choice
from flashtune.dispatch.launch import devices, kernels
from flashtune.dispatch.launch.driver import NO_RESOURCES, DriverError
from flashtune.dispatch.resolve.memo import Memo
from flashtune.templates.family import Family

_Found = TypeVar("_Found")

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def variant_of(choice: Choice, family: Family) -> Variant:
    """Variant of a choice of this family."""
    assert choice.config is not None, "a choice with a family has a config"
    return kernels.variant(family, choice.spec, choice.config)


def code_of(
    memo: Memo, family: Family, variant: Variant, device: torch.device, target: Target
) -> tuple[LoadedKernel | None, Manifest | None, Callable[[], LoadedKernel] | None, str]:
    """Module of a kernel, its machine code, a loader of the whole kernel where the module is host code alone, and a reason.

    The module is None, and the reason says why, where it can't be loaded.
    """
    whole = functools.partial(kernels.load, family, variant)
    manifest, host = memo.machine_code(family, variant, target) if device.type == "cuda" and torch.version.cuda else (None, None)
    module, why = _loaded(memo, variant, device, whole if host is None else host)
    return module, manifest, None if host is None else whole, why


def _loaded(
    memo: Memo, variant: Variant, device: torch.device, load: Callable[[], LoadedKernel] | LoadedKernel
) -> tuple[LoadedKernel | None, str]:
    """Module of a kernel (`load` may be one already), or None and the reason why it can't be loaded."""
    why = memo.broken.get((variant.id, str(device))) or memo.faults.get((variant.id, str(device)))
    if why is not None:
        return None, why
    try:
        return load if isinstance(load, LoadedKernel) else load(), ""
    except (OSError, ImportError) as error:
        if not devices.TRITON:
            return None, "Triton is not installed, and no machine code was shipped for it"
        if (fault := environment_fault(error)) is not None:
            return None, memo.meet_fault((variant.id, str(device)), fault)
        return None, report_failure(memo, variant, device, error)


def tried(memo: Memo, variant: Variant | None, device: torch.device, build: Callable[[], None], run: Callable[[], _Found]) -> _Found | None:
    """Result of a plan's first call, built and run; None where its kernel failed, which is recorded and warned of.

    Also None where the machine can't compile it. Without a `variant`, for a pinned kernel or PyTorch's own, all exceptions propagate.
    """
    built = False
    try:
        build()
        built = True
        return run()
    except Exception as error:
        if variant is not None and (fault := environment_fault(error)) is not None:
            memo.meet_fault((variant.id, str(device)), fault)
            return None
        if variant is None or not (_uncompilable(error) if built else _unbuildable(error)):
            raise
        report_failure(memo, variant, device, error)
        return None


def report_failure(memo: Memo, variant: Variant, device: torch.device, error: BaseException) -> str:
    """Record that a kernel failed on a device, warn once, and return the reason in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    memo.broken[variant.id, str(device)] = why
    memo.warn_once(f"flashtune: {variant.template} with {variant.config.label()} failed on {device} and is skipped from now on: {why}")
    return why


def environment_fault(error: BaseException) -> str | None:
    """Reason why this machine can't compile kernels, where no kernel is to blame; None for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return os.strerror(cause.errno) if cause.filename is not None else cause.strerror
        cause = cause.__cause__
    # Triton quotes the errors of its assembler, which writes files, too.
    return next((said for code in _OF_DISKS if (said := os.strerror(code)) in str(error)), None)


def _unbuildable(error: Exception) -> bool:
    """True where loading or compiling failed because of the kernel: compilers fail variously, but a lost or full GPU is no fault of it."""
    if isinstance(error, DriverError):
        return error.code in NO_RESOURCES
    return not isinstance(error, (FlashtuneError, torch.OutOfMemoryError)) and not str(error).startswith(("CUDA error", "HIP error"))


def _uncompilable(error: Exception) -> bool:
    """True where a launch by Triton failed because the kernel doesn't compile or fit; other errors aren't the kernel's."""
    return type(error).__module__.startswith("triton.") or str(error).startswith("PassManager::run failed")
