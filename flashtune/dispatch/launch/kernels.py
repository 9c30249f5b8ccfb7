"""Variant in, module out: host code from the archive of shipped kernels where that has it, else rendered and loaded."""

from dataclasses import replace
from pathlib import PurePosixPath
from types import ModuleType

from flashtune.core import modules
from flashtune.core.binaries import Manifest, machine_arch, source_digest
from flashtune.core.config import Config, KernelSpec, Variant
from flashtune.core.dtypes import OTHER_16_BITS
from flashtune.core.folders import let_triton_write
from flashtune.core.shipped_kernels import PACKAGE, shipped_index, shipped_manifest
from flashtune.dispatch.launch.hostcode import load_host_code
from flashtune.templates.family import Family


def variant(family: Family, spec: KernelSpec, config: Config, known_hash: str | None = None) -> Variant:
    """The variant of these on this installation; raises InputError where the config is outside the declared space.

    `known_hash` is the template's hash in the record that served. Where exactly that variant was shipped, neither the template nor Jinja
    needs to be read.
    """
    family.validate(config)
    if (shipped := _shipped(family, spec, config, known_hash)) is not None:
        return shipped
    from flashtune.templates import rendering

    return rendering.variant_of(family, spec, config)


def may_be_compiled(family: Family, spec: KernelSpec, config: Config, known_hash: str | None, arch: str) -> bool:
    """Whether there may be machine code of a variant for an architecture (Target.arch), as far as that can be told without its name, for
    which its text has to be rendered: nothing is in the cache of who never searched."""
    if _shipped(family, spec, config, known_hash) is not None or _sibling_shipped(family, spec, config, known_hash, arch):
        return True
    from flashtune.core import kernel_cache

    return arch.isdigit() and kernel_cache.holds(machine_arch(int(arch)))


def load(family: Family, chosen: Variant) -> ModuleType:
    """The module with `accepts` and `launch` (see flashtune.templates.family) of this variant."""
    let_triton_write()
    from flashtune.templates import rendering

    return modules.load_source(rendering.render(family, chosen), f"{chosen.template}_{chosen.id}")


def manifest(chosen: Variant, arch: str) -> Manifest | None:
    """The machine code of this variant for an architecture (Target.arch): shipped, or of the user's own searches; None where there is none.

    Raises EnvironmentProblem where the package's files aren't those that its index names.
    """
    shipped = shipped_manifest(PACKAGE, chosen.id, arch)
    if shipped is not None or not arch.isdigit():
        return shipped
    from flashtune.core import kernel_cache

    return kernel_cache.find(chosen.id, machine_arch(int(arch)))


def host_code(family: Family, chosen: Variant, machine_code: Manifest) -> ModuleType | None:
    """The host functions of a variant whose machine code is at hand, loaded without Triton: from beside that, else of the text that the
    installed template renders to; None where the machine code is of another text than that."""
    if machine_code.host:
        found = shipped_index(PACKAGE).find(chosen.id)
        return load_host_code(machine_code.host, f"{chosen.template}_{chosen.id}" if found is None else PurePosixPath(found.path).stem)
    from flashtune.templates import rendering

    text = rendering.render(family, chosen)
    # What a cache holds is told by its variant's id, which could be of any text.
    same = source_digest(text) == machine_code.source_sha256
    return load_host_code(text, f"{chosen.template}_{chosen.id}") if same else None


def _shipped(family: Family, spec: KernelSpec, config: Config, known_hash: str | None) -> Variant | None:
    """The variant of a template's hash where exactly that was shipped."""
    if known_hash is None:
        return None
    recorded = Variant(template=family.name, template_hash=known_hash, spec=spec, config=family.said(config))
    found = shipped_index(PACKAGE).find(recorded.id)
    return recorded if found is not None and found.template == recorded.template else None


def _sibling_shipped(family: Family, spec: KernelSpec, config: Config, known_hash: str | None, arch: str) -> bool:
    """Whether a kernel of the record's hash was shipped for the other 16-bit type together with its sibling for this spec's."""
    other = OTHER_16_BITS.get(spec.dtype)
    shipped = None if other is None else _shipped(family, replace(spec, dtype=other), config, known_hash)
    found = None if shipped is None else shipped_index(PACKAGE).find(shipped.id, arch)
    return found is not None and found.arch == arch and found.sibling_manifest is not None
