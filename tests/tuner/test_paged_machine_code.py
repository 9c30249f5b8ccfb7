"""Machine code of kernels over pages, as winners keep it and `generate` ships it: every call over pages of a record's size finds it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import db_samples as samples
import pytest

from flashtune.core.code import cache as kernel_cache
from flashtune.core.code.binaries import Manifest
from flashtune.core.code.launching import keyword_plan, provided
from flashtune.core.gpu.limits import least_us
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import TuningRecord
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.templates.loading import loaded
from flashtune.templates.paged import flash_paged
from flashtune.tuner.publish import winners
from flashtune.tuner.publish.generated import arrange, kept, orders_of
from flashtune.tuner.publish.machine_code import Built, Order, build, pages_of, triton_version, with_files
from flashtune.tuner.verify.inputs import make_inputs

H200 = find_target("h200")
STEP = Problem(batch=64, heads=32, kv_heads=8, n_q=1, n_kv=8192, d=64, d_v=64, dtype="fp16", features=Features(packed=True, page=16))
CHUNK = replace(STEP, batch=8, n_q=512, features=replace(STEP.features, causal=True, alignment="bottom_right"))
HOPPER = "flash_fwd_hopper_paged"
CASES = {
    "flash_paged": (STEP, flash_paged.chosen(STEP.spec(), H200, 4)),
    HOPPER: (CHUNK, family(HOPPER).default(CHUNK.spec(), H200)),
}


def of_page(problem: Problem, page: int) -> Problem:
    return replace(problem, features=replace(problem.features, page=page))


def record(folder: Path, template: str, problem: Problem, config: Config) -> TuningRecord:
    outcome = samples.outcome("0" * 16, 2 * least_us(problem, "h200"), config=config, template=template, rank=1, finalist=True)
    path = samples.write(folder / f"{problem.features.page}.sqlite", (samples.result(outcome, framework_us=None, of=problem),))
    with Store.open(str(path), writable=False) as store:
        [found] = store.records()
    return found


@contextmanager
def cached(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHTUNE_CACHE", str(folder))
        yield


@cache
def made(template: str) -> tuple[Order, Built]:
    """A kernel's order as a winner with pages of 16 gives it, and what was built."""
    with TemporaryDirectory() as folder, cached(Path(folder)):
        [order] = winners._missing([record(Path(folder), template, *CASES[template])], H200)
    return order, build(order)


@pytest.mark.parametrize("template", CASES)
def test_calls_of_all_sizes_over_its_pages_find_it(template: str) -> None:
    _, built = made(template)
    problem, config = CASES[template]
    kernel = loaded(family(template), problem.spec(), config)
    assert kernel.host is not None
    for sequences, n_q, n_kv, page in product((1, 7, 64), (1, 16, 130, 512), (100, 4096), (16, 32)):
        one = replace(of_page(problem, page), batch=sequences, n_q=n_q, n_kv=max(n_q, n_kv))
        inputs = make_inputs(one, device="meta", seed=0)
        for bound in (n_q, 4 * n_q):
            words = inputs.keywords | provided(kernel, inputs.q, inputs.k) | {"sms": H200.sms, "pages": (bound, n_kv, None)}
            launches = keyword_plan(kernel.host, inputs.arguments, words).launches
            found = [built.manifest.matching(launch.kernel, launch.arguments) for launch in launches]
            # Another size of pages is compiled into another kernel; parts are added up alike.
            assert [one is not None for one in found] == [page == 16 or launch.kernel == "combine_splits" for launch in launches]


def test_a_winner_of_other_pages_is_built_beside_those_that_are_kept(tmp_path: Path) -> None:
    problem, config = CASES["flash_paged"]
    rows = [record(tmp_path, "flash_paged", of_page(problem, page), config) for page in (16, 64, 128)]
    with cached(tmp_path / "cache"):
        [order] = winners._missing(rows[:2], H200)
        assert order.pages == (16, 64)
        _, built = made("flash_paged")
        kernel_cache.keep(order.text, *with_files(built, order.stem))
        assert winners._missing(rows[:1], H200) == []
        [order] = winners._missing(rows[1:], H200)
        assert order.pages == (16, 64, 128)
    [one] = arrange(rows)
    assert {order.pages for order in orders_of(one)} == {(16, 64, 128)}
    assert pages_of(built.manifest) == {16}


def test_archived_code_is_taken_for_the_pages_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    order, built = made("flash_paged")

    class Whole(Manifest):
        def code(self, binary: object) -> bytes:
            return b""

    whole = Whole(variant_id=built.manifest.variant_id, binaries=built.manifest.binaries, source_sha256=built.manifest.source_sha256)
    monkeypatch.setattr("flashtune.tuner.publish.generated.manifest_in", lambda *_: whole)
    assert kept(order, None, None, triton_version()) is not None  # type: ignore[arg-type]
    assert kept(replace(order, pages=(16, 64)), None, None, triton_version()) is None  # type: ignore[arg-type]
