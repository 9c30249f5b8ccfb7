"""Pauses of Python's cyclic garbage collector while many lasting objects are made: a full collection walks all of PyTorch's."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_off() -> Iterator[None]:
    """A context without automatic collection, in any thread; a collector that was off before stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
