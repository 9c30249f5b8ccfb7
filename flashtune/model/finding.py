"""Choice of the library that a model at a path is of."""

from pathlib import Path

from flashtune.model.diffusers import DiffusersModel
from flashtune.model.places import find_place
from flashtune.model.sources import Subject, explained
from flashtune.model.transformers import TransformersModel


def find_subject(path: str | Path, *, layers: int | None) -> Subject:
    """The model at a path, with `layers` layers at most; raises InputError where there is none that is known."""
    place = find_place(path)
    of_diffusers = isinstance(place.config.get("_class_name"), str)
    name = "diffusers" if of_diffusers else "transformers"
    with explained(f"{name} can't read {place.path}", f"correct it, update {name}, or name another model"):
        return DiffusersModel(place, layers) if of_diffusers else TransformersModel(place, layers)
