"""Between near-equal choices the one whose machine code is at hand goes first, so that no call waits for a compiler without need."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from flashtune.core.config import KernelSpec
from flashtune.core.dtypes import OTHER_16_BITS
from flashtune.dispatch.policy.choices import Choice, Refusal
from flashtune.dispatch.policy.losses import ragged

NEAR_EQUAL = 0.05
"""So much more may a choice be estimated to lose than one that has to be compiled: the estimates are medians, whose 90th percentiles lie
further apart (flashtune.dispatch.policy.losses.LOSSES), and compiling takes seconds."""

LITTLE_BEHIND = 0.03
"""So much more time, a logarithm, may the cost model expect it to take, about as much as what it expects is off by
(benchmarks/run.py fit_residual): of 21 random shapes two were served at 0.64 and 0.79 of their own search by tiles of much longer sequences
(benchmarks/results/2026-11-22-h200-unprepared/seed23.json)."""

AHEAD = 24
"""So many choices are looked at for one with machine code."""


def ready_first(choices: Iterable[Choice | Refusal], ready: Callable[[Choice], bool]) -> Iterator[Choice | Refusal]:
    """A ranking (flashtune.dispatch.policy.rank), in which stand-ins without machine code wait behind the first of those that follow
    that is `ready`, estimated to lose little more, and expected to take hardly longer. Nothing passes a row of the problem's own key, or
    the framework."""
    ranking = iter(choices)
    for one in ranking:
        if isinstance(one, Refusal) or not _waits(one) or ready(one):
            yield one
            continue
        waiting: list[Choice | Refusal] = [one]
        for other in ranking:
            if isinstance(other, Choice) and _waits(other) and _near(other, one) and ready(other):
                yield other._replace(note=f"{other.note}; nearer rows have no machine code for these features")
                break
            waiting.append(other)
            if len(waiting) > AHEAD or (isinstance(other, Choice) and not _waits(other)):
                break
        yield from waiting


def _waits(choice: Choice) -> bool:
    """Whether it is a kernel by the row of another key."""
    return choice.family is not None and choice.estimate is not None


def _near(choice: Choice, first: Choice) -> bool:
    """Whether it is estimated to lose little more than the first, is expected to take hardly longer, reads a bias the same way, and is of a
    row of the same spec but for the 16-bit type: what was moved from another one is hardly ever compiled, and has to be rendered to be
    told."""
    assert choice.estimate is not None and first.estimate is not None, "they stand in"
    own = choice.record is None or choice.spec in _both_types(choice.record.problem.spec())
    slow = first.behind is not None and (choice.behind is None or choice.behind > first.behind + LITTLE_BEHIND)
    alike = choice.record is None or first.record is None or ragged(choice.record.key) == ragged(first.record.key)
    return own and alike and not slow and choice.estimate.median <= first.estimate.median + NEAR_EQUAL


def _both_types(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """A spec, and the same with the other 16-bit type, whose machine code is shipped with its own."""
    other = OTHER_16_BITS.get(spec.dtype)
    return (spec,) if other is None else (spec, replace(spec, dtype=other))
