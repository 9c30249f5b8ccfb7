"""The bits that fix dropout's mask of a call: the caller's seed, or what follows from torch's generator."""

import functools
import threading
from collections.abc import Callable

import torch

from flashtune.dispatch.call import Call, seed_bits

_MASK64 = 2**64 - 1

_DRAWING = threading.Lock()
"""Held while a generator's position is read and moved on, which Python can't do in one step: it keeps out our other threads, and not what
torch itself draws there, so the two steps lie side by side."""


def draws_in_a_capture(call: Call, seed: int | None) -> bool:
    """Whether dropout without a seed is to be captured in a CUDA graph, where the generator's position can't be read."""
    return seed is None and call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def random_bits(seed: int | None, device: torch.device) -> tuple[int, int]:
    """(seed, offset) of one call's dropout: the caller's seed with offset 0, else drawn from torch's default generator of the device.

    On a GPU it follows from the generator's own seed and position, which then moves on: nothing waits for the GPU, and torch.manual_seed,
    checkpointing and torch.random.fork_rng work as for torch's own dropout. All fits into the seed, which is what a backward is told.
    """
    if seed is not None:
        return seed_bits(seed), 0
    if device.type == "cuda":
        generator = _generator(device)
        with _DRAWING:
            position = generator.get_offset()
            generator.set_offset(position + 4)
        return _bits_at(generator, position), 0
    return int(torch.randint(2**63 - 1, ()).item()), 0


def way_back(device: torch.device) -> Callable[[], object]:
    """What puts torch's generator of the device back to where it stands now."""
    generator = _generator(device)
    return functools.partial(generator.set_state, generator.get_state())


def _generator(device: torch.device) -> torch.Generator:
    """Torch's default one."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _bits_at(generator: torch.Generator, position: int) -> int:
    """The bits that follow from where a GPU's generator stands."""
    return _mixed(generator.initial_seed() % 2**64, position // 4 % 2**32)


def _mixed(seed: int, offset: int) -> int:
    """64 bits of a generator's seed and position: SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (seed + (offset + 1) * 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31
