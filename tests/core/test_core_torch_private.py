"""PyTorch's private names: one module has them, and the package works in a PyTorch without any of them."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import started

import flashtune
from flashtune.core.pytorch import private as torch_private

PRIVATE = re.compile(r"\._(?!_)")
PACKAGE = Path(flashtune.__file__).parent

WITHOUT = """
import pkgutil

usual = pkgutil.resolve_name

def resolved(path):
    if path.startswith("torch.") and not any(part in path for part in KEPT):
        raise AttributeError(path)
    return usual(path)

pkgutil.resolve_name = resolved
"""
CALLS = """
import sys
import torch
from flashtune import dispatch
from flashtune.core.pytorch.attention import lay_out_gradient
from flashtune.integrations import torchs_place

q, k, v = (torch.randn(2, 2, 40, 16, requires_grad=True) for _ in range(3))
scores = q.double() @ k.double().mT / 4
gap = torch.arange(40)[:, None] - torch.arange(40)

def ours_and_right(scores, out):
    right = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), right, rtol=2e-5, atol=2e-5)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for found, wanted in zip(grads, torch.autograd.grad(right.sum(), (q, k, v), retain_graph=True), strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)

causal = scores.masked_fill(gap < 0, float("-inf"))
for _ in range(3):
    ours_and_right(causal, dispatch.attention(q, k, v, is_causal=True))
with torchs_place():
    ours_and_right(causal, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
for _ in range(2):
    inputs = q.detach(), k.detach(), v.detach()
    biased = dispatch.flex_attention(*inputs, lambda s, b, h, i, j: torch.where((i - j) % 3 == 0, s + 0.1 * (i - j), s))
    right = torch.where(gap % 3 == 0, scores + 0.1 * gap, scores).softmax(-1) @ v.double()
    torch.testing.assert_close(biased.double(), right, rtol=2e-5, atol=2e-5)
assert dispatch.attention(q.to("meta"), k.to("meta"), v.to("meta")).shape == q.shape
mapped = torch.func.vmap(lambda q: dispatch.attention(q, k[0], v[0]))(q)
torch.testing.assert_close(mapped, torch.stack([torch.nn.functional.scaled_dot_product_attention(x, k[0], v[0]) for x in q]))
out = q * 1.0
lay_out_gradient(out)
assert torch.autograd.grad(out.sum(), q)[0].eq(1).all()
print(dispatch.explain(q.detach(), k.detach(), v.detach()))
"""


def private_names(tree: ast.Module) -> set[str]:
    """Names of PyTorch's in a module that begin with an underscore, and what is imported from modules that do."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {path for name in node.names if PRIVATE.search(path := f"{node.module}.{name.name}")}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("torch.") and PRIVATE.search(name.name)}
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if re.fullmatch(r"(torch|forward_ad)\.[\w.]+", path) and PRIVATE.search(path) and not path.startswith("torch.ops."):
                found.add(path)
    return found


def test_one_module_has_pytorchs_private_names() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if "kernels_generated" not in path.parts and (names := private_names(ast.parse(path.read_text())))
    }
    assert set(found) == {"core/pytorch/private.py"}
    # Each of those is looked up by `found`, or has a default.
    assert found["core/pytorch/private.py"] <= {"torch._C"}


# Where transforms can't be told PyTorch serves everything.
@pytest.mark.parametrize(("kept", "serves"), [((), "PyTorch"), (("_functorch", "forward_ad"), "flash_fwd")])
def test_calls_are_right_in_a_pytorch_without_private_names(kept: tuple[str, ...], serves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTUNE_UNMEASURED", "1")
    ran = started(f"KEPT = {kept}{WITHOUT}{CALLS}", environment={"TRITON_INTERPRET": "1"}).ended()
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert serves in ran.stdout


def test_what_stands_in_for_pytorchs_functions_says_the_same() -> None:
    class Loud(torch.Tensor):
        pass

    class Own:
        @classmethod
        def __torch_function__(cls, *_: Any) -> None:
            pass

    class OwnBelow(Own):
        pass

    given = torch.ones(2), Own(), OwnBelow(), Loud([1.0]), None, torch.nn.Parameter(torch.ones(1)), 3
    for ours, torchs in zip(torch_private._overloaded(given), torch.overrides._get_overloaded_args(given), strict=True):
        assert ours is torchs
    for x in (torch.ones(2), torch.ones(2, device="meta"), torch.ones(2).to_sparse()):
        assert torch_private._has_storage(x) == torch._C._has_storage(x)
    without = torch_private._WITHOUT
    for name in ("_is_tracing", "_get_flash_sdp_enabled", "_get_deterministic_algorithms", "_len_torch_dispatch_stack"):
        assert without[name]() == getattr(torch._C, name)()


def test_functions_in_c_are_pytorchs_own_where_it_lacks_none() -> None:
    assert torch_private.C is torch._C
    filled = torch_private._Filled({"_is_tracing": lambda: "otherwise"})
    assert filled._is_tracing() == "otherwise" and filled._has_storage is torch._C._has_storage
