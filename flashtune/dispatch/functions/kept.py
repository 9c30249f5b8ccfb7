"""Results that are kept with a mask for as long as it lives: lists of blocks, and whether a BlockMask's are those of its mask_mod."""

import weakref
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from flashtune.core.pytorch.private import C

MOST_LISTS = 32
"""Most results that are kept with one mask: sizes may change at every step."""


_NOT_KEPT = object()
LISTS: Any = WeakIdKeyDictionary()
"""Lists of blocks of a mask, and whether a BlockMask's blocks are those of its mask_mod, for as long as it lives."""

OWN = tuple(f"{full}{of}_{name}" for of in ("kv", "q") for full in ("", "full_") for name in ("num_blocks", "indices"))
"""Names of a BlockMask's own lists, of keys for queries, then of queries for keys."""
_lists_of, _lists_of_keys = attrgetter(*OWN), attrgetter(*OWN[:4])


def versions_of(mask: Any) -> tuple[Any, ...]:
    """A BlockMask's own lists, held weakly, and their versions: all that it holds beside what its mask_mod reads.

    Writes to lists of inference mode aren't seen: these have no versions. Nor are those through `.data`, NumPy or DLPack.
    """
    try:
        return tuple([(WeakIdRef(x), x._version) for x in _lists_of(mask) if x is not None])
    except (AttributeError, RuntimeError):
        lists = [getattr(mask, name, None) for name in OWN]
        return tuple((WeakIdRef(x), None if x.is_inference() else x._version) for x in lists if x is not None)


class Lists(NamedTuple):
    """A BlockMask and its own lists, held weakly, with the lists' versions, None for those of inference mode, which have none: as
    `versions_of`, but compared one by one, which is cheaper at every call."""

    mask: "weakref.ref[Any]"
    own: Callable[[Any], tuple[Any, ...]]
    """Function that takes the lists out of a mask."""
    lists: tuple[Callable[[], Any], ...]
    versions: tuple[int | None, ...]

    @classmethod
    def of(cls, mask: Any, *, trains: bool) -> "Lists":
        """A mask's lists as they are now: those of keys for queries alone, unless gradients are computed (`trains`)."""
        own = _lists_of if trains else _lists_of_keys
        lists = own(mask)
        held, versions = [_no_list if x is None else weakref.ref(x) for x in lists], [_version_of(x) for x in lists]
        return cls(weakref.ref(mask), own, tuple(held), tuple(versions))

    def same(self, mask: Any) -> bool:
        """True for that mask, if its lists are the same tensors, and PyTorch wrote to none of them."""
        if self.mask() is not mask:
            return False
        for was, version, x in zip(self.lists, self.versions, self.own(mask), strict=True):
            if was() is not x or (version is not None and x._version != version):
                return False
        return True


def _version_of(x: "torch.Tensor | None") -> int | None:
    return None if x is None or x.is_inference() else x._version


def _no_list() -> None:
    """In the place of the weak reference to a list that a mask lacks."""


def stream_of() -> tuple[int, bool]:
    """The current stream, and True while it is captured; (0, False) where no GPU is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0, False
    # PyTorch's own objects of streams take microseconds to make.
    return C._cuda_getCurrentRawStream(C._cuda_getDevice()), C._cuda_isCurrentStreamCapturing()


def kept(mask: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """Result of `make` from an earlier call with a mask: one that depends on no captured tensor, whose memory may change unseen."""
    stream, capture = stream_of()
    # What is made during capture is filled only at replay, where a BlockMask may have other lists.
    if capture:
        return make()
    try:
        lists = LISTS.setdefault(mask, {})
    except TypeError:
        return make()
    whole = key, versions_of(mask), stream
    found = lists.get(whole, _NOT_KEPT)
    if found is _NOT_KEPT:
        found = make()
        if len(lists) >= MOST_LISTS:
            lists.clear()
        lists[whole] = found
    return found


def known_at(mask: Any, place: Hashable) -> bool | None:
    """The result that was kept with a mask at a place, on any stream; None where none is of its lists as they are."""
    versions = versions_of(mask)
    return next((found for (at, of, _), found in LISTS.get(mask, {}).items() if at == place and of == versions), None)
