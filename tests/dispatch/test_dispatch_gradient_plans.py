"""Prepared backwards against a stand-in for the driver: launches get the tensors of their own call, and scratch that no other call has."""

import contextlib
import ctypes
import struct
import threading
import time
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from launched import PROBLEMS, SHIPPED, Library, code_of, host_of_shipped

from flashtune.core.code import launching
from flashtune.core.code.binaries import STRUCT_FORMATS, Binary, Manifest
from flashtune.core.code.index import GeneratedKernel
from flashtune.core.code.launches import Operand
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.pytorch import devices
from flashtune.dispatch.call.call import PerHead
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.plans import driver, launch
from flashtune.dispatch.plans.gradients import Backward, BackwardInputs, GradientPlan
from flashtune.dispatch.plans.launch import Code
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of

HOPPER = next(kernel for kernel in SHIPPED if PROBLEMS[kernel.variant_id].direction == "bwd" and kernel.template == "flash_bwd_hopper")
DIVIDED = next(kernel for kernel in SHIPPED if "divided_queries" in kernel.path and "/d128_bf16_causal/" in kernel.path)
MANIFEST = code_of(HOPPER)
PROBLEM = PROBLEMS[HOPPER.variant_id]

Launched = tuple[str, dict[str, int]]


class Decoding(Library):
    """Keeps what each launch was given, the kernel and every address by its parameter's name, and the sums that two calls had at once."""

    def __init__(self) -> None:
        super().__init__()
        self.binaries: list[Binary] = []
        self.calls: dict[int, list[Launched]] = {}
        self.sums: list[int] = []
        self.shared: set[int] = set()

    def cuLaunchKernelEx(self, config: int, function: int, parameters: int, extra: None) -> int:
        binary, found = self.binaries[function], {}
        # A tensor map is followed by its shape and strides.
        sizes = [1 if parameter.tensor_map is None else 1 + 2 * parameter.tensor_map.rank for parameter in binary.parameters]
        places = (ctypes.c_void_p * sum(sizes)).from_address(parameters)
        for index, parameter in enumerate(binary.parameters):
            place = places[sum(sizes[:index])]
            assert place is not None
            if parameter.kind == "pointer" or parameter.tensor_map is not None:
                found[parameter.name] = struct.unpack("<Q", ctypes.string_at(place, struct.calcsize("<" + STRUCT_FORMATS["pointer"])))[0]
        with self.lock:
            self.calls.setdefault(threading.get_ident(), []).append((binary.kernel, found))
            if binary.kernel == "preprocess" and "sums_ptr" in found:
                self.shared |= {found["sums_ptr"]} & set(self.sums)
                self.sums.append(found["sums_ptr"])
            elif binary.kernel == "finish_dq":
                self.sums.remove(found["sums_ptr"])
        time.sleep(self.pause)
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Decoding:
    library = Decoding()

    def function(binary: Binary, *_: object) -> int:
        library.binaries.append(binary)
        return len(library.binaries) - 1

    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(driver, "use_context", lambda device: None)
    monkeypatch.setattr(driver, "STREAM_MEMORY", driver.StreamMemory())
    monkeypatch.setattr(driver, "resident", lambda device, data: 1 << 40)
    monkeypatch.setattr(launch, "_function", function)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for name, value in (("_cuda_getDevice", None), ("_cuda_getCurrentRawStream", 5), ("_cuda_isCurrentStreamCapturing", False)):
        monkeypatch.setattr(torch._C, name, lambda *_, value=value: value, raising=False)
    return library


def given(n: int = 200, *, of_query: bool = True, of_keys: bool = True, d: int = PROBLEM.d) -> BackwardInputs:
    q, k, v, out, dout = (torch.zeros(2, n, 3, d, dtype=torch.bfloat16).transpose(1, 2) for _ in range(5))
    lse = torch.zeros(2, 3, n)
    return BackwardInputs(q, k, v, out, lse, dout, None, None, None, None, 0, of_query, of_keys)


def built(
    one: BackwardInputs, manifest: Manifest = MANIFEST, kernel: GeneratedKernel = HOPPER, causal: bool = PROBLEM.features.causal
) -> GradientPlan:
    """The plan of calls like this one, with machine code for a GPU."""
    host = host_of_shipped(kernel)
    call = parse(Arguments(one.query, one.key, one.value), Options(is_causal=causal))
    plan = GradientPlan(replace(call, device=torch.device("cuda", 0)), Code(host, manifest, lambda: pytest.fail("all of it loaded")))
    plan.build(one)
    plan.call = call
    return plan


def test_a_backward_is_launched_with_its_calls_tensors_and_scratch_of_its_own(library: Decoding) -> None:
    plan, barrier = built(given()), threading.Barrier(4, timeout=600)
    library.pause = 0.0005
    done: dict[int, list[tuple[BackwardInputs, Any]]] = {}

    def work() -> None:
        barrier.wait()
        # Kept, so that no address comes twice.
        done[threading.get_ident()] = [(one := given(), plan.run(one)) for _ in range(10)]

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert library.calls.keys() == done.keys() and not library.shared
    for thread, calls in done.items():
        launches = library.calls[thread]
        assert [name for name, _ in launches] == ["preprocess", "flash_bwd_hopper", "finish_dq"] * len(calls)
        for (one, grads), (prepare, main, finish) in zip(calls, zip(*[iter(at for _, at in launches)] * 3, strict=True), strict=True):
            dq, dk, dv = (grad.data_ptr() for grad in grads[:3])
            inputs = {name: getattr(one, name).data_ptr() for name in ("query", "key", "value", "out", "lse", "dout")}
            assert [prepare[f"{name}_ptr"] for name in ("out", "dout", "lse")] == [inputs[name] for name in ("out", "dout", "lse")]
            assert [main[f"{name[0]}_desc"] for name in ("query", "key", "value")] == [inputs[name] for name in ("query", "key", "value")]
            assert main["dout_desc"] == inputs["dout"]
            assert (main["dk_desc"], main["dv_desc"], finish["dq_ptr"]) == (dk, dv, dq)
            # What the launches of a call hand on to each other.
            assert prepare["sums_ptr"] == main["sums_ptr"] == finish["sums_ptr"]
            scratch = {prepare["lse_2_ptr"], prepare["delta_ptr"], prepare["sums_ptr"]}
            assert {main["lse_desc"], main["delta_desc"]} < scratch and len(scratch) == 3
            assert all(grad.stride() == x.stride() for grad, x in zip(grads[:3], one[:3], strict=True))


def test_parts_of_divided_queries_are_added_up_where_the_gradients_are(library: Decoding) -> None:
    one = given(n=1500, d=128)
    plan = built(one, code_of(DIVIDED), DIVIDED, causal=True)
    grads = plan.run(one)
    [launches] = library.calls.values()
    assert [name for name, _ in launches] == ["preprocess", "flash_bwd_hopper", "add_divisions", "finish_dq"]
    (_, main), (_, added) = launches[1:3]
    assert (added["dk_ptr"], added["dv_ptr"]) == tuple(grad.data_ptr() for grad in grads[1:3] if grad is not None)
    parts = main["dk_ptr"], main["dv_ptr"]
    assert parts == (added["dk_parts_ptr"], added["dv_parts_ptr"]) and len({*parts, added["dk_ptr"], added["dv_ptr"]}) == 4
    # Of one division at least, in float32, with whole tiles of keys.
    assert abs(parts[0] - parts[1]) >= 2 * 3 * 1536 * 128 * 4


def test_gradients_of_a_bias_and_of_slopes_lie_where_the_recorded_launches_write_them() -> None:
    features = Features(mask="bias", alibi=True, dbias=True, dslopes=True)
    problem = Problem(batch=2, heads=3, kv_heads=3, n_q=200, n_kv=200, d=64, d_v=64, dtype="bf16", features=features, direction="bwd")
    chosen, spec = family("flash_bwd"), problem.spec()
    module = load_kernel(render(chosen, variant_of(chosen, spec, chosen.default(spec, find_target("h200")))), "asked")
    bias, slopes = torch.zeros(2, 3, 200, 200, dtype=torch.bfloat16), torch.zeros(2, 3)
    one = given()._replace(mask=bias, slopes=slopes, of_mask=True, of_slopes=True)
    call = parse(Arguments(one.query, one.key, one.value, bias, per_head=PerHead(alibi_slopes=slopes)), Options())
    plan = GradientPlan(call, Code(module))
    plan.build(one)
    met: list[list[int]] = []
    plan.program = types.SimpleNamespace(run=lambda addresses, *_: met.append([*addresses, 0]))  # type: ignore[assignment]
    *_, dbias, dslopes = plan.run(one)
    planned = launch.planned(module, plan._operands(one), one.parameters(call))
    assert planned is not None and dbias is not None and dslopes is not None
    assert dbias.shape == bias.shape and dslopes.shape == slopes.shape and len(met[0]) == len(planned.tensors) + 1
    of_bias, of_slopes = (step for step in planned.launches if step.kernel == "score_gradients")
    place = launching.Tensors._fields.index("dbias")
    places = [[x.source for x in step.arguments if isinstance(x, Operand)] for step in (of_bias, of_slopes)]
    assert place in places[0] and place + 1 not in places[0] and place + 1 in places[1] and place not in places[1]
    assert met[0][place] == dbias.data_ptr()
    # What the kernels read besides: the bias and the slopes themselves.
    assert {met[0][source] for source in places[0]} >= {bias.data_ptr(), slopes.data_ptr(), one.lse.data_ptr(), one.dout.data_ptr()}


def test_without_triton_all_gradients_are_computed_where_machine_code_is_of_all(library: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "TRITON", False)
    one = given(of_keys=False)
    plan = built(one)
    dq, dk, dv, *_ = plan.run(one)
    assert dq is not None and dk is dv is None
    [main] = [at for name, at in library.calls[threading.get_ident()] if name == "flash_bwd_hopper"]
    places = {x.data_ptr() for x in (one.key, one.value, dq)}
    assert not places & {main["dk_desc"], main["dv_desc"]} and main["dk_desc"] != main["dv_desc"]


@pytest.mark.parametrize("moved", ["query", "key", "value", "out", "dout"])
def test_a_plan_serves_only_tensors_of_which_the_same_are_aligned(moved: str) -> None:
    """Calls that differ in nothing else share a cache; kernels are compiled for aligned tensors, and an unaligned dO is copied."""
    sizes, chosen = (1, 2, 16, 64), []

    def inputs(unaligned: str) -> BackwardInputs:
        tensors = {
            name: torch.zeros(2 * 16 * 64 + 8, dtype=torch.float16)[(name == unaligned) : (name == unaligned) + 2 * 16 * 64].view(sizes)
            for name in ("query", "key", "value", "out", "dout")
        }
        nothing = dict.fromkeys(("dlse", "mask", "slopes", "sinks"))
        return BackwardInputs(**tensors, lse=torch.zeros(sizes[:3]), **nothing, seed=0, of_query=True, of_keys=True)

    class Plan:
        def run(self, given: BackwardInputs) -> tuple[None, ...]:
            assert given.dout.data_ptr() % 16 == 0
            return (None,) * 5

    def choose(_call: Any, given: BackwardInputs) -> Any:
        chosen.append(given)
        return Plan(), Plan().run(given)

    arguments = Arguments(*[torch.zeros(sizes, dtype=torch.float16)] * 3)
    backward = Backward(parse(arguments, Options()), choose)
    other = "key" if moved != "key" else "value"
    for unaligned in ("nothing", other, moved, other, moved):
        backward.gradients(inputs(unaligned))
    assert len(chosen) == 3
