"""An explanation keeps why the search of its record stopped."""

import db_samples as samples

from flashtune.dispatch.decisions.explanation import explanation_by
from flashtune.dispatch.policy.choose import Choice
from flashtune.tuner.propose.space import record_of


def test_an_explanation_says_why_the_search_of_its_record_stopped() -> None:
    [ended, *_] = samples.ENDED_RESULTS
    record = record_of(ended)
    assert record is not None and record.ending is not None
    choice = Choice(kind="exact", spec=record.problem.spec(), note="measured", record=record)
    assert explanation_by(choice, record.problem, record.key.gpu).ended_by == record.ending.reason == "patience"
    assert explanation_by(choice._replace(record=None), record.problem, record.key.gpu).ended_by is None
