"""Problems over pages from the command line to the record that serves: searched, checked beside NaN, recorded, looked up."""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import db_samples as samples
import pytest
import torch
from click.testing import CliRunner
from driven import Driven, config_of, drive
from test_dispatch_gradient_plans import Decoding, library  # noqa: F401
from test_dispatch_misled import PROGRAMS, Counts
from test_packed_launches import over_pages

from flashtune import dispatch
from flashtune.bench import time_calls
from flashtune.bench.whole_calls import attention_call, operands
from flashtune.cli.main import main
from flashtune.cli.problems import searchable
from flashtune.core.gpu.limits import least_us
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.config import Config
from flashtune.core.problems.lengths import LAWS, Lengths
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.calls import add, read
from flashtune.core.records.nearness import distance
from flashtune.core.records.results import Source
from flashtune.core.system.errors import InputError
from flashtune.db.store import Store
from flashtune.dispatch.plans.misprediction import MISPREDICTIONS
from flashtune.dispatch.plans.program import Program
from flashtune.dispatch.policy.records import comparable
from flashtune.dispatch.state import context
from flashtune.dispatch.state.context import Memo
from flashtune.dispatch.state.recorded import CALLS
from flashtune.templates import every_family, families, families_of_pages, unservable
from flashtune.templates.paged import flash_paged
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.children.compile import compiled_kernels
from flashtune.tuner.propose.space import SearchSpace
from flashtune.tuner.replies import Called
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.verify.correctness import Verifier
from flashtune.tuner.verify.inputs import Inputs, make_inputs
from flashtune.tuner.verify.pages import GARBAGE

pytestmark = pytest.mark.usefixtures("anew")

H200 = find_target("h200")
STEP = Problem(
    batch=64, heads=32, kv_heads=8, n_q=1, n_kv=8192, d=64, d_v=64, dtype="fp16", features=Features(packed=True, page=16)
)  # fmt: skip
CHUNK = replace(STEP, batch=8, n_q=512, lengths=None, features=replace(STEP.features, causal=True, alignment="bottom_right"))
SMALL = Problem(
    batch=3, heads=4, kv_heads=2, n_q=2, n_kv=20, d=16, d_v=16, dtype="fp32", lengths=Lengths.of("lognormal", 3, 60),
    features=Features(causal=True, packed=True, page=4, alignment="bottom_right"),
)  # fmt: skip
UNUSUAL = Config.of(BLOCK_M=16, BLOCK_N=32, num_warps=2, num_stages=3, programs=3, unmasked=False)
"""No default's config."""


def paged(page: int, problem: Problem = STEP) -> Problem:
    return replace(problem, features=replace(problem.features, page=page))


def database(
    path: Path,
    problem: Problem,
    *,
    template: str = "flash_paged",
    config: Config = UNUSUAL,
    source: Source = "measured",
    beside: Config | None = None,
) -> Path:
    """A record of a problem with a plausible time, and the run's second config, if there is one."""
    us = 2 * least_us(problem, "h200")
    words: dict[str, Any] = {"template": template, "source": source, "finalist": True}
    outcomes = [samples.outcome("0" * 16, us, config=config, rank=1, **words)]
    outcomes += [] if beside is None else [samples.outcome("1" * 16, 1.1 * us, config=beside, rank=2, **words)]
    return samples.write(path, (samples.result(*outcomes, framework_us=1.5 * us if source == "measured" else None, of=problem),))


# --- problems and keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 16, 24, 4096, 2**31 - 1])
@pytest.mark.parametrize("law", LAWS)
def test_a_problem_over_pages_is_stored_and_read_as_it_is(page: int, law: Any, tmp_path: Path) -> None:
    problem = replace(paged(page, CHUNK), lengths=Lengths.of(law, 8, 8 * 8192))
    path = database(tmp_path / "a.sqlite", problem)
    with Store.open(str(path), writable=False) as store:
        [record] = store.records()
    assert record.problem == problem and record.key == problem.key("h200")
    assert json.loads(record.key.features)["page"] == 1 << (page - 1).bit_length()
    add(tmp_path / "calls.json", [problem])
    assert read(tmp_path / "calls.json") == [problem]
    assert Features.from_json(problem.features.as_json()) == problem.features


def test_a_page_changes_no_kernel_and_no_other_key() -> None:
    packed = replace(STEP, features=Features(packed=True))
    assert packed.spec() == STEP.spec() and "page" not in packed.key("h200").features and "page" not in packed.label()
    assert "page16" in STEP.label() and STEP.sequences() == ((1, 8192),) * 64
    assert all(n_q == 512 for n_q, _ in replace(CHUNK, lengths=Lengths.of("one_long", 8, 8 * 8192)).sequences())


def test_keys_of_pages_are_apart_by_octaves_and_never_near_rows() -> None:
    keys = {page: paged(page).key("h200") for page in (16, 64, 128)}
    assert 0 < distance(keys[16], keys[64]) < distance(keys[16], keys[128])
    assert distance(keys[16], paged(12).key("h200")) == 0
    rows = replace(STEP, features=Features(packed=True)).key("h200")
    assert distance(keys[16], rows) == math.inf
    assert comparable(keys[16], keys[128]) and not comparable(keys[16], rows) and not comparable(rows, keys[16])


@pytest.mark.parametrize("page", [True, "16", -1, 16.0, None])
def test_a_page_in_a_database_is_a_number(page: Any) -> None:
    with pytest.raises(InputError, match="page"):
        Features.from_json({"packed": True, "page": page})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--direction", "bwd"], "pages have forwards"),
        (["--dtype", "fp8"], "pages have forwards"),
        (["--mask", "bool"], "page is 16"),
        (["--dropout", "0.1"], "page is 16"),
        (["--mask-mod", "examples/masks.py:dilated"], "page is 16"),
        (["--template", "flash_fwd"], "reads keys in rows"),
        (["--template", "flash_decode"], "reads keys in rows"),
        (["--template", "flash_fwd_hopper_paged", "--paged", "48"], "not of 48"),
        (["--template", "flash_fwd_hopper_paged", "--window", "7", "--n-q", "512"], "a window's first key"),
    ],
    ids=str,
)
def test_what_no_kernel_does_over_pages_is_refused_in_a_sentence(options: list[str], said: str, tmp_path: Path) -> None:
    words = ("search", "--gpu-name", "h200", "--predict", "--paged", "16", "--d", "64", "--n", "256", "--db", str(tmp_path / "a.sqlite"))
    result = CliRunner().invoke(main, [*words, *options])
    assert result.exit_code and said in result.output and "Traceback" not in result.output
    assert not (tmp_path / "a.sqlite").exists()


def reference_of(part: Inputs) -> torch.Tensor:
    """Output of one sequence in float64, of its first copy."""
    p = part.problem
    found: torch.Tensor = reference.attention(part.q[:1], part.k[:1], part.v[:1], band=p.band, scale=p.d**-0.5, dtype=torch.float64)[0]
    return found


# --- the search -------------------------------------------------------------------------------------------------------------------


def test_a_problem_over_pages_is_searched_without_a_gpu(tmp_path: Path) -> None:
    path = str(tmp_path / "paged.sqlite")
    words = ("--gpu-name", "a100", "--paged", "8", "--d", "16", "--n", "64", "--batch", "3", "--heads", "2", "--causal", "--dtype", "fp16")
    result = CliRunner().invoke(main, ["search", *words, "--trials", "1", "--seed", "1", "--db", path, "--json"])
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)
    assert (row["n"], row["n_q"], row["batch"], row["law"], row["template"]) == (64, 1, 3, "equal", "flash_paged")
    assert row["features"] == {"causal": True, "alignment": "bottom_right", "packed": True, "page": 8}
    assert (row["fate"], row["source"], row["unservable"]) == ("correct", "predicted", None), "the interpreter checked it"
    shown = CliRunner().invoke(main, ["show", "--db", path, "--json"])
    assert json.loads(shown.stdout)[0]["features"]["page"] == 8
    said = CliRunner().invoke(main, ["explain", *words, "--db", path, "--json"], env={"FLASHTUNE_UNMEASURED": "1"})
    assert said.exit_code == 0 and json.loads(said.stdout)["kind"] == "predicted", said.output


def test_candidates_are_those_of_families_of_pages_and_begin_with_the_default() -> None:
    assert not families().keys() & families_of_pages().keys()
    for problem, names in ((STEP, ["flash_paged"]), (CHUNK, ["flash_fwd_hopper_paged", "flash_paged"])):
        space = SearchSpace(every_family(), problem, H200)
        assert list(space.families) == names
        default = flash_paged.chosen(problem.spec(), H200, problem.n_q * 4)
        assert [one.config for one in space.of_sizes()] == [default] and default in [one.config for one in space.starts()]
    rows = SearchSpace(every_family(), replace(STEP, features=Features(packed=True)), H200)
    assert rows.families.keys() <= families().keys()
    windowed = replace(CHUNK, features=replace(CHUNK.features, window=(40, 0)))
    assert "flash_fwd_hopper_paged" in SearchSpace(every_family(), windowed, H200, only_suited=False).families
    assert "flash_fwd_hopper_paged" not in SearchSpace(every_family(), paged(64, windowed), H200, only_suited=False).families


def test_both_orders_of_tiles_are_compiled_ahead() -> None:
    """Those of equal chunks and of the small cases, which the process of the GPU would otherwise compile at each trial."""
    kind = families_of_pages()["flash_paged"]
    variant = variant_of(kind, STEP.spec(), kind.default_of(STEP, H200))
    names = [name for name, _ in compiled_kernels(render(kind, variant), "paged_orders", STEP, H200)]
    assert names == ["attention_forward"] * 2
    few = replace(STEP, batch=1, lengths=None)
    assert [name for name, _ in compiled_kernels(render(kind, variant), "paged_orders", few, H200)].count("combine_splits") == 1


def stand_in(spoilt: Callable[[Any, Any], None] = lambda keys, table: None) -> Callable[..., None]:
    """A launch by the reference, which finds each key by the table; `spoilt` changes a sequence's keys, given its row of the table."""

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, *, lengths: Any, table: Any, pages: Any, scale: float, **words: Any) -> None:
        of_q, used = lengths[0].tolist(), lengths[2].tolist()
        assert pages[:2] == (1 << (max(b - a for a, b in pairwise(of_q)) - 1).bit_length(), pages[1]) and max(used) <= pages[1]
        for b, n_kv in enumerate(used):
            rows, n_q = slice(of_q[b], of_q[b + 1]), of_q[b + 1] - of_q[b]
            blocks = table[b, : -(-n_kv // k.shape[2])].long()
            keys, values = (x[blocks].transpose(1, 2).flatten(0, 1)[:n_kv].transpose(0, 1)[None].clone() for x in (k, v))
            spoilt(keys, table[b])
            band = replace(SMALL.band, diagonal=words["diagonal"] * (n_kv - n_q))
            made, sums = reference.attention(q[:, :, rows], keys, values, band=band, scale=scale, dtype=torch.float64)
            out[:, :, rows], lse[:, :, rows] = made.to(out.dtype), sums.to(lse.dtype)

    return launch


def test_trials_read_shuffled_pages_with_nan_wherever_no_key_is() -> None:
    full = make_inputs(SMALL, device="cpu", seed=1)
    pages = full.pages
    assert pages is not None and full.arguments[1] is pages.k
    for b, (_, n_kv) in enumerate(full.sequences):
        count = -(-n_kv // 4)
        assert set(pages.table[b, count:].tolist()) <= set(GARBAGE) and len(pages.table[b, count:]) >= 2
    known = torch.zeros(pages.k.shape[0] * 4, dtype=torch.bool)
    known[pages.slots] = True
    assert torch.isnan(pages.k.transpose(1, 2).flatten(0, 1)[~known]).all() and not torch.isnan(full.k).any()
    verifier = Verifier(SMALL, device="cpu", seed=1, full_size=full, thorough=True)
    assert verifier.verdict(stand_in(), repeats=False).reason == ""
    assert any(case.inputs.poisoned for case, _ in verifier.small.checks)

    def another(keys: Any, table: Any) -> None:
        keys[:, :, -1] = 0.0

    assert "off by" in verifier.verdict(stand_in(another), repeats=False).reason


def test_latent_values_are_columns_of_the_keys_pages() -> None:
    latent = replace(SMALL, d_v=8, features=replace(SMALL.features, latent=True))
    given = make_inputs(latent, device="cpu", seed=3)
    assert given.pages is not None
    _, key, value = operands(given)
    assert value.data_ptr() == key.data_ptr() and value.shape[-1] == 8 and value.stride() == key.stride()
    verifier = Verifier(latent, device="cpu", seed=1, full_size=given, thorough=False)
    assert verifier.verdict(stand_in(), repeats=False).reason == ""
    keys, call = given.k.clone(), pytorch_call(given)
    given.k.fill_(0.0)
    assert call is not None and call() is not None and torch.equal(given.k, keys)
    out = attention_call(given)()
    right = torch.cat([reference_of(part)[0] for part, _ in given.parts()], 1).transpose(0, 1)
    torch.testing.assert_close(out.double(), right, atol=1e-4, rtol=1e-4)


def test_pytorch_gathers_the_pages_at_each_call() -> None:
    given = make_inputs(SMALL, device="cpu", seed=2)
    keys, values = given.k.clone(), given.v.clone()
    call = pytorch_call(given)
    assert call is not None and pytorch_call(given, "flash") is None
    wanted: Any = call()
    given.k.fill_(0.0)
    given.v.fill_(0.0)
    found: Any = call()
    assert torch.equal(given.k, keys) and torch.equal(given.v, values)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_whole_calls_over_pages_are_timed_beside_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = make_inputs(SMALL, device="cpu", seed=1)
    rows = given.q.shape[2]
    out = attention_call(given)()
    right = torch.cat([reference_of(part)[0] for part, _ in given.parts()], 1).transpose(0, 1)
    assert out.shape == (rows, 4, 16)
    torch.testing.assert_close(out.double(), right, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(tasks, "inputs_on_device", lambda *_: (given, None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timed = time_calls([], SMALL, H200, 1, 0.01)
    assert isinstance(timed, Called) and timed.pytorch is not None and timed.providers == {}, timed


# --- records ----------------------------------------------------------------------------------------------------------------------


def test_explanations_name_the_record_of_pages(tmp_path: Path) -> None:
    path = database(tmp_path / "a.sqlite", STEP)
    with dispatch.use(path, alone=True):
        said = dispatch.explain_problem(STEP, "h200")
        assert (said.kind, said.config, said.record_key) == ("exact", UNUSUAL, STEP.key("h200"))
        near = dispatch.explain_problem(paged(32, replace(STEP, n_kv=4096, lengths=None)), "h200")
        assert (near.kind, near.config, near.differences[0]) == ("near_n", UNUSUAL, "full+packed+page16 for full+packed+page32")
        for other in (CHUNK, replace(STEP, features=Features(packed=True))):
            assert dispatch.explain_problem(other, "h200").config != UNUSUAL, "neither a chunk nor keys in rows"
    words = [
        "explain",
        "--gpu-name",
        "h200",
        "--paged",
        "16",
        "--d",
        "64",
        "--n",
        "8192",
        "--batch",
        "64",
        "--heads",
        "32",
        "--kv-heads",
        "8",
        "--dtype",
        "fp16",
        "--json",
        "--db",
    ]
    result = CliRunner().invoke(main, [*words, str(path)])
    assert result.exit_code == 0 and json.loads(result.stdout)["kind"] == "exact", result.output


@pytest.mark.parametrize(("problem", "template"), [(STEP, "flash_fwd"), (replace(STEP, features=Features(packed=True)), "flash_paged")])
def test_a_record_of_kernels_that_read_keys_elsewhere_serves_nobody(problem: Problem, template: str, tmp_path: Path) -> None:
    config = UNUSUAL if template == "flash_paged" else families()[template].default(problem.spec(), H200)
    path = database(tmp_path / "a.sqlite", problem, template=template, config=config)
    with Store.open(str(path), writable=False) as store:
        [record] = store.records()
    assert "rows" in (unservable(record) or "")
    with dispatch.use(path, alone=True):
        assert dispatch.explain_problem(problem, "h200").kind == "default"


@pytest.fixture
def driven(library: Decoding, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:  # noqa: F811
    monkeypatch.setattr(Memo, "surroundings", lambda memo, device, of: (H200, families(), memo.pool(of.key("h200"), H200)))
    yield drive(library, monkeypatch)
    monkeypatch.undo()
    context.current().forget()


@pytest.mark.parametrize("unmeasured", [False, True])
def test_calls_over_pages_run_the_kernel_of_the_record(driven: Driven, unmeasured: bool, tmp_path: Path) -> None:
    step = replace(STEP, batch=3, n_kv=128, lengths=None)
    source: Source = "predicted" if unmeasured else "measured"
    with dispatch.use(database(tmp_path / "a.sqlite", step, source=source), alone=True, unmeasured=unmeasured):
        _, tensors, beside = over_pages(1)
        said = dispatch.explain_varlen(*tensors, **beside)
        assert (said.kind, said.config, said.record_key) == ("predicted" if unmeasured else "exact", UNUSUAL, step.key("h200"))
        for _ in range(2):
            _, launches = driven.since(partial(dispatch.attention_varlen, *tensors, **beside))
            assert launches[0][0] == "attention_forward"
        assert driven.tried.count("attention_forward") == 1, "the second call has the first one's plan"
        # Bits with a number of splits depend on nothing else, and other caches and chunks have records of their own.
        assert dispatch.explain_varlen(*tensors, **beside, num_splits=1).kind == "default"
        for other in (over_pages(1, cache=torch.float8_e4m3fn), over_pages(40)):
            assert dispatch.explain_varlen(*other[1], **other[2]).kind == "default"
        longer = [*tensors[:-1], 60]
        assert dispatch.explain_varlen(*longer, **beside).kind == ("default" if unmeasured else "near_n")
        uneven = [*tensors[:-2], 3, 99]
        assert dispatch.explain_varlen(*uneven, **beside).kind == "default", "one chunk may be longer than others"


def test_a_record_of_hoppers_kernel_serves_chunks_where_its_copies_can(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One with frozen row maxima, which gives way to its fallback kernel where they mislead it."""
    counts = Counts()
    monkeypatch.setattr(MISPREDICTIONS, "of", lambda device, key: counts.misprediction)
    kind, chunk = families_of_pages()["flash_fwd_hopper_paged"], replace(STEP, batch=8, n_q=256, n_kv=128, lengths=None)
    frozen, running = (
        next(one for one in kind.configs(chunk.spec(), H200) if one["maximum"] == maximum and one["BLOCK_M"] == 128)
        for maximum in ("first", "running")
    )
    path = database(tmp_path / "a.sqlite", chunk, template=kind.name, config=frozen, beside=running)
    with dispatch.use(path, alone=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        _, tensors, words = over_pages(256, sequences=8)
        said = dispatch.explain_varlen(*tensors, **words)
        assert (said.kind, said.template, said.config, said.twin) == ("exact", kind.name, frozen, running)
        assert dispatch.explain_varlen(*tensors, **words, deterministic=True).twin is None
        made: list[Config] = []
        launch = Program.run
        monkeypatch.setattr(Program, "run", lambda program, *given: (made.append(config_of(program)), launch(program, *given))[1])
        for _ in range(2):
            _, launches = driven.since(partial(dispatch.attention_varlen, *tensors, **words))
            assert [name for name, _ in launches] == ["flash_fwd_hopper"]
        counts.misprediction.programs = PROGRAMS
        counts.launch(PROGRAMS, 3)
        for _ in range(2):
            dispatch.attention_varlen(*tensors, **words)
        assert made == [frozen] * 2 + [running] * 2
        _, tensors, words = over_pages(256, sequences=8, page=24)
        assert dispatch.explain_varlen(*tensors, **words).template == "flash_paged"


# --- calls ------------------------------------------------------------------------------------------------------------------------


def test_a_call_over_pages_is_recorded_as_one_problem() -> None:
    _, tensors, words = over_pages(40, cache=torch.float16)
    with torch.no_grad():
        dispatch.attention_varlen(*tensors, **words, is_causal=True)
        for more in ({"num_splits": 2}, {}):
            _, others, beside = over_pages(1, cache=torch.float8_e4m3fn if not more else torch.float16)
            dispatch.attention_varlen(*others, **beside, **more)
    [one] = CALLS.met()
    assert (one.batch, one.n_q, one.n_kv, one.features.page, one.lengths) == (3, 40, 99, 16, Lengths(law="equal", longest=99))
    assert searchable([one], find_target("a100")) == ([one], []), "a search of the file takes it"
