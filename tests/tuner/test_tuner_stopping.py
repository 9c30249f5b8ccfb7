"""When a search has tried enough, in words that say why."""

import math
from typing import get_args

import pytest
from commands import flashtune
from db_samples import outcome

from flashtune.cli.options import share_of
from flashtune.core.records.results import Ending
from flashtune.core.system.errors import InputError
from flashtune.tuner.search.stopping import LEFT, PATIENCE, Reason, StoppingRule, sentence


def after(times: list[float | None], until: float | None = 0.005, left: float = math.inf, in_all: float = 0.0) -> list[str | None]:
    """Answers of the rule after each of these trials, None standing for one that failed."""
    rule, verdicts = StoppingRule(until), []
    for number, time in enumerate(times):
        rule.add(outcome(f"{number:016x}", time))
        verdicts.append(rule.verdict(left, in_all))
    return verdicts


def test_so_many_trials_without_a_gain_end_a_search() -> None:
    flat = [100.0, *[99.8] * (PATIENCE - 1), 99.7]
    assert after(flat)[:-1] == [None] * PATIENCE, "0.2 % is no gain"
    assert after(flat)[-1] == "patience"


def test_small_gains_add_up_to_one() -> None:
    """Each trial is 0.2 % faster than the one before: every third is half a percent faster than the last that counted."""
    assert set(after([100.0 * 0.998**number for number in range(40)])) == {None}


def test_a_gain_starts_the_count_again_and_failures_count() -> None:
    times: list[float | None] = [100.0, *[None] * (PATIENCE - 1), 90.0, *[None] * PATIENCE]
    verdicts = after(times)
    assert verdicts[:-1] == [None] * (len(times) - 1)
    assert verdicts[-1] == "patience"


def test_nothing_ends_before_anything_was_timed() -> None:
    assert set(after([None] * (3 * PATIENCE), left=0.0)) == {None}


def test_a_surrogate_that_expects_nothing_is_not_believed_while_trials_gain() -> None:
    falling = [100.0 * 0.9**number for number in range(3 * PATIENCE)]
    assert set(after(falling, left=0.0)) == {None}
    assert after([100.0] * (PATIENCE + 1), left=0.004)[-2:] == [None, "gain"]


def test_a_surrogate_that_expects_a_gain_is_believed_twice_as_long() -> None:
    flat = [100.0] * (2 * PATIENCE + 1)
    assert after(flat, left=0.006)[-2:] == [None, "patience"]


def test_many_small_chances_are_tried_twice_as_long_and_few_are_not() -> None:
    flat: list[float | None] = [100.0] * (2 * PATIENCE + 1)
    assert after(flat, left=0.001, in_all=0.03)[-2:] == [None, "patience"]
    assert after(flat, left=0.001, in_all=0.9 * LEFT)[PATIENCE] == "gain"
    assert after(flat, left=0.03, in_all=0.04, until=0.05)[PATIENCE] == "gain", "who asks for less is given less"


@pytest.mark.parametrize("until", [None, 0.0])
def test_without_a_share_to_gain_it_never_ends(until: float | None) -> None:
    assert set(after([100.0] * 50, until, left=0.0)) == {None}


@pytest.mark.parametrize("reason", get_args(Reason))
def test_every_reason_is_told_in_words_and_no_share_that_nothing_calibrates(reason: str) -> None:
    said = sentence(Ending(reason=reason, regret=0.0123))
    assert said == sentence(Ending(reason=reason)) != reason and "%" not in said


@pytest.mark.parametrize(("text", "share"), [("0.5%", 0.005), ("0.005", 0.005), ("0", 0.0), ("2 %", 0.02)])
def test_a_share_is_a_percentage_or_a_number(text: str, share: float) -> None:
    assert share_of("--until", text) == share


@pytest.mark.parametrize("text", ["-1", "half", "100%", "1.5", "", "%"])
def test_what_is_no_share_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match="--until"):
        share_of("--until", text)


def test_the_command_line_refuses_it_before_anything_is_searched() -> None:
    result = flashtune("search", "--gpu-name", "a100", "--d", "64", "--until", "many")
    assert isinstance(result.exception, InputError) or "--until" in result.output
