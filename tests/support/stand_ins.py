"""In place of the compiler and the interpreter, in child processes: apart from the planted families, whose imports children don't need."""

import zlib

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts, Fate
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.replies import Checked, Compiled, Failed


def quick_compile(source: Source, problem: Problem, target: Target) -> Compiled | Failed:
    """In place of the compiler, where a test is of what is kept and not of kernels: figures that depend on the text alone."""
    if "undefined_name" in source.text:
        return Failed(fate=Fate.COMPILE, reason="NameError: undefined_name")
    facts = CompileFacts(registers=32 + zlib.crc32(source.text.encode()) % 128, spills=0, shared_bytes=4096, threads=128, tensor_core_ops=8)
    return Compiled(facts=facts)


def quick_interpret(source: Source, problem: Problem, seed: int) -> Checked:
    """In place of the interpreter; the error tells which text was run."""
    return Checked(error=zlib.crc32(source.text.encode()) / 2**32)
