"""Choices for problems by the records alone."""

from dataclasses import replace

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Problem
from flashtune.dispatch.decisions import resolve
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.policy.offers import measured_record, offers
from flashtune.dispatch.providers.libraries import PROVIDERS
from flashtune.dispatch.state.context import current


def explain_problem(problem: Problem, gpu: str) -> Explanation:
    """Explanation of the choice for a problem on a GPU, by the records alone; needs neither tensors nor a GPU.

    A backward under PyTorch's deterministic mode is explained by its repeatable kernel. A problem has no seed: with dropout the choice for
    calls without one is explained. Lengths of packed sequences are taken to powers of two, as in calls.

    Args:
        problem: the call without its data.
        gpu: name of the GPU, such as "h200"; `flashtune doctor` lists them.

    Raises:
        InputError: for an unknown GPU.
    """
    target, memo = find_target(gpu), current()
    with memo.lock:
        if problem.features.packed and not problem.features.mods:
            return resolve.explained_problem(memo, problem, target)
        record = measured_record(memo.pool(problem.key(target.slug), target), problem, target)
        return replace(resolve.explained_problem(memo, problem, target), providers=offers(record, lambda name: PROVIDERS[name].missing()))
