"""Whole calls on CPU tensors whose kernels are launched through a stand-in for the driver: the addresses that each launch was given."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_dispatch_gradient_plans import Decoding

from flashtune.core.code import launching
from flashtune.core.code.binaries import Binary, Parameter, TensorMap
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.pytorch import devices
from flashtune.dispatch.plans import driver, launch
from flashtune.dispatch.plans.program import Program
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.rows import packed
from flashtune.dispatch.rows.kernel import Kernel
from flashtune.dispatch.state import context
from flashtune.templates import family


def compiled(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: Any) -> tuple[Binary, bytes]:
    """In place of Triton's compiler: machine code that is never run, with the kernel's own parameters."""
    found = []
    named = [
        (f"{parameter.name}.{index}" if isinstance(x, tuple) else parameter.name, one)
        for parameter, x in zip(kernel.params, arguments, strict=True)
        for index, one in enumerate(x if isinstance(x, tuple) else (x,))
    ]
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    for position, (name, x) in enumerate(named):
        if name in constants or x is None:
            continue
        tensor_map, kind = None, "i64"
        if isinstance(x, torch.Tensor):
            kind = "pointer"
        elif hasattr(x, "block_shape"):
            kind, tensor_map = (
                "tensor_map",
                TensorMap(element_type=9, element_bytes=x.base.element_size(), box=tuple(x.block_shape), swizzle=3),
            )
        elif isinstance(x, float):
            kind = "fp32"
        found.append(Parameter(name=name, position=position, kind=kind, tensor_map=tensor_map))
    words: dict[str, Any] = {"threads": 128, "shared_bytes": 0, "cluster": 1, "launch_pdl": False, "cooperative": False}
    words |= {"global_scratch_bytes": 0, "profile_scratch_bytes": 0, "conditions": (), "sha256": f"{kernel.__name__} {len(found)}"}
    name = kernel.__name__
    return Binary(kernel=name, specialization="", entry=name, arch="sm_90a", triton="", parameters=tuple(found), **words), b""


class Driven:
    """The launches so far, each a kernel's name and its addresses by parameter; `fails` are the kernels that don't compile, and why."""

    def __init__(self, library: Decoding) -> None:
        self.library, self.fails, self.tried = library, dict[str, BaseException](), list[str]()

    @property
    def launches(self) -> list[tuple[str, dict[str, int]]]:
        return [one for calls in self.library.calls.values() for one in calls]

    def since(self, work: Callable[[], Any]) -> tuple[Any, list[tuple[str, dict[str, int]]]]:
        """Result of some work, and its launches; backwards may launch from another thread."""
        before = len(self.launches)
        found = work()
        return found, self.launches[before:]

    def compiled(self, kernel: Any, *given: Any) -> tuple[Binary, bytes]:
        self.tried.append(kernel.__name__)
        if kernel.__name__ in self.fails:
            raise self.fails[kernel.__name__]
        return compiled(kernel, *given)


def drive(library: Decoding, monkeypatch: pytest.MonkeyPatch) -> Driven:
    """Serve CPU tensors as if they were on an H200, by kernels that the stand-in `library` launches."""
    found = Driven(library)
    monkeypatch.setattr(driver, "driven", lambda device: True)
    monkeypatch.setattr(launch, "compiled", found.compiled)
    monkeypatch.setattr(devices, "INTERPRETING", True)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(driver, "STREAM_MEMORY", driver.StreamMemory())
    monkeypatch.setattr(driver, "resident", lambda device, data: 1 << 40)
    monkeypatch.setattr(devices, "target_of", lambda device: find_target("h200"))
    for name in ("counts_of", "unread"):
        monkeypatch.setattr(launching, name, _outlives)
    context.current().forget()
    return found


def _outlives(*_: Any) -> None:
    pytest.fail("memory of PyTorch's outlives the call: within a graph's pool others would reuse it")


def config_of(program: Program) -> Config:
    """The config of the kernel whose launches these are."""
    return next(one.config for one in gc.get_objects() if isinstance(one, Kernel) and program in one._prepared.values())


def serve_by(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Serve packed calls by the default configs of these families, in their order."""

    def ranked(problem: Any, target: Any, *_: Any, **__: Any) -> Any:
        spec = problem.spec()
        for kind in map(family, names):
            if kind.refusal(problem, spec, target) is None:
                yield Choice("default", spec, "the default", family=kind, config=kind.default(spec, target))

    monkeypatch.setattr(packed, "rank_packed", ranked)
