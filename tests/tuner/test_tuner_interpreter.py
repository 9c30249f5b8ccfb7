"""Triton's interpreter with cached types, shapes and names computes the bits of Triton's own."""

import os
import subprocess
import sys

from interpreting import interpreted


def test_the_quick_interpreter_computes_the_same_bits() -> None:
    quick, own = (interpreted("interpret_quick", quick=quick) for quick in (True, False))
    assert quick == own and len(quick) == 3


def test_compilers_and_other_versions_stay_as_they_are() -> None:
    """Both TRITON_INTERPRET and the version count."""
    code = """if True:
        import sys, triton
        from triton.language import core
        from flashtune.tuner.children.interpreter import quicken
        triton.__version__, before = sys.argv[1], core.tensor.__init__
        quicken()
        sys.exit(core.tensor.__init__ is not before)"""
    for version, interpret, replaced in (("3.7.0", "1", 0), ("3.6.0", "0", 0), ("3.6.0", "1", 1)):
        environment = {**os.environ, "TRITON_INTERPRET": interpret}
        assert subprocess.run([sys.executable, "-c", code, version], env=environment).returncode == replaced
