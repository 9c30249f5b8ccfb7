"""Phrases for messages."""


def counted(number: int, noun: str) -> str:
    """A number of things: `1 row`, `2 rows`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
