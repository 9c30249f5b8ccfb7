"""Random decoding steps of flash_decode in Triton's interpreter; see test_templates_decode."""

import functools
import random
import sys
from typing import Any

import torch

from flashtune.core.code import launching
from flashtune.core.code.launching import launcher, sms_of
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.band import ALIGNMENTS
from flashtune.core.problems.problem import MASK_KINDS, Features, Problem
from flashtune.templates import family
from flashtune.templates.launches import pointers
from flashtune.templates.launches.pointers import split_count
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.correctness import check, everywhere, oracle
from flashtune.tuner.verify.inputs import make_inputs


class PoisonedTorch:
    """torch, but new memory holds NaN: a part that is read must have been written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype, device=device)


def problem_of(draw: random.Random) -> Problem:
    side = draw.choice([None, 0, 3, 60])
    features = Features(
        causal=draw.random() < 0.4,
        alignment=draw.choice(ALIGNMENTS),
        window=draw.choice([None, None, (side, draw.choice([None, 0, 20]))]),
        mask=draw.choice([*MASK_KINDS, "none"]),
        softcap=draw.random() < 0.2,
        alibi=draw.random() < 0.2,
        sinks=draw.random() < 0.3,
    )
    kv_heads = draw.randint(1, 2)
    return Problem(
        batch=draw.randint(1, 2),
        heads=kv_heads * draw.randint(1, 3),
        kv_heads=kv_heads,
        n_q=draw.randint(1, 9),
        n_kv=draw.choice([1, 31, 64, draw.randint(1, 200)]),
        d=draw.choice([16, 32, 40]),
        d_v=draw.choice([16, 24]),
        dtype=draw.choice(["fp16", "fp32", "fp8"]),
        features=features,
    )


def run(draw: random.Random) -> dict[str, object]:
    problem, chosen = problem_of(draw), family("flash_decode")
    spec, target = problem.spec(), find_target("h200")
    splits = draw.choice([0, 1, 2, 3, 40])
    config = chosen.default(spec, target).replace(
        BLOCK_M=draw.choice([16, 32, 64]), BLOCK_N=draw.choice([32, 64]), combine=draw.choice(["kernel", "last", "rows"])
    )
    if draw.random() < 0.3 and chosen.violated(config.replace(loads="tma"), spec, target) is None:
        config = config.replace(loads="tma")
    module = load_kernel(render(chosen, variant_of(chosen, spec, config)), chosen.name)
    inputs = make_inputs(problem, device="cpu", seed=draw.randint(0, 2**30), heads_inside=draw.random() < 0.5)
    counts = torch.zeros(1000, dtype=torch.int32)
    # Scratch memory is poisoned, and the number of splits may be any.
    launching.torch = PoisonedTorch()  # type: ignore[attr-defined]
    pointers.split_count = (lambda blocks, tiles, programs: splits) if splits else split_count
    label = f"{problem.label()} b{problem.batch}h{problem.heads} splits={splits} {config.label()}"
    if not module.accepts(inputs.q, inputs.k, inputs.v, inputs.keywords["mask"]):
        return {"label": label, "refused": True}
    launch = functools.partial(launcher(module), sms=sms_of(torch.device("cpu")), counts=counts)
    expected = oracle(inputs, everywhere(problem))
    # Twice, since the first launch has to leave the counts as it found them.
    reasons = [check(launch, inputs, expected).reason for _ in range(2)]
    empty = sum(int(torch.isinf(want.values["lse"]).sum()) for want in expected)
    return {"label": label, "refused": False, "reasons": reasons, "counts": int(counts.abs().sum()), "empty_rows": empty}


def main(count: int, seed: int) -> list[dict[str, object]]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        # A module of its own for each, because it is changed.
        found.append(run(draw))
        for name in [name for name in sys.modules if name.startswith("flashtune_rendered_")]:
            del sys.modules[name]
    return found
