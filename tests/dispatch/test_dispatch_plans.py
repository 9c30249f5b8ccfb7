"""Plans of shipped kernels are what their host code launches, at the calls' own addresses, of masks, features and heads of every kind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launched import RECORDS, hopper, host_side

from flashtune.core.code import launching
from flashtune.core.code.launches import Descriptor, Operand, Resident, Varying
from flashtune.core.code.launching import LoadedKernel, Tensors
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.dtypes import output_dtype
from flashtune.core.problems.parameters import PER_HEAD, CallParameters
from flashtune.core.problems.problem import Features, MaskKind, Problem
from flashtune.core.pytorch.dtypes import TORCH_DTYPES
from flashtune.core.records.results import TuningRecord
from flashtune.dispatch.call.call import PerHead
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.plans import launch
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.plans.program import MASK, OUT
from flashtune.templates import family
from flashtune.templates.loading import host_of, load_kernel
from flashtune.templates.rendering import render, variant_of

# Launches differ by what is compiled in, and by whether kernels count mispredicting programs.
OF_SPECS = list(
    {
        (one.outcome.template, one.problem.spec(), "maximum=first" in one.outcome.config.label()): one
        for one in RECORDS
        if not one.problem.features.packed
    }.values()
)


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
    assert sources <= named and {0, 1, 2} <= sources
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
    plan = KernelPlan(parse(Arguments(q, q, q, per_head=PerHead(**given)), Options()), Code(LoadedKernel(None)), q.stride())  # type: ignore[arg-type]
    runs: list[list[int]] = []
    plan.program = SimpleNamespace(run=lambda addresses, bits: runs.append(addresses))  # type: ignore[assignment]
    plan._plain, plan._heads = False, [0, 101, 102, 103, 0]
    for _ in range(2):
        given = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        plan.run(q, q, q, None, None, PerHead(**given))
        wanted = {name: x.data_ptr() for name, x in given.items() if isinstance(x, torch.Tensor)} | {"q_descale": 101, "v_descale": 103}
        assert runs[-1][:OUT] == [q.data_ptr()] * 3
        heads = MASK + 1
        assert runs[-1][heads:] == [*(wanted[name] for name in PER_HEAD), *[0] * (len(Tensors._fields) - heads - len(PER_HEAD))]


@pytest.mark.parametrize("shape", [(2, 4, 9, 21), (1, 4, 9, 21), (2, 1, 9, 21), (9, 21), (2, 1, 1, 21)], ids=str)
def test_a_bias_whose_rows_arent_aligned_is_copied_once_a_call_and_launches_are_recorded(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_cuda_getDevice", None), ("_cuda_getCurrentRawStream", 5), ("_cuda_isCurrentStreamCapturing", False)):
        monkeypatch.setattr(torch._C, name, lambda *_, value=value: value, raising=False)
    kernel = hopper(Features(mask="bias"))
    q, k = torch.zeros(2, 4, 9, 64, dtype=torch.bfloat16), torch.zeros(2, 4, 21, 64, dtype=torch.bfloat16)
    plan = KernelPlan(parse(Arguments(q, k, k, torch.zeros(shape, dtype=q.dtype)), Options()), Code(kernel), q.stride())
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
        runs.append((addresses[Tensors._fields.index("bias")], copied[-1].clone()))

    plan.program = SimpleNamespace(run=run)  # type: ignore[assignment]
    plan._plain, plan._copies_mask = False, True
    for _ in range(2):
        mask = torch.randn(shape).bfloat16()
        plan.run(q, k, k, mask, None, None)
        address, seen = runs[-1]
        assert address == copied[-1].data_ptr() and torch.equal(seen.expand(2, 4, 9, 21), mask.expand(2, 4, 9, 21))


def test_a_bias_that_the_copy_engine_takes_is_handed_over_as_it_is() -> None:
    host = hopper(Features(mask="bias")).host
    assert host is not None
    aligned = torch.zeros(1, 4, 9, 24, dtype=torch.bfloat16).expand(2, 4, 9, 24)
    assert launching.bias_copy(host, aligned) is None and launching.bias_copy(host, None) is None
    assert launching.bias_copy(host, aligned[..., 1:22]) is not None
    by_pointer = host_of(family("flash_fwd"), host.spec, family("flash_fwd").default(host.spec, find_target("h200")))
    assert launching.bias_copy(by_pointer, aligned[..., 1:22]) is None
