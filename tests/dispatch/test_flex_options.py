"""Tuned kernel options of PyTorch's FlexAttention: what a database may hold, which record serves a call, and what a failure does."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from db_samples import outcome, problem, result

from flashtune import dispatch
from flashtune.core import devices, flex_options
from flashtune.core.config import Config
from flashtune.core.errors import DatabaseError, InputError
from flashtune.core.lengths import Lengths
from flashtune.core.problem import Features, Problem
from flashtune.core.results import Measurement, Outcome, SearchResult
from flashtune.core.target import find_target
from flashtune.db.library import Library
from flashtune.db.store import Store
from flashtune.dispatch import flex_torch, providers
from flashtune.dispatch.context import current
from flashtune.dispatch.flex_options import TunedOptions
from flashtune.dispatch.providers import PROVIDERS

FORWARD = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}
BACKWARD = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_warps": 4, "bwd_num_stages": 2}
OPTIONS = {**FORWARD, **BACKWARD}
DENSE = Problem(batch=1, heads=2, kv_heads=2, n_q=256, n_kv=256, d=16, d_v=16, dtype="fp32", features=Features(causal=True))
Q = torch.randn(1, 2, 256, 16, generator=torch.Generator().manual_seed(0))


def tuned(of: Problem, options: dict[str, Any], us: float = 100.0, **words: Any) -> SearchResult:
    """A run that tuned FlexAttention, as the search stores it."""
    best = Outcome.of_provider("flex", "f" * 16, Measurement.of([us] * 12), config=Config.of(options), rank=1)
    default = Outcome.of_provider("flex", "e" * 16, Measurement.of([1.3 * us] * 12))
    return result(best, default, of=of, framework_us=None, **words)


def save(path: Path, *results: SearchResult) -> None:
    with Store.open(path, writable=True) as store:
        for one in results:
            store.save(one)


class Flex:
    """A stand-in for the compiled FlexAttention, which notes the options of each run, and fails with some."""

    def __init__(self) -> None:
        self.seen: list[dict[str, int] | None] = []
        self.fails: set[str] = set()

    def __call__(self, query: Any, key: Any, value: Any, *others: Any, **words: Any) -> Any:
        options = words["kernel_options"] if "kernel_options" in words else others[5]
        self.seen.append(options)
        if options and self.fails & set(options):
            raise RuntimeError("out of resource: shared memory\nand more")
        return query * 2.0


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flex]:
    """CPU tensors are served as an H200's would be, by the stand-in."""
    flex = Flex()
    monkeypatch.setattr(TunedOptions, "devices", ("cpu",))
    monkeypatch.setattr(flex_torch, "lacks", lambda *given: None)
    monkeypatch.setattr(PROVIDERS["flex"], "devices", ("cpu",))
    monkeypatch.setattr(devices, "target_of", lambda device: find_target("h200"))
    for place in (flex_torch, providers):
        monkeypatch.setattr(place, "compiled_flex", lambda **_: flex)
    dispatch.reload()
    yield flex
    monkeypatch.undo()
    dispatch.reload()


def run(*, query: torch.Tensor = Q, score_mod: Any = None, block_mask: Any = None, kernel_options: Any = None) -> Any:
    return flex_torch.torchs(query, query, query, score_mod, block_mask, None, False, False, kernel_options, None)


def mask_of(sparsity: float, size: tuple[int, int] = (128, 128)) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    made = create_block_mask(lambda b, h, i, j: i >= j, None, None, 256, 256, device="cpu")
    made.BLOCK_SIZE = size
    made.sparsity = lambda: sparsity  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bwd_BLOCK_M1": "32"}, "has bwd_BLOCK_M1='32', not one of 16, 32, 64, 128"),
        ({"bwd_BLOCK_M1": -32}, "has bwd_BLOCK_M1=-32, not one of"),
        ({"fwd_BLOCK_N": 2**31}, "has fwd_BLOCK_N=2147483648, not one of"),
        ({"fwd_num_warps": True}, "has fwd_num_warps=True, not one of 2, 4, 8"),
        ({"fwd_num_stages": 10**6}, "has fwd_num_stages=1000000"),
        ({"BACKEND": "FLASH"}, "has 'BACKEND', which is no tuned option"),
        ({"fwd_ROWS_GUARANTEED_SAFE": 1}, "which is no tuned option"),
        ({"bwd_BLOCK_M1": 128}, "has bwd_BLOCK_M1=128, which doesn't divide bwd_BLOCK_N1=64"),
        ({"bwd_BLOCK_N2": 128}, "has bwd_BLOCK_N2=128, which doesn't divide bwd_BLOCK_M2=64"),
    ],
)
def test_values_that_no_search_would_store_are_refused_in_a_sentence(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert why in (flex_options.refusal({**OPTIONS, **changes}) or "")
    path = tmp_path / "hostile.sqlite"
    with Store.open(path, writable=True) as store, pytest.raises(InputError, match=r"config has"):
        store.save(tuned(DENSE, {**OPTIONS, **changes}))
    # A stranger's file comes past the check of writing.
    save(path, tuned(DENSE, OPTIONS))
    with closing(sqlite3.connect(path)) as raw, raw:
        text = json.dumps({**OPTIONS, **changes}, sort_keys=True, separators=(",", ":"))
        raw.execute("UPDATE candidate SET config = ? WHERE config <> '{}'", (text,))
    with pytest.raises(DatabaseError, match="config has"):
        Library.of(path).records()


def test_options_of_one_kernel_belong_together_and_none_are_fine() -> None:
    assert flex_options.refusal({}) is None and flex_options.refusal(FORWARD) is None and flex_options.refusal(OPTIONS) is None
    few = {name: value for name, value in OPTIONS.items() if name != "bwd_num_stages"}
    assert flex_options.refusal(few) == "lacks bwd_num_stages, beside other options of FlexAttention's bwd kernel"


def test_other_providers_still_have_no_config(tmp_path: Path) -> None:
    math = Outcome.of_provider("math", "0" * 16, Measurement.of([5.0] * 12), config=Config.of(FORWARD))
    with Store.open(tmp_path / "x.sqlite", writable=True) as store, pytest.raises(InputError, match="no config"):
        store.save(result(math))


def test_options_come_back_and_join_a_winner_of_ours(tmp_path: Path) -> None:
    path, of = tmp_path / "own.sqlite", problem()
    save(path, result(outcome("aa", 100.0, rank=1), of=of), tuned(of, OPTIONS, us=10.0, created_at="2026-11-22T10:00:00+00:00"))
    with Store.open(path, writable=False) as store:
        assert store.best(of.key("h200")).outcome.variant_id == "aa"  # type: ignore[union-attr]
        first, second = Library.of(path)[of.key("h200")]
    assert not first.tunes_flex and second.tunes_flex and second.outcome.config == Config.of(OPTIONS)
    assert second.provider_times() == {"flex": 10.0} and [one.call_us for one in second.providers] == [10.0, 13.0]
    with Store.open(path, writable=False) as store:
        assert store.export(tmp_path / "small.sqlite", winners_only=True) == 2
    assert [one.tunes_flex for one in Library.of(tmp_path / "small.sqlite").winners()] == [False, True]


def test_a_run_of_flexattention_alone_decides_nothing_for_attention(flex: Flex, own_database: Path) -> None:
    save(own_database, tuned(DENSE, OPTIONS, us=1.0))
    pool = current().pool(DENSE.key("h200"), find_target("h200"))
    assert pool.exact(DENSE.key("h200"), frozenset()) == [] and not [
        one for one in pool.near(DENSE.key("h200"), frozenset()) if one.tunes_flex
    ]
    assert dispatch.explain_problem(DENSE, "h200").kind != "provider"


def test_the_forward_has_its_options_and_training_both(flex: Flex, own_database: Path) -> None:
    save(own_database, tuned(replace(DENSE, direction="bwd"), OPTIONS))
    run()
    assert flex.seen == [FORWARD, FORWARD], "the first call of a signature tries the options"
    run()
    assert flex.seen[2:] == [FORWARD]
    flex.seen.clear()
    run(query=Q.clone().requires_grad_())
    assert flex.seen == [OPTIONS, OPTIONS]


def test_options_of_the_callers_own_win(flex: Flex, own_database: Path) -> None:
    save(own_database, tuned(DENSE, FORWARD))
    run(kernel_options={"BLOCK_M": 16})
    run(kernel_options={})
    assert flex.seen == [{"BLOCK_M": 16}, {}]


def test_the_nearest_record_of_the_gpu_type_and_head_size_serves(flex: Flex, own_database: Path) -> None:
    packed = Problem(
        batch=16, heads=2, kv_heads=2, n_q=16, n_kv=16, d=16, d_v=16, dtype="fp32", features=Features(packed=True),
        lengths=Lengths.of("equal", 16, 256),
    )  # fmt: skip
    assert flex_options.extent(packed) == (256, 1 / 16) and flex_options.extent(DENSE)[1] == pytest.approx(0.5, rel=0.01)
    sparse = {**FORWARD, "fwd_BLOCK_M": 32}
    far = {**FORWARD, "fwd_BLOCK_M": 16}
    save(own_database, tuned(DENSE, FORWARD), tuned(packed, sparse), tuned(replace(DENSE, n_q=4096, n_kv=4096, dtype="fp16"), far))
    run(block_mask=mask_of(50.0))
    current().flex.clear()
    run(block_mask=mask_of(94.0))
    assert [one and one["fwd_BLOCK_M"] for one in flex.seen] == [64, 64, 32, 32]
    run(block_mask=mask_of(50.0))
    assert len(flex.seen) == 5 and flex.seen[-1] == sparse, "options are looked up once for a signature"


def test_a_record_that_is_too_far_away_serves_nothing(flex: Flex, own_database: Path) -> None:
    save(own_database, tuned(replace(DENSE, n_q=4096, n_kv=4096), FORWARD))
    run()
    assert flex.seen == [None]


def test_options_that_do_not_divide_a_masks_blocks_are_left_out(flex: Flex, own_database: Path) -> None:
    save(own_database, tuned(replace(DENSE, direction="bwd"), {**FORWARD, **BACKWARD, "bwd_BLOCK_N1": 128}))
    run(query=Q.clone().requires_grad_(), block_mask=mask_of(50.0, size=(64, 64)))
    assert flex.seen == [FORWARD, FORWARD]


def test_few_queries_have_the_defaults(flex: Flex, own_database: Path) -> None:
    save(own_database, tuned(DENSE, FORWARD))
    run(query=Q[:, :, :100])
    assert flex.seen == [None]


def test_options_that_fail_give_way_to_the_defaults_once_and_for_all(flex: Flex, own_database: Path) -> None:
    save(own_database, tuned(replace(DENSE, direction="bwd"), OPTIONS))
    flex.fails.add("bwd_BLOCK_M1")
    leaf = Q.clone().requires_grad_()
    with pytest.warns(RuntimeWarning, match="FlexAttention fails with .*RuntimeError: out of resource: shared memory"):
        out = run(query=leaf)
    assert flex.seen == [OPTIONS, None] and out.grad_fn is not None and leaf.grad is None
    run(query=leaf)
    assert flex.seen[2:] == [None]
    said = flex_torch.options_note(leaf, leaf, leaf, None, None, None)
    assert said == "the defaults, since the tuned options failed: RuntimeError: out of resource: shared memory"


def test_an_error_that_the_defaults_have_too_is_the_callers(flex: Flex, own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(own_database, tuned(DENSE, FORWARD))

    def wrong(*_: Any, **__: Any) -> Any:
        raise ValueError("the caller's function is wrong")

    monkeypatch.setattr(flex_torch, "compiled_flex", lambda **_: wrong)
    with pytest.raises(ValueError, match="the caller's function is wrong"):
        run()


def test_explanations_name_the_options_and_their_record(flex: Flex, own_database: Path) -> None:
    save(own_database, tuned(DENSE, FORWARD))
    said = dispatch.explain_flex(Q.double(), Q.double(), Q.double())
    assert said.startswith("PyTorch's flex_attention: ") and "kernel options" not in said
    said = dispatch.explain_flex(Q, Q, Q, lambda score, b, h, i, j: score + torch.rand(()), scale=-1.0)
    listed = "fwd_BLOCK_M=64 fwd_BLOCK_N=64 fwd_num_stages=3 fwd_num_warps=4"
    assert f"; kernel options {listed} of the record of {DENSE.label()} (overlay)" in said
    assert "; the caller's kernel options" in dispatch.explain_flex(Q, Q, Q, scale=-1.0, kernel_options={"BLOCK_M": 64})
    assert flex.seen == []


def test_the_provider_has_the_options_too(flex: Flex, own_database: Path) -> None:
    save(own_database, tuned(DENSE, FORWARD))
    dispatch.attention(Q, Q, Q, is_causal=True, implementation="flex")
    assert set(map(str, flex.seen)) == {str(dict(sorted(FORWARD.items())))}
    reason = dispatch.explain(Q, Q, Q, is_causal=True, implementation="flex").reason
    assert reason.startswith("the caller named flex; kernel options fwd_BLOCK_M=64")


def test_subclasses_and_compilers_are_left_to_pytorch(flex: Flex, own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(own_database, tuned(DENSE, FORWARD))
    run(query=Q.as_subclass(type("Other", (torch.Tensor,), {})))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with monkeypatch.context() as patched:
        found: list[Any] = []
        module = SimpleNamespace(flex_attention=lambda *given, **words: found.append(given[-1]), BlockMask=object)
        patched.setitem(__import__("sys").modules, "torch.nn.attention.flex_attention", module)
        patched.setattr(torch.nn.attention, "flex_attention", module, raising=False)
        run()
    assert flex.seen == [None] and found == [None]
