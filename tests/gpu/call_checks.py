"""Parts of the checks of calls on a GPU: random inputs, comparison with torch, threads."""

import threading
from collections.abc import Callable
from typing import Any

import torch


def inputs(b: int = 2, h: int = 8, n: int = 384, d: int = 128, dtype: torch.dtype = torch.bfloat16, **words: Any) -> list[torch.Tensor]:
    """Random q, k, v."""
    return [torch.randn(b, h, n, d, device="cuda", dtype=dtype, **words) for _ in range(3)]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raises where they differ by more than rounding to 16 bits does."""
    torch.testing.assert_close(ours.float(), theirs.float(), atol=3e-2, rtol=3e-2)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """`work` of each index in a thread of its own, all at once; raises what the first that failed raised."""
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
