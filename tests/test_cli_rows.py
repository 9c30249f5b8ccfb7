"""Rows as the commands show them: nothing predicted as measured, nothing unchecked as correct, nothing disturbed as quiet."""

import json
from pathlib import Path

import db_samples as samples
import pytest
from click.testing import CliRunner

from flashtune.cli.main import main


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.write(tmp_path_factory.mktemp("rows") / "a.sqlite", samples.RESULTS_SINCE_0002)


def test_json_holds_whole_calls_trials_fates_and_the_conditions_of_the_race(database: Path) -> None:
    raced, unchecked = json.loads(CliRunner().invoke(main, ["show", "--db", str(database), "--json"]).stdout)
    assert (raced["fate"], raced["trial_us"], raced["call_us"], raced["framework_call_us"]) == ("correct", 81.0, 85.5, 130.25)
    assert raced["provenance"]["conditions"] == {
        "samples": 60,
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 3201,
        "power_w": 640.5,
        "temperature_c": 61,
        "throttled_by": "SwPowerCap",
        "other_processes": 0,
    }
    assert (unchecked["fate"], unchecked["call_us"], unchecked["framework_call_us"]) == ("unchecked", None, None)
    assert unchecked["provenance"]["conditions"] is None


def test_plain_rows_say_what_was_not_checked_and_what_was_disturbed(database: Path) -> None:
    shown = CliRunner().invoke(main, ["show", "--db", str(database)]).stdout
    assert "predicted, unchecked" in shown
    assert "measured, throttled" in shown
