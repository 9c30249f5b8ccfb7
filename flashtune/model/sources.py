"""Sources of a model: a folder or a config.json of transformers or diffusers, from which the model is built."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from flashtune.core.errors import EnvironmentProblem, InputError
from flashtune.core.files import read_json
from flashtune.model.workloads import Workload

SEED = 1234
"""Seed of random weights and inputs."""

MOST_BYTES = 1 << 22
"""Largest config.json that is read."""


class Subject(Protocol):
    """A model that can be built, run under stated workloads, and switched between implementations of attention."""

    name: str
    has_weights: bool
    standard: str
    """PyTorch's attention that the model has: `sdpa`, or `eager` where it lacks that."""

    @property
    def defaults(self) -> tuple[Workload, ...]:
        """Workloads that are run unless others are named."""
        ...

    def build(self, *, device: str, dtype: torch.dtype) -> torch.nn.Module:
        """The model in evaluation mode, with its weights where the folder holds them, else with random ones of one seed."""
        ...

    def inputs(self, workload: Workload, *, device: str, dtype: torch.dtype) -> dict[str, Any]:
        """Keyword arguments of a run, the same at every call; raises InputError for a workload that the model doesn't have."""
        ...

    def attend(self, model: torch.nn.Module, implementation: str) -> None:
        """Make `model` use `tuned`, PyTorch's `sdpa`, or `eager` attention."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """A model's folder, None for a lone config file, and its parsed config."""

    path: Path
    folder: Path | None
    config: dict[str, Any]


def find_subject(path: str | Path, *, layers: int | None) -> Subject:
    """The model at a path, with `layers` layers at most; raises InputError where there is none that is known."""
    place = _place(Path(path))
    if "_class_name" in place.config:
        from flashtune.model.diffusers import DiffusersModel

        return DiffusersModel(place, layers)
    if "model_type" in place.config:
        from flashtune.model.transformers import TransformersModel

        return TransformersModel(place, layers)
    raise InputError(f"{place.path} has neither model_type (transformers) nor _class_name (diffusers): name a model's own config.json")


def _place(path: Path) -> Place:
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
    return Place(file, folder, config)


def library(name: str, extra: str) -> Any:
    """The imported library `name`; raises EnvironmentProblem where it isn't installed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentProblem(f"this model needs {name}, which is not installed: pip install 'flashtune[{extra}]'") from error


def random_inputs(device: str, dtype: torch.dtype) -> tuple[torch.Generator | None, Callable[..., torch.Tensor]]:
    """A generator of the one seed (None on `meta`, which has none), and a function that draws a normal tensor of a shape from it."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(SEED)
    return generator, lambda *shape: torch.randn(*shape, device=device, dtype=dtype, generator=generator)
