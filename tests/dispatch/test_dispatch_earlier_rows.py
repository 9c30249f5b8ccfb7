"""Rows that an earlier version wrote, before an axis was declared: they are served with what configs did without it."""

from dataclasses import replace
from pathlib import Path

import pytest
from commands import flashtune

from benchmarks.cases.archive import folder
from flashtune import dispatch
from flashtune.core.config import Config, Value
from flashtune.core.errors import InputError
from flashtune.core.problem import Features, Problem
from flashtune.core.results import Baseline, Fate, Measurement, Outcome, Provenance, SearchResult, TuningRecord
from flashtune.core.target import find_target
from flashtune.db.library import Library
from flashtune.db.store import Store
from flashtune.dispatch.choose import Choice, Refusal, choose, rank
from flashtune.templates import families, family, unservable
from flashtune.templates.earlier import EARLIER as EARLIER_CONFIGS
from flashtune.templates.rendering import variant_of
from flashtune.tuner.publish import machine_code
from flashtune.tuner.publish.generated import arrange
from flashtune.tuner.publish.winners import variant_for

H200 = find_target("h200")
HOPPER = family("flash_fwd_hopper")
PROBLEM = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
TODAYS = HOPPER.default(PROBLEM.spec(), H200).replace(maximum="running")


def without(config: Config, axis: str) -> Config:
    return Config.of({name: value for name, value in config.items if name != axis})


EARLIER = Outcome(
    template=HOPPER.name,
    template_hash="0" * 16,
    variant_id="e" * 16,
    config=without(TODAYS, "maximum"),
    fate=Fate.CORRECT,
    source="measured",
    measurement=Measurement.of([300.0] * 15),
    max_error=0.1,
    finalist=True,
    rank=1,
)
SWEEP = folder() / "2026-11-22-h200-sweeps" / "h200-n4096-d128-bf16-causal.sqlite"
PROVENANCE = Provenance(flashtune="0.1.0", torch="2.11.0", triton="3.6.0")
# Preferred to any shipped row.
BASELINE = Baseline(backend="cudnn", measurement=Measurement.of([1000.0] * 15))
RECORD = TuningRecord(key=PROBLEM.key("h200"), problem=PROBLEM, outcome=EARLIER, provenance=PROVENANCE, baseline=BASELINE)


def save(path: Path, outcome: Outcome = EARLIER) -> Path:
    with Store.open(path, writable=True) as store:
        store.save(SearchResult(gpu="h200", problem=PROBLEM, outcomes=(outcome,), provenance=PROVENANCE, baseline=BASELINE))
    return path


@pytest.mark.parametrize("name", families())
def test_a_config_is_completed_by_axes_that_came_later_and_by_no_others(name: str) -> None:
    chosen, later = family(name), EARLIER_CONFIGS[name].added if name in EARLIER_CONFIGS else {}
    values = {axis.name: axis.values for axis in chosen.axes}
    assert all(value in values[axis] for axis, value in later.items())
    default = chosen.default(replace(PROBLEM, n_q=1, direction="bwd" if "_bwd" in name else "fwd").spec(), H200)
    assert chosen.completed(default) is default
    for axis in default:
        found = chosen.completed(without(default, axis))
        if axis in later:
            assert found == default.replace(**{axis: later[axis]})
        else:
            assert found == without(default, axis)
            with pytest.raises(InputError, match=f"lacks the axis '{axis}'"):
                chosen.validate(found)


@pytest.mark.parametrize(("name", "axis"), [(name, axis) for name, earlier in EARLIER_CONFIGS.items() for axis in earlier.retired])
def test_an_axis_that_is_a_fact_today_is_dropped_with_the_values_that_are_served_by_it(name: str, axis: str) -> None:
    chosen = family(name)
    assert axis not in {one.name for one in chosen.axes}
    default = chosen.default(replace(PROBLEM, direction="bwd" if "_bwd" in name else "fwd").spec(), H200)
    for value in EARLIER_CONFIGS[name].retired[axis]:
        assert chosen.completed(default.replace(**{axis: value})) == default
    other = chosen.completed(default.replace(**{axis: "other"}))
    with pytest.raises(InputError, match=f"undeclared axis '{axis}'"):
        chosen.validate(other)


@pytest.mark.parametrize(
    ("name", "before", "todays"),
    [
        ("flash_fwd_hopper", {"maximum": "first", "rescale": "always"}, {"maximum": "first", "rescale": "grown"}),
        ("flash_fwd_hopper", {"maximum": "running", "rescale": "always"}, {"maximum": "running", "rescale": "always"}),
        ("flash_bwd_hopper", {"persistent": "taken"}, {"persistent": "dynamic"}),
    ],
)
def test_a_value_that_makes_the_same_kernel_as_another_becomes_that(name: str, before: dict[str, str], todays: dict[str, str]) -> None:
    chosen = family(name)
    default = chosen.default(replace(PROBLEM, direction="bwd" if "_bwd" in name else "fwd").spec(), H200)
    assert chosen.completed(default.replace(**before)) == default.replace(**todays)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("flash_fwd_hopper", {"intra_wg_overlap": 2}),
        ("flash_bwd_hopper", {"persistent": "drawn"}),
        ("flash_bwd_hopper", {"dq_sums": "tma"}),
        ("flash_bwd_hopper", {"exp_early": True}),
    ],
)
def test_a_value_that_no_kernel_has_today_is_refused(name: str, changes: dict[str, Value]) -> None:
    chosen = family(name)
    default = chosen.default(replace(PROBLEM, direction="bwd" if "_bwd" in name else "fwd").spec(), H200)
    with pytest.raises(InputError, match=next(iter(changes))):
        chosen.validate(chosen.completed(default.replace(**changes)))


def test_a_record_of_a_value_that_is_gone_leaves_its_problem_to_the_next_best() -> None:
    gone = replace(RECORD, outcome=replace(EARLIER, config=TODAYS.replace(intra_wg_overlap=2), measurement=Measurement.of([200.0] * 15)))
    found = choose(PROBLEM, H200, [gone, RECORD], families())
    assert (found.kind, found.record, found.config) == ("exact", RECORD, TODAYS)
    assert "intra_wg_overlap=2" in (unservable(gone) or "")


def test_a_row_that_lacks_a_later_axis_serves_its_problem() -> None:
    found = choose(PROBLEM, H200, [RECORD], families())
    assert (found.kind, found.record, found.family, found.config) == ("exact", RECORD, HOPPER, TODAYS)
    assert unservable(RECORD) is None


def test_constraints_hold_for_what_the_row_does_without_the_axis() -> None:
    wanted = replace(PROBLEM, features=Features(alibi=True))
    earlier = without(HOPPER.default(wanted.spec(), H200), "maximum")
    row = replace(RECORD, key=wanted.key("h200"), problem=wanted, outcome=replace(EARLIER, config=earlier))
    # ALiBi without a band goes with running maxima alone.
    assert HOPPER.violated(earlier.replace(maximum="first", rescale="grown"), wanted.spec(), H200) is not None
    assert isinstance(next(iter(rank(wanted, H200, [row], families()))), Choice)
    assert unservable(row) is None


def test_a_row_that_lacks_another_axis_is_refused_as_before() -> None:
    row = replace(RECORD, outcome=replace(EARLIER, config=without(EARLIER.config, "num_stages")))
    refusal = next(iter(rank(PROBLEM, H200, [row], families())))
    assert isinstance(refusal, Refusal) and refusal.invalid and "lacks the axis 'num_stages'" in refusal.reason
    assert "lacks the axis 'num_stages'" in (unservable(row) or "")


def test_it_is_explained_under_the_id_of_todays_kernel(own_database: Path) -> None:
    save(own_database)
    dispatch.reload()
    try:
        found = dispatch.explain_problem(PROBLEM, "h200")
    finally:
        own_database.unlink()
        dispatch.reload()
    assert (found.kind, found.config, found.refused) == ("exact", TODAYS, ())
    assert found.variant_id == variant_of(HOPPER, PROBLEM.spec(), TODAYS).id != EARLIER.variant_id


def test_its_kernel_is_generated_under_todays_id_while_the_row_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The text is what matters here; it would take the compiler ten seconds.
    monkeypatch.setattr(machine_code, "build_all", lambda orders, jobs: ((order, "not asked for") for order in orders))
    variant = variant_for(RECORD)
    assert variant == variant_of(HOPPER, PROBLEM.spec(), TODAYS)
    [one] = arrange([RECORD])
    assert one.kernel.variant_id == variant.id
    assert "maximum=running" in one.text
    database = save(tmp_path / "earlier.sqlite")
    done = flashtune("generate", "--db", str(database), "--out", str(tmp_path / "kernels"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "kernels" / one.kernel.path).read_text() == one.text
    [kept] = Library.of(database).records()
    assert (kept.outcome.config, kept.outcome.variant_id) == (EARLIER.config, EARLIER.variant_id)


FORMER = {"num_stages": "stages", "intra_wg_overlap": "lookahead", "ctas_per_sm": "residents"}


def formerly(config: Config) -> Config:
    return Config.of({FORMER.get(name, name): value for name, value in config.items})


def test_a_row_under_an_axis_former_name_serves_its_problem(tmp_path: Path) -> None:
    earlier = replace(EARLIER, config=formerly(EARLIER.config))
    assert {"stages", "lookahead", "residents"} <= set(earlier.config)
    [row] = Library.of(save(tmp_path / "earlier.sqlite", earlier)).records()
    assert row.outcome.config == earlier.config
    found = choose(PROBLEM, H200, [row], families())
    assert (found.kind, found.config) == ("exact", TODAYS)
    assert unservable(row) is None
    assert variant_for(row) == variant_of(HOPPER, PROBLEM.spec(), TODAYS)


def test_a_config_with_both_names_of_an_axis_is_refused() -> None:
    found = HOPPER.completed(TODAYS.replace(stages=3))
    with pytest.raises(InputError, match="undeclared axis 'stages'"):
        HOPPER.validate(found)


def test_the_committed_sweeps_have_former_names_and_are_read_under_todays() -> None:
    with Store.open(SWEEP, writable=False) as store:
        configs = [outcome.config for result in store.results() for outcome in result.outcomes if outcome.template == HOPPER.name]
    assert any("lookahead" in config for config in configs)
    for config in configs:
        if config.get("lookahead", 0) != 2:
            HOPPER.validate(HOPPER.completed(config))
