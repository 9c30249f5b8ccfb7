"""The package's own names: they are found without a further import, and the package alone imports nothing large."""

import subprocess
import sys

import pytest


def test_dispatch_and_attention_are_found_in_the_package_which_imports_neither_by_itself() -> None:
    code = """
import sys
import flashtune
assert {"attention", "dispatch", "__version__"} <= set(dir(flashtune))
assert not {"torch", "numpy", "flashtune.dispatch"} & set(sys.modules), "import flashtune is cheap"
assert flashtune.attention is flashtune.dispatch.attention
assert not hasattr(flashtune, "atention")
from flashtune import attention, dispatch
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_isnt_there_is_an_attribute_error() -> None:
    import flashtune

    with pytest.raises(AttributeError, match="'atention'"):
        flashtune.atention  # noqa: B018
