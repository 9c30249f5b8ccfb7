"""Tasks of the child processes: compile a candidate, check it in Triton's interpreter, check and time it on the GPU.

Every function takes plain values and returns a reply (flashtune.tuner.replies); a candidate's own exceptions become `Failed`. The parent
handles hangs and crashes (flashtune.tuner.children.workers). Heavy imports are local, so that the environment can be set first.
"""

import gc
import os
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Variant
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts, Fate, Measurement
from flashtune.core.system.errors import EnvironmentProblem, environment_fault, first_line
from flashtune.core.system.threads import begun
from flashtune.templates.family import Family
from flashtune.templates.rendering import render
from flashtune.tuner.children.start import know_triton
from flashtune.tuner.replies import Checked, Compiled, Failed, Ready, Rounds, Spent, Timed

if TYPE_CHECKING:
    from flashtune.core.code.launching import LoadedKernel
    from flashtune.tuner.timing.stopwatch import Stopwatch
    from flashtune.tuner.verify.correctness import SmallCases, Verdict, Verifier
    from flashtune.tuner.verify.inputs import Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rendered candidate: its text, the stem of its file, `repeats`, True where its launches write identical bits every time, and
    `uncompilable`, the reason why the installed Triton can't compile it, or None."""

    text: str
    stem: str
    repeats: bool = True
    variant_id: str = ""
    uncompilable: str | None = None

    @classmethod
    def of(cls, family: Family, variant: Variant) -> "Source":
        """The source of a variant, rendered by its template."""
        stem = f"{variant.template}_{variant.id}"
        why = family.uncompilable(variant.spec, variant.config)
        return cls(text=_text(family, variant), stem=stem, repeats=family.repeatable, variant_id=variant.id, uncompilable=why)


@lru_cache(maxsize=64)
def _text(family: Family, variant: Variant) -> str:
    """Rendered text, cached: a search needs it again for timing, and that of the fastest candidate beside each trial."""
    return render(family, variant)


def compile_candidate(source: Source, problem: Problem, target: Target, known: CompileFacts | None = None) -> Compiled | Failed:
    """Cross-compile for the target and return the compiler's facts.

    With `known` facts of exactly this text, cached machine code is loaded in place of a compilation.
    """
    from flashtune.tuner.children.compile import build_launchers, compiled_kernels, facts_of, machine_code_of

    if source.uncompilable is not None and known is None:
        return Failed(fate=Fate.CONSTRAINT, reason=source.uncompilable)
    try:
        manifest = None if known is None else machine_code_of(source.variant_id, source.text, target)
        kernels = compiled_kernels(source.text, source.stem, problem, target, manifest)
        facts = facts_of(kernels, target) if known is None else known
        build_launchers(kernels, target)
    except Exception as error:
        return Failed(fate=Fate.COMPILE, reason=first_line(error), inconclusive=_inconclusive(error))
    if facts.shared_bytes > target.shared_bytes_per_block:
        reason = f"needs {facts.shared_bytes} bytes of shared memory, {target.slug} allows {target.shared_bytes_per_block} per block"
        return Failed(fate=Fate.CONSTRAINT, reason=reason, facts=facts)
    return Compiled(facts=facts)


def interpretable(problem: Problem) -> Problem:
    """The problem as `interpret_candidate` checks it: of one batch, which shortens its cases, unless these are packed sequences."""
    # The interpreter multiplies the raw bits of bf16; the code path is the same in fp16.
    dtype = "fp16" if problem.dtype == "bf16" else problem.dtype
    return replace(problem, dtype=dtype, batch=1 if problem.lengths is None else problem.batch)


def interpret_candidate(source: Source, problem: Problem, seed: int) -> Checked | Failed:
    """Check the numerics on small unaligned problems with Triton's interpreter, on the CPU."""
    import torch

    from flashtune.tuner.children.interpreter import quicken
    from flashtune.tuner.verify.correctness import Verifier

    quicken()
    # The tiles are tiny: more threads would only wait for each other, and for the compilers.
    torch.set_num_threads(1)
    try:
        verdict = Verifier(problem, device="cpu", seed=seed).verdict(_loaded(source)[1])
    except Exception as error:
        return Failed(fate=Fate.RUNTIME, reason=first_line(error))
    return _judged(verdict)


@dataclass
class _Bench:
    """State kept between tasks of one problem: inputs, oracles and the stopwatch."""

    problem: Problem
    inputs: "Inputs"
    verifier: "Verifier"
    stopwatch: "Stopwatch"

    @cached_property
    def pytorch(self) -> tuple[Callable[[], object], str] | None:
        """PyTorch's default call on the inputs and the name of its backend; None where it can't express the problem or fails (out of
        memory, say). Raises errors that leave the process unusable."""
        from flashtune.tuner.timing.baseline import backend_name, pytorch_call

        try:
            call = pytorch_call(self.inputs)
            # A compiled function isn't run under the mode that looks for a backend.
            return None if call is None else (call, "flex" if self.inputs.mods is not None else backend_name(call))
        except Exception as error:
            if failed_on_device(error).poisoned:
                raise
            return None


MOST_ROUNDS = 400
"""Most rounds of one race: short kernels have time for many, and ties are decided by a tenth of a percent."""

_bench: list[_Bench] = []
_small: dict[Hashable, "SmallCases"] = {}
"""Small cases of the last problem's spec, which the next problem usually shares."""
_spent = Spent()
_rehearsed: list[bool] = []


def _ready(problem: Problem, target: Target, seed: int) -> _Bench:
    """State kept for this problem, made on a change of problem."""
    import torch

    from flashtune.tuner.verify.correctness import SmallCases, Verifier
    from flashtune.tuner.verify.inputs import make_inputs

    if not _bench or _bench[0].problem != problem:
        _bench.clear()
        with _spent.on("inputs"):
            inputs = make_inputs(problem, device="cuda", seed=seed)
        serving = SmallCases.serving(problem, seed)
        with _spent.on("small oracles"):
            if serving not in _small:
                _small.clear()
                _small[serving] = SmallCases(problem, device="cuda", seed=seed, thorough=True)
        with _spent.on("oracles"):
            verifier = Verifier(problem, device="cuda", seed=seed, full_size=inputs, small=_small[serving])
            _bench.append(_Bench(problem, inputs, verifier, stopwatch(target.l2_bytes)))
            torch.cuda.synchronize()
    return _bench[0]


@cache
def stopwatch(l2_bytes: int) -> "Stopwatch":
    """The stopwatch of this process for a GPU with an L2 cache of this size."""
    import torch

    from flashtune.tuner.timing.stopwatch import Stopwatch

    return Stopwatch(torch.device("cuda"), l2_bytes)


def prepare_device(problem: Problem, target: Target, seed: int) -> Ready | Failed:
    """Start the GPU and make the inputs and oracles of `problem`, so that no candidate's time limit includes it.

    Triton is prepared in threads of its own, whose errors occur again, and are reported, at the first use. PyTorch's call isn't prepared:
    it builds plans or imports its compiler for seconds, for which the oracles and the first candidates would wait.
    """
    from flashtune.tuner.timing.conditions import gpu_id

    _import_first()
    # The first launch of a process that isn't forked would wait for the hash.
    triton: list[Future[Any]] = [begun(_start_triton), begun(know_triton)]
    try:
        bench = _ready(problem, target, seed)
        with suppress(Exception), _spent.on("rehearsal"):
            _rehearse(bench)
        with _spent.on("wait for triton"):
            wait(triton)
        return Ready(gpu=gpu_id(), spent=_spent.take())
    except Exception as error:
        return failed_on_device(error)


@cache
def _import_first() -> None:
    """Import torch with what checks candidates, before any thread of this process that would hold Python's lock meanwhile."""
    # As in the fork server: the collector's passes take a tenth of the time.
    gc.disable()
    try:
        import flashtune.tuner.verify.correctness  # noqa: F401
    finally:
        gc.enable()


def _rehearse(bench: _Bench) -> None:
    """Check and time an empty launch, once per process."""
    if not _rehearsed:
        _rehearsed.append(True)
        bench.verifier.rehearse()
        bench.stopwatch.rounds([lambda: None], 1)


@cache
def _start_triton() -> object:
    """Have Triton compile and load its part of the driver, which takes a C compiler about 1 s."""
    from triton.runtime import driver

    triton_driver: Any = driver
    return triton_driver.active


def inputs_on_device(problem: Problem, target: Target, seed: int) -> "tuple[Inputs, Verifier]":
    """Inputs of a problem in this process with its verifier, made where it has none."""
    bench = _ready(problem, target, seed)
    return bench.inputs, bench.verifier


def _loaded(source: Source) -> tuple["LoadedKernel", Callable[..., None]]:
    """A candidate's module and its launcher."""
    from flashtune.core.code.launching import launcher
    from flashtune.templates.loading import load_kernel

    module = load_kernel(source.text, source.stem)
    return module, launcher(module)


def launch_of(source: Source, inputs: "Inputs") -> Callable[[], object]:
    """Launch of a candidate on these inputs, without dispatch's checks; raises ValueError where the kernel doesn't accept them."""
    module, launch = _loaded(source)
    arguments, keywords = inputs.arguments, inputs.keywords
    q, k, v, *_ = arguments
    if not module.accepts(q, k, v, inputs.parameters.mask):
        raise ValueError("the kernel doesn't accept these inputs")
    return lambda: launch(*arguments, **keywords)


def evaluate_candidate(
    source: Source, incumbent: Source | None, problem: Problem, target: Target, seed: int, budget_s: float, patience: float
) -> Timed | Failed:
    """Check the candidate on the GPU, then time it interleaved with the incumbent, if there is one.

    Three launches come first; a candidate slower than `patience` times the incumbent isn't timed further. `budget_s` is in seconds.
    """

    bench = _ready(problem, target, seed)
    _spent.take()
    try:
        with _spent.on("load"):
            run = launch_of(source, bench.inputs)
            _, launch = _loaded(source)
        with _spent.on("check"):
            checked = _judged(bench.verifier.verdict(launch, repeats=source.repeats, text=source.text))
        if isinstance(checked, Failed):
            return checked
        with _spent.on("time"):
            runs = [run] if incumbent is None else [run, launch_of(incumbent, bench.inputs)]
            look = bench.stopwatch.rounds(runs, 3)
            times = [Measurement.of(times) for times in look]
            if incumbent is None or times[0].median_us <= patience * times[1].median_us:
                times = bench.stopwatch.race(runs, budget_s=budget_s, seen=look)
                if incumbent is not None and times[0].median_us < times[1].median_us:
                    # Whoever leads races again: the best of many noisy times is chosen for its luck, and later times are in its scale.
                    times = bench.stopwatch.race(runs, budget_s=2 * budget_s, seen=look)
    except Exception as error:
        return failed_on_device(error)
    return Timed(time=times[0], error=checked.error, incumbent=None if incumbent is None else times[1], spent=_spent.take())


def race_finalists(
    sources: list[Source], problem: Problem, target: Target, seed: int, budget_s: float, beside_pytorch: bool = True
) -> Rounds | Failed:
    """Time final candidates interleaved, with PyTorch's default attention unless `beside_pytorch` is False."""
    bench = _ready(problem, target, seed)
    _spent.take()
    try:
        runs: list[Any] = [launch_of(source, bench.inputs) for source in sources]
        with _spent.on("pytorch"):
            pytorch = bench.pytorch if beside_pytorch else None
        began = time.time()
        with _spent.on("rounds"):
            racers = [*runs, *([pytorch[0]] if pytorch else [])]
            times = bench.stopwatch.samples(racers, budget_s=budget_s, least=15, most=MOST_ROUNDS)
        ended = time.time()
    except Exception as error:
        return failed_on_device(error)
    backend = pytorch[1] if pytorch else None
    return Rounds(times=tuple(map(tuple, times)), backend=backend, began=began, ended=ended, pid=os.getpid(), spent=_spent.take())


def _judged(verdict: "Verdict") -> Checked | Failed:
    if verdict.reason:
        return Failed(fate=Fate.CORRECTNESS, reason=verdict.reason, error=verdict.error)
    return Checked(error=verdict.error)


def failed_on_device(error: Exception) -> Failed:
    """Failure of a task on the GPU, `poisoned` where the process can't use its GPU any more."""
    sticky = "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
    compiling = any(base.__name__ in ("CompilationError", "PTXASError") for base in type(error).__mro__)
    fate = Fate.COMPILE if compiling else Fate.RUNTIME
    return Failed(fate=fate, reason=first_line(error), poisoned=sticky, inconclusive=_inconclusive(error))


_OF_MACHINES = ("out of memory", "uncorrectable ecc", "busy or unavailable", "no cuda-capable device", "driver/library version mismatch")
"""Parts of errors of a GPU that others use, or that is broken, in lower case."""


def _inconclusive(error: BaseException) -> bool:
    """True where an error is the machine's and says nothing about the kernel."""
    said = f"{type(error).__name__}: {error}".lower()
    missing = isinstance(error, (EnvironmentProblem, MemoryError)) or type(error).__name__ == "OutOfMemoryError"
    return missing or environment_fault(error) is not None or any(part in said for part in _OF_MACHINES)


def recheck_on_device(source: Source, problem: Problem, target: Target, seed: int) -> Checked | Failed:
    """Check a stored variant on the GPU: small unaligned problems and the record's own size."""

    bench = _ready(problem, target, seed)
    try:
        verdict = bench.verifier.verdict(_loaded(source)[1], repeats=source.repeats)
    except Exception as error:
        return failed_on_device(error)
    return _judged(verdict)
