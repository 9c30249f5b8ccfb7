"""Winners for later calls: compiled while a search goes on, and stored at its end."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flashtune.core.results import TuningRecord
from flashtune.core.target import Target
from flashtune.tuner.children.workers import Pending, Workers
from flashtune.tuner.replies import Failed, MachineCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Preparation of winners for later calls: `compile` is a task for the compilers, whose reply `put` stores. After a failure it is done
    later."""

    compile: Callable[[TuningRecord, Target], MachineCode | Failed]
    put: Callable[[MachineCode], None]


class Winners:
    """Kernels that one search compiles for later calls on `target`, each variant once, within `limit_s` seconds each; none without
    `keep`."""

    def __init__(self, keep: Keeping | None, target: Target, limit_s: float) -> None:
        self._keep, self._target, self._limit_s = keep, target, limit_s
        self._codes: dict[str, Pending[MachineCode]] = {}
        self._won: set[str] = set()
        self._lock = threading.RLock()

    def compile_ahead(self, records: Sequence[TuningRecord], workers: Workers) -> None:
        """Start compiling likely winners."""
        with self._lock:
            for record in records:
                if self._keep is not None and record.outcome.variant_id not in self._codes:
                    pending = workers.submit("compile", self._keep.compile, record, self._target, limit_s=self._limit_s)
                    self._codes[record.outcome.variant_id] = pending

    def won(self, record: TuningRecord, workers: Workers) -> None:
        """Compile a winner, and its fallback kernel, and store them at the end."""
        fallback = record.as_fallback()
        records = [replace(record, fallback=None), *([] if fallback is None else [fallback])]
        self.compile_ahead(records, workers)
        with self._lock:
            self._won.update(one.outcome.variant_id for one in records)

    def put(self) -> None:
        """Store the machine code of winners; other compilations are dropped."""
        for variant_id, pending in self._codes.items():
            if variant_id not in self._won:
                pending.forget()
        for variant_id, pending in self._codes.items():
            if variant_id in self._won and self._keep is not None and isinstance(code := pending.reply(), MachineCode):
                self._keep.put(code)
