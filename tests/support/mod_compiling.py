"""Machine code of masks and scores as code for a GPU that isn't here, with meta tensors in place of a call's."""

from typing import Any

import torch
from mod_cases import CASES, OPERATIONS, Case

from flashtune.core.code import launching
from flashtune.core.code.binaries import Binary
from flashtune.core.code.compiled import from_compiled
from flashtune.core.code.launching import LoadedKernel, Plan, operand
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import KernelSpec, Variant
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions import trained as flex_autograd
from flashtune.dispatch.plans import kernels
from flashtune.templates import family
from flashtune.templates.launches.common import cdiv
from flashtune.templates.launches.mods import kinds_launch, mask_launch, sorting_launch
from flashtune.templates.loading import load_kernel
from flashtune.templates.mods import known
from flashtune.templates.mods.emit import emitted
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children.compile import compiling_for

GPU = "h100"


def planned(name: str, direction: Any, n: int = 1056, template: str = "") -> tuple[Variant, str, LoadedKernel, list[Plan]]:
    """The variant of the functions of a case, of operations, or of a case's score under the mask of another, its text, its kernels, and all
    launches of a call with `n` queries and keys, of the family with plain pointers or another one."""
    name, _, under = name.partition(" under ")
    case = CASES[name] if name in CASES else Case(lambda: (OPERATIONS[name], None))
    score, mask = case.functions(*case.captured(torch.Generator()))
    functions, captured = flex_functions._traced(score, CASES[under].functions()[1] if under else mask, torch.device("cpu"))
    types = flex_autograd.types_of(captured, [x.requires_grad for x in captured])
    made = emitted(functions.score, functions.mask, types, backward=direction == "bwd")
    kind, target = family(template or f"flash_{direction}"), find_target(GPU)
    spec = KernelSpec(direction=direction, dtype="bf16", d=64, d_v=64, window=False, mask="none", mods=known.keep(made))
    variant = variant_of(kind, spec, kind.default(spec, target))
    text = render(kind, variant)
    module = load_kernel(text, f"mods_{variant.id}")
    q, k, v, out, dout, dq = (torch.empty((2, 4, n, 64), dtype=torch.bfloat16, device="meta") for _ in range(6))
    lse = torch.empty((2, 4, n), device="meta")
    operands = (q, k, v, out, lse) if direction == "fwd" else (q, k, v, out, lse, dout, None, dq, dq, dq)
    tensors = [x.detach().to("meta") for x in captured]
    lists = [torch.empty((2, 4, cdiv(n, 64), cdiv(n, 64) + 2), dtype=torch.int32, device="meta")] * (len(operands) // 5)
    sums = [torch.empty(captured[place].shape, device="meta") for place in made.trained]
    words = {"scale": 0.1, "mods": (*tensors, *lists * bool(made.mask), *sums), **launching.provided(module, q, k), "sms": 132}
    assert module.host is not None
    plans = [launching.keyword_plan(module.host, operands, words)]
    if made.mask:
        kinds = torch.empty((1, 1, cdiv(n, 128), cdiv(n, 64)), dtype=torch.int8, device="meta")
        launch = kinds_launch(operand(0, kinds), tuple(operand(1 + i, x) for i, x in enumerate(tensors)), n, n, (128, 64))
        plans.append(Plan([launch], [kinds, *tensors], []))
        number, place, made_of = (torch.empty(size, dtype=torch.int32, device="meta") for size in ((1, 1, 9), (1, 1, 9, 9), (1, 9, 11)))
        plans.append(Plan([sorting_launch(operand(0, kinds), operand(1, made_of), of_keys=False)], [kinds, made_of], []))
        given = [number, place, number, place]
        launch = mask_launch(tuple(operand(i, x) for i, x in enumerate(given)), operand(4, made_of), (1, 2))
        plans.append(Plan([launch], [*given, made_of], []))
    return variant, text, module, plans


def compiled(module: LoadedKernel, plans: list[Plan]) -> list[tuple[Binary, bytes]]:
    """The machine code of every launch."""
    found = []
    with compiling_for(find_target(GPU)):
        for plan in plans:
            arguments = launching.Arguments(plan)
            for launch in plan.launches:
                words = launching.compiler_options(launch.options)
                kernel = getattr(module, launch.kernel)
                found.append(from_compiled(kernel.warmup(*arguments.of(launch), grid=launch.grid, **words)))
    return found


def main(*words: str) -> None:
    """Print for each case and number of queries and keys (NAME DIRECTION N ...) how many launches find code in the user's cache, of how
    many."""
    for name, direction, n in zip(words[::3], words[1::3], words[2::3], strict=True):
        variant, _, _, plans = planned(name, direction, int(n))
        manifest = kernels.manifest(variant, find_target(GPU).arch)
        launches = [launch for plan in plans for launch in plan.launches]
        print(sum(manifest is not None and manifest.matching(x.kernel, x.arguments) is not None for x in launches), len(launches))
