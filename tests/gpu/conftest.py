"""Tests that need a GPU, `pytest tests/gpu`: without one none of them is collected, so that no run elsewhere lists them as skipped.

`FLASHTUNE_TEST_DEVICE=cpu pytest tests/gpu -k torch` runs on the CPU what can, for whoever writes them.
"""

import os

import torch

collect_ignore_glob = [] if torch.cuda.is_available() or os.environ.get("FLASHTUNE_TEST_DEVICE") == "cpu" else ["test_*.py"]
