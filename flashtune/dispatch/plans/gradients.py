"""Plans of the backward pass: prepared launches of a kernel, or the reference, differentiated."""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.code import launching
from flashtune.core.code.launching import LoadedKernel, Tensors
from flashtune.core.problems import reference
from flashtune.core.problems.parameters import CallParameters
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.attention import out_strides, readable
from flashtune.dispatch.call.call import Call
from flashtune.dispatch.plans import autograd, driver, launch
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.plans.program import Program
from flashtune.dispatch.plans.pytorch import no_autocast

_Maybe = Tensor | None

Gradients = tuple[_Maybe, _Maybe, _Maybe, _Maybe, _Maybe]
"""Gradients of query, key, value, each laid out as its input, of the bias, of its own sizes, and of slopes; None for those not requested.
"""

ROWS = 256
"""Query rows per step of `ReferencePlan`, whose scores are kept in memory at a time."""

SINK_ELEMENTS = 2**23
"""Elements of the output widened to float32 at a time for the gradient of sinks."""

MOST_LAYOUTS = 256
"""Memory layouts of one call's tensors with a plan; beyond it all plans of the call are dropped and chosen anew."""


class BackwardInputs(NamedTuple):
    """Inputs of a backward.

    `query`, `key`, `value` and `out` are 4-D, as the forward had them, `lse` (B, Hq, N_q) float32, `dout` is like `out`, `dlse` (None: 0)
    like `lse`. The mask broadcasts to the scores; `slopes` and `sinks` are (B, Hq). `seed` is that of dropout's mask. The booleans are the
    requested gradients.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    mask: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    seed: int
    of_query: bool
    of_keys: bool
    of_mask: bool = False
    of_slopes: bool = False
    of_sinks: bool = False

    @property
    def requested(self) -> tuple[str, ...]:
        """Requested gradients beside dQ, dK and dV (`flashtune.core.problems.problem.ASKED`)."""
        return ("dbias",) * self.of_mask + ("dslopes",) * self.of_slopes

    def parameters(self, call: Call) -> CallParameters:
        """Parameters of a launch beside its operands."""
        return replace(call.parameters(call.full_mask(self.mask), None), seed=self.seed, slopes=self.slopes, sinks=self.sinks)


class Layout:
    """Memory layout of gradients, computed once for inputs with the same layout."""

    __slots__ = ("_like", "_places")

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._places = [(tuple(x.shape), out_strides(tuple(x.shape), x.stride()), x.dtype, x.device) for x in inputs]  # type: ignore[arg-type]
        self._like = [place[1] == x.stride() for place, x in zip(self._places, inputs, strict=True)]

    def made(self, which: int, like: Tensor) -> Tensor:
        """Uninitialised gradient of an input."""
        if self._like[which]:
            return torch.empty_like(like)
        shape, strides, dtype, device = self._places[which]
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)


class GradientPlan:
    """Plan that launches a backward's kernels."""

    __slots__ = ("_all", "_copies_mask", "_layout", "call", "code", "program")

    def __init__(self, call: Call, code: Code) -> None:
        self.call, self.code = call, code
        self.program: Program | None = None
        # True where all gradients are computed, requested or not: machine code is shipped for that alone.
        self._all = self._copies_mask = False

    def build(self, inputs: BackwardInputs) -> None:
        """Load or compile machine code for calls like this one; an exception here is the kernels' own fault."""
        call = self.call
        self._layout = Layout((inputs.query, inputs.key, inputs.value))
        if not driver.driven(call.device) or self.code.module.counts_needed(inputs.query, inputs.key):
            return
        parameters = inputs.parameters(call)
        if self.code.module.host is not None:
            self._copies_mask = launching.bias_copy(self.code.module.host, parameters.mask) is not None

        def planned(kernel: LoadedKernel) -> launching.Plan | None:
            return launch.planned(kernel, self._operands(inputs), parameters)

        with torch.cuda.device(call.device):
            self.program = self.code.prepared(planned)
            if self.program is None and not devices.TRITON:
                self._all = True
                self.program = self.code.prepared(planned)
            if self.program is None and self.code.load():
                self._all = False
                self.program = self.code.prepared(planned)

    def run(self, inputs: BackwardInputs) -> Gradients:
        """Requested gradients; on the tensors' device and its current stream."""
        program, call = self.program, self.call
        if program is None:
            return self._through_triton(inputs)
        operands = self._operands(inputs)
        mask, slopes, sinks = inputs.mask, inputs.slopes, inputs.sinks
        bias = None
        if self._copies_mask and self.code.module.host is not None:
            bias = launching.bias_copy(self.code.module.host, call.full_mask(mask))
        # Backwards have no counters, and fp8 has no backward.
        _, _, _, _, _, dout, dlse, dq, dk, dv, *_ = operands
        places = dout, dlse, dq, dk, dv, *_more(inputs, operands)
        query, key, value, out, lse = inputs[:5]
        tensors = Tensors(query, key, value, out, lse, None, mask, slopes, None, None, None, sinks, bias, *places)
        program.run(launching.addresses(tensors), (inputs.seed, 0))
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

    def _requested(self, inputs: BackwardInputs, operands: launch.Operands) -> Gradients:
        dq, dk, dv = operands[7:10]
        dbias, dslopes = _more(inputs, operands)
        if dbias is not None and inputs.mask is not None:
            dbias = dbias[tuple(slice(size) for size in inputs.mask.shape)]
        of_slopes = None if dslopes is None else dslopes.sum(-1)
        return dq if inputs.of_query else None, dk if inputs.of_keys else None, dv if inputs.of_keys else None, dbias, of_slopes

    def _through_triton(self, inputs: BackwardInputs) -> Gradients:
        """Requested gradients by the module's own launcher."""
        operands = self._operands(inputs)
        with torch.cuda.device(self.call.device) if self.call.device.type == "cuda" else contextlib.nullcontext():
            launching.launcher(self.code.module)(*operands, **inputs.parameters(self.call).keywords())
        return self._requested(inputs, operands)


def _more(inputs: BackwardInputs, operands: launch.Operands) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a bias and of slopes among a launch's operands."""
    return operands[10] if inputs.of_mask and inputs.mask is not None else None, operands[-1] if inputs.of_slopes else None


class ReferencePlan:
    """Plan that differentiates the reference in float32, for calls that no kernel takes; scores of `ROWS` queries are kept at a time."""

    __slots__ = ("_layout", "call")

    def __init__(self, call: Call, inputs: BackwardInputs) -> None:
        self.call, self._layout = call, Layout((inputs.query, inputs.key, inputs.value))

    def run(self, inputs: BackwardInputs) -> Gradients:
        """Requested gradients."""
        from torch.utils.checkpoint import checkpoint

        tensors: list[Any] = [inputs.query, inputs.key, inputs.value, inputs.mask, inputs.slopes]
        requested = inputs.of_query, inputs.of_keys, inputs.of_keys, inputs.of_mask, inputs.of_slopes

        def forward(*leaves: Any) -> tuple[Tensor, Tensor]:
            # Widened once, so that the gradients of all rows are summed in float32.
            q, k, v, mask, slopes = (x.float() if x is not None and x.requires_grad else x for x in leaves)
            assert q is not None, "a call has queries"
            queries = torch.split(q, ROWS, 2)
            masks = [mask] * len(queries) if mask is None or mask.shape[2] == 1 else torch.split(mask, ROWS, 2)
            rows = functools.partial(checkpoint, self._rows, use_reentrant=False, preserve_rng_state=False)
            parts = [rows(inputs, i * ROWS, *of_rows, k, v, slopes) for i, of_rows in enumerate(zip(queries, masks, strict=True))]
            out, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
            return out, lse

        # Autocast around a backward would round float32 products.
        with no_autocast(self.call.device.type):
            found = autograd.differentiated(forward, tensors, requested, inputs.dout.float(), inputs.dlse, inputs.lse)
        dq, dk, dv, dbias, dslopes = found
        made = [None if x is None else self._layout.made(i, tensors[i]).copy_(x) for i, x in enumerate((dq, dk, dv))]
        return made[0], made[1], made[2], dbias, dslopes

    def _rows(
        self, inputs: BackwardInputs, first: int, q: Tensor, mask: _Maybe, k: Tensor, v: Tensor, slopes: _Maybe
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE of rows from `first` on."""
        call, keep = self.call, None
        if call.dropout_p:
            sizes = call.batch, call.heads, q.shape[2], call.n_kv
            keep = reference.dropout_keep(inputs.seed, 0, *sizes, call.dropout_p, call.device, first=first)
        parameters = replace(inputs.parameters(call), mask=mask, band=call.band.from_row(first), slopes=slopes)
        return reference.attention(q, k, v, keep=keep, dtype=torch.float32, **parameters.formula())


def sink_gradients(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Gradient of `sinks` (B, Hq), float32, of an output (B, Hq, N_q, D_v) and its LSE; `SINK_ELEMENTS` are widened at a time.

    A sink's probability in a row is exp(sink - LSE), and its value is 0, so that each row contributes -exp(sink - LSE) (rowsum(dO * O) -
    dLSE).
    """
    found = torch.zeros_like(sinks, dtype=torch.float32)
    step = max(1, SINK_ELEMENTS // max(1, out[:, :, :1].numel()))
    for first in range(0, lse.shape[2], step):
        rows = slice(first, first + step)
        delta = out[:, :, rows].to(torch.float32, copy=True).mul_(dout[:, :, rows]).sum(-1)
        if dlse is not None:
            delta -= dlse[:, :, rows]
        # A row without keys and with a sink of -inf contributes nothing, nor does padding, whose gradients may be anything.
        probs = torch.exp(sinks.float()[..., None] - lse[:, :, rows]).masked_fill(lse[:, :, rows] == float("-inf"), 0.0)
        found -= (probs * delta).masked_fill(probs == 0.0, 0.0).sum(-1)
    return found


Choose = Callable[[Call, BackwardInputs], tuple[GradientPlan | ReferencePlan, Gradients]]


class Backward:
    """Gradients of one call's output and LSE: a plan for each memory layout of its tensors."""

    __slots__ = ("_choose", "_plans", "call")

    def __init__(self, call: Call, choose: Choose) -> None:
        """`choose` picks a plan and computes with it where none is cached; several threads may call it at once."""
        self.call, self._choose = call, choose
        self._plans: dict[Hashable, tuple[GradientPlan | ReferencePlan, bool]] = {}

    def gradients(self, inputs: BackwardInputs) -> tuple[_Maybe, _Maybe, _Maybe, _Maybe, _Maybe, _Maybe]:
        """Requested gradients, and that of sinks. Any strides will do: hooks on saved tensors may have changed them."""
        if not inputs.of_sinks or inputs.sinks is None:
            return *self._of_kernels(inputs), None
        dsinks = sink_gradients(inputs.sinks, inputs.out, inputs.lse, inputs.dout, inputs.dlse)
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
            # Which of them are aligned, where not all are: a plan was compiled for that, and one that is copied isn't another.
            addresses % 16 and tuple(x.data_ptr() % 16 for x in (query, key, value, out, lse, dout)),
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


def _places(*tensors: Tensor | None) -> Hashable:
    return tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)


def _readable(inputs: BackwardInputs) -> BackwardInputs:
    """Inputs in the layouts that kernels need; copies where they have to be. A mask starts on a 16-byte boundary, which TMA requires."""
    (dout, dlse), lse, mask = autograd.readable(inputs.out, inputs.dout, inputs.dlse), inputs.lse, inputs.mask
    placed = mask is None or mask.data_ptr() % 16 == 0
    if placed and lse.is_contiguous() and dout is inputs.dout and dlse is inputs.dlse:
        return inputs
    mask = mask if mask is None or placed else readable(mask, repeats=True)
    return inputs._replace(dout=dout, lse=lse.contiguous(), dlse=dlse, mask=mask)
