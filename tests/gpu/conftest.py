"""Tests that need a GPU, `pytest tests/gpu`: without one none of them is collected, so that no run elsewhere lists them as skipped.

`FLASHTUNE_TEST_DEVICE=cpu pytest tests/gpu -k torch` runs on the CPU what can, for whoever writes them.
"""

import os

import pytest
import torch

HERE = torch.cuda.is_available()
MOST_PROCESSES = 10
"""They mostly wait for compilers, one core each; the GPU has memory for so many contexts."""

collect_ignore_glob = [] if HERE or os.environ.get("FLASHTUNE_TEST_DEVICE") == "cpu" else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """As many processes as there are cores, unless -n says how many."""
    if HERE and config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput") and config.option.numprocesses is None:
        config.option.numprocesses = min(MOST_PROCESSES, os.cpu_count() or 1)
