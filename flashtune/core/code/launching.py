"""Launches on tensors: a kernel's host side applied to a call's tensors, and the arguments that a device provides."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from flashtune.core.code.launches import Descriptor, Host, Launch, LaunchInputs, Operand, Pages, Resident, Scratch, Varying, copyable
from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.parameters import FACTORS

TYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "u1": torch.bool, "u8": torch.uint8,
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
    "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
"""PyTorch's element types by Triton's names."""

_NAMES = {dtype: name for name, dtype in TYPES.items()}
_COUNTS: dict[tuple[torch.device, int], torch.Tensor] = {}
_UNREAD: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

_FORWARD = ("q", "k", "v", "out", "lse")
_BACKWARD = (*_FORWARD, "dout", "dlse", "dq", "dk", "dv")


class Tensors(NamedTuple):
    """Every tensor that a launch may name, in the one order of their sources (`Operand.source`); None for those that a call lacks.

    A launch takes them as `LaunchInputs` says. `bias` is the copy of a mask that the copy engine can't read, `counted` and `mirror` are
    `misses`, `cu_q`, `cu_k` and `used` are `lengths`. Behind these come the tensors of functions (`LaunchInputs.mods`), then scratch
    memory. A forward without features has the first six at most.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    counts: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    dout: torch.Tensor | None = None
    dlse: torch.Tensor | None = None
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None
    dbias: torch.Tensor | None = None
    dslopes: torch.Tensor | None = None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    used: torch.Tensor | None = None
    table: torch.Tensor | None = None
    counted: torch.Tensor | None = None
    mirror: torch.Tensor | None = None

    @classmethod
    def of(cls, spec: KernelSpec, operands: Sequence[torch.Tensor | None], **others: torch.Tensor | None) -> "Tensors":
        """The tensors of a pass, its operands in the order of `operand_names`."""
        # Called at every launch: a dictionary of all names takes three times as long.
        if spec.direction == "fwd":
            return cls(*operands, **others)  # type: ignore[arg-type]
        q, k, v, out, lse, dout, dlse, dq, dk, dv, *more = operands
        if more:
            others |= dict(zip(operand_names(spec)[len(_BACKWARD) :], more, strict=True))
        return cls(q, k, v, out, lse, dout=dout, dlse=dlse, dq=dq, dk=dk, dv=dv, **others)  # type: ignore[arg-type]


def addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Where tensors begin in memory, 0 for those that a call lacks."""
    return [0 if x is None else x.data_ptr() for x in tensors]


def operand_names(spec: KernelSpec) -> tuple[str, ...]:
    """Names of a pass's positional tensors, in order."""
    if spec.direction == "fwd":
        return _FORWARD
    return (*_BACKWARD, *("dbias",) * spec.dbias, *("dslopes",) * spec.dslopes)


def operand(source: int, x: torch.Tensor) -> Operand:
    """The description of a tensor for host code."""
    # Meta tensors have no address, and count as aligned.
    aligned = x.device.type == "meta" or x.data_ptr() % 16 == 0
    return Operand(source, tuple(x.shape), tuple(x.stride()), _NAMES[x.dtype], aligned)


class Plan(NamedTuple):
    """The launches of one call as data, the tensors that their operands name (`Tensors`, then those of functions), and the scratch memory
    behind these."""

    launches: list[Launch]
    tensors: list[torch.Tensor | None]
    scratch: list[Operand]
    counts: int = 0
    """Elements of `counts` that the launches may take."""
    lse_bytes: int = 0
    """Bytes of the LSE that a forward writes, whether or not a caller wants it; 0 for a backward, which reads it."""


def plan(host: Host, tensors: Tensors, mods: Sequence[torch.Tensor] = (), **numbers: Any) -> Plan:
    """The launches of a call: its tensors, those of its functions, and its numbers, by the names of LaunchInputs.

    Where the kernel needs it, a scale that isn't positive moves into a copy of q, and a bias that the copy engine can't read is copied.
    `misses` may be among the numbers as Residents in place of tensors, and `pages` as (max_q, max_k, splits).
    """
    q, scale = positive_scale(host, tensors.q, numbers.pop("scale"))
    tensors = tensors._replace(q=q, bias=bias_copy(host, tensors.mask))
    places: dict[str, Any] = {name: operand(i, x) for i, (name, x) in enumerate(tensors._asdict().items()) if x is not None}
    cu_q, cu_k, used, table, counted, mirror = (places.pop(name, None) for name in tensors._fields[-6:])
    factors = [places.pop(name, None) for name in FACTORS]
    if "bias" not in places and "mask" in places:
        places["bias"] = host.narrowed_bias(places["mask"])
    if cu_q is not None:
        places["lengths"] = (cu_q, cu_k, used)
    if table is not None:
        # Queries have no factor beside pages.
        places["pages"] = Pages(table, *numbers.pop("pages"))
        factors[0] = places["q"]
    if any(factors):
        places["descale"] = tuple(factors)
    if counted is not None:
        places["misses"] = (counted, mirror)
    everything: list[torch.Tensor | None] = [*tensors, *mods]
    places["mods"] = tuple(operand(len(tensors) + i, x) for i, x in enumerate(mods))
    scratch = Scratch(len(everything))
    inputs = LaunchInputs(**places | numbers, scale=scale)
    counts, lse_bytes = 0 if tensors.counts is None else tensors.counts.numel(), 4 * tensors.lse.numel() * (tensors.dout is None)
    return Plan(host.launches(inputs, scratch), everything, scratch.operands, counts, lse_bytes)


def keyword_plan(host: Host, operands: Sequence[torch.Tensor | None], keywords: Mapping[str, Any]) -> Plan:
    """The launches of a call whose operands are in the order of `operand_names`, and all else as `launch` of a rendered module takes it.

    They are the call's parameters (`CallParameters.keywords`) with the device's (`provided`), and `mods`: the tensors of functions, or a
    function of the config that makes them, since lists of blocks depend on its tiles.
    """
    numbers = dict(keywords)
    others = {name: numbers.pop(name, None) for name in ("counts", "mask", "slopes", "sinks", "table")}
    others |= dict(zip(FACTORS, numbers.pop("descale", None) or (), strict=False))
    others |= dict(zip(("cu_q", "cu_k", "used"), numbers.pop("lengths", None) or (), strict=False))
    misses: Any = numbers.pop("misses", None)
    mods: Any = numbers.pop("mods", ())
    if misses is not None and isinstance(misses[0], torch.Tensor):
        others |= dict(zip(("counted", "mirror"), misses, strict=True))
    elif misses is not None:
        numbers["misses"] = misses
    if callable(mods):
        mods = mods(host.config)
    return plan(host, Tensors.of(host.spec, operands, **others), mods, **numbers)


def positive_scale(host: Host, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """q and the scale as the kernel takes them: where it needs a positive scale, the sign moves into a copy of q, with the strides of q."""
    if scale > 0.0 or not host.positive_scale:
        return q, scale
    copy = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    # PyTorch can't write to a tensor that repeats an element in memory, so each is written once.
    once = tuple(slice(None if step else 1) for step in q.stride())
    if q.dtype.itemsize == 1:
        # PyTorch can't negate e4m3; the sign is the highest bit.
        bits = q.view(torch.uint8)[once]
        torch.bitwise_xor(bits, 128 if scale < 0.0 else bits, out=copy.view(torch.uint8)[once])
    elif scale < 0.0:
        torch.neg(q[once], out=copy[once])
    else:
        copy.zero_()
    return copy, -scale or 1.0


def bias_copy(host: Host, mask: torch.Tensor | None) -> torch.Tensor | None:
    """An aligned copy of an additive mask (B, Hq, N_q, N_kv), without repetitions, where the copy engine can't read the mask
    itself; else None."""
    if mask is None:
        return None
    narrowed = host.narrowed_bias(operand(0, mask))
    if narrowed is None or copyable(narrowed):
        return None
    part = mask[tuple(slice(size) for size in narrowed.shape)]
    unit = 16 // part.element_size()
    padded = torch.empty(*part.shape[:3], -(-part.shape[3] // unit) * unit, dtype=part.dtype, device=part.device)
    # The copy engine reads zeros outside of the view.
    copy = padded[..., : part.shape[3]]
    return copy.copy_(part)


class LoadedKernel:
    """A kernel's host side, and the module of its kernels where these are loaded for Triton to launch; `name` begins with its template's.

    Without a host (a template of one's own) the module's own functions `accepts`, `counts_needed` and `launches` take its place. Other
    attributes are the module's.
    """

    def __init__(self, host: Host | None, module: ModuleType | None = None, name: str = "kernel") -> None:
        self.host, self.module, self.name = host, module, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def interpreted(self) -> bool:
        """True if Triton's interpreter runs the kernels."""
        from triton import knobs

        return bool(knobs.runtime.interpret)

    def accepts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """True if the kernel takes tensors of these layouts."""
        if self.host is None:
            return bool(self.module.accepts(q, k, v, mask))  # type: ignore[union-attr]
        interpreted = self.module is not None and self.interpreted
        q_, k_, v_ = (operand(i, x) for i, x in enumerate((q, k, v)))
        return self.host.accepts(q_, k_, v_, None if mask is None else operand(3, mask), interpreted=interpreted)

    def counts_needed(self, q: torch.Tensor, k: torch.Tensor) -> int:
        """Elements of `counts` that a launch takes."""
        if self.host is None:
            return int(self.module.counts_needed(q, k))  # type: ignore[union-attr]
        return self.host.counts_needed(operand(0, q), operand(1, k))

    @property
    def counts_misses(self) -> bool:
        """True if launches count the programs whose frozen row maxima mispredicted."""
        return self.host is not None and self.host.counts_misses

    def launches(self, *tensors: torch.Tensor | None, **kwargs: Any) -> list[tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]]:
        """Each launch of a call as Triton takes it: the kernel, its grid, its arguments, and the compiler's options."""
        if self.host is None:
            found: list[Any] = self.module.launches(*tensors, **kwargs)  # type: ignore[union-attr]
            return found
        planned = keyword_plan(self.host, tensors, kwargs)
        arguments = Arguments(planned)
        return [(getattr(self.module, one.kernel), one.grid, arguments.of(one), dict(one.options)) for one in planned.launches]


class Arguments:
    """Arguments of planned launches for Triton: tensors and descriptors in place of operands, and `numbers` of varying ones, if given."""

    def __init__(self, planned: Plan, numbers: Sequence[int] = ()) -> None:
        self._numbers = numbers
        self._tensors = planned.tensors
        self._device = next(x.device for x in planned.tensors if x is not None)
        self._scratch = [torch.empty(x.shape, dtype=TYPES[x.dtype], device=self._device) for x in planned.scratch]

    def of(self, launch: Launch) -> tuple[Any, ...]:
        """The arguments of one launch."""
        return tuple(map(self._argument, launch.arguments))

    def _argument(self, x: Any) -> Any:
        if isinstance(x, Operand):
            return self._tensor(x)
        if isinstance(x, Varying) and self._numbers:
            return self._numbers[x.source]
        if isinstance(x, Resident):
            # Triton compiles for the type and the alignment alone.
            return torch.empty(1, dtype=torch.int64, device="meta")
        return self._descriptor(x) if isinstance(x, Descriptor) else x

    def _tensor(self, x: Operand) -> torch.Tensor:
        tensor = [*self._tensors, *self._scratch][x.source]
        assert tensor is not None, "launches use only tensors of their call"
        if tensor.dtype != TYPES[x.dtype]:
            tensor = tensor.view(TYPES[x.dtype])
        same = tuple(tensor.shape) == x.shape and tuple(tensor.stride()) == x.strides
        return tensor if same else tensor.as_strided(x.shape, x.strides)

    def _descriptor(self, x: Descriptor) -> Any:
        base = self._tensor(x.base)
        if x.layout == "triton":
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(base, list(x.shape), list(x.strides), list(x.block))
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        width = x.base.item_bytes
        # The swizzle depends on the width of elements alone.
        layout: Any = (
            gl.NVMMASharedLayout(0, 8 * width, len(x.block))
            if x.layout == "plain"
            else gl.NVMMASharedLayout.get_default_for(list(x.block), {1: gl.uint8, 2: gl.uint16}[width])
        )
        return GluonDescriptor(base, list(x.shape), list(x.strides), list(x.block), layout)


@functools.cache
def sms_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 16 on other devices, where the interpreter needs few programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def counts_of(device: torch.device, size: int) -> torch.Tensor | None:
    """At least `size` int32 counts on the device, zero before a launch and after it; None where `size` is 0.

    Launches on the current stream share them, one after the other. A graph under capture gets its own counts, since it may be
    replayed on any stream.
    """
    if size == 0:
        return None
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.int32, device=device)
    place = device, torch.cuda.current_stream(device).cuda_stream
    if place not in _COUNTS or _COUNTS[place].numel() < size:
        _COUNTS[place] = torch.zeros(size, dtype=torch.int32, device=device)
    return _COUNTS[place]


def unread(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts of launches and mispredicting programs that are never read: int64 on the device, the count and its mirror."""
    if device not in _UNREAD:
        _UNREAD[device] = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(9, dtype=torch.int64, device=device)
    return _UNREAD[device]


def provided(kernel: LoadedKernel, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """The keyword arguments `sms`, `counts` and `misses` for a launch of a kernel on these tensors, on the current stream."""
    found: dict[str, Any] = {"sms": sms_of(q.device), "counts": counts_of(q.device, kernel.counts_needed(q, k))}
    if kernel.counts_misses:
        found["misses"] = unread(q.device)
    return found


def compiler_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a launch for Triton, with fused multiply-adds unless they say otherwise."""
    return {"enable_fp_fusion": True, **options}


def launcher(kernel: LoadedKernel) -> Callable[..., None]:
    """A function that runs the launches of a kernel on the current stream, with the arguments `provided` at each call.

    Settings override `sms` and `counts`: with fewer multiprocessors a kernel starts fewer programs.
    """

    def launch(q: torch.Tensor, k: torch.Tensor, *tensors: torch.Tensor | None, **settings: Any) -> None:
        for function, grid, args, options in kernel.launches(q, k, *tensors, **(provided(kernel, q, k) | settings)):
            function[grid](*args, **compiler_options(options))

    return launch
