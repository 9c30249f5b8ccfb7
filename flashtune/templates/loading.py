"""Loader of kernels for launches: a rendered module joined with the host side of its family."""

from types import ModuleType

from flashtune.core.code.launches import Host
from flashtune.core.code.launching import LoadedKernel
from flashtune.core.code.modules import load_source
from flashtune.core.problems.config import Config, KernelSpec
from flashtune.templates import family
from flashtune.templates.family import Family

CONSTANT = "KERNEL"
"""Name of the constant in a rendered module with its template, spec and config."""


HELPERS = ("pack_mask", "transpose_v")
"""Kernels whose text no config changes. They are specialised to sizes, so a candidate's small checks need several of each."""


def load_kernel(text: str, stem: str) -> LoadedKernel:
    """The kernel of a rendered text; equal texts share one module within a process.

    A template outside the package may define its host side in its text: functions `accepts(q, k, v, mask)`, `counts_needed(q, k)` and
    `launches(q, k, v, out, lse, *, ...)`, which returns (kernel, grid, arguments, options) of each launch. Any other text must name a
    template of the package; raises InputError where it doesn't.
    """
    module = load_source(text, stem)
    described = getattr(module, CONSTANT, None)
    if described is None or hasattr(module, "launches"):
        return LoadedKernel(None, module)
    for name in HELPERS:
        if (kernel := getattr(module, name, None)) is not None:
            # Triton's cache tells functions apart by their line, too: each candidate would compile its own, a quarter of a second each.
            kernel.starting_line_number = 1
    return loaded(family(described["template"]), KernelSpec(**described["spec"]), Config.of(described["config"]), module)


def loaded(family: Family, spec: KernelSpec, config: Config, module: ModuleType | None = None) -> LoadedKernel:
    """A family's kernel for launches, its host side alone without a `module`."""
    return LoadedKernel(host_of(family, spec, config), module, f"{family.name} {spec.label()} {config.label()}")


def host_of(family: Family, spec: KernelSpec, config: Config) -> Host:
    """The host side of a family's kernel; the family must have one."""
    assert family.host is not None, f"{family.name} has its host side in its text"
    return family.host(spec, config)
