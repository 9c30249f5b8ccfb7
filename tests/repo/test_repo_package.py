"""The package's own names need no further import, the package alone imports nothing large, and public names say what they take."""

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from flashtune import dispatch
from flashtune.core.problems.problem import Features, Problem
from flashtune.dispatch.policy.offers import Offer

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert set(re.findall(r"^::: flashtune\.dispatch\.(\w+)$", pages, re.MULTILINE)) == set(dispatch.__all__) - {"Use"}


def arguments_of(function: object) -> list[str]:
    """Names in the `Args:` of a docstring, in order."""
    text = inspect.getdoc(function) or ""
    part = re.split(r"^\w+:$", text.split("\nArgs:\n")[1], flags=re.MULTILINE)[0] if "\nArgs:\n" in text else ""
    return [name.lstrip("*") for name in re.findall(r"^    (\*{0,2}\w+): ", part, re.MULTILINE)]


EXPLAINED = {"explain": "attention", "explain_varlen": "attention_varlen", "explain_flex": "flex_attention"}


@pytest.mark.parametrize("name", [name for name in dispatch.__all__ if name not in ("Explanation", "Use")])
def test_a_public_function_says_what_each_of_its_arguments_is(name: str) -> None:
    function = getattr(dispatch, name)
    if name in EXPLAINED:
        assert f"`{EXPLAINED[name]}`, whose arguments it takes" in function.__doc__
    else:
        assert arguments_of(function) == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("kind", [Problem, Features, dispatch.Explanation, Offer])
def test_a_value_says_what_each_of_its_fields_is(kind: type) -> None:
    text = (inspect.getdoc(kind) or "").split("\nAttributes:\n")[1]
    assert set(re.findall(r"^    (\w+): ", text, re.MULTILINE)) - {"InputError"} == {field.name for field in fields(kind)}


def test_an_argument_without_words_would_be_noticed() -> None:
    def function(x: int, y: int) -> None:
        """Nothing.

        Args:
            x: a number.

        Raises:
            InputError: never.
        """

    assert arguments_of(function) == ["x"]
