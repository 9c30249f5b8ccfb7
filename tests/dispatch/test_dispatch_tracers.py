"""`attention` under what watches or transforms torch's functions, after a plan was cached: what torch's function can do, ours can.

test_dispatch_interpreter.py runs these once more where kernels serve.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from forked import python
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from flashtune import dispatch
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.private import sdpa
from flashtune.integrations import torchs_place

Q = torch.randn(2, 2, 20, 16, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _cached() -> Iterator[None]:
    dispatch.attention(Q, Q, Q, is_causal=True)
    yield
    dispatch.reload()


@contextmanager
def for_good() -> Iterator[None]:
    with patch.object(F, "scaled_dot_product_attention", dispatch.attention):
        yield


def served(q: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = dispatch.attention(q, q, q, is_causal=True)
    return found


def wanted(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_a_traced_function_follows_new_inputs() -> None:
    other = torch.randn_like(Q)
    for traced in (torch.jit.trace(served, Q, check_trace=False), make_fx(served)(Q), torch.fx.symbolic_trace(served)):
        torch.testing.assert_close(traced(other), wanted(other), atol=2e-5, rtol=2e-5)


def test_transforms_compose() -> None:
    def loss(f: object) -> object:
        return lambda q: f(q).square().sum()  # type: ignore[operator]

    torch.testing.assert_close(torch.func.grad(loss(served))(Q), torch.func.grad(loss(wanted))(Q), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.func.vmap(served)(Q[None]), wanted(Q)[None], atol=2e-5, rtol=2e-5)
    torch._dynamo.reset()
    compiled = torch.compile(torch.func.grad(loss(served)), backend="aot_eager")
    torch.testing.assert_close(compiled(Q), torch.func.grad(loss(wanted))(Q), atol=1e-4, rtol=1e-4)


def test_a_dispatch_mode_sees_torch_operations() -> None:
    class Seen(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            self.names.append(str(function))
            return function(*arguments, **(keywords or {}))

    with Seen():
        served(Q)
    assert any("attention" in name or "bmm" in name or "softmax" in name for name in Seen.names)


@pytest.mark.parametrize(
    ("inside", "device", "words"),
    [
        (True, "cpu", {}),
        (True, "cpu", {"return_lse": True}),
        (True, "cpu", {"attn_mask": (20, 20)}),
        (True, "cpu", {"sinks": (4,)}),
        (True, "cpu", {"dropout_p": 0.1}),
        # What is fake may be on a GPU that isn't there, and outside its mode.
        (True, "cuda", {"dropout_p": 0.1}),
        (True, "cuda", {"attn_mask": (20, 20)}),
        (False, "cuda", {}),
        (False, "cpu", {"attn_mask": (20, 20)}),
    ],
)
def test_fakes_are_not_asked_for_addresses_that_they_lack(
    inside: bool, device: str, words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch warns of the question, once in a process."""
    asked: list[FakeTensor] = []
    monkeypatch.setattr(FakeTensor, "data_ptr", lambda x: asked.append(x) or 0, raising=False)
    with FakeTensorMode() as mode:
        q = torch.empty(2, 4, 20, 16, device=device)
        given = {name: torch.zeros(x, device=device) if isinstance(x, tuple) else x for name, x in words.items()}
    with mode if inside else contextlib.nullcontext():
        for _ in range(2):
            found = dispatch.attention(q, q, q, **given)
            out = found[0] if isinstance(found, tuple) else found
            assert isinstance(out, FakeTensor) and out.shape == q.shape and out.device.type == device
        dispatch.explain(q, q, q, **given)
        if not words:
            with sdpa_kernel(SDPBackend.MATH):
                dispatch.attention(q, q, q)
    assert not asked


def test_a_function_mode_and_a_proxy_see_attention_itself() -> None:
    graph = torch.fx.symbolic_trace(served).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [dispatch.attention]


def test_a_view_that_is_only_marked_negative_counts_as_what_it_stands_for() -> None:
    q = torch.randn(2, 2, 20, 16, dtype=torch.complex64).conj().imag
    assert q.is_neg()
    torch.testing.assert_close(served(q), wanted(q.resolve_neg()), atol=2e-5, rtol=2e-5)


def test_where_flash_attention_is_switched_off_torch_serves_with_second_derivatives() -> None:
    with dispatch.use(unmeasured=True):
        for _ in range(3):
            served(Q)
        with sdpa_kernel(SDPBackend.MATH):
            assert torch.equal(served(Q), wanted(Q))
            assert not devices.INTERPRETING or "sdpa_kernel" in dispatch.explain(Q, Q, Q).reason
            q = Q.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(served(q).square().sum(), q, create_graph=True)
            gradient.square().sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_training_is_torchs_where_flash_attention_is_switched_off(inside: bool) -> None:
    """Kernels' operator found no kernel to run there, and torch's operations held all scores."""

    def switched(q: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return served(q)

    torch._dynamo.reset()
    q = Q.clone().requires_grad_()
    compiled = torch.compile(switched if inside else served, backend="aot_eager")
    around = contextlib.nullcontext() if inside else sdpa_kernel(SDPBackend.MATH)
    with dispatch.use(unmeasured=True), around, profile() as seen:
        compiled(q).sum().backward()
    names = {event.name for event in seen.events()}
    assert any("scaled_dot_product" in name for name in names) and not any("flashtune" in name for name in names), names


def test_training_compiles_whole_with_symbolic_sizes() -> None:
    def window(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = dispatch.attention(q, k, k, enable_gqa=True, window=(q.shape[2] // 2, 0), scale=1 / q.shape[3])
        return found

    torch._dynamo.reset()
    compiled = torch.compile(window, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for f in (compiled, window):
        q, k = Q.clone().requires_grad_(), Q[:, :1].clone().requires_grad_()
        f(q, k).square().sum().backward()
        found.append((q.grad, k.grad))
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=2e-5)


class Whispered:
    """No tensor, and with an implementation of torch's own function, as torch's pages on its protocol of overrides show it; it says what
    else it is given."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        return f"whispered {len(arguments)} {keywords}" if function is sdpa else NotImplemented


class Listing(torch.Tensor):
    """Has torch's attention, and no other function: not even a comparison."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
        if function is not sdpa:
            raise NotImplementedError(str(function))
        return "listed"


def test_a_class_that_overrides_torchs_function_is_asked_for_that() -> None:
    assert dispatch.attention(Q, Q, Q, torch.zeros(20, 20).as_subclass(Listing)) == "listed"
    theirs: Any = Whispered()
    assert dispatch.attention(theirs, theirs, theirs) == "whispered 3 {}"
    assert dispatch.attention(theirs, theirs, theirs, None, 0.0, True) == "whispered 3 {'is_causal': True}"
    assert dispatch.attention(Q, Q, Q, theirs).startswith("whispered 3 {'attn_mask': ")
    with pytest.raises(TypeError, match="no implementation found for 'flashtune"):
        dispatch.attention(theirs, theirs, theirs, softcap=2.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_torchs(layout: torch.layout) -> None:
    rows = [torch.randn(2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (3, 5)]
    if layout is torch.strided:
        q = torch.nested.nested_tensor(rows)
    else:
        q = torch.nested.nested_tensor([x.transpose(0, 1) for x in rows], layout=layout).transpose(1, 2)
    assert "nested" in dispatch.explain(q, q, q).reason
    for ours, x in zip(dispatch.attention(q, q, q).unbind(), rows, strict=True):
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(x, x, x), atol=2e-5, rtol=2e-5)


def test_a_traced_mask_is_traced_the_same_twice_over() -> None:
    mask = torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) > 0.4
    traced = torch.jit.trace(lambda q, mask: dispatch.attention(q, q, q, mask), (Q, mask))
    torch.testing.assert_close(traced(Q, ~mask), sdpa(Q, Q, Q, ~mask), atol=2e-5, rtol=2e-5)
    graph = torch.fx.symbolic_trace(lambda mask: dispatch.attention(Q, Q, Q, mask))
    torch.testing.assert_close(graph(~mask), sdpa(Q, Q, Q, ~mask), atol=2e-5, rtol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [torchs_place, for_good], ids=["a while", "for good"])
def test_a_script_takes_it_for_torchs(place: Callable[[], AbstractContextManager[None]]) -> None:
    def scripted(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    with place():
        torch.testing.assert_close(torch.jit.script(scripted)(Q), wanted(Q), atol=2e-5, rtol=2e-5)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval()
        torch.testing.assert_close(torch.jit.script(layer)(Q[0]), layer(Q[0]))


def test_attention_can_stand_in_torchs_place(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = wanted(Q)
    monkeypatch.setattr(F, "scaled_dot_product_attention", dispatch.attention)
    torch.testing.assert_close(F.scaled_dot_product_attention(Q, Q, Q, is_causal=True), expected, atol=2e-5, rtol=2e-5)
    dispatch.reload()
    torch.testing.assert_close(served(Q.double()).float(), expected, atol=2e-5, rtol=2e-5)


def test_the_signature_begins_with_torchs_own() -> None:
    # Torch's is a builtin: its documentation begins with its signature.
    said = " ".join((F.scaled_dot_product_attention.__doc__ or "").split(") ->")[0].split("(", 1)[1].split())
    ours = list(inspect.signature(dispatch.attention).parameters.values())
    given = [f"{p.name}{'' if p.default is p.empty else f'={p.default}'}" for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert ", ".join(given) == said
    assert [*inspect.signature(dispatch.explain).parameters] == [*inspect.signature(dispatch.attention).parameters]


def test_operators_are_made_when_first_asked_for_by_many_threads_at_once() -> None:
    code = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
from flashtune import dispatch
names = ["attention", "attention_gradients", "dropout_keep"]
print([name for name in names if name in vars(torch.ops.flashtune)])
sys.setswitchinterval(1e-6)
together = threading.Barrier(15)
def found(name):
    together.wait()
    return getattr(torch.ops.flashtune, name).default.name()
with ThreadPoolExecutor(15) as threads:
    asked = list(threads.map(found, names * 5))
print(asked == [f"flashtune::{name}" for name in names * 5], hasattr(torch.ops.flashtune, "nothing"))
"""
    assert python(code).splitlines() == ["[]", "True False"]


def test_a_maker_of_operators_that_is_interrupted_is_called_again() -> None:
    code = """
import torch
from flashtune.dispatch.operators import define_lazily
calls = []
def interrupted():
    calls.append("first")
    if len(calls) == 1:
        raise KeyboardInterrupt
    torch.library.define("flashtune::first", "(Tensor x) -> Tensor")
    # As whoever makes one looks it up.
    torch.ops.flashtune.first
define_lazily(interrupted)
try:
    torch.ops.flashtune.first
except KeyboardInterrupt:
    print("interrupted")
print(torch.ops.flashtune.first.default.name(), calls)
"""
    assert python(code).splitlines() == ["interrupted", "flashtune::first ['first', 'first']"]
