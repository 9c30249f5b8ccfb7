"""The store gives back what it was given, and takes nothing that it could not."""

import math
from dataclasses import replace
from pathlib import Path

import db_samples as samples
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashtune.core.gpu import limits
from flashtune.core.problems.band import ALIGNMENTS
from flashtune.core.problems.config import Config
from flashtune.core.problems.dtypes import DTYPES
from flashtune.core.problems.problem import FLAGS, MASK_KINDS, Features, Problem
from flashtune.core.records.results import (
    SOURCES,
    Baseline,
    CompileFacts,
    Conditions,
    Ending,
    Fate,
    Measurement,
    Outcome,
    Provenance,
    SearchResult,
)
from flashtune.core.system.errors import InputError
from flashtune.db.store import Store
from flashtune.db.values import LARGEST, TEXT_LENGTH, tidy

sides = st.none() | st.integers(0, 2**30)
counts = st.integers(0, LARGEST)
positive = st.floats(min_value=1e-3, max_value=1e12)
words = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", fullmatch=True)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,63}", fullmatch=True)
free_text = st.text(max_size=200)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    dtype = draw(st.sampled_from(DTYPES))
    kv_heads, d, d_v = draw(st.integers(1, 64)), draw(st.integers(1, 256)), draw(st.integers(1, 256))
    # Latent values are columns of keys.
    allowed = {"tf32": dtype == "fp32", "latent": d_v <= d}
    return Problem(
        batch=draw(st.integers(1, 1024)),
        heads=kv_heads * draw(st.integers(1, 64)),
        kv_heads=kv_heads,
        n_q=draw(st.integers(1, LARGEST)),
        n_kv=draw(st.integers(1, LARGEST)),
        d=d,
        d_v=d_v,
        dtype=dtype,
        features=Features(
            causal=draw(st.booleans()),
            alignment=draw(st.sampled_from(ALIGNMENTS)),
            window=draw(st.none() | st.tuples(sides, sides)),
            mask=draw(st.sampled_from(MASK_KINDS)),
            **{name: allowed.get(name, True) and draw(st.booleans()) for name in FLAGS},
        ),
    )


@st.composite
def measurements(draw: st.DrawFn, source: str = "measured") -> Measurement:
    if source == "predicted":
        return Measurement.predicted(draw(positive))
    least, q10, median, q90 = sorted(draw(st.lists(positive, min_size=4, max_size=4)))
    return Measurement(median_us=median, q10_us=q10, q90_us=q90, min_us=least, samples=draw(st.integers(1, LARGEST)))


configs = st.builds(
    Config.of,
    st.dictionaries(names, st.integers(-LARGEST, LARGEST) | st.booleans() | st.from_regex(r"[ -~é]{0,64}", fullmatch=True), max_size=6),
)
facts = st.builds(CompileFacts, registers=counts, spills=counts, shared_bytes=counts, threads=counts, tensor_core_ops=counts)


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    fate = draw(st.sampled_from(list(Fate)))
    source = "predicted" if fate is Fate.UNCHECKED else draw(st.sampled_from(SOURCES))
    timed = fate.timed and draw(st.booleans())
    raced = timed and source == "measured"
    finite = st.floats(0, allow_infinity=False)
    return Outcome(
        template=draw(names),
        template_hash=draw(words),
        variant_id=draw(words),
        config=draw(configs),
        fate=fate,
        source=source,
        reason=draw(free_text),
        measurement=draw(measurements(source)) if timed else None,
        facts=draw(st.none() | facts),
        max_error=draw(st.none() | (finite if fate.timed else finite | st.just(math.inf))),
        finalist=draw(st.booleans()),
        rank=draw(st.none() | st.integers(1, LARGEST)) if timed else None,
        trial=draw(st.none() | measurements()) if raced else None,
        call_us=draw(st.none() | positive) if raced else None,
    )


conditions = st.builds(
    Conditions,
    samples=st.integers(1, LARGEST),
    sm_clock_mhz=st.none() | counts,
    memory_clock_mhz=st.none() | counts,
    power_w=st.none() | st.floats(0, 1e6),
    temperature_c=st.none() | st.integers(-273, 1000),
    throttled_by=st.none() | st.just("") | words,
    other_processes=st.none() | counts,
)
provenances = st.builds(
    Provenance,
    flashtune=free_text.map(lambda text: text[:64]),
    torch=free_text.map(lambda text: text[:64]),
    triton=free_text.map(lambda text: text[:64]),
    driver=free_text,
    gpu_name=free_text,
    clocks=free_text,
    command=free_text,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    created_at=st.just("") | st.datetimes(timezones=st.none() | st.timezones()).map(lambda time: time.isoformat()),
    conditions=st.none() | conditions,
)
results = st.builds(
    SearchResult,
    gpu=st.sampled_from(["h200", "a100-80g", "mi300x"]) | words,
    problem=problems(),
    outcomes=st.lists(outcomes(), max_size=4).map(tuple),
    provenance=provenances,
    baseline=st.none() | st.builds(Baseline, backend=words, measurement=measurements(), call_us=st.none() | positive),
    ending=st.none() | st.builds(Ending, reason=words, regret=st.none() | st.floats(0, allow_infinity=False)),
)


def is_possible(result: SearchResult) -> bool:
    """True if no measured time is below a kernel's bound, nor PyTorch's above its upper bound."""
    measured = [one for one in result.outcomes if one.source == "measured" and one.measurement is not None]
    times = [time for one in measured for time in (one.measurement and one.measurement.median_us, one.call_us) if time is not None]
    baseline = result.baseline
    torchs = [] if baseline is None else [time for time in (baseline.measurement.median_us, baseline.call_us) if time is not None]
    least, most = limits.least_us(result.problem, result.gpu), limits.most_framework_us(result.problem, result.gpu)
    return not measured or (min(times) >= least and max(torchs, default=0) <= most)


def tidied(result: SearchResult) -> SearchResult:
    """Form in which the store promises to keep free texts."""
    texts = {
        name: tidy(getattr(result.provenance, name)) for name in ("driver", "gpu_name", "clocks", "command", "flashtune", "torch", "triton")
    }
    return replace(
        result,
        provenance=replace(result.provenance, **texts),
        outcomes=tuple(replace(outcome, reason=tidy(outcome.reason)) for outcome in result.outcomes),
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.write(tmp_path_factory.mktemp("store") / "any.sqlite", ())


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
)
@given(result=results.filter(is_possible))
def test_any_result_comes_back_equal(shared: Path, result: SearchResult) -> None:
    key = result.problem.key(result.gpu)
    expected = tidied(result)
    with Store.open(shared, writable=True) as store:
        store.save(result)
        kept = [one for one in store.results(gpu=result.gpu, n=key.n) if one.problem.key(one.gpu) == key]
        assert kept[-1] == expected
        if expected.best is not None and len(kept) == 1:
            best = store.best(key)
            assert best is not None
            assert (best.outcome.measurement, best.outcome.rank) == (expected.best.measurement, expected.best.rank)
            assert (best.key, best.problem, best.baseline, best.provenance) == (key, result.problem, result.baseline, expected.provenance)


def test_printable_text_is_kept_as_it_is() -> None:
    text = "ptxas: Ünïcode 🚀 -> 'x' \"y\" `z` ; DROP TABLE trial --"
    assert tidy(text) == text


def test_unprintable_text_becomes_one_bounded_line() -> None:
    assert tidy("two\nlines\x1b[31m\u202e\ud800.") == "two lines [31m  ."
    assert len(tidy("x" * 10**6)) == TEXT_LENGTH


@pytest.mark.parametrize(
    ("broken", "column"),
    [
        (samples.result(samples.outcome("v", 0.0)), "min_us"),
        (samples.result(samples.outcome("v", math.inf)), "min_us"),
        (samples.result(samples.outcome("v", math.nan)), "min_us"),
        (samples.result(samples.outcome("v", measurement=replace(samples.times(1.0), q10_us=2.0))), "median_us"),
        (samples.result(samples.outcome("v", source="predicted", measurement=samples.times(1.0))), "samples"),
        (samples.result(samples.outcome("v", fate=Fate.TIMEOUT)), "median_us"),
        (samples.result(samples.outcome("v", None, rank=1)), "rank"),
        (samples.result(samples.outcome("v", fate=Fate.UNCHECKED)), "fate"),
        (samples.result(samples.outcome("v", None, call_us=1.0)), "call_us"),
        (samples.result(samples.outcome("v", call_us=-1.0)), "call_us"),
        (samples.result(samples.outcome("v", source="predicted", call_us=1.0)), "call_us"),
        (samples.result(samples.outcome("v", None, trial=samples.times(1.0))), "trial_median_us"),
        (samples.result(samples.outcome("v", source="predicted", trial=samples.times(1.0))), "trial_samples"),
        (replace(samples.result(), baseline=Baseline(backend="x", measurement=samples.times(1.0), call_us=0.0)), "baseline_call_us"),
        *(
            (
                replace(samples.result(), provenance=replace(samples.PROVENANCE, conditions=replace(samples.CONDITIONS, **{name: value}))),
                name,
            )
            for name, value in (
                ("samples", 0),
                ("sm_clock_mhz", -1),
                ("power_w", math.nan),
                ("throttled_by", "x\n"),
                ("other_processes", -1),
            )
        ),
        (samples.result(samples.outcome("v", template="../x")), "template"),
        (samples.result(samples.outcome("v", config=Config.of(BLOCK_M=1.5))), "config"),
        (samples.result(samples.outcome("v", config=Config.of(BLOCK_M=2**40))), "config"),
        (samples.result(samples.outcome("v"), gpu="h 200"), "gpu"),
        (samples.result(samples.outcome("v"), created_at="yesterday"), "created_at"),
        (replace(samples.result(), provenance=replace(samples.PROVENANCE, seed=2**63)), "seed"),
    ],
)
def test_a_result_that_could_not_be_read_back_is_refused_and_leaves_nothing(tmp_path: Path, broken: SearchResult, column: str) -> None:
    with Store.open(tmp_path / "a.sqlite", writable=True) as store:
        with pytest.raises(InputError, match=column):
            store.save(broken)
        assert store.results() == []


def test_runs_that_tuned_another_librarys_options_are_not_read(tmp_path: Path) -> None:
    """Earlier versions stored options of FlexAttention as a winner with a config, beside its defaults, and no other time."""
    defaults = Outcome.of_provider("flex", "defaults", samples.times(120.0))
    tuned = replace(Outcome.of_provider("flex", "tuned", samples.times(100.0)), rank=1, config=Config.of(fwd_BLOCK_M=128))
    with Store.open(tmp_path / "x.sqlite", writable=True) as store:
        store.save(samples.result(samples.outcome("aa")))
        store.save(samples.result(tuned, defaults, framework_us=None, created_at="2026-11-22T10:00:00+00:00"))
        assert [record.outcome.variant_id for record in store.records()] == ["aa"]
        assert len(store.results()) == 1
        store.export(tmp_path / "shipped.sqlite", winners_only=True)
    with Store.open(tmp_path / "shipped.sqlite", writable=False) as store:
        assert [record.outcome.variant_id for record in store.records()] == ["aa"]
