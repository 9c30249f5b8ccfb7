"""Optuna storage that is waited for while it is locked or out of reach, with its faults in one sentence."""

import sqlite3
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import optuna
from optuna.trial import FrozenTrial

from flashtune.core.system.errors import DatabaseError, FlashtuneError
from flashtune.core.system.secrets import mask_secrets, mask_url
from flashtune.core.system.unbroken import unbroken
from flashtune.db.inspection import explain

T = TypeVar("T")

PATIENCE_S = 60.0
"""Seconds for which a storage may be locked or out of reach (its server restarts, say) before the search gives up."""


class StoredStudy:
    """Study of that name in a storage, made where there is none.

    Raises DatabaseError where the storage stays locked or out of reach for `PATIENCE_S`, EnvironmentProblem where it is full or may not be
    written.
    """

    def __init__(self, storage: optuna.storages.BaseStorage, name: str) -> None:
        self._where = mask_url(str(getattr(storage, "url", "in memory")))
        self.storage = optuna.storages.get_storage(storage)
        self.study = self.patiently(lambda: optuna.create_study(storage=self.storage, study_name=name, load_if_exists=True))

    def trials(self) -> list[FrozenTrial]:
        """All trials, in the order of their numbers."""
        return self.patiently(lambda: self.storage.get_all_trials(self.study._study_id, deepcopy=False))

    def add(self, trial: FrozenTrial) -> int:
        """Store a trial, whose user attributes no other has, in one transaction; returns its id in the storage."""
        attempts = count()

        def add() -> int:
            # An attempt whose answer was lost may have stored it.
            known = self.storage.get_all_trials(self.study._study_id, deepcopy=False) if next(attempts) else []
            found = next((one._trial_id for one in known if one.user_attrs == trial.user_attrs), None)
            return self.storage.create_new_trial(self.study._study_id, trial) if found is None else found

        return self.patiently(add)

    def attribute(self, name: str) -> Any:
        """User attribute of the study; None where it has none of that name."""
        return self.patiently(lambda: self.storage.get_study_user_attrs(self.study._study_id)).get(name)

    def set_attribute(self, name: str, value: Any) -> None:
        """Store a user attribute of the study."""
        self.patiently(lambda: self.storage.set_study_user_attr(self.study._study_id, name, value))

    def patiently(self, work: Callable[[], T], patience_s: float | None = None) -> T:
        """Result of `work`, retried while the storage is locked or out of reach; it must be harmless to repeat."""
        deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        pause = 0.05
        while True:
            try:
                # An interrupted write would keep the file locked against this process's own clean-up.
                with unbroken():
                    return work()
            except Exception as error:
                # Optuna wraps most of SQLAlchemy's errors, and lets some through.
                wrapped = isinstance(error, optuna.exceptions.StorageInternalError)
                if not wrapped and not type(error).__module__.startswith("sqlalchemy."):
                    raise
                if time.monotonic() > deadline:
                    raise storage_fault(self._where, error) from error
                time.sleep(pause)
                pause = min(2.0, 2 * pause)


def newest_unfinished(storage: optuna.storages.BaseStorage, name: str) -> tuple[StoredStudy, int]:
    """Newest study called `name-NUMBER` and its number; a next one where that is finished (attribute `finished`)."""
    prefix = f"{name}-"
    numbers = (study.removeprefix(prefix) for study in optuna.get_all_study_names(storage) if study.startswith(prefix))
    newest = max((int(number) for number in numbers if number.isdecimal()), default=1)
    study = StoredStudy(storage, f"{prefix}{newest}")
    return (StoredStudy(storage, f"{prefix}{newest + 1}"), newest + 1) if study.attribute("finished") else (study, newest)


def storage_fault(shown: str, error: BaseException) -> FlashtuneError:
    """One-sentence error for a fault of the database behind the storage `shown`."""
    if isinstance(error, optuna.exceptions.StorageInternalError):
        error = error.__cause__ or error
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, sqlite3.Error):
        return explain(cause, f"the study storage {shown}")
    message = mask_secrets(" ".join(str(cause).split()))[:300]
    return DatabaseError(f"the study storage {shown} can't be used ({message}): check the URL, its permissions and the server")
