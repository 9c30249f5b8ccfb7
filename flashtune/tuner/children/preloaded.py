"""Imported once, by the server that a search's children are forked off: what each of them would import, and work out, anew.

A dozen compilers that start side by side would take seconds for it, the more the more of them read the same files.
"""

import atexit
import gc
import os
import threading
from contextlib import suppress

# What is imported stays: Python's collector would look through it again and again, which is a tenth of the time that torch takes.
gc.disable()

from triton.runtime import cache  # noqa: E402


def _know_triton() -> None:
    """Have Triton hash its own compiler, which is a part of every kernel's key in its disk cache: hundreds of megabytes, read once here."""
    # Where another version keeps it elsewhere each child does it for itself.
    with suppress(Exception):
        cache.triton_key()


_hashing = threading.Thread(target=_know_triton, name="triton key")
_hashing.start()

import torch  # noqa: E402, F401
from triton.experimental.gluon.language.nvidia import hopper  # noqa: E402, F401
from triton.experimental.gluon.nvidia import hopper as launched  # noqa: E402, F401

# A process with threads isn't to be forked.
_hashing.join()

# Nor do children look through it, which would copy its pages into each of them.
gc.freeze()
gc.enable()

# Who reads what a search prints waits until nobody may write there any more: it isn't to wait for what torch tidies up in this process,
# which only Python's tracker of resources would.
atexit.register(os._exit, 0)
