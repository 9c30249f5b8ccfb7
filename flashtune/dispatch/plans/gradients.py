"""Plans of the backward pass: prepared launches of a kernel, or the formula in PyTorch operations."""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from flashtune.core import launching
from flashtune.core.launching import LoadedKernel
from flashtune.core.parameters import CallParameters
from flashtune.core.torch_attention import readable
from flashtune.dispatch import framework
from flashtune.dispatch.call import Call
from flashtune.dispatch.launch import devices, prepared
from flashtune.dispatch.plans.forward import ModulePlan
from flashtune.dispatch.plans.memory import out_strides, placed

_Maybe = torch.Tensor | None

Gradients = tuple[_Maybe, _Maybe, _Maybe, _Maybe, _Maybe]
"""Gradients of query, key, value, each laid out as its input, of the bias, of its own sizes, and of slopes; None for those not requested.
"""

MOST_LAYOUTS = 256
"""Memory layouts of one call's tensors with a plan; beyond it all plans of the call are dropped and chosen anew."""


class BackwardInputs(NamedTuple):
    """Inputs of a backward.

    `query`, `key`, `value` and `out` are 4-D, as the forward had them, `lse` (B, Hq, N_q) float32, `dout` is like `out`, `dlse` (None: 0)
    like `lse`. The mask broadcasts to the scores; `slopes` and `sinks` are (B, Hq). `seed` is that of dropout's mask. The booleans are the
    requested gradients.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    mask: torch.Tensor | None
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    seed: int
    of_query: bool
    of_keys: bool
    of_mask: bool = False
    of_slopes: bool = False
    of_sinks: bool = False

    @property
    def requested(self) -> tuple[str, ...]:
        """Requested gradients beside dQ, dK and dV (`flashtune.core.problem.ASKED`)."""
        return ("dbias",) * self.of_mask + ("dslopes",) * self.of_slopes

    def parameters(self, call: Call) -> CallParameters:
        """Parameters of a launch beside its operands."""
        return CallParameters(
            scale=call.scale,
            band=call.band,
            mask=call.full_mask(self.mask),
            softcap=call.softcap,
            dropout_p=call.dropout_p,
            seed=self.seed,
            slopes=self.slopes,
            sinks=self.sinks,
        )


class Layout:
    """Memory layout of gradients, computed once for inputs with the same layout."""

    __slots__ = ("_like", "_places")

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self._places = [(tuple(x.shape), out_strides(tuple(x.shape), x.stride()), x.dtype, x.device) for x in inputs]  # type: ignore[arg-type]
        self._like = [place[1] == x.stride() for place, x in zip(self._places, inputs, strict=True)]

    def made(self, which: int, like: torch.Tensor) -> torch.Tensor:
        """Uninitialised gradient of an input."""
        if self._like[which]:
            return torch.empty_like(like)
        shape, strides, dtype, device = self._places[which]
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)


class GradientPlan(ModulePlan):
    """Plan that launches a backward's kernels."""

    __slots__ = ("_all", "_copies_mask", "_layout", "_scratch", "_temporaries")

    def __init__(self, call: Call, module: LoadedKernel, **others: Any) -> None:
        super().__init__(call, module, **others)
        # True where all gradients are computed, requested or not: machine code is shipped for that alone.
        self._all = self._copies_mask = False
        self._temporaries: tuple[int, ...] = ()
        self._scratch = 0

    def build(self, inputs: BackwardInputs) -> None:
        """Load or compile machine code for calls like this one; an exception here is the kernels' own fault."""
        call = self.call
        self._layout = Layout((inputs.query, inputs.key, inputs.value))
        if call.device.type != "cuda" or torch.version.cuda is None or self.module.counts_needed(inputs.query, inputs.key):
            return
        parameters = inputs.parameters(call)
        if self.module.host is not None:
            self._copies_mask = launching.bias_copy(self.module.host, parameters.mask) is not None
        with torch.cuda.device(call.device):
            self.program = self._prepared(self._operands(inputs), parameters, compiles=self._whole is None)
            if self.program is None and not devices.TRITON:
                self._all = True
                self.program = self._prepared(self._operands(inputs), parameters, compiles=False)
            if self.program is None and self._whole is not None:
                self._all, self.module = False, self._whole()
                self.program = self._prepared(self._operands(inputs), parameters, compiles=True)
        if self.program is not None:
            self._temporaries, self._scratch = placed(self.program.temporaries)

    def run(self, inputs: BackwardInputs) -> Gradients:
        """Requested gradients; on the tensors' device and its current stream."""
        program, call = self.program, self.call
        if program is None:
            return self._through_triton(inputs)
        index = call.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(inputs)
        operands = self._operands(inputs)
        mask, slopes, sinks = inputs.mask, inputs.slopes, inputs.sinks
        # Allocated per call, from a graph's pool under capture: nothing is shared, and nothing outlives the call.
        scratch = torch.empty(self._scratch, dtype=torch.uint8, device=call.device)
        start = scratch.data_ptr()
        bias = None
        if self._copies_mask and self.module.host is not None:
            bias = launching.bias_copy(self.module.host, call.full_mask(mask))
        addresses = [0 if x is None else x.data_ptr() for x in operands]
        addresses += [
            # Counters, which backwards don't have.
            0,
            0 if mask is None else mask.data_ptr(),
            # Factors of fp8, which has no backward.
            0 if slopes is None else slopes.data_ptr(),
            0,
            0,
            0,
            0 if sinks is None else sinks.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        ]
        for offset in self._temporaries:
            addresses.append(start + offset)
        program.run(addresses, torch._C._cuda_getCurrentRawStream(index), (inputs.seed, 0))
        return self._requested(inputs, operands)

    def _operands(self, inputs: BackwardInputs) -> tuple[Any, ...]:
        """Operands of a launch, the gradients newly allocated."""
        of_query, of_keys = inputs.of_query or self._all, inputs.of_keys or self._all
        query, key, value, made, dlse = inputs.query, inputs.key, inputs.value, self._layout.made, inputs.dlse
        if dlse is None and self._all:
            dlse = torch.zeros_like(inputs.lse)
        dq = made(0, query) if of_query else None
        dk, dv = (made(1, key), made(2, value)) if of_keys else (None, None)
        operands = query, key, value, inputs.out, inputs.lse, inputs.dout, dlse, dq, dk, dv
        if not (inputs.of_mask or inputs.of_slopes):
            return operands
        more = []
        if inputs.of_mask and inputs.mask is not None:
            own = torch.empty(inputs.mask.shape, dtype=inputs.mask.dtype, device=inputs.mask.device)
            more.append(own.expand(self.call.batch, self.call.heads, self.call.n_q, self.call.n_kv))
        if inputs.of_slopes:
            more.append(torch.empty_like(inputs.lse))
        return *operands, *more

    def _requested(self, inputs: BackwardInputs, operands: prepared.Operands) -> Gradients:
        dq, dk, dv, *more = operands[7:]
        dbias = dslopes = None
        if inputs.of_mask and inputs.mask is not None:
            dbias = more[0][tuple(slice(size) for size in inputs.mask.shape)]
        if inputs.of_slopes:
            dslopes = more[-1].sum(-1)
        return dq if inputs.of_query else None, dk if inputs.of_keys else None, dv if inputs.of_keys else None, dbias, dslopes

    def _through_triton(self, inputs: BackwardInputs) -> Gradients:
        """Requested gradients by the module's own launcher."""
        operands = self._operands(inputs)
        with torch.cuda.device(self.call.device) if self.call.device.type == "cuda" else contextlib.nullcontext():
            launching.launcher(self.module)(*operands, **inputs.parameters(self.call).keywords())
        return self._requested(inputs, operands)


class FormulaPlan:
    """Plan that computes gradients in PyTorch operations, where no kernel takes the call."""

    __slots__ = ("_layout", "call")

    def __init__(self, call: Call, inputs: BackwardInputs) -> None:
        self.call, self._layout = call, Layout((inputs.query, inputs.key, inputs.value))

    def run(self, inputs: BackwardInputs) -> Gradients:
        """Requested gradients."""
        qkv, requested = (inputs.query, inputs.key, inputs.value), (inputs.of_query, inputs.of_keys, inputs.of_keys)
        # Autocast around a backward would round the formula's float32 products.
        with framework.no_autocast(self.call.device.type):
            found = framework.gradients(
                *qkv,
                inputs.out,
                inputs.lse,
                inputs.dout,
                inputs.dlse,
                inputs.parameters(self.call),
                bias=inputs.mask if inputs.of_mask else None,
                of_slopes=inputs.of_slopes,
            )
        dq, dk, dv = (
            self._layout.made(which, like).copy_(values) if wanted else None
            for which, (like, values, wanted) in enumerate(zip(qkv, found[:3], requested, strict=True))
        )
        return dq, dk, dv, found[3], found[4]


Choose = Callable[[Call, BackwardInputs], tuple[GradientPlan | FormulaPlan, Gradients]]


class Backward:
    """Gradients of one call's output and LSE: a plan for each memory layout of its tensors."""

    __slots__ = ("_choose", "_plans", "call")

    def __init__(self, call: Call, choose: Choose) -> None:
        """`choose` picks a plan and computes with it where none is cached; several threads may call it at once."""
        self.call, self._choose = call, choose
        self._plans: dict[Hashable, tuple[GradientPlan | FormulaPlan, bool]] = {}

    def gradients(self, inputs: BackwardInputs) -> tuple[_Maybe, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe]:
        """Requested gradients, and that of sinks. Any strides will do: hooks on saved tensors may have changed them."""
        if not inputs.of_sinks or inputs.sinks is None:
            return *self._of_kernels(inputs), None
        dsinks = framework.sink_gradients(inputs.sinks, inputs.out, inputs.lse, inputs.dout, inputs.dlse)
        if not (inputs.of_query or inputs.of_keys or inputs.requested):
            return None, None, None, None, None, dsinks
        return *self._of_kernels(inputs), dsinks

    def _of_kernels(self, inputs: BackwardInputs) -> Gradients:
        query, key, value, out, lse, dout, dlse, mask, slopes, sinks, _, of_query, of_keys, of_mask, of_slopes, _ = inputs
        addresses = query.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr() | lse.data_ptr() | dout.data_ptr()
        layout = (
            query.stride(),
            key.stride(),
            value.stride(),
            out.stride(),
            lse.stride(),
            dout.stride(),
            addresses % 16,
            None if dlse is None else (dlse.stride(), dlse.data_ptr() % 16),
            of_query,
            of_keys,
            of_mask,
            of_slopes,
            None if mask is None and slopes is None and sinks is None else _places(mask, slopes, sinks),
            torch.are_deterministic_algorithms_enabled(),
        )
        found = self._plans.get(layout)
        if found is None:
            return self._first(layout, inputs)
        plan, readable = found
        return plan.run(inputs if readable else _readable(inputs))

    def _first(self, layout: Hashable, inputs: BackwardInputs) -> Gradients:
        """Choose a plan, run it and cache it."""
        readable = _readable(inputs)
        plan, found = self._choose(self.call, readable)
        if len(self._plans) >= MOST_LAYOUTS:
            self._plans.clear()
        self._plans[layout] = plan, readable is inputs
        return found


def _places(*tensors: torch.Tensor | None) -> Hashable:
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)


def _readable(inputs: BackwardInputs) -> BackwardInputs:
    """Inputs in the layouts that kernels need; copies where they have to be.

    Gradients of the output have dense rows on 16-byte boundaries without broadcasting, the LSE and its gradient are contiguous, since
    kernels get no strides of these, and the mask starts on a 16-byte boundary, which TMA requires.
    """
    lse, dout, dlse, mask = inputs.lse, inputs.dout, inputs.dlse, inputs.mask
    unit = 16 // dout.element_size()
    outer = [stride for size, stride in zip(dout.shape[:3], dout.stride()[:3], strict=True) if size > 1]
    fits = dout.stride(3) == 1 and dout.data_ptr() % 16 == 0 and all(stride and stride % unit == 0 for stride in outer)
    placed = mask is None or mask.data_ptr() % 16 == 0
    if fits and placed and lse.is_contiguous() and (dlse is None or dlse.is_contiguous()):
        return inputs
    dout = dout if fits else dout.clone(memory_format=torch.contiguous_format)
    mask = mask if mask is None or placed else readable(mask, repeats=True)
    return inputs._replace(dout=dout, lse=lse.contiguous(), dlse=None if dlse is None else dlse.contiguous(), mask=mask)
