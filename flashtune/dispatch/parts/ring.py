"""`ring`: attention over keys that lie on several ranks; they move from rank to rank beside the computation."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.api import attention
from flashtune.dispatch.call.inspection import autocast
from flashtune.dispatch.parts.merge import gradients, merge


def ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Any = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    allow_tf32: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
) -> Any:
    """Attention of this rank's queries over the keys of all ranks of a group, with gradients; each rank calls it with its own tokens.

    Each step computes attention over the keys that are here, by `attention`, while they are sent on. The gradients go round likewise, and
    compute each step's forward anew: no rank ever holds more than two ranks' keys.

    Args:
        query: (B, Hq, N, D), the queries of this rank's tokens; as many on each rank.
        key: (B, Hkv, N_kv, D), their keys.
        value: (B, Hkv, N_kv, D_v), their values.
        group: process group of torch.distributed; None is that of all processes.
        is_causal: hide later tokens' keys. Ranks hold their tokens in zigzag order, with which all have the same work: of 2 W equal pieces
            of the sequence, rank r of W has piece r and then piece 2 W - 1 - r.
        scale: factor of the scores; None is 1 / sqrt(D).
        enable_gqa: allow Hq to be a multiple of Hkv.
        softcap: as in `attention`.
        sinks: (Hq,), as in `attention`; their gradient is that of this rank's queries.
        return_lse: return (output, LSE).
        allow_tf32: as in `attention`.
        deterministic: as in `attention`.
        implementation: as in `attention`, for each step.

    Returns:
        The output (B, Hq, N, D_v) of this rank's tokens, or (output, LSE).

    Raises:
        InputError: for arguments that make no sense, and without a process group.
        InputTypeError: for arguments of a wrong type.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise InputError("ring has no ranks: call torch.distributed.init_process_group first, or attention for tokens of one process")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise InputTypeError(f"{name} must be a tensor, not {type(x).__name__}: pass this rank's part")
        if x.dim() != 4:
            raise InputError(f"{name} has {x.dim()} dimensions: give this rank's part, (batch, heads, tokens, head size)")
    here = dist.group.WORLD if group is None else group
    if dist.get_rank(here) < 0:
        raise InputError(f"this process isn't in {here}: call ring on the ranks of its group alone")
    if is_causal and (query.shape[2] != key.shape[2] or query.shape[2] % 2):
        raise InputError(
            f"{query.shape[2]} queries and {key.shape[2]} keys have no zigzag order: give each rank of a causal ring two equal pieces"
        )
    words: dict[str, Any] = {
        "scale": scale,
        "enable_gqa": enable_gqa,
        "softcap": softcap,
        "allow_tf32": allow_tf32,
        "deterministic": deterministic,
    }
    words |= {"implementation": implementation, "return_lse": True}
    # The backward runs where autocast is off.
    tensors = autocast(query, key, value, None)[:3]
    out, lse = _Ring.apply(Steps(here, is_causal, words), *tensors, sinks)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class Steps(NamedTuple):
    """A ring's group and arguments of its calls."""

    group: Any
    causal: bool
    words: dict[str, Any]

    def each(self, rows: int, keys: int) -> list[tuple[slice, slice, bool]]:
        """Queries and keys of each step's call, and True for the one that is causal, in the order in which keys arrive."""
        import torch.distributed as dist

        rank, count = dist.get_rank(self.group), dist.get_world_size(self.group)
        if not self.causal:
            return [(slice(0, rows), slice(0, keys), False)] * count
        # Of an earlier rank only the first piece is earlier than ours; a later rank's pieces both lie between ours.
        earlier = slice(0, rows), slice(0, keys // 2), False
        later = slice(rows // 2, rows), slice(0, keys), False
        return [(slice(0, rows), slice(0, keys), True), *[earlier] * rank, *[later] * (count - 1 - rank)]

    def attend(self, tensors: Sequence[Tensor], causal: bool, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output and LSE of a step."""
        query, key, value = tensors
        out, lse = attention(query, key, value, is_causal=causal, sinks=sinks, **self.words)
        return out, lse

    def send(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to send tensors to the next rank; the result waits for those of the rank before."""
        import torch.distributed as dist

        rank, count = dist.get_rank(self.group), dist.get_world_size(self.group)
        if count == 1:
            return lambda: list(tensors)
        there, whence = (dist.get_global_rank(self.group, (rank + step) % count) for step in (1, -1))
        found = [torch.empty_like(x) for x in tensors]
        sends = [dist.P2POp(dist.isend, x, there, self.group) for x in tensors]
        works = dist.batch_isend_irecv([*sends, *(dist.P2POp(dist.irecv, x, whence, self.group) for x in found)])

        def arrived() -> list[Tensor]:
            for work in works:
                work.wait()
            # What is sent is kept until now.
            sends.clear()
            return found

        return arrived


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Steps, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Output and LSE, merged in float32 as the keys arrive."""
        blocks, calls = [key.contiguous(), value.contiguous()], steps.each(query.shape[2], key.shape[2])
        out, lse = query, query
        for step, (rows, keys, causal) in enumerate(calls):
            arrived = steps.send(blocks) if step + 1 < len(calls) else None
            given = query[:, :, rows], *(x[:, :, keys] for x in blocks)
            part, of_part = steps.attend(given, causal, sinks if step == 0 else None)
            part = part.to(_wide(part))
            if step == 0:
                out, lse = part, of_part
            else:
                merged = merge([(out[:, :, rows], lse[:, :, rows]), (part, of_part)])
                out[:, :, rows], lse[:, :, rows] = merged
            if arrived is not None:
                blocks = arrived()
        out = out.to(value.dtype)
        ctx.steps = steps
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients: keys and values go round again, and theirs with them, a step behind."""
        query, key, value, sinks, out, lse = ctx.saved_tensors
        steps: Steps = ctx.steps
        dout = torch.zeros_like(out) if dout is None else dout
        blocks, calls = [key.contiguous(), value.contiguous()], steps.each(query.shape[2], key.shape[2])
        of_query, of_sinks = torch.zeros_like(query, dtype=_wide(query)), None
        of_blocks = [torch.zeros_like(x, dtype=_wide(x)) for x in blocks]
        behind: Callable[[], list[Tensor]] | None = None
        for step, (rows, keys, causal) in enumerate(calls):
            arrived = steps.send(blocks) if step + 1 < len(calls) else None
            leaves = [x.detach().requires_grad_() for x in (query[:, :, rows], *(x[:, :, keys] for x in blocks))]
            once = [sinks.detach().requires_grad_()] if step == 0 and sinks is not None else []
            with torch.enable_grad():
                part = steps.attend(leaves, causal, once[0] if once else None)
            whole = out[:, :, rows], lse[:, :, rows], dout[:, :, rows], None if dlse is None else dlse[:, :, rows]
            given = gradients(([part[0].detach()], [part[1].detach()]), *whole)
            found = torch.autograd.grad(part, [*leaves, *once], [x[0] for x in given], materialize_grads=True)
            of_query[:, :, rows] += found[0]
            of_sinks = found[3] if once else of_sinks
            if behind is not None:
                of_blocks = behind()
            for total, grad in zip(of_blocks, found[1:3], strict=True):
                total[:, :, keys] += grad
            behind = steps.send(of_blocks)
            if arrived is not None:
                blocks = arrived()
        assert behind is not None, "a group has a rank"
        of_key, of_value = behind()
        return None, of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_sinks


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
