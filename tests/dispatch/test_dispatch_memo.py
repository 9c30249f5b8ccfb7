"""After the first call, when kernels refuse or fail, and what `explain` says of it; the reference stands in for kernels."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pretended_gpu
import pytest
import torch
from pretended_gpu import PROBLEM, Machine, Q, assert_right, attend, config_of, save

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.problems.problem import Features, Problem
from flashtune.db.store import Store
from flashtune.dispatch import api
from flashtune.dispatch.decisions import resolve
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.policy import choose as policy
from flashtune.dispatch.state import context

machine = pretended_gpu.machine

E4M3 = Q.to(torch.float8_e4m3fn)


def test_an_exact_record_serves_and_explain_says_so(machine: Machine, own_database: Path) -> None:
    variant = save(own_database)
    explained = dispatch.explain(Q, Q, Q, is_causal=True)
    assert machine.launched == []
    assert_right(attend())
    assert machine.launched == [variant]
    assert (explained.kind, explained.template, explained.variant_id) == ("exact", "flash_fwd", variant.id)
    assert (explained.config, explained.source, explained.origin) == (variant.config, "measured", "overlay")
    assert (explained.median_us, explained.framework_us, explained.refused) == (100.0, 200.0, ())
    assert explained.record_key == PROBLEM.key("h200")


def test_the_second_call_decides_nothing(machine: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library, no policy, no parsing, no template, no file: one look-up and the launch."""
    save(own_database)
    variants = [{}, {"dropout_p": 0.2, "seed": 1}, {"softcap": 3.0, "window": 7}, {"return_lse": True}]
    for words in variants:
        dispatch.attention(Q, Q, Q, is_causal=True, **words)

    def forbidden(*_: object, **__: object) -> Any:
        raise AssertionError("decided anew")

    for place, name in [
        (api, "parse"),
        (resolve, "candidates"),
        (resolve, "rank"),
        (policy, "rank"),
        (kernels, "variant"),
        (kernels, "load"),
        (Store, "open"),
        (Path, "open"),
        (Path, "read_text"),
        (torch.cuda, "get_device_name"),
    ]:
        monkeypatch.setattr(place, name, forbidden)
    monkeypatch.setattr("builtins.open", forbidden)
    machine.launched.clear()
    for words in variants:
        dispatch.attention(Q, Q, Q, is_causal=True, **{**words, "seed": 77} if "seed" in words else words)
    assert len(machine.launched) == len(variants)
    with pytest.raises(AssertionError, match="decided anew"):
        dispatch.attention(Q, Q, Q, is_causal=False)


def test_steps_of_a_growing_sequence_are_decided_a_span_at_a_time(
    machine: Machine, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And right all the same: where a window hides keys, and where a row says something of one length."""
    step, rows = replace(PROBLEM, n_q=1, n_kv=128, features=Features()), config_of().replace(ORDER="rows")
    save(own_database, step, config=rows, framework_us=50.0)
    save(own_database, replace(step, n_kv=300), config=rows, framework_us=200.0)
    decided: list[int] = []

    def rank(problem: Problem, *rest: Any, **words: Any) -> Any:
        decided.append(problem.n_kv)
        return policy.rank(problem, *rest, **words)

    monkeypatch.setattr(resolve, "rank", rank)
    keys = torch.randn(2, 4, 400, 16)

    def take(lengths: range, left: int | None = None) -> list[int]:
        decided.clear()
        for n in lengths:
            k = keys[:, :, :n]
            out = dispatch.attention(Q[:, :, :1], k, k, window=(left, 0), causal_alignment="bottom_right")
            wanted, _ = reference.attention(Q[:, :, :1], k, k, scale=0.25, band=Band(left=left, right=0, diagonal=n - 1))
            torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)
        return decided

    assert take(range(1, 130)) == [*range(65, 129)] and machine.launched == [], "a row is of 128 keys"
    assert take(range(130, 140)) == []
    assert take(range(2, 60), left=40) == [*range(42, 60)], "from 42 keys on the window hides some"
    assert take(range(298, 302)) == [*range(298, 302)] and machine.launched, "a row, by which a kernel serves, is of 300 keys"
    machine.launched.clear()
    assert take(range(330, 390)) == [] and len(machine.launched) == 60
    keys = torch.randn(2, 4, 400, 32)[..., ::2]
    assert take(range(330, 334)) == [] and len(machine.launched) == 64, "other strides that the kernel takes"
    machine.refuses = {"flash_fwd"}
    assert take(range(340, 342)) == [340, 341] and len(machine.launched) == 64, "and none that it doesn't"


def test_what_a_signature_holds_is_all_that_a_choice_depends_on(machine: Machine) -> None:
    """Another stride, address, size, dtype, mask or flag is another decision; other data and another seed are not."""
    storage = torch.zeros(2 * 4 * 40 * 16 + 1)
    mask = torch.ones(40, 40, dtype=torch.bool)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((Q, Q, Q), {}),
        ((Q.transpose(1, 2).contiguous().transpose(1, 2), Q, Q), {}),
        ((storage[1:].view(2, 4, 40, 16), Q, Q), {}),
        ((Q[:, :, :39], Q, Q), {}),
        ((Q.half(), Q.half(), Q.half()), {}),
        ((Q, Q, Q, mask), {}),
        ((Q, Q, Q, mask.mT[:1]), {}),
        ((Q, Q, Q, torch.zeros(40, 40)), {}),
        ((Q, Q, Q), {"is_causal": True}),
        ((Q, Q, Q), {"scale": 0.5}),
        ((Q, Q, Q), {"softcap": 0.5}),
        ((Q, Q, Q), {"window": 3}),
        ((Q, Q, Q), {"window": (3, None)}),
        ((Q, Q, Q), {"dropout_p": 0.5, "seed": 1}),
        ((Q, Q, Q), {"dropout_p": 0.5}),
        ((Q, Q, Q), {"return_lse": True}),
        ((Q, Q, Q), {"allow_tf32": True}),
        ((Q, Q[:, :, :39], Q[:, :, :39]), {"is_causal": True, "causal_alignment": "bottom_right"}),
        ((Q, Q[:, :2], Q[:, :2]), {"enable_gqa": True}),
        ((Q.clone().requires_grad_(), Q, Q), {}),
        ((Q, Q, Q), {"alibi_slopes": torch.ones(4)}),
        ((Q, Q, Q), {"alibi_slopes": torch.ones(2, 4)}),
        ((Q, Q, Q), {"alibi_slopes": torch.ones(4).requires_grad_()}),
        ((Q, Q, Q), {"sinks": torch.ones(4)}),
        ((Q, Q, Q), {"sinks": torch.ones(2, 4)}),
        ((Q, Q, Q), {"alibi_slopes": torch.ones(4), "sinks": torch.ones(4)}),
        ((E4M3, E4M3, E4M3), {}),
        ((E4M3, E4M3, E4M3), {"q_descale": 2.0}),
        ((E4M3, E4M3, E4M3), {"q_descale": 3.0}),
        ((E4M3, E4M3, E4M3), {"q_descale": torch.ones(())}),
    ]
    for number, (arguments, words) in enumerate(calls, 1):
        dispatch.attention(*arguments, **words)
        # Also of a call whose gradient kernels compute: its forward is looked up nowhere else.
        assert len(context.current().plans) == number
    dispatch.attention(Q + 1, Q, Q)
    dispatch.attention(Q, Q, Q, dropout_p=0.5, seed=2)
    dispatch.attention(Q, Q, Q, alibi_slopes=torch.zeros(4))
    dispatch.attention(Q, Q, Q, sinks=torch.zeros(4))
    dispatch.attention(E4M3, E4M3, E4M3, q_descale=torch.zeros(()))
    assert len(context.current().plans) == len(calls)


def test_a_remembered_plan_takes_each_calls_own_slopes_and_factors(machine: Machine) -> None:
    def wanted(x: torch.Tensor, **words: Any) -> torch.Tensor:
        return reference.attention(x, x, x, scale=0.25, **words)[0]

    for slopes in (torch.rand(4), torch.rand(4)):
        out = dispatch.attention(Q, Q, Q, alibi_slopes=slopes)
        torch.testing.assert_close(out, wanted(Q, slopes=slopes.expand(2, 4)).float(), atol=2e-5, rtol=2e-5)
        out = dispatch.attention(Q, Q, Q, alibi_slopes=slopes, sinks=slopes)
        both = {"slopes": slopes.expand(2, 4), "sinks": slopes.expand(2, 4)}
        torch.testing.assert_close(out, wanted(Q, **both).float(), atol=2e-5, rtol=2e-5)
    ones = torch.ones(2, 4)
    for factor in (torch.rand(2, 4), torch.rand(2, 4)):
        out = dispatch.attention(E4M3, E4M3, E4M3, k_descale=factor, v_descale=2.0)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), wanted(E4M3, descale=(ones, factor, 2 * ones)), atol=2e-2, rtol=2e-2)
    assert len(machine.launched) == 6
    assert len(context.current().plans) == 3


def test_reload_sees_a_search_that_ended_meanwhile_and_a_models_own_database(machine: Machine, own_database: Path, tmp_path: Path) -> None:
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "default"
    save(own_database, replace(PROBLEM, n_q=64, n_kv=64))
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "default", "records are read once"
    dispatch.reload()
    assert dispatch.explain(Q, Q, Q, is_causal=True).kind == "near_n"
    model = tmp_path / "model.sqlite"
    save(model)
    dispatch.reload(model)
    explained = dispatch.explain(Q, Q, Q, is_causal=True)
    assert explained.kind == "exact" and explained.origin is not None and "model.sqlite" in explained.origin
    longer = torch.zeros(2, 4, 60, 16)
    assert dispatch.explain(longer, longer, longer, is_causal=True).origin == "overlay", "the user's results still count"


def test_explain_problem_needs_no_tensors(own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = save(own_database, source="predicted")
    dispatch.reload()
    explained = dispatch.explain_problem(PROBLEM, "NVIDIA H200")
    assert explained.kind == "framework" and "FLASHTUNE_UNMEASURED=1" in explained.reason
    with dispatch.use(unmeasured=True):
        assert dispatch.explain_problem(PROBLEM, "h200").kind == "predicted"
    for off in ("0", "false", "No", "off", ""):
        monkeypatch.setenv("FLASHTUNE_UNMEASURED", off)
        dispatch.reload()
        assert dispatch.explain_problem(PROBLEM, "h200").kind == "framework", off
    monkeypatch.setenv("FLASHTUNE_UNMEASURED", "maybe")
    dispatch.reload()
    with pytest.warns(RuntimeWarning, match="FLASHTUNE_UNMEASURED is 'maybe': set it to 1 or 0") as warned:
        assert [dispatch.explain_problem(PROBLEM, "h200").kind for _ in range(2)] == ["framework"] * 2
    assert len(warned) == 1
    monkeypatch.setenv("FLASHTUNE_UNMEASURED", "1")
    dispatch.reload()
    explained = dispatch.explain_problem(PROBLEM, "NVIDIA H200")
    assert (explained.kind, explained.variant_id, explained.gpu) == ("predicted", variant.id, "h200")
    assert "predicted, not measured" in explained.reason
    assert dispatch.explain_problem(PROBLEM, "a100").kind == "default"
    old = dispatch.explain_problem(PROBLEM, "v100")
    assert old.kind == "framework" and "Triton doesn't compile for" in old.reason
    dispatch.reload()


def test_many_threads_decide_once_and_agree(machine: Machine) -> None:
    outputs: list[torch.Tensor] = []
    barrier = threading.Barrier(6, timeout=600)

    def work() -> None:
        barrier.wait()
        outputs.extend(attend() for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 30 and len(context.current().plans) == 1
    for out in outputs:
        assert_right(out)


def test_the_memo_does_not_grow_without_bound(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtune.dispatch.state.context.MOST_PLANS", 4)
    for scale in range(1, 11):
        attend(scale=float(scale))
    assert 1 <= len(context.current().plans) <= 4
