"""Compiler output of a kernel, for tests that look at it."""

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts
from flashtune.tuner.children.compile import compiled_kernels, facts_of


def cross_compile(source: str, stem: str, problem: Problem, target: Target) -> CompileFacts:
    """The facts of the kernel that computes, of those that a launch of `problem` takes."""
    return facts_of(compiled_kernels(source, stem, problem, target), target)
