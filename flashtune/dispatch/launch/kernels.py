"""Kernel of a variant: its machine code where it is shipped or cached, else its rendered text."""

from flashtune.core.binaries import Manifest, machine_arch, source_digest
from flashtune.core.config import Config, KernelSpec, Variant
from flashtune.core.folders import let_triton_write
from flashtune.core.launching import LoadedKernel
from flashtune.core.shipped_kernels import PACKAGE, shipped_index, shipped_manifest
from flashtune.templates.family import Family
from flashtune.templates.loading import load_kernel, loaded


def variant(family: Family, spec: KernelSpec, config: Config) -> Variant:
    """Variant of these on this installation; raises InputError where the config is outside the declared space."""
    family.validate(config)
    return Variant(template=family.name, spec=spec, config=config)


def compiled(family: Family, spec: KernelSpec, config: Config, arch: str) -> bool:
    """True where machine code of a variant for an architecture (Target.arch) is shipped or in the user's cache; nothing is loaded."""
    chosen = variant(family, spec, config).id
    if shipped_index(PACKAGE).manifest_of(chosen, arch) is not None:
        return True
    from flashtune.core import kernel_cache

    return arch.isdigit() and kernel_cache.find(chosen, machine_arch(int(arch))) is not None


def load(family: Family, chosen: Variant) -> LoadedKernel:
    """Kernel of this variant, with the module that Triton compiles."""
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
    from flashtune.core import kernel_cache

    found = kernel_cache.find(chosen.id, machine_arch(int(arch)))
    if found is None:
        return None
    from flashtune.templates import family, rendering

    kind = family(chosen.template)
    # Launches by host code in a text aren't planned. An id doesn't name a text: an earlier version's code takes other arguments.
    current = kind.host is not None and found.source_sha256 == source_digest(rendering.render(kind, chosen))
    return found if current else None


def host_code(family: Family, chosen: Variant) -> LoadedKernel:
    """Host side of a variant with machine code."""
    return loaded(family, chosen.spec, chosen.config)
