"""vmap over calls in every way in which arguments can be batched, and exported programs that hold for all lengths."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flashtune import dispatch

pytestmark = pytest.mark.usefixtures("one_thread")

Loss = Callable[..., torch.Tensor]


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


VMAPPED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "window": ({"window": 9}, {}),
    "mask": ({}, {"attn_mask": numbers(12, 12) > -0.3}),
    "bias": ({}, {"attn_mask": numbers(4, 12, 12)}),
    "slopes": ({}, {"alibi_slopes": numbers(4).abs()}),
    "sinks": ({}, {"sinks": numbers(4)}),
    "softcap and LSE": ({"softcap": 2.0, "return_lse": True, "window": (3, 1)}, {}),
}


def loss_of(words: dict[str, Any], names: Sequence[str]) -> Loss:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        found = dispatch.attention(q, k, v, **words, **dict(zip(names, more, strict=True)))
        return found[0].float().square().sum() + found[1].sum() if isinstance(found, tuple) else found.float().square().sum()

    return loss


def close(found: torch.Tensor, wanted: Sequence[torch.Tensor]) -> bool:
    return torch.allclose(found, torch.stack(list(wanted)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", VMAPPED)
def test_vmap_gives_what_a_loop_gives_whatever_is_batched(case: str) -> None:
    words, tensors = VMAPPED[case]
    loss = loss_of(words, list(tensors))
    inputs = [*(numbers(2, 4, 12, 8, seed=seed) for seed in range(3)), *tensors.values()]
    for dims in itertools.product((0, None), repeat=len(inputs)):
        if not any(dim == 0 for dim in dims):
            continue
        given = [torch.stack([x, x.flip(-1)]) if dim == 0 else x for x, dim in zip(inputs, dims, strict=True)]
        each = [[x[i] if dim == 0 else x for x, dim in zip(given, dims, strict=True)] for i in range(2)]
        gradients = [torch.func.grad(loss)(*one) for one in each]
        assert close(torch.vmap(loss, dims)(*given), [loss(*one) for one in each]), dims
        assert close(torch.vmap(torch.func.grad(loss), dims)(*given), gradients), dims
        of_all = torch.func.grad(lambda *x, dims=dims: torch.vmap(loss, dims)(*x).sum())(*given)
        assert torch.allclose(of_all, torch.stack(gradients) if dims[0] == 0 else sum(gradients), atol=1e-4, rtol=1e-4), dims  # type: ignore[arg-type]
        nested = [torch.stack([x, x]) if dim == 0 else x for x, dim in zip(given, dims, strict=True)]
        assert close(torch.vmap(torch.vmap(torch.func.grad(loss), dims), dims)(*nested)[1], gradients), dims


def test_dropout_under_vmap_is_as_random_as_was_asked_for() -> None:
    q = numbers(1, 2, 12, 8).expand(3, 1, 2, 12, 8)

    def call(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = dispatch.attention(x, x, x, dropout_p=0.5)
        return found

    same, different = (torch.vmap(call, randomness=kind)(q) for kind in ("same", "different"))
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(q)


EXPORTED: dict[str, dict[str, Any]] = {
    "wide": {"window": 4096},
    "narrow": {"window": 3},
    "causal": {"is_causal": True, "causal_alignment": "bottom_right"},
    "sliding": {"window": (4, 0), "causal_alignment": "bottom_right"},
    "softcap": {"window": 300, "softcap": 2.0},
}


@pytest.mark.parametrize(("case", "strict"), [*((case, False) for case in EXPORTED), ([*EXPORTED][-1], True)])
def test_an_exported_call_serves_every_length(case: str, strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
            return dispatch.attention(q, k, k, **EXPORTED[case])

    lengths = {"q": {2: torch.export.Dim("queries", min=2, max=10**5)}, "k": {2: torch.export.Dim("keys", min=2, max=10**5)}}
    program = torch.export.export(Model(), (numbers(1, 2, 8, 16), numbers(1, 2, 12, 16)), dynamic_shapes=lengths, strict=strict)
    for n_q, n_kv in ((2, 2), (2, 400), (400, 12), (320, 400)):
        q, k = numbers(1, 2, n_q, 16), numbers(1, 2, n_kv, 16)
        torch.testing.assert_close(program.module()(q, k), Model()(q, k))


def test_a_compiled_call_of_known_sizes_is_without_sides_that_hide_nothing() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda q: dispatch.attention(q, q, q, window=20), backend=backend, fullgraph=True, dynamic=False)
    compiled(numbers(1, 2, 12, 8))
    assert "arange" not in graphs[0].code
