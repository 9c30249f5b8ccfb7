"""Masks and scores as code: kernels in Triton's interpreter and PyTorch's own function, against the functions themselves in float64."""

import functools
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreting import interpreted
from mod_cases import CASES, OPERATIONS, oracle
from torch.nn.attention.flex_attention import and_masks, create_block_mask

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, KernelSpec, Variant
from flashtune.core.system.errors import InputError
from flashtune.dispatch import flex
from flashtune.dispatch.functions import by_torch as flex_torch
from flashtune.dispatch.functions import decided as flex_decided
from flashtune.dispatch.functions import kernels as flex_kernels
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions import trained as flex_autograd
from flashtune.dispatch.rows.kernel import NotBuilt
from flashtune.templates import family
from flashtune.templates.mods import known, scores, structure
from flashtune.templates.mods.additions import PAIR, by_distance, kept_values, varies
from flashtune.templates.mods.emit import emitted
from flashtune.templates.mods.graph import loads
from flashtune.templates.mods.trace import gradients
from flashtune.templates.mods.writer import nonnegative
from flashtune.templates.rendering import render

BOUND = 1e-5
"""Of float32 sums in another order, over the largest number; scores of some operations reach 10^3, which costs digits."""


@functools.cache
def reports() -> Any:
    return interpreted("interpret_mods")


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_the_function_and_its_gradients(name: str) -> None:
    served, out, lse, gradients = reports()["cases"][name]
    assert served.startswith("flash_fwd")
    trained = [x for x in CASES[name].captured(torch.Generator()) if x.requires_grad]
    assert len(gradients) == 3 + len(trained)
    assert max(out, lse, *gradients) <= BOUND


@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_have_the_operations_of_scores(name: str) -> None:
    served, out, lse, gradients = reports()["operations"][name]
    assert served.startswith("flash_fwd")
    assert max(out, lse, *gradients) <= 5 * BOUND


def test_kernels_compute_random_functions_and_their_gradients() -> None:
    found = reports()["random"]
    assert all(served.startswith("flash_fwd") for served, *_ in found)
    assert max(max(out, lse, *gradients) for _, out, lse, gradients in found) <= 3 * BOUND


BY_DISTANCE: dict[str, tuple[bool, Any]] = {
    "distance": (True, lambda s, h, q, k: q - k),
    "spelled otherwise": (True, lambda s, h, q, k: 3 * h - 2 * k + 7 + q + q),
    "clamped": (True, lambda s, h, q, k: (k - q).clamp(-8, 8) // 3 % 5),
    "compared": (True, lambda s, h, q, k: torch.where(q + 2 >= k, q - k, 0)),
    "buckets": (True, lambda s, h, q, k: ((q - k).abs().float() + 1).log2().to(torch.int32)),
    "halves": (False, lambda s, h, q, k: q // 2 - k // 2),
    "unequal factors": (False, lambda s, h, q, k: q - 2 * k),
    "compared with a place": (False, lambda s, h, q, k: torch.where(q >= 5, q - k, 0)),
    "least place": (False, lambda s, h, q, k: torch.minimum(q, k)),
    "product": (False, lambda s, h, q, k: (q - k) * k),
    "score": (False, lambda s, h, q, k: (q - k) * 0 + (s * 4).to(torch.int32)),
}


@pytest.mark.parametrize("name", BY_DISTANCE)
def test_indices_by_the_distance_alone_are_recognised(name: str) -> None:
    wanted, index = BY_DISTANCE[name]
    table = torch.zeros(64)
    traced, _ = flex_functions._traced(lambda s, b, h, q, k: s + table[index(s, h, q, k)], None, torch.device("cpu"))
    assert traced.score is not None
    [load] = loads([traced.score])
    assert (varies(load) == PAIR and by_distance(load.arguments)) == wanted


@pytest.mark.parametrize(
    ("never", "index"),
    [
        (True, lambda q, k: q * 64 + k),
        (True, lambda q, k: q.long() * 100_003 % 64),
        (True, lambda q, k: (q - k).to(torch.uint8).int()),
        (False, lambda q, k: q * 100_003),
        (False, lambda q, k: q * k),
        (False, lambda q, k: q.to(torch.int8).int()),
        (False, lambda q, k: (q.long() * 100_003).to(torch.int32)),
    ],
)
def test_places_that_may_wrap_are_taken_for_negative_ones(never: bool, index: Any) -> None:
    table = torch.zeros(64)
    traced, _ = flex_functions._traced(lambda s, b, h, q, k: s + table[index(q, k)], None, torch.device("cpu"))
    assert traced.score is not None
    [load] = loads([traced.score])
    assert nonnegative(load.arguments[0]) is never


TABLE, ROWS, PLACES, SEEN = torch.randn(400), torch.randn(100), torch.arange(400) % 90, torch.arange(400) % 3 > 0

KEPT: dict[str, tuple[int, Any]] = {
    "one load": (1, lambda s, h, q, k: s + TABLE[q - k + 100]),
    "one load twice": (1, lambda s, h, q, k: s * TABLE[q - k + 100] + TABLE[q - k + 100] * 0.5),
    "loads of two heads' tables": (2, lambda s, h, q, k: s * TABLE[q - k + 100] + ROWS[q] * TABLE[h + k - q + 100]),
    "loads in loads": (1, lambda s, h, q, k: s * TABLE[PLACES[q - k + 100]]),
    "bools": (1, lambda s, h, q, k: torch.where(SEEN[q - k + 100], s, s * ROWS[q])),
    "expressions of loads": (2, lambda s, h, q, k: s + torch.sigmoid(TABLE[(q - k).clamp(-5, 5) + 5]) * TABLE[torch.sub(q, k) // 7 + 100]),
    "comparisons": (1, lambda s, h, q, k: s + torch.where(q * 2 + 3 >= k * 2, TABLE[q - k + 100], TABLE[h])),
    "more than fit": (4, lambda s, h, q, k: sum(ROWS[q] * TABLE[(q - k).abs() + 10 * i] for i in range(7)) + s),
    "arithmetic alone": (0, lambda s, h, q, k: s - TABLE[h] * (q - k).abs()),
    "places": (0, lambda s, h, q, k: s + TABLE[PLACES[q] - PLACES[k] + 100] + TABLE[torch.minimum(q, k)] + TABLE[q // 7 - k // 7 + 100]),
    "scores": (0, lambda s, h, q, k: s + TABLE[(q - k) * 0 + (s * 4).to(torch.int32)]),
    "products that may overflow": (0, lambda s, h, q, k: s + TABLE[torch.where(q * 65536 >= k * 65536, q - k + 100, 0)]),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_read_by_distance_is_equal_in_all_tiles_of_a_diagonal(name: str) -> None:
    count, score = KEPT[name]
    traced, captured = flex_functions._traced(lambda s, b, h, q, k: score(s, h, q, k), None, torch.device("cpu"))
    assert traced.score is not None
    kept = kept_values([traced.score, *(gradient for _, gradient in gradients(traced.score)[1])], 4)
    assert sorted(set(kept.values())) == [f"value_{number}" for number in range(count)]
    q, k, h, steps = (torch.randint(0, most, (3000,), dtype=torch.int32) for most in (80, 80, 3, 20))
    for node in kept:
        places = ({"b": h * 0, "h": h, "q_idx": q + step, "kv_idx": k + step} for step in (0 * steps, steps))
        here, there = (scores._evaluated(node, captured, inputs) for inputs in places)
        assert torch.equal(here, there)


def test_a_diagonals_functions_take_what_they_share() -> None:
    table, rows = torch.zeros(64, requires_grad=True), torch.zeros(64)

    def score(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.where(q >= k + 2, s * table[q - k + 9], s + rows[q])

    functions, captured = flex_functions._traced(score, None, torch.device("cpu"))
    made = emitted(functions.score, None, flex_autograd.types_of(captured, [x.requires_grad for x in captured]), backward=True)
    lines = dict(re.findall(r"def (\w+)\(.*\):\n((?:    .*\n)+)", made.gradient))
    assert (made.sums, made.values) == (1, 1) and "tl.load(c0_ptr" in lines["values_by_distance"]
    assert "value_0" in lines["diagonal_score"] and not re.search("c0_ptr|first", lines["diagonal_score"])
    assert "tl.load(c1_ptr" in lines["diagonal_score"] and "tl.load(c0_ptr" in lines["score_gradient"]


def test_gradients_of_learned_biases_are_rounded_once() -> None:
    assert max(reports()["learned"]) <= 1.1


def test_an_empty_block_mask_is_for_all_lengths() -> None:
    assert max(reports()["empty"]) <= BOUND


def test_hidden_blocks_are_not_read() -> None:
    """Keys and values of blocks that nobody sees are NaN, and gradients stay finite."""
    assert reports()["poisoned"]


def test_a_mask_that_changed_in_place_is_computed_anew() -> None:
    assert reports()["changed"] <= BOUND


def test_lists_of_blocks_are_those_of_the_mask() -> None:
    assert reports()["lists"] == []


def test_layouts_head_sizes_autocast_and_inference_mode() -> None:
    assert reports()["layouts"] <= 4e-3


def test_equal_keys_have_equal_plans_over_tensors_in_their_order() -> None:
    assert reports()["plans"] > 3 * len(CASES)


def test_masks_of_memory_are_boolean() -> None:
    # Newer versions of Triton's interpreter take no others; a scalar condition beside a tile's makes integers.
    assert reports()["masks"] == {"bool"}


def test_functions_made_anew_share_a_kernel_and_numbers_do_not() -> None:
    assert reports()["kernels"] == {"alike": 1, "another number": 2, "another length": 2}


@pytest.mark.parametrize("name", ["causal", "window"])
def test_masks_that_are_windows_take_the_built_in_kernels(name: str) -> None:
    served, out, lse = reports()["built_in"][name]
    assert served.startswith("attention with window=")
    assert max(out, lse) <= BOUND


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (lambda b, h, q, k: q >= k, (None, 0)),
        (lambda b, h, q, k: k <= q + 3, (None, 3)),
        (lambda b, h, q, k: (k > q - 8) & (q >= k), (7, 0)),
        (lambda b, h, q, k: (q - k < 5) & (k - q <= 2) & (q - k <= 9), (4, 2)),
        (lambda b, h, q, k: (q - k).abs() <= 6, (6, 6)),
        (lambda b, h, q, k: (k - q).abs() < 6, (5, 5)),
        (lambda b, h, q, k: q > k, None),
        (lambda b, h, q, k: q >= 2 * k, None),
        (lambda b, h, q, k: (q >= k) | (k < 4), None),
        (lambda b, h, q, k: (q >= k) & (k < 4), None),
        (lambda b, h, q, k: (q >= k) & (h < 4), None),
        (lambda b, h, q, k: (q + k).abs() <= 6, None),
        (lambda b, h, q, k: q >= k - h, None),
    ],
)
def test_windows_are_recognised(mask: Any, found: Any) -> None:
    functions, _ = flex_functions._traced(None, mask, torch.device("cpu"))
    assert functions.mask is not None
    assert structure.band(functions.mask) == found
    if found is not None:
        left, right = (40 if side is None else side for side in found)
        q, k = torch.arange(40)[:, None], torch.arange(40)[None, :]
        assert torch.equal(mask(0, 0, q, k).broadcast_to(40, 40), (k >= q - left) & (k <= q + right))


def tensors(*, n: int = 24, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn((2, 4, n, 16), generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("name", ["causal", "document", "alibi", "relative", "bias"])
def test_torch_serves_on_the_cpu(name: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(5)
    shapes = [(2, 4, case.n_q, 16), (2, 2, case.n_kv, 16), (2, 2, case.n_kv, 16)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    captured = [x.detach() for x in case.captured(generator)]
    score_mod, mask_mod = case.functions(*captured)
    mask = None if mask_mod is None else create_block_mask(mask_mod, 2, 4, case.n_q, case.n_kv, device="cpu")
    words = {"score_mod": score_mod, "block_mask": mask, "enable_gqa": True}
    assert "PyTorch's flex_attention" in dispatch.explain_flex(*given, **words).reason
    out = dispatch.flex_attention(*given, **words)
    torch.testing.assert_close(out, oracle(*given, score_mod, mask_mod)[0], atol=1e-6, rtol=1e-6)


def test_a_mask_mod_stands_for_its_block_mask_where_torch_serves() -> None:
    given = tensors(dtype=torch.float64)
    out = dispatch.flex_attention(*given, None, lambda b, h, q, k: q >= k)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True))


_TABLE = torch.arange(4.0)


def _branches(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    if q > k:
        return s
    return 2 * s


def _converts(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * float(q)


def _reads(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + q.item()


def _changes(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    _TABLE.add_(1)
    return s


def _writes(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    _TABLE[0] = 1.0
    return s


def _beyond(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + _TABLE[q - k + 3]


def _many(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + _TABLE[h, q]


def _huge(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    for _ in range(1200):
        s = s * 1.001
    return s


def _captured(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * int(_TABLE[0])


def _pair(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 2 * s, s


def _nothing(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return None


def _unnamed(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + undefined  # type: ignore[name-defined]  # noqa: F821


def _lacks_one(s: Any, b: Any, h: Any, q: Any) -> Any:
    return s


HOSTILE = {
    _branches: "branches on or converts a tensor's value (line .*if q > k:",
    _converts: "branches on or converts a tensor's value (line .*float.q",
    _reads: "reads a tensor's value by aten._local_scalar_dense.default (line .*q.item",
    _changes: "changes a captured tensor (line .*_TABLE.add_",
    _writes: "changes a captured tensor (line .*_TABLE.0. = 1.0",
    _beyond: "reads index 26 of dimension 0 of a captured tensor, whose size is 4 (line .*_TABLE.q - k",
    _many: "2 indices for a tensor of 1 dimensions (line ",
    _huge: "has more than 1000 operations",
    _captured: "branches on or converts a tensor's value (line .*int._TABLE.0",
    _pair: "returns 2 values: it must return a number",
    _nothing: "returns no tensor",
    _lacks_one: "_lacks_one can't be traced: TypeError: ",
    _unnamed: "can't be traced (line .*undefined.*NameError",
}


@pytest.mark.parametrize("function", HOSTILE, ids=lambda function: function.__name__)
def test_hostile_functions_are_refused_in_a_sentence(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_torch, "served_here", lambda device, dtype: True)
    kept = _TABLE.clone()
    with pytest.raises(InputError, match=HOSTILE[function].replace("(", r"\(")) as caught:
        dispatch.flex_attention(*tensors(), function)
    assert "\n" not in str(caught.value)
    assert torch.equal(_TABLE, kept)


@pytest.mark.parametrize("function", [_branches, _converts, _reads, _many, _nothing, _unnamed, _lacks_one], ids=lambda one: one.__name__)
def test_what_pytorch_refuses_where_it_serves_is_refused_in_a_sentence(function: Any) -> None:
    with pytest.raises(InputError, match=HOSTILE[function].replace("(", r"\(")) as caught:
        dispatch.flex_attention(*tensors(), function)
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__


def test_other_errors_of_pytorch_are_its_own() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="Expect query and key/value to have the same embedding dimension") as caught:
        dispatch.flex_attention(q, k[..., :4], v, lambda s, b, h, q, k: s)
    assert not isinstance(caught.value, InputError)


def test_masks_that_return_no_bool_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_torch, "served_here", lambda device, dtype: True)
    with pytest.raises(InputError, match=r"returns torch.int32: it must return a bool"):
        dispatch.flex_attention(*tensors(), None, lambda b, h, q, k: q - k)


@pytest.mark.parametrize("why", ["lgamma", "sum"])
def test_what_kernels_lack_is_named_and_served_by_torch(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_torch, "served_here", lambda device, dtype: True)
    functions = {"lgamma": lambda s, b, h, q, k: torch.lgamma(s.abs() + 1), "sum": lambda s, b, h, q, k: s + _TABLE.sum()}
    given = tensors()
    assert why in dispatch.explain_flex(*given, functions[why]).reason
    expected = oracle(*(x.double() for x in given), functions[why], None)[0]
    torch.testing.assert_close(dispatch.flex_attention(*given, functions[why]).double(), expected, atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_torch, "served_here", lambda device, dtype: True)
    q, k, v = tensors()
    with pytest.raises(InputError, match="enable_gqa"):
        dispatch.flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(InputError, match="don't fit together"):
        dispatch.flex_attention(q, k[..., :8], v)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, 4, 48, 48, device="cpu")
    with pytest.raises(InputError, match=r"is for \(48, 48\) queries and keys, and these are 24 and 24"):
        dispatch.flex_attention(q, k, v, None, mask)


def test_attention_takes_functions() -> None:
    given = tensors(dtype=torch.float64)
    words: dict[str, Any] = {"score_mod": lambda s, b, h, q, k: s + q, "block_mask": lambda b, h, q, k: q >= k, "scale": 0.5}
    assert torch.equal(dispatch.attention(*given, **words), dispatch.flex_attention(*given, **words))
    assert "no kernel runs on cpu with torch.float64" in dispatch.explain(*given, **words).reason
    with pytest.raises(InputError, match="softcap is no argument beside score_mod and block_mask"):
        dispatch.attention(*given, softcap=2.0, **words)


def test_a_spec_holds_a_hash_and_no_code() -> None:
    plain = KernelSpec(direction="fwd", dtype="bf16", d=64, d_v=64, window=False, mask="none")
    assert "mods" not in plain.as_dict()
    functions, captured = flex_functions._traced(lambda s, b, h, q, k: s * 1.375, None, torch.device("cpu"))
    made = flex_decided.emitted(functions.score, functions.mask, flex_autograd.types_of(captured, []), backward=False)
    spec = KernelSpec(**plain.as_dict(), mods=known.keep(made))
    assert json.loads(json.dumps(spec.as_dict()))["mods"] == made.hash
    assert "1.375" not in json.dumps(spec.as_dict())
    other = Variant(template="flash_fwd", spec=KernelSpec(**plain.as_dict(), mods="0" * 16), config=Config.of())
    assert other.id != Variant(template="flash_fwd", spec=plain, config=Config.of()).id


def test_functions_of_another_process_are_not_rendered() -> None:
    kind, target = family("flash_fwd"), find_target("h100")
    spec = KernelSpec(direction="fwd", dtype="bf16", d=64, d_v=64, window=False, mask="none", mods="f" * 16)
    with pytest.raises(KeyError):
        render(kind, Variant(template=kind.name, spec=spec, config=kind.default(spec, target)))


def test_masks_joined_by_torch_are_traced() -> None:
    limit = torch.tensor([5, 9])
    joined = and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k < limit[b])
    functions, captured = flex_functions._traced(None, joined, torch.device("cpu"))
    assert functions.mask is not None
    assert len(captured) == 1 and captured[0] is limit


def test_a_kernel_that_cannot_be_built_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise NotBuilt("no compiler")

    answers: Any = iter([SimpleNamespace(captured=()), "no kernel is left"])
    monkeypatch.setattr(flex, "call_of", lambda *given: next(answers))
    monkeypatch.setattr(flex, "attend_by_kernels", fails)
    given = tensors(dtype=torch.float64)
    out = dispatch.flex_attention(*given, None, lambda b, h, q, k: q >= k)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True))


def test_the_next_family_serves_where_one_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(accepts=lambda *given: True)
    names = ("flash_fwd_hopper", "flash_fwd")
    made = {
        name: SimpleNamespace(variant=SimpleNamespace(template=name), choice=None, failed=None, code=SimpleNamespace(module=loaded))
        for name in names
    }
    dispatch.reload()
    monkeypatch.setattr(flex_kernels.devices, "target_of", lambda device: find_target("h200"))
    monkeypatch.setattr(flex_kernels, "loaded_kernel", lambda choice, device, target: made[choice.family.name])
    functions, captured = flex_functions._traced(lambda s, b, h, q, k: s * 1.25 + q, None, torch.device("cpu"))
    mods = flex_decided.emitted(functions.score, functions.mask, flex_autograd.types_of(captured, []), backward=False)
    q, k, v = tensors(dtype=torch.float16)
    assert flex_kernels.kernel_of("fwd", q, k, v, mods) is made["flash_fwd_hopper"]
    made["flash_fwd_hopper"].failed = "no compiler"
    assert flex_kernels.kernel_of("fwd", q, k, v, mods) is made["flash_fwd"]
    made["flash_fwd"].failed = "no driver"
    assert flex_kernels.kernel_of("fwd", q, k, v, mods) == "no driver"


@pytest.mark.parametrize("mods", [(lambda s, b, h, q, k: s * 1.25 + q, None), (None, lambda b, h, q, k: q >= k)], ids=["score", "causal"])
def test_kernels_that_are_named_serve_unmeasured_and_slower_than_pytorch(mods: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = SimpleNamespace(framework_us=1.0, median_us=2.0, problem=SimpleNamespace(label=lambda: "of another"))
    code = SimpleNamespace(module=SimpleNamespace(accepts=lambda *given: True))
    made = SimpleNamespace(variant=SimpleNamespace(template="flash_fwd"), choice=None, failed=None, code=code, record=times)
    kernels: dict[Any, Any] = {}
    chosen: dict[Any, Any] = {}
    monkeypatch.setattr(flex_kernels, "kernels_here", lambda: kernels)
    monkeypatch.setattr(flex_decided, "_chosen_in", lambda memo: chosen)
    monkeypatch.setattr(flex_torch, "served_here", lambda *given: True)
    monkeypatch.setattr(flex_decided, "_unmeasured_too", lambda query: False)
    monkeypatch.setattr(flex_kernels, "loaded_kernel", lambda *_: made)
    q, k, v = tensors()
    for _ in range(2):
        unnamed = flex_decided.call_of(q, k, v, *mods, None, True, None, False)
        assert isinstance(unnamed, str), "unmeasured, or slower"
        named = flex_decided.call_of(q, k, v, *mods, None, True, None, False, "flashtune")
        assert isinstance(named, flex_decided.FlexCall) and named.kernel is made
    monkeypatch.setattr(made, "failed", "no compiler")
    with pytest.raises(InputError, match=r"^implementation='flashtune' can't run this call, since no compiler: "):
        flex_decided.call_of(q, k, v, *mods, None, True, None, False, "flashtune")


def test_a_compiler_traces_a_call_without_a_break() -> None:
    q = torch.randn(1, 2, 16, 16)

    def call(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = dispatch.flex_attention(x, x, x, lambda score, b, h, q_idx, kv_idx: score + torch.sin(q_idx.float()))
        return found

    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(q), call(q))


def test_nothing_is_compiled_or_launched_where_unmeasured_kernels_are_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*_: Any) -> Any:
        raise AssertionError("a kernel is made")

    monkeypatch.setattr(flex_torch, "served_here", lambda *given: True)
    monkeypatch.setattr(flex_decided, "_unmeasured_too", lambda query: False)
    monkeypatch.setattr(flex_kernels, "Kernel", made)
    q, k, v = (torch.zeros(1, 1, 128, 16) for _ in range(3))
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 128, 128, device="cpu")
    for score_mod, block_mask in ((lambda score, b, h, q_idx, kv_idx: score * 2, None), (None, mask)):
        assert flex_decided.call_of(q, k, v, score_mod, block_mask, None, False, None, False) == flex_kernels.UNMEASURED
