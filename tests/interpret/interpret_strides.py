"""Kernels with plain pointers on strides that a head size's unit divides and on others, in Triton's interpreter."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from flashtune.core.code.launching import provided
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.correctness import check, everywhere, oracle
from flashtune.tuner.verify.inputs import make_inputs

GPU = find_target("a100")

CASES: dict[str, tuple[str, dict[str, Any], Features]] = {
    "forward": ("flash_fwd", {"d": 40, "d_v": 40, "direction": "fwd"}, Features(causal=True)),
    "forward of 20": ("flash_fwd", {"d": 20, "d_v": 36, "direction": "fwd"}, Features()),
    "few queries": ("flash_decode", {"d": 24, "d_v": 24, "direction": "fwd", "n_q": 3}, Features()),
    "backward": ("flash_bwd", {"d": 40, "d_v": 40, "direction": "bwd"}, Features(mask="bias", dbias=True)),
}


def widened(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with another in memory behind each row."""
    wide = torch.full((*x.shape[:3], x.shape[3] + 1), float("nan"), dtype=x.dtype)
    wide[..., :-1] = x
    return wide[..., :-1]


def launcher(module: ModuleType, told: list[bool]) -> Callable[..., None]:
    """`launch` of a rendered module, which notes in `told` what its kernels are told of strides."""

    def launch(q: torch.Tensor, k: torch.Tensor, *tensors: torch.Tensor | None, **settings: Any) -> None:
        words = provided(module, q, k) | {"sms": GPU.sms}
        for kernel, grid, args, options in module.launches(q, k, *tensors, **words, **settings):
            if "ALIGNED" in kernel.arg_names:
                told.append(args[kernel.arg_names.index("ALIGNED")])
            kernel[grid](*args, **options)

    return launch


def main() -> dict[str, object]:
    """Each case as tensors lie usually, then with rows whose strides are odd."""
    report: dict[str, object] = {}
    for seed, (name, (template, sizes, features)) in enumerate(CASES.items()):
        p = Problem(**{"batch": 2, "heads": 2, "kv_heads": 1, "n_q": 37, "n_kv": 45, "dtype": "fp16"} | sizes, features=features)
        kind = family(template)
        config = kind.default(p.spec(), GPU)
        module = load_kernel(render(kind, variant_of(kind, p.spec(), config)), template)
        for kept in ("usual", "odd"):
            inputs = make_inputs(p, device="cpu", seed=seed, heads_inside=seed % 2 == 1)
            if kept == "odd":
                for operand in ("q", "k", "v", "out", *(("dout",) if p.direction == "bwd" else ())):
                    inputs.operands[operand] = widened(inputs.operands[operand])
            told: list[bool] = []
            launch = launcher(module, told)
            report[f"{name}, {kept}"] = check(launch, inputs, oracle(inputs, everywhere(p))).reason
            report[f"{name}, {kept}: told"] = sorted(set(told))
    return report
