"""Places of models: a folder or a config.json of transformers or diffusers. Importing it brings no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtune.core.system.errors import InputError
from flashtune.core.system.files import read_json

MOST_BYTES = 1 << 22
"""Largest config.json that is read."""


@dataclass(frozen=True, slots=True)
class Place:
    """A model's folder, None for a lone config file, and its parsed config."""

    path: Path
    folder: Path | None
    config: dict[str, Any]


def find_place(path: str | Path) -> Place:
    """The place of the model at a path; raises InputError where there is none, or its config is of no known library."""
    path = Path(path)
    if path.is_dir():
        parts = (path / part for part in ("transformer", "unet")) if (path / "model_index.json").exists() else ()
        pipeline = next((part for part in parts if part.is_dir()), path)
        file, folder = pipeline / "config.json", pipeline
    else:
        file, folder = path, None
    try:
        config = read_json(file, MOST_BYTES)
        if not isinstance(config, dict):
            raise ValueError("it is no JSON object")
    except FileNotFoundError as error:
        raise InputError(f"there is no {file}: name a folder with a model's config.json, or that file") from error
    except (OSError, ValueError) as error:
        raise InputError(f"{file} can't be read as a model's config ({error}): name a model of transformers or diffusers") from error
    if not any(isinstance(config.get(name), str) for name in ("_class_name", "model_type")):
        raise InputError(f"{file} has neither model_type (transformers) nor _class_name (diffusers): name a model's own config.json")
    return Place(file, folder, config)
