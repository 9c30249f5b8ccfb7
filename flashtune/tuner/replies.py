"""What a task in a child process answers: what it was asked for, or `Failed`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashtune.core.binaries import Manifest
from flashtune.core.results import Baseline, CompileFacts, Fate, Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """At which stage a task ended and why. `poisoned` says that the process must not be used again (a sticky GPU error)."""

    fate: Fate
    reason: str
    facts: CompileFacts | None = None
    error: float | None = None
    poisoned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the compiler made of a candidate; equal `code` is equal machine code, and where it is empty nothing is known of it."""

    facts: CompileFacts
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """What later calls take of a kernel: its text, and machine code as files with their manifest; no manifest where the user's cache has
    them already."""

    text: str = ""
    manifest: Manifest | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """How a candidate's kernels are launched; equal `launches` are launched alike."""

    launches: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The GPU's process has a problem's inputs and oracles; `gpu` is what the driver's tool calls this GPU, `spent` are the seconds that
    its parts took."""

    gpu: str = "0"
    spent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A candidate agrees with the oracle; `error` is the largest error over its tolerance."""

    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A candidate's time, and the incumbent's from the same rounds; `error` is None where nothing compared its numbers (a prediction)."""

    time: Measurement
    error: float | None
    incumbent: Measurement | None = None
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what the GPU's process did."""

    @property
    def fate(self) -> Fate:
        """What a trial that ended so is recorded as."""
        return Fate.UNCHECKED if self.error is None else Fate.CORRECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """One race: for each of those that raced, in their order, its time in every round, in microseconds; last the framework's, where
    `backend` names what ran of it. Taken between two seconds since the epoch in the process `pid`, which `spent` its seconds so."""

    times: tuple[tuple[float, ...], ...]
    backend: str | None
    began: float
    ended: float
    pid: int
    spent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How finalists ended: by how much each is behind the fastest (0.01 is 1 %), in their order, and who is tied with it."""

    behind: tuple[float, ...]
    tied: tuple[bool, ...]
    races: int
    settled: bool
    """Whether every decision has its confidence; else races were at an end before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """What all races say: the finalists' times, in their order, all in one scale, where each stands, and the framework's time where it
    has the problem; from the first race's begin to the last one's end."""

    times: tuple[Measurement, ...]
    standing: Standing
    baseline: Baseline | None
    began: float
    ended: float
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """Median microseconds of a whole call, host included: of each that was asked for, and of the framework where it has the problem."""

    times: tuple[float, ...]
    framework: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Times by name (`tuned`, `default`, a backend), and for those that have none why."""

    times: Mapping[str, Measurement]
    left_out: Mapping[str, str]


Answer = Compiled | MachineCode | Launched | Ready | Checked | Timed | Rounds | Called | Compared
