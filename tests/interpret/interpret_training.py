"""Training through dispatch with kernels in Triton's interpreter."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from flashtune import dispatch
from flashtune.bench.whole_calls import call_times
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.problems.problem import Problem
from flashtune.core.system.errors import InputError
from flashtune.dispatch.decisions import backwards
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.inputs import make_inputs

warnings.filterwarnings("ignore")
SHAPES = [(1, 2, 20, 16), (1, 1, 24, 16), (1, 1, 24, 16)]


def leaves(*, wanted: tuple[bool, ...] = (True, True, True), heads_first: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if not heads_first:
        found = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in found]
    return [x.requires_grad_(needed) for x, needed in zip(found, wanted, strict=True)]


def loss(out: torch.Tensor, lse: torch.Tensor | None = None) -> torch.Tensor:
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    found = (out * weights.to(out.dtype)).sum()
    return found if lse is None else found + lse.square().sum()


def gap(ours: list[torch.Tensor], given: dict[str, Any], *, with_lse: bool = False) -> float:
    """The largest difference of gradients that `ours` got from those of the reference in float64."""
    theirs = [x.detach().double().requires_grad_() for x in ours]
    out, lse = reference.attention(*theirs, scale=0.25, **given)
    loss(out, lse if with_lse else None).backward()
    return max(float((x.grad - y.grad).abs().max()) for x, y in zip(ours, theirs, strict=True) if x.grad is not None and y.grad is not None)


def others_of(n_q: int, n_kv: int) -> list[torch.Tensor]:
    """A bias that repeats over heads, slopes and sinks, all of which ask for a gradient."""
    bias = torch.randn(1, 1, n_q, n_kv, generator=torch.Generator().manual_seed(4))
    return [x.requires_grad_() for x in (bias, torch.tensor([0.3, 0.1]), torch.tensor([0.5, -1.0]))]


def everything(
    bias: torch.Tensor, slopes: torch.Tensor, sinks: torch.Tensor, *tensors: torch.Tensor, dropout_p: float = 0.0
) -> torch.Tensor:
    words: dict[str, Any] = {"window": (9, 5), "softcap": 1.5, "dropout_p": dropout_p, "seed": 11, "enable_gqa": True, "return_lse": True}
    out, lse = dispatch.attention(*tensors, attn_mask=bias, alibi_slopes=slopes, sinks=sinks, **words)
    return loss(out, lse)


def of_everything(*x: torch.Tensor) -> float:
    """The largest difference of gradients, those of bias, slopes and sinks among them, from the reference's, over the largest number."""
    everything(*x, dropout_p=0.25).backward()
    bias, slopes, sinks, *tensors = theirs = [t.detach().double().requires_grad_() for t in x]
    n_q, n_kv = bias.shape[2:]
    keep = reference.dropout_keep(11, 0, 1, 2, n_q, n_kv, 0.25)
    given: dict[str, Any] = {"mask": bias, "softcap": 1.5, "keep": keep, "dropout_p": 0.25, "slopes": slopes[None], "sinks": sinks[None]}
    out, lse = reference.attention(*tensors, scale=0.25, band=Band(left=9, right=5), **given)
    loss(out, lse).backward()
    gaps = [float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in zip(x, theirs, strict=True)]  # type: ignore[operator, union-attr]
    return max(gaps)


def more_gradients() -> dict[str, Any]:
    """Gradients of a bias, of slopes and of sinks by kernels, in all the ways in which others are computed."""
    found: dict[str, Any] = {}

    def inputs() -> list[torch.Tensor]:
        made = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((1, 2, 5, 16), (1, 1, 7, 16), (1, 1, 7, 16))]
        return [*others_of(5, 7), *(x.requires_grad_() for x in made)]

    x = inputs()
    words = {"attn_mask": x[0], "alibi_slopes": x[1], "sinks": x[2], "enable_gqa": True}
    explained = dispatch.explain(*x[3:], **words).backward  # type: ignore[arg-type]
    found["explained"] = "" if explained is None else str(explained.template)
    found["gap"] = of_everything(*x)
    x = inputs()
    everything(*x).backward()
    eager = [t.grad for t in x]
    x = inputs()
    torch.compile(everything, backend="aot_eager", fullgraph=True)(*x).backward()
    found["compiled"] = all(torch.equal(t.grad, w) for t, w in zip(x, eager, strict=True))  # type: ignore[arg-type]
    x = inputs()
    checkpoint(everything, *x, use_reentrant=False).backward()
    found["checkpointed"] = all(torch.equal(t.grad, w) for t, w in zip(x, eager, strict=True))  # type: ignore[arg-type]
    func = torch.func.grad(everything, argnums=tuple(range(6)))(*(t.detach() for t in x))
    found["torch.func.grad"] = all(torch.allclose(t, w, rtol=1e-4, atol=1e-5) for t, w in zip(func, eager, strict=True))  # type: ignore[arg-type]
    for place, name in enumerate(("bias", "slopes", "sinks")):
        x = inputs()
        alone = torch.autograd.grad(everything(*(t if t is x[place] else t.detach() for t in x)), x[place])
        found[f"{name} alone"] = torch.equal(alone[0], eager[place])  # type: ignore[arg-type]
    x = inputs()
    words = {"eps": 1e-2, "atol": 2e-2, "rtol": 2e-2, "fast_mode": True}
    found["gradcheck"] = torch.autograd.gradcheck(everything, x, **words)  # type: ignore[arg-type]
    _, _, sinks, *others = (t.detach().half() for t in inputs())
    given = torch.autograd.grad(dispatch.attention(*others, sinks=sinks.requires_grad_(), enable_gqa=True).sum(), sinks)
    found["type"] = given[0].dtype == torch.float16 and given[0].shape == sinks.shape
    return found


def causal(*tensors: torch.Tensor, **words: Any) -> torch.Tensor:
    found: torch.Tensor = dispatch.attention(*tensors, is_causal=True, causal_alignment="bottom_right", enable_gqa=True, **words)
    return found


def same_when_checkpointed() -> bool:
    """True if a reentrant checkpoint changes no gradient. Its forward runs without gradients, and with other kernels where torch trains:
    the output has to be that which the backward's recomputation has."""
    x = leaves()
    torch.manual_seed(1)
    wanted = torch.autograd.grad(causal(*x, dropout_p=0.5).square().sum(), x)
    torch.manual_seed(1)
    checkpoint(lambda *t: causal(*t, dropout_p=0.5), *x, use_reentrant=True).square().sum().backward()
    return all(torch.allclose(t.grad, w, atol=1e-5) for t, w in zip(x, wanted, strict=True))  # type: ignore[arg-type]


def attend(*tensors: torch.Tensor, **words: Any) -> torch.Tensor:
    found: torch.Tensor = dispatch.attention(*tensors, enable_gqa=True, dropout_p=0.5, **words)
    return found


def sdpa(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*tensors, dropout_p=0.5, enable_gqa=True)


def seeded(function: Callable[..., Any], *given: Any) -> Any:
    torch.manual_seed(1)
    return function(*given)


def step_of(*x: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of two calls, something else drawn between them, and the gradients of the first."""
    out = attend(*x)
    torch.rand(3)
    return [out.detach(), attend(*x).detach(), *torch.autograd.grad(out.square().sum(), x)]


def all_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def close(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Equal but for rounding: other pairs dropped would make differences of the numbers' own size."""
    return len(some) == len(others) and all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(some, others, strict=True))


def checkpointed(x: list[torch.Tensor], reentrant: bool) -> list[list[torch.Tensor]]:
    """For each pass of a checkpoint the outputs of a call without gradients and of one with them."""
    seen: list[list[torch.Tensor]] = []

    def function(*t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            other = attend(*t)
        out = attend(*t)
        seen.append([other, out.detach()])
        return out + other

    with set_checkpoint_early_stop(False):
        seeded(lambda: checkpoint(function, *x, use_reentrant=reentrant).sum().backward())  # type: ignore[no-untyped-call]
    return seen


def recomputed() -> dict[str, object]:
    """True if dropout without a seed drops the same pairs with gradients and without, where kernels train and where torch does."""
    x = leaves()
    by_kernels = seeded(step_of, *x)
    found = {f"{case}, by kernels": right for case, right in of_both(x, by_kernels).items()}
    choose, backwards.gradient_choice = backwards.gradient_choice, lambda *_, **__: (None, "it is faster")  # type: ignore[assignment]
    dispatch.reload()
    try:
        by_torch, own = seeded(step_of, *x), seeded(lambda: sdpa(*x))
        found["torch trains"] = torch.equal(own, by_torch[0]) and not all_equal(by_torch[:1], by_kernels[:1])
        found |= {f"{case}, by torch": right for case, right in of_both(x, by_torch).items()}
        with FlopCounterMode(display=False):
            found["under a mode"] = close(seeded(step_of, *x), by_torch)
        with torch.no_grad():
            found["explained"] = "runs as in training" in dispatch.explain(*x, dropout_p=0.5, enable_gqa=True).reason
    finally:
        backwards.gradient_choice = choose
        dispatch.reload()
    found["where no kernel launches"] = where_no_kernel_launches(x, own)
    return found


def of_both(x: list[torch.Tensor], wanted: list[torch.Tensor]) -> dict[str, bool]:
    """The same of the ways to compute a call without gradients and again with them, each of which is to give what is `wanted`."""
    found = {}
    with torch.no_grad():
        out = seeded(lambda: [attend(*x), torch.rand(3), attend(*x)])
    found["without gradients"] = torch.equal(out[0], wanted[0]) and torch.equal(out[2], wanted[1])
    with torch.inference_mode():
        found["in inference mode"] = torch.equal(seeded(attend, *x), wanted[0])
    for name, reentrant in (("reentrant", True), ("not reentrant", False)):
        passes = checkpointed(x, reentrant)
        found[name] = torch.equal(passes[0][0], wanted[0]) and all_equal(*passes)
    hooked: list[list[torch.Tensor]] = []

    def again(_: torch.Tensor) -> None:
        with torch.enable_grad():
            hooked.append(seeded(step_of, *x))

    # As sentence-transformers' cached losses do: inside of another backward.
    cached = out[0].clone().requires_grad_().sum()
    cached.register_hook(again)
    cached.backward()
    found["in a hook"] = all_equal(hooked[0], wanted)
    found["compiled"] = all(all_equal(both, wanted[:1] * 2) for both in passes_compiled(x))
    return found


def passes_compiled(x: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Results computed without gradients and then with them, either or both by what a compiler made of it, and so in a checkpoint."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found: list[list[torch.Tensor]] = []
    for first, second in ((compiled, compiled), (attend, compiled), (compiled, attend)):
        with torch.no_grad():
            out = seeded(first, *x)
        found.append([out, seeded(second, *x).detach()])
    again: list[torch.Tensor] = []

    def function(*t: torch.Tensor) -> torch.Tensor:
        out = compiled(*t)
        again.append(out.detach())
        return out

    seeded(lambda: checkpoint(function, *x, use_reentrant=True).sum().backward())  # type: ignore[no-untyped-call]
    return [*found, again]


def where_no_kernel_launches(x: list[torch.Tensor], wanted: torch.Tensor) -> bool:
    """True if torch's operations serve then, from where the generator stood before kernels were tried, at the first call, too."""

    def failing(*_: object) -> Any:
        raise RuntimeError("PassManager::run failed")

    launched, KernelPlan._through_triton = KernelPlan._through_triton, failing  # type: ignore[method-assign]
    dispatch.reload()
    try:
        with torch.no_grad():
            return all(torch.equal(seeded(lambda: attend(*x)), wanted) for _ in range(2))
    finally:
        KernelPlan._through_triton = launched  # type: ignore[method-assign]


def of_dropout(mode: Callable[[], AbstractContextManager[object]]) -> list[object]:
    """Server of unseeded dropout in a mode; True if torch's seed repeats it, and if two calls in a row drop the same."""
    x = [t.detach() for t in leaves()]
    found = []
    with mode():
        kind = dispatch.explain(*x, dropout_p=0.5, enable_gqa=True).kind
        for _ in range(2):
            torch.manual_seed(1)
            found += [dispatch.attention(*x, dropout_p=0.5, enable_gqa=True) for _ in range(2)]
    return [kind, torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]), torch.equal(found[0], found[1])]


def whole_steps() -> list[object]:
    """How many ways of a training step are timed, and whether a backward kernel that is pinned is among those that run."""
    problem = Problem(batch=1, heads=2, kv_heads=1, n_q=20, n_kv=24, d=16, d_v=16, dtype="fp32", direction="bwd")
    chosen, spec = family("flash_bwd"), problem.spec()
    module = load_kernel(render(chosen, variant_of(chosen, spec, chosen.default(spec, find_target("l4")))), "pinned")
    launches, ran = module.launches, []
    module.launches = lambda *given, **words: ran.append(given) or launches(*given, **words)  # type: ignore[func-returns-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    times = call_times([module], make_inputs(problem, device="cpu", seed=0), budget_s=0.0)
    return [len(times), bool(ran)]


report: dict[str, Any] = {}
"""What `main` returns."""


def step(*tensors: torch.Tensor) -> torch.Tensor:
    return loss(*causal(*tensors, return_lse=True))


def before_asking() -> None:
    x = leaves()
    report["unasked"] = dispatch.explain(*x, is_causal=True, enable_gqa=True).reason
    report["dropout checkpointed reentrantly where torch trains"] = same_when_checkpointed()
    report["of a mask"] = dispatch.explain(*x, attn_mask=torch.zeros(20, 24, requires_grad=True), enable_gqa=True).reason
    report["of dropout"] = [of_dropout(mode) for mode in (torch.no_grad, torch.inference_mode, torch.no_grad)]


def causal_step() -> list[torch.Tensor | None]:
    """Gradients of a step, those that others of these inputs have to have."""
    x = leaves()
    band = Band(right=0, diagonal=4)
    explained = dispatch.explain(*x, is_causal=True, causal_alignment="bottom_right", enable_gqa=True)
    report["explained"] = [explained.template, explained.backward.template if explained.backward else None]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        out, lse = causal(*x, return_lse=True)
    report["saved"] = [max(saved), x[0].numel()]
    loss(out, lse).backward()
    report["causal and lse"] = gap(x, {"band": band}, with_lse=True)
    return [t.grad for t in x]


def with_masks_and_dropout() -> None:
    x = leaves(heads_first=False)
    mask = torch.rand(20, 24, generator=torch.Generator().manual_seed(4)) > 0.5
    mask[7] = False
    keep = reference.dropout_keep(11, 0, 1, 2, 20, 24, 0.25)
    loss(dispatch.attention(*x, attn_mask=mask, dropout_p=0.25, seed=11, enable_gqa=True)).backward()
    report["mask and dropout"] = gap(x, {"mask": mask, "keep": keep, "dropout_p": 0.25})
    report["laid out as inputs"] = all(t.grad is not None and t.grad.stride() == t.stride() for t in x)
    x = leaves(wanted=(True, False, False))
    loss(causal(*x)).backward()
    report["of the query alone"] = [t.grad is not None for t in x]
    x = leaves()
    torch.manual_seed(1)
    first = torch.autograd.grad(causal(*x, dropout_p=0.5).sum(), x)
    torch.manual_seed(1)
    again = torch.autograd.grad(checkpoint(causal, *x, dropout_p=0.5, use_reentrant=False).sum(), x)
    report["dropout checkpointed"] = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    report["dropout checkpointed reentrantly"] = same_when_checkpointed()


def batches_of_gradients() -> None:
    x = leaves()
    grads = torch.autograd.grad(step(*x), x, create_graph=True)
    try:
        sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]
    except InputError as error:
        report["twice"] = str(error)
    x = leaves()
    out, lse = causal(*x, return_lse=True)
    ones = torch.randn((3, *out.shape), generator=torch.Generator().manual_seed(5)), torch.ones(3, *lse.shape)
    batched = torch.autograd.grad((out, lse), x, ones, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad((out, lse), x, (ones[0][i], ones[1][i]), retain_graph=True) for i in range(3)]
    report["gradients batched"] = all(torch.equal(b, torch.stack(e)) for b, e in zip(batched, zip(*each, strict=True), strict=True))
    negated = torch.autograd.grad((out, lse), x, [torch.ops.aten._neg_view(-t[0]) for t in ones], retain_graph=True)
    report["gradients that are marked as negative"] = all(torch.equal(n, e) for n, e in zip(negated, each[0], strict=True))
    lse_batched = torch.autograd.grad(lse, x, ones[1], is_grads_batched=True)[0]
    report["gradients batched"] &= lse_batched.shape == (3, *x[0].shape)


def other_backwards(eager: list[torch.Tensor | None]) -> None:
    x = leaves()
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        step(*x).backward()
    report["compiled backward"] = all(torch.equal(t.grad, wanted) for t, wanted in zip(x, eager, strict=True))  # type: ignore[arg-type]
    x = leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.stack([t, t], -1)[..., 0]):
        total = step(*x)
    total.backward()
    report["unpacked with gaps"] = max(float((t.grad - wanted).abs().max()) for t, wanted in zip(x, eager, strict=True))  # type: ignore[operator]


def of_kernels_chosen_once_and_by_the_formula(eager: list[torch.Tensor | None]) -> None:
    asked, choose = list[object](), backwards.gradient_kernels
    backwards.gradient_kernels = lambda *given: asked.append(given) or choose(*given)  # type: ignore[assignment, func-returns-value]
    dispatch.reload()
    for _ in range(2):
        x = leaves(wanted=(True, True, False))
        step(*x).backward()
    report["asked once"] = [len(asked), all(torch.equal(t.grad, wanted) for t, wanted in zip(x[:2], eager, strict=False))]  # type: ignore[arg-type]
    dispatch.reload()
    backwards.gradient_kernels = lambda *_: iter(())  # type: ignore[assignment]
    x = leaves()
    step(*x).backward()
    x_cast = leaves()
    found_loss = step(*x_cast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found_loss.backward()
    report["by the formula under autocast"] = max(float((t.grad - w).abs().max()) for t, w in zip(x_cast, eager, strict=True))  # type: ignore[operator]
    report["by the formula"] = max(float((t.grad - wanted).abs().max()) for t, wanted in zip(x, eager, strict=True))  # type: ignore[operator]
    x = leaves()
    report["everything by the formula"] = of_everything(*others_of(20, 24), *x)


def main() -> dict[str, Any]:
    """Everything with kernels that nobody measured, since an interpreter's times mean nothing."""
    before_asking()
    dispatch.use(unmeasured=True)
    eager = causal_step()
    with_masks_and_dropout()
    batches_of_gradients()
    other_backwards(eager)
    report.update({"whole steps": whole_steps(), "more": more_gradients(), "recomputed": recomputed()})
    of_kernels_chosen_once_and_by_the_formula(eager)
    return report
