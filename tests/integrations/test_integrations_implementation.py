"""PyTorch's attention and varlen_attn by the name FLASHTUNE: who serves, that results and gradients are PyTorch's, and what is restored.

Under TRITON_INTERPRET=1 kernels serve; test_kernels_serve_by_the_name runs these tests so.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from branches import forced, served
from interpreting import ROOT, output_of_tests
from torch.nn import attention
from torch.utils.checkpoint import checkpoint

from flashtune import dispatch
from flashtune.core.pytorch.private import sdpa
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.integrations import implementation, torchs_place

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not hasattr(attention, "activate_flash_attention_impl"), reason="this PyTorch has one implementation alone"),
]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
held = F.scaled_dot_product_attention
"""PyTorch's function as a program has it that imported its name before."""
WORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "boolean mask": {"attn_mask": torch.rand(12, 12, generator=torch.Generator().manual_seed(5)) > 0.3},
    "bias": {"attn_mask": torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(6))},
    "shared heads": {"enable_gqa": True},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls that reach dispatch while the implementation is active: the way in of each."""
    found: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        function = getattr(dispatch, name)
        return lambda *given, **words: (found.append(name), function(*given, **words))[1]

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(dispatch, name, recorded(name))
    attention.activate_flash_attention_impl("FLASHTUNE")
    yield found
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()


def serving() -> contextlib.AbstractContextManager[None]:
    """Kernels serve wherever one takes the call, under Triton's interpreter."""
    return forced("kernels") if INTERPRETING else contextlib.nullcontext()


def drawn(heads: int = 4, kv_heads: int = 4, *, requires_grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, h, 12, 16, generator=generator).requires_grad_(requires_grad) for h in (heads, kv_heads, kv_heads)]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **words: Any) -> torch.Tensor:
    """The same by float64 and by PyTorch's math alone, which isn't served."""
    mask = words.pop("attn_mask", None)
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        out: torch.Tensor = held(q.double(), k.double(), v.double(), mask, **words)
    return out


def gradients(out: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return torch.autograd.grad(out, tensors, weights)


@pytest.mark.parametrize("name", WORDS)
def test_calls_by_any_name_are_served_forward_and_backward(name: str, calls: list[str]) -> None:
    tensors = drawn(kv_heads=2 if name == "shared heads" else 4, requires_grad=True)
    with serving():
        for function in (held, F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention):
            calls.clear()
            out = function(*tensors, **WORDS[name])
            assert calls == ["attention"] and (not INTERPRETING or "torch" not in served())
            wanted = exact(*tensors, **WORDS[name])
            torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
            for found, right in zip(gradients(out, tensors), gradients(wanted, tensors), strict=True):
                torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
        with torch.inference_mode():
            held(*drawn())
        layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        layer(*[tensors[0][0].detach()] * 3, need_weights=False)
        assert calls == ["attention"] * 3


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_pytorchs_kernels_do_otherwise_is_theirs(calls: list[str]) -> None:
    q, k, v = drawn()
    torch.manual_seed(4)
    ours = held(q, k, v, dropout_p=0.5)
    torch.func.grad(lambda q: held(q, k, v).sum())(q)
    torch.vmap(lambda q: held(q, k, v))(torch.stack([q, q]))
    held(q[0], k[0], v[0])
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        held(q, k, v)
    assert calls == []
    held(q, k, v, torch.zeros(12, 12), is_causal=False)
    with pytest.raises(RuntimeError, match="xpected") as caught:
        held(q, k[..., :8], v)
    assert not isinstance(caught.value, InputError), "PyTorch's own error"
    attention.restore_flash_attention_impl()
    torch.manual_seed(4)
    torch.testing.assert_close(held(q, k, v, dropout_p=0.5), ours, atol=0, rtol=0)


def test_dispatchs_own_calls_mean_pytorchs_kernels(calls: list[str]) -> None:
    """A named PyTorch is PyTorch, nothing calls itself, and a place inside is a place."""
    q, k, v = drawn()
    for function in (held, F.scaled_dot_product_attention, dispatch.attention):
        torch.testing.assert_close(function(q, k, v).double(), exact(q, k, v), atol=1e-5, rtol=1e-5)
    dispatch.attention(q, k, v, implementation="torch")
    assert len(calls) == 4
    with torchs_place():
        F.scaled_dot_product_attention(q, k, v)
        assert len(calls) == 5
        attention.restore_flash_attention_impl()
        F.scaled_dot_product_attention(q, k, v)
        assert len(calls) == 6
    F.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 6


def test_checkpoints_and_other_threads_are_served(calls: list[str]) -> None:
    tensors = drawn(requires_grad=True)
    out = checkpoint(held, *tensors, use_reentrant=False)
    gradients(out, tensors)
    assert calls == ["attention"] * 2
    thread = threading.Thread(target=held, args=tensors)
    thread.start()
    thread.join()
    assert calls == ["attention"] * 3


def packed(*, requires_grad: bool = False) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Query of three sequences, and key and value of half its heads, with the lists of both lengths."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([0, 3, 12, 17], dtype=torch.int32), torch.tensor([0, 5, 14, 20], dtype=torch.int32)
    shapes = (17, 4, 16), (20, 2, 16), (20, 2, 16)
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes], *lengths


def each(tensors: list[torch.Tensor], cu_q: torch.Tensor, cu_k: torch.Tensor, window: tuple[int, int], scale: float | None) -> torch.Tensor:
    """Packed attention in float64, a sequence at a time."""
    parts = []
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        q, k, v = (x.transpose(0, 1)[None] for x in (tensors[0][rows], tensors[1][keys], tensors[2][keys]))
        offset = torch.arange(k.shape[2])[None] - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
        seen = torch.ones_like(offset, dtype=torch.bool)
        seen &= True if window[0] < 0 else offset >= -window[0]
        seen &= True if window[1] < 0 else offset <= window[1]
        parts.append(exact(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize(("window", "scale"), [((-1, -1), None), ((-1, 0), None), ((4, 0), 0.3)])
def test_packed_sequences_are_served_on_any_device(window: tuple[int, int], scale: float | None, calls: list[str]) -> None:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

    tensors, cu_q, cu_k = packed(requires_grad=True)
    given = cu_q, cu_k, 9, 9
    wanted = each(tensors, cu_q, cu_k, window, scale)
    out, lse = varlen_attn(*tensors, *given, window_size=window, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert calls[0] == "attention_varlen" and lse.shape == (4, 17) and not lse.requires_grad
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    for found, right in zip(gradients(out, tensors), gradients(wanted, tensors), strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    into = torch.empty_like(out)
    with torch.inference_mode():
        varlen_attn_out(into, *(x.detach() for x in tensors), *given, window_size=window, scale=scale, enable_gqa=True)
    torch.testing.assert_close(into, out, atol=1e-6, rtol=1e-6)
    # Of sequences whose keys aren't all used PyTorch has no gradients, and says so.
    used = torch.tensor([2, 4, 6], dtype=torch.int32)
    shorter, cu_used = [tensors[0], *(torch.cat([x[0:2], x[5:9], x[14:20]]) for x in tensors[1:])], torch.tensor([0, 2, 6, 12])
    with torch.no_grad():
        found = varlen_attn(*tensors, *given, seqused_k=used, scale=scale, enable_gqa=True)
    torch.testing.assert_close(found.double(), each(shorter, cu_q, cu_used, (-1, -1), scale), atol=1e-5, rtol=1e-5)
    attention.restore_flash_attention_impl()
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(*tensors, *given, enable_gqa=True)


def test_compiled_code_keeps_a_node_and_is_served_in_both_directions(calls: list[str]) -> None:
    from torch.nn.attention.varlen import varlen_attn

    tensors, cu_q, cu_k = packed(requires_grad=True)
    # Rows that lie apart, whose strides compiled code expects of the output.
    apart = [x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in tensors]
    compiled = torch.compile(
        lambda *given: varlen_attn(*given, cu_q, cu_k, 9, 9, enable_gqa=True) * 1.0, backend="aot_eager", fullgraph=True
    )
    for given in (tensors, apart):
        out = compiled(*given)
        wanted = each(given, cu_q, cu_k, (-1, -1), None)
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
        for found, right in zip(gradients(out, given), gradients(wanted, given), strict=True):
            torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)
    assert calls.count("attention_varlen") == 4


def test_compilers_trace_ours_by_pytorchs_name_until_it_is_restored(calls: list[str]) -> None:
    q, k, v = drawn()
    operators: list[str] = []

    def listing(graph: Any, _: object) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend=listing, fullgraph=True)
    ours = compiled(q, k, v)
    assert any("flashtune" in name for name in operators) == INTERPRETING
    attention.restore_flash_attention_impl()
    operators.clear()
    torch.testing.assert_close(compiled(q, k, v), ours, atol=1e-5, rtol=1e-5)
    assert not any("flashtune" in name for name in operators)


def test_all_is_as_before_once_it_is_restored(calls: list[str]) -> None:
    q, k, v = drawn()
    for _ in range(2):
        attention.restore_flash_attention_impl()
        assert F.scaled_dot_product_attention is sdpa and attention.current_flash_attention_impl() is None
        held(q, k, v)
        assert len(calls) % 2 == 0
        attention.activate_flash_attention_impl("FLASHTUNE")
        attention.activate_flash_attention_impl("FLASHTUNE")
        held(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    assert len(calls) == 4


@pytest.mark.skipif(INTERPRETING, reason="says nothing of kernels")
def test_an_offer_costs_no_import_and_a_program_needs_one_line() -> None:
    code = """
import sys, flashtune
assert "torch" not in sys.modules
import torch
flashtune.offer()  # as PyTorch does where the package is installed
assert not [name for name in sys.modules if name.startswith("flashtune.") and "kernels" not in name], sys.modules
torch.nn.attention.activate_flash_attention_impl("FLASHTUNE")
x = torch.ones(1, 1, 4, 8)
print(torch.nn.functional.scaled_dot_product_attention(x, x, x).sum().item())
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "32.0\n"


def test_another_pytorch_is_offered_nothing_or_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashtune

    monkeypatch.delattr(attention, "register_flash_attention_impl")
    flashtune.offer()
    implementation._torchs.cache_clear()
    monkeypatch.setattr(implementation, "kernel_of", lambda *_: None)
    with pytest.raises(EnvironmentProblem, match=r"doesn't let its own kernel .* be called: use .*torchs_place"):
        attention.activate_flash_attention_impl("FLASHTUNE")
    assert F.scaled_dot_product_attention is sdpa


@pytest.mark.skipif(INTERPRETING, reason="runs this file so")
def test_kernels_serve_by_the_name() -> None:
    said = output_of_tests("-q", "-W", "ignore", "-p", "no:cacheprovider", "tests/integrations/test_integrations_implementation.py")
    assert " passed" in said and "failed" not in said
