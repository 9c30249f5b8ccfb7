"""Packed sequences by kernels in Triton's interpreter."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from interpreting import failures_of
from varlen_cases import CASES, EMPTY, RAGGED, SQUARE, agrees, forced, inputs, without_tokens

from flashtune import dispatch
from flashtune.dispatch.state import context

warnings.filterwarnings("ignore")

SHORT = ((1, 64, 0, 17),) * 2


def of_case(name: str) -> None:
    without_tokens(name) if name in EMPTY else agrees(inputs(CASES[name]), RAGGED)


def of_halves() -> None:
    agrees(inputs({"is_causal": True}, SHORT, dtype=torch.float16, d=64), SHORT, kind="fp16")


def of_autocast() -> None:
    """Tensors of several dtypes are brought to autocast's, and the second call has the first one's plan."""
    given = inputs({"is_causal": True}, SHORT, d=64)
    mixed = given._replace(tensors=[*given.tensors[:2], given.tensors[2].detach().half().requires_grad_()])
    out, lse = given._replace(tensors=[x.half() for x in given.tensors]).call()
    plans = context.current().plans
    with torch.autocast("cpu", torch.float16):
        mixed.call()
        known = len(plans)
        found, sums = mixed.call()
    assert known == len(plans) > 0 and torch.equal(found, out) and torch.equal(sums, lse)


def of_long_bounds() -> None:
    given = inputs({"is_causal": True})
    agrees(given._replace(bounds=tuple(x.long() for x in given.bounds)), RAGGED)  # type: ignore[arg-type]


def of_many_sequences() -> None:
    lengths = (tuple(i % 4 for i in range(130)),) * 2
    agrees(inputs({"is_causal": True, "kv_heads": 1}, lengths, heads=1), lengths)


def of_nothing() -> None:
    for lengths in (((), ()), ((0, 0), (0, 0)), ((3, 0), (0, 0)), ((0, 0), (0, 3))):
        if lengths[0]:
            agrees(inputs({}, lengths, padding=0), lengths)


def of_neighbours() -> None:
    """A sequence's bits are the same whatever lies beside it, NaN among it."""
    given = inputs({"is_causal": True, "sinks": True}, SQUARE)
    out, _ = given.call()
    start, stop = (int(given.bounds[0][i]) for i in (4, 5))
    poisoned = []
    for x in given.tensors:
        other = torch.full_like(x, float("nan"))
        other[start:stop] = x.detach()[start:stop]
        poisoned.append(other.requires_grad_())
    again, lse = given._replace(tensors=poisoned).call()
    assert torch.equal(out[start:stop], again[start:stop])
    grads = torch.autograd.grad((again[start:stop].sum(), lse[:, start:stop].sum()), poisoned)
    assert all(bool(x[start:stop].isfinite().all()) for x in grads)


def of_compilers() -> None:
    """A compiler traces calls without a break, whatever the numbers of rows, and gets the same bits."""

    def loss(*x: Any, **words: Any) -> torch.Tensor:
        out, lse = dispatch.attention_varlen(*x, 64, 64, enable_gqa=True, is_causal=True, return_lse=True, **words)
        return out.square().sum() + lse.clamp(min=-9.0).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    dropout = {"dropout_p": 0.4, "seed": 3}
    for lengths, words in ((SHORT, {}), (((30, 2),) * 2, {}), (((30, 2),) * 2, dropout)):
        given = inputs({}, lengths, padding=0)
        eager = torch.autograd.grad(loss(*given.tensors, *given.bounds, **words), given.tensors)
        traced = torch.autograd.grad(compiled(*given.tensors, *given.bounds, **words), given.tensors)
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


def of_second_derivatives() -> None:
    given = inputs({})
    out, _ = given.call()
    [first] = torch.autograd.grad(out[:5].square().sum(), given.tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(first.sum(), given.tensors[0])


def of_parts() -> None:
    """Gradients of some inputs alone, and of the LSE alone, are those of all."""
    given = inputs({"is_causal": True})
    _, lse = given.call()
    dlse = given.dlse.masked_fill(lse == float("-inf"), 0.0)
    everything = torch.autograd.grad(lse, given.tensors[:2], dlse)
    for place in range(2):
        frozen = [x if i == place else x.detach() for i, x in enumerate(given.tensors)]
        _, again = given._replace(tensors=frozen).call()
        [alone] = torch.autograd.grad(again, frozen[place], dlse)
        assert torch.equal(alone, everything[place])


def of_seeds() -> None:
    """Unseeded dropout follows torch's generator."""
    given = inputs({"dropout_p": 0.5})
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(given.call()[0].detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def of_explanations() -> None:
    given = inputs({"is_causal": True})
    said = dispatch.explain_varlen(*given.arguments, enable_gqa=True, **given.words)
    assert said.template == "flash_fwd" and said.backward is not None and said.backward.template == "flash_bwd"
    assert "packed" in said.reason


def main(*names: str) -> dict[str, str]:
    """Failures of the named cases, or without names of everything else."""
    # No kernel takes calls without sequences.
    return failures_of(globals(), of_case, names, lambda: nullcontext() if names and names[0] in EMPTY else forced("kernels"))
