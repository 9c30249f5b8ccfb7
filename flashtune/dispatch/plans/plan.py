"""Parts that plans share: their interface, the cache in which a call finds its own, memory layouts, and the seed of dropout's mask."""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashtune.core.pytorch.private import FORWARD_AD, C, check_of, has_guards
from flashtune.dispatch.call.call import Outputs, PerHead
from flashtune.dispatch.call.inspection import flash_attention_on
from flashtune.dispatch.call.parse import seed_bits
from flashtune.dispatch.plans import driver


class Plan(Protocol):
    """Interface of a plan: prepared execution of calls with equal signatures."""

    __slots__ = ()
    direct: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """PyTorch's function with the call's options, where the plan does nothing else for calls without a mask and per-head arguments."""

    def build(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, per_head: PerHead | None) -> None:
        """Load or compile machine code for calls like this one."""
        ...

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: int | None, per_head: PerHead | None) -> Outputs:
        """Output and, where `return_lse` is set, LSE."""
        ...


def guarded(tensors: Sequence[Tensor]) -> bool:
    """True where `check_of` can compare with these: it distinguishes aliased arguments from separate ones."""
    return has_guards and len({id(x) for x in tensors}) == len(tensors)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Recent:
    """Plan of a kind of calls, with the conditions under which it serves again: of dense ones without a mask and per-head arguments, or of
    packed ones with their `options`.

    `check` is True where tensors agree in type, dtype, device, sizes, strides, requires_grad and dispatch keys with those that the
    plan served, under the modes, transforms and autocast of this thread. The need for a gradient depends on the grad mode, too: `grad_mode`
    is the one in which the plan served, None where no tensor requires a gradient. `check` doesn't see the dtype to which autocast casts:
    `cast_to` is the one under which the plan served, None without autocast. `places` are those of the tensors among a packed call's
    arguments, out of which `picked` takes them; `device` is the type of the tensors' device.
    """

    options: tuple[Any, ...]
    seeded: bool
    grad_mode: bool | None
    cast_to: torch.dtype | None
    check: Callable[..., bool]
    plan: Any
    places: tuple[int, ...] = ()
    picked: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple
    device: str = ""

    def unchanged(self, addresses: Sequence[int]) -> bool:
        """True where all else is as when the plan served, and every tensor begins at a multiple of 16 bytes."""
        return (
            (self.grad_mode is None or self.grad_mode is torch.is_grad_enabled())
            and (self.cast_to is None or self.cast_to is torch.get_autocast_dtype(self.device))
            and FORWARD_AD._current_level < 0
            and not C._len_torch_dispatch_stack()
            and flash_attention_on()
            and gcd(16, *addresses) == 16
        )


MOST_RECENT = 4096
"""Most kinds of packed calls by options and bounds of lengths, which grow; beyond it all are dropped."""


class Plans(dict[Hashable, Plan]):
    """Plans by signature; `recent` is the one that served last, where it has a fast path, and `packed` are those of packed and paged calls
    that served last with each kind of options; `flex` are calls with functions."""

    __slots__ = ("_made", "flex", "packed", "recent")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.recent: Recent | None = None
        self.packed: dict[Hashable, Recent] = {}
        self._made: dict[Hashable, Recent] = {}
        self.flex: dict[Hashable, Any] = {}

    def alike(self, words: Hashable, recent: Recent) -> None:
        """Let what served packed calls with some options serve those with these `words` too."""
        if len(self.packed) >= MOST_RECENT:
            self.packed.clear()
        self.packed[words] = recent

    def clear(self) -> None:
        """Drop all plans."""
        super().clear()
        self.recent = None
        self.packed.clear()
        self._made.clear()
        self.flex.clear()

    def served(
        self,
        signature: Hashable,
        plan: Any,
        options: tuple[Any, ...],
        *,
        seeded: bool,
        cast_to: torch.dtype | None = None,
        tensors: Sequence[Tensor],
        places: tuple[int, ...] = (),
        latent: bool = False,
    ) -> None:
        """Put the plan that served these tensors on the fast path of dense calls, or of the packed ones with such options, among whose
        tensors they have these `places`; a `latent` one serves no values beside keys."""
        if not guarded(tensors):
            return
        made = self._made.get(signature)
        if made is None or made is (self.packed.get(options) if places else self.recent):
            # An entry of this signature that rejects its tensors was made under another mode.
            check = check_of(tensors)
            if latent:
                check = partial(_also_in_columns, check)
            grad_mode = torch.is_grad_enabled() if any(x.requires_grad for x in tensors) else None
            made = self._made[signature] = Recent(
                options, seeded, grad_mode, cast_to, check, plan, places, itemgetter(*places) if places else tuple,
                tensors[0].device.type,
            )  # fmt: skip
        if places:
            self.packed[options] = made
        else:
            self.recent = made
        if signature not in self:
            # Another thread cleared the cache meanwhile.
            self.clear()


def _also_in_columns(check: Callable[..., bool], query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> bool:
    """True where a check passes, and values still begin where keys do, whose strides it has compared."""
    return check(query, key, value, *others) and key.data_ptr() == value.data_ptr()


_MASK64 = 2**64 - 1

_DRAWING = threading.Lock()
"""Lock for reading a generator's position and advancing it, which isn't atomic in Python.

It excludes our other threads, but not PyTorch's own use of the generator, so that the two steps are adjacent.
"""


def capturing(device: torch.device) -> bool:
    """True under CUDA graph capture, where the generator's position can't be read and a sampled seed would be the same at every replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def random_bits(seed: int | None, device: torch.device) -> tuple[int, int]:
    """(seed, offset) of one call's dropout: the caller's seed with offset 0, else sampled from PyTorch's default generator of the device.

    On a GPU it is derived from the generator's own seed and position, which is then advanced: nothing waits for the GPU, and
    torch.manual_seed, checkpointing and torch.random.fork_rng work as for PyTorch's own dropout. The offset is 0 always, since a backward
    gets the seed alone.
    """
    if seed is not None:
        return seed_bits(seed), 0
    if device.type == "cuda":
        generator = _generator(device)
        with _DRAWING:
            position = generator.get_offset()
            generator.set_offset(position + 4)
        return _mixed(generator.initial_seed() % 2**64, position // 4 % 2**32), 0
    return int(torch.randint(2**63 - 1, ()).item()), 0


def relaxed(run: Callable[..., Outputs], *given: Any) -> Outputs:
    """Outputs of a plan's `run` under capture in relaxed mode, forward and backward.

    cuDNN and cuBLAS allocate at their first call in a thread, autograd's own threads among them, which stricter modes refuse; calls before
    the capture may have run our kernels alone.
    """
    if torch.version.cuda is None:
        return run(*given)
    *tensors, seed, per_head = given
    outputs: Outputs = _Relaxed.apply(  # type: ignore[no-untyped-call]
        lambda *x: run(*x[:4], seed, per_head and type(per_head)(*x[4:])), *tensors, *(per_head or ())
    )
    return outputs


class _Relaxed(torch.autograd.Function):
    """Autograd function of `run`, whose graph is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Outputs], *given: Any) -> Outputs:
        requested = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(needed) if isinstance(x, Tensor) else x for x, needed in zip(given, requested, strict=True)]
        with driver.relaxed_capture(), torch.set_grad_enabled(any(requested)):
            outputs = run(*inputs)
        ctx.graph = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad], outputs
        ctx.set_materialize_grads(False)
        return outputs[0].detach(), None if outputs[1] is None else outputs[1].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted, outputs = ctx.graph
        pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if out is not None and grad is not None]
        with driver.relaxed_capture():
            found = iter(torch.autograd.grad([out for out, _ in pairs], wanted, [grad for _, grad in pairs], True, allow_unused=True))
        return None, *(next(found) if needed else None for needed in ctx.needs_input_grad[1:])


def restorer(device: torch.device) -> Callable[[], object]:
    """Callable that restores the present state of the device's default generator."""
    generator = _generator(device)
    return partial(generator.set_state, generator.get_state())


def _generator(device: torch.device) -> torch.Generator:
    """PyTorch's default generator of a device."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _mixed(seed: int, offset: int) -> int:
    """64 bits of a generator's seed and position: SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (seed + (offset + 1) * 0x9E3779B97F4A7C15) & _MASK64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK64
    return x ^ x >> 31
