"""Runs a script of this folder in Triton's interpreter, which has to be chosen before Triton is imported: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def interpreted(script: str, *words: str) -> Any:
    """The JSON that the script prints."""
    command = [sys.executable, str(TESTS / script), *words]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
