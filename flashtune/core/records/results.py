"""Results of trials (`Outcome`), their times (`Measurement`), and the records of winners (`TuningRecord`)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Literal, get_args

from flashtune.core.problems.config import Config, settles
from flashtune.core.problems.problem import Problem, ProblemKey
from flashtune.core.system.secrets import mask_command_line

Source = Literal["measured", "predicted"]
SOURCES: tuple[Source, ...] = get_args(Source)

PROVIDERS = ("flash", "cudnn", "efficient", "math", "flex", "fa4", "fa2", "cudnn_fe", "ffpa")
"""Names of providers: PyTorch's backends, FlexAttention, flash-attn-4, flash-attn, cuDNN's frontend and FFPA; an outcome of one has its
name as `template`."""

IMPLEMENTATIONS = ("flashtune", "torch", *PROVIDERS)
"""Names by which a caller may choose who serves: kernels of ours, PyTorch's own choice of a backend, or a provider."""

PROVIDER_GAIN = 0.01
"""Share by which a provider's calls have to be faster than the kernel's and PyTorch's to serve: the host's noise is as large."""


class Fate(StrEnum):
    """The stage at which a trial ended; only `CORRECT` and `UNCHECKED` carry a time."""

    CONSTRAINT = "constraint"
    COMPILE = "compile"
    TIMEOUT = "timeout"
    RUNTIME = "runtime"
    CORRECTNESS = "correctness"
    CORRECT = "correct"
    UNCHECKED = "unchecked"
    """End of a candidate with a predicted time and unverified numbers: no interpreter runs its family."""

    @property
    def timed(self) -> bool:
        """True if a trial of this fate may carry a time."""
        return self in (Fate.CORRECT, Fate.UNCHECKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Quantiles of one candidate's run times, in microseconds. For a prediction all of them are the predicted time."""

    median_us: float
    q10_us: float
    q90_us: float
    min_us: float
    samples: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> "Measurement":
        """The quantiles of `times_us` (at least one sample)."""
        # This imports fractions and decimals, which dispatch from records doesn't need.
        import statistics

        ordered = sorted(times_us)
        last = len(ordered) - 1
        return cls(
            median_us=statistics.median(ordered),
            q10_us=ordered[round(0.1 * last)],
            q90_us=ordered[round(0.9 * last)],
            min_us=ordered[0],
            samples=len(ordered),
        )

    @classmethod
    def predicted(cls, time_us: float) -> "Measurement":
        """A cost model's one figure; `samples` is 0."""
        return cls(median_us=time_us, q10_us=time_us, q90_us=time_us, min_us=time_us, samples=0)

    def scaled(self, factor: float) -> "Measurement":
        """All times multiplied by `factor`."""
        times = {name: factor * getattr(self, name) for name in ("median_us", "q10_us", "q90_us", "min_us")}
        return replace(self, **times)

    @property
    def noise(self) -> float:
        """The spread between the 10 % and 90 % quantiles over the median."""
        return (self.q90_us - self.q10_us) / self.median_us if self.median_us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """The compiler's resource usage of one variant on one target, per thread or per program."""

    registers: int
    spills: int
    """Bytes of local memory a thread spills."""
    shared_bytes: int
    threads: int
    tensor_core_ops: int = 0
    """Matrix instructions in the machine code (HGMMA/HMMA/MFMA ...), counted once each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one trial. `reason` is the cause of a failure in one line (empty when correct)."""

    template: str
    template_hash: str
    variant_id: str
    config: Config
    fate: Fate
    source: Source
    reason: str = ""
    measurement: Measurement | None = None
    facts: CompileFacts | None = None
    max_error: float | None = None
    """Largest error against the oracle over the tolerance (<= 1 passes), when it was checked."""
    finalist: bool = False
    """True if `measurement` comes from the closing A/B timing, which interleaves all final candidates; else it is `trial`."""
    trial: Measurement | None = None
    """A measured candidate's time among the trials, scaled by the incumbent that it was interleaved with, since clocks drift during a
    search; only these times of trials are comparable. None for predictions, and where only the closing time was stored."""
    call_us: float | None = None
    """Median time of a whole call in an eager back-to-back loop, host included, in microseconds; None where it wasn't measured."""
    rank: int | None = None
    """Rank in the closing A/B timing, ties broken by the fixed rule: 1 is the winner."""

    @classmethod
    def of_provider(
        cls, name: str, variant_id: str, time_us: Measurement | None = None, *, versions: Config | None = None, **found: Any
    ) -> "Outcome":
        """Outcome of another provider: its whole calls' time where it is right, else the fate and the reason that are `found`. Its config
        are the `versions` of what decides its numbers (flashtune.core.records.versions)."""
        words: dict[str, Any] = {"template": name, "template_hash": variant_id, "variant_id": variant_id}
        words |= {"config": versions or Config.of(), "source": "measured", "fate": Fate.CORRECT, "measurement": time_us}
        words |= {} if time_us is None else {"call_us": time_us.median_us, "finalist": True}
        return cls(**words | found)


GRAPH_GAIN = 0.02
"""Share of its time on the GPU by which a winner has to be slower than another kernel for graphs to run that: from one process to the next
two kernels differ by up to 0.8 %."""


def fastest_in_graphs(winner: Outcome, others: Iterable[Outcome]) -> Outcome | None:
    """The fastest on the GPU of the winner's family, where whole calls made another the winner (the GPU waited for the host, as it doesn't
    in a CUDA graph); None elsewhere. It has no frozen row maxima: a graph can't switch to a fallback kernel."""
    if winner.call_us is None or winner.measurement is None:
        return None
    most_us = winner.measurement.median_us / (1 + GRAPH_GAIN)
    found = [
        (one.measurement.median_us, one.variant_id, one)
        for one in others
        if one.template == winner.template and one.fate is Fate.CORRECT and one.finalist and not settles(one.config)
        if one.call_us is not None and one.call_us > winner.call_us
        if one.measurement is not None and one.measurement.median_us < most_us
    ]
    return min(found, key=lambda one: one[:2])[2] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """PyTorch's default attention, timed in the same run on the same inputs."""

    backend: str
    measurement: Measurement
    call_us: float | None = None
    """Median time of a whole call in an eager back-to-back loop, host included, in microseconds; None where it wasn't measured."""


POWER_CAP = "SwPowerCap"
"""NVML's name of the power limit as a reason for lowered clocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The GPU's state during the closing A/B timing: medians over `samples` readings; None for values that its driver doesn't report."""

    samples: int
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttled_by: str | None = None
    """NVML's reasons for throttled clocks in any reading, with commas between; empty where there were none."""
    other_processes: int | None = None
    """The greatest number of other processes on this GPU in any reading."""

    @property
    def power_limited(self) -> bool:
        """True if the card's power limit alone lowered its clocks, as it does under any sustained load: a fact of the card, not a fault."""
        return self.throttled_by == POWER_CAP

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons to doubt times taken under these conditions: `throttled`, `shared`."""
        return (("throttled",) if self.throttled_by else ()) + (("shared",) if self.other_processes else ())


REQUALIFIED = "requalified"
"""Reason of a run that timed a record again: earlier runs of its key no longer count, nor earlier records of kernels that failed in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Kernel that failed when a record was timed again, or provider that was wrong: its variant on a GPU, the time of that run (ISO 8601),
    and the cause."""

    gpu: str
    variant_id: str
    found_at: str
    reason: str
    origin: str = ""
    """The origin of the records that it refutes, those of the database that holds it; empty for records of every database."""
    provider: str = ""
    """The name of a provider that was wrong; empty for a kernel."""
    versions: Config | None = None
    """A provider's versions (flashtune.core.records.versions), with which alone it was found wrong; None for a kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The reason why a search stopped (a word of flashtune.tuner.search.stopping), its surrogate's mean regret, which no calibration bears
    out: the share by which its best time exceeds that of the best candidate (0.01 is 1 %), None where unknown; and the number of candidates
    that there were, tried or not (None before schema 0006)."""

    reason: str
    regret: float | None = None
    candidates: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Origin of a search's figures: versions, GPU, command and conditions."""

    flashtune: str
    torch: str
    triton: str
    driver: str = ""
    gpu_name: str = ""
    clocks: str = ""
    """The highest SM clock and the power limit by the driver; `conditions` are those under load."""
    command: str = ""
    """The command line, with passwords masked, also in records of earlier versions."""
    seed: int | None = None
    created_at: str = ""
    """UTC, ISO 8601."""
    conditions: Conditions | None = None
    """None without a closing A/B timing, or where the GPU wasn't monitored."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", mask_command_line(self.command))

    def as_json(self) -> dict[str, Any]:
        """Field to value."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """The best variant for a key, with its provenance."""

    key: ProblemKey
    problem: Problem
    outcome: Outcome
    provenance: Provenance
    baseline: Baseline | None = None
    ending: Ending | None = None
    fallback: Outcome | None = None
    """The fallback kernel where the outcome freezes row maxima: the best measured trial of the same run that doesn't, for mispredicted
    softmax."""
    in_graphs: Outcome | None = None
    """The kernel of the same run that CUDA graphs run in place of the outcome's (`fastest_in_graphs`)."""
    providers: tuple[Outcome, ...] = ()
    """Times of whole calls of other providers in the same run; `template` is the provider's name."""
    origin: str = ""
    """The database it was read from: `shipped`, `overlay` or a path."""
    precedence: int = 0
    """Precedence of its layer among the requested ones; 0 for the user's own results and the shipped ones."""
    refuted: str = ""
    """Cause of a later failure of its kernel on its GPU (`Finding`), because of which it doesn't serve."""

    def provider_times(self) -> dict[str, float]:
        """Microseconds of whole calls by provider, the shortest of each."""
        found: dict[str, float] = {}
        for one in self.providers:
            found[one.template] = min(found.get(one.template, math.inf), one.call_us or math.inf)
        return found

    def as_fallback(self) -> "TuningRecord | None":
        """The record of its fallback kernel; None where it has none."""
        return None if self.fallback is None else replace(self, outcome=self.fallback, fallback=None, in_graphs=None)

    def beside(self) -> "tuple[TuningRecord, ...]":
        """Records of the kernels that may serve in its place: its fallback kernel, and that of graphs."""
        others = (one for one in (self.fallback, self.in_graphs) if one is not None)
        return tuple(replace(self, outcome=one, fallback=None, in_graphs=None) for one in others)

    def as_result(self) -> "SearchResult":
        """The result of a search that found only the record, the kernels beside it and the providers' times."""
        others = (one for one in (self.outcome, self.fallback, self.in_graphs, *self.providers) if one is not None)
        return SearchResult(
            gpu=self.key.gpu,
            problem=self.problem,
            outcomes=tuple(dict.fromkeys(others)),
            provenance=self.provenance,
            baseline=self.baseline,
            ending=self.ending,
        )

    @property
    def median_us(self) -> float:
        """The recorded time, in microseconds."""
        assert self.outcome.measurement is not None, "a record has a correct outcome"
        return self.outcome.measurement.median_us

    @property
    def framework_us(self) -> float | None:
        """PyTorch's time in the same run, in microseconds; None where it was not timed (a prediction)."""
        return self.baseline.measurement.median_us if self.baseline else None

    @property
    def framework_call_us(self) -> float | None:
        """PyTorch's time of a whole call, host included, in microseconds; None where it was not timed."""
        return self.baseline.call_us if self.baseline else None

    @property
    def relative_time(self) -> float | None:
        """This time over PyTorch's in the same run, below 1 where this is faster: of whole calls where both were measured, as a caller
        observes them (the slower of host and GPU), else on the GPU alone. None without PyTorch's time."""
        ours, theirs = self.outcome.call_us, self.framework_call_us
        if ours is not None and theirs is not None:
            return ours / theirs
        return None if self.framework_us is None else self.median_us / self.framework_us

    def fastest(self, provided: Callable[[str], bool]) -> str | None:
        """Name of the fastest of those providers for which `provided` is True, where its calls take less time than the kernel's and
        PyTorch's own choice by more than `PROVIDER_GAIN`; None otherwise."""
        served = [one for one in self.providers if one.call_us is not None and provided(one.template)]
        best = min(served, key=lambda one: (one.call_us or 0.0, one.template), default=None)
        own = () if self.outcome.template in PROVIDERS else (self.outcome.call_us or self.median_us,)
        others = [*own, *([self.framework_call_us or self.framework_us or math.inf] if self.baseline else [])]
        if best is None or best.call_us is None or any((1 + PROVIDER_GAIN) * best.call_us >= us for us in others):
            return None
        return best.template

    @property
    def tflops(self) -> float:
        """10^12 floating-point operations per second, by `Problem.flops`."""
        return self.problem.flops() / self.median_us / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """Predicates of templates about reproducible bits: `repeats` is True if a record's kernel writes equal bits every time, `may_vary` if
    one that doesn't may serve its problem on its GPU."""

    repeats: Callable[[TuningRecord], bool]
    may_vary: Callable[[TuningRecord], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The results of one search of one problem; the store writes them in one transaction."""

    gpu: str
    problem: Problem
    outcomes: tuple[Outcome, ...]
    provenance: Provenance
    baseline: Baseline | None = None
    ending: Ending | None = None

    @property
    def best(self) -> Outcome | None:
        """The winner: rank 1 of the closing A/B timing, else the fastest outcome with a time (ties by variant id)."""
        timed = [o for o in self.outcomes if o.fate.timed and o.measurement is not None]
        return min(timed, key=lambda o: (o.rank or 10**9, o.measurement.median_us if o.measurement else 0.0, o.variant_id), default=None)

    @property
    def fallback(self) -> Outcome | None:
        """The fallback kernel of a winner with frozen row maxima: its family's best correct measured outcome without them."""
        best = self.best
        if best is None or not settles(best.config):
            return None
        right = [o for o in self.outcomes if o.template == best.template and o.fate is Fate.CORRECT and o.source == "measured"]
        running = tuple(o for o in right if "maximum" in o.config and not settles(o.config))
        return replace(self, outcomes=running).best

    @property
    def in_graphs(self) -> Outcome | None:
        """The kernel that CUDA graphs run in place of the winner (`fastest_in_graphs`)."""
        return None if self.best is None else fastest_in_graphs(self.best, self.outcomes)
