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
_lists_of = attrgetter(*OWN)


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
    """A BlockMask and its own lists, held weakly, with the lists' versions (-1 in inference mode, which has none): as `versions_of`, but
    compared one by one, which is cheaper at every call."""

    mask: "weakref.ref[Any]"
    lists: tuple[tuple["weakref.ref[torch.Tensor] | None", int], ...]

    @classmethod
    def of(cls, mask: Any) -> "Lists":
        """A mask's lists as they are now."""
        return cls(
            weakref.ref(mask),
            tuple([(None, 0) if x is None else (weakref.ref(x), -1 if x.is_inference() else x._version) for x in _lists_of(mask)]),
        )

    def same(self, mask: Any) -> bool:
        """True for that mask, if its lists are the same tensors, and PyTorch wrote to none of them."""
        if self.mask() is not mask:
            return False
        for (was, version), x in zip(self.lists, _lists_of(mask), strict=True):
            if x is None or was is None:
                if was is not x:
                    return False
            elif (version >= 0 and x._version != version) or was() is not x:
                return False
        return True


def stream_of() -> tuple[int, bool]:
    """The current stream, and True while it is captured; (0, False) where no GPU is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0, False
    # PyTorch's own objects of streams take microseconds to make.
    return C._cuda_getCurrentRawStream(torch.cuda.current_device()), torch.cuda.is_current_stream_capturing()


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
