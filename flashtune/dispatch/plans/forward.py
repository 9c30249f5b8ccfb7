"""Plans of the forward pass by a kernel, whose launches are prepared at a signature's first call, and the latch to a fallback kernel."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.code import launching
from flashtune.core.code.launching import Tensors
from flashtune.core.problems.config import Config
from flashtune.core.problems.parameters import PER_HEAD, CallParameters
from flashtune.core.pytorch.attention import out_strides
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.dispatch.call.call import Call, Outputs, PerHead
from flashtune.dispatch.plans import driver, launch, program
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.plans.misprediction import MISPREDICTIONS, Latch, Misprediction
from flashtune.dispatch.plans.plan import Plan, capturing, random_bits
from flashtune.dispatch.plans.program import Program
from flashtune.dispatch.plans.pytorch import TorchPlan

_NO_MORE = (0,) * (len(Tensors._fields) - program.MASK - 1 - len(PER_HEAD))
"""Addresses of a copied bias and of what a dense forward lacks, behind per-head arguments."""


class Fallback(NamedTuple):
    """Kernel that serves in a plan's place, for mispredicted softmax or in CUDA graphs: a config of the same family, and a factory of its
    plan, which may fail or return None."""

    config: Config
    plan: Callable[[], "KernelPlan | None"]


class KernelPlan(Plan):
    """Plan that launches a forward's kernel, or its fallback kernel once the softmax was mispredicted (`latch`)."""

    __slots__ = (
        "__weakref__",
        "_copies_mask",
        "_heads",
        "_in_graphs",
        "_layout",
        "_like_query",
        "_moves_sign",
        "_plain",
        "_rest",
        "call",
        "code",
        "fallback",
        "in_graphs",
        "latch",
        "program",
    )  # fmt: skip

    def __init__(
        self,
        call: Call,
        code: Code,
        q_strides: tuple[int, ...],
        *,
        fallback: Fallback | None = None,
        in_graphs: Fallback | None = None,
    ) -> None:
        """`q_strides` are those of q (B, Hq, N_q, D) as the kernel takes it: the output's dimensions have its memory order, as in PyTorch.
        Launches go through the driver where they are prepared (`program`), else through Triton's own launcher."""
        self.call, self.code = call, code
        self.program: Program | None = None
        self.fallback = fallback
        self.latch: Latch[KernelPlan] | None = None
        self._in_graphs: Fallback | KernelPlan | None = in_graphs
        self.in_graphs = None if in_graphs is None else in_graphs.config
        """Config of the kernel that graphs run, where it is another."""
        shape = (call.batch, call.heads, call.n_q, call.d_v)
        self._layout = (shape, out_strides(shape, q_strides), shape[:3], (call.heads * call.n_q, call.n_q, 1))
        self._copies_mask = self._moves_sign = False
        # Addresses of per-head arguments that aren't tensors.
        self._heads = [0] * len(PER_HEAD)
        # True where launches take no address beyond the counters.
        self._plain = True
        self._like_query = False
        # Addresses after the counters, for a call without a mask and per-head arguments.
        self._rest: tuple[int, ...] = (0, *self._heads, *_NO_MORE)

    def build(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, per_head: PerHead | None) -> None:
        """Load or compile machine code for calls like this one; an exception here is the kernel's own fault."""
        call = self.call
        if not driver.driven(call.device):
            return
        with torch.cuda.device(call.device):
            operands, parameters = self._given(query, key, value, mask, per_head)
            q = operands[0]
            if (host := self.code.module.host) is not None:
                self._copies_mask = launching.bias_copy(host, parameters.mask) is not None
                self._moves_sign = host.positive_scale and call.scale <= 0.0
            if call.factors is not None:
                factors = launch.resident_factors(call.device, call.factors)
                resident: dict[str, int] = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
                self._heads = [resident.get(name, 0) for name in PER_HEAD]
                self._rest = (0, *self._heads, *_NO_MORE)
            counts = self._counts(q.device.index)
            misses = None if counts is None else counts.addresses
            self.program = self.code.program(lambda kernel: launch.planned(kernel, operands, parameters, misses))
            if self.program is not None:
                if counts is not None:
                    counts.programs, self.latch = self.program.programs, Latch(counts, self._instead)
                self._like_query = self._layout[1] == q.stride() and call.d == call.d_v and call.out_dtype == call.dtype
                self._plain = self.program.last_source <= program.COUNTS

    def _counts(self, device: int) -> Misprediction | None:
        """Counts of the kernel's mispredicting programs; None where they would have no effect."""
        # Deterministic calls are always served by the same kernel.
        if self.fallback is None or self.call.deterministic or not self.code.module.counts_misses:
            return None
        return MISPREDICTIONS.of(device, (self.fallback.config, self.call))

    @property
    def misprediction(self) -> Misprediction | None:
        """Counts of mispredicting programs, where they have an effect."""
        return None if self.latch is None else self.latch.state

    def _instead(self, *given: Any) -> "KernelPlan | None":
        """Plan of the fallback kernel."""
        assert self.fallback is not None, "a plan without one counts nothing"
        return self._built("a kernel mispredicts softmax, but its fallback", self.fallback, *given)

    def _built(self, why: str, wanted: Fallback, *given: Any) -> "KernelPlan | None":
        """Plan of another kernel, built with the arguments `given`; None, and a warning that begins with `why`, where it can't serve."""
        try:
            other = wanted.plan()
            if other is not None:
                other.build(*given)
            if other is None or other.program is None:
                raise EnvironmentProblem("its launches can't be prepared here")
        except Exception as error:
            self.code.warn(f"flashtune: {why} {wanted.config.label()} can't run: {error}")
            return None
        return other

    def _captured(self, *given: Any) -> "KernelPlan | None":
        """Plan of the kernel that a graph runs, built at the first capture; None where that is this one, and outside of a capture."""
        if not capturing(self.call.device) or torch.are_deterministic_algorithms_enabled():
            return None
        if isinstance(self._in_graphs, Fallback):
            with driver.relaxed_capture():
                self._in_graphs = self._built("CUDA graphs run a kernel that is slower in them, since", self._in_graphs, *given)
        return self._in_graphs

    def run(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: int | None, per_head: PerHead | None) -> Outputs:
        """Output and, where `return_lse` is set, LSE; on the tensors' device and its current stream."""
        if self._in_graphs is not None and (captured := self._captured(query, key, value, mask, per_head)) is not None:
            return captured.run(query, key, value, mask, seed, per_head)
        if (latch := self.latch) is not None and latch.suspect:
            other = latch.serving(query, key, value, mask, per_head)
            if other is not None:
                return other.run(query, key, value, mask, seed, per_head)
        call, device = self.call, self.call.device
        bits: tuple[int, ...] = ()
        if call.dropout_p:
            if seed is None and capturing(call.device):
                # A seed sampled here would be the same at every replay of the graph.
                return TorchPlan(call=call).captured(query, key, value, mask, seed, per_head)
            bits = random_bits(seed, device)
        if (prepared := self.program) is None:
            return self._through_triton(query, key, value, mask, bits, per_head)
        if not call.identity:
            query, key, value = call.views(query, key, value)
        if self._moves_sign and self.code.module.host is not None:
            query, _ = launching.positive_scale(self.code.module.host, query, call.scale)
        shape, strides, lse_shape, lse_strides = self._layout
        out = torch.empty_like(query) if self._like_query else torch.empty_strided(shape, strides, dtype=call.out_dtype, device=device)
        lse: Tensor | None = None
        lse_at = 0
        if call.return_lse:
            lse = torch.empty_strided(lse_shape, lse_strides, dtype=torch.float32, device=device)
            lse_at = lse.data_ptr()
        addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), lse_at, 0]
        copies: list[object] | None = None
        if not self._plain:
            rest = self._rest
            if mask is not None or per_head is not None:
                rest, *copies = self._more_addresses(mask, per_head)
            addresses += rest
        prepared.run(addresses, bits)
        # All launches are enqueued: later work of this stream may reuse the memory.
        del copies
        if lse is None:
            return out if call.rank == 4 else call.restored(out), None
        return (out, lse) if call.rank == 4 else (call.restored(out), call.restored(lse))

    def _more_addresses(self, mask: Tensor | None, per_head: PerHead | None) -> tuple[Any, ...]:
        """Addresses of a mask, per-head arguments and a copied bias; and what may be copies, to be kept until launches are
        enqueued."""
        call, views, heads = self.call, None, self._heads
        full, bias = call.full_mask(mask), None
        if self._copies_mask and self.code.module.host is not None:
            bias = launching.bias_copy(self.code.module.host, full)
        if per_head is not None:
            views = per_head.views(call)
            heads = [known if x is None else x.data_ptr() for x, known in zip(views, heads, strict=True)]
        found = 0 if full is None else full.data_ptr(), *heads, 0 if bias is None else bias.data_ptr(), *_NO_MORE[1:]
        return found, full, bias, views

    def _through_triton(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bits: tuple[int, ...], per_head: PerHead | None
    ) -> Outputs:
        """Outputs by the module's own launcher."""
        call = self.call
        operands, parameters = self._given(query, key, value, mask, per_head)
        if bits:
            parameters = replace(parameters, seed=bits[0], offset=bits[1])
        with torch.cuda.device(call.device) if call.device.type == "cuda" else contextlib.nullcontext():
            launching.launcher(self.code.module)(*operands, **parameters.keywords())
        return call.restored(operands[program.OUT]), call.restored(operands[program.LSE]) if call.return_lse else None

    def _given(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, per_head: PerHead | None
    ) -> tuple[launch.Operands, CallParameters]:
        """Operands and parameters of a launch, but for dropout's seed; the outputs newly allocated."""
        call = self.call
        q, k, v = call.views(query, key, value)
        shape, stride, lse_shape, lse_stride = self._layout
        out = torch.empty_strided(shape, stride, dtype=call.out_dtype, device=call.device)
        lse = torch.empty_strided(lse_shape, lse_stride, dtype=torch.float32, device=call.device)
        return (q, k, v, out, lse), call.parameters(call.full_mask(mask), per_head)
