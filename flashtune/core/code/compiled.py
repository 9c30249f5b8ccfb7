"""Conversion of Triton's compiled kernels to `Binary`; mirrors triton/backends/nvidia/driver.py of Triton 3.6."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from flashtune.core.code.binaries import Binary, Condition, Parameter, TensorMap, machine_arch
from flashtune.core.system.errors import EnvironmentProblem

HOST_TYPES = {8: 10, 9: 8, 10: 9}
"""Triton's codes of element types that differ from CUtensorMapDataType (its TMA_DTYPE_DEVICE_TO_HOST)."""


def from_compiled(compiled: Any, *, specialization: str = "", file: str = "") -> tuple[Binary, bytes]:
    """The `Binary` of a kernel that Triton's JIT compiled for an NVIDIA GPU, and its machine code.

    `compiled` is a triton.compiler.CompiledKernel, as `kernel.warmup(...)` and `kernel[grid](...)` return it. Raises EnvironmentProblem
    where a launch would need more than a `Binary` describes: scratch memory, or descriptors that weren't lowered to tensor maps.
    """
    source, metadata, code = compiled.src, compiled.metadata, compiled.asm["cubin"]
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise EnvironmentProblem(f"{metadata.name} takes scratch memory, which only Triton's own launcher provides: launch it with that")
    parameters, conditions = signature_of(source, list(getattr(metadata, "tensordesc_meta", None) or []))
    binary = Binary(
        kernel=source.fn.__name__,
        specialization=specialization,
        entry=metadata.name,
        arch=machine_arch(metadata.target.arch),
        triton=metadata.triton_version,
        # Triton counts the warps of specialised partitions already.
        threads=32 * metadata.num_warps,
        shared_bytes=metadata.shared,
        cluster=metadata.num_ctas,
        launch_pdl=bool(metadata.launch_pdl),
        cooperative=bool(metadata.launch_cooperative_grid),
        global_scratch_bytes=metadata.global_scratch_size,
        profile_scratch_bytes=metadata.profile_scratch_size,
        parameters=tuple(parameters),
        conditions=tuple(conditions),
        sha256=hashlib.sha256(code).hexdigest(),
        file=file,
    )
    return binary, code


def signature_of(source: Any, maps: list[dict[str, Any]]) -> tuple[list[Parameter], list[Condition]]:
    """Parameters of Triton's ASTSource in order, and the code's assumptions about arguments: constants and divisibility.

    `maps` are the tensor maps of its descriptors, in the form of Triton's metadata. Positions count elements of tuples one by one.
    """
    parameters: list[Parameter] = []
    conditions: list[Condition] = []
    constants = {path if isinstance(path, tuple) else (source.fn.arg_names.index(path),): value for path, value in source.constants.items()}
    for position, (path, kind) in enumerate(_leaves(source.signature.values())):
        name = ".".join([source.fn.arg_names[path[0]], *map(str, path[1:])])
        if kind == "constexpr":
            conditions.append(Condition(name=name, position=position, rule="equals", value=constants[path]))
            continue
        if kind.startswith("tensordesc"):
            if not maps:
                raise EnvironmentProblem(
                    f"descriptor {name} of {source.fn.__name__} was not lowered to a tensor map: launch it with Triton"
                )
            meta = maps.pop(0)
            code: int = meta["elem_type"]
            tensor_map = TensorMap(
                element_type=HOST_TYPES.get(code, code),
                element_bytes=meta["elem_size"],
                box=tuple(meta["block_size"]),
                swizzle=meta["swizzle"],
            )
            element = kind.removeprefix("tensordesc<").split("[")[0]
            parameters.append(Parameter(name=name, position=position, kind="tensor_map", element=element, tensor_map=tensor_map))
            continue
        if kind.startswith("*"):
            parameters.append(Parameter(name=name, position=position, kind="pointer", element=kind.lstrip("*k")))
        else:
            parameters.append(Parameter(name=name, position=position, kind=kind))
        for attribute, value in source.attrs.get(path, []):
            if attribute != "tt.divisibility":
                raise EnvironmentProblem(f"{name} of {source.fn.__name__} has the unknown attribute {attribute}: launch it with Triton")
            conditions.append(Condition(name=name, position=position, rule="multiple_of", value=value))
    return parameters, conditions


def _leaves(kinds: Iterable[Any], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Kinds of arguments and of elements of tuples, each with its path."""
    for at, kind in enumerate(kinds):
        if isinstance(kind, (tuple, list)):
            yield from _leaves(kind, (*path, at))
        else:
            yield (*path, at), kind
