"""A stand-in for the driver that keeps what launches are given, and shipped kernels whose host code says what that should be."""

import ctypes
import struct
import threading
import time
from typing import Any

import pytest

from flashtune.core.code.binaries import Manifest
from flashtune.core.code.index import GeneratedKernel
from flashtune.core.code.launches import Operand
from flashtune.core.code.launching import LoadedKernel
from flashtune.core.code.shipped import PACKAGE, shipped_index, shipped_manifest
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import TuningRecord
from flashtune.db import library as databases
from flashtune.dispatch.plans import driver
from flashtune.templates import family, without_kernel
from flashtune.templates.loading import loaded

Q = Operand(0, (2, 3, 40, 128), (15360, 5120, 128, 1), "bf16")
FORMATS = ("map", *"iiii", *"qqqq", "Q", "i", "f", "Q", "I", "q", "Q", "Q")
"""What the kernel of BINARY takes, parameter by parameter: map, shape, strides, pointer, numbers and two pointers to scratch."""


class Library:
    """Stands in for libcuda: keeps what each launch was given. `opaque` hides addresses in tensor maps, as a later driver might."""

    def __init__(self) -> None:
        self.launched: list[tuple[driver.LaunchConfig, int, list[Any]]] = []
        self.opaque = False
        self.codes: list[int] = []
        self.contexts = 0
        self.pause = 0.0
        self.lock = threading.Lock()

    def cuLaunchKernelEx(self, config: int, function: int, parameters: int, extra: None) -> int:
        if self.codes:
            return self.codes.pop(0)
        time.sleep(self.pause)
        places = (ctypes.c_void_p * len(FORMATS)).from_address(parameters)
        found: list[Any] = []
        for kind, place in zip(FORMATS, places, strict=True):
            assert place is not None
            if kind == "map":
                assert place % 64 == 0
                words = list((ctypes.c_uint64 * 16).from_address(place))
                found.append((words[1] ^ 0xFFFF if self.opaque else words[0], words[2:]))
            else:
                found.append(struct.unpack("<" + kind, ctypes.string_at(place, struct.calcsize("<" + kind)))[0])
        copy = driver.LaunchConfig.from_buffer_copy(ctypes.string_at(config, ctypes.sizeof(driver.LaunchConfig)))
        with self.lock:
            self.launched.append((copy, function, found))
        return 0

    def cuTensorMapEncodeTiled(self, place: Any, *words: Any) -> int:
        element_type, rank, address, sizes, strides, box, steps, *rest = words
        kept = [element_type, rank, *sizes, *strides, *box, *steps, *rest]
        found = (ctypes.c_uint64 * 16).from_address(place.value)
        found[0], found[1] = (0, address.value ^ 0xFFFF) if self.opaque else (address.value, 0)
        found[2:] = [hash((index, *kept)) % 2**64 for index in range(14)]
        return 0

    def cuTensorMapReplaceAddress(self, place: int, address: int) -> int:
        (ctypes.c_uint64 * 16).from_address(place)[1] = address ^ 0xFFFF
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(driver, "use_context", lambda device: setattr(library, "contexts", library.contexts + 1))
    return library


SHIPPED = shipped_index(PACKAGE).kernels
WINNERS = databases.Library.of(databases.shipped_path()).winners()
RECORDS = [one for record in WINNERS if without_kernel(record) is None for one in (record.as_fallback(), record) if one is not None]
BY_ID = {one.outcome.variant_id: one for one in RECORDS}
PROBLEMS = {name: record.problem for name, record in BY_ID.items()}


def code_of(kernel: GeneratedKernel) -> Manifest:
    """The machine code of a shipped kernel."""
    found = shipped_manifest(PACKAGE, kernel.variant_id, kernel.arch)
    assert found is not None
    return found


def host_of_shipped(kernel: GeneratedKernel) -> LoadedKernel:
    """The host side of a shipped kernel."""
    return host_side(BY_ID[kernel.variant_id])


def host_side(record: TuningRecord) -> LoadedKernel:
    chosen = family(record.outcome.template)
    return loaded(chosen, record.problem.spec(), record.outcome.config)


def hopper(features: Features) -> LoadedKernel:
    chosen = family("flash_fwd_hopper")
    spec = Problem(batch=2, heads=4, kv_heads=4, n_q=9, n_kv=21, d=64, d_v=64, dtype="bf16", features=features).spec()
    return loaded(chosen, spec, chosen.default(spec, find_target("h200")))
