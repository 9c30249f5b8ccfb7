"""Gradients of masks and scores as code in flash_bwd_hopper without a GPU: its plain kernels in Triton's interpreter, the other one on a
stand-in. Prints a JSON report of the largest errors over the largest numbers; a test starts it with TRITON_INTERPRET=1."""

import math
import traceback
from typing import Any

import torch
from mod_cases import CASES, Functions, oracle
from mods_machine import Coded, batches_of, lists_of, seen_by, shapes
from triton.experimental.gluon._runtime import GluonJITFunction

from flashtune.core.code.launching import provided
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import KernelSpec
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions import trained as flex_autograd
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.mods import known
from flashtune.templates.mods.emit import emitted
from flashtune.templates.rendering import render, variant_of

FAMILY, GPU = family("flash_bwd_hopper"), find_target("h200")

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dynamic": {"held": "both", "persistent": "dynamic", "exp_poly": True},
    "early": {"wait_early": True, "persistent": True},
}


def gradients(functions: Functions, sizes: tuple[int, ...], changes: dict[str, Any], seed: int, d: int = 64) -> list[float]:
    """Errors of dQ, dK and dV of (B, Hq, Hkv, N_q, N_kv) on poisoned memory, from the oracle's output and LSE."""
    batch, heads, kv_heads, n_q, n_kv = sizes
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, h, n, d, generator=generator).half() for h, n in ((heads, n_q), (kv_heads, n_kv), (kv_heads, n_kv)))
    dout, dlse = torch.randn(q.shape, generator=generator).half(), torch.randn(q.shape[:3], generator=generator)
    traced, captured = flex_functions._traced(*functions, torch.device("cpu"))
    made = emitted(traced.score, traced.mask, flex_autograd.types_of(captured, [False] * len(captured)), backward=True)
    spec = KernelSpec(direction="bwd", dtype="fp16", d=d, d_v=d, window=False, mask="none", mods=known.keep(made))
    config = FAMILY.default(spec, GPU).replace(**changes)
    assert FAMILY.violated(config, spec, GPU) is None
    module = load_kernel(render(FAMILY, variant_of(FAMILY, spec, config)), "coded")
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = oracle(*doubles, *functions)
    seen = lse.isfinite()
    ((out * dout.double()).sum() + (lse[seen] * dlse.double()[seen]).sum()).backward()
    found = [torch.full_like(x, math.nan) for x in (q, k, v)]
    mods = [x.detach() for x in captured]
    if functions[1] is not None:
        mods.append(lists_of(seen_by(functions[1], batch, heads, n_q, n_kv), (64, 128), of_keys=True))
    tensors = (q, k, v, out.detach().half(), lse.detach().float(), dout, dlse, *found)
    for kernel, grid, args, options in module.launches(*tensors, scale=d**-0.5, mods=mods, **provided(module, q, k) | {"sms": 3}):
        if isinstance(kernel, GluonJITFunction):
            Coded(module, (kernel, grid, args, options), seed=seed).run()
        else:
            kernel[grid](*args, **options)
    return [
        float((ours.double() - one.grad).abs().max() / one.grad.abs().max().clamp(min=1e-3))  # type: ignore[union-attr]
        for ours, one in zip(found, doubles, strict=True)
    ]


def report(functions: Functions, *others: Any) -> list[float] | str:
    """Errors, or what went wrong."""
    try:
        return gradients(functions, *others)
    except Exception:
        return traceback.format_exc()[-3000:]


def main() -> dict[str, Any]:
    """Reports of all shapes and cases of functions."""
    found: dict[str, Any] = {}
    for place, (name, functions) in enumerate(shapes().items()):
        config = list(CONFIGS)[place % len(CONFIGS)]
        found[name] = report(functions, (batches_of(name), 2, 1, 290, 300), CONFIGS[config], place, 128 if config == "plain" else 64)
    for name, case in ((name, case) for name, case in CASES.items() if name not in found):
        functions = case.functions(*(x.detach() for x in case.captured(torch.Generator().manual_seed(5))))
        found[f"case {name}"] = report(functions, (case.heads // 2, case.heads, case.heads // 2, case.n_q, case.n_kv), {}, 1)
    return found
