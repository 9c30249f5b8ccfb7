"""Python's cyclic garbage collector, held off where much is made that stays: a full collection walks all that torch's import left."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_off() -> Iterator[None]:
    """No automatic collection meanwhile, in any thread; where the collector was off already, it stays so."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
