"""Attention that others provide: named by callers, by records, and by what the first call of a key measures."""

import importlib.metadata
import inspect
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from pretended_gpu import PROBLEM, Machine, Q, assert_right, attend, machine, save

from flashtune import dispatch
from flashtune.cli.main import main
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.problems.config import Variant
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import PROVIDERS as NAMES
from flashtune.core.records.results import Baseline, Measurement, Outcome, Provenance, SearchResult
from flashtune.core.system.errors import InputError
from flashtune.db.library import Library
from flashtune.db.store import Store
from flashtune.dispatch import api
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.decisions import resolve
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.providers import libraries as providers
from flashtune.dispatch.providers import torch_backends
from flashtune.dispatch.providers.libraries import PROVIDERS
from flashtune.dispatch.providers.provider import Provider, ProviderPlan
from flashtune.dispatch.providers.torch_backends import TorchBackend
from flashtune.dispatch.state import context

__all__ = ["machine"]

ORDER = torch._C._get_sdp_priority_order


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **words: Any) -> torch.Tensor:
    return reference.attention(q, k, v, scale=q.shape[-1] ** -0.5, **words)[0]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=2e-5)


def test_the_allow_list_has_the_names_that_records_may_hold() -> None:
    assert tuple(PROVIDERS) == NAMES


@pytest.mark.parametrize("name", ["torch", "flash", "math"])
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"attn_mask": drawn(1, 1, 33, 33) > 0}, {"attn_mask": drawn(4, 33, 33)}])
def test_a_named_backend_serves_as_the_book_says_with_gradients(name: str, words: dict[str, Any]) -> None:
    leaves = [drawn(2, heads, 33, 16, seed=heads + place).requires_grad_() for place, heads in enumerate((4, 2, 2))]
    found = dispatch.attention(*leaves, enable_gqa=True, implementation=name, **words)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    wanted = expected(*wide, band=Band(right=0) if words.get("is_causal") else Band(), mask=words.get("attn_mask"))
    close(found, wanted)
    for one, other in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(wanted.sum(), wide), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


def test_a_named_backend_serves_other_ranks_and_broadcast_heads() -> None:
    for shapes in [((33, 16), (20, 16)), ((3, 33, 16), (1, 20, 16)), ((2, 1, 4, 9, 8), (1, 3, 4, 20, 8))]:
        q, k = (drawn(*shape, seed=len(shape)) for shape in shapes)
        wanted = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, k)))
        for name in ("flash", "math"):
            close(dispatch.attention(q, k, k, implementation=name), wanted)


def test_the_backend_is_the_one_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = torch.backends.cuda.flash_sdp_enabled
    choose = TorchPlan.run
    monkeypatch.setattr(TorchPlan, "run", lambda plan, *given: (seen.append(real()), choose(plan, *given))[1])
    q = drawn(1, 2, 9, 8)
    # With a mask the plan itself runs, and not its short way.
    for name in ("flash", "math", "math"):
        dispatch.attention(q, q, q, torch.ones(9, 9, dtype=torch.bool), implementation=name)
    assert seen == [True, False, False] and real()


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("none", {}, "unknown implementation 'none': use one of flashtune, torch, flash, cudnn"),
        ("flash", {"window": 4}, "bands other than PyTorch's causal one: leave implementation out, or name another"),
        ("math", {"softcap": 3.0}, "it doesn't take a soft cap"),
        ("flash", {"return_lse": True}, "it doesn't take an LSE"),
        ("flash", {"sinks": torch.zeros(2)}, "it doesn't take sinks"),
        ("flash", {"dropout_p": 0.5, "seed": 1}, "it doesn't take a dropout seed"),
        ("cudnn", {}, "it doesn't run on cpu tensors"),
        ("efficient", {}, "it doesn't run on cpu tensors"),
        ("flash", {"scale": -1.0, "dropout_p": 0.5}, "PyTorch doesn't give it a call of these sizes"),
        (
            "flash",
            {"score_mod": lambda score, *_: 2 * score},
            "it doesn't take masks and scores as functions: leave implementation out, or name another",
        ),
        (
            "flex",
            {"block_mask": lambda b, h, i, j: i >= j},
            "it doesn't run on cpu tensors: leave implementation out, or name another",
        ),
        ("flex", {}, "it doesn't run on cpu tensors"),
        ("fa4", {}, "it isn't installed: pip install flash-attn-4"),
        ("fa2", {}, "it isn't installed: pip install flash-attn"),
        ("flashtune", {}, "kernels run on GPUs .*: leave implementation out, or name another"),
    ],
)
def test_what_cannot_serve_is_refused_in_one_sentence(name: str, words: dict[str, Any], said: str) -> None:
    q = drawn(1, 2, 9, 8)
    for call in (dispatch.attention, dispatch.explain):
        with pytest.raises(InputError, match=said):
            call(q, q, q, implementation=name, **words)


def test_explain_lists_every_implementation_with_the_reason_against_it() -> None:
    q = drawn(1, 2, 9, 8)
    found = dispatch.explain(q, q, q, implementation="math")
    assert (found.kind, found.provider) == ("provider", "math")
    offered = {one.name: one.why for one in found.providers}
    assert list(offered) == ["flashtune", "torch", *NAMES]
    assert offered["flash"] is None and "pip install flash-attn-4" in str(offered["fa4"])


def test_tracers_get_torchs_operation_and_transforms_torchs_own_choice() -> None:
    q, k, v = (drawn(1, 2, 9, 8, seed=seed) for seed in range(3))
    wanted = expected(*(x.double() for x in (q, k, v)))
    for name in ("flash", "fa4", "torch"):
        named = partial(dispatch.attention, implementation=name)
        close(torch.compile(named, backend="aot_eager", fullgraph=True)(q, k, v), wanted)
        close(torch.func.vmap(named)(q, k, v), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch.attention(q, k, v, implementation="math").dtype == torch.bfloat16


def test_under_a_transform_a_named_backend_of_torchs_comes_first() -> None:
    q, k, v, tangent = (drawn(1, 2, 9, 8, seed=seed) for seed in range(4))
    # Flash attention has no forward-mode derivative on the CPU, and is PyTorch's own choice there.
    found, forward = torch.func.jvp(lambda x: dispatch.attention(x, k, v, implementation="math"), (q,), (tangent,))
    close(found, expected(*(x.double() for x in (q, k, v))))
    _, wanted = torch.func.jvp(lambda x: expected(x, k.double(), v.double()), (q.double(),), (tangent.double(),))
    close(forward, wanted)
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(lambda x: dispatch.attention(x, k, v, implementation="flash"), (q,), (tangent,))


@pytest.mark.parametrize("name", ["flashtune", "torch", *NAMES])
@pytest.mark.parametrize("shape", [(0, 2, 9, 8), (2, 0, 9, 8), (1, 2, 0, 8), (1, 2, 9, 0)])
def test_where_there_is_nothing_to_compute_any_name_gives_what_torch_gives(name: str, shape: tuple[int, ...]) -> None:
    q, k, v = (drawn(*shape).requires_grad_() for _ in range(3))
    ways: list[Any] = [lambda call: call]
    if name in ("efficient", "fa4") and shape[0] == 0:
        ways.append(partial(torch.compile, backend="aot_eager"))
    for way in ways:
        found = way(partial(dispatch.attention, implementation=name))(q, k, v)
        assert found.shape == shape and not found.detach().any()
        assert [grad.shape for grad in torch.autograd.grad(found.sum(), (q, k, v))] == [shape] * 3
    assert "there is nothing to compute" in dispatch.explain(q, k, v, implementation=name).reason or name == "torch"


def test_compilers_refuse_a_backend_that_the_device_lacks_as_eager_calls_do() -> None:
    q = drawn(1, 2, 9, 8)
    compiled = torch.compile(partial(dispatch.attention, implementation="cudnn"), backend="aot_eager")
    with pytest.raises(InputError, match="it doesn't run on cpu tensors: leave implementation out, or name another"):
        compiled(q, q, q)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": torch.float32}, "it doesn't take float32 on a GPU"),
        ({"dtype": torch.float16, "mask_kind": "bool"}, "it doesn't take masks on a GPU"),
        ({"dtype": torch.float16, "band": Band(left=3, right=0)}, "it doesn't take masks on a GPU"),
        ({"dtype": torch.bfloat16}, None),
    ],
)
def test_compilers_refuse_what_a_backend_never_takes(options: dict[str, Any], said: str | None) -> None:
    q = drawn(1, 2, 9, 8)
    more = {"out_dtype": options["dtype"], "device": torch.device("cuda", 0)}
    backend = PROVIDERS["flash"]
    assert isinstance(backend, TorchBackend) and backend.never(replace(call_of(q, q, q), **options, **more)) == said


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 0.3}])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_of_a_backend_gives_the_bits_of_pytorchs_function(words: dict[str, Any], kv_heads: int, dtype: torch.dtype) -> None:
    leaves = [drawn(2, heads, 33, 16, seed=heads).to(dtype).requires_grad_() for heads in (4, kv_heads, kv_heads)]
    dout, more = drawn(2, 4, 33, 16, seed=9).to(dtype), {"enable_gqa": kv_heads < 4}
    found = dispatch.attention(*leaves, implementation="flash", **words, **more)
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
        wanted = torch.nn.functional.scaled_dot_product_attention(*leaves, **words, **more)
    assert torch.equal(found, wanted) and found.stride() == wanted.stride()
    for one, other in zip(torch.autograd.grad(found, leaves, dout), torch.autograd.grad(wanted, leaves, dout), strict=True):
        assert torch.equal(one, other)
    assert isinstance(plan := [*context.current().plans.values()][-1], ProviderPlan)
    assert plan.direct is not None and "single" in plan.direct.__qualname__


def test_a_plain_call_of_a_backend_switches_no_state_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (drawn(1, 2, 9, 8, seed=seed) for seed in range(3))
    named = partial(dispatch.attention, q, k, v, implementation="flash")
    wanted = named()

    def switched(*_: Any) -> None:
        raise AssertionError("the plan switches backends")

    monkeypatch.setattr(torch_backends, "only", switched)
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", switched)
    assert torch.equal(named(), wanted)


def test_an_operator_with_other_parameters_or_in_deterministic_mode_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    flash = torch.nn.attention.SDPBackend.FLASH_ATTENTION
    assert torch_backends.operator(flash, "cpu") is not None and torch_backends.operator(flash, "xpu") is None
    place = (flash, "cpu")
    monkeypatch.setitem(torch_backends._SINGLE, place, (torch_backends._SINGLE[place][0], "query key value"))  # type: ignore[arg-type]
    assert torch_backends.operator.__wrapped__(flash, "cpu") is None
    q = drawn(1, 2, 9, 8)
    backend, seen = PROVIDERS["flash"], list[str]()
    assert isinstance(backend, TorchBackend)
    single = backend._operator(call_of(q, q, q), lambda *_: seen.append("torch's") or q)
    assert single is not None
    monkeypatch.setattr(torch._C, "_get_deterministic_algorithms", lambda: True)
    single = backend._operator(call_of(q, q, q), lambda *_: seen.append("torch's") or q)
    assert single is not None and single(q, q, q) is q and seen == ["torch's"]


@pytest.mark.parametrize("change", [{"d": 20, "d_v": 20}, {"d_v": 32}, {"mask_kind": "bool"}, {"dropout_p": 0.5}])
def test_where_pytorchs_function_does_more_than_the_operator_it_serves(change: dict[str, Any]) -> None:
    q = drawn(1, 2, 9, 16)
    call = replace(call_of(q, q, q), device=torch.device("cuda", 0))
    backend = PROVIDERS["flash"]
    assert isinstance(backend, TorchBackend)
    assert backend._operator(call, lambda *_: q) is not None and backend._operator(replace(call, **change), lambda *_: q) is None


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_every_backend_of_a_gpu_has_an_operator_in_this_pytorch(name: str) -> None:
    backend = PROVIDERS[name]
    assert isinstance(backend, TorchBackend) and torch_backends.operator(backend.backend, "cuda") is not None


def call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return parse(Arguments(q, k, v), Options(**options))


def test_pytorchs_order_of_backends_is_changed_for_the_call_alone() -> None:
    """On a GPU, whose order of backends is process-wide."""
    usual = ORDER()
    q = drawn(1, 2, 9, 8)
    call = replace(call_of(q, q, q), device=torch.device("cuda", 0))
    backend = PROVIDERS["efficient"]
    assert isinstance(backend, TorchBackend)
    seen: list[list[int]] = []
    first = backend._first(call, lambda *given: seen.append(ORDER()))
    first()
    assert seen[0][0] == int(backend.backend.value) and sorted(seen[0]) == sorted(usual) and ORDER() == usual

    def fails() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        backend._first(call, fails)()
    assert ORDER() == usual
    # A caller's own order comes back; that of another plan, which may have ended meanwhile, doesn't.
    own = usual[::-1]
    try:
        torch._C._set_sdp_priority_order(own)
        first()
        assert ORDER() == own
        torch._C._set_sdp_priority_order(seen[0])
        first()
        assert ORDER() == usual
    finally:
        torch._C._set_sdp_priority_order(usual)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Arguments that fakes of flash-attn-4 and flash-attn get, with the signatures that these document, on the CPU."""
    given: list[dict[str, Any]] = []

    def computed(q: Any, k: Any, v: Any, unbounded: int | None, sinks: torch.Tensor | None, **words: Any) -> torch.Tensor:
        given.append(words)
        left, right = (None if side == unbounded else side for side in words["window_size"])
        band = Band(left=left, right=0 if words["causal"] else right, diagonal=k.shape[1] - q.shape[1])
        more: dict[str, Any] = {} if sinks is None else {"sinks": sinks.expand(q.shape[0], -1)}
        more |= {"scale": words["softmax_scale"], "softcap": words["softcap"], "dtype": torch.float32}
        out, _ = reference.attention(*(x.transpose(1, 2) for x in (q, k, v)), band=band, **more)
        return out.transpose(1, 2).contiguous()

    def fa4(
        q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, window_size: Any = (None, None),
        learnable_sink: Any = None, softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Any:  # fmt: skip
        words = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "deterministic": deterministic,
        }
        return computed(q, k, v, None, learnable_sink, **words), None

    def fa2(
        q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1),
        softcap: float = 0.0, deterministic: bool = False,
    ) -> Any:  # fmt: skip
        words = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
            "deterministic": deterministic,
        }
        return computed(q, k, v, -1, None, **words)

    package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.flash_attn_func, cute.flash_attn_func = fa2, fa4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    for name in ("fa4", "fa2"):
        PROVIDERS[name].__dict__.pop("_found", None)
        monkeypatch.setattr(PROVIDERS[name], "devices", ("cpu",))
        monkeypatch.setitem(PROVIDERS[name].__dict__, "takes", PROVIDERS[name].takes | {"float32 or float64"})
    dispatch.reload()
    yield given
    for name in ("fa4", "fa2"):
        PROVIDERS[name].__dict__.pop("_found", None)
    dispatch.reload()


BANDS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "causal_alignment": "bottom_right"},
    {"is_causal": True, "window": (5, 0), "causal_alignment": "bottom_right"},
    {"window": (3, 4), "causal_alignment": "bottom_right"},
    {"window": (None, 2), "causal_alignment": "bottom_right"},
    {"softcap": 2.0},
]


@pytest.mark.parametrize("name", ["fa4", "fa2"])
@pytest.mark.parametrize("words", BANDS)
def test_a_librarys_arguments_mean_what_the_callers_do(name: str, words: dict[str, Any], libraries: list[dict[str, Any]]) -> None:
    leaves = [drawn(2, heads, n, 16, seed=heads + n).requires_grad_() for heads, n in ((4, 9), (2, 20), (2, 20))]
    found = dispatch.attention(*leaves, enable_gqa=True, scale=0.3, implementation=name, **words)
    close(found, dispatch.attention(*(x.detach().double() for x in leaves), enable_gqa=True, scale=0.3, **words))
    assert all(x is not None for x in torch.autograd.grad(found.sum(), leaves))
    assert not libraries[-1]["deterministic"]
    torch.use_deterministic_algorithms(True)
    try:
        again = dispatch.attention(*leaves, enable_gqa=True, scale=0.3, implementation=name, **words)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(again, found) and libraries[-1]["deterministic"]


def test_sinks_are_handed_to_the_library_that_has_them(libraries: list[dict[str, Any]]) -> None:
    q, sinks = drawn(2, 4, 9, 16), drawn(4)
    wanted = dispatch.attention(q.double(), q.double(), q.double(), sinks=sinks)
    close(dispatch.attention(q, q, q, sinks=sinks, implementation="fa4"), wanted)
    with pytest.raises(InputError, match="it doesn't take sinks"):
        dispatch.attention(q, q, q, sinks=sinks, implementation="fa2")
    with pytest.raises(InputError, match="sinks of each batch"):
        dispatch.attention(q, q, q, sinks=drawn(2, 4), implementation="fa4")


def test_a_library_gets_no_call_that_it_would_mean_otherwise(libraries: list[dict[str, Any]]) -> None:
    q, k, odd = drawn(1, 2, 9, 16), drawn(1, 2, 20, 16), drawn(1, 2, 9, 12)
    for tensors, words, said in [
        ((q, k, k), {"is_causal": True}, "a diagonal that doesn't end at the last key"),
        ((k, q, q), {"window": (2, 2), "causal_alignment": "bottom_right"}, "a diagonal that doesn't end at the last key"),
        ((q, q, q), {"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, "masks"),
        ((q, q, q), {"scale": -1.0}, "a scale of 0 or below"),
        ((q, q, q), {"deterministic": True}, "repeatable gradients"),
        ((odd, odd, odd), {}, "multiples of 8, not 12"),
    ]:
        with pytest.raises(InputError, match=said):
            dispatch.attention(*tensors, implementation="fa4", **words)
    assert not libraries


def test_a_version_that_lacks_an_argument_does_not_fit(libraries: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", lambda q, k, v, softmax_scale, causal, window_size: q)
    q = drawn(1, 2, 9, 16)
    with pytest.raises(InputError, match=r"its version 9\.9 has no softcap: pip install -U flash-attn-4"):
        dispatch.attention(q, q, q, implementation="fa4")


def test_a_named_library_that_fails_is_one_sentence_and_is_tried_once(
    libraries: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    real = inspect.signature(sys.modules["flash_attn.cute"].flash_attn_func)

    def fails(*given: Any, **words: Any) -> Any:
        tried.append(1)
        raise AssertionError("Unsupported compute capability")

    fails.__signature__ = real  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_func", fails)
    q = drawn(1, 2, 9, 16)
    with pytest.warns(RuntimeWarning, match="fa4 with .* failed on cpu"), pytest.raises(InputError, match="Unsupported compute capability"):
        dispatch.attention(q, q, q, implementation="fa4")
    assert len(tried) == 1


@pytest.fixture
def large_heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Arguments that fakes of cuDNN's frontend and FFPA get, with the signatures of their releases 1.32 and 0.2.4, on the CPU."""
    given: list[dict[str, Any]] = []

    def computed(q: Any, k: Any, v: Any, scale: float, causal: bool, last: bool) -> torch.Tensor:
        band = Band(right=0, diagonal=k.shape[2] - q.shape[2] if last else 0) if causal else Band()
        return reference.attention(q, k, v, scale=scale, band=band, dtype=torch.float32)[0]

    def sdpa(
        query: Any, key: Any, value: Any, *, scale: Any = None, is_causal: bool = False, causal_bottom_right: bool = False,
        window_left: int = -1, window_right: int = -1, sinks: Any = None, seq_len_q: Any = None, seq_len_kv: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, max_seqlen_q: int = 0, max_seqlen_kv: int = 0, return_lse: bool = False,
    ) -> Any:  # fmt: skip
        given.append({"lse": return_lse})
        out = computed(query, key, value, scale, is_causal, causal_bottom_right)
        # Without the LSE it has no gradients.
        return (out, out.new_zeros(out.shape[:3])) if return_lse else out.detach()

    def ffpa_attn_func(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, scale: Any = None,
        enable_gqa: bool = False, **kwargs: object,
    ) -> Any:  # fmt: skip
        given.append(kwargs)
        assert enable_gqa == (query.shape[1] != key.shape[1]) and kwargs.keys() == {"backend"}
        return computed(query, key, value, scale, is_causal, last=True)

    for path, name, function in (("cudnn.sdpa.fwd.torch_op", "sdpa", sdpa), ("ffpa_attn", "ffpa_attn_func", ffpa_attn_func)):
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:count]))
            module.__path__ = []
            monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(module, name, function)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    for name in ("cudnn_fe", "ffpa"):
        PROVIDERS[name].__dict__.pop("_found", None)
        monkeypatch.setattr(PROVIDERS[name], "devices", ("cpu",))
        monkeypatch.setitem(PROVIDERS[name].__dict__, "takes", PROVIDERS[name].takes | {"float32 or float64"})
    dispatch.reload()
    yield given
    for name in ("cudnn_fe", "ffpa"):
        PROVIDERS[name].__dict__.pop("_found", None)
    dispatch.reload()


LAST = {"is_causal": True, "causal_alignment": "bottom_right"}


@pytest.mark.parametrize("d", [320, 512, 1024])
@pytest.mark.parametrize("words", [{}, {"is_causal": True}, LAST])
@pytest.mark.parametrize("name", ["cudnn_fe", "ffpa"])
def test_libraries_for_large_heads_mean_what_the_callers_do(
    name: str, words: dict[str, Any], d: int, large_heads: list[dict[str, Any]]
) -> None:
    rows, keys = (512, 520) if d == 1024 else (5, 12)
    leaves = [drawn(1, heads, n, d, seed=heads + n).requires_grad_() for heads, n in ((2, rows), (1, keys), (1, keys))]
    called = partial(dispatch.attention, *leaves, enable_gqa=True, scale=0.02, implementation=name, **words)
    why = {("cudnn_fe", 1024): "head sizes up to 512, not 1024"}.get((name, d))
    if name == "ffpa" and words and words is not LAST:
        why = "a diagonal that doesn't end at the last key"
    if why is not None:
        with pytest.raises(InputError, match=why):
            called()
        assert not large_heads
        return
    found = called()
    wide = [x.detach().double().requires_grad_() for x in leaves]
    wanted = dispatch.attention(*wide, enable_gqa=True, scale=0.02, **words)
    close(found, wanted)
    for one, other in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(wanted.sum(), wide), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        close(called(), wanted)
    assert large_heads[-1] == ({"lse": False} if name == "cudnn_fe" else {"backend": "triton" if d == 1024 else "cutedsl"})
    if name == "ffpa":
        before = len(large_heads)
        torch.use_deterministic_algorithms(True)
        try:
            close(called(), wanted)
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(large_heads) == before, "its gradients repeat in no order"


def test_libraries_for_large_heads_get_no_call_that_they_would_mean_otherwise(large_heads: list[dict[str, Any]]) -> None:
    for name, (n_q, n_kv, d, d_v), words, said in [
        ("cudnn_fe", (9, 9, 512, 512), {"window": (3, 0)}, "no band but the causal one"),
        ("cudnn_fe", (9, 5, 512, 512), LAST, "no band but the causal one"),
        ("cudnn_fe", (9, 9, 516, 516), {}, "multiples of 8, not 516"),
        ("cudnn_fe", (9, 9, 512, 512), {"deterministic": True}, "repeatable gradients"),
        ("ffpa", (9, 9, 512, 512), {"window": (3, 0), "causal_alignment": "bottom_right"}, "no band but the causal one"),
        ("ffpa", (9, 9, 512, 320), {}, "one head size from 320 to 1024, not 512 and 320"),
        ("ffpa", (9, 9, 256, 256), {}, "one head size from 320 to 1024, not 256 and 256"),
        ("ffpa", (9, 9, 330, 330), {}, "multiples of 64, not 330"),
        ("ffpa", (9, 600, 640, 640), {}, "at least 512 queries and keys, not 9 and 600"),
    ]:
        query, key, value = drawn(1, 2, n_q, d), drawn(1, 2, n_kv, d), drawn(1, 2, n_kv, d_v)
        with pytest.raises(InputError, match=said):
            dispatch.attention(query, key, value, implementation=name, **words)
    assert not large_heads


@pytest.mark.parametrize("words", [*BANDS, {"is_causal": True}, {"window": (3, 4)}])
def test_flexattention_sees_the_band_and_the_soft_cap(words: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(PROVIDERS["flex"], "devices", ("cpu",))
    # Compiled in place of run as it is, it takes a C++ compiler.
    monkeypatch.setattr(providers, "compiled_flex", lambda **_: flex_attention)
    q, k = drawn(2, 4, 9, 16), drawn(2, 2, 20, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = dispatch.attention(q, k, k, enable_gqa=True, implementation="flex", **words)
    close(found, dispatch.attention(*(x.double() for x in (q, k, k)), enable_gqa=True, **words))


def with_providers(path: Path, times: dict[str, float], *, problem: Problem = PROBLEM) -> Variant:
    """A search's result with whole calls of a kernel, of PyTorch and of other providers, as a search would write it."""
    variant = save(path, problem)
    with Store.open(path, writable=True) as store:
        result = [one for one in store.results() if one.problem == problem][-1]
        outcome = result.outcomes[0]
        others = [Outcome.of_provider(name, "0" * 16, Measurement.of([us] * 12)) for name, us in times.items()]
        outcomes = (replace(outcome, call_us=100.0), *others)
        baseline = Baseline(backend="cudnn", measurement=Measurement.of([200.0]), call_us=200.0)
        store.save(replace(result, outcomes=outcomes, baseline=baseline), replacing=True)
    return variant


def beside_pytorch(path: Path, problem: Problem, us: float) -> None:
    """A result of PyTorch's math backend alone, beside PyTorch's own choice, which takes 200 us."""
    result = SearchResult(
        gpu="h200",
        problem=problem,
        outcomes=(Outcome.of_provider("math", "0" * 16, Measurement.of([us] * 12)),),
        provenance=Provenance(flashtune="0", torch="2", triton="3"),
        baseline=Baseline(backend="flash", measurement=Measurement.of([200.0] * 12), call_us=200.0),
    )
    with Store.open(path, writable=True) as store:
        store.save(result)


def test_the_provider_that_won_a_records_run_serves_and_explain_says_so(machine: Machine, own_database: Path) -> None:
    with_providers(own_database, {"math": 50.0, "flash": 80.0})
    explained = dispatch.explain(Q, Q, Q, is_causal=True)
    assert (explained.kind, explained.provider, explained.template) == ("provider", "math", None)
    assert "PyTorch's math attention runs the call: its whole calls took the least time on h200: 50.0 us" in explained.reason
    times = {one.name: one.us for one in explained.providers if one.us is not None}
    assert times == {"flashtune": 100.0, "torch": 200.0, "cudnn": 200.0, "math": 50.0, "flash": 80.0}
    assert_right(attend())
    assert_right(attend())
    assert machine.launched == []
    by_sizes = dispatch.explain_problem(PROBLEM, "h200")
    assert (by_sizes.kind, by_sizes.provider) == ("provider", "math") and len(by_sizes.providers) == len(explained.providers)
    shown = CliRunner().invoke(main, ["show", "--gpu-name", "h200", "--db", str(own_database)], env={"COLUMNS": "200"})
    assert "2.00x cudnn < math" in shown.stdout and "< NAME: that provider's whole calls were faster" in shown.stdout
    [row] = json.loads(CliRunner().invoke(main, ["show", "--db", str(own_database), "--json"]).stdout)
    assert row["provider"] == "math" and row["providers_call_us"] == {"math": 50.0, "flash": 80.0}
    words = ["explain", "--gpu-name", "h200", "--n", "40", "--d", "16", "--dtype", "fp32", "--causal", "--db", str(own_database)]
    said = CliRunner().invoke(main, [*words, "--batch", "2", "--heads", "4"], env={"COLUMNS": "200"}).stdout
    assert ": provider" in said and "whole calls, us: math 50.0, flash 80.0, flashtune 100.0, torch 200.0, cudnn 200.0" in said


def test_the_second_call_of_a_provider_is_one_look_up(machine: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_providers(own_database, {"math": 50.0})
    attend()

    def forbidden(*_: object, **__: object) -> Any:
        raise AssertionError("decided anew")

    for place, name in [(api, "parse"), (resolve, "candidates"), (resolve, "provider_choice"), (Provider, "refusal"), (Store, "open")]:
        monkeypatch.setattr(place, name, forbidden)
    assert_right(attend())
    assert_right(attend())


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({"math": 120.0}, "the kernel is faster"),
        ({"math": 99.5}, "it gains no more than noise"),
        ({"cudnn": 10.0}, "it doesn't take the call here"),
        ({"fa4": 10.0}, "it isn't installed"),
    ],
)
def test_otherwise_the_kernel_serves(machine: Machine, own_database: Path, times: dict[str, float], why: str) -> None:
    variant = with_providers(own_database, times)
    assert_right(attend())
    assert machine.launched == [variant], why


def test_the_next_best_provider_serves_where_the_best_is_missing(machine: Machine, own_database: Path) -> None:
    with_providers(own_database, {"fa4": 10.0, "math": 50.0})
    assert dispatch.explain(Q, Q, Q, is_causal=True).provider == "math"


def test_a_call_that_the_provider_lacks_is_the_kernels(machine: Machine, own_database: Path) -> None:
    variant = with_providers(own_database, {"math": 50.0})
    out, _ = dispatch.attention(Q, Q, Q, is_causal=True, return_lse=True)
    assert_right(out)
    assert machine.launched == [variant]
    assert_right(attend(implementation="flashtune"))
    assert machine.launched == [variant, variant]


def test_a_provider_that_fails_gives_way_to_the_kernel_and_is_not_tried_again(
    machine: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = with_providers(own_database, {"math": 50.0})
    failed: list[int] = []

    def build(plan: ProviderPlan, *given: Any) -> None:
        failed.append(1)
        raise AssertionError("Unsupported head size")

    monkeypatch.setattr(ProviderPlan, "build", build)
    with pytest.warns(RuntimeWarning, match="math with .* failed on cpu and is skipped from now on: AssertionError: Unsupported head size"):
        assert_right(attend())
    assert_right(attend(scale=0.25))
    assert failed == [1] and machine.launched == [variant, variant]
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "exact"


def test_a_near_call_is_served_by_whom_the_nearest_record_names(machine: Machine, own_database: Path) -> None:
    with_providers(own_database, {"math": 50.0}, problem=replace(PROBLEM, n_q=64, n_kv=64))
    explained = dispatch.explain(Q, Q, Q, is_causal=True)
    assert (explained.kind, explained.provider) == ("provider", "math") and "for another problem (n=64 for 40" in explained.reason
    assert_right(attend())


def test_each_length_is_served_by_its_own_record_or_that_of_its_bucket(
    machine: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, faster in ((40, "flash"), (64, "math"), (128, "flash")):
        sizes = replace(PROBLEM, features=Features(), n_kv=n)
        with_providers(own_database, {"math": 80.0, "flash": 80.0, faster: 50.0}, problem=sizes)
    looked: list[int] = []
    real = resolve.deciding_record
    monkeypatch.setattr(resolve, "deciding_record", lambda pool, sizes, target: (looked.append(sizes.n_kv), real(pool, sizes, target))[1])
    for n, whose, name in ((40, 40, "flash"), (41, 64, "math"), (64, 64, "math"), (39, 64, "math"), (65, 128, "flash"), (66, 128, "flash")):
        k = drawn(2, 4, n, 16)
        explained = dispatch.explain(Q, k, k)
        assert explained.record_key is not None and (explained.record_key.n, explained.provider) == (whose, name), n
        assert (f"n={whose} for {n}" in explained.reason) is (whose != n)
        close(dispatch.attention(Q, k, k), expected(*(x.double() for x in (Q, k, k))))
    assert looked == [64, 128] and machine.launched == []


def test_pytorch_serves_a_length_at_which_it_won_and_no_other(machine: Machine, own_database: Path) -> None:
    sizes = replace(PROBLEM, n_q=64, n_kv=64)
    beside_pytorch(own_database, sizes, 250.0)
    q = drawn(2, 4, 64, 16)
    assert dispatch.explain(q, q, q, is_causal=True).kind == "framework"
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "default"


def test_gradients_go_where_the_backwards_record_says(machine: Machine, own_database: Path) -> None:
    with_providers(own_database, {"math": 50.0}, problem=PROBLEM)
    trained = replace(PROBLEM, direction="bwd")
    beside_pytorch(own_database, trained, 150.0)
    leaves = [Q.clone().requires_grad_() for _ in range(3)]
    explained = dispatch.explain(*leaves, is_causal=True)
    assert (explained.kind, explained.provider) == ("provider", "math")
    out = dispatch.attention(*leaves, is_causal=True)
    assert_right(out.detach())
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), leaves)) and machine.launched == []


def test_times_come_back_from_a_database_and_names_that_are_not_listed_never_do(machine: Machine, own_database: Path) -> None:
    with_providers(own_database, {"math": 50.0, "flash": 80.0})
    [record] = Library.of(own_database).records()
    assert {one.template: one.call_us for one in record.providers} == {"math": 50.0, "flash": 80.0}
    with Store.open(own_database, writable=True) as store:
        store.save(record.as_result(), replacing=True)
        [again] = store.records()
    assert again.providers == record.providers and again.outcome == record.outcome
    with_providers(own_database, {"os": 1.0})
    [record] = Library.of(own_database).records()
    assert record.providers == ()


def test_a_feature_that_no_provider_knows_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one would be that is added to problems and kernels."""
    names = Features.as_json
    monkeypatch.setattr(Features, "as_json", lambda self: names(self) | {"rectified": True})
    q = torch.zeros(1, 2, 128, 64)
    call = parse(Arguments(q, q, q), Options())
    for provider in PROVIDERS.values():
        monkeypatch.setattr(type(provider), "missing", lambda self: None)
        monkeypatch.setattr(type(provider), "devices", ("cpu", "cuda"))
        assert (provider.refusal(call, (q, q, q, None), None) or "").endswith("rectified"), provider.name
