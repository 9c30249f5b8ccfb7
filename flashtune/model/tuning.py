"""Steps of `flashtune model`: record a model's calls, search them, write its database, and judge the whole model with it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import TuningRecord
from flashtune.core.system.errors import FlashtuneError
from flashtune.model import measuring, recording, shares
from flashtune.model.measuring import Check, Times
from flashtune.model.sources import Subject, explained
from flashtune.model.workloads import Workload

Say = Callable[[str], None]


@dataclass(slots=True)
class Judged:
    """One workload's calls by problem, and what was found of the whole model; `why` says why something wasn't."""

    workload: Workload
    counts: Counter[Problem]
    check: Check | None = None
    times: Times | None = None
    why: str = ""


@dataclass(slots=True)
class ModelReport:
    """Result of the command for one model: its workloads, and the record that serves each problem, where there is one."""

    model: str
    target: Target
    dtype: str
    workloads: list[Judged]
    records: dict[Problem, TuningRecord] = field(default_factory=dict)
    database: Path | None = None

    def problems(self) -> list[Problem]:
        """All problems, the most important first."""
        return shares.ordered([one.counts for one in self.workloads], self.target)

    def calls(self) -> list[dict[str, Any]]:
        """A row for each call of each workload, in the order of its share of the attention's time (PyTorch's, else rooflines)."""
        rows: list[dict[str, Any]] = []
        for judged in self.workloads:
            times = {problem: count * self._unit_us(problem) for problem, count in judged.counts.items()}
            whole = sum(times.values())
            for problem in sorted(times, key=lambda one: -times[one]):
                rows.append(self._row(judged, problem, times[problem] / whole))
        return rows

    def _unit_us(self, problem: Problem) -> float:
        record = self.records.get(problem)
        if record is not None and record.framework_us is not None:
            return record.framework_us
        return shares.floor_us(problem, self.target)

    def _row(self, judged: Judged, problem: Problem, share: float) -> dict[str, Any]:
        record = self.records.get(problem)
        ratio = None if record is None else record.relative_time
        served = "PyTorch" if record is None or (ratio is not None and ratio > 1) else record.outcome.template
        provider = None if record is None else record.fastest(lambda name: True)
        if record is not None and provider is not None:
            served = provider
            us = next(one.call_us for one in record.providers if one.template == provider)
            ratio = us / theirs if us and (theirs := record.framework_call_us) else None
        elif served == "PyTorch" and record is not None and record.baseline is not None:
            provider = record.baseline.backend
        return {
            "workload": str(judged.workload),
            "problem": problem.label(),
            "calls": judged.counts[problem],
            "share": round(share, 4),
            "served": served,
            "provider": provider,
            "source": None if record is None else record.outcome.source,
            "median_us": None if record is None else round(record.median_us, 3),
            "framework_us": None if record is None or record.framework_us is None else round(record.framework_us, 3),
            "speedup": None if ratio is None else round(max(1.0, 1 / ratio), 3),
        }

    def as_json(self) -> dict[str, Any]:
        """The report as `flashtune model --json` prints it."""
        return {
            "model": self.model,
            "gpu": self.target.slug,
            "dtype": self.dtype,
            "database": None if self.database is None else str(self.database),
            "workloads": [_judgement(one) for one in self.workloads],
            "calls": self.calls(),
        }


def _judgement(one: Judged) -> dict[str, Any]:
    return {
        "workload": str(one.workload),
        "attention_calls": one.counts.total(),
        "error": None if one.check is None else one.check.tuned,
        "torch_error": None if one.check is None else one.check.torch,
        "allowed_error": None if one.check is None else one.check.allowed,
        "right": None if one.check is None else one.check.right,
        "tuned_ms": None if one.times is None else round(one.times.tuned_ms, 4),
        "torch_ms": None if one.times is None else round(one.times.torch_ms, 4),
        "speedup": None if one.times is None else round(one.times.speedup, 4),
        "backends_ms": {} if one.times is None else {name: round(ms, 4) for name, ms in one.times.backends_ms.items()},
        "best_backend": None if one.times is None else one.times.best_backend,
        "against_best": None if one.times is None else round(one.times.against_best, 4),
        "left_out": one.why or None,
    }


def record_calls(subject: Subject, workloads: Sequence[Workload], *, dtype: torch.dtype, device: str | None) -> list[Judged]:
    """Calls of each workload, recorded on meta tensors, or on `device` where the model's path depends on values."""
    found = []
    remedy = "correct its config, or record its calls with FLASHTUNE_CALLS=calls.json"
    for workload in workloads:
        with explained(f"{subject.name} has no inputs for {workload}", remedy):
            subject.inputs(workload, device="meta", dtype=dtype)
    model = subject.build(device="meta", dtype=dtype)
    for workload in workloads:
        with explained(f"{workload} of {subject.name} can't be run", remedy):
            try:
                counts = recording.calls_of(subject, model, workload, device="meta", dtype=dtype)
            except RuntimeError as error:
                # What is refused is refused on any device.
                if device is None or isinstance(error, FlashtuneError):
                    raise
                counts = recording.calls_of(subject, subject.build(device=device, dtype=dtype), workload, device=device, dtype=dtype)
        found.append(Judged(workload, shares.merged(counts)))
    return found


def judge(subject: Subject, workloads: Sequence[Judged], *, device: str, dtype: torch.dtype, say: Say) -> None:
    """Check and measure every workload on a GPU with the databases in force, and store the results in it.

    A workload that memory is too small for, or that PyTorch's own attention fails to compute, is left out, with the reason.
    """
    model = subject.build(device=device, dtype=dtype)
    for number, one in enumerate(workloads):
        for name in ("check", "time"):
            say(f"{one.workload}: {name}")
            try:
                if name == "check":
                    one.check = measuring.check(subject, model, one.workload, device=device, dtype=dtype)
                else:
                    one.times = measuring.measure(subject, model, one.workload, device=device, dtype=dtype)
                torch.cuda.empty_cache()
            except torch.OutOfMemoryError:
                one.why = f"the GPU's memory is too small for its {name}"
                torch.cuda.empty_cache()
            except measuring.StandardFails as error:
                one.why = f"PyTorch's own attention fails in it ({error})"
                if _lost(device):
                    for other in workloads[number + 1 :]:
                        other.why = f"after PyTorch's failure in {one.workload} this process can't use the GPU any longer: name it alone"
                    return
                break


def _lost(device: str) -> bool:
    """True if an earlier error of the GPU fails everything that follows in this process."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False
