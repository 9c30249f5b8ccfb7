"""Steps of packed calls on a GPU: both passes, and CUDA graphs of them that are replayed with other lengths."""

from collections.abc import Sequence

import torch
from torch import Tensor
from varlen_cases import Inputs


def step(given: Inputs) -> list[Tensor]:
    """Output, LSE and gradients of a call."""
    out, lse = given.call()
    ended = lse == -torch.inf
    return [out, lse, *torch.autograd.grad((out, lse), given.tensors, (given.dout, given.dlse.masked_fill(ended, 0.0)))]


def follows_lengths(static: Inputs, bounds: Sequence[Tensor], rows: int, *, replays: int) -> None:
    """Assert that a graph of a step has the bits of eager calls, whatever is written into its bounds (sequences + 1,) of `rows`."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(static)
    generator = torch.Generator().manual_seed(3)
    for _ in range(replays):
        for one in bounds:
            cuts = torch.randint(0, rows + 1, (len(one) - 1,), generator=generator).sort().values.tolist()
            one.copy_(torch.tensor([0, *cuts], dtype=torch.int32))
        graph.replay()
        for ours, eager in zip(found, step(static), strict=True):
            assert torch.equal(ours, eager)
