"""Tests that need a GPU, `pytest tests/gpu`: without one none of them is collected, so that no run elsewhere lists them as skipped."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
