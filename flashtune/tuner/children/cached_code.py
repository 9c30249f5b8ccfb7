"""Cached machine code that saves a search the compiler, put where Triton's JIT looks for compiled kernels.

A trial then loads, checks and times it like any other. It comes from the package or the user's own cache, for exactly this text and Triton
version. The layout of Triton's disk cache is mirrored from triton/compiler/compiler.py of 3.6; other versions compile.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flashtune.core import kernel_cache
from flashtune.core.binaries import Binary, Manifest, machine_arch, source_digest
from flashtune.core.compiled import HOST_TYPES, signature_of
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.shipped_kernels import PACKAGE, shipped_manifest
from flashtune.core.target import Target

_MIRRORED = "3.6."
"""Versions of Triton whose disk cache has the mirrored layout."""


def machine_code_of(variant_id: str, text: str, target: Target) -> Manifest | None:
    """Cached machine code of this text, by the installed Triton, for this target; None where it must be compiled."""
    import triton

    version = str(triton.__version__)
    if target.vendor != "nvidia" or not version.startswith(_MIRRORED):
        return None
    arch, digest = machine_arch(int(target.arch)), source_digest(text)
    for found in (_shipped(variant_id, target.arch), kernel_cache.find(variant_id, arch, version)):
        if found is not None and found.source_sha256 == digest and {(b.arch, b.triton) for b in found.binaries} == {(arch, version)}:
            return found
    return None


def _shipped(variant_id: str, arch: str) -> Manifest | None:
    try:
        return shipped_manifest(PACKAGE, variant_id, arch)
    except EnvironmentProblem:
        # A damaged package is reported to its user by dispatch.
        return None


@contextmanager
def taking(kernel: Any, manifest: Manifest | None) -> Iterator[list[Binary]]:
    """Within the block Triton's JIT finds the machine code that `manifest` has of `kernel`, a function of its module; yields the binaries
    used."""
    taken: list[Binary] = []
    if manifest is None:
        yield taken
        return
    from triton.runtime import driver

    active: Any = driver.active
    # The JIT sets its compile function up on the first look at a device's cache.
    assert kernel.device_caches[active.get_current_device()]
    compile_one = kernel.compile

    def compiled(source: Any, target: Any = None, options: Any = None, **kwargs: Any) -> Any:
        binary = fitting(source, manifest.of(kernel.__name__))
        if binary is not None:
            _put(source, target, options, binary, manifest.code(binary))
            taken.append(binary)
        return compile_one(source, target=target, options=options, **kwargs)

    kernel.compile = compiled
    try:
        yield taken
    finally:
        kernel.compile = compile_one


def fitting(source: Any, binaries: Sequence[Binary]) -> Binary | None:
    """First of a kernel's binaries that this source (Triton's ASTSource) would compile to: same constants and parameters, and no further
    assumptions about the others."""
    for binary in binaries:
        try:
            parameters, conditions = signature_of(source, _maps(binary))
        except EnvironmentProblem:
            continue
        more = set(map(repr, conditions)) - set(map(repr, binary.conditions))
        missing = set(map(repr, binary.conditions)) - set(map(repr, conditions))
        if tuple(parameters) == binary.parameters and not missing and all("rule='multiple_of'" in one for one in more):
            return binary
    return None


def _maps(binary: Binary) -> list[dict[str, Any]]:
    """Metadata of a binary's tensor maps in Triton's form."""
    codes = {host: code for code, host in HOST_TYPES.items()}
    return [
        {
            "swizzle": one.swizzle,
            "elem_size": one.element_bytes,
            "elem_type": codes.get(one.element_type, one.element_type),
            "block_size": list(one.box),
            "fp4_padded": False,
        }
        for parameter in binary.parameters
        if (one := parameter.tensor_map) is not None
    ]


def _put(source: Any, target: Any, options: Mapping[str, Any], binary: Binary, code: bytes) -> None:
    """Put machine code into Triton's disk cache, as if it had been compiled there from this source."""
    from triton import __version__
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend: Any = make_backend(target)
    chosen = backend.parse_options({**options, **source.parse_options()})
    environment = get_cache_invalidating_env_vars()
    key = hashlib.sha256(get_cache_key(source, backend, chosen, env_vars=environment).encode()).hexdigest()
    cache, name = get_cache_manager(key), source.name[:150]
    described = f"{name}.json"
    if described in (cache.get_group(described) or {}):
        return
    metadata = {"hash": key, "target": target, **chosen.__dict__, **environment, "triton_version": __version__}
    metadata |= {
        "tensordesc_meta": _maps(binary),
        "num_warps": binary.threads // 32,
        "shared": binary.shared_bytes,
        "tmem_size": 0,
        "global_scratch_size": binary.global_scratch_bytes,
        "global_scratch_align": 1,
        "profile_scratch_size": binary.profile_scratch_bytes,
        "profile_scratch_align": 1,
        "name": binary.entry,
    }
    files = {f"{name}.cubin": cache.put(code, f"{name}.cubin")}
    files[described] = cache.put(json.dumps(metadata, default=vars), described, binary=False)
    cache.put_group(described, files)
