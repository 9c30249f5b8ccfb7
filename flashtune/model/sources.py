"""Interface of models of transformers and diffusers, and what both kinds share: imports, errors and random inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from flashtune.core.system.errors import EnvironmentProblem, FlashtuneError, InputError, first_line
from flashtune.model.workloads import Workload

SEED = 1234
"""Seed of random weights and inputs."""


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


def library(name: str, extra: str) -> Any:
    """The imported library `name`; raises EnvironmentProblem where it isn't installed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentProblem(f"this model needs {name}, which is not installed: pip install 'flashtune[{extra}]'") from error


@contextmanager
def explained(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever another library raises in the block, on a config that it can't take, into InputError that says `what` failed."""
    try:
        yield
    except FlashtuneError:
        raise
    except torch.OutOfMemoryError as error:
        raise EnvironmentProblem(f"{what}: the GPU's memory is too small, so name a smaller model or --layers") from error
    except Exception as error:
        raise InputError(f"{what} ({first_line(error)}): {remedy}") from error


def random_inputs(device: str, dtype: torch.dtype) -> tuple[torch.Generator | None, Callable[..., torch.Tensor]]:
    """A generator of the one seed (None on `meta`, which has none), and a function that draws a normal tensor of a shape from it."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(SEED)
    return generator, lambda *shape: torch.randn(*shape, device=device, dtype=dtype, generator=generator)
