"""The answer of `explain`: which record, config or framework serves a call, and why."""

from dataclasses import dataclass

from flashtune.core.config import Config
from flashtune.core.problem import ProblemKey
from flashtune.core.results import Source
from flashtune.dispatch.policy import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Which kernel serves a call and why.

    `kind` is the step of the policy (flashtune.dispatch.policy.rank) that served and `reason` says it in a sentence.
    `template`, `variant_id` and `config` are None where the framework serves. `source`, `origin`, `record_key` and the record's times (of
    its own problem, in microseconds) are None where no record led there; `key` where none can stand for the call (float64, CPU
    tensors). `refused` says of each better-placed record or family why it was passed over.
    """

    kind: Kind
    reason: str
    gpu: str
    key: ProblemKey | None = None
    template: str | None = None
    variant_id: str | None = None
    config: Config | None = None
    source: Source | None = None
    origin: str | None = None
    record_key: ProblemKey | None = None
    median_us: float | None = None
    framework_us: float | None = None
    refused: tuple[str, ...] = ()
