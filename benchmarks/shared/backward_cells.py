"""Cells of the backward pass and their peers, run on the GPU in child processes: gradients, errors and times."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.shared import cells as forward_cells
from benchmarks.shared import flash_attention_4
from benchmarks.shared.cells import Cell, Group, problem_of
from benchmarks.shared.peers import NOT_EXPRESSED, runnable, words_of
from benchmarks.shared.random_shapes import Kind, random_problems
from benchmarks.shared.searches import shipped
from flashtune import dispatch
from flashtune.core.code.launching import launcher
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Measurement
from flashtune.dispatch import Explanation
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import variant_of
from flashtune.tuner.children.start import withdraw
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.machine import local_gpu
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.timing.stopwatch import Stopwatch
from flashtune.tuner.verify.correctness import everywhere, oracle, places
from flashtune.tuner.verify.distributions import redistribute
from flashtune.tuner.verify.inputs import Inputs, make_inputs

OURS, FA4, FA2_REPEATABLE, FA4_REPEATABLE = "flashtune", "fa4", "fa2 deterministic", "fa4 deterministic"
LENGTHS = (512, 1024, 4096, 16384)
RANDOM: Group = "unprepared"
"""Group of random shapes, and of combined features: dispatch chooses as for users."""
STEP, DEFAULT_STEP = "training step", "default's training step"
"""Whole calls with their gradients of RANDOM cells, by dispatch and by torch's default, the host included."""
DETERMINISTIC: Group = "deterministic"
"""Group of plain cells whose every call must write the same bits."""
GROUPS: tuple[Group, ...] = ("plain", DETERMINISTIC, "features", "scores")

FEATURES: dict[str, Features] = {
    **forward_cells.FEATURES,
    "bias gradient": Features(mask="bias", dbias=True),
    "slopes gradient": Features(causal=True, alibi=True, dslopes=True),
}
SCORES = ("sink+11", "drift-14", "deviation-8", "misled-10%")
"""Distributions of scores that a feature cell is also run on, plain and causal."""

MANY_ROWS = 4096

Run = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Kernel that serves ours, each peer's errors of dQ, dK and dV in the norm, and reasons of those that don't run in `notes`."""

    kind: str = ""
    variant: str | None = None
    reason: str = ""
    errors: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def cells(groups: tuple[Group, ...]) -> list[Cell]:
    """The cells of these groups: plain, deterministic, features, scores."""
    found = []
    for causal in (False, True):
        case = "causal" if causal else "full"
        for d in (64, 128, 256):
            of_groups: dict[Group, tuple[int, ...]] = {"plain": LENGTHS, DETERMINISTIC: LENGTHS[1:]}
            for group, lengths in of_groups.items():
                found += [Cell(group=group, case=case, problem=_trained(d, n, Features(causal=causal))) for n in lengths]
    for d in (64, 128):
        for case, features in FEATURES.items():
            found.append(Cell(group="features", case=case, problem=_trained(d, 4096, features, sharing=4 if case == "gqa" else 1)))
        for scores in SCORES:
            found.append(Cell(group="scores", case=scores, problem=_trained(d, 4096, Features(causal=True)), scores=scores))
    return [cell for cell in found if cell.group in groups]


def _trained(d: int, n: int, features: Features, *, sharing: int = 1) -> Problem:
    return replace(problem_of(d, n, features, sharing=sharing), direction="bwd")


def random_cells(count: int, *, seed: int, gpu: str, kind: Kind = "training") -> list[Cell]:
    """Backwards of random shapes that have no record."""
    return random_problems(count, seed=seed, gpu=gpu, known=[record.key for record in shipped()], kind=kind)


COMBINED = (
    Features(causal=True, sinks=True),
    Features(causal=True, mask="bool", sinks=True),
    Features(causal=True, mask="bool", window=(1024, 0)),
    Features(mask="bool", alibi=True),
    Features(causal=True, window=(1024, 0), alibi=True),
    Features(mask="bias", dropout=True),
    Features(mask="bias", dbias=True, dropout=True),
    Features(causal=True, alibi=True, dropout=True),
)
"""Features that models train with together and that no record has: padded batches, and dropout beside a bias."""


def combined_cells() -> list[Cell]:
    """Backwards with several features at once."""
    problems = [_trained(d, 2048, features) for d in (64, 128, 160, 256) for features in COMBINED]
    return [Cell(group=RANDOM, case=problem.label(), problem=problem) for problem in problems]


def start_as_user() -> None:
    """Prepare a child process in which dispatch chooses as for users."""
    withdraw()
    flash_attention_4.keep_compiled()


def start() -> None:
    """Prepare a child process: silent, killable, and with kernels allowed that were never measured, which the table names."""
    withdraw()
    os.environ["FLASHTUNE_UNMEASURED"] = "1"


def inputs_of(cell: Cell, seed: int) -> Inputs:
    """Random inputs on the GPU; no gradient flows to the LSE, which peers don't return."""
    inputs = make_inputs(cell.problem, device="cuda", seed=seed)
    redistribute(inputs, cell.scores or "random", seed=seed)
    inputs.operands["dlse"].zero_()
    return inputs


def runs_of(cell: Cell, inputs: Inputs) -> tuple[dict[str, Run], dict[str, str], Explanation]:
    """Ours and the peers that ran once, by name; reasons of the others; and the choice that serves ours."""
    served = served_in_call(inputs) if cell.group == RANDOM else served_by(cell)
    makers: dict[str, Callable[[], Any]] = {OURS: partial(ours, served, inputs)}
    makers |= {FA4: partial(fa4, inputs, False), FA4_REPEATABLE: partial(fa4, inputs, True)}
    makers |= {name: partial(pytorch_call, inputs, name) for name in ("cudnn", "flash", "efficient")}
    if cell.group == DETERMINISTIC:
        makers = {name: makers[name] for name in (OURS, FA4_REPEATABLE)} | {FA2_REPEATABLE: partial(fa2_repeatable, inputs)}
    if cell.group == RANDOM:
        makers |= {"default": partial(pytorch_call, inputs), STEP: partial(step, inputs)}
        makers |= {DEFAULT_STEP: partial(pytorch_call, inputs, step=True)}
    runs, notes = runnable(makers)
    if notes.get(OURS, NOT_EXPRESSED) != NOT_EXPRESSED:
        raise RuntimeError(f"ours: {notes[OURS]}")
    return runs, notes, served


@contextmanager
def same_bits() -> Iterator[None]:
    """Torch's deterministic mode, without the filling of new tensors that it brings."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def served_by(cell: Cell) -> Explanation:
    """Dispatch's choice for a cell."""
    with same_bits() if cell.group == DETERMINISTIC else nullcontext():
        return dispatch.explain_problem(cell.problem, here())


def fa2_repeatable(inputs: Inputs) -> Run | None:
    """FlashAttention-2's gradients as torch runs it in its deterministic mode."""
    call = pytorch_call(inputs, "flash")

    def run() -> object:
        assert call is not None
        with same_bits():
            return call()

    return None if call is None else run


def here() -> str:
    """This machine's GPU as records name it."""
    gpu = local_gpu()
    assert gpu is not None and gpu.target is not None, "needs a GPU that the table knows"
    return gpu.target.slug


def ours(served: Explanation, inputs: Inputs) -> Run | None:
    """The launches of the kernel that serves, without what dispatch does around them, as in a race; torch's gradients where it serves."""
    if served.template is None:
        return pytorch_call(inputs)
    spec = inputs.problem.spec()
    chosen = family(served.template)
    config = served.config or chosen.default(spec, find_target(here()))
    source = Source.of(chosen, variant_of(chosen, spec, config))
    launch = launcher(load_kernel(source.text, source.stem))
    arguments = {**inputs.operands, "dlse": None}
    written = [inputs.operands[operand.name] for operand in inputs.problem.contract.written]

    def run() -> tuple[torch.Tensor, ...]:
        launch(*arguments.values(), **inputs.keywords)
        return tuple(written)

    return run


def served_in_call(inputs: Inputs) -> Explanation:
    """Dispatch's choice for the gradients of the very call that `step` makes, whose dropout has a seed."""
    found = dispatch.explain(*leaves_of(inputs), **words_of(inputs))
    return found.backward or dataclasses.replace(found, kind="framework", template=None, variant_id=None, config=None)


def leaves_of(inputs: Inputs) -> list[torch.Tensor]:
    """Queries, keys and values that require gradients."""
    return [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


def step(inputs: Inputs) -> Run:
    """A call of ours and its gradients, as a model's training makes them."""
    leaves, words = leaves_of(inputs), words_of(inputs)

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(dispatch.attention(*leaves, **words), leaves, inputs.operands["dout"])

    return run


def fa4(inputs: Inputs, deterministic: bool) -> Run | None:
    """FlashAttention-4's gradients, where it is installed and has the features."""
    words = flash_attention_4.words_of(inputs.problem, inputs.parameters)
    if words is None:
        return None
    leaves = [x.transpose(1, 2).contiguous().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = flash_attention_4.attend(*leaves, {**words, "deterministic": deterministic})
    dout = inputs.operands["dout"].transpose(1, 2).contiguous()
    assert out.shape == dout.shape
    return lambda: tuple(x.transpose(1, 2) for x in torch.autograd.grad(out, leaves, dout, retain_graph=True))


def check_cell(cell: Cell, seed: int) -> Checked:
    """Run everything once and compare with the float64 oracle; dropout's pairs are ours alone."""
    inputs, p = inputs_of(cell, seed), cell.problem
    runs, notes, served = runs_of(cell, inputs)
    where = everywhere(p) if p.batch * p.heads * p.n_q <= MANY_ROWS else places(p, seed)
    expected, errors = oracle(inputs, where), {}
    for name, run in runs.items():
        if name == DEFAULT_STEP or (p.features.dropout and name != STEP and (name != OURS or served.template is None)):
            continue
        found = dict(zip([operand.name for operand in p.contract.written], run(), strict=False))
        errors[name] = []
        for operand in p.contract.written:
            if found.get(operand.name) is None or (operand.name == "dslopes" and name != OURS):
                # Peers add up what rows give to a slope.
                continue
            grad = found[operand.name].expand(operand.shape(p))
            gaps = sum(float((grad[operand.at(e.place, p)].double() - e.values[operand.name]).norm() ** 2) for e in expected)
            sizes = sum(float(e.values[operand.name].norm() ** 2) for e in expected)
            errors[name].append((gaps / max(sizes, 1e-300)) ** 0.5)
    return Checked(kind=served.kind, variant=served.variant_id, reason=served.reason, errors=errors, notes=notes)


def time_cell(cell: Cell, seed: int, seconds: float) -> dict[str, Measurement]:
    """Ours and the peers, interleaved, with L2 flushed."""
    runs, _, _ = runs_of(cell, inputs_of(cell, seed))
    stopwatch = Stopwatch(torch.device("cuda"), torch.cuda.get_device_properties(0).L2_cache_size)
    return dict(zip(runs, stopwatch.race(list(runs.values()), budget_s=seconds, least=11), strict=True))
