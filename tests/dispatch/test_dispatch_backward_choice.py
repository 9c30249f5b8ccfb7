"""Which backward serves: rows of the architecture, of other GPUs and features, and torch where none was measured."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from flashtune import dispatch
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem, ProblemKey
from flashtune.core.pytorch.attention import sound_backends
from flashtune.core.records.results import Baseline, Fate, Measurement, Outcome, Provenance, TuningRecord
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.decisions import backwards, resolve
from flashtune.dispatch.plans import pytorch
from flashtune.dispatch.policy.choose import Pool
from flashtune.dispatch.state.context import Memo
from flashtune.templates import families, family

H200 = find_target("h200")
PROBLEM = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))


def record(problem: Problem, *, template: str = "flash_fwd", config: Config | None = None, framework_us: float = 200.0) -> TuningRecord:
    measurement = Measurement.of([100.0])
    outcome = Outcome(
        template=template,
        template_hash="0" * 16,
        variant_id="a" * 16,
        config=config or Config.of(),
        fate=Fate.CORRECT,
        source="measured",
        measurement=measurement,
    )
    return TuningRecord(
        key=problem.key("h200"),
        problem=problem,
        outcome=outcome,
        provenance=Provenance(flashtune="0", torch="2", triton="3"),
        baseline=Baseline(backend="cudnn", measurement=Measurement.of([framework_us])),
    )


def pooled(rows: list[TuningRecord]) -> Callable[[ProblemKey, Target], Pool]:
    """A memo's pools of these records."""
    return lambda key, target: Pool(key, target, rows, families())


@pytest.fixture(scope="module")
def shipped() -> Memo:
    """The shipped records, each read once; what is chosen by them is the same whoever asked before."""
    memo = Memo()
    memo.read()
    return memo


def test_torch_serves_gradients_until_a_backward_was_measured_on_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    memo = Memo()
    monkeypatch.setattr(memo, "pool", pooled([]))
    found, why = backwards.gradient_choice(memo, PROBLEM, H200)
    assert found is None and "no backward kernel for such calls was measured on GPUs like NVIDIA H200" in why
    allowed = Memo(replace(memo.settings, unmeasured=True))
    monkeypatch.setattr(allowed, "pool", pooled([]))
    found, _ = backwards.gradient_choice(allowed, PROBLEM, H200)
    assert found is not None and found.family is not None and found.family.name == "flash_bwd_hopper"
    found, _ = backwards.gradient_choice(allowed, PROBLEM, H200, deterministic=True)
    assert found is not None and found.family is not None and found.family.name == "flash_bwd_hopper_split"
    wide, _ = backwards.gradient_choice(allowed, replace(PROBLEM, d=256, d_v=256), H200)
    assert wide is not None and wide.family is found.family
    fp8 = replace(PROBLEM, dtype="fp8")
    assert [backwards.gradient_choice(one, fp8, H200)[1] for one in (memo, allowed)] == [
        "none of our backward kernels takes such calls"
    ] * 2
    tiny, _ = backwards.gradient_choice(allowed, replace(PROBLEM, d=20, d_v=20), H200)
    assert tiny is not None and tiny.family is not None and tiny.family.name == "flash_bwd"
    # A measured backward needs no leave; one of the forward says nothing.
    measured = record(replace(PROBLEM, direction="bwd"), template="flash_bwd_hopper_split", config=found.config, framework_us=2e4)
    monkeypatch.setattr(memo, "pool", pooled([measured, record(PROBLEM)]))
    found, _ = backwards.gradient_choice(memo, replace(PROBLEM, n_q=1000, n_kv=1000), H200)
    assert found is not None and found.record is measured
    # What torch does sooner than the host launches ours is left to it, but for those who allow everything.
    small = replace(PROBLEM, n_q=128, n_kv=128)
    found, why = backwards.gradient_choice(memo, small, H200)
    assert found is None and why == "PyTorch takes an estimated 87.8 us for it, and ours 120.0 us, the host's launches included"
    # Torch isn't timed beside kernels that repeat their bits: the next record tells what it takes.
    untimed, slow = replace(measured, baseline=None), record(replace(PROBLEM, direction="bwd", n_q=9000, n_kv=9000), framework_us=2e6)
    slow = replace(slow, outcome=replace(slow.outcome, template="flash_bwd_hopper_split", config=measured.outcome.config))
    for pool, serves in (([untimed, slow], True), ([untimed], False)):
        monkeypatch.setattr(memo, "pool", pooled(pool))
        assert (backwards.gradient_choice(memo, small, H200)[0] is not None) == serves
    # Of a key whose whole steps were measured, these say who serves.
    mine = record(replace(small, direction="bwd"), template="flash_bwd_hopper_split", config=measured.outcome.config, framework_us=100.0)
    for ours_us, serves in ((290.0, True), (310.0, False)):
        assert mine.baseline is not None
        outcome, baseline = replace(mine.outcome, call_us=ours_us), replace(mine.baseline, call_us=300.0)
        stepped = replace(mine, outcome=outcome, baseline=baseline)
        monkeypatch.setattr(memo, "pool", pooled([stepped]))
        assert (backwards.gradient_choice(memo, small, H200)[0] is not None) == serves
    monkeypatch.setattr(memo, "pool", pooled([mine]))
    assert backwards.gradient_choice(memo, small, H200)[0] is None
    monkeypatch.setattr(allowed, "pool", pooled([measured]))
    assert backwards.gradient_choice(allowed, small, H200)[0] is not None
    assert backwards.gradient_choice(memo, small, H200, composite=True)[0] is not None
    slower = replace(measured, baseline=Baseline(backend="cudnn", measurement=Measurement.of([1.0])))
    monkeypatch.setattr(memo, "pool", pooled([slower]))
    assert backwards.gradient_choice(memo, PROBLEM, H200, composite=True)[0] is not None
    found, why = backwards.gradient_choice(memo, PROBLEM, H200)
    assert found is None and "PyTorch was faster" in why


@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_a_mask_that_torch_takes_long_for_is_left_to_kernels_though_the_nearest_row_has_no_time_of_torchs(gpu: str, shipped: Memo) -> None:
    """Torch took 0.8 ms, expected to take 0.1 by what a kernel that repeats its bits took (benchmarks/results/2026-11-25-h100-drawn)."""
    sizes: dict[str, Any] = {"batch": 1, "heads": 64, "kv_heads": 32, "n_q": 512, "n_kv": 512, "d": 192, "d_v": 128}
    masked = Problem(**sizes, dtype="bf16", features=Features(mask="bool"), direction="bwd")
    assert backwards.gradient_choice(shipped, masked, find_target(gpu))[0] is not None


@pytest.mark.parametrize("d", [40, 72, 80, 96])
@pytest.mark.parametrize("causal", [False, True])
def test_another_gpus_backward_of_the_head_size_serves_before_the_gpus_own_of_another(d: int, causal: bool, shipped: Memo) -> None:
    longer = replace(PROBLEM, direction="bwd", d=d, d_v=d, n_q=4096, n_kv=4096, features=Features(causal=causal))
    found, _ = backwards.gradient_choice(shipped, longer, H200)
    assert found is not None and found.record is not None and (found.record.key.gpu, found.record.key.d) == ("h100", d)


@pytest.mark.parametrize(
    ("features", "d", "gpu"),
    [
        (Features(causal=True, sinks=True), 64, "h200"),
        (Features(causal=True, sinks=True), 256, "h100"),
        (Features(causal=True, mask="bool", sinks=True), 128, "h200"),
        (Features(causal=True, mask="bool", window=(1024, 0)), 160, "h100"),
        (Features(mask="bool", alibi=True), 64, "h100"),
        (Features(mask="bool", alibi=True), 160, "h200"),
        (Features(mask="bias", dropout=True), 256, "h200"),
        (Features(mask="bias", dbias=True, dropout=True), 128, "h100"),
        (Features(causal=True, alibi=True, dropout=True), 128, "h200"),
    ],
    ids=str,
)
def test_rows_with_fewer_features_tell_of_gradients_of_more_where_torch_would_read_a_matrix_of_all_scores(
    d: int, features: Features, gpu: str, shipped: Memo
) -> None:
    """A whole step with sinks took 4.4 ms where the gradients of FlashAttention-4 took 0.3 (benchmarks/results/2026-11-26-h100-divided)."""
    longer = replace(PROBLEM, direction="bwd", d=d, d_v=d, n_q=2048, n_kv=2048, features=features)
    found, why = backwards.gradient_choice(shipped, longer, find_target(gpu))
    assert found is not None and found.record is not None and found.family is not None, why
    assert found.record.outcome.source == "measured"
    # Nothing was measured on other architectures.
    assert backwards.gradient_choice(shipped, longer, find_target("a100"))[0] is None


def test_with_sinks_torch_is_not_thought_to_be_as_fast_as_kernels_are_without_it(shipped: Memo) -> None:
    """Beside gradients with sinks torch was never timed: what it takes with a window and without sinks is known."""
    step = Problem(
        batch=4, heads=16, kv_heads=16, n_q=1000, n_kv=1000, d=64, d_v=64, dtype="bf16", features=Features(causal=True, sinks=True)
    )
    found, why = backwards.gradient_choice(shipped, step, find_target("h100"))
    assert found is not None, why


@pytest.mark.parametrize(("d", "wanted"), [(40, 80), (48, 80), (72, 80), (88, 96), (112, 128), (160, 256)])
@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_backwards_whose_products_are_in_pieces_stand_in_for_each_other(gpu: str, d: int, wanted: int, shipped: Memo) -> None:
    """Tiles of D = 64 are as wide as those of D = 40 and lose 12 % there, D = 80's lose 2.5 % (H200)."""
    masked = replace(PROBLEM, direction="bwd", d=d, d_v=d, n_q=1024, n_kv=1024, features=Features(mask="bool"))
    found, _ = backwards.gradient_choice(shipped, masked, find_target(gpu))
    assert found is not None and found.record is not None and found.record.key.d == wanted


@pytest.mark.parametrize("gpu", ["h200", "a100", "b200"])
def test_where_torch_would_write_out_all_scores_a_kernel_that_nobody_measured_has_the_gradients(
    gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a seed for dropout, 1.3 s in place of 0.5 ms: benchmarks/results/2026-11-24-h200-training."""
    memo, target = Memo(), find_target(gpu)
    monkeypatch.setattr(memo, "pool", pooled([]))
    drawn = replace(PROBLEM, d=192, d_v=128, features=Features(causal=True, dropout=True))
    assert backwards.gradient_choice(memo, drawn, target)[0] is None
    found, _ = backwards.gradient_choice(memo, drawn, target, composite=True)
    assert found is not None and found.family is not None and found.kind == "default"


@pytest.mark.parametrize(
    ("words", "composite"),
    [({}, False), ({"dropout_p": 0.1}, False), ({"dropout_p": 0.1, "seed": 3}, True), ({"softcap": 30.0}, True), ({"window": 7}, False)],
    ids=str,
)
def test_what_torch_computes_by_operations_on_all_scores_says_the_call(words: dict[str, Any], composite: bool) -> None:
    q = torch.empty(1, 2, 64, 64, device="meta", dtype=torch.bfloat16)
    options = {name: value for name, value in words.items() if name != "seed"}
    call = parse(Arguments(q, q, q, seed=words.get("seed")), Options(**options))
    assert backwards.composite(call) is composite
    assert not backwards.composite(replace(call, device=torch.device("cpu"))), "interpreted kernels are slower"


def test_a_deterministic_call_takes_the_row_of_a_search_among_repeatable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = replace(PROBLEM, direction="bwd")
    rows = [
        record(trained, template=name, config=family(name).default(trained.spec(), H200), framework_us=framework_us)
        for name, framework_us in (("flash_bwd_hopper", 3e4), ("flash_bwd_hopper_split", 2e4))
    ]
    memo = resolve.Memo()
    monkeypatch.setattr(memo, "pool", pooled(rows))
    for repeatable, wanted in ((False, rows[0]), (True, rows[1])):
        found, _ = backwards.gradient_choice(memo, PROBLEM, H200, deterministic=repeatable)
        assert found is not None and found.record is wanted
    memo = resolve.Memo()
    monkeypatch.setattr(memo, "pool", pooled(rows[:1]))
    assert backwards.gradient_choice(memo, PROBLEM, H200, deterministic=True)[0] is None


def test_a_row_for_the_same_bits_hides_no_row_of_faster_kernels_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that was asked for may hold only what deterministic calls take, which raced against no framework."""
    trained = replace(PROBLEM, direction="bwd")
    fast, slow = (
        record(trained, template=name, config=family(name).default(trained.spec(), H200), framework_us=3e4)
        for name in ("flash_bwd_hopper", "flash_bwd_hopper_split")
    )
    slow = replace(slow, outcome=replace(slow.outcome, measurement=Measurement.of([2e4])))
    above = replace(slow, baseline=None, precedence=1)
    memo = Memo()
    monkeypatch.setattr(memo, "pool", pooled([fast, above]))
    longer = replace(PROBLEM, n_q=8192, n_kv=8192)
    for problem in (PROBLEM, longer):
        for repeatable, wanted in ((False, fast), (True, above)):
            found, _ = backwards.gradient_choice(memo, problem, H200, deterministic=repeatable)
            assert found is not None and found.record is wanted
    # One that raced against it was meant to serve, and one alone does.
    for rows in ([fast, replace(slow, precedence=1)], [above]):
        memo = Memo()
        monkeypatch.setattr(memo, "pool", pooled(rows))
        found, _ = backwards.gradient_choice(memo, PROBLEM, H200)
        assert found is not None and found.record is rows[-1]


def test_a_row_with_another_feature_says_nothing_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have gained much over a torch that has no windows, where a plain backward of torch's is the faster one."""
    windowed = replace(PROBLEM, features=Features(causal=True, window=(1024, 0)))
    config = family("flash_bwd").default(replace(PROBLEM, direction="bwd").spec(), H200)
    row = record(replace(windowed, direction="bwd"), template="flash_bwd", config=config, framework_us=2e4)
    memo = Memo()
    monkeypatch.setattr(memo, "pool", pooled([row]))
    assert backwards.gradient_choice(memo, windowed, H200)[0] is not None
    assert backwards.gradient_choice(memo, replace(windowed, features=Features(causal=True, window=(512, 0))), H200)[0] is not None
    for features in (Features(causal=True), Features(causal=True, dropout=True), Features(causal=True, softcap=True)):
        assert backwards.gradient_choice(memo, replace(PROBLEM, features=features), H200)[0] is None


def test_a_row_of_a_biass_own_gradient_stands_for_calls_without_it_but_not_the_other_way_round(
    shipped: Memo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of D = 256 with a bias no other rows ship, and torch took 11.2 ms where cuDNN could 3.3 (n561 in drawn73.txt)."""
    trained = replace(PROBLEM, direction="bwd")
    with_its_own, without = (replace(trained, features=Features(mask="bias", dbias=dbias)) for dbias in (True, False))
    for trained, asked, serves in ((with_its_own, without, True), (without, with_its_own, False)):
        row = record(trained, template="flash_bwd", config=family("flash_bwd").default(trained.spec(), H200), framework_us=2e4)
        memo = Memo()
        monkeypatch.setattr(memo, "pool", pooled([row]))
        assert (backwards.gradient_choice(memo, asked, H200)[0] is not None) == serves
    wide = Problem(batch=24, heads=24, kv_heads=12, n_q=561, n_kv=561, d=256, d_v=256, dtype="bf16", features=Features(mask="bias"))
    assert backwards.gradient_choice(shipped, wide, H200)[0] is not None


def test_what_explains_a_backward_problem_says_that_torch_serves_it() -> None:
    found = dispatch.explain_problem(replace(PROBLEM, direction="bwd"), "b200")
    assert (
        found.kind == "framework"
        and "no backward kernel for such calls was measured" in found.reason
        and "computes the gradient" in found.reason
    )
    assert dispatch.explain_problem(replace(PROBLEM, direction="bwd"), "h200").template == "flash_bwd_hopper"


def test_cudnn_computes_no_gradient_under_a_mask() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    backends = sound_backends(mask)
    assert backends is not None and SDPBackend.CUDNN_ATTENTION not in backends and SDPBackend.MATH in backends
    assert sound_backends(None) is None


@pytest.mark.parametrize(
    ("draws", "gradient", "kept"), [(True, False, True), (True, True, True), (False, True, True), (False, False, False)]
)
def test_torch_draws_without_gradients_by_the_backends_that_it_draws_by_with_them(draws: bool, gradient: bool, kept: bool) -> None:
    """Each backend drops other pairs: what is computed again, as in a checkpoint, would differ."""
    call: Any = SimpleNamespace(device=torch.device("cuda"), deterministic=False, torch_draws=draws, identity=True)
    q, mask = torch.zeros(1, 1, 4, 8, requires_grad=True), torch.ones(4, 4, dtype=torch.bool)
    with torch.set_grad_enabled(gradient), pytorch.sound_backends_of(call, q, q, q, mask):
        assert torch.backends.cuda.cudnn_sdp_enabled() != kept


def test_gradients_of_wide_heads_take_kernels_from_where_they_outran_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(n: int, d: int = 512, features: Features | None = None, rows: Any = (), gpu: str = "h200", **words: bool) -> str:
        wide = replace(PROBLEM, d=d, d_v=d, n_q=n, n_kv=n, features=features or Features(causal=True), direction="bwd")
        memo = Memo()
        monkeypatch.setattr(memo, "pool", pooled(list(rows)))
        found, _ = backwards.gradient_choice(memo, wide, find_target(gpu), **words)
        return "" if found is None or found.family is None else found.family.name

    ours = "flash_bwd_hopper_wide"
    assert said(1024) == said(8192, 320) == said(2048, features=Features(), deterministic=True) == said(2048, gpu="h100") == ours
    # Fewer queries, other features and GPUs, and heads of up to 256 weren't timed.
    others = said(1000), said(2048, 256), said(2048, gpu="a100"), said(2048, gpu="b200"), said(2048, features=Features(window=(9, 0)))
    assert others == ("",) * 5
    # A soft cap has no kernel of PyTorch's.
    assert said(2048, features=Features(causal=True, softcap=True), composite=True) == ours
    # Records of narrower heads say nothing.
    narrow = record(replace(PROBLEM, d=256, d_v=256, direction="bwd"), template="flash_bwd_hopper_split", framework_us=1.0)
    assert said(4096, rows=[narrow]) == ours


def test_where_a_record_prefers_a_library_that_is_missing_our_gradients_of_wide_heads_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(PROBLEM, d=512, d_v=512, n_q=4096, n_kv=4096, direction="bwd")
    row = record(wide, template="ffpa", framework_us=900.0)
    row = replace(row, providers=(replace(row.outcome, call_us=100.0),))
    assert row.fastest(lambda name: True) == "ffpa"
    memo = Memo()
    monkeypatch.setattr(memo, "pool", pooled([row]))
    found, why = backwards.gradient_choice(memo, wide, H200)
    assert found is not None and found.family is not None and found.family.name == "flash_bwd_hopper_wide", why
    assert resolve.explained_problem(memo, wide, H200).template == "flash_bwd_hopper_wide"
