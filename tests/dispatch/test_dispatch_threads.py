"""Threads that share a stream: no launch of one call reads what another call's launches left in the stream's memory."""

import threading
from typing import Any

import pytest
import torch
from launched import PROBLEMS, SHIPPED, code_of, host_of_shipped
from test_dispatch_gradient_plans import Decoding, library  # noqa: F401

from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.plans import driver, launch
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.launch import Code

MASKED = next(
    kernel
    for kernel in SHIPPED
    if kernel.template == "flash_fwd_hopper" and PROBLEMS[kernel.variant_id].label().endswith("d64-bf16-full+mask") and kernel.manifest
)
HEADS, N = 2, 192


def masked() -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of one call: what stands for query, key and value, and the mask."""
    return torch.zeros(1, HEADS, N, 64, dtype=torch.bfloat16), torch.ones(1, HEADS, N, N, dtype=torch.bool)


def plan_of(x: torch.Tensor, mask: torch.Tensor) -> KernelPlan:
    """The plan of a call whose mask a kernel packs ahead of the kernel that reads it, with machine code for a GPU."""
    host = host_of_shipped(MASKED)
    plan = KernelPlan(parse(Arguments(x, x, x, mask), Options()), Code(host, code_of(MASKED)), x.stride())
    operands, parameters = plan._given(x, x, x, mask, None)
    plan.program = plan.code.program(lambda kernel: launch.planned(kernel, operands, parameters))
    assert plan.program is not None and [one.kernel for one in plan.program.planned] == ["pack_mask", "flash_fwd_hopper"]
    plan._plain = False
    return plan


def test_a_mask_is_packed_and_read_before_another_threads_call_packs_its_own(
    library: Decoding,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "resident", lambda device, data: 1 << 40)
    monkeypatch.setattr(driver, "STREAM_MEMORY", driver.StreamMemory())
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    plan, barrier = plan_of(*masked()), threading.Barrier(4, timeout=600)
    launched: list[tuple[int, str, dict[str, int]]] = []
    known = library.cuLaunchKernelEx

    def launch(*given: Any) -> int:
        code = known(*given)
        with library.lock:
            launched.append((threading.get_ident(), *library.calls[threading.get_ident()][-1]))
        return code

    monkeypatch.setattr(library, "cuLaunchKernelEx", launch)
    assert plan.program is not None
    plan.program._launch = launch
    library.pause = 0.0005

    def work() -> None:
        barrier.wait()
        for _ in range(10):
            x, mask = masked()
            plan.run(x, x, x, mask, None, None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launched) == 2 * 4 * 10
    packed: dict[int, int] = {}
    for thread_id, kernel, at in launched:
        if kernel == "pack_mask":
            packed[at["mask_bits_ptr"]] = thread_id
        else:
            assert packed[at["mask_bits_ptr"]] == thread_id, "another thread's mask"


def test_streams_take_turns_of_their_own() -> None:
    memory = driver.StreamMemory()
    assert memory.turn(0, 7) is memory.turn(0, 7)
    assert len({id(memory.turn(*place)) for place in ((0, 7), (0, 9), (1, 7))}) == 3
