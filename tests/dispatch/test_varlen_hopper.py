"""Packed sequences in Hopper's kernels: what the rendered text computes, on a stand-in for the GPU, and that nobody reads a neighbour."""

import math
from typing import Any

import pytest
import torch
from hopper_kernels import config
from interpreting import interpreted
from packed_machine import Ragged, numbers_of
from test_hopper_pieces import Masked
from varlen_cases import Inputs, inputs, wanted

from flashtune.core.code import launching
from flashtune.core.code.launching import provided
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import settles
from flashtune.core.problems.problem import Features, Problem
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of, rows_last, viewed
from flashtune.dispatch.plans import launch
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.policy.orders import rank_packed
from flashtune.dispatch.rows import packed
from flashtune.dispatch.rows.packed import named, parameters_of
from flashtune.dispatch.state.context import Memo, current
from flashtune.templates import families, family
from flashtune.templates.hopper.flash_fwd_hopper import FAMILY
from flashtune.templates.loading import load_kernel, loaded
from flashtune.templates.rendering import render, variant_of

LENGTHS = ((5, 0, 130, 64, 1, 0), (70, 3, 130, 0, 200, 0))


class Sequences(Ragged, Masked):
    """The forward's stand-in for packed sequences."""


def run(given: Inputs, changes: dict[str, Any], seed: int = 0, *, outside: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, with `outside` with heads outside of rows in memory, and LSE of a packed kernel on poisoned memory."""
    used, sinks = given.words.get("seqused_k"), given.words.get("sinks")
    q, k, v = (x.detach() for x in given.tensors)
    numbers, packed = numbers_of(given), Packed(q, k, v, *given.bounds, used, None, sinks)
    problem = problem_of(packed, numbers)
    assert problem is not None
    spec = problem.spec()
    module = load_kernel(render(FAMILY, variant_of(FAMILY, spec, config(spec, **changes))), "packed")
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), math.nan, dtype=q.dtype)
    out = out.transpose(0, 1).contiguous().transpose(0, 1) if outside else out
    lse = torch.full((1, q.shape[1], q.shape[0]), math.nan)
    words: dict[str, Any] = {"scale": numbers.scale, "diagonal": int(numbers.bottom_right), "lengths": (*given.bounds, used)}
    words |= {"window_left": numbers.left, "window_right": numbers.right}
    words |= {} if sinks is None else {"sinks": sinks.detach().expand(packed.sequences, -1)}
    tensors = [rows_last(x) for x in (q, k, v, out)]
    words |= provided(module, tensors[0], tensors[1]) | {"sms": 3}
    [launch] = module.launches(*tensors, lse, **words)
    Sequences(module, launch, seed=seed).run()
    assert words["counts"] is None or not words["counts"].any(), "the next launch finds the counter as this one did"
    return out, lse[0]


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"tiles": "chained", "maximum": "first"}),
    ({}, {"tiles": "chained", "order": "drawn"}),
    ({"is_causal": True}, {"tiles": "chained", "order": "drawn", "section": 8}),
    ({"is_causal": True, "causal_alignment": "top_left"}, {"intra_wg_overlap": 0, "maximum": "first"}),
    ({"is_causal": True}, {"tiles": "chained", "order": "drawn", "maximum": "first"}),
    ({"window_size": (20, 9)}, {"tiles": "chained"}),
    ({"window_size": (20, 0), "causal_alignment": "top_left"}, {}),
    ({"used": (60, 3, 7, 0, 150, 0), "is_causal": True}, {"tiles": "chained", "order": "drawn"}),
    ({"sinks": True}, {"tiles": "chained"}),
    ({"d_v": 160}, {"v_columns": "pieces"}),
    ({"d": 160}, {"num_stages": 3, "v_columns": "pieces"}),
    ({"d": 160, "is_causal": True}, {"num_stages": 2, "tiles": "loop", "order": "drawn", "BLOCK_N": 64}),
    ({"sinks": True, "is_causal": True}, {"tiles": "chained", "order": "drawn", "maximum": "first", "section": 8}),
]


@pytest.mark.parametrize(("case", "changes"), CASES, ids=str)
def test_hoppers_forward_computes_each_sequence_alone(case: dict[str, Any], changes: dict[str, Any]) -> None:
    case = dict(case)
    given = inputs(case, LENGTHS, dtype=torch.float16, d=case.pop("d", 64), heads=2, padding=70)
    given = given._replace(tensors=[x if i == 0 else x[:, :1].detach().requires_grad_() for i, x in enumerate(given.tensors)])
    out, lse = run(given, changes)
    right, right_lse, _ = wanted(given, LENGTHS)
    torch.testing.assert_close(out.double(), right, atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-3, rtol=1e-5)


def test_heads_may_lie_outside_of_packed_rows() -> None:
    given = inputs({"is_causal": True}, LENGTHS, dtype=torch.float16, d=64, heads=2, padding=70)
    apart = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in given.tensors]
    for one, theirs in zip(run(given._replace(tensors=apart), {}, outside=True), run(given, {}), strict=True):
        assert torch.equal(one, theirs)


def test_hoppers_backward_computes_each_sequence_alone() -> None:
    report = interpreted("interpret_varlen_hopper")
    assert {name: failure for name, failure in report.items() if failure} == {}
    assert len(report) > 5


@pytest.mark.parametrize("name", ["flash_fwd", "flash_bwd", "flash_fwd_hopper", "flash_bwd_hopper", "flash_bwd_hopper_split"])
@pytest.mark.parametrize("uses_some", [False, True])
def test_prepared_launches_name_tensors_in_the_order_in_which_calls_give_them(name: str, uses_some: bool) -> None:
    q, k = torch.zeros(300, 4, 64, dtype=torch.bfloat16), torch.zeros(200, 2, 64, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 100, 200], dtype=torch.int32)
    packed = Packed(q, k, k.clone(), bounds, bounds.clone(), bounds[:2].clone() if uses_some else None, torch.zeros(2, 4), torch.zeros(4))
    chosen = family(name)
    problem = problem_of(packed, PLAIN, chosen.direction)
    assert problem is not None
    spec = problem.spec()
    kernel = loaded(chosen, spec, chosen.default(spec, find_target("h100")))
    operands = [*packed[:3], q.clone(), torch.zeros(4, 300)]
    if chosen.direction == "bwd":
        operands += [q.clone(), torch.zeros(4, 300), q.clone(), k.clone(), k.clone()]
    plan = launch.planned(kernel, viewed(operands), parameters_of(packed, PLAIN, 0))
    assert plan is not None
    given = named(operands, packed, spec)
    # Counts are found at each launch.
    places = [launching.addresses(given._make(tensors)._replace(counts=None)) for tensors in (plan.tensors, given)]
    assert places[0] == places[1]
    assert [x.source for x in plan.scratch] == list(range(len(given), len(given) + len(plan.scratch)))


def test_tensors_that_kernels_take_otherwise_are_chosen_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Packed] = []
    monkeypatch.setattr(packed, "_choose", lambda given, *_: chosen.append(given))
    memory, bounds = torch.zeros(3, 36, dtype=torch.half), torch.tensor([0, 1, 1, 1, 1])

    def rows(count: int, first: int = 0) -> torch.Tensor:
        return memory[:count].as_strided((count, 2, 16), (36, 16, 1), first)

    # The query or the value begins elsewhere, or strides of rows begin to matter.
    others, memo = ((rows(1), rows(1)), (rows(1, 4), rows(1)), (rows(1), rows(1, 4)), (rows(3), rows(1))), Memo()
    for q, v in others * 2:
        packed.served(Packed(q, rows(1), v, bounds, bounds), PLAIN, "fwd", memo)
    assert len(chosen) == len(others)


def test_it_takes_packed_sequences_without_masks() -> None:
    spec = problem_of(Packed(*(torch.zeros(9, 2, 64, dtype=torch.bfloat16),) * 3, *(torch.zeros(3, dtype=torch.int32),) * 2), PLAIN)
    assert spec is not None and FAMILY.supports(spec.spec(), find_target("h100")) is None
    assert Features(packed=True).label() == "full+packed"


PLAIN = Numbers(9, 9, 0.1, -1, -1, True, 0.0, 0.0, False, False)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("d", [32, 64, 80, 128])
@pytest.mark.parametrize(("sequences", "n"), [(1, 512), (3, 2048), (64, 1024)])
def test_configs_of_dense_records_stay_valid_where_tiles_are_few(gpu: str, direction: Any, d: int, sequences: int, n: int) -> None:
    features = Features(causal=True, packed=True)
    problem = Problem(batch=sequences, heads=4, kv_heads=4, n_q=n, n_kv=n, d=d, d_v=d, dtype="bf16", features=features, direction=direction)
    target = find_target(gpu)
    memo = current()
    ranked = rank_packed(problem, target, lambda one: memo.pool(one.key(gpu), target), families())
    found = [choice for choice in ranked if isinstance(choice, Choice) and choice.family is not None and choice.config is not None]
    assert found
    for chosen in found:
        for its_config in (chosen.config, chosen.fallback):
            assert its_config is None or chosen.family is None or chosen.family.violated(its_config, problem.spec(), target) is None
    assert direction == "bwd" or any(chosen.fallback for chosen in found) == settles(found[0].config)
