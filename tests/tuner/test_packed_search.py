"""Packed problems from the command line to the record that serves: searched, checked beside poisoned neighbours, recorded, looked up."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import db_samples as samples
import pytest
import torch
from click.testing import CliRunner
from varlen_cases import SQUARE, inputs

from flashtune import dispatch
from flashtune.bench import time_calls
from flashtune.bench.whole_calls import training_step
from flashtune.cli.main import main
from flashtune.cli.problems import searchable
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.config import Config, Direction, Variant
from flashtune.core.problems.lengths import Lengths
from flashtune.core.problems.oracles import expected_at
from flashtune.core.problems.passes import Place
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.calls import read
from flashtune.core.records.results import Finding
from flashtune.db.preference import Findings, latest
from flashtune.db.store import Store
from flashtune.dispatch.policy.choose import Choice, Pool
from flashtune.dispatch.policy.orders import rank_packed
from flashtune.dispatch.state import context
from flashtune.dispatch.state.recorded import CALLS
from flashtune.templates import families
from flashtune.tuner.children import tasks
from flashtune.tuner.replies import Called
from flashtune.tuner.timing.baseline import pytorch_call
from flashtune.tuner.verify.correctness import Verifier
from flashtune.tuner.verify.inputs import make_inputs

pytestmark = pytest.mark.usefixtures("anew")

H200 = find_target("h200")
PACKED = Problem(
    batch=16, heads=16, kv_heads=16, n_q=1024, n_kv=1024, d=128, d_v=128, dtype="bf16",
    features=Features(causal=True, packed=True), lengths=Lengths.of("one_long", 16, 16384),
)  # fmt: skip
SMALL = Problem(
    batch=3, heads=4, kv_heads=2, n_q=20, n_kv=20, d=16, d_v=16, dtype="fp32",
    features=Features(causal=True, packed=True, alibi=True, sinks=True), lengths=Lengths.of("lognormal", 3, 60),
)  # fmt: skip


# --- the search -------------------------------------------------------------------------------------------------------------------


def test_a_packed_problem_is_searched_without_a_gpu(tmp_path: Path) -> None:
    """The forward; test_packed_functions_search has the backward."""
    path = str(tmp_path / "packed.sqlite")
    words = ("--gpu-name", "a100", "--packed", "one_long", "--d", "16", "--n", "32", "--batch", "4", "--heads", "2", "--causal")
    words += ("--dtype", "fp16")
    options = ("--template", "flash_fwd", "--trials", "1", "--seed", "1", "--db", path, "--json")
    result = CliRunner().invoke(main, ["search", *words, *options])
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)
    assert (row["n"], row["batch"], row["law"], row["longest"]) == (32, 4, "one_long", 64)
    assert (row["fate"], row["source"]) == ("correct", "predicted"), "the interpreter checked it"
    with Store.open(path, writable=False) as store:
        [record] = store.records()
    assert record.key.spread == 2 and record.problem.lengths == Lengths(law="one_long", longest=64)


def stand_in(spoilt: Callable[[int, Any], Any] = lambda index, x: x) -> Callable[..., None]:
    """A launch by the reference, a sequence at a time; `spoilt` changes what it makes of one."""

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, *, lengths: Any, slopes: Any, sinks: Any, scale: float, **words: Any) -> None:
        of_q, of_k = (x.tolist() for x in lengths[:2])
        for b in range(len(of_q) - 1):
            rows, keys = slice(of_q[b], of_q[b + 1]), slice(of_k[b], of_k[b + 1])
            n_q, n_kv = of_q[b + 1] - of_q[b], of_k[b + 1] - of_k[b]
            band = replace(PACKED.band, diagonal=words["diagonal"] * (n_kv - n_q))
            tensors = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
            given = {"slopes": slopes[b : b + 1], "sinks": sinks[b : b + 1], "scale": scale, "dtype": torch.float64}
            made, sums = reference.attention(*tensors, band=band, **given)
            out[:, :, rows], lse[:, :, rows] = spoilt(b, made).to(out.dtype), sums.to(lse.dtype)

    return launch


def test_each_sequence_is_compared_with_its_own_oracle_beside_poisoned_ones() -> None:
    full = make_inputs(SMALL, device="cpu", seed=1)
    assert len(full.parts()) == 3 and [part.problem.n_kv for part, _ in full.parts()] == [n for _, n in full.sequences]
    verifier = Verifier(SMALL, device="cpu", seed=1, full_size=full, thorough=True)
    poisoned = [case.inputs.poisoned for case, _ in verifier.small.checks if case.inputs.poisoned]
    assert len(poisoned) == 2 and not poisoned[0] & poisoned[1], "every sequence is compared once, and poisoned once"
    assert verifier.verdict(stand_in(), repeats=False).reason == ""

    def unwritten(index: int, x: Any) -> Any:
        return x * float("nan") if index == 2 else x

    said = verifier.verdict(stand_in(unwritten), repeats=False).reason
    assert "NaN or infinities" in said and "batch 2" in said

    def off(index: int, x: Any) -> Any:
        return x + 0.1 * (index == 1)

    assert "output is off by" in verifier.verdict(stand_in(off), repeats=False).reason


def test_a_kernel_that_reads_a_neighbour_is_refused() -> None:
    right = stand_in()

    def leaky(q: Any, k: Any, v: Any, out: Any, lse: Any, **words: Any) -> None:
        right(q, k, v, out, lse, **words)
        # As masks that multiply by zero do: NaN of a neighbour's first key gets in.
        for stop in words["lengths"][0].tolist()[1:-1]:
            out[:, :, stop - 1] += 0.0 * v[:, :1, min(stop, v.shape[2] - 1)]

    said = Verifier(SMALL, device="cpu", seed=1).verdict(leaky, repeats=False).reason
    assert "NaN or infinities" in said, "of a problem where every other sequence is NaN"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_pytorch_serves_packed_sequences_one_by_one(direction: str) -> None:
    """Without a GPU there is no varlen_attn."""
    problem = replace(SMALL, direction=direction, features=Features(causal=True, packed=True))
    given = make_inputs(problem, device="cpu", seed=2)
    call = pytorch_call(given)
    assert call is not None and pytorch_call(given, "flash") is None
    found: Any = call()
    for one, (part, (index,)) in zip(found, given.parts(), strict=True):
        place = {"fwd": ["out"], "bwd": ["dq", "dk", "dv"]}[direction]
        for h in range(4):
            parameters, p = part.parameters, part.problem
            operands = part.operands | {"dlse": torch.zeros_like(part.operands["dlse"])} if direction == "bwd" else part.operands
            right = expected_at(p, operands, parameters, [Place(batch=index, head=h)])[0]
            for name, x in zip(place, one if direction == "bwd" else [one], strict=True):
                torch.testing.assert_close(x[0, h if x.shape[1] == 4 else h // 2].double(), right[name], atol=1e-4, rtol=1e-4)


# --- records ----------------------------------------------------------------------------------------------------------------------


def configs_for(direction: Direction) -> tuple[str, list[Config]]:
    """Hopper's family of a pass, and configs that packed sequences allow."""
    name, spec = f"flash_{direction}_hopper", replace(PACKED, direction=direction).spec()
    family = families()[name]
    if direction == "fwd":
        return name, [config for config in family.starts(spec, H200) if config["BLOCK_M"] == 128]
    first = next(config for config in family.starts(spec, H200) if family.violated(config, spec, H200) is None)
    return name, [first.replace(exp_poly=on) for on in (True, False)]


def database(path: Path, *problems: Problem) -> Path:
    """Measured records of these, each with a config that no other has and that packed sequences allow."""
    made = []
    for place, problem in enumerate(problems):
        template, configs = configs_for(problem.direction)
        outcome = samples.outcome(f"{place:016x}", 5000.0, template=template, config=configs[place], finalist=True, rank=1)
        made.append(samples.result(outcome, framework_us=6000.0, of=problem))
    return samples.write(path, tuple(made))


def chosen(problem: Problem) -> Any:
    """The record and the config that come first."""
    memo = context.current()
    with memo.lock:
        found: Any = next(rank_packed(problem, H200, lambda one: memo.pool(one.key("h200"), H200), families()))
    return found.record, found.config


def test_a_packed_record_serves_before_a_dense_one(tmp_path: Path) -> None:
    dense = replace(PACKED, lengths=None, features=Features(causal=True), batch=2, n_q=8192, n_kv=8192)
    even = replace(PACKED, lengths=None)
    far = replace(PACKED, batch=1024, n_q=16, n_kv=16, lengths=Lengths.of("uniform", 1024, 16384))
    path = database(tmp_path / "a.sqlite", dense, even, PACKED)
    with dispatch.use(path, alone=True):
        for problem in (even, PACKED):
            record, config = chosen(problem)
            assert record.key == problem.key("h200") and config == record.outcome.config
            said = dispatch.explain_problem(problem, "h200")
            assert said.kind == "exact" and said.record_key == problem.key("h200") and said.source == "measured"
        # Law and longest differ from what a search drew, the key doesn't.
        assert chosen(replace(PACKED, lengths=Lengths.met(7000, 16, 16384)))[0].problem == PACKED
        said = dispatch.explain_problem(replace(PACKED, n_q=2048, n_kv=2048), "h200")
        assert said.kind == "near_n" and said.differences == ("n=1024 for 2048", "n_q=1024 for 2048", "longest over mean=8 for 4")
        assert dispatch.explain_problem(far, "h200").kind in ("stand_in", "default"), "a record of another kind of batch tells nothing"
        assert dispatch.explain_problem(dense, "h200").record_key == dense.key("h200"), "no packed record serves a dense call"
    with dispatch.use(database(tmp_path / "b.sqlite", dense), alone=True):
        record, _ = chosen(PACKED)
        assert record.problem == dense
        said = dispatch.explain_problem(PACKED, "h200")
        apart = "causal for causal+packed", "n=8192 for 1024", "n_q=8192 for 1024"
        assert said.kind == "stand_in" and said.differences[:3] == apart and said.differences[-1] == "longest over mean=0 for 8"


def test_a_packed_record_of_gradients_serves_gradients_alone(tmp_path: Path) -> None:
    gradients = replace(PACKED, direction="bwd")
    dense = replace(gradients, lengths=None, features=Features(causal=True), batch=2, n_q=8192, n_kv=8192)
    with dispatch.use(database(tmp_path / "a.sqlite", dense, gradients), alone=True):
        record, config = chosen(gradients)
        assert record.key == gradients.key("h200") and config == record.outcome.config
        assert dispatch.explain_problem(gradients, "h200").kind == "exact"
        assert dispatch.explain_problem(PACKED, "h200").kind == "default", "gradients tell nothing of the forward"
        shorter = dispatch.explain_problem(replace(gradients, n_q=512, n_kv=512, batch=32), "h200")
        assert (shorter.kind, shorter.record_key) == ("near_n", gradients.key("h200"))
    with dispatch.use(database(tmp_path / "b.sqlite", PACKED), alone=True):
        assert dispatch.explain_problem(gradients, "h200").kind == "default", "nor does the forward of gradients"
    with dispatch.use(database(tmp_path / "c.sqlite", dense), alone=True):
        assert "causal for causal+packed" in dispatch.explain_problem(gradients, "h200").differences


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_predicted_packed_record_serves_where_unmeasured_ones_may(direction: Direction, tmp_path: Path) -> None:
    template, configs = configs_for(direction)
    problem = replace(PACKED, direction=direction)
    outcome = samples.outcome("0" * 16, 5000.0, template=template, config=configs[0], source="predicted", finalist=True, rank=1)
    path = samples.write(tmp_path / "a.sqlite", (samples.result(outcome, framework_us=None, of=problem),))
    with dispatch.use(path, alone=True):
        assert dispatch.explain_problem(problem, "h200").kind == "default"
    with dispatch.use(path, alone=True, unmeasured=True):
        said = dispatch.explain_problem(problem, "h200")
        assert (said.kind, said.source) == ("predicted", "predicted") and "not measured" in said.reason


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_default_of_packed_sequences_that_failed_since_is_passed_over(direction: Direction) -> None:
    problem = replace(PACKED, direction=direction)
    key, spec = problem.key("h200"), problem.spec()

    def served(findings: Findings | None) -> list[str]:
        ranked = rank_packed(problem, H200, lambda one: Pool(key, H200, [], families(), findings), families())
        return [one.family.name for one in ranked if isinstance(one, Choice) and one.family is not None]

    first, *others = served(None)
    broken = Variant(template=first, spec=spec, config=families()[first].default(spec, H200)).id
    assert others and served(latest([Finding(gpu="h200", variant_id=broken, found_at="2026-11-28T00:00:00+00:00", reason="x")])) == others


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_explain_names_the_packed_record(direction: Direction, tmp_path: Path) -> None:
    words = ("explain", "--gpu-name", "h200", "--packed", "one_long", "--n", "1024", "--d", "128", "--heads", "16", "--causal", "--json")
    path = database(tmp_path / "a.sqlite", replace(PACKED, direction=direction))
    result = CliRunner().invoke(main, [*words, "--direction", direction, "--db", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kind"] == "exact"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_whole_calls_of_packed_sequences_are_timed(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(SMALL, direction=direction, features=Features(causal=True, packed=True))
    monkeypatch.setattr(tasks, "inputs_on_device", lambda *_: (make_inputs(problem, device="cpu", seed=1), None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timed = time_calls([], problem, H200, 1, 0.01)
    assert isinstance(timed, Called), timed
    assert timed.pytorch is not None and timed.pytorch.median_us > 0
    assert set(timed.providers) <= {"flash", "fa4", "fa2"} and all(one.time is None for one in timed.providers.values()), "they run on GPUs"


def test_a_whole_call_with_gradients_is_pytorchs() -> None:
    inputs = make_inputs(replace(SMALL, direction="bwd", features=Features(causal=True, packed=True)), device="cpu", seed=1)
    step, torchs = training_step(inputs), pytorch_call(inputs, step=True)
    assert torchs is not None
    ours: Any = step()
    theirs: Any = torchs()
    for place, gradient in enumerate(ours):
        wanted = torch.cat([one[place][0].transpose(0, 1) for one in theirs])
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)


# --- calls ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [True, False])
def test_a_packed_call_is_recorded_as_one_problem(trains: bool, tmp_path: Path) -> None:
    given = inputs({"is_causal": True}, SQUARE, padding=0)
    tensors = [x.detach().requires_grad_(trains) for x in given.tensors]
    call: tuple[Any, ...] = (*tensors, *given.bounds, *given.longest)
    dispatch.attention_varlen(*call, enable_gqa=True, is_causal=True)
    dispatch.save_calls(tmp_path / "calls.json")
    found = read(tmp_path / "calls.json")
    assert [one.direction for one in found] == ["fwd", "bwd"][: 1 + trains], "and no sequence of it by itself"
    one = found[0]
    sequences, tokens = len(SQUARE[0]), sum(SQUARE[0])
    assert (one.batch, one.n_q, one.n_kv) == (sequences, round(tokens / sequences), round(tokens / sequences))
    assert one.lengths == Lengths.met(max(SQUARE[0]), sequences, sequences * one.n_kv)
    CALLS.forget()
    if trains:

        def attend(*call: Any) -> Any:
            return dispatch.attention_varlen(*call, enable_gqa=True, is_causal=True)

        torch.compile(attend, backend="aot_eager", fullgraph=True)(*call).sum().backward()
        assert CALLS.met() == found, "a compiler's operator records the same"
        return
    assert searchable(found, find_target("a100")) == (found, []), "a search of the file takes it"


def test_profile_counts_packed_sequences() -> None:
    words = ["profile", "--packed", "one_long", "--batch", "16", "--heads", "16", "--n", "1024", "--causal", "--dtype", "bf16", "--json"]
    result = CliRunner().invoke(main, [*words, "--gpu-name", "h200"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fused"]["matmul_flops"] == PACKED.flops()
    assert (found["problem"]["law"], found["problem"]["longest"]) == ("one_long", 8192)
