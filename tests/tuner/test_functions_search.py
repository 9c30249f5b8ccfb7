"""Masks and scores as code from the command line to the record that serves: loaded, searched, checked, recorded, looked up."""

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import db_samples as samples
import pytest
import torch
from click.testing import CliRunner
from commands import flashtune
from hypothesis import given
from hypothesis import strategies as st
from mod_cases import oracle
from mods_machine import lists_of, seen_by, shapes

from flashtune import dispatch
from flashtune.cli.main import main
from flashtune.core.gpu import limits
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.oracles import expected_at
from flashtune.core.problems.passes import Place
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.nearness import mods_in
from flashtune.core.records.results import Finding, TuningRecord
from flashtune.core.system.errors import FlashtuneError, InputError
from flashtune.core.system.secrets import command_line
from flashtune.db.preference import latest
from flashtune.db.store import Store
from flashtune.dispatch.functions import kernels as flex_kernels
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.policy.orders import rank_coded
from flashtune.dispatch.policy.records import Pool
from flashtune.dispatch.state.context import Memo
from flashtune.templates import families, family, unservable
from flashtune.templates.mods.emit import emitted
from flashtune.templates.mods.known import NAMED, Named, PackedInstead
from flashtune.tuner import functions
from flashtune.tuner.propose.space import SearchSpace, record_of, transfer_candidates
from flashtune.tuner.timing import baseline
from flashtune.tuner.verify.correctness import Verifier
from flashtune.tuner.verify.inputs import make_inputs

H100, H200 = find_target("h100"), find_target("h200")
FILE = """
import torch

table = torch.randn(2, 33, generator=torch.Generator().manual_seed(2))
grid = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx).abs() <= 24) & ((q_idx - kv_idx) % 3 == 0)


def relative(score, b, h, q_idx, kv_idx):
    return score + table[h, (q_idx - kv_idx).clamp(-16, 16) + 16]


def rows(score, b, h, q_idx, kv_idx):
    # Index after index, of a tensor that ends with the problem.
    return score + grid[h][q_idx]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 100)


def sides(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx <= 3) & (kv_idx - q_idx <= 100)


def capped(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def branches(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx if q_idx > 3 else kv_idx > 3


def gamma(score, b, h, q_idx, kv_idx):
    return torch.lgamma(score.abs() + 1)


def beyond(score, b, h, q_idx, kv_idx):
    return score + grid[h, q_idx]


number = 3
"""
SMALL = Problem(batch=1, heads=2, kv_heads=1, n_q=40, n_kv=50, d=16, d_v=16, dtype="fp32")


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    dispatch.reload()
    yield
    dispatch.reload()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "masks-1.v2.py"
    path.write_text(FILE)
    return path


def coded(file: Path, problem: Problem = SMALL, *, score: str = "relative", mask: str = "dilated") -> Problem:
    """The problem with these functions of the file."""
    one = Named(f"{file}:{score}" if score else "", f"{file}:{mask}" if mask else "")
    return functions.with_functions(problem, one)


# --- the key ----------------------------------------------------------------------------------------------------------------------

hashes = st.text("0123456789abcdef", min_size=16, max_size=16)


@given(hashes, st.booleans(), st.sampled_from([64, 80, 4096]), st.sampled_from(["fwd", "bwd"]))
def test_a_hash_comes_back_from_the_key_and_json(name: str, tf32: bool, n: int, direction: Any) -> None:
    features = Features(mods=name, tf32=tf32)
    problem = replace(SMALL, n_q=n, n_kv=n, features=features, direction=direction)
    key = problem.key("h100")
    assert Features.from_json(json.loads(key.features)) == features == problem.seen().features
    assert mods_in(key.features) == name == problem.spec().mods
    assert f"mods-{name}" in problem.label() and f"mods-{name}" in problem.spec().label()
    assert key != replace(problem, features=Features(tf32=tf32)).key("h100")


@pytest.mark.parametrize("found", ["", "x" * 16, "ABCDEF0123456789", "0" * 15, "0" * 17, "../../../../etc/", 3, ["a"], None])
def test_what_is_no_hash_is_refused(found: Any) -> None:
    if found == "":
        assert Features.from_json({"mods": ""}) == Features()
        return
    with pytest.raises(InputError, match="mods"):
        Features.from_json({"mods": found})


@pytest.mark.parametrize(
    "more", [{"causal": True}, {"window": (3, 3)}, {"mask": "bool"}, {"softcap": True}, {"packed": True, "alibi": True}]
)
def test_functions_stand_beside_no_other_feature(more: Any) -> None:
    with pytest.raises(InputError, match="stand beside no other feature"):
        Features(mods="0" * 16, **more)


def test_functions_may_hide_any_pair_so_that_short_times_are_plausible() -> None:
    long = replace(SMALL, n_q=1 << 16, n_kv=1 << 16, dtype="bf16")
    assert limits.least_us(replace(long, features=Features(mods="0" * 16)), "h100") == limits.SHORTEST_US < limits.least_us(long, "h100")


# --- the user's file --------------------------------------------------------------------------------------------------------------

REFUSED = {
    "causal": "is built in: search with --causal$",
    "window": "is built in: search with --causal --window 100$",
    "sides": r"is built in: dispatch.attention takes it as window=\(3, 100\)",
    "branches": "branches on or converts a tensor's value .*use torch.where",
    "number": "has no function 'number': name one of its top level",
    "missing": "has no function 'missing'",
}
REFUSED_SCORES = {
    "capped": "is built in: search with --softcap 20$",
    "gamma": "uses aten.lgamma.default .*no kernel can be searched for it",
    "beyond": "reads index 99 of dimension 1 of a captured tensor, whose size is 64",
}


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_SCORES])
def test_what_cannot_be_searched_is_named_in_a_sentence(name: str, file: Path) -> None:
    which = {"score": "", "mask": name} if name in REFUSED else {"score": name, "mask": ""}
    with pytest.raises(InputError, match=(REFUSED | REFUSED_SCORES)[name]) as caught:
        coded(file, replace(SMALL, n_q=100, n_kv=100), **which)
    assert "\n" not in str(caught.value) and name in str(caught.value)


BROKEN = {
    "raise ValueError('no\\nsecond line')": "can't be run .ValueError: no.: mend it",
    "import sys; sys.exit(0)": "can't be run .SystemExit: 0.",
    "def f(:": "can't be run .SyntaxError",
    "f = 3": "has no function 'f'",
}


@pytest.mark.parametrize("text", BROKEN)
def test_files_that_do_not_run_are_named_in_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(InputError, match=BROKEN[text]) as caught:
        functions.loaded(Named(f"{path}:f"), "cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "match"), [("f", "write FILE.py:NAME"), (":f", "write FILE.py:NAME"), ("no.py:f", "there is no file")])
def test_names_of_no_file_are_refused(text: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        functions.loaded(Named(text), "cpu")


def test_a_loop_of_links_is_no_file(tmp_path: Path) -> None:
    loop = tmp_path / "loop.py"
    loop.symlink_to(loop)
    with pytest.raises(InputError, match=r"there is no file .*loop\.py"):
        functions.loaded(Named(f"{loop}:f"), "cpu")


def test_a_files_name_may_be_any_bytes(file: Path) -> None:
    odd = Path(os.fsdecode(bytes(file.parent) + b"/\xff.py"))
    odd.write_bytes(file.read_bytes())
    assert functions.loaded(Named(f"{odd}:relative"), "cpu").captured
    result = flashtune("explain", "--gpu-name", "h100", "--d", "16", "--n", "32", "--score-mod", f"{odd}:missing")
    assert result.exit_code == 2 and "has no function 'missing'" in result.output and not isinstance(result.exception, ValueError)


@pytest.mark.parametrize("code", ["0", "3", "'why'"])
def test_functions_that_end_their_process_are_refused_in_a_sentence(code: str, tmp_path: Path) -> None:
    path = tmp_path / "ends.py"
    path.write_text(
        f"import sys\n\ndef f(s, b, h, q, k):\n    sys.exit({code})\n\n"
        f"def later(s, b, h, q, k):\n    return s * b if 'Fake' in type(s).__name__ else sys.exit({code})\n"
    )
    result = flashtune("explain", "--gpu-name", "h100", "--d", "16", "--n", "32", "--score-mod", f"{path}:f")
    assert result.exit_code not in (0, 3) and "f can't be traced (line 4: sys.exit" in result.output
    with pytest.raises(InputError, match="later can't be called: SystemExit: "):
        functions.loaded(Named(f"{path}:later"), "cpu").scores(torch.zeros(3, 3), 0, 0, 0)


def test_the_command_refuses_functions_in_a_sentence(file: Path) -> None:
    for words, said in (
        (["--mask-mod", f"{file}:causal"], "is built in: search with --causal"),
        (["--mask-mod", f"{file}:dilated", "--softcap", "2"], "stand beside no other feature"),
        (["--mask-mod", f"{file}:dilated", "--causal"], "stand beside no other feature"),
        (["--score-mod", ""], "the name of a function is empty: write FILE.py:NAME"),
    ):
        result = CliRunner().invoke(main, ["search", "--gpu-name", "h100", "--d", "16", "--n", "32", *words])
        assert result.exit_code != 0 and said in result.output and "Traceback" not in result.output


DOCUMENTS = """
import torch

row = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 200, 300, 424]))
rows = torch.stack([row, row.flip(0)])
mixed = row % 2
short = torch.arange(1024) // 20


def plain(b, h, q, k):
    return row[q] == row[k]


def causal(b, h, q, k):
    return (row[k] == row[q]) & (q >= k)


def windowed(b, h, q, k):
    return (rows[b, q] == rows[b, k]) & (q >= k) & (q - k <= 64)


def back(b, h, q, k):
    return mixed[q] == mixed[k]


def many(b, h, q, k):
    return short[q] == short[k]


def capped(score, b, h, q, k):
    return 20 * torch.tanh(score / 20)


def relative(score, b, h, q, k):
    return score + row[k]
"""


@pytest.mark.parametrize(
    ("mask", "score", "batch", "options"),
    [
        ("plain", "", 1, "--packed uniform --n 256 --batch 4"),
        ("causal", "", 3, "--packed uniform --n 256 --batch 12 --causal"),
        ("windowed", "", 2, "--packed uniform --n 256 --batch 8 --causal --window 64"),
        ("causal", "capped", 1, "--packed uniform --n 256 --batch 4 --causal --softcap 20"),
        # No kernel of packed sequences computes these calls.
        ("causal", "relative", 1, ""),
        ("back", "", 1, ""),
        ("many", "", 1, ""),
    ],
)
def test_a_mask_of_documents_names_the_search_of_what_calls_run(mask: str, score: str, batch: int, options: str, tmp_path: Path) -> None:
    path = tmp_path / "documents.py"
    path.write_text(DOCUMENTS)
    problem = Problem(batch=batch, heads=4, kv_heads=4, n_q=1024, n_kv=1024, d=64, d_v=64, dtype="bf16")
    words = ["--mask-mod", f"{path}:{mask}", *(["--score-mod", f"{path}:{score}"] if score else [])]
    command = ["--gpu-name", "h200", "--d", "64", "--n", "1024", "--batch", str(batch), "--heads", "4", *words]
    if not options:
        assert coded(path, problem, mask=mask, score=score).features.mods
        return
    with pytest.raises(PackedInstead, match=rf"which calls run as packed sequences: search with {options}$") as caught:
        coded(path, problem, mask=mask, score=score)
    searched = flashtune("search", "--predict", *command)
    assert searched.exit_code == 2 and options in searched.output
    # Its options are those of this problem, which explanations are of.
    there = ["--gpu-name", "h200", "--d", "64", "--heads", "4", *options.split(), "--json"]
    told, same = (json.loads(flashtune("explain", *one).stdout) for one in ([*command, "--json"], there))
    assert "packed sequences" in told["reason"] and told["template"] == "flash_fwd_hopper"
    assert {name: x for name, x in told.items() if name != "reason"} == {name: x for name, x in same.items() if name != "reason"}
    assert caught.value.problem.features.packed


def test_command_lines_are_stored_without_names_of_functions() -> None:
    words = ["flashtune", "search", "--mask-mod", "my masks.py:f", "--d", "64", "--score-mod=s.py:g"]
    assert command_line(words) == "flashtune search --mask-mod '***' --d 64 '--score-mod=***'"


# --- the checks -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("name", [name for name, one in shapes().items() if one[1] is not None])
def test_lists_of_blocks_are_those_of_the_mask(name: str, of_keys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "ROWS", 64 * 300)
    score_mod, mask_mod = shapes()[name]
    score, mask, captured = functions.traced_together(score_mod, mask_mod, torch.device("cpu"))
    one = functions.Functions(score_mod=score_mod, mask_mod=mask_mod, score=score, mask=mask, captured=captured)
    problem = replace(SMALL, batch=2, heads=4, kv_heads=4, n_q=290, n_kv=300)
    for tile in ((64, 32), (48, 128)):
        found = one.lists(problem, tile, torch.device("cpu"), of_keys=of_keys)
        assert torch.equal(found, lists_of(seen_by(mask_mod, 2, 4, 290, 300), tile, of_keys=of_keys))
        assert found.shape == one.lists(problem, tile, torch.device("meta"), of_keys=of_keys).shape


def stand_in(file: Path, spoilt: bool) -> Callable[..., None]:
    """A launch by the tests' own oracle, that may show a pair that the mask hides."""

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, *, scale: float, **words: Any) -> None:
        made = functions.loaded(Named(f"{file}:rows", f"{file}:dilated"), "cpu")
        score_mod, mask_mod = made.score_mod, made.mask_mod
        grid = words["mods"](Config.of(BLOCK_M=64, BLOCK_N=64))[0]
        seen = (lambda *x: mask_mod(*x) | (x[2] == x[3] + 1)) if spoilt else mask_mod  # type: ignore[misc]
        assert score_mod is not None and scale == q.shape[3] ** -0.5
        one, sums = oracle(*(x.double() for x in (q, k, v)), lambda s, b, h, q, k: s + grid[h, q], seen)
        out.copy_(one)
        lse.copy_(sums)

    return launch


def test_candidates_are_compared_with_the_functions_themselves(file: Path) -> None:
    problem = coded(file, score="rows")
    verifier = Verifier(problem, device="cpu", seed=1, full_size=make_inputs(problem, device="cpu", seed=1), thorough=True)
    sizes = [case.inputs.problem for case, _ in verifier.small.checks]
    assert all(one.n_q <= problem.n_q and one.n_kv <= problem.n_kv and one.heads <= problem.heads for one in sizes)
    assert verifier.verdict(stand_in(file, spoilt=False)).reason == ""
    assert "off by" in verifier.verdict(stand_in(file, spoilt=True)).reason


def test_gradients_flow_through_the_functions(file: Path) -> None:
    problem = replace(coded(file), direction="bwd", features=coded(file, replace(SMALL, direction="bwd")).features)
    inputs = make_inputs(problem, device="cpu", seed=3)
    made = functions.loaded(Named(f"{file}:relative", f"{file}:dilated"), "cpu")
    leaves = [x.double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, lse = oracle(*leaves, made.score_mod, made.mask_mod)
    seen = lse.isfinite()
    loss = (out * inputs.operands["dout"].double()).sum() + (lse * inputs.operands["dlse"])[seen].sum()
    expected = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(inputs.out.double(), out.detach(), atol=1e-5, rtol=1e-5)
    found = expected_at(problem, inputs.operands, inputs.parameters, [Place(batch=0, head=1)])[0]
    for name, x in zip(("dq", "dk", "dv"), expected, strict=True):
        torch.testing.assert_close(found[name], x[0, 1 if name == "dq" else 0], atol=1e-4, rtol=1e-4)


# --- the search -------------------------------------------------------------------------------------------------------------------


def test_functions_are_searched_without_a_gpu(file: Path, tmp_path: Path) -> None:
    """The forward; test_packed_functions_search has the backward."""
    path = str(tmp_path / "functions.sqlite")
    words = ["--gpu-name", "a100", "--d", "16", "--n", "48", "--batch", "1", "--heads", "2", "--dtype", "fp16", "--direction", "fwd"]
    words += ["--score-mod", f"{file}:relative", "--mask-mod", f"{file}:dilated"]
    result = CliRunner().invoke(main, ["search", *words, "--trials", "1", "--seed", "1", "--db", path, "--json"])
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)
    name = coded(file, SMALL).features.mods
    assert (row["template"], row["features"], row["unservable"]) == ("flash_fwd", {"mods": name}, None)
    assert (row["fate"], row["source"]) == ("correct", "predicted"), "the interpreter checked it"
    with closing(sqlite3.connect(path)) as known:
        text = "\n".join(known.iterdump())
    assert not any(word in text for word in ("clamp", "def ", "tl.", file.name, ":relative")), "no code, and no name of any"
    said = CliRunner().invoke(main, ["verify", "--db", path, *words[-4:], "--json"])
    assert said.exit_code == 0 and json.loads(said.stdout)["correct"] == 1, said.output
    explained = CliRunner().invoke(main, ["explain", "--db", path, "--json", *words])
    assert json.loads(explained.stdout)["kind"] == "framework" and "weren't measured" in explained.output


def database(path: Path, *made: tuple[Problem, str, Config, float], gpu: str = "h200", framework_us: float = 600.0) -> Path:
    """Measured records of problems by a template's config."""
    found = []
    for place, (problem, template, config, us) in enumerate(made):
        outcome = samples.outcome(f"{place:016x}", us, template=template, config=config, finalist=True, rank=1)
        found.append(samples.result(outcome, framework_us=framework_us, gpu=gpu, of=problem))
    return samples.write(path, tuple(found))


def stored(path: Path) -> list[TuningRecord]:
    with Store.open(path, writable=False) as store:
        return list(store.records())


WIDE = Problem(batch=1, heads=2, kv_heads=2, n_q=4096, n_kv=4096, d=64, d_v=64, dtype="bf16")


def configs_of(problem: Problem, template: str = "flash_fwd_hopper") -> list[Config]:
    return family(template).starts(problem.spec(), H200)


def test_the_first_candidates_are_of_the_functions_then_of_the_feature_that_is_most_alike(file: Path, tmp_path: Path) -> None:
    problem = coded(file, WIDE)
    own, others = configs_of(problem)[:2], configs_of(replace(WIDE, features=Features(mask="bias")))
    alike = next(
        config for config in others if config not in own and family("flash_fwd_hopper").unfit(config, problem.spec(), H200) is None
    )
    plain = next(config for config in configs_of(WIDE) if config not in (*own, alike))
    near, stranger = replace(problem, n_q=2048, n_kv=2048), replace(problem, features=Features(mods="0" * 16))
    records = stored(
        database(
            tmp_path / "a.sqlite",
            (WIDE, "flash_fwd_hopper", plain, 300.0),
            (replace(WIDE, features=Features(mask="bias")), "flash_fwd_hopper", alike, 300.0),
            (stranger, "flash_fwd_hopper", own[1], 300.0),
            (near, "flash_fwd_hopper", own[0], 300.0),
        )
    )
    space = SearchSpace(families(), problem, H200)
    assert set(space.families) == {"flash_fwd_hopper", "flash_fwd"}
    first = [candidate.config for candidate in transfer_candidates(space, problem, records, "measured")]
    assert first[:2] == [own[0], alike] and own[1] not in first
    only = [candidate.config for candidate in transfer_candidates(SearchSpace(families(), WIDE, H200), WIDE, records, "measured")]
    assert only[0] == plain and own[1] not in only


def test_mask_alone_is_most_like_a_boolean_mask(file: Path) -> None:
    from flashtune.templates.mods.known import alike

    assert alike(coded(file, score="")).features == Features(mask="bool")
    assert alike(coded(file)).features == Features(mask="bias")


# --- the record that serves -------------------------------------------------------------------------------------------------------


def recorded(problem: Problem, pool: Pool, *, unmeasured: bool = False) -> Choice | None:
    """The choice by a record of the functions, if there is one."""
    ranked = rank_coded(problem, H200, lambda one: pool, families(), framework_serves=False, unmeasured=unmeasured)
    first = next(choice for choice in ranked if isinstance(choice, Choice))
    return None if first.record is None else first


def test_the_record_of_the_same_functions_gpu_and_sizes_serves(file: Path, tmp_path: Path) -> None:
    problem = coded(file, WIDE)
    chosen = configs_of(problem)[:6]
    far = replace(problem, n_q=512, n_kv=512)
    made = [
        (replace(problem, features=Features(mods="0" * 16)), "flash_fwd_hopper", chosen[0], 200.0),
        (replace(problem, d=128, d_v=128), "flash_fwd_hopper", configs_of(replace(problem, d=128, d_v=128))[0], 200.0),
        (replace(problem, dtype="fp16"), "flash_fwd_hopper", chosen[2], 200.0),
        (WIDE, "flash_fwd_hopper", configs_of(WIDE)[0], 200.0),
        (far, "flash_fwd_hopper", chosen[4], 200.0),
    ]
    key = problem.key("h200")
    records = stored(database(tmp_path / "a.sqlite", *made))

    def served(records: list[TuningRecord], of: Problem = problem) -> Any:
        return recorded(of, Pool(key, H200, records, families()))

    assert served([one for one in records if one.problem != far]) is None, "another hash, head size, element type or feature"
    assert served(records).config == chosen[4] and served(records).record.problem == far
    records += stored(database(tmp_path / "b.sqlite", (problem, "flash_fwd_hopper", chosen[5], 250.0)))
    assert served(records).config == chosen[5]
    assert served(records, replace(problem, n_q=640, n_kv=640)).config == chosen[4], "the nearest length"
    assert served(stored(database(tmp_path / "c.sqlite", (problem, "flash_fwd_hopper", chosen[5], 250.0), gpu="h100"))) is None
    strange = Config.of(chosen[5].as_dict(), BLOCK_M=77)
    records = stored(
        database(tmp_path / "d.sqlite", (problem, "flash_fwd_hopper", strange, 100.0), (far, "flash_fwd_hopper", chosen[4], 99.0))
    )
    assert served(records).config == chosen[4], "what no kernel has is passed over"


def test_a_record_of_functions_whose_kernel_failed_since_is_passed_over(file: Path, tmp_path: Path) -> None:
    problem, name = coded(file, WIDE), "flash_fwd_hopper"
    config, key = configs_of(problem)[3], problem.key("h200")
    records = stored(database(tmp_path / "a.sqlite", (problem, name, config, 200.0)))
    variant = Variant(template=name, spec=problem.spec(), config=config).id
    for found_at, serves in (("2026-11-28T00:00:00+00:00", False), ("1999-01-01T00:00:00+00:00", True)):
        findings = latest([Finding(gpu="h200", variant_id=variant, found_at=found_at, reason="runtime: broken")])
        pool = Pool(key, H200, records, families(), findings)
        assert (recorded(problem, pool) is not None) is serves


def test_predicted_records_of_functions_serve_where_unmeasured_ones_may(file: Path) -> None:
    problem = coded(file, WIDE)
    outcome = samples.outcome("0" * 16, 200.0, template="flash_fwd_hopper", config=configs_of(problem)[3], source="predicted", rank=1)
    record = record_of(samples.result(outcome, framework_us=None, of=problem))
    assert record is not None
    pool = Pool(problem.key("h200"), H200, [record], families())
    assert recorded(problem, pool) is None
    found = recorded(problem, pool, unmeasured=True)
    assert found is not None and (found.config, found.kind) == (outcome.config, "predicted") and "not measured" in found.origin


def test_explain_says_which_record_or_which_default(file: Path, tmp_path: Path) -> None:
    problem = coded(file, WIDE)
    path = database(tmp_path / "a.sqlite", (problem, "flash_fwd_hopper", configs_of(problem)[5], 250.0))
    words = ["explain", "--gpu-name", "h200", "--d", "64", "--heads", "2", "--batch", "1", "--json"]
    words += ["--score-mod", f"{file}:relative", "--mask-mod", f"{file}:dilated"]
    with dispatch.use(path, alone=True):
        exact, near = (json.loads(CliRunner().invoke(main, [*words, "--n", n]).stdout) for n in ("4096", "8192"))
        plain = dispatch.explain_problem(WIDE, "h200")
    assert (exact["kind"], exact["median_us"], near["kind"]) == ("exact", 250.0, "near_n")
    assert "measured with these functions" in exact["reason"] and exact["config"] == configs_of(problem)[5].as_dict()
    assert plain.record_key is None, "no record of functions tells anything of attention"
    bare = json.loads(CliRunner().invoke(main, [*words, "--n", "4096", "--db", str(samples.write(tmp_path / "e.sqlite", ()))]).stdout)
    assert bare["kind"] == "default" and "runs the call (the family's default, not measured)" in bare["reason"]
    slow = database(tmp_path / "s.sqlite", (problem, "flash_fwd_hopper", configs_of(problem)[5], 250.0), framework_us=200.0)
    slower = json.loads(CliRunner().invoke(main, [*words, "--n", "4096", "--db", str(slow)]).stdout)
    assert slower["kind"] == "framework" and "PyTorch was faster: 200.0 us" in slower["reason"]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_call_takes_the_config_of_its_record(
    direction: Any, trained: bool, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the functions alone where captured tensors get gradients."""
    problem, name = coded(file, replace(WIDE, direction=direction)), f"flash_{direction}_hopper"
    made = functions.of_hash(problem.features.mods, "cpu")
    mods, config = made.mods(direction), configs_of(problem, name)[5]
    if trained:
        types = tuple(replace(x, trained=True) for x in mods.captured)
        mods = emitted(made.score, made.mask, types, backward=direction == "bwd")
        assert mods.untrained == made.mods(direction) and (mods.hash == problem.features.mods) == (direction == "fwd")
    path = database(tmp_path / "a.sqlite", (problem, name, config, 250.0))
    looked: list[Problem] = []

    def surroundings(memo: Any, device: Any, of: Problem) -> Any:
        looked.append(of)
        return H200, families(), memo.pool(of.key("h200"), H200)

    class OnGpu(torch.Tensor):
        """A CPU tensor that says it is on a GPU."""

        device = torch.device("cuda", 0)  # type: ignore[assignment]

    monkeypatch.setattr(flex_kernels.devices, "target_of", lambda device: H200)
    monkeypatch.setattr(Memo, "surroundings", surroundings)
    monkeypatch.setattr(flex_kernels, "kernels_here", lambda made={}: made)
    monkeypatch.setattr(flex_kernels, "loaded_kernel", samples_kernel)
    q, k = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16).as_subclass(OnGpu) for n in (4096, 4096))
    with dispatch.use(path, alone=True):
        found: Any = flex_kernels.kernel_of(direction, q, k, k, mods)
        assert found.config == config and found.record.problem == problem and "of the record" in found.choice.origin
        count = len(looked)
        assert flex_kernels.kernel_of(direction, q, k, k, mods) is found and len(looked) == count, "one look-up for a signature"
        said = flex_kernels.explained_kernel(found, "", "h200", replace(problem, features=Features(mods=mods.hash)))
        assert said.kind == "exact" and said.differences == (), "gradients of captured tensors are no other problem"
    with dispatch.use(samples.write(tmp_path / "e.sqlite", ()), alone=True):
        usual: Any = flex_kernels.kernel_of(direction, q, k, k, mods)
        assert usual.record is None and usual.config == family(name).default(problem.spec(), H200)


class Loaded(SimpleNamespace):
    """A kernel that isn't here; plans refer to it weakly."""


def samples_kernel(choice: Any, device: Any, target: Any) -> Any:
    return Loaded(
        variant=choice.variant,
        config=choice.config,
        choice=choice,
        record=choice.record,
        failed="",
        median_us=1.0,
        code=SimpleNamespace(module=SimpleNamespace(accepts=lambda *given: True)),
    )


@pytest.mark.parametrize(("times", "why"), [([(100.0, 90.0)], "90.0 us, and ours 100.0"), ([(80.0, 90.0)], ""), ([(100.0, None)], "")])
def test_pytorch_serves_where_it_was_faster_beside_the_record(times: Any, why: str) -> None:
    passes: Any = [SimpleNamespace(record=SimpleNamespace(median_us=ours, framework_us=theirs, problem=WIDE)) for ours, theirs in times]
    said = flex_kernels.slower(passes)
    assert why in said if why else said is None  # type: ignore[operator]
    assert flex_kernels.slower([*passes, SimpleNamespace(record=None)]) is None, "nobody measured both passes"  # type: ignore[list-item]


# --- records of other processes ---------------------------------------------------------------------------------------------------


def strange(tmp_path: Path) -> Path:
    problem = replace(WIDE, features=Features(mods="0123456789abcdef"))
    return database(tmp_path / "strange.sqlite", (problem, "flash_fwd_hopper", configs_of(WIDE)[0].replace(maximum="running"), 250.0))


def test_a_record_of_functions_that_nobody_has_is_harmless(tmp_path: Path) -> None:
    path = strange(tmp_path)
    [record] = stored(path)
    assert unservable(record) is None and "0123456789abcdef" not in NAMED
    named, run = ["--db", str(path)], CliRunner().invoke
    fine = [["show"], ["export", str(tmp_path / "x.sqlite")], ["explain", "--gpu-name", "h200", "--d", "64", "--n", "4096"]]
    refused = [["generate", "--out", str(tmp_path / "g")], ["show", "--kernel", record.outcome.variant_id], ["verify"]]
    for words in (*fine, *refused):
        result = run(main, [*words, *named])
        assert (result.exit_code == 0) == (words in fine) and "Traceback" not in result.output, (words, result.output)
        assert not isinstance(result.exception, KeyError)
    assert "name them by --score-mod" in result.output.splitlines()[-1], "the last line has the cause"
    with dispatch.use(path, alone=True):
        assert dispatch.explain_problem(WIDE, "h200").record_key is None
    with pytest.raises(FlashtuneError, match="aren't those of this process"):
        functions.of_hash("0123456789abcdef", "cpu")
    with pytest.raises(FlashtuneError, match="aren't those of this process"):
        SearchSpace(families(), record.problem, H200)


def test_outcomes_of_functions_are_of_the_families_that_take_them(file: Path) -> None:
    for direction in ("fwd", "bwd"):
        problem = coded(file, replace(WIDE, direction=direction))
        space = SearchSpace(families(), problem, H200)
        assert set(space.families) == {f"flash_{direction}_hopper", f"flash_{direction}"}
        assert isinstance(next(space.every()).config, Config)
    few = replace(problem, n_q=64, n_kv=64, batch=1, heads=1, kv_heads=1)
    hopper = family("flash_bwd_hopper")
    resized = hopper.resized(hopper.default(few.spec(), H200), few, H200)
    assert (resized["divided_queries"], resized["dq_sums"]) == (False, "registers"), "lists of blocks aren't divided"


def test_the_baseline_is_flex_attention_with_the_functions(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention as module

    monkeypatch.setattr(baseline, "compiled_flex", lambda *, dynamic: module.flex_attention)
    problem = coded(file, replace(SMALL, n_q=128, n_kv=128))
    inputs = make_inputs(problem, device="cpu", seed=4)
    call = baseline.pytorch_call(inputs)
    assert call is not None and baseline.pytorch_call(inputs, "math") is None
    right = expected_at(problem, inputs.operands, inputs.parameters, [Place(batch=0, head=1)])[0]["out"]
    torch.testing.assert_close(call()[0, 1].double(), right, atol=1e-5, rtol=1e-5)  # type: ignore[index]


def test_two_records_with_one_config_keep_their_own_times(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = coded(file, WIDE)
    short = replace(problem, n_q=1024, n_kv=1024)
    made = functions.of_hash(problem.features.mods, "cpu")
    config = configs_of(problem)[5]
    path = database(tmp_path / "a.sqlite", (problem, "flash_fwd_hopper", config, 250.0), (short, "flash_fwd_hopper", config, 30.0))

    class OnGpu(torch.Tensor):
        """A CPU tensor that says it is on a GPU."""

        device = torch.device("cuda", 0)  # type: ignore[assignment]

    monkeypatch.setattr(flex_kernels.devices, "target_of", lambda device: H200)
    monkeypatch.setattr(Memo, "surroundings", lambda memo, device, of: (H200, families(), memo.pool(of.key("h200"), H200)))
    monkeypatch.setattr(flex_kernels, "kernels_here", lambda made={}: made)
    monkeypatch.setattr(flex_kernels, "loaded_kernel", samples_kernel)
    with dispatch.use(path, alone=True):
        for n, of in ((4096, problem), (1024, short)):
            q = torch.empty(1, 2, n, 64, dtype=torch.bfloat16).as_subclass(OnGpu)
            found: Any = flex_kernels.kernel_of("fwd", q, q, q, made.mods("fwd"))
            assert found.record.problem == of
