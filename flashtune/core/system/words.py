"""Texts of messages and of values."""

import json
from collections.abc import Mapping


def counted(number: int, noun: str) -> str:
    """A number of things: `1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shown(value: object) -> str:
    """Text of a value for messages, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def canonical(value: Mapping[str, object]) -> str:
    """Canonical JSON: equal values have equal text, with sorted keys and no blanks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
