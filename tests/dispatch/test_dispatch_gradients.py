"""Gradients: the framework's path serves them, with every feature."""

import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.problems.parameters import PER_HEAD_FLAGS, per_head_words
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch import devices
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.plans import gradients, pytorch
from flashtune.dispatch.rows import operators as packed_ops
from flashtune.dispatch.state.context import current
from flashtune.templates import families


def inputs(*, dtype: torch.dtype = torch.float32, kv_heads: int = 4, n_kv: int = 13) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 4, 11, 16), (2, kv_heads, n_kv, 16), (2, kv_heads, n_kv, 8)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def mask_with_an_empty_row() -> torch.Tensor:
    mask = torch.rand(11, 13, generator=torch.Generator().manual_seed(6)) > 0.5
    mask[4] = False
    return mask


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"is_causal": True},
        {"scale": 0.7},
        {"attn_mask": mask_with_an_empty_row()},
        {"attn_mask": torch.zeros(11, 13).masked_fill(~mask_with_an_empty_row(), float("-inf"))},
        {"enable_gqa": True, "kv_heads": 2},
    ],
    ids=["plain", "causal", "scale", "mask", "bias", "gqa"],
)
def test_gradients_equal_torchs_own(words: dict[str, Any]) -> None:
    kv_heads = words.pop("kv_heads", 4)
    ours, theirs = inputs(kv_heads=kv_heads), inputs(kv_heads=kv_heads)
    dispatch.attention(*ours, **words).square().sum().backward()
    F.scaled_dot_product_attention(*theirs, **words).square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"window": 3}, {"band": Band(left=3, right=3)}),
        ({"window": (2, None), "softcap": 2.0}, {"band": Band(left=2), "softcap": 2.0}),
        ({"is_causal": True, "causal_alignment": "bottom_right"}, {"band": Band(right=0, diagonal=2)}),
        ({"is_causal": True, "window": 4}, {"band": Band(left=4, right=0)}),
        ({"attn_mask": mask_with_an_empty_row(), "softcap": 2.0}, {"mask": mask_with_an_empty_row(), "softcap": 2.0}),
        ({"attn_mask": mask_with_an_empty_row(), "window": 2}, {"mask": mask_with_an_empty_row(), "band": Band(left=2, right=2)}),
        (
            {"dropout_p": 0.4, "seed": 9},
            {"dropout_p": 0.4, "keep": reference.dropout_keep(9, 0, 2, 4, 11, 13, 0.4)},
        ),
        ({"scale": -0.3}, {"scale": -0.3}),
        ({"scale": 0.0}, {"scale": 0.0}),
    ],
)
@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_of_features_beyond_torch_equal_the_float64_references(
    words: dict[str, Any], expected: dict[str, Any], with_lse: bool
) -> None:
    """Rows with nothing to attend to included: their gradient is 0, not NaN."""
    ours, wide = inputs(), [x.detach().double().requires_grad_() for x in inputs()]
    served = dispatch.attention(*ours, **words, return_lse=with_lse)
    wanted, wanted_lse = reference.attention(*wide, **{"scale": 0.25, **expected})
    out, lse = served if with_lse else (served, None)
    loss, wanted_loss = out.square().sum(), wanted.square().sum()
    if lse is not None:
        full = torch.isfinite(wanted_lse)
        loss, wanted_loss = loss + lse[full].sum(), wanted_loss + wanted_lse[full].sum()
    loss.backward()
    wanted_loss.backward()
    for mine, other in zip(ours, wide, strict=True):
        assert mine.grad is not None and other.grad is not None and torch.isfinite(mine.grad).all()
        torch.testing.assert_close(mine.grad.double(), other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"softcap": 1.5}, {"attn_mask": mask_with_an_empty_row()}], ids=str)
@pytest.mark.parametrize("name", PER_HEAD_FLAGS)
def test_what_is_given_per_head_counts_and_gets_its_gradient(name: str, words: dict[str, Any]) -> None:
    q, k, v = inputs()
    numbers = torch.rand(2, 4)
    if name == "sinks":
        numbers[0, :2] = torch.tensor([float("-inf"), 5.0])
    numbers.requires_grad_()
    dispatch.attention(q, k, v, **{name: numbers}, **words).square().sum().backward()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, numbers)]
    band = Band(right=0 if "is_causal" in words else None)
    expected = {"mask": words.get("attn_mask"), "softcap": words.get("softcap", 0.0)}
    wanted, _ = reference.attention(*wide[:3], **per_head_words({name: wide[3]}), scale=0.25, band=band, **expected)
    wanted.square().sum().backward()
    for mine, other in zip((q, k, v, numbers), wide, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad.double(), other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("operator", ["attention", "attention_gradients"])
def test_operators_of_training_calls_take_what_backwards_are_given_per_head(operator: str) -> None:
    taken = {argument.name for argument in getattr(torch.ops.flashtune, operator).default._schema.arguments}
    plain = Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=64, d=64, d_v=64, dtype="bf16", direction="bwd").spec()
    backwards = [family for family in families().values() if family.direction == "bwd"]
    specs = {name: replace(plain, **{flag: True}) for name, flag in PER_HEAD_FLAGS.items()}
    needed = {name for name, spec in specs.items() if any(family.supports(spec, find_target("h200")) is None for family in backwards)}
    assert taken >= needed >= {"alibi_slopes", "sinks"}


def test_a_bias_gets_its_gradient() -> None:
    for words in ({}, {"softcap": 1.5}, {"window": 5}):
        bias = torch.randn(1, 1, 11, 13, requires_grad=True)
        with torch.no_grad():
            q, k, v = inputs()
        dispatch.attention(q, k, v, bias, **words).square().sum().backward()
        wide = bias.detach().double().requires_grad_()
        band = Band(left=5, right=5) if "window" in words else Band()
        wanted, _ = reference.attention(
            *(x.detach() for x in (q, k, v)), mask=wide, scale=0.25, softcap=float(words.get("softcap", 0.0)), band=band
        )
        wanted.square().sum().backward()
        assert bias.grad is not None and wide.grad is not None
        torch.testing.assert_close(bias.grad.double(), wide.grad, atol=1e-4, rtol=1e-4)


def test_float64_passes_gradcheck_with_every_feature_at_once() -> None:
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 1, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def served(*tensors: torch.Tensor) -> torch.Tensor:
        return dispatch.attention(*tensors, 0.3, enable_gqa=True, window=(3, 1), softcap=1.2, causal_alignment="bottom_right", seed=8)

    assert torch.autograd.gradcheck(served, (q, k, v, bias))


def test_a_needed_gradient_keeps_kernels_out_and_explain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "INTERPRETING", True)
    q, k, v = inputs()
    assert "gradient is needed" in dispatch.explain(q, k, v).reason
    assert (
        "gradient of attn_mask is needed"
        in dispatch.explain(q.detach(), k.detach(), v.detach(), torch.zeros(11, 13, requires_grad=True)).reason
    )
    slopes = torch.ones(4, requires_grad=True)
    assert "gradient of alibi_slopes is needed" in dispatch.explain(q.detach(), k.detach(), v.detach(), alibi_slopes=slopes).reason
    with torch.no_grad():
        assert dispatch.explain(q, k, v, alibi_slopes=slopes).kind == "default"
        with forward_ad.dual_level():
            assert "transform" in dispatch.explain(q, k, v).reason
    reasons: list[str] = []

    def mapped(x: torch.Tensor) -> torch.Tensor:
        reasons.append(dispatch.explain(x, x, x).reason)
        return x

    torch.func.vmap(mapped)(q.detach())
    assert "transform" in reasons[0]


def test_threads_that_keep_to_some_backends_leave_all_of_them_on() -> None:
    """The flags are the process's: with two threads inside at once the last one put back what the first had switched off."""
    q, k, v = inputs()
    call = replace(parse(Arguments(q, k, v), Options()), device=torch.device("cuda", 0), deterministic=True)
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with pytorch.sound_backends_of(call, q, k, v, None):
            entered.set()
            left.wait(600)

    thread = threading.Thread(target=other)
    with pytorch.sound_backends_of(call, q, k, v, None):
        thread.start()
        assert not entered.wait(0.2)
    left.set()
    thread.join()
    assert entered.is_set() and torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.cudnn_sdp_enabled()


def test_cudnn_serves_no_masked_gradient_on_a_gpu() -> None:
    """Its dQ can be NaN (pytorch #196678); without a mask or a gradient it stays."""
    q, k, v = inputs()
    mask, cuda, cpu = torch.ones(11, 13, dtype=torch.bool), torch.device("cuda", 0), torch.device("cpu")

    call, flash = parse(Arguments(q, k, v), Options()), list[bool]()

    def cudnn(device: torch.device, *tensors: torch.Tensor | None, deterministic: bool = False) -> bool:
        with pytorch.sound_backends_of(replace(call, device=device, deterministic=deterministic), *tensors):  # type: ignore[arg-type]
            assert not (deterministic and device == cuda and torch.backends.cuda.flash_sdp_enabled())
            flash.append(torch.backends.cuda.flash_sdp_enabled())
            return torch.backends.cuda.cudnn_sdp_enabled()

    assert not cudnn(cuda, q, k, v, mask)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        assert not cudnn(cuda, q, k, v, mask) and not flash[-1]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert cudnn(cuda, q, k, v, mask)
    assert cudnn(cuda, q, k, v, None) and cudnn(cpu, q, k, v, mask)
    assert not cudnn(cuda, q, k, v, None, deterministic=True) and cudnn(cpu, q, k, v, None, deterministic=True)
    assert cudnn(cuda, q.detach(), k.detach(), v.detach(), mask)
    with torch.no_grad():
        assert cudnn(cuda, q, k, v, mask)


class Allocated(TorchDispatchMode):
    """Bytes of the results of PyTorch's operations: `now` alive, and the `most` at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, torch.Tensor)}
        found = function(*arguments, **(keywords or {}))
        if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in given:
            size = found.untyped_storage().nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(found, self._freed, size)
        return found

    def _freed(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_gradient_of_sinks_takes_less_memory_than_the_output(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "SINK_ELEMENTS", 2**16)
    monkeypatch.setattr(packed_ops, "served", lambda *_: object())
    rows, heads, d = 4096, 4, 64
    out, dout = (torch.randn(rows, heads, d, generator=torch.Generator().manual_seed(seed)).half() for seed in range(2))
    lse, sinks = torch.zeros(heads, rows), torch.randn(heads)
    dense = [x.transpose(0, 1)[None] for x in (out, dout)]
    with Allocated() as memory:
        if packed:
            call = packed_ops.Packed(out, out, out, torch.tensor([0, rows]), torch.tensor([0, rows]), None, None, sinks)
            requested = [name == "sinks" for name in call._fields]
            numbers = packed_ops.Numbers(rows, rows, 1.0, -1, -1, True, 0.0, 0.0, False, False)
            plan = packed_ops.TrainedPlan(current(), None, numbers)
            found = plan.gradients(requested, 0, dout, None, out, lse, *call)[call._fields.index("sinks")]
        else:
            given = gradients.BackwardInputs(
                dense[0], dense[0], dense[0], dense[0], lse[None], dense[1], None, None, None, sinks[None], 0, False, False, of_sinks=True
            )
            *_, [found] = gradients.Backward(None, None).gradients(given)  # type: ignore[arg-type, misc]
    assert memory.most < out.numel() * out.element_size()
    wanted = -(torch.exp(sinks[:, None].double()) * (out.double() * dout.double()).sum(-1).T).sum(1)
    torch.testing.assert_close(found, wanted.float(), atol=1e-3, rtol=1e-4)
