"""Prepared launches against a stand-in for the driver: what reaches a kernel is what its host code said, whatever threads do."""

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launched
import pytest
import torch
from launched import BY_ID, PROBLEMS, SHIPPED, Library, Q, code_of, hopper

from flashtune.core.code.archive import HEADER_BYTES, Place
from flashtune.core.code.binaries import Binary, Manifest, Parameter, TensorMap
from flashtune.core.code.launches import Descriptor, Launch, Operand, Varying
from flashtune.core.code.launching import LoadedKernel, Plan
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features
from flashtune.core.pytorch import devices
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.decisions import resolve
from flashtune.dispatch.plans import driver, kernels, launch
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.plans.program import Program
from flashtune.dispatch.state.context import Memo
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render
from flashtune.tuner.publish.winners import source_for

library = launched.library

MAP = TensorMap(element_type=9, element_bytes=2, box=(1, 1, 64, 128), swizzle=3)
PARAMETERS = (
    Parameter(name="q_desc", position=0, kind="tensor_map", element="bf16", tensor_map=MAP),
    Parameter(name="lse_ptr", position=1, kind="pointer", element="fp32"),
    Parameter(name="n_q", position=2, kind="i32"),
    # Position 3 is a constant, which stays out of the code.
    Parameter(name="scale", position=4, kind="fp32"),
    Parameter(name="seed", position=5, kind="u64"),
    Parameter(name="offset", position=6, kind="u32"),
    Parameter(name="stride", position=7, kind="i64"),
)
BINARY = Binary(
    kernel="forward", specialization="", entry="forward", arch="sm_90a", triton="3.6.0", threads=384, shared_bytes=200_000, cluster=1,
    launch_pdl=True, cooperative=False, global_scratch_bytes=0, profile_scratch_bytes=0, parameters=PARAMETERS, conditions=(), sha256="",
)  # fmt: skip
ARGUMENTS = (
    Descriptor(Q, Q.shape, Q.strides, (1, 1, 64, 128), "swizzled"), Operand(1, (9,), (1,), "fp32"), -5, "constant", 0.125,
    Varying.of(0, 2**64 - 1), Varying.of(1, 7), 2**40,
)  # fmt: skip
PLAN = Plan([Launch("forward", (132,), ARGUMENTS, {})], [], [])
GPU = torch.device("cuda", 0)


def program() -> Program:
    return Program(PLAN, [BINARY], [77], GPU, [1 << 20, 1 << 21])


def given(base: int, numbers: tuple[int, int]) -> list[Any]:
    """The parameters from the second on of a launch with addresses `base` and `base` + 2^30."""
    return [2, 3, 40, 128, 15360, 5120, 128, 1, base + 2**30, -5, 0.125, *numbers, 2**40, 0, 0]


@pytest.mark.parametrize("opaque", [False, True], ids=["address-is-a-word", "address-through-the-driver"])
def test_a_launch_is_given_what_the_host_code_said_at_the_calls_own_addresses(library: Library, opaque: bool) -> None:
    library.opaque = opaque
    prepared = program()
    for base, numbers in ((1 << 33, (2**64 - 3, 2**32 - 1)), (1 << 34, (1, 2)), (1 << 33, (0, 0))):
        prepared.launch([base, base + 2**30], 4660, numbers)
    maps = {tuple(words[0][1]) for _, _, words in library.launched}
    assert len(maps) == 1, "sizes, strides and box of a map don't change"
    for (config, function, words), base, numbers in zip(
        library.launched, (1 << 33, 1 << 34, 1 << 33), ((2**64 - 3, 2**32 - 1), (1, 2), (0, 0)), strict=True
    ):
        assert function == 77 and words[0][0] == base
        assert words[1:] == given(base, numbers)
        assert (config.grid_x, config.grid_y, config.grid_z, config.block_x, config.shared_bytes) == (132, 1, 1, 384, 200_000)
        assert config.stream == 4660
        attribute = driver.LaunchAttribute.from_address(config.attributes)
        assert config.attribute_count == 1 and (attribute.id, attribute.value[0]) == (6, 1)


def test_a_call_gets_the_memory_of_the_stream_that_it_is_on(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[int] = []
    for name, value in (("_cuda_getDevice", lambda: 0), ("_cuda_getCurrentRawStream", lambda _: streams[-1])):
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    taken = SimpleNamespace(counters=lambda _, stream, *__: 1000 * stream, scratch=lambda _, stream, size, **__: 4096 * stream + size)
    monkeypatch.setattr(driver, "STREAM_MEMORY", taken)
    temporaries = [Operand(6, (100,), (1,), "fp32"), Operand(7, (9,), (1,), "bf16")]
    prepared = Program(PLAN._replace(scratch=temporaries, counts=8, lse_bytes=40), [BINARY], [77], GPU, [1 << 20, 1 << 21])
    runs: list[list[int]] = []
    monkeypatch.setattr(Program, "launch", lambda _, addresses, stream, *__: runs.append([stream, *addresses]))
    for stream in (7, 7, 9, 7):
        streams.append(stream)
        for lse in (0, 5, 0):
            prepared.run([1, 2, 3, 4, lse, 0])
            start = 4096 * stream + 768 + 256 * (not lse)
            assert runs[-1] == [stream, 1, 2, 3, 4, lse or start + 768, 1000 * stream, start, start + 512]


def test_a_call_of_one_launch_writes_no_memory_that_launches_of_another_call_hand_on(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's only launch may come between two launches of another thread's call, whose turn it doesn't wait for."""
    for name, value in (("_cuda_getDevice", 0), ("_cuda_getCurrentRawStream", 7), ("_cuda_isCurrentStreamCapturing", False)):
        monkeypatch.setattr(torch._C, name, lambda *_, value=value: value, raising=False)
    monkeypatch.setattr(driver, "STREAM_MEMORY", driver.StreamMemory())
    monkeypatch.setattr(driver, "resident", lambda device, data: 1 << 40)
    runs: list[list[int]] = []
    monkeypatch.setattr(Program, "launch", lambda _, addresses, *__: runs.append(addresses))
    several = PLAN._replace(launches=PLAN.launches * 2, scratch=[Operand(6, (100,), (1,), "fp32")])
    for plan, count in ((several, 2), (PLAN._replace(lse_bytes=400), 1)):
        Program(plan, [BINARY] * count, [77] * count, GPU, [1 << 20, 1 << 21]).run([1, 2, 3, 4, 0, 0])
    (*_, handed_on), (*_, unread, _) = runs
    assert abs(handed_on - unread) >= 512


def test_an_empty_grid_is_not_launched(library: Library) -> None:
    empty = Plan([Launch("forward", (0,), ARGUMENTS, {})], [], [])
    Program(empty, [BINARY], [77], GPU, [1 << 20, 1 << 21]).launch([0, 0], 0, (0, 0))
    assert library.launched == []


def test_sixteen_threads_share_a_program_and_never_each_others_addresses(library: Library) -> None:
    library.pause = 0.0005
    prepared = program()
    barrier = threading.Barrier(16, timeout=600)

    def work(thread: int) -> None:
        barrier.wait()
        for turn in range(25):
            base = (thread + 1) << 36 | turn << 20
            prepared.launch([base, base + 2**30], thread + 1, (base, thread))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.launched) == 16 * 25
    for config, _, words in library.launched:
        base = words[0][0]
        assert words[1:] == given(base, (base, (base >> 36) - 1)) and config.stream == base >> 36


def test_a_thread_without_a_context_gets_one_and_other_errors_are_raised(library: Library) -> None:
    prepared = program()
    before = library.contexts
    library.codes = [201]
    prepared.launch([0, 0], 0, (0, 0))
    assert library.contexts == before + 1 and len(library.launched) == 1
    library.codes = [201, 700]
    with pytest.raises(driver.DriverError, match="CUDA error 700 in cuLaunchKernelEx") as caught:
        prepared.launch([0, 0], 0, (0, 0))
    assert caught.value.code == 700
    prepared.launch([1 << 33, (1 << 33) + 2**30], 0, (3, 4))
    assert library.launched[-1][2][1:] == given(1 << 33, (3, 4))


def test_a_sequence_that_grows_reads_no_file_and_no_host_code_anew(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load_function", lambda *_: 7)
    monkeypatch.setattr(launch, "_handles", {})
    monkeypatch.setattr(devices, "target_of", lambda device: find_target("h200"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "differing", lambda *_: [])
    monkeypatch.setattr(devices, "here", lambda *_: None)
    memo = Memo()

    def served(n: int) -> bool:
        q, k = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16), torch.empty(1, 8, n, 128, dtype=torch.bfloat16)
        call = replace(parse(Arguments(q, k, k), Options(enable_gqa=True)), device=torch.device("cuda", 0))
        [candidate] = itertools.islice(resolve.candidates(memo, call, q, k, k, None, None), 1)
        assert isinstance(candidate.plan, KernelPlan) and candidate.kind == "near_n"
        operands = (q, k, k, torch.empty_like(q), torch.empty(1, 32, 1))
        return candidate.plan.code.prepared(lambda kernel: launch.planned(kernel, operands, call.parameters(None, None))) is not None

    assert served(8000)
    for where, name in ((kernels, "manifest"), (kernels, "host_code"), (Manifest, "code")):
        monkeypatch.setattr(where, name, lambda *_: pytest.fail("read or loaded again"))
    assert served(8001) and served(8002)


def test_damaged_machine_code_is_warned_of_and_left_to_triton(library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shipped = next(kernel for kernel in SHIPPED if PROBLEMS[kernel.variant_id].label() == "n4096-d64-bf16-causal")
    record = BY_ID[shipped.variant_id]
    module, read = load_kernel(source_for(record).text, "damaged"), code_of(shipped)
    assert read.archive is not None
    damaged = bytearray(read.archive.path.read_bytes())
    first = Place.of(read.binaries[0].file).group
    start = HEADER_BYTES + sum(group.packed for group in read.archive.groups[:first])
    damaged[start : start + read.archive.groups[first].packed] = bytes(read.archive.groups[first].packed)
    (tmp_path / "damaged.kernels").write_bytes(damaged)
    manifest = replace(read, archive=replace(read.archive, path=tmp_path / "damaged.kernels"))
    compiled: list[str] = []

    def by_triton(kernel: Any, *_: object) -> tuple[Binary, bytes]:
        compiled.append(kernel.__name__)
        return manifest.of(kernel.__name__)[0], b"anew"

    monkeypatch.setattr(launch, "compiled", by_triton)
    monkeypatch.setattr(launch, "_function", lambda binary, code, device: len(code()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    q = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16)
    warned: list[str] = []
    code = Code(module, manifest, lambda: module, warned.append)
    plan = KernelPlan(parse(Arguments(q, q, q), Options(is_causal=True)), code, q.stride())
    operands, parameters = plan._given(q, q, q, None, None)

    def planned(kernel: LoadedKernel) -> Plan | None:
        return launch.planned(kernel, operands, parameters)

    assert code.prepared(planned) is None, "host code alone can't compile"
    assert code.program(planned) is not None
    assert compiled == [manifest.binaries[0].kernel]
    assert len(warned) == 1 and str(tmp_path) in warned[0] and "until then Triton compiles" in warned[0]


def test_a_loaded_kernel_is_named_by_its_template_whether_or_not_its_module_is_there() -> None:
    assert hopper(Features()).name.startswith("flash_fwd_hopper fwd-bf16-d64 ")
    chosen = family("flash_fwd")
    spec = hopper(Features()).host.spec  # type: ignore[union-attr]
    text = render(chosen, kernels.variant(chosen, spec, chosen.default(spec, find_target("a100"))))
    assert load_kernel(text, "named").name.startswith("flash_fwd fwd-bf16-d64 ")
