"""Memory layout of a plan's outputs and scratch."""

import itertools
from collections.abc import Sequence


def padded(size: int) -> int:
    """Size rounded up to a multiple of 256 bytes, the alignment of PyTorch's allocator."""
    return -(-size // 256) * 256


def placed(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Offsets of tensors of these bytes in one allocation, and its size."""
    ends = tuple(itertools.accumulate(map(padded, sizes), initial=0))
    return ends[:-1], ends[-1]


def out_strides(shape: tuple[int, int, int, int], q_strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Dense strides for an output whose batch, heads and rows lie in memory in the order of the query's, the head size innermost."""
    # Broadcast dimensions (stride 0) go outermost.
    outer = sorted(range(3), key=lambda dim: -q_strides[dim] if q_strides[dim] else -(2**62))
    strides, step = [0, 0, 0], shape[3]
    for dim in reversed(outer):
        strides[dim] = step
        step *= shape[dim]
    return strides[0], strides[1], strides[2], 1
