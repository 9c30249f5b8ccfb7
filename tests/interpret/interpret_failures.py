"""Kernels that don't compile, in every way in: the next family serves, then PyTorch, with one warning for each, and right numbers."""

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from interpreting import failures_of
from triton.runtime.errors import OutOfResources

from flashtune import dispatch
from flashtune.core.code.launching import LoadedKernel
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.state import context

BOUNDS = torch.tensor([0, 9, 30], dtype=torch.int32)
TABLE = torch.linspace(-1.0, 1.0, 10).view(2, 5)


def score(table: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda s, b, h, i, j: s * torch.cos(0.1 * (i - j)) + table[h, (i - j).clamp(-2, 2) + 2]


def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return (i - j).abs() % 7 < 4


Call = Callable[[list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
"""A call of leaves: query, key, value, and what else gets a gradient."""

MORE = {"dense": TABLE[:, 0], "packed": TABLE[:, 0], "functions": TABLE, "packed functions": TABLE}


def called(way: str) -> Call:
    words: dict[str, Any] = {"return_lse": True}
    if way == "dense":
        return lambda x: dispatch.attention(*(y.transpose(0, 1)[None] for y in x[:3]), sinks=x[3], is_causal=True, **words)
    if way == "functions":
        return lambda x: dispatch.flex_attention(*(y.transpose(0, 1)[None] for y in x[:3]), score(x[3]), visible, **words)
    if way == "packed":
        return lambda x: dispatch.attention_varlen(*x[:3], BOUNDS, BOUNDS, 21, 21, sinks=x[3], is_causal=True, **words)
    return lambda x: dispatch.attention_varlen(
        *x[:3], BOUNDS, BOUNDS, 21, 21, score_mod=score(x[3]), mask_mod=visible, is_causal=True, **words
    )


def step(way: str) -> list[torch.Tensor]:
    """Output, LSE and all gradients of a call."""
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(30, 2, 16, generator=generator).requires_grad_() for _ in range(3)]
    leaves.append(MORE[way].clone().requires_grad_())
    out, lse = called(way)(leaves)
    grads = [torch.randn(x.shape, generator=generator) for x in (out, lse)]
    return [out, lse, *torch.autograd.grad((out, lse), leaves, grads)]


class Broken:
    """In the place of a module whose kernels can't be compiled."""

    def __init__(self, error: BaseException, name: str, launched: list[str]) -> None:
        self.error, self.name, self.launched = error, name, launched

    def __getattr__(self, name: str) -> "Broken":
        return self

    def __getitem__(self, grid: object) -> Any:
        def launch(*_: object, **__: object) -> None:
            self.launched.append(self.name)
            raise self.error

        return launch


@contextmanager
def broken(directions: str, error: BaseException) -> Iterator[list[str]]:
    """Kernels of these passes fail at their launch; gives the names of those that were tried."""
    real, launched = kernels.load, list[str]()

    def load(kind: Any, variant: Any) -> LoadedKernel:
        found = real(kind, variant)
        if kind.direction in directions:
            return LoadedKernel(found.host, Broken(error, f"{kind.name} {variant.id}", launched), found.name)  # type: ignore[arg-type]
        return found

    dispatch.reload()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "load", load)
        yield launched
    dispatch.reload()


def warned_by(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = work()
    return found, [str(one.message) for one in warned if str(one.message).startswith("flashtune")]


def of_case(name: str) -> None:
    way, directions = name.split(": ")
    wanted = step(way)
    with broken(directions, OutOfResources(300_000, 232_448, "shared memory")) as launched:
        found, said = warned_by(lambda: step(way))
        # What serves in the place of a packed call may have kernels of its own, which are tried then.
        again, more = warned_by(lambda: step(way))
        tried = list(launched)
        _, silence = warned_by(lambda: step(way))
        assert said and not silence and launched == tried, "a kernel that failed is tried again"
        assert len(set(tried)) == len(tried) >= len(said + more)
        assert all("is skipped from now on: OutOfResources" in one for one in said + more)
    for ours in (found, again):
        for x, y in zip(ours, wanted, strict=True):
            torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def of_faults_of_this_machine() -> None:
    """One warning for all kernels, and kernels serve again once it has passed."""
    for way in MORE:
        with broken("fwd bwd", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/user/.triton/cache")) as launched:
            _, said = warned_by(lambda way=way: step(way))
            assert len(said) == 1 and "no kernel can be compiled here" in said[0], (way, said)
            tried = len(launched)
            step(way)
            assert tried == len(launched) > 0
            memo = context.current()
            memo.kernels.retry()
            step(way)
            assert len(launched) > tried, f"{way}: nothing is tried after a minute"


def of_paged_caches() -> None:
    cache, table = torch.randn(8, 16, 2, 32), torch.arange(4, dtype=torch.int32)[None]
    words = {"seqused_k": torch.tensor([50], dtype=torch.int32), "block_table": table}

    def call() -> torch.Tensor:
        query = torch.linspace(-1, 1, 64).view(1, 2, 32)
        out: torch.Tensor = dispatch.attention_varlen(query, cache, cache, torch.tensor([0, 1]), None, 1, 50, **words)
        return out

    wanted = call()
    with broken("fwd", OutOfResources(300_000, 232_448, "shared memory")) as launched:
        found, said = warned_by(call)
        # Each sequence is a call of `attention`, whose kernels fail, too.
        assert launched[0].startswith("flash_paged") and len(said) == len(launched), said
        again, silence = warned_by(call)
        assert not silence and len(said) == len(launched)
        query = torch.zeros(1, 2, 32)
        explained = dispatch.explain_varlen(query, cache, cache, torch.tensor([0, 1]), None, 1, 50, **words)
        assert explained.kind == "framework" and "out of resource" in explained.reason
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again, wanted, atol=1e-5, rtol=1e-5)


def of_errors_that_are_no_kernels_fault() -> None:
    for way in MORE:
        for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: an illegal memory access")):
            with broken("fwd bwd", error), pytest.raises(type(error)):
                step(way)


def of_explanations() -> None:
    given = [torch.zeros(30, 2, 16, requires_grad=True)] * 3
    with broken("fwd", OutOfResources(300_000, 232_448, "shared memory")):
        warned_by(lambda: step("packed"))
        found = dispatch.explain_varlen(*given, BOUNDS, BOUNDS, 21, 21, is_causal=True, sinks=torch.zeros(2))
        assert found.kind == "framework" and "out of resource" in found.reason and found.refused[0].startswith("flash_fwd ")


def main(*names: str) -> dict[str, str]:
    """Failures of the named cases, or without names of everything else."""
    dispatch.use(unmeasured=True)
    return failures_of(globals(), of_case, names, nullcontext)
