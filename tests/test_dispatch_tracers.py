"""`attention` under what watches or transforms torch's functions, after a plan was cached: what torch's function can do, ours can.

test_dispatch_interpreter.py runs these once more where kernels serve.
"""

import inspect
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from flashtune import dispatch

Q = torch.randn(2, 2, 20, 16, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _cached() -> Iterator[None]:
    dispatch.attention(Q, Q, Q, is_causal=True)
    yield
    dispatch.reload()


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


def test_a_function_mode_and_a_proxy_see_attention_itself() -> None:
    graph = torch.fx.symbolic_trace(served).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [dispatch.attention]


def test_a_view_that_is_only_marked_negative_counts_as_what_it_stands_for() -> None:
    q = torch.randn(2, 2, 20, 16, dtype=torch.complex64).conj().imag
    assert q.is_neg()
    torch.testing.assert_close(served(q), wanted(q.resolve_neg()), atol=2e-5, rtol=2e-5)


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
