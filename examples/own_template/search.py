"""A template of one's own: its space is rendered, compiled for an A100, checked in Triton's interpreter, and its time is predicted.

On an A100, flashtune.tuner.searching.Search measures the same family beside the others; CONTRIBUTING.md says how it becomes one of them.
"""

from pathlib import Path

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.templates.cost import predict_us
from flashtune.templates.family import Axis, Constraint, Family
from flashtune.templates.rendering import add_folder, variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.replies import Checked, Compiled

ROWS = Family(
    name="rows",  # rows.py.jinja, beside this file
    axes=(
        Axis(name="BLOCK_M", values=(64, 128), why="query rows to a program"),
        Axis(name="BLOCK_N", values=(32, 64), why="keys to a step"),
        Axis(name="num_warps", values=(4,), why="threads over a tile's rows"),
    ),
    constraints=(Constraint(name="rows_for_warps", holds=lambda c, *_: c.number("BLOCK_M") >= 16 * c.number("num_warps"), why="16 each"),),
    refuses=lambda spec, gpu: None if spec == PLAIN.spec() else "only full attention, fp16, D = 64",
    tried_first=lambda spec, gpu: [Config.of(BLOCK_M=64, BLOCK_N=32, num_warps=4)],
    interpretable=True,
)  # fmt: skip
PLAIN = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=64, d_v=64, dtype="fp16")


def main() -> None:
    """Print a line for each candidate; the first is checked in the interpreter."""
    add_folder(Path(__file__).parent)
    gpu = find_target("a100")
    with Workers(jobs=1) as workers:
        sources = {c: tasks.Source.of(ROWS, variant_of(ROWS, PLAIN.spec(), c)) for c in ROWS.configs(PLAIN.spec(), gpu)}
        for config, source in sources.items():
            found = workers.submit("compile", tasks.compile_candidate, source, PLAIN, gpu, limit_s=60).reply()
            if isinstance(found, Compiled):
                print(
                    f"{config.label()}: {predict_us(config, found.facts, PLAIN, gpu):.0f} us predicted, {found.facts.registers} registers"
                )
            else:
                print(f"{config.label()}: {found.reason}")
        checked = workers.submit("interpret", tasks.interpret_candidate, next(iter(sources.values())), PLAIN, 0, limit_s=120).reply()
    print(f"correct, error {checked.error:.1e}" if isinstance(checked, Checked) else checked.reason)


if __name__ == "__main__":  # its workers import this file
    main()
