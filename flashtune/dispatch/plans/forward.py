"""Plans of the forward pass by a kernel, whose launches are prepared at a signature's first call, and the latch to a fallback kernel."""

import contextlib
import math
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
from flashtune.core.pytorch.private import C
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.dispatch.call.call import Call, Outputs, PerHead
from flashtune.dispatch.plans import driver, launch
from flashtune.dispatch.plans.launch import Code, Program
from flashtune.dispatch.plans.misprediction import MISPREDICTIONS, Latch, Misprediction
from flashtune.dispatch.plans.plan import Plan, capturing, padded, placed, random_bits
from flashtune.dispatch.plans.pytorch import TorchPlan

_NO_MORE = (0,) * (len(Tensors._fields) - launch.MASK - 1 - len(PER_HEAD))
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
        "_counters",
        "_hands_on",
        "_heads",
        "_in_graphs",
        "_layout",
        "_like_query",
        "_lse_offset",
        "_memory",
        "_moves_sign",
        "_plain",
        "_rest",
        "_scratch",
        "_temporaries",
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
        self._counters = 0
        self._copies_mask = self._moves_sign = False
        # Addresses of per-head arguments that aren't tensors.
        self._heads = [0] * len(PER_HEAD)
        self._plain = True
        self._like_query = False
        self._temporaries: tuple[int, ...] = ()
        self._scratch = self._lse_offset = 0
        # True where a launch of a call reads scratch that an earlier launch of it wrote.
        self._hands_on = False
        # Addresses after the counters for a call without a mask and per-head arguments, where there are no temporaries.
        self._rest: tuple[int, ...] = (0, *self._heads, *_NO_MORE)
        # Stream of the last call, its counters and scratch, and `_rest` with its temporaries; one tuple, to be read atomically.
        self._memory: tuple[int, int, int, tuple[int, ...]] = (-1, 0, 0, ())

    def build(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, per_head: PerHead | None) -> None:
        """Load or compile machine code for calls like this one; an exception here is the kernel's own fault."""
        call = self.call
        if not driver.driven(call.device):
            return
        with torch.cuda.device(call.device):
            operands, parameters = self._given(query, key, value, mask, per_head)
            q, k, *_ = operands
            if (host := self.code.module.host) is not None:
                self._copies_mask = launching.bias_copy(host, parameters.mask) is not None
                self._moves_sign = host.positive_scale and call.scale <= 0.0
            self._counters = self.code.module.counts_needed(q, k)
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
                self._take_memory_for(self.program)

    def _take_memory_for(self, program: Program) -> None:
        """Lay out the scratch memory of a call."""
        self._plain = program.last_source <= launch.COUNTS
        self._temporaries, self._scratch = placed(program.temporaries)
        self._hands_on = len(program.planned) > 1 and bool(program.temporaries)
        if not self.call.return_lse:
            # Kernels always write the LSE.
            self._lse_offset = self._scratch
            self._scratch += padded(math.prod(self._layout[2]) * 4)

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
        call, program, device, index = self.call, self.program, self.call.device, self.call.device.index
        if program is not None and C._cuda_getDevice() != index:
            # Before sampling a seed, which would advance the generator twice.
            with torch.cuda.device(device):
                return self.run(query, key, value, mask, seed, per_head)
        bits: tuple[int, ...] = ()
        if call.dropout_p:
            if seed is None and capturing(call.device):
                # A seed sampled here would be the same at every replay of the graph.
                return TorchPlan(call=call).captured(query, key, value, mask, seed, per_head)
            bits = random_bits(seed, device)
        if program is None:
            return self._through_triton(query, key, value, mask, bits, per_head)
        if not call.identity:
            query, key, value = call.views(query, key, value)
        if self._moves_sign and self.code.module.host is not None:
            query, _ = launching.positive_scale(self.code.module.host, query, call.scale)
        shape, strides, lse_shape, lse_strides = self._layout
        out = torch.empty_like(query) if self._like_query else torch.empty_strided(shape, strides, dtype=call.out_dtype, device=device)
        stream, counts, scratch, rest = C._cuda_getCurrentRawStream(index), 0, 0, self._rest
        held: Tensor | None = None
        if self._counters or self._scratch:
            known, counts, scratch, rest = self._memory
            in_graph = C._cuda_isCurrentStreamCapturing()
            if in_graph or known != stream:
                counts, scratch, held = self._stream_memory(stream, in_graph)
                rest = self._behind(scratch)
        lse: Tensor | None = None
        if call.return_lse:
            lse = torch.empty_strided(lse_shape, lse_strides, dtype=torch.float32, device=device)
            lse_at = lse.data_ptr()
        else:
            lse_at = scratch + self._lse_offset
        addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), lse_at, counts]
        copies: list[object] | None = None
        if not self._plain:
            more = rest
            if mask is not None or per_head is not None:
                more, *copies = self._more_addresses(mask, per_head, scratch)
            addresses += more
        if self._hands_on and held is None:
            # Launches of another thread on this stream could interleave with these, and use the same scratch.
            with driver.STREAM_MEMORY.turn(index, stream):
                program.run(addresses, stream, bits)
        else:
            program.run(addresses, stream, bits)
        # All launches are enqueued: later work of this stream may reuse the memory.
        del held, copies
        if lse is None:
            return out if call.rank == 4 else call.restored(out), None
        return (out, lse) if call.rank == 4 else (call.restored(out), call.restored(lse))

    def _more_addresses(self, mask: Tensor | None, per_head: PerHead | None, scratch: int) -> tuple[Any, ...]:
        """Addresses of a mask, per-head arguments, a copied bias and temporaries; and what may be copies, to be kept until launches are
        enqueued."""
        call, views, heads = self.call, None, self._heads
        full, bias = call.full_mask(mask), None
        if self._copies_mask and self.code.module.host is not None:
            bias = launching.bias_copy(self.code.module.host, full)
        if per_head is not None:
            views = per_head.views(call)
            heads = [known if x is None else x.data_ptr() for x, known in zip(views, heads, strict=True)]
        found = 0 if full is None else full.data_ptr(), *heads, 0 if bias is None else bias.data_ptr(), *_NO_MORE[1:]
        return found + tuple([scratch + offset for offset in self._temporaries]), full, bias, views

    def _stream_memory(self, stream: int, in_graph: bool) -> tuple[int, int, Tensor | None]:
        """Addresses of counters and scratch for a launch on this stream, and the scratch tensor where PyTorch allocates it."""
        counts, device = 0, self.call.device
        if self._counters:
            counts = driver.STREAM_MEMORY.counters(device.index, stream, self._counters, in_graph)
        if in_graph or self._scratch > driver.StreamMemory.MOST_SCRATCH:
            # A graph needs memory from its own pool, and large calls run long enough on the GPU to hide an allocation.
            held = torch.empty(self._scratch, dtype=torch.uint8, device=device)
            return counts, held.data_ptr(), held
        scratch = driver.STREAM_MEMORY.scratch(device.index, stream, self._scratch) if self._scratch else 0
        self._memory = (stream, counts, scratch, self._behind(scratch))
        return counts, scratch, None

    def _behind(self, scratch: int) -> tuple[int, ...]:
        """`_rest` with the addresses of temporaries in this scratch memory."""
        return (*self._rest, *(scratch + offset for offset in self._temporaries))

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
        return call.restored(operands[launch.OUT]), call.restored(operands[launch.LSE]) if call.return_lse else None

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
