"""The ways in behave alike: one misuse is one error, one request one result, for dense, packed and paged tensors, and with functions.

A cell that differs is an expected failure that names what is to be mended; it fails the suite once it is.
"""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import ways
from interpreting import output_of_tests
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest
from torch.utils._python_dispatch import TorchDispatchMode
from ways import WAYS, Tensors, rows_of, tensors

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.core.pytorch import devices
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.rows.kernel import Kernel
from flashtune.dispatch.state.recorded import CALLS

WITH_CODE = ("functions", "packed functions")
TAKES: dict[str, tuple[str, ...]] = {
    "is_causal": ("dense", "packed", "paged", "packed functions"),
    "allow_tf32": ("dense", "packed", "paged", "packed functions"),
    "deterministic": ("dense", "packed", "paged", "packed functions"),
    "softcap": ("dense", "packed", "paged"),
    "dropout_p": ("dense", "packed"),
    "return_lse": tuple(WAYS),
    "enable_gqa": tuple(WAYS),
    "scale": tuple(WAYS),
}
"""The ways in that take an argument."""


def cells(*names: str, differ: dict[tuple[str, str], str] | None = None) -> Any:
    """Parameters of each argument with each way in that takes it; those that `differ` are expected to fail, for the reason."""
    found = []
    for name in names:
        for way in TAKES[name]:
            why = (differ or {}).get((name, way))
            marks = [] if why is None else [pytest.mark.xfail(reason=why, strict=True)]
            found.append(pytest.param(name, way, marks=marks, id=f"{name}-{way}".replace(" ", "_")))
    return pytest.mark.parametrize(("name", "way"), found)


def every(differ: dict[str, str] | None = None, but: tuple[str, ...] = ()) -> Any:
    """Parameters of each way in."""
    found = []
    for way in WAYS:
        if way not in but:
            why = (differ or {}).get(way)
            marks = [] if why is None else [pytest.mark.xfail(reason=why, strict=True)]
            found.append(pytest.param(way, marks=marks, id=way.replace(" ", "_")))
    return pytest.mark.parametrize("way", found)


def called(way: str, given: Tensors, **words: Any) -> Any:
    with torch.no_grad():
        return WAYS[way](given, **words)


def explained(way: str, given: Tensors, **words: Any) -> Any:
    """The explanation of the same call."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, explain in ways.EXPLAINED.items():
            patch.setattr(dispatch, name, lambda *x, explain=explain, **y: found.append(explain(*x, **y)))
        called(way, given, **words)
    return found[0]


def right(way: str, out: Tensor, given: Tensors, scale: float = ways.D**-0.5) -> None:
    """Compare an output without a band with float64."""
    wide = [x.detach().double() for x in given]
    wanted, _ = reference.attention(*wide, scale=scale)
    bound = TOLERANCES["fp32"]
    torch.testing.assert_close(rows_of(way, out).double(), wanted, atol=bound.atol, rtol=bound.rtol)


@cells("is_causal", "allow_tf32", "deterministic", "return_lse", "enable_gqa")
@pytest.mark.parametrize("value", [1, "no"], ids=["number", "text"])
def test_a_truth_value_is_a_bool(name: str, way: str, value: Any) -> None:
    dispatch.reload()
    with pytest.raises(InputTypeError, match=rf"^{name} must be True or False, not {type(value).__name__}: "):
        _with(way, {name: value})


def _with(way: str, words: dict[str, Any]) -> Any:
    """A call with these words, also in place of those that the way itself sets."""
    if "enable_gqa" not in words:
        return called(way, tensors(), **words)
    face = {"dense": dispatch.attention, "functions": dispatch.flex_attention}.get(way, dispatch.attention_varlen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, face.__name__, lambda *x, **y: face(*x, **{**y, **words}))
        return called(way, tensors())


@cells("scale", "softcap", "dropout_p")
@pytest.mark.parametrize("value", ["a", float("nan"), torch.ones(2)], ids=["text", "nan", "tensor"])
def test_a_number_is_a_finite_one(name: str, way: str, value: Any) -> None:
    with pytest.raises(InputError if isinstance(value, float) else InputTypeError) as caught:
        called(way, tensors(), **{name: value})
    assert re.match(rf"{name}\b.*: ", str(caught.value)) and "\n" not in str(caught.value)


@cells("scale", "dropout_p")
def test_a_number_in_a_tensor_is_that_number(name: str, way: str) -> None:
    given = tensors()
    for value in (0.25, 0.75):
        more = {"seed": 1} if name == "dropout_p" else {}
        found = called(way, given, **{name: torch.tensor(value)}, **more)
        torch.testing.assert_close(found, called(way, given, **{name: value}, **more), rtol=0, atol=0)
        assert explained(way, given, **{name: torch.tensor(value)}, **more) == explained(way, given, **{name: value}, **more)


@every()
@pytest.mark.parametrize("scale", [-0.3, 0.0, None], ids=["negative", "zero", "default"])
def test_any_scale_is_right(way: str, scale: float | None) -> None:
    given = tensors()
    right(way, called(way, given, scale=scale), given, ways.D**-0.5 if scale is None else scale)


def negated(x: Tensor) -> Tensor:
    """A tensor of the same values with a lazy negation."""
    return torch._neg_view(-x)


@every()
def test_lazily_negated_tensors_are_their_values(way: str) -> None:
    given = tensors()
    turned = Tensors(*map(negated, given))
    assert all(x.is_neg() for x in turned)
    torch.testing.assert_close(called(way, turned), called(way, given), rtol=0, atol=0)


@every(but=WITH_CODE)
@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_lazily_negated_numbers_of_heads_are_their_values(way: str, name: str) -> None:
    given, numbers = tensors(), torch.tensor([0.5, -0.25])
    wanted = called(way, given, **{name: numbers})
    for _ in range(2):
        torch.testing.assert_close(called(way, given, **{name: negated(numbers)}), wanted, rtol=0, atol=0)


@every(but=("paged",))
def test_lazily_negated_gradients_are_their_values(way: str) -> None:
    given = tensors(requires_grad=True)
    out, lse = WAYS[way](given, return_lse=True)
    grads = torch.ones_like(out).cumsum(-1), torch.ones_like(lse)
    wanted = torch.autograd.grad((out, lse), given, grads, retain_graph=True)
    found = torch.autograd.grad((out, lse), given, [negated(x) for x in grads])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@every(but=("dense", "functions"))
def test_lazily_negated_lists_of_lengths_and_pages_are_their_values(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    wanted, attend = called(way, given), dispatch.attention_varlen

    def lists(*x: Any, **words: Any) -> Any:
        x = tuple(negated(y) if isinstance(y, Tensor) and y.dtype is torch.int32 else y for y in x)
        words = {name: negated(y) if isinstance(y, Tensor) else y for name, y in words.items()}
        return attend(*x, **words)

    monkeypatch.setattr(dispatch, "attention_varlen", lists)
    for _ in range(2):
        torch.testing.assert_close(called(way, given), wanted, rtol=0, atol=0)


@every(but=("dense",))
def test_what_is_no_request_for_more_is_refused(way: str) -> None:
    with pytest.raises(InputTypeError, match=r"^return_aux must be an AuxRequest or None, not bool: "):
        called(way, tensors(), return_aux=True)


@every(but=("dense",))
def test_the_lse_is_requested_in_one_place(way: str) -> None:
    for call in (called, explained):
        with pytest.raises(InputError, match=r"^return_lse stands beside return_aux: leave it out, "):
            call(way, tensors(), return_lse=True, return_aux=AuxRequest(lse=True))


@every()
@pytest.mark.parametrize("name", ["score_mod", "mask"])
def test_what_is_no_function_is_refused_by_its_name(way: str, name: str) -> None:
    masks = {"dense": "block_mask", "functions": "block_mask"}
    word = masks.get(way, "mask_mod") if name == "mask" else name
    beside = {} if name == "score_mod" else {"score_mod": ways.doubled}
    more: dict[str, Any] = {"functions": {"score_mod": None}, "paged": {}}.get(way, {}) | beside | {word: 1}
    pattern = "^block_table is no argument beside " if way == "paged" else rf"^{word} must be (a BlockMask, )?a function or None, not int: "
    for call in (called, explained):
        with pytest.raises((InputError, InputTypeError), match=pattern):
            call(way, tensors(), **more)


def test_options_of_pytorchs_kernels_are_a_dictionary() -> None:
    for call in (dispatch.flex_attention, dispatch.explain_flex):
        with pytest.raises(InputTypeError, match=r"^kernel_options must be a dictionary or None, not int: "):
            call(*tensors(), ways.doubled, enable_gqa=True, kernel_options=1)


@every()
@pytest.mark.parametrize("layout", ["tokens first", "every other column"])
def test_any_layout_is_right(way: str, layout: str) -> None:
    given = tensors()
    made: Callable[[Tensor], Tensor] = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    if layout == "every other column":
        made = lambda x: x.repeat_interleave(2, -1)[..., ::2]  # noqa: E731
    right(way, called(way, Tensors(*map(made, given))), given)


@every()
def test_tensors_of_several_types_are_refused_in_a_sentence(way: str) -> None:
    query, key, value = tensors()
    with pytest.raises((InputError, InputTypeError)) as caught:
        called(way, Tensors(query.half(), key, value))
    assert "float16" in str(caught.value) and ": " in str(caught.value)


@every()
def test_what_is_no_tensor_is_refused_by_its_name(way: str) -> None:
    query, key, _ = tensors()
    with pytest.raises(InputTypeError, match=r"^value must be a tensor, not list: "):
        _untyped(way, query, key)


def _untyped(way: str, query: Tensor, key: Tensor) -> None:
    """A call whose value is a list."""
    value: Any = [1.0]
    rows = ways.packed_rows(query), ways.packed_rows(key)
    bounds = ways.bounds(ways.ROWS), ways.bounds(ways.KEYS)
    with torch.no_grad():
        if way == "dense":
            dispatch.attention(query, key, value, enable_gqa=True)
        elif way == "functions":
            dispatch.flex_attention(query, key, value, ways.doubled, enable_gqa=True)
        elif way == "paged":
            table, used = torch.zeros(2, 2, dtype=torch.int32), torch.full((2,), 32, dtype=torch.int32)
            words: dict[str, Any] = {"block_table": table, "seqused_k": used, "enable_gqa": True}
            dispatch.attention_varlen(rows[0], ways.pages(key), value, bounds[0], None, ways.ROWS, ways.KEYS, **words)
        else:
            more: Any = {"score_mod": ways.doubled} if way == "packed functions" else {}
            dispatch.attention_varlen(*rows, value, *bounds, ways.ROWS, ways.KEYS, enable_gqa=True, **more)


@every()
def test_an_explanation_is_data(way: str) -> None:
    one = explained(way, tensors())
    assert isinstance(one, Explanation) and one.kind and one.reason and one.gpu == "cpu"


@pytest.mark.skipif(not devices.INTERPRETING, reason="kernels run in Triton's interpreter alone")
@every()
def test_a_call_is_recorded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[object] = []
    monkeypatch.setattr(CALLS, "meet", met.append)
    dispatch.reload()
    called(way, tensors())
    assert len(met) == 1


@every()
def test_pytorch_can_be_named(way: str) -> None:
    given = tensors()
    right(way, called(way, given, implementation="torch"), given)
    said = explained(way, given, implementation="torch")
    assert said.kind == "framework" and "the caller named torch" in said.reason


@every(but=("paged",))
def test_pytorch_that_is_named_has_gradients(way: str) -> None:
    given = tensors(requires_grad=True)
    found = torch.autograd.grad(rows_of(way, WAYS[way](given, implementation="torch")).sum(), given)
    torch.testing.assert_close(found, torch.autograd.grad(rows_of(way, WAYS[way](given)).sum(), given))


@every()
def test_a_name_of_no_implementation_is_refused(way: str) -> None:
    for call in (called, explained):
        with pytest.raises(InputError, match=r"^unknown implementation 'fastest': use one of flashtune, torch, flash, cudnn, "):
            call(way, tensors(), implementation="fastest")


REFUSED = {
    "flashtune": r"^implementation='flashtune' can't run this call, since (kernels run on GPUs|no kernel runs on cpu) .*name another$",
    "cudnn": r"^implementation='cudnn' \(PyTorch's cuDNN attention\) can't run this call, since it doesn't run on cpu tensors",
    "flex": r"^implementation='flex' \(PyTorch's FlexAttention\) can't run this call, since it doesn't run on cpu tensors",
    "fa4": r"^implementation='fa4' \(FlashAttention-4\) can't run this call, since it isn't installed: pip install flash-attn-4$",
}


@every()
@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_cannot_serve_is_refused_in_a_sentence(way: str, name: str) -> None:
    # A call that is served, before and after, is no other's.
    called(way, tensors())
    for call in (called, explained):
        with pytest.raises(InputError, match=REFUSED[name]) as caught:
            call(way, tensors(), implementation=name)
        assert "\n" not in str(caught.value) and ": " in str(caught.value)
    called(way, tensors())


@every()
def test_with_nothing_to_compute_any_name_serves(way: str) -> None:
    query, key, value = tensors()
    given = Tensors(query[:, :, :0], key, value)
    for name in ("flashtune", "torch", "cudnn", "fa4"):
        assert called(way, given, implementation=name).numel() == 0
        assert explained(way, given, implementation=name).provider is None


@pytest.mark.skipif(not devices.INTERPRETING, reason="kernels run in Triton's interpreter alone")
@every()
@pytest.mark.parametrize("grad", [False, True], ids=["without gradients", "with gradients"])
def test_a_plan_serves_no_call_whose_implementation_is_another(way: str, grad: bool) -> None:
    dispatch.reload()
    names = ("flashtune", "torch", "flashtune", "torch", "torch", "flashtune", "flashtune")
    given = tensors(requires_grad=grad and way != "paged")
    found = {name: list[Tensor]() for name in names}
    for name in names:
        found[name].append(WAYS[way](given, implementation=name).detach())
        said = explained(way, tensors(), implementation=name)
        assert (said.template is None) is (name == "torch")
    for outs in found.values():
        torch.testing.assert_close(outs[1:], outs[:1] * len(outs[1:]), rtol=0, atol=0)
        right(way, outs[0], given)
    assert not torch.equal(found["torch"][0], found["flashtune"][0]), "their last bits differ"


@pytest.mark.parametrize(("way", "name"), [*((way, "flashtune") for way in WAYS), ("dense", "torch"), ("packed", "torch")])
def test_compilers_trace_a_call_whose_implementation_is_named(way: str, name: str) -> None:
    given = tensors()

    def call(*tensors: Tensor) -> Any:
        return WAYS[way](Tensors(*tensors), implementation=name)

    seen: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad():
        right(way, torch.compile(call, backend=backend, fullgraph=True)(*given), given)
    ours = any("flashtune" in target for target in seen)
    assert ours is (name == "flashtune" and way in ("packed", "paged")), seen


@every(but=("paged",))
def test_gradients_are_float64s_and_second_ones_too_or_refused(way: str) -> None:
    given = tensors(requires_grad=True)
    # PyTorch has second derivatives of its math backend alone.
    with sdpa_kernel([SDPBackend.MATH]):
        out = rows_of(way, WAYS[way](given))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    grads = torch.autograd.grad(out, given, dout, create_graph=True)
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted_out, _ = reference.attention(*wide, scale=ways.D**-0.5)
    wanted = torch.autograd.grad(wanted_out, wide, dout.double(), create_graph=True)
    bound = TOLERANCES["fp32"]
    for one, other in zip(grads, wanted, strict=True):
        assert (one.double() - other).norm() <= bound.gradient_norm * other.norm()
    seconds = torch.autograd.grad(sum(x.square().sum() for x in wanted), wide)
    try:
        found = torch.autograd.grad(sum(x.square().sum() for x in grads), given)
    except InputError as error:
        refused = str(error)
    else:
        refused = None
    assert refused is None or refused.startswith("attention was differentiated twice, and kernels have first derivatives alone: ")
    for one, other in zip(() if refused else found, () if refused else seconds, strict=True):
        assert (one.double() - other).norm() <= 10 * bound.gradient_norm * other.norm()


@every(but=("paged",))
def test_gradients_of_a_batch_are_those_of_each(way: str) -> None:
    given = tensors(requires_grad=True)
    out = rows_of(way, WAYS[way](given))
    douts = torch.randn(2, *out.shape, generator=torch.Generator().manual_seed(5))
    batch = torch.autograd.grad(out, given, douts, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, given, dout, retain_graph=True) for dout in douts]
    for found, *wanted in zip(batch, *each, strict=True):
        torch.testing.assert_close(found, torch.stack(wanted))


class Watching(TorchDispatchMode):
    """A mode that lets every operation through."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@every(but=("paged",))
@pytest.mark.parametrize("how", ["a batch", "a mode"])
def test_second_derivatives_of_gradients_that_others_see_are_right_or_refused(way: str, how: str) -> None:
    given = tensors(requires_grad=True)
    out = rows_of(way, WAYS[way](given))
    douts = torch.randn(2, *out.shape, generator=torch.Generator().manual_seed(5))
    with Watching() if how == "a mode" else nullcontext():
        dout, words = (douts, {"is_grads_batched": True}) if how == "a batch" else (douts[0], {})
        found = torch.autograd.grad(out, given, dout, create_graph=True, **words)
    try:
        seconds = torch.autograd.grad(sum(x.square().sum() for x in found), given)
    except (InputError, RuntimeError):
        return
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted_out, _ = reference.attention(*wide, scale=ways.D**-0.5)
    firsts = [torch.autograd.grad(wanted_out, wide, one.double(), create_graph=True) for one in (douts if how == "a batch" else douts[:1])]
    wanted = torch.autograd.grad(sum(x.square().sum() for one in firsts for x in one), wide)
    for one, other in zip(seconds, wanted, strict=True):
        assert (one.double() - other).norm() <= 1e-4 * other.norm()


@pytest.mark.skipif(not devices.INTERPRETING, reason="PyTorch's own gradients are wrong then")
@every(but=("paged",))
def test_a_hook_may_give_saved_tensors_back_with_other_strides(way: str) -> None:
    def packing(x: Tensor) -> tuple[bool, Tensor]:
        turned = x.dim() > 1 and x.dtype is torch.float32
        return turned, x.detach().mT.contiguous() if turned else x.detach()

    given = tensors(requires_grad=True)
    with dispatch.use(unmeasured=True):
        with torch.autograd.graph.saved_tensors_hooks(packing, lambda kept: kept[1].mT if kept[0] else kept[1]):
            out = rows_of(way, WAYS[way](given))
        plain = rows_of(way, WAYS[way](given))
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    for one, other in zip(torch.autograd.grad(out, given, dout), torch.autograd.grad(plain, given, dout), strict=True):
        torch.testing.assert_close(one, other)


@every(but=WITH_CODE)
def test_forward_mode_has_a_tangent_or_an_error(way: str) -> None:
    given = tensors()
    with torch.no_grad(), forward_ad.dual_level():
        dual = Tensors(forward_ad.make_dual(given.query, torch.ones_like(given.query)), given.key, given.value)
        try:
            out = WAYS[way](dual)
        except (RuntimeError, NotImplementedError):
            return
        assert forward_ad.unpack_dual(out).tangent is not None


@every(but=WITH_CODE)
def test_with_flash_attention_switched_off_no_kernel_serves(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors()
    with sdpa_kernel([SDPBackend.MATH]):
        assert explained(way, given).kind == "framework"
        for kind, name in ((KernelPlan, "run"), (Kernel, "launch")):
            monkeypatch.setattr(kind, name, lambda *_: pytest.fail("a kernel serves"))
        right(way, called(way, given), given)


@every(but=WITH_CODE)
def test_a_mode_that_watches_leaves_pytorchs_named_call_to_it(way: str) -> None:
    given = tensors()
    with Watching():
        right(way, called(way, given, implementation="torch"), given)


@every(but=("paged",))
def test_a_traced_backward_computes_gradients_of_other_values(way: str) -> None:
    given = tensors(requires_grad=True)
    out = rows_of(way, WAYS[way](given))
    first, other = torch.randn(2, *out.shape, generator=torch.Generator().manual_seed(6))

    def gradients(dout: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, given, dout, retain_graph=True)

    for found, wanted in zip(make_fx(gradients)(first)(other), gradients(other), strict=True):
        torch.testing.assert_close(found, wanted)


@every()
@pytest.mark.parametrize("none", ["no queries", "no keys"])
def test_nothing_is_computed_for_no_queries_and_zeros_for_no_keys(way: str, none: str) -> None:
    query, key, value = tensors()
    given = Tensors(query[:, :, :0], key, value) if none == "no queries" else Tensors(query, key[:, :, :0], value[:, :, :0])
    out, lse = called(way, given, return_lse=True)
    assert out.numel() == given.query.numel() and not out.any()
    assert bool((lse == -torch.inf).all())


@every(but=("paged",))
def test_autocast_casts_all_to_its_type(way: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        out = called(way, tensors())
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, called(way, tensors(torch.bfloat16)), rtol=0, atol=0)


def test_meanings_are_the_same_where_kernels_serve() -> None:
    """The same tests of this file under Triton's interpreter, but for those of arguments that are refused before anything serves."""
    output_of_tests(
        __file__,
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-k",
        "any_ or negated or gradients or computed or explanation or plan_serves or hook or forward_mode or switched_off or watches "
        "or recorded",
    )
