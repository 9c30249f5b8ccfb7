"""Calls of a process, for `flashtune search --calls`: met at first calls alone, whoever serves, and saved on request or at exit."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretended_gpu as pretended
import pytest
import torch
import torch.nn.functional as F
from forked import Child, started
from pretended_gpu import Machine, config_of, save

from flashtune import dispatch
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.calls import read
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.dispatch.state import context
from flashtune.dispatch.state import recorded as calls
from flashtune.dispatch.state.context import Memo
from flashtune.dispatch.state.recorded import CALLS
from flashtune.integrations import torchs_place
from flashtune.templates import families

pytestmark = pytest.mark.usefixtures("anew")

machine = pretended.machine
PROBLEM = Problem(batch=2, heads=4, kv_heads=2, n_q=40, n_kv=40, d=16, d_v=16, dtype="fp32", features=Features(causal=True))
Q, K, V = torch.randn(2, 4, 40, 16), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)


def attend(*tensors: Any, **words: Any) -> Any:
    return dispatch.attention(*(tensors or (Q, K, V)), **{"enable_gqa": True, "is_causal": True, **words})


def saved(folder: Path) -> list[Problem]:
    path = folder / "calls.json"
    dispatch.save_calls(path)
    return read(path)


def test_a_call_is_its_problem_whoever_serves_it(tmp_path: Path) -> None:
    attend()
    attend(window=(7, 0), softcap=5.0, sinks=torch.zeros(4))
    attend(Q[:1].bfloat16(), K[:1].bfloat16(), V[:1].bfloat16(), is_causal=False, attn_mask=torch.ones(40, 40, dtype=torch.bool))
    assert set(saved(tmp_path)) == {
        PROBLEM,
        replace(PROBLEM, features=Features(causal=True, window=(7, 0), softcap=True, sinks=True)),
        replace(PROBLEM, batch=1, dtype="bf16", features=Features(mask="bool")),
    }


def test_what_kernels_serve_is_met_too_and_what_is_pinned_for_a_measurement_is_not(machine: Machine, own_database: Path) -> None:
    save(own_database)
    attend()
    assert machine.launched and CALLS.met() == [PROBLEM]
    CALLS.forget()
    with context.serving(Memo(context.current().settings, pinned=("fwd", machine.load(pretended.POINTERS, machine.launched[0])))):
        attend()
    assert CALLS.met() == []


def test_what_was_called_outlives_the_memo(own_database: Path, tmp_path: Path) -> None:
    attend()
    save(own_database)
    with dispatch.use(own_database):
        attend(is_causal=False)
    dispatch.reload()
    assert set(saved(tmp_path)) == {PROBLEM, replace(PROBLEM, features=Features())}


def test_a_call_that_is_known_reaches_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.zeros(40, 40)
    kinds: list[dict[str, Any]] = [{}, {"attn_mask": mask, "is_causal": False}, {"sinks": torch.zeros(4)}, {"dropout_p": 0.5}]
    for words in kinds:
        attend(**words)
    CALLS.forget()
    monkeypatch.setattr(calls, "meet", lambda *_: pytest.fail("a known call was met again"))
    monkeypatch.setattr(calls.Calls, "meet", lambda *_: pytest.fail("a known call was met again"))
    for words in kinds * 2:
        attend(**words)
        attend(**words)


def test_a_gradient_that_is_asked_for_is_a_problem_of_its_own(tmp_path: Path) -> None:
    q, bias, slopes = Q.clone().requires_grad_(), torch.zeros(40, 40, requires_grad=True), torch.zeros(4, requires_grad=True)
    with torch.no_grad():
        attend(q, K, V)
    assert CALLS.met() == [PROBLEM]
    attend(q, K, V, is_causal=False).sum().backward()
    attend(Q, K, V, is_causal=False, attn_mask=bias, alibi_slopes=slopes)
    plain, biased = replace(PROBLEM, features=Features()), Features(mask="bias", alibi=True)
    assert set(saved(tmp_path)) == {
        PROBLEM,
        plain,
        replace(plain, direction="bwd"),
        replace(plain, features=biased),
        replace(plain, features=replace(biased, dbias=True, dslopes=True), direction="bwd"),
    }


def test_gradients_by_kernels_are_met_in_graphs_too(machine: Machine) -> None:
    # What serves in a backward's place is what a search would mend.
    machine.refuses = {name for name, one in families().items() if one.direction == "bwd"}
    q = Q.clone().requires_grad_()
    attend(q, K, V).sum().backward()
    assert CALLS.met() == [PROBLEM, replace(PROBLEM, direction="bwd")]
    CALLS.forget()
    dispatch.reload()
    numbers = (0.0, 0.25, -1, 0, 0.0, "top_left", True, False, False, True)
    out, *_ = torch.ops.flashtune.attention(q, K, V, *[None] * 7, *numbers)
    assert CALLS.met() == [PROBLEM]
    out.sum().backward()
    assert CALLS.met() == [PROBLEM, replace(PROBLEM, direction="bwd")]


def test_steps_that_one_decision_serves_are_met_with_their_own_lengths(machine: Machine, own_database: Path, tmp_path: Path) -> None:
    keys, step = torch.randn(2, 4, 700, 16), replace(PROBLEM, n_q=1, n_kv=300, kv_heads=4, features=Features())
    for framework_us, by_kernels in ((200.0, True), (50.0, False)):
        CALLS.forget()
        machine.launched.clear()
        own_database.unlink(missing_ok=True)
        save(own_database, step, config=config_of().replace(ORDER="rows"), framework_us=framework_us)
        dispatch.reload()
        for n in range(330, 601):
            attend(keys[:, :, :1], keys[:, :, :n], keys[:, :, :n], is_causal=False)
        assert [problem.n_kv for problem in CALLS.met()] == [*range(330, 601)] and bool(machine.launched) is by_kernels
    assert [problem.n_kv for problem in saved(tmp_path)] == [512, 600]


def test_what_no_search_could_help_is_left_out() -> None:
    large = torch.zeros(1, 1, 4, 1025)
    dispatch.attention(large, large, large)
    dispatch.attention(Q.double(), Q.double(), Q.double())
    dispatch.attention(Q[:, :, :0], Q, Q)
    nested = torch.nested.nested_tensor([torch.zeros(3, 2, 16), torch.zeros(4, 2, 16)], layout=torch.jagged).transpose(1, 2)
    dispatch.attention(nested, nested, nested)
    torch.func.vmap(lambda x: dispatch.attention(x, x, x))(Q)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        dispatch.attention(Q, Q, Q, scale=0.5)
    with pytest.raises(InputError):
        dispatch.attention(Q, K, V)
    dispatch.explain(Q, Q, Q)
    assert CALLS.met() == []


def test_memory_is_bounded_and_what_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calls, "MOST_CALLS", 16)
    steps = [replace(PROBLEM, n_q=1, n_kv=n, features=Features()) for n in range(1, 300)]
    for step in steps:
        CALLS.meet(step)
        assert len(CALLS._met) <= 16
    assert [one.n_kv for one in saved(tmp_path)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 299]
    for d in range(1, 30):
        CALLS.meet(replace(PROBLEM, d=d))
    assert len(CALLS._met) == 16
    with pytest.warns(RuntimeWarning, match="more than 16 kinds of calls were made"):
        assert len(saved(tmp_path)) >= 16


def test_threads_meet_calls_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_CALLS", 64)

    def run(d: int) -> None:
        for n in range(1, 400):
            CALLS.meet(replace(PROBLEM, d=d, n_q=1, n_kv=n, features=Features()))

    threads = [threading.Thread(target=run, args=(d,)) for d in (8, 16, 32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(one.d, one.n_kv) for one in CALLS.met()} >= {(d, n) for d in (8, 16, 32) for n in (256, 399)}


def test_a_model_in_torchs_place_is_listed(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 16, batch_first=True, dropout=0.0)
    with torchs_place():
        layer(torch.randn(3, 9, 32)).sum().backward()
    trained = Problem(batch=3, heads=2, kv_heads=2, n_q=9, n_kv=9, d=16, d_v=16, dtype="fp32")
    assert set(saved(tmp_path)) == {trained, replace(trained, direction="bwd")}


def test_what_is_saved_adds_to_the_file(tmp_path: Path) -> None:
    attend()
    saved(tmp_path)
    CALLS.forget()
    CALLS.meet(replace(PROBLEM, d=64))
    assert {one.d for one in saved(tmp_path)} == {16, 64}


def test_a_place_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="a file of calls is named by its path, not 3"):
        dispatch.save_calls(3)  # type: ignore[arg-type]
    with pytest.raises(EnvironmentProblem, match="No such file or directory"):
        dispatch.save_calls("~nosuchuser/calls.json")


CODE = """
import os, sys, torch
from flashtune import dispatch
x = torch.randn(1, 2, 8, int(sys.argv[1]))
dispatch.attention(x, x, x)
os.chdir("/")
if sys.argv[2:]:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
    else:
        x = torch.randn(1, 2, 8, int(sys.argv[2]))
        dispatch.attention(x, x, x)
"""


def start(folder: Path, *words: object, named: str = "calls.json") -> Child:
    # A child that is forked has none of its parent's threads.
    return started(CODE, *words, folder=folder, environment={"FLASHTUNE_CALLS": named, "OMP_NUM_THREADS": "1"})


def test_processes_save_at_exit_where_the_environment_names_a_file(tmp_path: Path) -> None:
    processes = [start(tmp_path, 16, 24), start(tmp_path, 32)]
    ended = [process.ended() for process in processes]
    assert [(process.stderr, process.returncode) for process in ended] == [("", 0)] * 2
    assert [one.d for one in read(tmp_path / "calls.json")] == [16, 24, 32]


def test_what_cannot_be_saved_at_exit_is_said_in_a_line(tmp_path: Path) -> None:
    process = start(tmp_path, 16, named="none/calls.json").ended()
    assert process.returncode == 0 and "Traceback" not in process.stderr
    assert "flashtune: the calls are not saved: " in process.stderr
    assert "none/calls.json can't be written (No such file or directory)" in process.stderr


def test_without_the_variable_nothing_is_written(tmp_path: Path) -> None:
    assert start(tmp_path, 16, named="").ended().stderr == "" and os.listdir(tmp_path) == []


def test_the_file_says_what_a_reader_wants_to_know(tmp_path: Path) -> None:
    attend()
    dispatch.save_calls(str(tmp_path / "calls.json"))
    (found,) = json.loads((tmp_path / "calls.json").read_text())["calls"]
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "n_q": 40, "n_kv": 40, "d": 16, "d_v": 16}
    assert found == {**sizes, "dtype": "fp32", "features": {"causal": True}, "direction": "fwd"}


def test_torchs_own_function_is_no_call() -> None:
    F.scaled_dot_product_attention(Q, Q, Q)
    assert CALLS.met() == []
