"""flash_bwd in Triton's interpreter; see test_templates_backward."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from flashtune.core.code.launching import launcher
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.correctness import check, everywhere, oracle
from flashtune.tuner.verify.inputs import Inputs, make_inputs, run_forward, without_repeats

BWD, GPU = family("flash_bwd"), find_target("h200")
TILES = {"BLOCK_M": 16, "BLOCK_N": 32, "DQ_BLOCK_M": 16, "DQ_BLOCK_N": 32, "num_warps": 4, "DQ_num_warps": 4}


def problem(features: Features, **changes: int | str) -> Problem:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "n_q": 29, "n_kv": 40, "d": 16, "d_v": 24, "dtype": "fp32"} | changes
    return Problem(**sizes, features=features, direction="bwd")  # type: ignore[arg-type]


CASES = {
    # More queries than keys: the first rows see nothing.
    "causal": problem(Features(causal=True, alignment="bottom_right"), n_q=45, n_kv=33),
    "everything": problem(
        Features(window=(14, 7), mask="bias", dropout=True, softcap=True, alibi=True, sinks=True, dbias=True, dslopes=True), d=24, d_v=16
    ),
    "left": problem(Features(causal=True, window=(18, 0), mask="bool"), dtype="fp16"),
    "full": problem(Features(), n_kv=33, batch=2, dtype="fp16"),
}


def module_of(p: Problem, order: str) -> object:
    spec = p.spec()
    config = BWD.default(spec, GPU).replace(**TILES, ORDER=order)
    return load_kernel(render(BWD, variant_of(BWD, spec, config)), "flash_bwd")


NEGATIVE = {
    "none": problem(Features(), n_q=20),
    "bool": problem(Features(mask="bool"), n_q=20),
    "bias": problem(Features(mask="bias", dbias=True), n_q=20),
    # Rows whose band ends behind the last key.
    "causal": problem(Features(causal=True), n_q=55),
}
"""Kinds of masks, with keys that end within a tile of every kernel."""


def very_negative(p: Problem) -> Inputs:
    """Scores around -150: past the last key, where they are 0, exp(0 - LSE) is infinite."""
    inputs = make_inputs(replace(p, heads=1, dtype="fp16"), device="cpu", seed=5)
    shift = (150 / (inputs.parameters.scale * 16)) ** 0.5
    inputs.k.add_(shift)
    inputs.q.sub_(shift)
    run_forward(inputs)
    assert float(inputs.lse[torch.isfinite(inputs.lse)].max()) < -89
    return inputs


def framework_errors(inputs: Inputs) -> tuple[list[float], list[float]]:
    """Relative errors of dQ, dK and dV against float64: ours, which were just written, and those of torch's own attention."""
    p = inputs.problem
    exact = oracle(inputs, everywhere(p))
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
    theirs = torch.autograd.grad(out, leaves, inputs.operands["dout"])
    found: tuple[list[float], list[float]] = ([], [])
    for errors, grads in zip(found, ([inputs.operands[name] for name in ("dq", "dk", "dv")], theirs), strict=True):
        for operand, grad in zip(p.contract.written, grads, strict=True):
            gaps = [(grad[operand.at(e.place, p)].double() - e.values[operand.name]).norm() ** 2 for e in exact]
            sizes = [e.values[operand.name].norm() ** 2 for e in exact]
            errors.append(float((sum(gaps) / sum(sizes)) ** 0.5))
    return found


REPEATS = {"rows of all batches": (0, 2), "columns of all heads": (1, 3), "all": (0, 1, 2, 3)}
"""Axes that a bias repeats over."""


def repeated_bias_errors() -> dict[str, float]:
    """How far the gradients of biases are off in the norm, by what these repeat over; infinite where two launches differ in a bit."""
    p = problem(Features(mask="bias", dbias=True, causal=True, alignment="bottom_right"), n_q=19, n_kv=33, d_v=16, batch=2)
    launch, errors = launcher(module_of(p, "rows")), {}  # type: ignore[arg-type]
    for name, axes in REPEATS.items():
        own = [1 if axis in axes else size for axis, size in enumerate((p.batch, p.heads, p.n_q, p.n_kv))]
        inputs = make_inputs(p, device="cpu", seed=len(axes))
        bias = torch.randn(own, generator=torch.Generator().manual_seed(1)).expand(p.batch, p.heads, p.n_q, p.n_kv)
        operands = inputs.operands | {"dbias": torch.full(own, float("nan")).expand(bias.shape)}
        inputs = replace(inputs, operands=operands, parameters=replace(inputs.parameters, mask=bias))
        run_forward(inputs)
        found = []
        for _ in range(2 if name == "columns of all heads" else 1):
            inputs.poison()
            launch(*{**operands, "dq": None, "dk": None, "dv": None}.values(), **inputs.keywords)
            found.append(without_repeats(operands["dbias"]).clone())
        leaf = without_repeats(bias).double().requires_grad_()
        q, k, v, dout = (operands[place].double() for place in ("q", "k", "v", "dout"))
        out, lse = reference.attention(q, k, v, mask=leaf, scale=inputs.parameters.scale, band=p.band)
        loss = (out * dout).sum() + (lse * operands["dlse"])[torch.isfinite(lse)].sum()
        [wanted] = torch.autograd.grad(loss, leaf)
        errors[name] = float((found[0] - wanted).norm() / wanted.norm()) if torch.equal(found[0], found[-1]) else float("inf")
    return errors


def main() -> dict[str, object]:
    """Check the cases, then what the cases can't show, and print what was found."""
    report: dict[str, object] = {}
    for index, (name, p) in enumerate(CASES.items()):
        launch = launcher(module_of(p, ("rows", "longest_first")[index % 2]))  # type: ignore[arg-type]
        inputs = make_inputs(p, device="cpu", seed=index, heads_inside=index % 2 == 1)
        report[name] = check(launch, inputs, oracle(inputs, everywhere(p))).reason
        if name == "full":
            inputs.operands["dlse"].zero_()
            launch(*inputs.arguments, **inputs.keywords)
            report["ours"], report["framework"] = framework_errors(inputs)
            without = {**inputs.operands, "dlse": None}
            before = {written.name: inputs.operands[written.name].clone() for written in p.contract.written}
            inputs.poison()
            launch(*without.values(), **inputs.keywords)
            report["repeated"] = all(torch.equal(inputs.operands[name], x) for name, x in before.items())
            inputs.poison()
            launch(*{**without, "dk": None, "dv": None}.values(), **inputs.keywords)
            report["dq alone"] = torch.equal(inputs.operands["dq"], before["dq"])
            launch(*{**without, "dq": None}.values(), **inputs.keywords)
            report["dk and dv alone"] = all(torch.equal(inputs.operands[name], before[name]) for name in ("dk", "dv"))
            gentle = make_inputs(replace(p, batch=1, heads=1), device="cpu", seed=0)
            gentle.operands["dout"].zero_()
            gentle.operands["dlse"].fill_(1.0)
            report["lse"] = check(launch, gentle, oracle(gentle, everywhere(gentle.problem))).reason
    report["repeated biases"] = repeated_bias_errors()
    for name, p in NEGATIVE.items():
        inputs = very_negative(p)
        launch = launcher(module_of(inputs.problem, "rows"))  # type: ignore[arg-type]
        report[f"very negative: {name}"] = check(launch, inputs, oracle(inputs, everywhere(inputs.problem))).reason
    p = problem(Features(mask="bias", dbias=True))
    inputs = make_inputs(p, device="cpu", seed=0, own_masks=True)
    report["unseen"] = bool((inputs.lse[..., -1] == -float("inf")).all())
    report["rows hidden by a bias"] = check(launcher(module_of(p, "rows")), inputs, oracle(inputs, everywhere(p))).reason  # type: ignore[arg-type]
    return report
