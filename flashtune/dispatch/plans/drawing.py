"""What fixes dropout's mask of a call: the caller's seed, or what follows from torch's generator; and where kernels drew from that without
gradients, for calls that compute the same again with them."""

import functools
import threading
import warnings
from collections.abc import Callable

import torch

from flashtune.dispatch.call import Call, seed_bits

_MASK64 = 2**64 - 1

SEEDED, UNSEEDED, IN_AUTOGRAD = range(3)
"""Where a call's dropout has its mask from: the caller's seed; torch's generator; that, if there is dropout, inside of an autograd
function's forward or of a backward, where autograd itself may compute again what is computed."""

_DRAWING = threading.Lock()
"""Held while a generator's position is read and moved on, which Python can't do in one step: it keeps out our other threads, and not what
torch itself draws there, so the two steps lie side by side."""

DRAWS: set[int] = set()
"""Draws of kernels without gradients, as bits xor `drawn_as`. Of all threads: a generator's state may be kept by one and set by another."""

MOST_DRAWS = 2**17
"""So many are remembered, in 10 MB, and none is forgotten: nobody can tell what is never computed again."""


def unseeded() -> int:
    """Which of these holds now for a call with dropout and without a seed."""
    # Forward-mode gradients are off inside of an autograd function's forward, and in inference mode, of which autograd knows nothing.
    outside = torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()
    return UNSEEDED if outside and torch._C._current_graph_task_id() < 0 else IN_AUTOGRAD


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


def drawn_as(call: Call) -> int:
    """What tells this call's draws from those that other calls make of the same bits: all that dropout's mask hangs on beside them."""
    return hash((str(call.device), call.batch, call.heads, call.n_q, call.n_kv, call.dropout_p))


def remember(draw: int) -> None:
    """Add a draw; a RuntimeWarning, once, where there are too many."""
    if len(DRAWS) < MOST_DRAWS:
        DRAWS.add(draw)
    elif draw not in DRAWS:
        _warn_of_more()


@functools.cache
def _warn_of_more() -> None:
    said = f"flashtune remembers {MOST_DRAWS} draws of dropout without gradients and no more"
    warnings.warn(
        f"{said}: later ones may drop other pairs where they are computed again; give such calls a seed", RuntimeWarning, stacklevel=3
    )


def recalled(device: torch.device, like: int) -> int | None:
    """The bits of one call's dropout, drawn, where a kernel drew them for a call `like` this one (`drawn_as`) without gradients; None, and
    the generator where it was, elsewhere."""
    if device.type == "cuda":
        generator = _generator(device)
        with _DRAWING:
            position = generator.get_offset()
            bits = _bits_at(generator, position)
            if bits ^ like in DRAWS:
                generator.set_offset(position + 4)
                return bits
        return None
    state = torch.get_rng_state()
    bits = random_bits(None, device)[0]
    if bits ^ like in DRAWS:
        return bits
    torch.set_rng_state(state)
    return None


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
