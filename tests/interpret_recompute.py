"""Runs `recompute` of rendered Hopper modules in Triton's interpreter and prints one JSON list; a test starts it as a child process.

The variable TRITON_INTERPRET=1 has to be set before Triton is imported. Printed is a report for each case: how many tiles had a NaN, how
many are as they were, and the `reason` why it is wrong (empty when right).
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import triton.language as tl
from attention_cases import MARK
from hopper_kernels import launches, problem, rendered

from flashtune.core.passes import Place
from flashtune.core.problem import Features, Problem
from flashtune.tuner.correctness import check, oracle
from flashtune.tuner.inputs import make_inputs

ROWS = 64
"""Rows of the tiles that are computed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A problem, the rows (batch, head, row) whose LSE is NaN, and the number of programs (0: as many as the launch says)."""

    name: str
    problem: Problem
    unsound: tuple[tuple[int, int, int], ...]
    programs: int = 0
    keywords: dict[str, Any] = field(default_factory=dict)
    heads_inside: bool = False


def sized(
    features: Features, n_q: int, n_kv: int, *, batch: int = 1, heads: int = 2, kv_heads: int = 2, d: int = 16, d_v: int = 16
) -> Problem:
    sizes = {"n_q": n_q, "n_kv": n_kv, "batch": batch, "heads": heads, "kv_heads": kv_heads}
    return replace(problem(d, features, d_v=d_v, dtype="fp16"), **sizes)


BAND = Features(causal=True, alignment="bottom_right")
MANY = sized(Features(), 70, 20, heads=40, kv_heads=1)
SPREAD = ((0, 0, 0), (0, 15, 69), (0, 29, 10), (0, 29, 30), (0, 39, 69))
"""2048 rows are looked at together: they end within a tile of the 30th head, with rows to compute on both sides."""

CASES = (
    Case(name="plain", problem=sized(Features(), 150, 170), unsound=((0, 0, 0), (0, 1, 149))),
    Case(name="every row of a tile", problem=sized(Features(), 70, 40), unsound=tuple((0, 1, row) for row in range(64))),
    Case(name="nothing", problem=sized(Features(), 150, 170), unsound=()),
    Case(
        name="causal, shared keys, ragged",
        problem=sized(BAND, 100, 130, batch=2, heads=6, d=40, d_v=24),
        unsound=((0, 1, 99), (1, 5, 63), (1, 2, 64)),
        heads_inside=True,
    ),
    Case(name="rows that see nothing", problem=sized(BAND, 150, 60), unsound=((0, 0, 3), (0, 1, 100))),
    Case(name="window", problem=sized(Features(window=(20, 5)), 200, 180), unsound=((0, 0, 70), (0, 1, 190))),
    Case(name="boolean mask", problem=sized(Features(mask="bool"), 90, 101, batch=2), unsound=((0, 1, 10), (1, 0, 80))),
    Case(name="dropout", problem=sized(Features(dropout=True), 90, 100, batch=2), unsound=((0, 0, 10), (1, 1, 64))),
    Case(name="all is dropped", problem=sized(Features(dropout=True), 90, 100), unsound=((0, 0, 10),), keywords={"dropout_p": 1.0}),
    Case(name="soft cap", problem=sized(Features(softcap=True), 90, 100), unsound=((0, 1, 5),)),
    Case(name="slopes", problem=sized(Features(causal=True, alibi=True), 130, 130), unsound=((0, 1, 129), (0, 0, 64))),
    Case(name="negative scale", problem=sized(Features(), 70, 90), unsound=((0, 1, 5),), keywords={"scale": -0.3}),
    Case(name="more rows than are looked at together", problem=MANY, unsound=SPREAD),
    Case(name="one program for all rows", problem=MANY, unsound=SPREAD, programs=1),
)


def run(case: Case) -> dict[str, object]:
    """What became of one case."""
    p = case.problem
    inputs = make_inputs(p, device="cpu", seed=7, heads_inside=case.heads_inside)
    inputs = replace(inputs, parameters=replace(inputs.parameters, **case.keywords))
    module = rendered(p.spec(), BLOCK_M=64, intra_wg_overlap=0, maximum="first")
    *_, (kernel, grid, arguments, _) = launches(module, inputs)
    assert kernel is module.recompute
    tiles = [(b, h, first) for b in range(p.batch) for h in range(p.heads) for first in range(0, p.n_q, ROWS)]
    wrong = {(b, h, row // ROWS * ROWS) for b, h, row in case.unsound}

    def launch(*_: Any, **__: Any) -> None:
        inputs.out.fill_(MARK)
        inputs.lse.fill_(MARK)
        for place in case.unsound:
            inputs.lse[place] = float("nan")
        kernel[(case.programs,) if case.programs else grid](*arguments)

    expected = oracle(
        inputs, [Place(batch=b, head=h, queries=slice(first, first + ROWS)) for b, h, first in tiles if (b, h, first) in wrong]
    )
    reason = check(launch, inputs, expected).reason
    kept = 0
    for b, h, first in tiles:
        tile = slice(first, first + ROWS)
        kept += bool((inputs.out[b, h, tile] == MARK).all() and (inputs.lse[b, h, tile] == MARK).all())
    return {"name": case.name, "tiles": len(tiles), "wrong": len(wrong), "kept": kept, "programs": grid[0], "reason": reason}


def main() -> None:
    """Run all cases."""
    # A GPU lets this kernel wait for the one before it, which the interpreter can't, and needn't, do.
    tl.extra.cuda.gdc_wait = lambda: None
    print(json.dumps([run(case) for case in CASES]))


if __name__ == "__main__":
    main()
