"""What a rendered module's host code does for a call, as data: run on tensors without memory, it says what each argument is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = "empty empty_like empty_strided"
_VIEWS = "view _unsafe_view slice select expand detach permute transpose as_strided unsqueeze squeeze alias reshape"
_HARMLESS = frozenset(f"aten::{name}" for name in f"{_ALLOCATIONS} {_VIEWS}".split())
"""Operations of host code that leave nothing to be done again at the next call but an allocation."""


class Address(NamedTuple):
    """A place in one of a call's tensors: bytes from where tensor `source` starts."""

    source: int
    offset: int


class Descriptor(NamedTuple):
    """A tensor map over one of a call's tensors; `strides` are in elements."""

    address: Address
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Drawn(int):
    """A number that changes from call to call; `source` says which one of the call's numbers it is."""

    source: int

    @classmethod
    def of(cls, source: int, value: int) -> "Drawn":
        """A stand-in for number `source`, of the given value until it is replaced."""
        drawn = cls(value)
        drawn.source = source
        return drawn

    def __and__(self, mask: int) -> "Drawn":
        """The same number: host code cuts it to the width that it has anyway."""
        return Drawn.of(self.source, int(self) & mask)


class Recorded(NamedTuple):
    """One launch of a call: the kernel's name, its grid and its arguments, as the module's `launches` gave them."""

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


class Recording(NamedTuple):
    """The launches of a call, and the bytes of each tensor that is made for it alone; these follow the call's own tensors."""

    launches: tuple[Recorded, ...]
    temporaries: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tensor:
    """In the keywords of `record`: the tensor of this place among the call's own."""

    index: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Resident:
    """In the keywords of `record`: memory at the same address at every call."""

    address: int


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether an operation ran that would have to run again at the next call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Newer versions of torch would import the whole compiler (seconds) to keep it out of here.
        return False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function._schema.name
        if name not in _HARMLESS:
            self.work = name
        return function(*arguments, **(keywords or {}))


def record(launches: Callable[..., Sequence[Any]], tensors: Sequence[torch.Tensor | None], keywords: Mapping[str, Any]) -> Recording | None:
    """What `launches` does for tensors of these sizes and strides; None where it computes something with torch's operations.

    `tensors` are the call's own, in the order of their addresses; `keywords` maps the parameters of `launches` to places in `tensors` (as
    `Tensor`), to memory whose address becomes a number of the recording (as `Resident`), or to what is passed as it is.
    """
    stand_ins = [None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    sources = {x.untyped_storage()._cdata: index for index, x in enumerate(stand_ins) if x is not None}
    temporaries: list[int] = []
    held: list[torch.Tensor] = []

    def address(x: torch.Tensor) -> Address:
        storage = x.untyped_storage()
        if storage._cdata not in sources:
            sources[storage._cdata] = len(tensors) + len(temporaries)
            temporaries.append(storage.nbytes())
            held.append(x)
        return Address(sources[storage._cdata], int(x.storage_offset()) * x.element_size())

    def argument(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return address(x)
        if isinstance(x, Resident):
            return x.address
        if hasattr(x, "base"):
            return Descriptor(address(x.base), tuple(x.shape), tuple(x.strides))
        return x

    def stood_in(x: Any) -> Any:
        if isinstance(x, Tensor):
            return stand_ins[x.index]
        return tuple(stood_in(part) for part in x) if isinstance(x, tuple) else x

    with _Watch() as watch:
        steps = launches(**{name: stood_in(x) for name, x in keywords.items()})
    if watch.work is not None:
        return None
    found = []
    for kernel, grid, arguments, _ in steps:
        x, y, z = (*grid, 1, 1)[:3]
        found.append(Recorded(kernel=kernel.__name__, grid=(x, y, z), arguments=tuple(map(argument, arguments))))
    return Recording(launches=tuple(found), temporaries=tuple(temporaries))
