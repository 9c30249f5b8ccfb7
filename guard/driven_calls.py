"""One call by tensors on a pretended GPU: what serves it, and its launches with addresses named by the tensors that they belong to."""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from pretended import FIRST_ADDRESS, Launched, Pretended, forget

from flashtune import dispatch

FACES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (dispatch.attention, dispatch.explain),
    "attention_varlen": (dispatch.attention_varlen, dispatch.explain_varlen),
    "flex_attention": (dispatch.flex_attention, dispatch.explain_flex),
}
"""Each way in, and the explanation of its choice."""

STREAM_BYTES = 1 << 20
"""Least bytes of the driver's memory that one stream's launches share: it is taken anew for each call, so that offsets in it repeat."""
ONE_CALLS = 256
"""Most bytes of the driver's memory that belong to one plan alone."""


@dataclass(frozen=True, slots=True)
class Given:
    """Arguments of a call: its tensors by name, all others, and what its functions capture. Tensors that require gradients get them."""

    tensors: dict[str, torch.Tensor | None]
    words: dict[str, Any] = field(default_factory=dict)
    captured: dict[str, torch.Tensor] = field(default_factory=dict)
    kinds: Callable[[Launched], None] = lambda launch: None
    """Computes the kinds of a mask's tiles, which the host reads, where the pretended GPU was asked to."""

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """Tensors that get a gradient."""
        every = self.tensors | self.captured
        return {name: x for name, x in every.items() if x is not None and x.requires_grad}


def entry(machine: Pretended, gpu: str, face: str, make: Callable[[], Given], *, unmeasured: bool = False) -> dict[str, Any]:
    """The choice of a call, and its launches: forward, backward where gradients are wanted, and those of a second call that differ."""
    dispatch.reload()
    machine.on(gpu)
    forget()
    machine.made.clear()
    call, explain = FACES[face]
    layer = dispatch.use(unmeasured=True) if unmeasured else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as warned, layer:
        warnings.simplefilter("always")
        given = make()
        machine.driver.kinds = given.kinds
        try:
            found: dict[str, Any] = {"choice": choice_of(explain(**given.tensors, **given.words))}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        if found["choice"][0] in ("framework", "provider"):
            return found
        found |= _launches(machine, call, make())
        again = _launches(machine, call, make())
        if again != {name: found.get(name) for name in again}:
            found["again"] = again
    said = sorted({str(one.message) for one in warned if "flashtune" in str(one.message)})
    return found | {"warned": said} if said else found


def choice_of(explained: dispatch.Explanation) -> list[Any]:
    """The parts of an explanation that say what serves."""
    config, fallback = (None if one is None else one.label() for one in (explained.config, explained.twin))
    said = [explained.kind, explained.template, config, fallback, explained.reason]
    return said if explained.backward is None else [*said, choice_of(explained.backward)]


def _launches(machine: Pretended, call: Callable[..., Any], given: Given) -> dict[str, Any]:
    """Launches of a call and of its gradients, a line each."""
    machine.driver.kinds = given.kinds
    watched = _Watched(machine, {**given.tensors, **given.captured})
    try:
        returned = call(**given.tensors, **given.words)
        outputs = list(returned) if isinstance(returned, tuple) else [returned]
        found = {"forward": watched.lines(dict(zip(("out", "lse"), outputs, strict=False)))}
        if given.trained:
            differentiable = [x for x in outputs if x.requires_grad]
            grads = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in differentiable]
            watched.known |= dict(zip(("dout", "dlse"), grads, strict=False))
            made = torch.autograd.grad(differentiable, list(given.trained.values()), grads, allow_unused=True)
            found["backward"] = watched.lines({f"d{name}": x for name, x in zip(given.trained, made, strict=True)})
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return found


class _Watched:
    """Launches as they come, with their addresses by owner. Owners are known when a launch comes: memory may be given again later."""

    def __init__(self, machine: Pretended, named: dict[str, torch.Tensor | None]) -> None:
        self.known: dict[str, torch.Tensor | None] = dict(named)
        self._machine = machine
        self._met: list[tuple[Launched, dict[str, Any]]] = []
        machine.driver.watch = lambda one: self._met.append((one, {name: self._placed(x) for name, x in one.values.items()}))

    def _placed(self, value: Any) -> Any:
        """A value with the owner of its address: a tensor and an offset, or a word."""
        if isinstance(value, tuple):
            return self._owner(value[0]), value[1]
        return (self._owner(value.address), "") if hasattr(value, "address") else value

    def _owner(self, address: int) -> Any:
        if not address:
            return "null"
        if address >= FIRST_ADDRESS and (size := self._machine.driver.size_of(address)) is not None:
            offset = f"+{address % (1 << 32)}" if size >= STREAM_BYTES or size <= ONE_CALLS else ""
            return f"driver's{offset}" if size >= STREAM_BYTES else f"driver's {size} bytes{offset}"
        if self._machine.driver.is_hosts(address):
            return "host's"
        within = [x for x in (*self.known.values(), *self._machine.made) if x is not None and 0 <= address - _start(x) < _bytes(x)]
        # Tensors may be parts of one: the one that begins nearest below.
        return (max(within, key=lambda x: x.data_ptr() * (x.data_ptr() <= address)), address) if within else "elsewhere"

    def lines(self, made: dict[str, torch.Tensor | None]) -> list[str]:
        """The launches so far, with these tensors that they wrote named, too."""
        names = {id(x): name for name, x in self.known.items() if x is not None}
        # Outputs may be views of the tensor that was made.
        outputs = {_start(x): name for name, x in made.items() if x is not None}
        self.known |= made
        numbers: dict[int, int] = {}

        def said(owner: Any) -> str:
            if isinstance(owner, str):
                return owner
            x, address = owner
            name = names.get(id(x)) or outputs.get(_start(x))
            if name is None:
                name = f"scratch{numbers.setdefault(_start(x), len(numbers))} of {_bytes(x)} bytes"
            return name if address == x.data_ptr() else f"{name}{address - x.data_ptr():+}"

        found = [_line(one, {name: _text(value, said) for name, value in values.items()}) for one, values in self._met]
        self._met.clear()
        return found


def _start(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _bytes(x: torch.Tensor) -> int:
    return x.untyped_storage().nbytes()


def _text(value: Any, said: Callable[[Any], str]) -> str:
    if isinstance(value, tuple):
        owner, form = value
        return f"{said(owner)} {form}".rstrip()
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _line(one: Launched, values: dict[str, str]) -> str:
    grid = "x".join(map(str, one.grid))
    return ", ".join([one.kernel, one.code, f"grid={grid}", *(f"{name}={x}" for name, x in values.items())])
