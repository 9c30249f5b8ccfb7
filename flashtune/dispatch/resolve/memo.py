"""Dispatch state of one stack of databases: cached plans, records, loaded machine code, and failures."""

import functools
import os
import threading
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Timer
from typing import TYPE_CHECKING, Any

import torch

from flashtune.core.binaries import Manifest
from flashtune.core.collector import held_off
from flashtune.core.config import Direction, Variant
from flashtune.core.errors import EnvironmentProblem
from flashtune.core.launching import LoadedKernel
from flashtune.core.problem import Problem, ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.core.target import Target, targets
from flashtune.dispatch.choose import Pool, group_of
from flashtune.dispatch.launch import devices, kernels
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.gradients import Backward
from flashtune.dispatch.plans.plan_cache import Plan, Plans
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.templates import families
from flashtune.templates.family import Family

if TYPE_CHECKING:
    from flashtune.db.library import Library

RETRY_S = 60.0
"""Seconds after a fault of this machine, as a full disk, until calls affected by it are chosen anew."""

MOST_PLANS = 8192
"""Most cached plans: growing sequences make a new signature with each token. Beyond it all are dropped and chosen anew."""

MOST_POOLS = 64
"""Groups of problems with sorted records at a time."""

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
"""Values of FLASHTUNE_UNMEASURED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a stack of layers: `databases` (paths or URLs, the topmost first) over the user's own results and the shipped ones, or
    `alone`.

    `unmeasured` allows kernels without measurements on the GPU's architecture (None: FLASHTUNE_UNMEASURED decides).
    """

    databases: tuple[str, ...] = ()
    alone: bool = False
    unmeasured: bool | None = None


class Memo:
    """Plans by signature and, for decode steps, by length bucket (flashtune.dispatch.resolve.length_buckets; None for steps chosen singly).

    Also the library's records by group, kernels that failed for good (`broken`) or for now (`faults`), and the warnings issued. `pinned` is
    a pass and a kernel that serves every call of it which it accepts, for measurements. Reading a plan takes no lock; choosing one holds
    `lock`.
    """

    def __init__(self, settings: Settings = Settings(), *, pinned: tuple[Direction, LoadedKernel] | None = None) -> None:
        self.lock = threading.RLock()
        self.plans = Plans()
        self.backwards: dict[Hashable, Backward] = {}
        self.buckets: dict[Hashable, TorchPlan | KernelPlan | None] = {}
        self.packed: dict[Hashable, Any] = {}
        self.broken: dict[tuple[str, str], str] = {}
        self.faults: dict[tuple[str, str], str] = {}
        self.settings = settings
        self.pinned: dict[Direction, LoadedKernel] = {} if pinned is None else dict([pinned])
        self._library: Library | None = None
        self._pools: dict[Hashable, Pool] = {}
        self._code: dict[tuple[str, str], tuple[Manifest, LoadedKernel]] = {}
        self._warned: set[str] = set()
        self._warned_of: set[str] = set()

    @functools.cached_property
    def unmeasured(self) -> bool:
        """True where kernels without measurements on the GPU's architecture may serve."""
        if self.settings.unmeasured is not None:
            return self.settings.unmeasured
        said = os.environ.get("FLASHTUNE_UNMEASURED", "").strip().lower()
        if said not in (*_ON, *_OFF):
            self.warn_once(f"flashtune: FLASHTUNE_UNMEASURED is {said!r}: set it to 1 or 0 (it counts as 0)")
        return said in _ON

    def keep(self, signature: Hashable, plan: Plan) -> None:
        """Cache the plan of a signature."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
            self.buckets.clear()
        self.plans[signature] = plan

    def meet_fault(self, kernel: tuple[str, str], why: str) -> str:
        """Warn once that this machine can't compile kernels, let others serve for RETRY_S, and return the reason in a line."""
        if not self.faults:
            later = Timer(RETRY_S, self.retry)
            later.daemon = True
            later.start()
        self.faults[kernel] = why
        remedy = "free some space, or point TRITON_CACHE_DIR and TMPDIR at folders that can be written"
        self.warn_once(f"flashtune: no kernel can be compiled here ({why}): {remedy}; until then others serve, and it is tried again")
        return why

    def retry(self) -> None:
        """Drop the faults of this machine, and all plans chosen under them."""
        with self.lock:
            self.faults.clear()
            self.plans.clear()
            self.buckets.clear()
            self.backwards.clear()
            self.packed.clear()

    def read(self) -> None:
        """Read the library, if that wasn't done; raises DatabaseError where a database is missing or damaged."""
        with self.lock, held_off():
            if self._library is None:
                # The import is slow, so that only calls that need records pay for it.
                from flashtune.db.library import Library

                self._library = Library.over(self.settings.databases, alone=self.settings.alone)

    def warn_of_missing(self) -> None:
        """Warn where `FLASHTUNE_DB` names no file, for calls that need no records; for others `read` raises."""
        named = os.environ.get("FLASHTUNE_DB", "")
        path = named.removeprefix("sqlite:///")
        if path and "://" not in path and not self.settings.alone and not os.path.isfile(os.path.expanduser(path)):
            wrong = f"{named!r} is no file" if os.path.exists(os.path.expanduser(path)) else f"there is no database at {named!r}"
            self.warn_once(f"flashtune: {wrong}, which FLASHTUNE_DB names: check the path")

    def surroundings(self, device: torch.device, problem: Problem) -> tuple[Target, Mapping[str, Family], Pool | Sequence[TuningRecord]]:
        """Target, families that run there and records; the interpreter runs default configs alone, since its times mean nothing."""
        target = devices.target_of(device)
        if device.type == "cpu":
            return target, {name: family for name, family in families().items() if family.interpretable}, []
        return target, families(), self.pool(problem.key(target.slug), target)

    def pool(self, key: ProblemKey, target: Target) -> Pool:
        """Records that may serve `key` on this GPU; the first call reads the library."""
        self.read()
        assert self._library is not None, "it was just read"
        # A large library is read per key, since looking at all of it would take too long.
        group: Hashable = key if self._library.large else group_of(key)
        if group not in self._pools:
            while len(self._pools) >= MOST_POOLS:
                del self._pools[next(iter(self._pools))]
            with held_off():
                gpus = [gpu for gpu, known in targets().items() if known.arch == target.arch] or [target.slug]
                self._pools[group] = Pool(key, target, self._library.near(key, gpus), families())
        return self._pools[group]

    def machine_code(self, family: Family, variant: Variant, target: Target) -> tuple[Manifest | None, LoadedKernel | None]:
        """Machine code of a variant and its host code; (None, None) where there is none, or where files are damaged, which is warned of:
        Triton then compiles the text."""
        name = (variant.id, target.arch)
        if name not in self._code:
            try:
                with held_off():
                    manifest = kernels.manifest(variant, target.arch)
                    if manifest is None:
                        return None, None
                    self._code[name] = manifest, kernels.host_code(family, variant)
            except (EnvironmentProblem, OSError) as error:
                self.warn_once(f"flashtune: {error}; until then Triton compiles {variant.template} {variant.id}")
                return None, None
        return self._code[name]

    def warn_of_elsewhere(self, record: TuningRecord, device: torch.device) -> None:
        """Warn, once for each database, where a record that serves on this GPU was measured on another machine; shipped records are from
        another one anyway."""
        if record.origin == "shipped" or record.origin in self._warned_of or record.outcome.source != "measured":
            return
        if differences := devices.differing(record.provenance, devices.here(device.index)):
            self._warned_of.add(record.origin)
            said = f"records of {record.origin} were measured elsewhere: {', '.join(differences)}"
            self.warn_once(f"flashtune: {said}; they serve, search here to compare them")

    def warn_once(self, message: str) -> None:
        """Issue a RuntimeWarning, the first time that this message comes up."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=2)
