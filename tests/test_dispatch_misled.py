"""A plan that scores mislead goes over to its fallback, asks whether they still do, and comes back; explain tells of it."""

import ctypes
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import hopper_kernels
import pytest
import torch

from flashtune import dispatch
from flashtune.core import launching
from flashtune.core.config import Config, settles
from flashtune.core.parameters import CallParameters
from flashtune.core.target import find_target
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch import api
from flashtune.dispatch.call import Arguments, Options, parse
from flashtune.dispatch.launch import driver, prepared
from flashtune.dispatch.plans.forward import Fallback, KernelPlan
from flashtune.dispatch.plans.misprediction import FEW, FIRST_PERIOD, LONGEST_PERIOD, SHARE, WATCHED, Misprediction
from flashtune.dispatch.policy import choose
from flashtune.dispatch.resolve.memo import Memo
from flashtune.templates import families

PROGRAMS = 132
MANY = PROGRAMS // SHARE
CONFIG = Config.of(maximum="running")


class Calls:
    """Calls of a plan, each of which is misled or not; the GPU answers `behind` calls later."""

    def __init__(self, *, behind: int = 0, programs: int = PROGRAMS) -> None:
        self.word = SimpleNamespace(value=2**32 - 5)
        self.misled = Misprediction(self.word, programs)
        self._behind, self._queue = behind, [0] * behind

    def catch_up(self) -> None:
        """The host waits until the GPU has done all there is."""
        self.word.value = (self.word.value + sum(self._queue)) % 2**32
        self._queue = [0] * self._behind

    def make(self, count: int, misled: int) -> str:
        """So many calls with so many misled programs where the settled kernel serves; which kernel served each: s or t."""
        served = ""
        for _ in range(count):
            state = self.misled
            fallback = (state.busy or self.word.value != state.seen) and state.fallback_serves()
            served += "t" if fallback else "s"
            self._queue.append(0 if fallback else misled)
            self.word.value = (self.word.value + self._queue.pop(0)) % 2**32
        return served


def test_what_is_never_misled_is_served_as_ever_and_asks_nothing() -> None:
    calls = Calls()
    assert set(calls.make(100, 0)) == {"s"}
    assert (calls.misled.times, calls.misled.busy, calls.misled.seen) == (0, False, calls.word.value)


def test_a_few_misled_programs_change_nothing_and_a_quarter_of_a_launch_does() -> None:
    calls = Calls()
    assert set(calls.make(2000, MANY - 1)) == {"s"}
    assert calls.make(2 * WATCHED, 2 * MANY).endswith("t")
    # A quarter of FEW launches, or as many as come to that.
    assert Calls().make(FEW + 2, MANY) == "s" * FEW + "tt"
    assert Calls().make(FEW // SHARE + 2, PROGRAMS) == "s" * (FEW // SHARE) + "tt"
    assert Calls(programs=1).make(FEW, 1).endswith("t")


def test_what_a_few_programs_of_many_launches_count_while_the_host_is_ahead_changes_nothing() -> None:
    """Tiles near the top of a causal mask have few blocks, more than half of which a sink may raise: always the same few of a launch."""
    calls = Calls(behind=100)
    assert set(calls.make(100, PROGRAMS // 32)) == {"s"}
    for _ in range(20):
        calls.catch_up()
        assert set(calls.make(100, PROGRAMS // 32)) == {"s"}, "the counts of a hundred launches are seen at once"
    assert calls.misled.times == 0


def test_what_was_taken_for_misled_and_was_not_takes_more_proof_the_next_time() -> None:
    calls, few = Calls(behind=400), PROGRAMS // 8
    for _ in range(40):
        calls.make(400, few)
        calls.catch_up()
    before = calls.misled.times
    assert 0 < before < 5
    for _ in range(40):
        calls.make(400, few)
        calls.catch_up()
    assert calls.misled.times == before


def test_calls_are_no_longer_watched_once_none_is_misled() -> None:
    calls = Calls()
    calls.make(20, 1)
    assert calls.misled.busy
    calls.make(4 * WATCHED, 0)
    assert not calls.misled.busy


def test_while_scores_mislead_one_call_in_ever_more_is_settled() -> None:
    served = Calls().make(20 * LONGEST_PERIOD, PROGRAMS)
    questions = [place for place, kernel in enumerate(served) if kernel == "s"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(questions)]
    # The first calls are misled; each question then waits for its answer, and a period more.
    first = FEW // SHARE
    assert questions[:first] == list(range(first)) and gaps[first - 1] == FIRST_PERIOD + 1
    assert gaps == sorted(gaps)
    assert gaps[-1] == 2 * LONGEST_PERIOD + 1


@pytest.mark.parametrize("behind", [0, 40, 1000])
def test_it_comes_back_once_scores_no_longer_mislead_however_far_the_gpu_is_behind(behind: int) -> None:
    calls = Calls(behind=behind)
    calls.make(6000, PROGRAMS)
    assert calls.misled.away
    times = calls.misled.times
    served = calls.make(5 * LONGEST_PERIOD, 0)
    assert served[-LONGEST_PERIOD:] == "s" * LONGEST_PERIOD
    assert not calls.misled.away and calls.misled.times <= times + 1


def test_where_the_gpu_is_far_behind_calls_are_misled_ever_less() -> None:
    served = Calls(behind=1000).make(60 * LONGEST_PERIOD, PROGRAMS)
    assert served[-20 * LONGEST_PERIOD :].count("s") < 20


def test_any_number_of_threads_may_share_one() -> None:
    calls = Calls()
    served: list[str] = []
    threads = [threading.Thread(target=lambda: served.append(calls.make(500, PROGRAMS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "".join(served).count("t") > 1500
    # Whatever they left behind, it comes back.
    assert calls.make(5 * LONGEST_PERIOD, 0).endswith("s")


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


def planned(plan: Callable[[], Any], warned: list[str] | None = None) -> tuple[Settled, Any]:
    """A plan and the number that its kernel counts in."""
    q = torch.zeros(1, 1, 64, 64)
    warn = ([] if warned is None else warned).append
    call, module = parse(Arguments(q, q, q), Options()), SimpleNamespace()
    found = Settled(call, module, q, fallback=Fallback(config=CONFIG, plan=plan), warn=warn)  # type: ignore[arg-type]
    word = SimpleNamespace(value=0)
    found.misprediction = Misprediction(word, PROGRAMS)
    return found, word


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
    plan, word = planned(lambda: other)
    assert served(plan, 3) == ["settled"] * 3 and not other.built
    word.value += MANY * FEW
    assert served(plan, 3) == ["fallback"] * 3
    assert other.built == 1


@pytest.mark.parametrize("other", [None, Other(fails=True), Other(program=None)], ids=["none", "unbuildable", "unprepared"])
def test_without_a_fallback_that_runs_the_plan_serves_on_and_warns_once(other: Other | None, capturing: list[bool]) -> None:
    warned: list[str] = []
    plan, word = planned(lambda: other, warned)
    word.value += MANY * FEW
    assert served(plan, 3) == ["settled"] * 3
    word.value += MANY * FEW
    assert served(plan, 3) == ["settled"] * 3
    assert len(warned) == 1 and "scores defeat" in warned[0]


def test_while_a_graph_is_captured_nothing_changes(capturing: list[bool]) -> None:
    plan, word = planned(Other)
    word.value += MANY * FEW
    capturing[0] = True
    assert served(plan, 200) == ["settled"] * 200
    capturing[0] = False
    assert served(plan) == ["fallback"]
    capturing[0] = True
    # A graph keeps what serves while it is captured.
    assert served(plan, 500) == ["fallback"] * 500
    assert plan.misprediction is not None and plan.misprediction.times == 1


def test_in_deterministic_mode_one_kernel_serves(capturing: list[bool]) -> None:
    plan, word = planned(Other)
    word.value += MANY * FEW
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
    assert KernelPlan(replace(call, deterministic=True), settling, q, fallback=fallback)._count(0) is None  # type: ignore[arg-type]
    assert KernelPlan(call, settling, q)._count(0) is None  # type: ignore[arg-type]


def test_counts_are_a_plans_own_and_decided_again_it_goes_on_with_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[Any] = []

    def host_memory(device: int, size: int) -> int:
        rooms.append(ctypes.create_string_buffer(size))
        return ctypes.addressof(rooms[-1])

    monkeypatch.setattr(driver, "host_memory", host_memory)
    monkeypatch.setattr(driver, "resident", lambda device, data: (device + 1) << 40)
    counts = driver.MirroredCounts()
    found = [counts.of(device, what) for device in (0, 1) for what in range(100)]
    assert len({count.addresses for count in found}) == 200
    found[0].word.value = 7
    assert counts.of(0, 0) is found[0] and [count.word.value for count in found[:3]] == [7, 0, 0]


def test_recorded_launches_count_at_their_plans_own_addresses() -> None:
    wanted = hopper_kernels.problem(64)
    module = hopper_kernels.rendered(wanted.spec(), maximum="first")
    inputs = hopper_kernels.make_inputs(wanted, device="cpu", seed=0)
    parameters = CallParameters(scale=0.125, band=wanted.band)
    for told in ((1 << 40, 1 << 41), None):
        plan = prepared.planned(module, inputs.arguments, parameters, told)
        assert plan is not None and not plan.scratch
        names = module.flash_fwd_hopper.arg_names
        places = [names.index(name) for name in ("misled_ptr", "host_misled_ptr")]
        unread = [x.data_ptr() for x in launching.unread(inputs.q.device)]
        assert [plan.launches[-1].arguments[place].address for place in places] == list(told or unread)


RECORDS = [record for record in Library.of(shipped_path()).records(gpu="h200") if record.fallback is not None]


def test_the_policy_names_the_fallback_of_the_row_that_serves() -> None:
    record, target = RECORDS[0], find_target("h200")
    chosen = choose(record.problem, target, [record], families())
    assert record.fallback is not None and chosen.config is not None and chosen.fallback is not None
    assert settles(chosen.config) and chosen.fallback == families()[record.fallback.template].completed(record.fallback.config)
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
    plan, word = planned(Other)
    assert found.remembering(plan).reason == found.reason
    word.value += MANY * FEW
    served(plan)
    told = found.remembering(plan)
    assert (told.misled_programs, told.went_over, told.twin_serves) == (MANY * FEW, 1, True)
    assert "switched to its fallback kernel 1 time; now that serves" in told.reason
    served(plan, 5 * LONGEST_PERIOD)
    assert "1 time; now it serves again" in found.remembering(plan).reason


def test_what_explain_tells_is_that_of_the_plan_in_force() -> None:
    memo = Memo()
    plan, _ = planned(Other)
    again = Settled(plan.call, plan.module, torch.zeros(1, 1, 64, 64), fallback=plan.fallback)
    assert api._in_force(memo, again) is None
    memo.keep("signature", plan)
    assert api._in_force(memo, again) is plan
    assert api._in_force(memo, Settled(plan.call, plan.module, torch.zeros(1, 1, 64, 64))) is None
