"""The answer of `explain`: which record, config or framework serves a call, and why."""

from dataclasses import dataclass
from typing import Any

from flashtune.core.config import Config
from flashtune.core.problem import ProblemKey
from flashtune.core.results import Source, TuningRecord
from flashtune.dispatch.policy import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Which kernel serves a call and why.

    `kind` is the step of the policy (flashtune.dispatch.policy.rank) that served and `reason` says it in a sentence.
    `template`, `variant_id` and `config` are None where the framework serves; `source`, `origin` and `record` where no record
    led there. `key` is None where no record can stand for the call (float64, CPU tensors). `refused` says of each better-placed
    record or family why it was passed over.
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
    record: TuningRecord | None = None
    refused: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data: fields to values, the record by its key's sizes and times."""
        record = self.record
        return {
            "kind": self.kind,
            "reason": self.reason,
            "gpu": self.gpu,
            "template": self.template,
            "variant": self.variant_id,
            "config": None if self.config is None else self.config.as_dict(),
            "source": self.source,
            "origin": self.origin,
            "record": None
            if record is None
            else {
                "gpu": record.key.gpu,
                "n": record.key.n,
                "n_q": record.key.n_q,
                "bh_bucket": record.key.bh_bucket,
                "median_us": record.median_us,
                "framework_us": record.framework_us,
            },
            "refused": list(self.refused),
        }
