"""Kernels: machine code where it is shipped or cached, else rendered text; and those that failed here."""

import functools
import gzip
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Timer
from typing import TypeVar

import torch

from flashtune.core.code import cache as kernel_cache
from flashtune.core.code.binaries import Binary, Manifest, machine_arch, source_digest
from flashtune.core.code.launching import LoadedKernel
from flashtune.core.code.shipped import PACKAGE, distribution, lacks_archive, shipped_index, shipped_manifest
from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, KernelSpec, Variant
from flashtune.core.pytorch import devices
from flashtune.core.system.collector import held_off
from flashtune.core.system.errors import EnvironmentProblem, FlashtuneError, environment_fault
from flashtune.core.system.folders import let_triton_write
from flashtune.dispatch.plans import driver
from flashtune.dispatch.plans.driver import NO_RESOURCES, DriverError
from flashtune.dispatch.plans.launch import Code
from flashtune.templates.family import Family
from flashtune.templates.loading import load_kernel, loaded

RETRY_S = 60.0
"""Seconds after a fault of this machine, as a full disk, until calls affected by it are chosen anew."""

_Found = TypeVar("_Found")


def variant(family: Family, spec: KernelSpec, config: Config) -> Variant:
    """Variant of these on this installation; raises InputError where the config is outside the declared space."""
    family.validate(config)
    return Variant(template=family.name, spec=spec, config=config)


def has_code(family: Family, spec: KernelSpec, config: Config, arch: str) -> bool:
    """True where machine code of a variant for an architecture (Target.arch) is shipped or in the user's cache; nothing is loaded."""
    chosen = variant(family, spec, config).id
    if shipped_index(PACKAGE).manifest_of(chosen, arch) is not None:
        return True
    return arch.isdigit() and kernel_cache.find(chosen, machine_arch(int(arch))) is not None


def load(family: Family, chosen: Variant) -> LoadedKernel:
    """Kernel of this variant, with the module that Triton compiles; raises ImportError where the installed one can't."""
    if (why := family.uncompilable(chosen.spec, chosen.config)) is not None:
        raise ImportError(why)
    let_triton_write()
    from flashtune.templates import rendering

    return load_kernel(rendering.render(family, chosen), f"{chosen.template}_{chosen.id}")


def manifest(chosen: Variant, arch: str) -> Manifest | None:
    """Machine code of this variant for an architecture (Target.arch): shipped, or of the user's own searches; None where there is none
    of the text that the installed template renders.

    Raises EnvironmentProblem where the package's files don't match its index.
    """
    shipped = shipped_manifest(PACKAGE, chosen.id, arch)
    if shipped is not None or not arch.isdigit():
        return shipped
    found = kernel_cache.find(chosen.id, machine_arch(int(arch)))
    if found is None:
        return None
    from flashtune.templates import family, rendering

    kind = family(chosen.template)
    # Launches by host code in a text aren't planned. An id doesn't name a text: an earlier version's code takes other arguments.
    current = kind.host is not None and found.source_sha256 == source_digest(rendering.render(kind, chosen))
    return found if current else None


def uncompiled(chosen: Variant, arch: str) -> str | None:
    """Reason why this variant has no machine code here for an architecture; None where it has."""
    try:
        if manifest(chosen, arch) is not None:
            return None
        if lacks_archive(PACKAGE, chosen.id, arch):
            return f"its machine code is in {distribution(arch)}, which isn't installed"
    except EnvironmentProblem as error:
        return str(error)
    return "there is no machine code of it"


def host_code(family: Family, chosen: Variant) -> LoadedKernel:
    """Host side of a variant with machine code."""
    return loaded(family, chosen.spec, chosen.config)


def _kept_binaries(
    family: Family, variant: Variant, manifest: Manifest | None, new: Sequence[Binary], code_of: Callable[[Binary], bytes]
) -> Manifest:
    """A variant's manifest with new binaries, tried first, as it was written to the user's cache with their code."""
    from flashtune.templates import rendering

    text, digests = rendering.render(family, variant), [one.sha256 for one in new]
    binaries = (*reversed(new), *(one for one in (manifest.binaries if manifest else ()) if one.sha256 not in digests))
    if manifest is None:
        manifest = Manifest(variant_id=variant.id, binaries=binaries, source_sha256=source_digest(text))
    manifest = replace(manifest, binaries=binaries)
    # What can't be kept is compiled again by the next process.
    with suppress(EnvironmentProblem):
        return kept(text, manifest, {one.sha256: code_of(one) for one in binaries})
    return manifest


def kept(text: str, manifest: Manifest, codes: Mapping[str, bytes]) -> Manifest:
    """The manifest as it was written to the user's cache, its code given by digest; raises EnvironmentProblem where it can't be written."""
    named = tuple(replace(one, file=f"{one.kernel}_{one.sha256[:16]}.cubin.gz") for one in manifest.binaries)
    written = replace(manifest, binaries=named, archive=None)
    folder = kernel_cache.keep(text, written, {one.file: gzip.compress(codes[one.sha256], mtime=0) for one in named})
    return replace(written, folder=folder)


def text_digest(family: Family, variant: Variant) -> str:
    """SHA-256 of a kernel's text."""
    from flashtune.templates import rendering

    return source_digest(rendering.render(family, variant))


class Kernels:
    """Loaded kernels of a dispatch state, and those that failed on a device: `broken` for good, `faults` by this machine's fault."""

    def __init__(self, warn: Callable[[str], None], forget: Callable[[], None]) -> None:
        """`warn` issues a message once, `forget` drops what was chosen while there were faults."""
        self.broken: dict[tuple[str, str], str] = {}
        self.faults: dict[tuple[str, str], str] = {}
        self._warn, self._forget = warn, forget
        self._code: dict[tuple[str, str], Code] = {}

    def failure(self, variant: Variant, device: torch.device) -> str | None:
        """Reason why a kernel isn't tried on a device, where it failed before."""
        if not (self.broken or self.faults):
            return None
        kernel = (variant.id, str(device))
        return self.broken.get(kernel) or self.faults.get(kernel)

    def code(self, family: Family, variant: Variant, device: torch.device, target: Target, *, keeps: bool = False) -> Code | str:
        """Code of a kernel, or the reason why it can't be loaded; with `keeps` the user's cache gets what Triton compiles of it."""
        if (why := self.failure(variant, device)) is not None:
            return why
        name = (variant.id, target.arch)
        if name not in self._code:
            whole = functools.partial(load, family, variant)
            shipped = self.machine_code(family, variant, target) if driver.driven(device) else None
            try:
                module, described = shipped or (whole(), None)
                keep = functools.partial(_kept_binaries, family, variant) if keeps else None
                self._code[name] = Code(module, described, whole if shipped else None, self._warn, keep)
            except (OSError, ImportError) as error:
                if not devices.TRITON:
                    return "Triton is not installed, and no machine code was shipped for it"
                return self._meet(variant, device, error)
        return self._code[name]

    def machine_code(self, family: Family, variant: Variant, target: Target) -> tuple[LoadedKernel, Manifest] | None:
        """Host code of a variant and its machine code; None where there is none, or files are damaged, which is warned of: Triton then
        compiles the text."""
        try:
            with held_off():
                found = manifest(variant, target.arch)
                return None if found is None else (host_code(family, variant), found)
        except (EnvironmentProblem, OSError) as error:
            self._warn(f"flashtune: {error}; until then Triton compiles {variant.template} {variant.id}")
            return None

    def tried(self, variant: Variant | None, device: torch.device, build: Callable[[], None], run: Callable[[], _Found]) -> _Found | None:
        """Result of a plan's first call, built and run; None where its kernel failed, which is recorded and warned of.

        Also None where the machine can't compile it. Without a `variant`, for a pinned kernel or PyTorch's own, all exceptions propagate.
        """
        built = False
        try:
            build()
            built = True
            return run()
        except Exception as error:
            kernels_fault = _uncompilable(error) if built else _unbuildable(error)
            if variant is None or not (kernels_fault or environment_fault(error) is not None):
                raise
            self._meet(variant, device, error)
            return None

    def _meet(self, variant: Variant, device: torch.device, error: BaseException) -> str:
        """Record that a kernel failed on a device, or that this machine can't compile, warn once, and return the reason in a line."""
        kernel = (variant.id, str(device))
        if (fault := environment_fault(error)) is not None:
            if not self.faults:
                later = Timer(RETRY_S, self.retry)
                later.daemon = True
                later.start()
            self.faults[kernel] = fault
            remedy = "free some space, or point TRITON_CACHE_DIR and TMPDIR at folders that can be written"
            self._warn(
                f"flashtune: no kernel can be compiled here ({fault}): {remedy}; until then others run its calls, and it is tried again"
            )
            return fault
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
        self.broken[kernel] = why
        self._warn(f"flashtune: {variant.template} with {variant.config.label()} failed on {device} and is skipped from now on: {why}")
        return why

    def retry(self) -> None:
        """Drop the faults of this machine, and all plans chosen under them."""
        self.faults.clear()
        self._forget()


def _unbuildable(error: Exception) -> bool:
    """True where loading or compiling failed because of the kernel: compilers fail variously, but a lost or full GPU is no fault of it."""
    if isinstance(error, DriverError):
        return error.code in NO_RESOURCES
    return not isinstance(error, (FlashtuneError, torch.OutOfMemoryError)) and not str(error).startswith(("CUDA error", "HIP error"))


def _uncompilable(error: Exception) -> bool:
    """True where a launch by Triton failed because the kernel doesn't compile or fit; other errors aren't the kernel's."""
    return type(error).__module__.startswith("triton.") or str(error).startswith("PassManager::run failed")
