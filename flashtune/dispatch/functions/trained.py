"""Kernels with a mask and a score as code, and their gradients, of dense tensors and of packed sequences."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashtune.dispatch.call.sequences import Packed
from flashtune.dispatch.functions.blocks import FlexCall, Passes, blocks
from flashtune.dispatch.functions.by_torch import by_matrices, of_sequence
from flashtune.dispatch.functions.kernels import kernel_of, launch
from flashtune.dispatch.plans.autograd import apply, differentiated, readable
from flashtune.dispatch.rows.by_sequence import by_sequence
from flashtune.dispatch.rows.kernel import Kernel, NotBuilt
from flashtune.templates.mods.emit import Captured, Mods, emitted
from flashtune.templates.mods.scores import as_function


def types_of(captured: Sequence[Tensor], trains: Sequence[bool]) -> tuple[Captured, ...]:
    """Types of captured tensors, of which these get gradients."""
    return tuple(Captured(x.dtype, x.dim(), trained and x.is_floating_point()) for x, trained in zip(captured, trains, strict=True))


def attend_by_kernels(query: Tensor, key: Tensor, value: Tensor, call: FlexCall, *, with_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """Output and LSE, which may be None without `with_lse`, of a call, with its gradients where it has a backward."""
    if call.kernels.backward is None:
        return _forward(query, key, value, call, with_lse=with_lse)
    query, key, value = _whole(query, key, value, call)
    bounds = (None, None, None) if call.sequences is None else call.sequences.bounds
    out, lse = apply(FunctionsPlan(call), None, query, key, value, *bounds, *call.captured)
    return out, lse


def _forward(query: Tensor, key: Tensor, value: Tensor, call: FlexCall, *, with_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    launched, kernel = call.launched, call.kernels.forward
    lists = None if launched is None else launched.lists()
    if lists is None:
        lists, lasting = _lists(call, kernel, query, key)
        if launched is not None and lasting:
            launched.keep_lists(lists)
    if launched is not None and (again := launched.again(kernel, [*call.captured, *lists])) is not None:
        repeat, mods = again
        return repeat.run(query, call.found, mods, with_lse=with_lse)
    query, key, value = _whole(query, key, value, call)
    if call.sequences is None and query.transpose(1, 2).is_contiguous():
        # The output has the queries' memory layout.
        out = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])).transpose(1, 2)
    else:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    lse = query.new_empty(query.shape[:3] if call.sequences is None else query.shape[1::-1], dtype=torch.float32)
    operands, more = (query, key, value, out, lse), [*call.captured, *_of_all(lists, query)]
    program = launch(kernel, operands, more, call.scale, call.sequences)
    if launched is not None and program is not None:
        launched.keep(kernel, program, operands, () if call.sequences is None else call.sequences.bounds, more)
    return out, lse


def _whole(query: Tensor, key: Tensor, value: Tensor, call: FlexCall) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, the latter two expanded to all batches where these share one."""
    if call.sequences is None and key.shape[0] != query.shape[0]:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    return query, key, value


class FunctionsPlan:
    """Plan of a call whose gradients, which are needed, kernels compute; its tensors are query, key, value, bounds and captured ones."""

    __slots__ = ("call",)
    returns_lse = True

    def __init__(self, call: FlexCall) -> None:
        self.call = call.of((), ())

    def outputs(self, seed: int | None, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, int]:
        """Output and LSE; nothing is dropped."""
        out, lse = _forward(query, key, value, self.call.of(others[:3], others[3:]))
        assert lse is not None, "it is wanted"
        return out, lse, 0

    def gradients(self, requested: Sequence[bool], bits: int, *given: Any) -> list[Tensor | None]:
        """Requested gradients, by a kernel or matrices of all scores."""
        dout, dlse, out, lse, query, key, value, *bounds = given[:10]
        captured, call = given[10:], self.call.of(bounds, given[10:])
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)]
        operands = (query, key, value, out, lse, *readable(out, dout, dlse), *gradients)
        while (found := _of_gradients(call, (query, key, value), captured, requested[6:])) is not None:
            kernel, mods = found
            now = call._replace(kernels=Passes(kernel, mods))
            # Sums of atomic additions start from 0, and are rounded once.
            sums = {place: torch.zeros(captured[place].shape, dtype=torch.float32, device=query.device) for place in mods.trained}
            # Its next kernel, where one can't be built.
            with suppress(NotBuilt):
                more = [*captured, *_of_all(_lists(now, kernel, query, key, backward=True)[0], query), *sums.values()]
                launch(kernel, operands, more, call.scale, call.sequences)
                of_captured = [sums[place].to(x.dtype) if place in sums else None for place, x in enumerate(captured)]
                of_rows = [x if needed else None for x, needed in zip(gradients, requested, strict=False)]
                return [*of_rows, None, None, None, *of_captured]
        return self.traced(requested, bits, *given)

    def traced(self, requested: Sequence[bool], bits: int, *given: Any) -> list[Tensor | None]:
        """The same by matrices of all scores, differentiated."""
        dout, dlse, _, lse, *tensors = given
        return differentiated(self._by_matrices, tensors, requested, dout, dlse, lse)

    def _by_matrices(self, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        call, captured = self.call.of(others[:3], others[3:]), others[3:]
        score, mask = (None if x is None else as_function(x, captured) for x in (call.functions.score, call.functions.mask))
        if call.sequences is None:
            return by_matrices(query, key, value, score, mask, call.scale)
        packed = Packed(query, key, value, *call.sequences.bounds)
        return by_sequence(packed, call.sequences.numbers, 0, partial(of_sequence, by_matrices, score, mask))


def _of_gradients(
    call: FlexCall, tensors: tuple[Tensor, Tensor, Tensor], captured: Sequence[Tensor], trains: Sequence[bool]
) -> tuple[Kernel, Mods] | None:
    """The kernel of gradients of query, key and value, and of the captured tensors that ask here, with its functions; None where none is
    left that can be built."""
    kernel, mods = call.kernels.backward, call.kernels.trained
    if kernel is None or mods is None or kernel.failed or list(trains) != [x.requires_grad for x in captured]:
        mods = emitted(call.functions.score, call.functions.mask, types_of(captured, trains), call.functions.blocks, backward=True)
        found = kernel_of("bwd", *tensors, mods, sequences=call.sequences)
        if isinstance(found, str):
            return None
        kernel = found
    return kernel, mods


def _lists(call: FlexCall, kernel: Kernel, query: Tensor, key: Tensor, *, backward: bool = False) -> tuple[list[Tensor], bool]:
    """The lists of blocks that a kernel walks, in its order, each as `blocks` gives it, and True where all are kept with their mask."""
    if not call.mods.listed(kernel.spec):
        return [], True
    # Of keys come first, where there are both.
    places = enumerate(kernel.tiles[: 2 if backward else 1])
    found = [blocks(call, kernel, query, key, tile, of_keys=backward and place == 0) for place, tile in places]
    return [lists for lists, _ in found], all(lasting for _, lasting in found)


def _of_all(lists: Sequence[Tensor], query: Tensor) -> list[Tensor]:
    """Lists of blocks, expanded to each batch and head."""
    return [x.expand(*query.shape[:2], -1, -1) for x in lists]
