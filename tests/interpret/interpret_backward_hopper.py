"""flash_bwd_hopper without a GPU: its plain kernels in Triton's interpreter and the warp-specialised one in `hopper_emulator`."""

from collections.abc import Callable
from typing import Any

import torch
from hopper_emulator import Machine
from triton.experimental.gluon._runtime import GluonJITFunction

from flashtune.core.code.launching import provided
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.family import Family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.cases import make_extreme
from flashtune.tuner.verify.correctness import check, everywhere, oracle
from flashtune.tuner.verify.inputs import Inputs, make_inputs

FAMILY, GPU = family("flash_bwd_hopper"), find_target("h200")


def problem(features: Features, **changes: int | str) -> Problem:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "n_q": 90, "n_kv": 150, "d": 64, "d_v": 64, "dtype": "fp16"} | changes
    return Problem(**sizes, features=features, direction="bwd")  # type: ignore[arg-type]


CASES: dict[str, tuple[Problem, dict[str, Any]]] = {
    # The first 128 rows of extreme inputs have smaller scores.
    "full": (problem(Features(), n_q=140), {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers"}),
    # More queries than keys: the first rows see nothing.
    "causal": (
        problem(Features(causal=True, alignment="bottom_right"), n_q=270, n_kv=130, d=128, d_v=72),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "section": 4, "wait_early": True},
    ),
    "window": (
        problem(Features(window=(70, 30), sinks=True), n_q=190, n_kv=260, d=40, d_v=40, heads=4, kv_heads=2),
        {"BLOCK_M": 64, "num_stages": 3, "dq_sums": "registers", "section": 2, "held": "both", "persistent": True},
    ),
    "dynamic": (
        problem(Features(dropout=True), n_q=140),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "persistent": "dynamic", "held": "both", "exp_poly": True},
    ),
    "everything": (
        problem(Features(window=(70, 30), mask="bool", dropout=True, softcap=True, alibi=True, dslopes=True), n_q=150, n_kv=140),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "section": 1, "held": "k", "exp_poly": True, "wait_early": True},
    ),
    "bias": (problem(Features(causal=True, mask="bias"), heads=4, kv_heads=2), {"BLOCK_M": 64, "num_stages": 1, "dq_sums": "registers"}),
    # Products of 80 columns of tiles of 128, and a last warpgroup with fewer columns of dQ.
    "pieces": (
        problem(Features(causal=True, dropout=True, alignment="bottom_right"), n_q=150, n_kv=200, d=80, d_v=80, heads=4, kv_heads=2),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "section": 2, "held": "both", "wait_early": True},
    ),
    "pieces of keys": (
        problem(Features(), d=72, d_v=64),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "persistent": True, "held": "k"},
    ),
    # Products of 48 columns of tiles of 64, of which 32 are held.
    "narrow pieces": (
        problem(Features(causal=True), n_q=150, n_kv=200, d=40, d_v=40, heads=4, kv_heads=2),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "section": 2, "held": "both", "persistent": "dynamic"},
    ),
    "three pieces": (
        problem(Features(), d=112, d_v=80),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "held": "v", "wait_early": True},
    ),
    # Heads of fewer columns than a tile has, and of more in values than in keys.
    "small heads": (
        problem(Features(causal=True, dropout=True), d=32, d_v=24, n_q=150, n_kv=200, heads=4, kv_heads=2),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "held": "both", "persistent": "dynamic"},
    ),
    "smallest heads": (
        problem(Features(mask="bias", dbias=True), d=8, d_v=16, n_kv=130),
        {"BLOCK_M": 64, "num_stages": 1, "dq_sums": "registers"},
    ),
    "wider values": (
        problem(Features(causal=True), d=40, d_v=128, dtype="bf16"),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "wait_early": True},
    ),
    # Divisions of a group's queries that begin and end within a head, some of which see no key, and sums in two pieces.
    "divided": (
        problem(Features(causal=True, dropout=True, alignment="bottom_right"), n_q=330, n_kv=200, d=80, d_v=72, heads=3),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "registers", "section": 2, "held": "both", "wait_early": True, "divided_queries": True},
    ),
    "divided window": (
        problem(Features(window=(70, 30), mask="bool", alibi=True), n_q=290, n_kv=260, batch=2, heads=2, kv_heads=2),
        {"BLOCK_M": 64, "num_stages": 3, "dq_sums": "registers", "section": 4, "divided_queries": True},
    ),
    "divided bias": (
        problem(Features(mask="bias"), n_q=270, dtype="bf16", d=112, d_v=112),
        {"BLOCK_M": 64, "num_stages": 1, "dq_sums": "registers", "divided_queries": True},
    ),
    # All keys in one tile, so that nothing of dQ is added up: parts by columns, the last of fewer, and tile after tile.
    "stored": (
        problem(Features(causal=True, dropout=True), n_q=150, n_kv=100, d=80, d_v=72, heads=4, kv_heads=2, batch=2),
        {"BLOCK_M": 64, "num_stages": 1, "dq_sums": "own", "held": "both", "persistent": "dynamic"},
    ),
    "stored masked": (
        problem(Features(mask="bool", softcap=True, alibi=True, dslopes=True), n_q=200, n_kv=77, batch=2),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "own", "persistent": True},
    ),
    "stored divided": (
        problem(Features(mask="bias", dbias=True), n_q=330, n_kv=77, d=40, d_v=40, heads=4, kv_heads=2),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "own", "divided_queries": True},
    ),
    # Queries that see no key, and more keys than a tile has: sums after all.
    "stored unseen": (
        problem(Features(causal=True, alignment="bottom_right"), n_q=290, n_kv=120, d=72, d_v=72, dtype="bf16"),
        {"BLOCK_M": 64, "num_stages": 1, "dq_sums": "own", "section": 4},
    ),
    "stored of more": (
        problem(Features(window=(70, 30), sinks=True), n_q=150, n_kv=140),
        {"BLOCK_M": 64, "num_stages": 2, "dq_sums": "own", "held": "k", "wait_early": True, "persistent": True},
    ),
    "left": (
        problem(Features(causal=True, window=(40, 0)), d=96, d_v=96, dtype="bf16", kv_heads=2),
        {"BLOCK_M": 64, "num_stages": 1, "dq_sums": "registers", "section": 16, "persistent": "dynamic", "held": "v"},
    ),
}


def launcher_of(p: Problem, changes: dict[str, Any], seed: int, chosen: Family = FAMILY) -> Callable[..., None]:
    """`launch` of a rendered module, in an order of events that `seed` draws."""
    config = chosen.default(p.spec(), GPU).replace(**changes)
    broken = chosen.violated(config, p.spec(), GPU)
    assert broken is None, broken
    module = load_kernel(render(chosen, variant_of(chosen, p.spec(), config)), chosen.name)

    # Fewer multiprocessors than tiles, so that persistent programs have several, and not all as many.
    tiles = -(-p.n_kv // 128) * p.batch * p.kv_heads
    # More where tiles are divided, by a number that their blocks aren't divided by.
    sms = 5 * tiles if changes.get("divided_queries") else max(1, tiles - 1)

    def launch(q: torch.Tensor, k: torch.Tensor, *tensors: torch.Tensor | None, **settings: Any) -> None:
        assert module.accepts(q, k, tensors[0], settings["mask"])
        for kernel, grid, args, options in module.launches(q, k, *tensors, **provided(module, q, k) | {"sms": sms}, **settings):
            if isinstance(kernel, GluonJITFunction):
                Machine(module, (kernel, grid, args, options), seed=seed).run()
            else:
                kernel[grid](*args, **options)

    return launch


def strided(bias: torch.Tensor) -> list[torch.Tensor]:
    """Biases of the same shape that the copy engine can't take as they are: repeated rows, repeated columns, turned, odd strides."""
    batch, heads, n_q, n_kv = bias.shape
    odd = torch.empty(batch, heads, n_q, n_kv + 1, dtype=bias.dtype)[..., :n_kv].copy_(bias)
    turned = bias.transpose(2, 3).contiguous().transpose(2, 3)
    return [bias[:, :, 3:4].expand_as(bias), bias[..., 5:6].expand_as(bias), bias[:1, :1, :1].expand_as(bias), turned, odd]


def same_of_strides(launch: Callable[..., None], inputs: Inputs, mask: torch.Tensor) -> bool:
    """True if a bias gives the gradients of a contiguous one."""
    found = []
    for one in (mask, mask.contiguous()):
        inputs.poison()
        launch(*inputs.operands.values(), **inputs.keywords | {"mask": one})
        found.append([inputs.operands[name].clone() for name in ("dq", "dk", "dv")])
    return all(torch.allclose(*pair, atol=1e-3) for pair in zip(*found, strict=True))


def main() -> dict[str, object]:
    """Check the cases, then what they can't show, and print what was found."""
    report: dict[str, object] = {}
    for seed, (name, (p, changes)) in enumerate(CASES.items()):
        launch = launcher_of(p, changes, seed)
        inputs = make_inputs(p, device="cpu", seed=seed, heads_inside=seed % 2 == 1)
        report[name] = check(launch, inputs, oracle(inputs, everywhere(p))).reason
        if name == "bias":
            report["strided bias"] = [same_of_strides(launch, inputs, mask) for mask in strided(inputs.keywords["mask"])]
        if name in ("dynamic", "pieces", "divided", "stored"):
            before = {written.name: inputs.operands[written.name].clone() for written in p.contract.written}
            inputs.poison()
            launch(*{**inputs.operands, "dk": None, "dv": None}.values(), **inputs.keywords)
            report[f"{name}: dq alone"] = torch.allclose(inputs.operands["dq"], before["dq"], atol=1e-3)
            launch(*{**inputs.operands, "dq": None}.values(), **inputs.keywords)
            report[f"{name}: dk and dv alone"] = all(torch.equal(inputs.operands[name], before[name]) for name in ("dk", "dv"))
            if name == "dynamic":
                inputs.operands["dlse"].zero_()
                launch(*{**inputs.operands, "dlse": None}.values(), **inputs.keywords)
                wanted = inputs.operands["dk"].clone()
                launch(*inputs.operands.values(), **inputs.keywords)
                report["no gradient of the lse"] = torch.equal(inputs.operands["dk"], wanted)
            # Scores around 150 and -150: past the last key, where they are 0, exponentials overflow.
            make_extreme(inputs)
            report[f"{name}: extreme"] = check(launch, inputs, oracle(inputs, everywhere(p))).reason
    return report
