"""Prepared launches against a stand-in for the driver: what reaches a kernel is what its host code said, whatever threads do."""

import ctypes
import itertools
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashtune.core import devices, launching
from flashtune.core.binaries import Binary, Manifest, Parameter, TensorMap
from flashtune.core.dtypes import output_dtype
from flashtune.core.kernel_archive import HEADER_BYTES, Place
from flashtune.core.kernel_index import GeneratedKernel
from flashtune.core.launches import Descriptor, Launch, Operand, Resident, Varying
from flashtune.core.launching import LoadedKernel, Plan
from flashtune.core.parameters import PER_HEAD, CallParameters
from flashtune.core.problem import Features, MaskKind, Problem
from flashtune.core.results import TuningRecord
from flashtune.core.shipped_kernels import PACKAGE, shipped_index, shipped_manifest
from flashtune.core.target import find_target
from flashtune.core.torch_dtypes import TORCH_DTYPES
from flashtune.db import library as databases
from flashtune.dispatch import driver, kernels, launch, resolve
from flashtune.dispatch.call import PerHead
from flashtune.dispatch.context import Memo
from flashtune.dispatch.forward import KernelPlan
from flashtune.dispatch.launch import Program
from flashtune.dispatch.parse import Arguments, Options, parse
from flashtune.templates import family
from flashtune.templates.loading import host_of, load_kernel, loaded
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.publish.winners import source_for

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
Q = Operand(0, (2, 3, 40, 128), (15360, 5120, 128, 1), "bf16")
ARGUMENTS = (
    Descriptor(Q, Q.shape, Q.strides, (1, 1, 64, 128), "swizzled"), Operand(1, (9,), (1,), "fp32"), -5, "constant", 0.125,
    Varying.of(0, 2**64 - 1), Varying.of(1, 7), 2**40,
)  # fmt: skip
PLAN = Plan([Launch("forward", (132,), ARGUMENTS, {})], [], [])
FORMATS = ("map", *"iiii", *"qqqq", "Q", "i", "f", "Q", "I", "q", "Q", "Q")
"""What the kernel of BINARY takes, parameter by parameter: map, shape, strides, pointer, numbers and two pointers to scratch."""


class Library:
    """Stands in for libcuda: keeps what each launch was given. `opaque` hides addresses in tensor maps, as a later driver might."""

    def __init__(self) -> None:
        self.launched: list[tuple[driver.LaunchConfig, int, list[Any]]] = []
        self.opaque = False
        self.codes: list[int] = []
        self.contexts = 0
        self.pause = 0.0
        self.lock = threading.Lock()

    def cuLaunchKernelEx(self, config: int, function: int, parameters: int, extra: None) -> int:
        if self.codes:
            return self.codes.pop(0)
        time.sleep(self.pause)
        places = (ctypes.c_void_p * len(FORMATS)).from_address(parameters)
        found: list[Any] = []
        for kind, place in zip(FORMATS, places, strict=True):
            assert place is not None
            if kind == "map":
                assert place % 64 == 0
                words = list((ctypes.c_uint64 * 16).from_address(place))
                found.append((words[1] ^ 0xFFFF if self.opaque else words[0], words[2:]))
            else:
                found.append(struct.unpack("<" + kind, ctypes.string_at(place, struct.calcsize("<" + kind)))[0])
        copy = driver.LaunchConfig.from_buffer_copy(ctypes.string_at(config, ctypes.sizeof(driver.LaunchConfig)))
        with self.lock:
            self.launched.append((copy, function, found))
        return 0

    def cuTensorMapEncodeTiled(self, place: Any, *words: Any) -> int:
        element_type, rank, address, sizes, strides, box, steps, *rest = words
        kept = [element_type, rank, *sizes, *strides, *box, *steps, *rest]
        found = (ctypes.c_uint64 * 16).from_address(place.value)
        found[0], found[1] = (0, address.value ^ 0xFFFF) if self.opaque else (address.value, 0)
        found[2:] = [hash((index, *kept)) % 2**64 for index in range(14)]
        return 0

    def cuTensorMapReplaceAddress(self, place: int, address: int) -> int:
        (ctypes.c_uint64 * 16).from_address(place)[1] = address ^ 0xFFFF
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(driver, "use_context", lambda device: setattr(library, "contexts", library.contexts + 1))
    return library


def program() -> Program:
    return Program(PLAN, [BINARY], [77], 0, [1 << 20, 1 << 21])


def given(base: int, numbers: tuple[int, int]) -> list[Any]:
    """The parameters from the second on of a launch with addresses `base` and `base` + 2^30."""
    return [2, 3, 40, 128, 15360, 5120, 128, 1, base + 2**30, -5, 0.125, *numbers, 2**40, 0, 0]


@pytest.mark.parametrize("opaque", [False, True], ids=["address-is-a-word", "address-through-the-driver"])
def test_a_launch_is_given_what_the_host_code_said_at_the_calls_own_addresses(library: Library, opaque: bool) -> None:
    library.opaque = opaque
    prepared = program()
    for base, numbers in ((1 << 33, (2**64 - 3, 2**32 - 1)), (1 << 34, (1, 2)), (1 << 33, (0, 0))):
        prepared.run([base, base + 2**30], 4660, numbers)
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


def test_an_empty_grid_is_not_launched(library: Library) -> None:
    empty = Plan([Launch("forward", (0,), ARGUMENTS, {})], [], [])
    Program(empty, [BINARY], [77], 0, [1 << 20, 1 << 21]).run([0, 0], 0, (0, 0))
    assert library.launched == []


def test_sixteen_threads_share_a_program_and_never_each_others_addresses(library: Library) -> None:
    library.pause = 0.0005
    prepared = program()
    barrier = threading.Barrier(16, timeout=600)

    def work(thread: int) -> None:
        barrier.wait()
        for turn in range(25):
            base = (thread + 1) << 36 | turn << 20
            prepared.run([base, base + 2**30], thread + 1, (base, thread))

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
    prepared.run([0, 0], 0, (0, 0))
    assert library.contexts == before + 1 and len(library.launched) == 1
    library.codes = [201, 700]
    with pytest.raises(driver.DriverError, match="CUDA error 700 in cuLaunchKernelEx") as caught:
        prepared.run([0, 0], 0, (0, 0))
    assert caught.value.code == 700
    prepared.run([1 << 33, (1 << 33) + 2**30], 0, (3, 4))
    assert library.launched[-1][2][1:] == given(1 << 33, (3, 4))


SHIPPED = shipped_index(PACKAGE).kernels
WINNERS = databases.Library.of(databases.shipped_path()).winners()
RECORDS = [one for record in WINNERS for one in (record.as_fallback(), record) if one is not None]
# Launches differ by what is compiled in, and by whether kernels count mispredicting programs.
OF_SPECS = list(
    {(one.outcome.template, one.problem.spec(), "maximum=first" in one.outcome.config.label()): one for one in RECORDS}.values()
)


BY_ID = {one.outcome.variant_id: one for one in RECORDS}
PROBLEMS = {name: record.problem for name, record in BY_ID.items()}


def code_of(kernel: GeneratedKernel) -> Manifest:
    """The machine code of a shipped kernel."""
    found = shipped_manifest(PACKAGE, kernel.variant_id, kernel.arch)
    assert found is not None
    return found


def host_of_shipped(kernel: GeneratedKernel) -> LoadedKernel:
    """The host side of a shipped kernel."""
    return host_side(BY_ID[kernel.variant_id])


def host_side(record: TuningRecord) -> LoadedKernel:
    chosen = family(record.outcome.template)
    return loaded(chosen, record.problem.spec(), record.outcome.config)


def given_of(problem: Problem) -> tuple[launch.Operands, CallParameters]:
    """Small tensors as a kernel of this problem's spec takes them, with what its features ask for."""
    b, h, kv, n_q, n_kv, p = 2, 2 * problem.gqa_ratio, 2, min(problem.n_q, 200), 304, problem
    dtype = TORCH_DTYPES[p.dtype]
    out_dtype = TORCH_DTYPES[output_dtype(p.dtype)]
    mask = None
    if p.features.mask != "none":
        mask = torch.zeros(1, h, n_q, n_kv, dtype=torch.bool if p.features.mask == "bool" else out_dtype).expand(b, h, n_q, n_kv)
    parameters = CallParameters(
        scale=0.1,
        band=p.band,
        mask=mask,
        softcap=20.0,
        dropout_p=0.1 if p.features.dropout else 0.0,
        slopes=torch.zeros(h).expand(b, h) if p.features.alibi else None,
        descale=(torch.zeros(b, h), torch.zeros(()).expand(b, kv), torch.zeros(kv).expand(b, kv)) if p.dtype == "fp8" else None,
        sinks=torch.zeros(h).expand(b, h) if p.features.sinks else None,
    )
    q, out = torch.zeros(b, n_q, h, p.d, dtype=dtype).transpose(1, 2), torch.zeros(b, h, n_q, p.d_v, dtype=out_dtype)
    k, v, lse = torch.zeros(b, kv, n_kv, p.d, dtype=dtype), torch.zeros(b, kv, n_kv, p.d_v, dtype=dtype), torch.zeros(b, h, n_q)
    operands = [q, k, v, out, lse]
    if p.direction == "bwd":
        # Without a gradient of the LSE.
        operands += [torch.zeros_like(out), None, *map(torch.zeros_like, (q, k, v))]
        operands += [torch.zeros(1, h, n_q, n_kv, dtype=out_dtype).expand(b, h, n_q, n_kv)] if p.features.dbias else []
        operands += [torch.zeros_like(lse)] if p.features.dslopes else []
    return operands, parameters


@pytest.mark.parametrize("record", OF_SPECS, ids=lambda record: f"{record.outcome.template}-{record.problem.label()}")
def test_a_plan_names_the_calls_own_tensors_and_its_scratch_memory(record: TuningRecord) -> None:
    kernel = host_side(record)
    operands, parameters = given_of(record.problem)
    q, k, v, *_ = operands
    assert kernel.accepts(q, k, v, parameters.mask)
    plan = launch.planned(kernel, operands, parameters)
    assert plan is not None and [x is None or any(x is y for y in plan.tensors) for x in operands] == [True] * len(operands)
    sources = {x.source for planned in plan.launches for x in map(operand_of, planned.arguments) if x is not None}
    named = {place for place, x in enumerate([*plan.tensors, *plan.scratch]) if x is not None}
    assert sources <= named and {launch.Q, launch.K, launch.V} <= sources
    varying = {x.source for planned in plan.launches for x in planned.arguments if isinstance(x, Varying)}
    assert varying == ({launch.SEED, launch.OFFSET} if record.problem.features.dropout else set())


def operand_of(argument: Any) -> Operand | None:
    base = argument.base if isinstance(argument, Descriptor) else argument
    return base if isinstance(base, Operand) else None


@pytest.mark.parametrize("name", ["flash_fwd", "flash_fwd_hopper"])
def test_a_plan_of_all_that_heads_have_their_own_of_is_what_is_launched(name: str) -> None:
    features = Features(causal=True, mask="bool", alibi=True, sinks=True)
    problem = Problem(batch=2, heads=4, kv_heads=2, n_q=70, n_kv=304, d=64, d_v=64, dtype="fp8", features=features)
    chosen, spec = family(name), problem.spec()
    config = chosen.default(spec, find_target("h200"))
    compare(load_kernel(render(chosen, variant_of(chosen, spec, config)), "per_head"), problem)


@pytest.mark.parametrize("mask", ["bool", "bias"])
@pytest.mark.parametrize("name", ["flash_bwd", "flash_bwd_hopper", "flash_bwd_hopper_split"])
def test_a_plan_of_a_backward_with_features_is_what_is_launched(name: str, mask: MaskKind) -> None:
    features = Features(causal=True, mask=mask, alibi=True, dropout=True, softcap=True)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "n_q": 70, "n_kv": 304, "d": 64, "d_v": 64}
    problem = Problem(**sizes, dtype="bf16", features=features, direction="bwd")
    chosen, spec = family(name), problem.spec()
    config = chosen.default(spec, find_target("h200"))
    compare(load_kernel(render(chosen, variant_of(chosen, spec, config)), name), problem)


def compare(kernel: LoadedKernel, problem: Problem) -> None:
    """The plan's operands are the tensors that Triton is given, at their addresses."""
    operands, parameters = given_of(problem)
    plan = launch.planned(kernel, operands, parameters)
    assert plan is not None
    steps = kernel.launches(*operands, **parameters.keywords() | launching.provided(kernel, *operands[:2]))
    assert len(steps) == len(plan.launches)
    for (function, grid, arguments, options), planned in zip(steps, plan.launches, strict=True):
        assert (planned.kernel, planned.grid, planned.options) == (function.__name__, grid, options)
        for real, argument in zip(arguments, planned.arguments, strict=True):
            operand = operand_of(argument)
            if operand is None:
                assert isinstance(argument, (Resident, Varying)) or (argument == real and type(argument) is type(real))
                continue
            base = real.base if isinstance(argument, Descriptor) else real
            if operand.source < len(plan.tensors):
                assert base.data_ptr() == plan.tensors[operand.source].data_ptr()  # type: ignore[union-attr]
            assert base.dtype == launching.TYPES[operand.dtype]
            if isinstance(argument, Descriptor):
                assert (argument.shape, argument.strides, argument.block) == tuple(map(tuple, (real.shape, real.strides, real.block_shape)))


def test_a_plan_hands_over_the_addresses_of_what_each_call_gives_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_cuda_getDevice", None), ("_cuda_getCurrentRawStream", 5), ("_cuda_isCurrentStreamCapturing", False)):
        monkeypatch.setattr(torch._C, name, lambda *_, value=value: value, raising=False)
    q = torch.zeros(2, 4, 9, 64, dtype=torch.float8_e4m3fn)
    given: dict[str, Any] = {"alibi_slopes": torch.zeros(4), "k_descale": torch.zeros(2, 4), "v_descale": 2.0, "sinks": torch.zeros(8)[::2]}
    plan = KernelPlan(parse(Arguments(q, q, q, per_head=PerHead(**given)), Options()), LoadedKernel(None), q.stride())  # type: ignore[arg-type]
    runs: list[list[int]] = []
    plan.program = SimpleNamespace(run=lambda addresses, stream, bits: runs.append(addresses))  # type: ignore[assignment]
    plan._plain, plan._heads = False, [0, 101, 102, 103, 0]
    for _ in range(2):
        given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        plan.run(q, q, q, None, None, PerHead(**given))
        wanted = {name: x.data_ptr() for name, x in given.items() if isinstance(x, torch.Tensor)} | {"q_descale": 101, "v_descale": 103}
        assert runs[-1][: launch.OUT] == [q.data_ptr()] * 3
        assert runs[-1][launch.HEADS :] == [*(wanted[name] for name in PER_HEAD), 0]


@pytest.mark.parametrize("shape", [(2, 4, 9, 21), (1, 4, 9, 21), (2, 1, 9, 21), (9, 21), (2, 1, 1, 21)], ids=str)
def test_a_bias_whose_rows_arent_aligned_is_copied_once_a_call_and_launches_are_recorded(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_cuda_getDevice", None), ("_cuda_getCurrentRawStream", 5), ("_cuda_isCurrentStreamCapturing", False)):
        monkeypatch.setattr(torch._C, name, lambda *_, value=value: value, raising=False)
    kernel = hopper(Features(mask="bias"))
    q, k = torch.zeros(2, 4, 9, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 21, 64, dtype=torch.bfloat16)
    plan = KernelPlan(parse(Arguments(q, k, k, torch.zeros(shape, dtype=q.dtype)), Options()), kernel, q.stride())
    copied: list[torch.Tensor] = []
    known = launching.bias_copy

    def noted(*given: Any) -> torch.Tensor:
        found = known(*given)
        assert found is not None
        copied.append(found)
        return found

    monkeypatch.setattr(launching, "bias_copy", noted)
    runs: list[tuple[int, torch.Tensor]] = []

    def run(addresses: list[int], *_: object) -> None:
        runs.append((addresses[launch.HEADS + len(PER_HEAD)], copied[-1].clone()))

    plan.program = SimpleNamespace(run=run)  # type: ignore[assignment]
    plan._plain, plan._copies_mask = False, True
    for _ in range(2):
        mask = torch.randn(shape).bfloat16()
        plan.run(q, k, k, mask, None, None)
        address, seen = runs[-1]
        assert address == copied[-1].data_ptr() and torch.equal(seen.expand(2, 4, 9, 21), mask.expand(2, 4, 9, 21))


def hopper(features: Features) -> LoadedKernel:
    chosen = family("flash_fwd_hopper")
    spec = Problem(batch=2, heads=4, kv_heads=4, n_q=9, n_kv=21, d=64, d_v=64, dtype="bf16", features=features).spec()
    return loaded(chosen, spec, chosen.default(spec, find_target("h200")))


def test_a_bias_that_the_copy_engine_takes_is_handed_over_as_it_is() -> None:
    host = hopper(Features(mask="bias")).host
    assert host is not None
    aligned = torch.zeros(1, 4, 9, 24, dtype=torch.bfloat16).expand(2, 4, 9, 24)
    assert launching.bias_copy(host, aligned) is None and launching.bias_copy(host, None) is None
    assert launching.bias_copy(host, aligned[..., 1:22]) is not None
    by_pointer = host_of(family("flash_fwd"), host.spec, family("flash_fwd").default(host.spec, find_target("h200")))
    assert launching.bias_copy(by_pointer, aligned[..., 1:22]) is None


def test_a_plan_hands_over_the_memory_of_the_stream_that_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[int] = []
    for name, value in (("_cuda_getDevice", lambda: None), ("_cuda_getCurrentRawStream", lambda _: streams[-1])):
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    taken = SimpleNamespace(counters=lambda _, stream, *__: 1000 * stream, scratch=lambda _, stream, __: 4096 * stream)
    monkeypatch.setattr(driver, "STREAM_MEMORY", taken)
    q, k, v = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 9, 16), torch.zeros(1, 2, 9, 16)
    plan = KernelPlan(parse(Arguments(q, k, v), Options(enable_gqa=True)), LoadedKernel(None), q.stride())  # type: ignore[arg-type]
    runs: list[list[int]] = []
    plan.program = SimpleNamespace(run=lambda addresses, stream, bits: runs.append(addresses))  # type: ignore[assignment]
    plan._plain, plan._counters, plan._scratch, plan._lse_offset, plan._temporaries = False, 8, 1024, 768, (0, 512)
    for stream in (7, 7, 9, 7):
        streams.append(stream)
        # What is given per head takes the long way to the same addresses.
        for per_head in (None, PerHead(), None):
            plan.run(q, k, v, None, None, per_head)
            place = 4096 * stream
            assert runs[-1][:3] == [x.data_ptr() for x in (q, k, v)]
            assert runs[-1][launch.LSE :] == [place + 768, 1000 * stream, *[0] * (2 + len(PER_HEAD)), place, place + 512]


def test_a_sequence_that_grows_reads_no_file_and_no_host_code_anew(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "load_function", lambda *_: 7)
    monkeypatch.setattr(launch, "_functions", {})
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
        return candidate.plan._prepared(operands, call.parameters(None, None), compiles=False) is not None

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
    plan = KernelPlan(parse(Arguments(q, q, q), Options(is_causal=True)), module, q.stride(), manifest=manifest, warn=warned.append)
    operands, parameters = plan._given(q, q, q, None, None)
    assert plan._prepared(operands, parameters, compiles=False) is None, "host code alone can't compile"
    assert plan._prepared(operands, parameters, compiles=True) is not None
    assert compiled == [manifest.binaries[0].kernel]
    assert len(warned) == 1 and str(tmp_path) in warned[0] and "until then Triton compiles" in warned[0]


def test_a_loaded_kernel_is_named_by_its_template_whether_or_not_its_module_is_there() -> None:
    assert hopper(Features()).name.startswith("flash_fwd_hopper fwd-bf16-d64 ")
    chosen = family("flash_fwd")
    spec = hopper(Features()).host.spec  # type: ignore[union-attr]
    text = render(chosen, kernels.variant(chosen, spec, chosen.default(spec, find_target("a100"))))
    assert load_kernel(text, "named").name.startswith("flash_fwd fwd-bf16-d64 ")
