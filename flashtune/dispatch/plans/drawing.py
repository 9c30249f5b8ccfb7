"""What fixes dropout's mask of a call: the caller's seed, or what follows from torch's generator; and where kernels drew from that without
gradients, for calls that compute the same again with them."""

import threading
import warnings

import torch

from flashtune.dispatch.call import Call, seed_bits

_MASK64 = 2**64 - 1

SEEDED, UNSEEDED, IN_AUTOGRAD, IN_INFERENCE = range(4)
"""Where a call's dropout has its mask from: the caller's seed; torch's generator; that, if there is dropout, inside of an autograd
function's forward or of a backward; or in inference mode."""

REMEMBERED = 2**16
"""So many draws are remembered at the least, and fewer than twice as many."""


def unseeded() -> int:
    """Which of these holds now for a call with dropout and without a seed."""
    # Forward-mode gradients are off inside of an autograd function's forward.
    if torch._C._is_fwd_grad_enabled():
        return UNSEEDED if torch._C._current_graph_task_id() < 0 else IN_AUTOGRAD
    return IN_INFERENCE if torch.is_inference_mode_enabled() else IN_AUTOGRAD


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
        generator, bits, position = _at(device)
        generator.set_offset(position + 4)
        return bits, 0
    return int(torch.randint(2**63 - 1, ()).item()), 0


def drawn_as(call: Call) -> int:
    """What tells this call's draws from those that other calls make of the same bits: all that dropout's mask hangs on beside them."""
    return hash((str(call.device), call.batch, call.heads, call.n_q, call.n_kv, call.dropout_p))


class Draws:
    """Draws of kernels without gradients, as bits xor `drawn_as`, those of long ago forgotten.

    Two sets, so that to remember one is a single step which needs no lock. `newer` is empty only if nothing is remembered. Of each GPU's
    generator and seed `lost` is a position behind all that was forgotten.
    """

    __slots__ = ("_lock", "_turned", "lost", "newer", "older")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def __contains__(self, draw: int) -> bool:
        # In this order: another thread may make the one the other meanwhile.
        return draw in self.newer or draw in self.older

    def clear(self) -> None:
        """Forget all."""
        self.newer: set[int] = set()
        self.older: set[int] = set()
        self.lost: dict[tuple[int, int], int] = {}
        self._turned: dict[tuple[int, int], int] = {}

    def remember(self, draw: int) -> None:
        """Add one; where they are too many, the older half is forgotten."""
        newer = self.newer
        newer.add(draw)
        if len(newer) >= REMEMBERED:
            with self._lock:
                if self.newer is newer:
                    self.lost |= self._turned
                    self._turned = {
                        (index, one.initial_seed()): one.get_offset() for index, one in enumerate(torch.cuda.default_generators)
                    }
                    self.older, self.newer = newer, {draw}

    def warn_of_lost(self, device: torch.device, seed: int, position: int) -> None:
        """A RuntimeWarning, once, where a draw at this position isn't remembered, and may be one that was forgotten."""
        place = (_index(device), seed)
        if position < self.lost.get(place, 0) and self.lost.pop(place, None) is not None:
            said = f"flashtune remembers the last {REMEMBERED} draws of dropout without gradients, and here one is asked for of before"
            warnings.warn(
                f"{said}: if that is computed again here, other pairs are dropped; give such calls a seed", RuntimeWarning, stacklevel=2
            )


DRAWS = Draws()
"""Of all threads: a generator's state may be kept by one and set by another."""


def recalled(device: torch.device, like: int) -> int | None:
    """The bits of one call's dropout, drawn, where a kernel drew them for a call `like` this one (`drawn_as`) without gradients; None, and
    the generator where it was, elsewhere."""
    if device.type == "cuda":
        generator, bits, position = _at(device)
        if bits ^ like not in DRAWS:
            if DRAWS.lost:
                DRAWS.warn_of_lost(device, generator.initial_seed(), position)
            return None
        generator.set_offset(position + 4)
        return bits
    state = torch.get_rng_state()
    bits = random_bits(None, device)[0]
    if bits ^ like in DRAWS:
        return bits
    torch.set_rng_state(state)
    return None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _at(device: torch.device) -> tuple[torch.Generator, int, int]:
    """A GPU's generator, the bits that follow from where it stands, and its position."""
    generator = torch.cuda.default_generators[_index(device)]
    position = generator.get_offset()
    return generator, _mixed(generator.initial_seed() % 2**64, position // 4 % 2**32), position


def _mixed(seed: int, offset: int) -> int:
    """64 bits of a generator's seed and position: SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (seed + (offset + 1) * 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31
