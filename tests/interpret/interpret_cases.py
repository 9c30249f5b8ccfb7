"""Cases of attention_cases in Triton's interpreter."""

from attention_cases import CASES, AttentionCase, make_case, written_beside

from flashtune.core.code.launching import launcher
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.templates import Family, family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.verify.correctness import check, everywhere, oracle

GPU = find_target("h200")


def config_for(chosen: Family, problem: Problem, index: int) -> Config:
    """A config for case number `index`: small tiles of changing sizes, and every program order or way to add up splits in turn."""
    spec, rows = problem.spec(), problem.batch * problem.heads * problem.n_q
    space = {axis.name: axis.values for axis in chosen.axes}
    tiles = [(64, 32, 4), (64, 64, 4), (128, 32, 8), (32, 64, 2), (16, 64, 1) if spec.dropout else (32, 16, 2)]
    tiles = [tile for tile in tiles if tile[0] in space["BLOCK_M"] and tile[1] in space["BLOCK_N"]]
    block_m, block_n, num_warps = tiles[index % len(tiles)]
    changes: dict[str, int | str | bool] = {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps}
    if "ORDER" in space:
        changes["ORDER"] = space["ORDER"][index % len(space["ORDER"])]
    if "combine" in space:
        # A kernel that adds up splits has a program for each row: the interpreter takes a second for fifty.
        changes["combine"] = space["combine"][index % 3] if rows <= 50 else "last"
    if "LOAD_V_EARLY" in space:
        changes["LOAD_V_EARLY"] = index % 2 == 0
    return chosen.default(spec, GPU).replace(**changes)


def run(chosen: Family, case: AttentionCase, index: int) -> dict[str, object]:
    """Outcome of one case: whether it is `supported` and `accepted`, and the `reason` why it is wrong (empty when right)."""
    spec = case.problem.spec()
    if chosen.supports(spec, GPU) is not None:
        return {"name": case.name, "supported": False, "accepted": False, "error": 0.0, "reason": ""}
    config = config_for(chosen, case.problem, index)
    module = load_kernel(render(chosen, variant_of(chosen, spec, config)), chosen.name)
    inputs = make_case(case, "cpu")
    accepted = module.accepts(inputs.q, inputs.k, inputs.v, inputs.keywords["mask"])
    report: dict[str, object] = {
        "name": case.name,
        "supported": True,
        "config": config.label(),
        "accepted": accepted,
        "error": 0.0,
        "reason": "",
    }
    if accepted:
        verdict = check(launcher(module), inputs, oracle(inputs, everywhere(case.problem)))
        report |= {"error": verdict.error, "reason": verdict.reason}
        if not verdict.reason and written_beside(inputs):
            report["reason"] = "memory beside the output was written"
    return report


def main(name: str, names: list[str]) -> list[dict[str, object]]:
    """Outcomes of the named cases of a family."""
    return [run(family(name), case, index) for index, case in enumerate(CASES) if case.name in names]
