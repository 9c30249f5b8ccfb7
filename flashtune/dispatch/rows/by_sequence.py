"""Packed sequences one by one, where no kernel serves them."""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashtune.core.system.errors import InputError
from flashtune.dispatch.call.sequences import Numbers, Packed
from flashtune.dispatch.state.recorded import part_of_packed


def by_sequence(
    packed: Packed,
    numbers: Numbers,
    seed: int,
    of_sequence: Callable[..., tuple[Tensor, Tensor]],
    zero: Callable[[], Tensor | float] = float,
) -> tuple[Tensor, Tensor]:
    """Output and LSE by a call of `of_sequence` for each sequence; lengths are read by the host.

    That takes query, key and value (1, H, N, D), `numbers`, `seed`, the sequence's index, its slopes and the sinks, and returns its output
    and LSE. `zero` makes a 0 in whose graph is what gets gradients beside the tensors of `packed`.
    """
    query, key, value, cu_q, cu_k, used, slopes, sinks = packed[:8]
    of_q, of_k = cu_q.tolist(), cu_k.tolist()
    for name, bounds, x in (("cu_seqlens_q", of_q, query), ("cu_seqlens_k", of_k, key)):
        if bounds[0] != 0 or bounds[-1] > len(x) or bounds != sorted(bounds):
            raise InputError(
                f"{name} has bounds that don't rise from 0 to at most the {len(x)} rows ({str(bounds[:8])[1:-1]}): "
                "give each sequence's first row, and the last one's end"
            )
    some = [stop - start for start, stop in itertools.pairwise(of_k)] if used is None else used.tolist()
    outs, lses = [], []
    for b, ((start, stop), (first, end)) in enumerate(zip(itertools.pairwise(of_q), itertools.pairwise(of_k), strict=True)):
        if stop > start:
            keys = slice(first, min(end, first + max(0, some[b])))
            tensors = [x.transpose(0, 1)[None] for x in (query[start:stop], key[keys], value[keys])]
            with part_of_packed():
                out, lse = of_sequence(tensors, numbers, seed, b, None if slopes is None else slopes[b], sinks)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
    rows, heads, _ = query.shape
    beside = rows - of_q[-1]
    # Where no sequence has queries the output is part of the graph all the same: every parallel rank needs its gradients.
    nothing = 0.0 if outs else sum([x[:0].sum() for x in (query, key, value, slopes, sinks) if x is not None], zero())
    outs.append(query.new_zeros((beside, heads, value.shape[2])) + nothing)
    lses.append(query.new_full((heads, beside), -math.inf, dtype=torch.float32) + nothing)
    return torch.cat(outs), torch.cat([x.to(torch.float32) for x in lses], 1)
