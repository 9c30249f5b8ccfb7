"""A plan whose softmax was mispredicted is served by its fallback kernel from then on; explain says so."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hopper_kernels
import pytest
import torch

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, settles
from flashtune.core.problems.parameters import CallParameters
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.plans import driver, launch
from flashtune.dispatch.plans.forward import Fallback, KernelPlan
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.plans.misprediction import MISPREDICTIONS, SHARE, WINDOW, Latch, Misprediction, Mispredictions
from flashtune.dispatch.policy.choose import choose
from flashtune.templates import families

PROGRAMS = 132
CONFIG = Config.of(maximum="running")


class Counts:
    """The memory that a kernel counts in, as `count_launch` and `report_misled` write it."""

    def __init__(self, word: int = 0) -> None:
        self.words = (ctypes.c_uint64 * (1 + WINDOW))(word, *[word] * WINDOW)
        self.misprediction = Misprediction(0, ctypes.addressof(self.words))
        self.misprediction.programs = PROGRAMS

    def launch(self, mispredicted: int = 0, count: int = 1) -> None:
        """Run so many launches with so many mispredicting programs."""
        for _ in range(count):
            self.words[1 + (self.words[0] >> 32) % WINDOW] = self.words[0]
            self.words[0] += 2**32 + mispredicted


class Calls(Counts):
    """Calls of a plan; the GPU ends their launches `behind` calls later."""

    def __init__(self, *, behind: int = 0) -> None:
        super().__init__()
        self._behind = behind
        self._queue = [0] * behind

    def catch_up(self) -> None:
        """The host waits until the GPU has done all there is."""
        for mispredicted in self._queue:
            self.launch(mispredicted)
        self._queue = []

    def make(self, *mispredicted: int) -> str:
        """Calls with so many mispredicting programs each; which kernel served each: s or f."""
        served = ""
        for programs in mispredicted:
            state = self.misprediction
            fallback = (state.latched or state.mispredicted.value != state.seen) and state.check()
            served += "f" if fallback else "s"
            if not fallback:
                self._queue.append(programs)
            while len(self._queue) > self._behind:
                self.launch(self._queue.pop(0))
        return served


@pytest.mark.parametrize("good", [0, 1, 7, 8, 200, 10_000])
def test_the_fallback_serves_from_the_third_mispredicted_call_on_however_many_were_good(good: int) -> None:
    assert Calls().make(*[0] * good, *[PROGRAMS] * 3, *[0] * 100) == "s" * (good + 2) + "f" * 101


def test_one_mispredicted_launch_changes_nothing() -> None:
    assert set(Calls().make(*([PROGRAMS] + [0] * 7) * 50)) == {"s"}


def test_less_than_a_quarter_of_the_programs_changes_nothing_and_a_quarter_does() -> None:
    assert set(Calls().make(*[PROGRAMS // SHARE - 1] * 2000)) == {"s"}
    assert Calls().make(*[PROGRAMS // SHARE] * (WINDOW + 1)) == "s" * WINDOW + "f"


@pytest.mark.parametrize("behind", [1, 7, 100, 1000])
def test_a_few_programs_of_each_of_many_launches_change_nothing_when_the_host_sees_them_at_once(behind: int) -> None:
    """Tiles near the top of a causal mask have few blocks, more than half of which a sink may raise: always the same few of a launch."""
    calls = Calls(behind=behind)
    for _ in range(20):
        assert set(calls.make(*[PROGRAMS // 32] * behind)) == {"s"}
        calls.catch_up()


def test_good_calls_check_nothing() -> None:
    calls = Calls()
    calls.make(*[0] * 100)
    assert (calls.misprediction.mispredicted.value, calls.misprediction.seen, calls.misprediction.latched) == (0, 0, False)


def test_counts_may_pass_their_largest_numbers() -> None:
    for word in (2**32 - PROGRAMS, (2**32 - 1) << 32, 2**64 - PROGRAMS):
        counts = Counts(word)
        counts.launch(PROGRAMS)
        assert not counts.misprediction.check()
        counts.launch(PROGRAMS)
        assert counts.misprediction.check()


def test_any_number_of_threads_may_share_one() -> None:
    calls = Calls()
    served: list[str] = []
    threads = [threading.Thread(target=lambda: served.append(calls.make(*[PROGRAMS] * 500))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "".join(served).count("f") > 1900
    assert calls.make(*[0] * 10) == "f" * 10


class Settled(KernelPlan):
    """A plan whose launches say that they were made; everything before them is a plan's own."""

    def _through_triton(self, *_: object) -> Any:
        return "settled", None


class Other:
    """A fallback's plan."""

    def __init__(self, *, fails: bool = False, program: object = True) -> None:
        self.fails, self.program, self.built = fails, program, 0

    def build(self, *_: object) -> None:
        self.built += 1
        if self.fails:
            raise RuntimeError("ptxas: out of registers")

    def run(self, *_: object) -> Any:
        return "fallback", None


def planned(plan: Callable[[], Any], warned: list[str] | None = None) -> tuple[Settled, Counts]:
    """A plan and the memory that its kernel counts in."""
    q = torch.zeros(1, 1, 64, 64)
    warn = ([] if warned is None else warned).append
    call, module = parse(Arguments(q, q, q), Options()), SimpleNamespace()
    found = Settled(call, Code(module, warn=warn), q.stride(), fallback=Fallback(config=CONFIG, plan=plan))  # type: ignore[arg-type]
    counts = Counts()
    found.latch = Latch(counts.misprediction, found._instead)
    return found, counts


def served(plan: KernelPlan, count: int = 1) -> list[Any]:
    q = torch.zeros(1, 1, 64, 64)
    return [plan.run(q, q, q, None, None, None)[0] for _ in range(count)]


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """True if the current stream is captured into a graph."""
    found = [False]
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: found[0], raising=False)
    return found


def test_a_plan_makes_its_fallback_when_it_is_first_misled(capturing: list[bool]) -> None:
    other = Other()
    plan, counts = planned(lambda: other)
    assert served(plan, 3) == ["settled"] * 3 and not other.built
    counts.launch(PROGRAMS, 2)
    assert served(plan, 3) == ["fallback"] * 3
    assert other.built == 1


@pytest.mark.parametrize("other", [None, Other(fails=True), Other(program=None)], ids=["none", "unbuildable", "unprepared"])
def test_without_a_fallback_that_runs_the_plan_serves_on_and_warns_once(other: Other | None, capturing: list[bool]) -> None:
    warned: list[str] = []
    plan, counts = planned(lambda: other, warned)
    counts.launch(PROGRAMS, 2)
    assert served(plan, 3) == ["settled"] * 3
    counts.launch(PROGRAMS, 2)
    assert served(plan, 3) == ["settled"] * 3
    assert len(warned) == 1 and "mispredicts softmax" in warned[0]


def test_while_a_graph_is_captured_nothing_changes(capturing: list[bool]) -> None:
    plan, counts = planned(Other)
    counts.launch(PROGRAMS, 2)
    capturing[0] = True
    assert served(plan, 200) == ["settled"] * 200
    capturing[0] = False
    assert served(plan) == ["fallback"]
    capturing[0] = True
    # A graph keeps what serves while it is captured.
    assert served(plan, 500) == ["fallback"] * 500


def test_in_deterministic_mode_one_kernel_serves(capturing: list[bool]) -> None:
    plan, counts = planned(Other)
    counts.launch(PROGRAMS, 2)
    assert served(plan) == ["fallback"]
    before = torch.are_deterministic_algorithms_enabled()
    # As torch.use_deterministic_algorithms does, which imports its compiler.
    torch._C._set_deterministic_algorithms(True)
    try:
        assert served(plan, 200) == ["settled"] * 200
    finally:
        torch._C._set_deterministic_algorithms(before)
    assert served(plan) == ["fallback"]


def test_a_call_that_asks_for_the_same_bits_has_no_count() -> None:
    settling = SimpleNamespace(launches=hopper_kernels.rendered(hopper_kernels.problem(64).spec(), maximum="first").launches)
    q, fallback = torch.zeros(1, 1, 64, 64), Fallback(config=CONFIG, plan=lambda: None)
    call = parse(Arguments(q, q, q), Options())
    assert KernelPlan(replace(call, deterministic=True), Code(settling), q.stride(), fallback=fallback)._counts(0) is None  # type: ignore[arg-type]
    assert KernelPlan(call, Code(settling), q.stride())._counts(0) is None  # type: ignore[arg-type]


def test_counts_are_a_plans_own_and_decided_again_it_goes_on_with_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[Any] = []

    def host_memory(device: int, size: int) -> int:
        rooms.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(rooms[-1])

    monkeypatch.setattr(driver, "host_memory", host_memory)
    monkeypatch.setattr(driver, "resident", lambda device, data: (device + 1) << 40)
    counts = Mispredictions()
    found = [counts.of(device, key) for device in (0, 1) for key in range(100)]
    assert len({one.addresses for one in found}) == 200
    ctypes.memset(found[0].addresses[1], 255, 8 * (1 + WINDOW))
    assert counts.of(0, 0) is found[0] and [one.mispredicted.value for one in found[:3]] == [2**32 - 1, 0, 0]


def test_launches_count_at_their_plans_own_addresses_and_where_nobody_reads_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    unread = SimpleNamespace(addresses=(3 << 40, 3 << 41))
    monkeypatch.setattr(driver, "driven", lambda device: True)
    monkeypatch.setattr(MISPREDICTIONS, "of", lambda device, key: unread)
    wanted = hopper_kernels.problem(64)
    module = hopper_kernels.rendered(wanted.spec(), maximum="first")
    inputs = hopper_kernels.make_inputs(wanted, device="cpu", seed=0)
    parameters = CallParameters(scale=0.125, band=wanted.band)
    for told in ((1 << 40, 1 << 41), None):
        plan = launch.planned(module, inputs.arguments, parameters, told)
        assert plan is not None and not plan.scratch
        names = module.flash_fwd_hopper.arg_names
        places = [names.index(name) for name in ("misled_ptr", "host_misled_ptr")]
        assert [plan.launches[-1].arguments[place].address for place in places] == list(told or unread.addresses)


RECORDS = [record for record in Library.of(shipped_path()).records(gpu="h200") if record.fallback is not None]


def test_the_policy_names_the_fallback_of_the_row_that_serves() -> None:
    record, target = RECORDS[0], find_target("h200")
    chosen = choose(record.problem, target, [record], families())
    assert record.fallback is not None and chosen.config is not None and chosen.fallback is not None
    assert settles(chosen.config) and chosen.fallback == record.fallback.config
    # One that stands in has it moved like its config, and one that is none any more is left out.
    wider = replace(record.problem, n_kv=record.problem.n_kv + 64)
    assert choose(wider, target, [record], families()).fallback == chosen.fallback
    for other in (replace(record.fallback, config=Config.of(maximum="running")), replace(record.fallback, template="flash_decode"), None):
        assert choose(record.problem, target, [replace(record, fallback=other)], families()).fallback is None


def test_explain_names_the_fallback_and_what_the_plan_remembers(capturing: list[bool]) -> None:
    problem = next(record for record in RECORDS if settles(record.outcome.config)).problem
    found = dispatch.explain_problem(problem, "h200")
    assert found.twin is not None and not settles(found.twin)
    assert (found.misled_programs, found.went_over, found.twin_serves) == (0, 0, False)
    plan, counts = planned(Other)
    assert found.remembering(plan.misprediction).reason == found.reason
    counts.launch(PROGRAMS, 2)
    served(plan)
    told = found.remembering(plan.misprediction)
    assert (told.misled_programs, told.went_over, told.twin_serves) == (2 * PROGRAMS, 1, True)
    assert "so its fallback kernel runs the call" in told.reason
