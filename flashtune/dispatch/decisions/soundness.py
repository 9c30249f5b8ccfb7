"""Providers that are wrong for a problem, by findings of databases and by the faults that are known, and who serves in their place."""

import functools
from collections.abc import Callable

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.attention import BACKENDS, has_address
from flashtune.core.records.faults import known_fault
from flashtune.core.records.results import TuningRecord
from flashtune.core.records.versions import holding, said, suspicion, versions_in
from flashtune.dispatch.call.call import Call, PerHead, trained_as
from flashtune.dispatch.policy.choose import Pool
from flashtune.dispatch.providers.libraries import PROVIDERS, torchs_choice
from flashtune.dispatch.providers.provider import Tensors
from flashtune.dispatch.state.context import Memo

INSTEAD = ("flash", "efficient", "cudnn", "math")
"""PyTorch's backends in the order in which one serves where PyTorch's own choice is wrong."""


def why_wrong(memo: Memo, name: str, problem: Problem, target: Target, record: TuningRecord | None = None) -> str:
    """The finding because of which a provider doesn't serve a problem here, by a record's time or without one; empty where there is none.

    A training step needs a right forward, too.
    """
    for one in {problem.direction: problem, "fwd": problem.forward()}.values():
        spec = one.spec()
        findings = memo.library().wrong.get((target.slug, Variant(template=name, spec=spec, config=Config.of()).id), ())
        if findings:
            timed = next((versions_in(record, time) for time in record.providers if time.template == name), None) if record else None
            found = holding(findings, "" if record is None else record.origin, devices.versions_of(name), timed)
            if found is not None and found.versions is not None:
                return f"{name} was found wrong with {said(found.versions)}: {found.reason}"
        if (fault := known_fault(name, one, target.arch, devices.torch_release())) is not None:
            return f"{name} is wrong: {fault.said}"
    return ""


def instead_of_torchs(
    memo: Memo, call: Call, problem: Problem | None, tensors: Tensors, per_head: PerHead | None
) -> tuple[str, str] | None:
    """Name of the backend that serves where PyTorch's own choice is wrong for a call, and the finding; None elsewhere.

    Backends are asked only where one of them is wrong. Dropout without a seed is served as in training.
    """
    if problem is None or not call.fused_by_torch or not has_address(tensors[0]):
        return None
    target, _, pool = memo.surroundings(call.device, problem)
    if not isinstance(pool, Pool):
        return None
    problem = trained_as(problem) if call.torch_draws else problem
    wrong = {name: why for name in BACKENDS if (why := why_wrong(memo, name, problem, target))}
    if not wrong or (chosen := torchs_choice(call, tensors)) not in wrong:
        return None
    sound = (name for name in INSTEAD if name not in wrong and PROVIDERS[name].refusal(call, tensors, per_head) is None)
    return None if (name := next(sound, None)) is None else (name, wrong[chosen])


def sound_ones(
    memo: Memo, problem: Problem, target: Target, record: TuningRecord | None, takes: Callable[[str], bool], told: list[str]
) -> Callable[[str], bool]:
    """Predicate of providers that take a problem and aren't wrong for it; the findings about others are `told`."""

    @functools.cache
    def provided(name: str) -> bool:
        if not takes(name):
            return False
        if why := why_wrong(memo, name, problem, target, record):
            told.append(why)
        return not why

    return provided


def warn_of_suspect(memo: Memo, record: TuningRecord, name: str) -> None:
    """Warn, once for each database and version, where a provider serves by a verdict on another version; shipped ones are from elsewhere
    anyway."""
    for one in record.providers if record.origin != "shipped" else ():
        if one.template == name and (why := suspicion(record, one, devices.versions_of(name))):
            memo.warn_once(
                f"flashtune: in {record.origin} {why}; it runs unchecked: run `flashtune verify --requalify` to check and time it again"
            )


def warn_of_wrong(memo: Memo, call: Call, name: str) -> None:
    """Warn, once for each finding, where a caller names a provider that is wrong for a call."""
    if call.problem is None:
        return
    target, _, pool = memo.surroundings(call.device, call.problem)
    if isinstance(pool, Pool) and (why := why_wrong(memo, name, call.problem, target)):
        memo.warn_once(f"flashtune: {why}; it runs the call since the caller named it: leave implementation out for another")
