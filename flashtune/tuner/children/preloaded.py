"""Preloaded modules of the fork server, and results that each child would otherwise compute anew.

A dozen compilers that start side by side would take seconds for it, the more the more of them read the same files. The server's output is
dropped first, for a command ended by a signal leaves it in the midst of its imports, and no pipe of the command waits for its end.
"""

import atexit
import gc
import os
import threading

_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)
os.close(_nowhere)

# Imported objects stay, and the collector's repeated passes over them take a tenth of torch's import time.
gc.disable()

# Before the thread, which would otherwise import it beside torch.
from triton.runtime import cache  # noqa: E402, F401

from flashtune.tuner.children.start import know_triton  # noqa: E402

# Read once here, and not by each child.
_hashing = threading.Thread(target=know_triton, name="triton key")
_hashing.start()

import torch  # noqa: E402, F401
from triton.experimental.gluon.language.nvidia import hopper  # noqa: E402, F401
from triton.experimental.gluon.nvidia import hopper as launched  # noqa: E402, F401

# What compilers run: a dozen of them would each take a quarter of a second for it.
import flashtune.templates.mods.known  # noqa: E402
import flashtune.tuner.children.compile  # noqa: E402
import flashtune.tuner.children.tasks  # noqa: E402
import flashtune.tuner.verify.correctness  # noqa: E402, F401

# A process with threads must not fork.
_hashing.join()

# A child's collector would otherwise touch its pages, and so copy them.
gc.freeze()
gc.enable()

# A reader of the search's output waits for this process to end, so it skips torch's clean-up, which concerns only the resource tracker.
atexit.register(os._exit, 0)
