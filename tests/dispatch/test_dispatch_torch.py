"""`attention` amid torch's own machinery: autocast, torch.compile, generators, subclasses, other devices; and what importing it costs."""

import gc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked import python
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.attention import out_strides, readable
from flashtune.core.system.collector import held_off
from flashtune.core.system.errors import InputError
from flashtune.dispatch.plans.plan import random_bits

Q = torch.randn(2, 4, 24, 16, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("patched", [False, True])
def test_torchs_causal_bias_means_what_it_means_to_torch(patched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, own = Q[:, :, :9], F.scaled_dot_product_attention
    wanted = [own(q, Q, Q, attn_mask=bias(9, 24)) for bias in (causal_upper_left, causal_lower_right)]
    if patched:
        monkeypatch.setattr(F, "scaled_dot_product_attention", dispatch.attention)
    for bias, expected in zip((causal_upper_left, causal_lower_right), wanted, strict=True):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, Q, Q, attn_mask=bias(9, 24)), expected)
        torch.testing.assert_close(dispatch.attention(q, Q, Q, bias(9, 24)), expected)
    with pytest.raises(InputError, match=r"\(queries, keys\) of \(9, 23\), and these are \(9, 24\)"):
        dispatch.attention(q, Q, Q, causal_lower_right(9, 23))
    for attention in (F.scaled_dot_product_attention, dispatch.attention):
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            attention(q, Q, Q, causal_lower_right(9, 24), is_causal=True)


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(24, 24)}, {"attn_mask": torch.ones(24, 24) > 0}])
def test_autocast_casts_as_torch_does(words: dict[str, Any]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = dispatch.attention(Q, Q, Q, **words), F.scaled_dot_product_attention(Q, Q, Q, **words)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        assert dispatch.attention(Q.double(), Q.double(), Q.double()).dtype == torch.float64
        mixed = dispatch.attention(Q, Q.bfloat16(), Q)
    torch.testing.assert_close(ours, theirs)
    assert mixed.dtype == torch.bfloat16


def test_autocast_does_not_lower_the_composites_precision() -> None:
    half = Q.bfloat16()
    plain, lse = dispatch.attention(half, half, half, return_lse=True, softcap=5.0)
    with torch.autocast("cpu", torch.bfloat16):
        cast, cast_lse = dispatch.attention(Q, Q, Q, return_lse=True, softcap=5.0)
    assert torch.equal(plain, cast) and torch.equal(lse, cast_lse)


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        (False, {"dropout_p": 0.3, "seed": 2**63 + 5, "softcap": 2.0, "return_lse": True}),
        (True, {"alibi_slopes": torch.rand(2, 4), "is_causal": True, "sinks": torch.rand(4)}),
    ],
    ids=["dropout-softcap", "alibi-sinks-dynamic"],
)
def test_torch_compile_takes_it_whole_with_and_without_gradients(dynamic: bool, words: dict[str, Any]) -> None:
    def served(x: torch.Tensor) -> torch.Tensor:
        found = dispatch.attention(x, x, x, **words)
        return found[0] + found[1][..., None] if isinstance(found, tuple) else found

    torch._dynamo.reset()
    compiled = torch.compile(served, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    # One graph serves both lengths, but not rows with gaps between the heads, for which the soft cap's call is compiled anew.
    shorter = [Q[:, :, :17].contiguous()] if dynamic else [Q[:, :, :17]] if "softcap" in words else []
    for x in (Q, *shorter):
        torch.testing.assert_close(compiled(x), served(x))
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(ours).square().sum().backward()
        served(theirs).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_torch_compile_takes_fp8_with_factors() -> None:
    def served(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return dispatch.attention(x, x, x, is_causal=True, q_descale=0.5, k_descale=factor)

    torch._dynamo.reset()
    # The first length is compiled for itself, the second for any.
    compiled = torch.compile(served, backend="aot_eager", fullgraph=True)
    for x in (Q, Q[:, :, :17]):
        e4m3, factor = x.to(torch.float8_e4m3fn), torch.rand(4)
        found = compiled(e4m3, factor)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, served(e4m3, factor))


def test_autocast_leaves_fp8_with_its_factors() -> None:
    e4m3 = Q.to(torch.float8_e4m3fn)
    plain = dispatch.attention(e4m3, e4m3, e4m3, v_descale=3.0)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(dispatch.attention(e4m3, e4m3, e4m3, v_descale=3.0), plain)


def test_an_error_under_torch_compile_is_still_ours() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match="key has 5 tokens and value 24"):
        torch.compile(lambda x: dispatch.attention(x, x[:, :, :5], x), backend="eager")(Q)


def test_meta_tensors_have_shapes() -> None:
    q = torch.empty(2, 4, 24, 16, device="meta")
    out, lse = dispatch.attention(q, q, q[..., :8], return_lse=True)
    assert out.shape == (2, 4, 24, 8) and lse.shape == (2, 4, 24)
    assert dispatch.attention(q, q, q).shape == q.shape


@pytest.mark.parametrize(
    "words",
    [{}, {"is_causal": True}, {"attn_mask": torch.ones(24, 24).tril() > 0}, {"dropout_p": 0.3}],
    ids=["plain", "causal", "mask", "dropout"],
)
@pytest.mark.parametrize("sizes", [(0, 16), (16, 0), (577, 577), (16, 600)], ids=str)
def test_head_sizes_that_kernels_dont_take_are_torchs(
    sizes: tuple[int, int], words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for attention in (dispatch.attention, F.scaled_dot_product_attention):
        torch.manual_seed(1)
        q, k, v = (torch.randn(1, 2, 24, size, requires_grad=True) for size in (sizes[0], *sizes))
        out = attention(q, k, v, **words)
        out.square().sum().backward()
        found.append((out, q.grad, k.grad, v.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    monkeypatch.setattr(devices, "INTERPRETING", True)
    with torch.no_grad():
        assert f"head sizes of 1 to 576, not {sizes[sizes[0] == 16]}" in dispatch.explain(q, k, v, **words).reason
        assert dispatch.attention(q, k, v, **words).shape == out.shape


def test_a_scale_may_be_a_tensor_of_no_dimensions_as_in_torch() -> None:
    scale = torch.tensor(0.3)
    for _ in range(3):
        for entry in (dispatch.attention, dispatch.explain):
            entry(Q, Q, Q, scale=scale)
        wanted = F.scaled_dot_product_attention(Q, Q, Q, scale=scale)
        torch.testing.assert_close(dispatch.attention(Q, Q, Q, scale=scale), wanted)
        # What is remembered of a call is its number.
        scale *= 2


def test_large_heads_compile() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 2, 9, 300, requires_grad=True)
    compiled = torch.compile(lambda x: dispatch.attention(x, x, x, is_causal=True), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), F.scaled_dot_product_attention(q, q, q, is_causal=True))


def test_what_torch_lacks_is_computed_for_large_heads_too() -> None:
    q = torch.randn(1, 2, 9, 300, generator=torch.Generator().manual_seed(1))
    words: dict[str, Any] = {"scale": 0.1, "softcap": 2.0, "sinks": torch.tensor([[0.5, -1.0]])}
    out, lse = dispatch.attention(q, q, q, window=(3, 1), return_lse=True, **words)
    wanted, wanted_lse = reference.attention(q, q, q, band=Band(left=3, right=1), dtype=torch.float64, **words)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-4)


def test_dropout_of_p_1_is_all_zeros_as_in_torch() -> None:
    for words in ({}, {"seed": 3}, {"softcap": 1.0}):
        assert (dispatch.attention(Q, Q, Q, dropout_p=1.0, **words) == 0).all()


def test_drawn_seeds_differ_and_repeat_with_torchs_seed() -> None:
    torch.manual_seed(4)
    first, second = random_bits(None, torch.device("cpu")), random_bits(None, torch.device("cpu"))
    torch.manual_seed(4)
    assert random_bits(None, torch.device("cpu")) == first != second
    assert random_bits(-1, torch.device("cpu")) == (2**64 - 1, 0)


def test_output_strides_are_dense_and_ordered_like_the_query() -> None:
    shape = (2, 3, 5, 8)
    assert out_strides(shape, torch.empty(shape).stride()) == torch.empty(shape).stride()
    rows_first = torch.empty(2, 5, 3, 8).transpose(1, 2)
    assert out_strides(shape, rows_first.stride()) == rows_first.stride()
    packed = torch.empty(2, 5, 3, 3, 8)[:, :, 1].transpose(1, 2)
    assert out_strides(shape, packed.stride()) == rows_first.stride()
    columns_outside = torch.empty(8, 2, 3, 5).permute(1, 2, 3, 0)
    assert out_strides(shape, columns_outside.stride()) == torch.empty(shape).stride()
    assert out_strides(shape, torch.empty(1, 3, 5, 8).expand(shape).stride()) == torch.empty(shape).stride()


def properties(**words: Any) -> SimpleNamespace:
    given = {"major": 9, "minor": 0, "multi_processor_count": 60, "shared_memory_per_block_optin": 232448, "total_memory": 10**10}
    return SimpleNamespace(**{**given, **words})


def test_a_gpu_that_the_table_lacks_is_described_by_its_driver_and_its_architecture() -> None:
    part = devices.described("NVIDIA H200 MIG 3g.71gb", properties(), amd=False)
    assert (part.arch, part.sms, part.slug, part.has_tma) == ("90", 60, "h200-mig-3g-71gb", True)
    assert part.shared_bytes_per_sm == find_target("h200").shared_bytes_per_sm
    strange = devices.described("NVIDIA Z1", properties(major=42, regs_per_multiprocessor=123), amd=False)
    assert (strange.arch, strange.registers_per_sm, strange.compilable) == ("420", 123, True)
    assert not devices.described("NVIDIA Old", properties(major=6, minor=1), amd=False).compilable
    radeon = devices.described("AMD Something", properties(gcnArchName="gfx942:sramecc+:xnack-", warp_size=64), amd=True)
    assert (radeon.vendor, radeon.arch) == ("amd", "gfx942")


def test_without_triton_the_framework_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "TRITON", False)
    torch.testing.assert_close(dispatch.attention(Q, Q, Q), F.scaled_dot_product_attention(Q, Q, Q))


def test_what_a_first_call_needs_is_all_that_is_imported_and_read_even_in_torchs_place_before_the_import() -> None:
    """A new process waits for every import: neither the tuner and what it takes, nor any compiler, nor what measures. It reads the few rows
    that decide, and Python's collector doesn't walk torch's objects meanwhile."""
    code = """
import gc, sys, torch
import torch.nn.functional as F
before = set(sys.modules)
collected = []
gc.set_threshold(700, 10, 10)
gc.callbacks.append(lambda phase, what: collected.append(what["generation"]) if phase == "start" else None)
own, q = F.scaled_dot_product_attention, torch.randn(1, 2, 8, 16)
def ours(*arguments, **words):
    from flashtune import dispatch
    return dispatch.attention(*arguments, **words)
F.scaled_dot_product_attention = ours
assert torch.equal(F.scaled_dot_product_attention(q, q, q, is_causal=True), own(q, q, q, is_causal=True))
torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)(q[0]).sum().backward()
from flashtune import dispatch
from flashtune.core.problems.problem import Problem
dispatch.explain(q, q, q)
collected.clear()
from flashtune.db import rows
from flashtune.db.library import shipped_path
from flashtune.db.records import FileRecords
read, outcome = [], rows.read_outcome
rows.read_outcome = lambda row: read.append(row) or outcome(row)
found = dispatch.explain_problem(Problem(batch=1, heads=16, kv_heads=16, n_q=512, n_kv=512, d=128, d_v=128, dtype="bf16"), "h200")
decided = len(collected)
assert found.kind != "framework" and 0 < len(read) < 16 < len(FileRecords(shipped_path(), shipped=True)), len(read)
new = set(sys.modules) - before
tools = {"optuna", "sqlalchemy", "alembic", "jinja2", "click", "rich", "triton", "sympy", "statistics", "tomllib", "shlex"}
print(sorted({name.split(".")[0] for name in new} & tools))
rooms = ("flashtune.tuner", "flashtune.bench", "flashtune.cli", "flashtune.db.store", "flashtune.templates.rendering")
rooms += ("flashtune.core.problems.oracles", "flashtune.core.problems.tolerances", "numpy.typing")
print([name for name in new if name.startswith((*rooms, "torch._dynamo", "torch._inductor"))])
print(decided)
# Operators are made for tracers.
assert not {"attention", "attention_gradients", "dropout_keep"} & set(vars(torch.ops.flashtune))
# Nor does a search import compilers for the framework's part of a race, which the GPU would wait for.
from flashtune.tuner.timing import baseline
print(baseline.backend_name(lambda: own(q, q, q)), [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))])
"""
    told = python(code, environment={"FLASHTUNE_OWN_DB": "/nowhere/tuned.sqlite"})
    compilers, rooms, collections, named = told.splitlines()
    assert (compilers, rooms, named) == ("[]", "[]", "flash []"), told
    # With all rows there were more than twenty.
    assert int(collections) < 12


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_held_off_and_then_as_it_was(on: bool) -> None:
    was_on = gc.isenabled()
    (gc.enable if on else gc.disable)()
    try:
        with held_off():
            assert not gc.isenabled()
        assert gc.isenabled() is on
    finally:
        (gc.enable if was_on else gc.disable)()


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_torch_is_handed_copies_of_what_its_kernels_would_misread(shift: int) -> None:
    room = torch.randn(8 + 2 * 3 * 5 * 16)
    start = next(place for place in range(4) if (room.data_ptr() + 4 * place) % 16 == 0)
    given = room[start + shift :][: 3 * 5 * 16].view(1, 3, 5, 16).as_subclass(OnGpu)
    found = readable(given)
    assert (found is given) == (shift % 4 == 0)
    assert found.data_ptr() % 16 == 0 and torch.equal(found, given) and found.stride() == given.stride()


def test_a_mistyped_name_in_the_environment_is_warned_of_once_where_no_rows_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are, on a GPU, it is an error."""
    there = tmp_path / "there.sqlite"
    there.touch()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        missing = [f"{tmp_path}/mistyped.sqlite", f"sqlite:///{tmp_path}/mistyped.sqlite", " "]
        mistyped = [*missing, str(tmp_path)]
        for named in (str(there), f"sqlite:///{there}", "postgresql://host/tuned", "", *mistyped):
            monkeypatch.setenv("FLASHTUNE_DB", named)
            dispatch.reload()
            for n in (5, 5, 6):
                dispatch.attention(*(torch.randn(1, 1, n, 16) for _ in range(3)))
    dispatch.reload()
    said = [one for one in warned if "FLASHTUNE_DB" in str(one.message)]
    assert all(one.category is RuntimeWarning for one in said)
    assert [str(one.message).split(": ")[1] for one in said] == [
        *(f"there is no database at {named!r}, which FLASHTUNE_DB names" for named in missing),
        f"{str(tmp_path)!r} is no file, which FLASHTUNE_DB names",
    ]
