"""Machine code of kernels: the facts that a launch needs of each (`Binary`), and their file (`Manifest`).

A driver-level launch takes these facts alone, and needs neither Triton nor ptxas nor a C compiler. They
mirror Triton 3.6's triton/backends/nvidia/driver.py: `cuLaunchKernelEx` with blocks of `threads`, `shared_bytes` of dynamic
shared memory, and the parameters in their order, followed by two pointers to scratch memory (null here).
"""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flashtune.core.code.archive import Archive, Place
from flashtune.core.code.launches import Operand, Resident
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.core.system.files import parse_json

FORMAT = 1
"""Version of the manifest's layout; another one is not read."""
MOST_BYTES = 1 << 24
"""Bytes of the largest manifest that is read; the longest shipped has a hundredth of it."""

MOST_CODE_BYTES = 16 << 20
"""Bytes of the largest machine code, gzipped or not, that is read; the largest shipped has 0.2 MiB."""

INTERLEAVE_NONE = 0
L2_PROMOTION_128B = 2
OUTSIDE_IS_ZERO = 0
"""Triton's arguments of `cuTensorMapEncodeTiled` for every tensor map: interleave, L2 promotion, and zero fill outside of the tensor."""

Rule = Literal["equals", "multiple_of"]

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
"""Permitted names of a manifest's files, which lie beside it."""

STRUCT_FORMATS: Mapping[str, str] = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp16": "e", "fp32": "f", "fp64": "d", "pointer": "Q",
}  # fmt: skip
"""Formats of the `struct` module by kind of parameter, tensor maps excepted."""


class TensorMap(NamedTuple):
    """Encoding of a descriptor argument's tensor map: arguments of `cuTensorMapEncodeTiled` beside address, shape and strides.

    `element_type` is a CUtensorMapDataType, `swizzle` a CUtensorMapSwizzle; `box` goes from the outermost dimension to the innermost
    (the driver wants them reversed). The driver takes strides in bytes, without the innermost, which is 1 element.
    """

    element_type: int
    element_bytes: int
    box: tuple[int, ...]
    swizzle: int

    @property
    def rank(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.box)


class Parameter(NamedTuple):
    """An argument that reaches the machine code.

    `position` is its index in `Launch.arguments` (constants are no parameters of the code, so indices
    may be skipped). `kind` is a key of STRUCT_FORMATS, or `tensor_map`. `element` is Triton's name of the element type of a pointer or a
    descriptor (`bf16`, `fp32`, `u8`), empty for scalars.
    """

    name: str
    position: int
    kind: str
    element: str = ""
    tensor_map: TensorMap | None = None

    @property
    def limits(self) -> tuple[int, int] | None:
        """The least and the greatest value that an integer parameter holds; None for any other kind."""
        if self.kind[0] not in "iu":
            return None
        bits = int(self.kind[1:])
        return (0, 2**bits - 1) if self.kind[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


class Condition(NamedTuple):
    """An assumption of a binary about one argument: its value, or the alignment of a tensor's address."""

    name: str
    position: int
    rule: Rule
    value: int | float | bool | str | None

    def holds(self, value: Any) -> bool:
        """True if this value (an address for a pointer) meets the condition."""
        wanted: Any = self.value
        if self.rule == "multiple_of":
            return value is not None and bool(value % wanted == 0)
        return (value is wanted) if wanted is None or isinstance(wanted, bool) else bool(value == wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """One GPU kernel as machine code, with the facts that a launch of it needs.

    `kernel` is the function's name in the rendered module, `entry` its symbol in the code. `specialization` names the assumptions
    about the arguments, and `conditions` list them; a call that breaks one, or has an integer outside of its parameter's
    `limits`, needs another binary, or Triton. `threads` are those of a block, warps that a specialised kernel adds included. `cluster`
    is in blocks along x, and a launch's grid along x is multiplied by it. `launch_pdl` lets it start before the kernel ahead of it in
    the stream has ended. `sha256` is that of the code, `file` its name in the manifest's folder, or its place in the manifest's
    archive (empty for code that has none).
    """

    kernel: str
    specialization: str
    entry: str
    arch: str
    triton: str
    threads: int
    shared_bytes: int
    cluster: int
    launch_pdl: bool
    cooperative: bool
    global_scratch_bytes: int
    profile_scratch_bytes: int
    parameters: tuple[Parameter, ...]
    conditions: tuple[Condition, ...]
    sha256: str
    file: str = ""

    def refusal(self, arguments: Sequence[Any]) -> str | None:
        """The reason why this binary can't take these arguments of a planned launch, or None where it can.

        Operands are compared by alignment and element type; descriptors aren't, since host code builds them for the kernel.
        """
        for condition in self.conditions:
            value = arguments[condition.position]
            if isinstance(value, (Operand, Resident)):
                # A plan knows of an address only whether it is aligned, and conditions require no more.
                value = 0 if value.aligned else 1
            if not condition.holds(value):
                return f"{condition.name}={value!r} breaks {condition.rule} {condition.value!r}"
        for parameter in self.parameters:
            value = arguments[parameter.position]
            if parameter.kind == "pointer":
                dtype = value.dtype if isinstance(value, (Operand, Resident)) else "no elements"
                if dtype != parameter.element:
                    return f"{parameter.name} holds {dtype}, not {parameter.element}"
            elif (limits := parameter.limits) is not None and not limits[0] <= value <= limits[1]:
                return f"{parameter.name}={value!r} is outside of {parameter.kind}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The binaries of one rendered module, in the order in which they should be tried, and where their code is: in files of `folder`, or
    in an `archive`.

    `source_sha256` is that of the module's text.
    """

    variant_id: str
    binaries: tuple[Binary, ...]
    source_sha256: str = ""
    folder: Path | None = None
    archive: Archive | None = None

    def of(self, kernel: str) -> tuple[Binary, ...]:
        """The binaries of one kernel of the module, by its function's name."""
        return tuple(binary for binary in self.binaries if binary.kernel == kernel)

    def matching(self, kernel: str, arguments: Sequence[Any]) -> Binary | None:
        """The first of a kernel's binaries that takes these arguments of a launch, or None."""
        return next((binary for binary in self.of(kernel) if binary.refusal(arguments) is None), None)

    def code(self, binary: Binary) -> bytes:
        """The machine code (a cubin), checked; raises EnvironmentProblem where it is missing or has another digest."""
        if self.archive is not None:
            return self.archive.read(Place.of(binary.file), binary.sha256)
        if self.folder is None:
            raise EnvironmentProblem(f"the machine code of {binary.kernel} is in no file: take it from where it was compiled")
        path = self.folder / binary.file
        try:
            code = _read_gzipped(path)
        except (OSError, ValueError, zlib.error) as error:
            raise EnvironmentProblem(f"can't read machine code from {path} ({error}): install flashtune again") from error
        if hashlib.sha256(code).hexdigest() != binary.sha256:
            raise EnvironmentProblem(f"{path} isn't the machine code that its manifest names: install flashtune again")
        return code

    def as_json(self) -> str:
        """The manifest's text, equal for equal manifests wherever their code is."""
        head = {"format": FORMAT, "variant_id": self.variant_id, "source_sha256": self.source_sha256}
        text = json.dumps(head | {"binaries": [_as_dict(binary) for binary in self.binaries]}, indent=1)
        # One line for each parameter and condition keeps diffs short.
        return re.sub(r"\{[^{}]*\}", lambda found: " ".join(found[0].split()), text) + "\n"


def _read_gzipped(path: Path) -> bytes:
    """The content of a gzipped file, which could unpack to gigabytes; raises OSError, or zlib.error where it is damaged or too large."""
    with path.open("rb") as file:
        content = file.read(MOST_CODE_BYTES + 1)
    # 31 is gzip's header.
    packer = zlib.decompressobj(wbits=31)
    found = packer.decompress(content, MOST_CODE_BYTES)
    if not packer.eof:
        raise zlib.error(f"it is cut off or holds more than {MOST_CODE_BYTES >> 20} MiB")
    return found


def machine_arch(capability: int) -> str:
    """The architecture name of NVIDIA's tools for a compute capability: 90 is `sm_90a`, with the instructions that only Hopper has."""
    return f"sm_{capability}{'a' if capability >= 90 else ''}"


def source_digest(text: str) -> str:
    """SHA-256 of the text that a manifest's code was compiled from."""
    return hashlib.sha256(text.encode()).hexdigest()


def parse_manifest(content: bytes, path: Path, archive: Archive | None = None) -> Manifest:
    """The manifest that `as_json` wrote; `path` is that of its file, or of the archive that holds it and its code. Raises
    EnvironmentProblem for any other text."""
    try:
        fields = parse_json(content)
        if fields["format"] != FORMAT:
            raise EnvironmentProblem(f"{path} has the format {fields['format']!r}, not {FORMAT}: install one version of flashtune")
        binaries = tuple(map(_binary, fields["binaries"]))
        for binary in binaries:
            if archive is not None:
                Place.of(binary.file)
            elif not _FILE.fullmatch(binary.file):
                raise ValueError(f"file {binary.file!r}")
        named = {name: fields[name] for name in ("variant_id", "source_sha256")}
        if strange := [name for name, value in named.items() if not isinstance(value, str)]:
            raise ValueError(f"{strange[0]} {named[strange[0]]!r}")
        return Manifest(**named, binaries=binaries, folder=path.parent if archive is None else None, archive=archive)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentProblem(f"{path} is no manifest of machine code ({error!r}): install flashtune again") from error


def _as_dict(binary: Binary) -> dict[str, Any]:
    found = {field.name: getattr(binary, field.name) for field in fields(binary)}
    maps = [one.tensor_map and one.tensor_map._asdict() for one in binary.parameters]
    parameters = [one._asdict() | {"tensor_map": described} for one, described in zip(binary.parameters, maps, strict=True)]
    found["parameters"] = [{name: value for name, value in one.items() if value not in ("", None)} for one in parameters]
    return found | {"conditions": [condition._asdict() for condition in binary.conditions]}


def _binary(fields: dict[str, Any]) -> Binary:
    parameters, conditions = fields.pop("parameters"), fields.pop("conditions")
    return Binary(
        **fields, parameters=tuple(map(_parameter, parameters)), conditions=tuple(Condition(**condition) for condition in conditions)
    )


def _parameter(fields: dict[str, Any]) -> Parameter:
    tensor_map = fields.pop("tensor_map", None)
    return Parameter(**fields, tensor_map=None if tensor_map is None else TensorMap(**{**tensor_map, "box": tuple(tensor_map["box"])}))
