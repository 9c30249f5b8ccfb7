"""Planted template families for fault tests: one that is right, and ones that are wrong in every way that a candidate can be."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from jinja2 import DictLoader

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Outcome, SearchResult
from flashtune.core.system.errors import FlashtuneError
from flashtune.templates.family import Axis, Family
from flashtune.tuner.children.workers import Limits
from flashtune.tuner.search.plan import SearchPlan, Stage

PLANTED_PROBLEM = Problem(batch=1, heads=2, kv_heads=2, n_q=64, n_kv=64, d=16, d_v=16, dtype="fp32")
PATIENT = Limits(compile_s=3600.0, interpret_s=3600.0)
"""Limits that no machine is too slow for; a test of hangs sets the one that it is about."""

RIGHT = '''
import torch
import triton
import triton.language as tl


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    heads, group, n_q, n_kv, scale, D: tl.constexpr, BLOCK: tl.constexpr,
):
    """64 query rows of one head at a time: short, and right for full attention on contiguous tensors."""
    program = tl.program_id(0)
    tiles = tl.cdiv(n_q, 64)
    index, rows = program // tiles, program % tiles * 64 + tl.arange(0, 64)  # [64]
    batch, head = index // heads, index % heads
    k_ptr += batch * stride_kb + head // group * stride_kh
    v_ptr += batch * stride_vb + head // group * stride_vh
    offs_d = tl.arange(0, D)  # [D]
    inside = (rows < n_q)[:, None]
    q_tile = tl.load(q_ptr + batch * stride_qb + head * stride_qh + rows[:, None] * stride_qm + offs_d[None, :], mask=inside)  # [64, D]
    row_max = tl.full([64], float("-inf"), tl.float32)  # [64]
    row_sum = tl.zeros([64], tl.float32)  # [64]
    acc = tl.zeros([64, D], tl.float32)  # [64, D]
    for start in range(0, n_kv, BLOCK):
        offs_n = start + tl.arange(0, BLOCK)  # [BLOCK]
        kept = offs_n < n_kv
        k_tile = tl.load(k_ptr + offs_n[:, None] * stride_kn + offs_d[None, :], mask=kept[:, None], other=0.0)  # [BLOCK, D]
        v_tile = tl.load(v_ptr + offs_n[:, None] * stride_vn + offs_d[None, :], mask=kept[:, None], other=0.0)  # [BLOCK, D]
        scores = tl.where(kept[None, :], tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale, float("-inf"))  # [64, BLOCK]
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        probs = tl.exp(scores - new_max[:, None])  # [64, BLOCK]
        alpha = tl.exp(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(probs, 1)
        acc = tl.dot(probs, v_tile, acc * alpha[:, None], input_precision="ieee")
        row_max = new_max
    result = acc / row_sum[:, None]
    tl.store(out_ptr + batch * stride_ob + head * stride_oh + rows[:, None] * stride_om + offs_d[None, :], result, mask=inside)
    tl.store(lse_ptr + index * n_q + rows, row_max + tl.log(row_sum), mask=rows < n_q)


def accepts(q, k, v, mask):
    return True


def counts_needed(q, k):
    return 0


def launches(q, k, v, out, lse, *, mask, scale, diagonal, window_left, window_right, softcap, dropout_p, seed, offset, sms, counts):
    batch, heads, n_q, d = q.shape
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    args = (q, k, v, out, lse, *strides, heads, heads // k.shape[1], n_q, k.shape[2], scale, d, 64)
    return [(attention_forward, (batch * heads * triton.cdiv(n_q, 64),), args, {"num_warps": 4})]


def launch(*tensors, **words):
    for kernel, grid, args, options in launches(*tensors, **words):
        kernel[grid](*args, **options)
'''

_LAUNCHED = "    batch, heads, n_q, d = q.shape\n"
"""Where a launch begins; what only compiles comes here with meta tensors."""

_EDITS = {
    "right": ("", ""),
    "hang": (_LAUNCHED, "    while q.device.type != 'meta':\n        pass\n" + _LAUNCHED),
    "hang_on_gpu": (
        "    for start in range(0, n_kv, BLOCK):",
        "    while tl.load(lse_ptr) != 1234.5:\n        tl.store(lse_ptr, 0.0)\n    for start in range(0, n_kv, BLOCK):",
    ),
    "crash": (_LAUNCHED, "    if q.device.type != 'meta':\n        import os\n\n        os.abort()\n" + _LAUNCHED),
    "wrong": ("acc / row_sum[:, None]", "acc / row_sum[:, None] * 1.05"),
    "unwritten": ("row_max + tl.log(row_sum), mask=rows < n_q", "row_max + tl.log(row_sum), mask=rows < n_q - 1"),
    "sticky": ("    offs_d = tl.arange(0, D)  # [D]", "    offs_d = tl.arange(0, D) + (1 << 40)  # [D]"),
    "raises": (_LAUNCHED, "    if q.device.type != 'meta':\n        raise RuntimeError('planted')\n" + _LAUNCHED),
    "broken": ("    row_max = tl.full(", "    row_max = undefined_name + tl.full("),
    "unrendered": ("import torch\n", "import torch\n{{ missing.name }}\n"),
    "compiler_crash": (
        "def accepts(",
        "import os\n\nif not __import__('triton').knobs.runtime.interpret:\n    os.abort()\n\n\ndef accepts(",
    ),
}


def planted_family(kind: str, choices: int = 1, *, paths: bool = True) -> Family:
    """A family that goes wrong in the way `kind` says, with `choices` configs, each (with `paths`) checked for itself."""
    return Family(
        name=f"planted_{kind}",
        axes=(
            Axis(name="CHOICE", values=tuple(range(choices)), why="tells configs apart"),
            Axis(name="BLOCK_M", values=(1,), why="rows"),
            Axis(name="BLOCK_N", values=(64,), why="keys"),
        ),
        constraints=(),
        refuses=lambda spec, target: None,
        tried_first=lambda spec, target: [Config.of(CHOICE=0, BLOCK_M=1, BLOCK_N=64)],
        interpretable=True,
        path_axes=("CHOICE",) if paths else (),
    )


def planted_plan(problems: Sequence[Problem], *, choices: int = 4, trials: int = 5) -> SearchPlan:
    """A predicted search of right candidates and of ones that don't compile; one code path, which is checked once for all of them."""
    right, broken = planted_family("right", choices, paths=False), planted_family("broken", choices // 2, paths=False)
    return SearchPlan(
        target=find_target("a100"),
        problems=tuple(problems),
        families={right.name: right, broken.name: broken},
        source="predicted",
        trials=trials,
        sampler="random",
        seed=1,
        jobs=2,
        limits=PATIENT,
    )


class HereAndNow:
    """Stands in for `Workers` where a test is of what is kept and not of processes: tasks are run as they are handed over."""

    def __init__(self, *, jobs: int, limits: Limits | None = None, devices: Sequence[str] = ()) -> None:
        self.limits = limits or Limits()

    def __enter__(self) -> "HereAndNow":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, crew: str, task: Callable[..., Any], *arguments: Any, limit_s: float, device: int = 0) -> Any:
        reply = task(*arguments)
        return SimpleNamespace(reply=lambda: reply, forget=lambda: None)

    def free_compilers(self) -> int:
        return 0


class Listener:
    """A listener that keeps what it hears; `stop_after` trials it interrupts the search as Ctrl-C does."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.trials: list[Outcome] = []
        self.stages: list[tuple[Problem, Stage, int]] = []
        self.resumed: list[int] = []
        self.known: list[Problem] = []
        self.unsaved: list[Problem] = []
        self.stop_after = stop_after

    def problem_started(self, problem: Problem, index: int, total: int, resumed: int) -> None:
        self.resumed.append(resumed)

    def stage_started(self, problem: Problem, stage: Stage, known: int) -> None:
        self.stages.append((problem, stage, known))

    def trial_finished(self, problem: Problem, outcome: Outcome, incumbent: Outcome | None) -> None:
        self.trials.append(outcome)
        if self.stop_after is not None and len(self.trials) == self.stop_after:
            raise KeyboardInterrupt

    def problem_finished(self, result: SearchResult) -> None:
        pass

    def problem_known(self, result: SearchResult, index: int, total: int) -> None:
        self.known.append(result.problem)

    def save_failed(self, problem: Problem, error: FlashtuneError) -> None:
        self.unsaved.append(problem)


def planted_templates() -> DictLoader:
    """The planted texts as templates; the variant is named in them, so that every candidate has a file of its own."""
    texts = {}
    for kind, (before, after) in _EDITS.items():
        assert before in RIGHT, kind
        texts[f"planted_{kind}.py.jinja"] = "# {{ variant.id }}\n" + (RIGHT.replace(before, after, 1) if before else RIGHT)
    return DictLoader(texts)
