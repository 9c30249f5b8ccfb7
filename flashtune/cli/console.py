"""Where output goes: tables and progress for people, JSON for machines."""

import json
from typing import Any

import click
from rich.console import Console


def console() -> Console:
    """Standard output for people; wide where it is not a terminal, so that tables don't wrap in logs."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=160)


def messages() -> Console:
    """Standard error, for progress and notes: standard output stays clean for results."""
    found = Console(stderr=True, highlight=False)
    return found if found.is_terminal else Console(stderr=True, highlight=False, width=160)


def print_json(value: Any) -> None:
    """One JSON document, indented, to standard output."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))
