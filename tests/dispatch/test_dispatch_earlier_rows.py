"""Rows that another version wrote, whose config has other axes or values: they are passed over, with the reason, and stay as they are."""

from dataclasses import replace
from pathlib import Path

import pytest
from commands import flashtune

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, Value
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Baseline, Fate, Measurement, Outcome, Provenance, SearchResult, TuningRecord
from flashtune.core.system.errors import InputError
from flashtune.db.library import Library, shipped_path
from flashtune.db.store import Store
from flashtune.dispatch.policy.choose import Refusal, choose, rank
from flashtune.templates import families, family, unservable
from flashtune.templates.rendering import variant_of
from flashtune.tuner.publish.winners import variant_for

H200 = find_target("h200")
HOPPER = family("flash_fwd_hopper")
PROBLEM = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
TODAYS = HOPPER.default(PROBLEM.spec(), H200).replace(maximum="running")
WITHOUT = Config.of({name: value for name, value in TODAYS.items if name != "maximum"})
FORMER = Config.of({{"num_stages": "stages"}.get(name, name): value for name, value in TODAYS.items})
OTHERS = {
    "lacks the axis 'maximum'": WITHOUT,
    "undeclared axis 'stages'": FORMER,
    "undeclared axis 'column_unit'": TODAYS.replace(column_unit=16),
    "intra_wg_overlap=2 is outside": TODAYS.replace(intra_wg_overlap=2),
}
"""Configs of other versions, by what is said of them."""
SERVED = Outcome(
    template=HOPPER.name,
    template_hash="0" * 16,
    variant_id=variant_of(HOPPER, PROBLEM.spec(), TODAYS).id,
    config=TODAYS,
    fate=Fate.CORRECT,
    source="measured",
    measurement=Measurement.of([300.0] * 15),
    max_error=0.1,
    finalist=True,
    rank=1,
)
PROVENANCE = Provenance(flashtune="0.1.0", torch="2.11.0", triton="3.6.0")
BASELINE = Baseline(backend="cudnn", measurement=Measurement.of([1000.0] * 15))
RECORD = TuningRecord(key=PROBLEM.key("h200"), problem=PROBLEM, outcome=SERVED, provenance=PROVENANCE, baseline=BASELINE)


def of(config: Config) -> TuningRecord:
    """A record that is preferred to RECORD, of this config."""
    return replace(RECORD, outcome=replace(SERVED, config=config, variant_id="e" * 16, measurement=Measurement.of([290.0] * 15)))


@pytest.mark.parametrize("said", OTHERS)
def test_it_leaves_its_problem_to_the_next_best_and_says_why(said: str) -> None:
    row = of(OTHERS[said])
    refusal = next(iter(rank(PROBLEM, H200, [row], families())))
    assert isinstance(refusal, Refusal) and refusal.invalid and said in refusal.reason and "\n" not in refusal.reason
    found = choose(PROBLEM, H200, [row, RECORD], families())
    assert (found.kind, found.record, found.config) == ("exact", RECORD, TODAYS)
    assert said in (unservable(row) or "") and unservable(RECORD) is None
    with pytest.raises(InputError, match=said):
        variant_for(row)


@pytest.mark.parametrize("name", families())
def test_a_config_needs_every_axis_with_a_declared_value(name: str) -> None:
    chosen = family(name)
    default = chosen.default(replace(PROBLEM, n_q=1, direction="bwd" if "_bwd" in name else "fwd").spec(), H200)
    chosen.validate(default)
    for axis in default:
        other: Value = "other"
        for config in (Config.of({one: value for one, value in default.items if one != axis}), default.replace(**{axis: other})):
            with pytest.raises(InputError, match=axis):
                chosen.validate(config)


def test_commands_read_the_row_as_it_is_and_no_kernel_is_generated(tmp_path: Path) -> None:
    path, row = tmp_path / "earlier.sqlite", of(WITHOUT)
    with Store.open(path, writable=True) as store:
        store.save(SearchResult(gpu="h200", problem=PROBLEM, outcomes=(row.outcome,), provenance=PROVENANCE, baseline=BASELINE))
    [kept] = Library.of(path).records()
    assert (kept.outcome.config, kept.outcome.variant_id) == (WITHOUT, "e" * 16)
    shown = flashtune("show", "--db", str(path), "--json")
    assert shown.exit_code == 0 and "lacks the axis 'maximum'" in shown.stdout
    flashtune("generate", "--db", str(path), "--out", str(tmp_path / "kernels"))
    assert not list((tmp_path / "kernels").rglob("hopper*.py"))


def test_every_shipped_trial_has_a_config_under_todays_axes() -> None:
    with Store.open(shipped_path(), writable=False) as store:
        configs = {(o.template, o.config) for result in store.results() for o in result.outcomes if o.template in families()}
    assert len(configs) > 1000
    for template, config in configs:
        family(template).validate(config)
