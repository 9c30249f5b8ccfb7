"""The host side of kernels is a function of sizes, strides and numbers alone: one plan serves all that lie alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper_kernels import PLAIN

from flashtune.core.code import launching
from flashtune.core.code.launching import counts_of, launcher, provided, sms_of
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, Direction
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import InputError
from flashtune.templates import families, family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.inputs import Inputs, make_inputs

H200 = find_target("h200")
DRAWN = {"tiles": "chained", "order": "drawn"}
CASES: list[tuple[str, Features, DType, dict[str, Any]]] = [
    ("flash_fwd", Features(causal=True, mask="bias", sinks=True), "fp16", {}),
    ("flash_fwd", Features(mask="bool", alibi=True), "bf16", {}),
    ("flash_bwd", Features(window=(20, 5), mask="bias", alibi=True, dropout=True, sinks=True), "bf16", {}),
    ("flash_decode", Features(window=(20, 5), sinks=True), "bf16", {"combine": "kernel"}),
    ("flash_decode", Features(softcap=True), "fp8", {"combine": "last", "loads": "tma"}),
    ("flash_fwd_hopper", Features(causal=True), "bf16", {**PLAIN, **DRAWN, "maximum": "first", "rescale": "grown"}),
    ("flash_fwd_hopper", Features(mask="bool", dropout=True), "bf16", PLAIN),
    ("flash_fwd_hopper", Features(mask="bias"), "fp16", PLAIN),
    ("flash_fwd_hopper", Features(causal=True, alibi=True, sinks=True), "fp8", {**PLAIN, **DRAWN}),
]


def problem_of(features: Features, dtype: DType, direction: Direction = "fwd") -> Problem:
    sizes = dict(batch=2, heads=4, kv_heads=2, n_q=70, n_kv=336, d=64, d_v=64)
    return Problem(**sizes, dtype=dtype, features=features, direction=direction)


def module_of(name: str, features: Features, dtype: DType, changes: dict[str, Any]) -> tuple[Any, Problem]:
    chosen, problem = family(name), problem_of(features, dtype, "bwd" if "_bwd" in name else "fwd")
    config: Config = chosen.default(problem.spec(), H200).replace(**changes)
    assert chosen.violated(config, problem.spec(), H200) is None
    return load_kernel(render(chosen, variant_of(chosen, problem.spec(), config)), "contract"), problem


MISLED = (torch.zeros(1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64))


def described(argument: Any, inputs: Inputs) -> Any:
    """An argument without its memory: what it is a view of, its sizes and strides, or its value."""
    if not isinstance(argument, torch.Tensor):
        base = getattr(argument, "base", None)
        return argument if base is None else (described(base, inputs), argument.shape, argument.strides, argument.block_shape)
    words = inputs.keywords
    tensors = {**inputs.operands, "mask": words["mask"]}
    tensors |= inputs.parameters.per_head()
    places = {x.untyped_storage()._cdata: name for name, x in tensors.items() if x is not None}
    # A view of an input begins where the input does.
    name = places.get(argument.untyped_storage()._cdata, "temporary")
    assert name == "temporary" or argument.storage_offset() == tensors[name].storage_offset()
    return name, argument.dtype, argument.shape, argument.stride()


def taken(module: Any, inputs: Inputs, counts: torch.Tensor | None, **changes: Any) -> list[Any]:
    misled = {"misses": MISLED} if module.counts_misses else {}
    found = module.launches(*inputs.arguments, **inputs.keywords | {"sms": 7, "counts": counts} | misled | changes)
    names = {id(counts): "counts", id(MISLED[0]): "misses", id(MISLED[1]): "told"} if counts is not None else {}
    return [
        (kernel, grid, [names[id(x)] if id(x) in names else described(x, inputs) for x in arguments], options)
        for kernel, grid, arguments, options in found
    ]


@pytest.mark.parametrize(("name", "features", "dtype", "changes"), CASES, ids=str)
def test_meta_tensors_make_the_launches_that_others_make(
    name: str, features: Features, dtype: DType, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, problem = module_of(name, features, dtype, changes)
    recorded = make_inputs(problem, device="meta", seed=0)
    real = make_inputs(problem, device="cpu", seed=0)
    if name in ("flash_fwd", "flash_bwd") or changes.get("combine") == "kernel":
        # Kernels without descriptors take tensors at any address.
        recorded, real = (
            replace(inputs, operands={name: shifted(x) for name, x in inputs.operands.items()}) for inputs in (recorded, real)
        )
    for thing in ("get_device_properties", "current_stream", "is_current_stream_capturing"):
        monkeypatch.delattr(torch.cuda, thing)
    counts = torch.zeros(1000, dtype=torch.int32)
    found = taken(module, recorded, counts)
    assert found == taken(module, real, counts) == taken(module, recorded, counts)
    assert ("counts" in str(found)) == (module.counts_needed(real.q, real.k) > 0)
    assert ("'misses', 'told'" in str(found)) == (changes.get("maximum") == "first")


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same sizes and strides one element further on."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return room[1:].view(tensor.shape)


@pytest.mark.parametrize(("name", "features", "dtype", "changes"), CASES, ids=str)
def test_the_sign_of_a_scale_moves_into_a_copy_of_the_queries_where_the_kernel_needs_it(
    name: str, features: Features, dtype: DType, changes: dict[str, Any]
) -> None:
    module, problem = module_of(name, features, dtype, changes)
    inputs = make_inputs(problem, device="meta", seed=0)
    moved = {scale: "'q'" not in str([entry[2] for entry in taken(module, inputs, inputs.lse, scale=scale)]) for scale in (0.5, -0.5, 0.0)}
    assert moved == {0.5: False, -0.5: module.host.positive_scale, 0.0: module.host.positive_scale}


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("shared", [(), (0,), (0, 1), (2,), (3,)], ids=str)
def test_scores_of_moved_signs_are_the_scores(dtype: DType, scale: float, shared: tuple[int, ...]) -> None:
    """Queries that batches, heads, rows or columns share repeat in memory."""
    module, _ = module_of("flash_fwd_hopper", Features(), dtype, PLAIN)
    own = torch.randn([1 if i in shared else size for i, size in enumerate((2, 3, 5, 64))])
    q = own.to(torch.float8_e4m3fn if dtype == "fp8" else torch.float16).mT.contiguous().mT.expand(2, 3, 5, 64)
    moved, positive = launching.positive_scale(module.host, q, scale)
    assert positive > 0.0 and moved.stride() == q.stride()
    assert torch.equal(moved.float() * positive, q.float() * scale)


def test_a_text_brings_its_own_host_code_or_names_a_template_of_the_package() -> None:
    launches = "def launches(*_, **__):\n    return []\n"
    assert load_kernel(f"{launches}KERNEL = 3\n", "own").host is None
    with pytest.raises(InputError, match="unknown template 'rows'"):
        load_kernel('KERNEL = {"template": "rows", "spec": {}, "config": {}}\n', "rows")


def test_a_bias_is_copied_where_the_copy_engine_cant_read_it() -> None:
    module, problem = module_of("flash_fwd_hopper", Features(mask="bias"), "fp16", PLAIN)
    for make, expected in BIASES:
        bias = make()
        inputs = make_inputs(problem, device="cpu", seed=0)
        inputs = replace(inputs, parameters=replace(inputs.parameters, mask=bias))
        found = taken(module, inputs, None)
        assert ("'mask'" in str(found)) is expected
        assert (launching.bias_copy(module.host, bias) is None) is expected


BIASES: list[tuple[Callable[[], torch.Tensor], bool]] = [
    (lambda: torch.zeros(1, 1, 70, 344).half()[..., :336].expand(2, 4, 70, 336), True),
    (lambda: torch.zeros(1, 1, 70, 337).half()[..., :336].expand(2, 4, 70, 336), False),
    (lambda: torch.zeros(2 * 4 * 70 * 336 + 1).half()[1:].view(2, 4, 70, 336), False),
]


@pytest.mark.parametrize("name", families())
def test_every_family_keeps_the_contract(name: str) -> None:
    module, problem = module_of(name, Features(), "fp16", {})
    inputs = make_inputs(problem, device="meta", seed=0)
    assert isinstance(module.counts_needed(inputs.q, inputs.k), int)
    assert module.accepts(inputs.q, inputs.k, inputs.v, None)


def test_the_last_of_a_tiles_programs_is_found_by_a_count_of_each_tile() -> None:
    module, _ = module_of("flash_decode", Features(), "bf16", {"combine": "last", "BLOCK_M": 16})
    q, k = torch.empty(3, 12, 5, 64, device="meta"), torch.empty(3, 4, 100, 64, device="meta")
    # 5 queries of 3 heads are 15 rows of a tile.
    assert module.counts_needed(q, k) == 3 * 4
    assert module.counts_needed(torch.empty(3, 12, 6, 64, device="meta"), k) == 2 * 3 * 4


def test_the_device_provides_multiprocessors_and_zero_counts() -> None:
    module, problem = module_of("flash_decode", Features(), "bf16", {"combine": "last"})
    inputs = make_inputs(problem, device="cpu", seed=0)
    found = provided(module, inputs.q, inputs.k)
    assert found["sms"] == sms_of(torch.device("cpu"))
    assert found["counts"].dtype == torch.int32
    assert found["counts"].numel() >= module.counts_needed(inputs.q, inputs.k)
    assert not found["counts"].any()
    assert counts_of(torch.device("cpu"), 0) is None


def test_misled_programs_are_counted_in_memory_of_the_device_where_nobody_reads_it() -> None:
    settling, problem = module_of("flash_fwd_hopper", Features(), "bf16", {"maximum": "first", "rescale": "grown"})
    running, _ = module_of("flash_fwd_hopper", Features(), "bf16", {"maximum": "running"})
    inputs = make_inputs(problem, device="cpu", seed=0)
    counted, told = provided(settling, inputs.q, inputs.k)["misses"]
    assert counted is not told and counted.dtype == told.dtype == torch.int64
    assert provided(settling, inputs.q, inputs.k)["misses"][0] is counted, "one for all"
    assert "misses" not in provided(running, inputs.q, inputs.k)


def test_launches_on_one_stream_share_counts_and_a_captured_graph_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended GPU whose memory is the CPU's."""
    stream, capturing = [1], [False]
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, device: zeros(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": stream[0]}))
    monkeypatch.setattr(launching, "_COUNTS", {})
    gpu, other = torch.device("cuda", 0), torch.device("cuda", 1)
    first = counts_of(gpu, 3)
    assert counts_of(gpu, 2) is first
    assert counts_of(other, 2) is not first
    larger = counts_of(gpu, 100)
    assert larger is not None and larger.numel() >= 100
    assert counts_of(gpu, 3) is larger
    stream[0] = 2
    assert counts_of(gpu, 3) is not larger
    stream[0], capturing[0] = 1, True
    assert counts_of(gpu, 3) is not larger
    assert counts_of(gpu, 3) is not counts_of(gpu, 3)


def test_a_launcher_passes_on_what_is_provided() -> None:
    seen: list[dict[str, Any]] = []

    launched: list[dict[str, Any]] = []

    def launches(*tensors: torch.Tensor, **words: Any) -> list[Any]:
        seen.append(words)
        return [({(3,): lambda *args, **options: launched.append(options)}, (3,), tensors, {"num_warps": 4})]

    class Module:
        counts_needed = staticmethod(lambda q, k: 5)
        counts_misses = False

    Module.launches = launches  # type: ignore[attr-defined]
    x = torch.zeros(1)
    launcher(Module)(x, x, x, x, x, scale=2.0)  # type: ignore[arg-type]
    [words] = seen
    assert launched == [{"num_warps": 4, "enable_fp_fusion": True}]
    assert (words["scale"], words["sms"], words["counts"].numel()) == (2.0, sms_of(x.device), 5)
