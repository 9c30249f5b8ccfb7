"""Task that times whole calls for searches; dispatch and torch are imported in the process that runs it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target
    from flashtune.tuner.children.tasks import Source
    from flashtune.tuner.replies import Called, Failed


def time_calls(sources: "list[Source]", problem: "Problem", target: "Target", seed: int, budget_s: float) -> "Called | Failed":
    """Times of whole calls; see `flashtune.profiler.whole_calls.time_calls`."""
    from flashtune.profiler import whole_calls

    return whole_calls.time_calls(sources, problem, target, seed, budget_s)
