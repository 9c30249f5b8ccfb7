"""Preference of compiled kernels among nearly equal choices, so that no call waits for a compiler without need."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from flashtune.core.config import KernelSpec
from flashtune.core.dtypes import OTHER_16_BITS
from flashtune.dispatch.policy.choices import Choice, Refusal
from flashtune.dispatch.policy.losses import unaligned

NEAR_EQUAL = 0.05
"""Additional estimated loss that a compiled choice may have over one that has to be compiled: estimates are medians, with a wider spread
(flashtune.dispatch.policy.losses.LOSSES), and compiling takes seconds."""

LITTLE_BEHIND = 0.03
"""Additional expected time (logarithm) that it may have, about the cost model's error (benchmarks/run.py fit_residual,
benchmarks/results/2026-11-22-h200-unprepared/seed23.json)."""

AHEAD = 24
"""Choices that are searched for a compiled one."""


def compiled_first(choices: Iterable[Choice | Refusal], ready: Callable[[Choice], bool]) -> Iterator[Choice | Refusal]:
    """A ranking (flashtune.dispatch.policy.rank) with substitute records whose kernel isn't compiled moved behind the first that is.

    That is the first that is `ready`, with little more estimated loss and expected time. Nothing is moved ahead of a record of exactly the
    problem's key, or of PyTorch.
    """
    ranking = iter(choices)
    for one in ranking:
        if isinstance(one, Refusal) or not _waits(one) or ready(one):
            yield one
            continue
        waiting: list[Choice | Refusal] = [one]
        for other in ranking:
            if isinstance(other, Choice) and _waits(other) and _near(other, one) and ready(other):
                yield other._replace(note=f"{other.note}; nearer records have no machine code for these features")
                break
            waiting.append(other)
            if len(waiting) > AHEAD or (isinstance(other, Choice) and not _waits(other)):
                break
        yield from waiting


def _waits(choice: Choice) -> bool:
    """True for a kernel by a record of another key."""
    return choice.family is not None and choice.estimate is not None


def _near(choice: Choice, first: Choice) -> bool:
    """True where a choice has little more estimated loss and expected time than the first, and reads a bias with the same alignment.

    Its record has the same spec but for the 16-bit type: a moved config is hardly ever compiled, and finding out requires rendering it.
    """
    assert choice.estimate is not None and first.estimate is not None, "records of other keys have estimates"
    own = choice.record is None or choice.spec in _both_types(choice.record.problem.spec())
    slow = first.behind is not None and (choice.behind is None or choice.behind > first.behind + LITTLE_BEHIND)
    alike = choice.record is None or first.record is None or unaligned(choice.record.key) == unaligned(first.record.key)
    return own and alike and not slow and choice.estimate.median <= first.estimate.median + NEAR_EQUAL


def _both_types(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """A spec, and its dtype variant of the other 16-bit type, whose machine code is shipped with its own."""
    other = OTHER_16_BITS.get(spec.dtype)
    return (spec,) if other is None else (spec, replace(spec, dtype=other))
