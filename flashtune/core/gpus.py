"""Table of GPUs: facts with sources, from `gpus.toml`."""

import tomllib
from pathlib import Path
from typing import Any

from flashtune.core.target import Target


def _read(table: dict[str, dict[str, Any]]) -> tuple[Target, ...]:
    """The GPUs of a table: what their vendor's and, of NVIDIA's, those of their compute capability share, and their own facts."""
    found = []
    for slug, own in table["gpus"].items():
        vendor = table["vendors"][own["vendor"]]
        facts = vendor | table["capabilities"].get(own["arch"], {}) | own | {"sources": own["sources"] + vendor["sources"]}
        words: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
        found.append(Target(slug=slug, **words))
    return tuple(found)


GPUS = _read(tomllib.loads(Path(__file__).with_name("gpus.toml").read_text()))
