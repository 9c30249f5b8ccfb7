"""`flashtune model`: calls of whole models recorded without computing, searched by share, checked and timed."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import db_samples as samples
import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import SDPBackend

from flashtune import dispatch
from flashtune.cli.main import main
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Baseline, Fate, Measurement, Outcome, Provenance, TuningRecord
from flashtune.core.system.errors import InputError
from flashtune.db.library import Library
from flashtune.model import measuring, recording, shares, tuning
from flashtune.model.finding import find_subject
from flashtune.model.runs import Run, padding_mask, runner
from flashtune.model.tuning import Judged, ModelReport
from flashtune.model.workloads import DECODED, Workload, lengths, parse

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FLUX = {
    "_class_name": "FluxTransformer2DModel",
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": [4, 4, 8],
}
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 16,
    "sliding_window": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
BERT = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"} | {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "initializer_range": 0.2,
}
H200 = find_target("h200")


def saved(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def counted(folder: Path, workload: str, config: dict[str, Any] = LLAMA, layers: int | None = 2) -> Counter[Problem]:
    subject = find_subject(saved(folder, config), layers=layers)
    model = subject.build(device="meta", dtype=torch.bfloat16)
    return recording.calls_of(subject, model, parse(workload), device="meta", dtype=torch.bfloat16)


def test_a_forward_calls_each_layers_attention_once(tmp_path: Path) -> None:
    expected = Problem(batch=3, heads=4, kv_heads=2, n_q=96, n_kv=96, d=16, d_v=16, dtype="bf16", features=Features(causal=True))
    assert counted(tmp_path, "forward:3x96") == {expected: 2}
    assert counted(tmp_path, "forward:3x96", layers=None) == {expected: 5}


def test_training_records_each_backward_too(tmp_path: Path) -> None:
    found = counted(tmp_path, "train:2x32")
    assert sorted((one.direction, count) for one, count in found.items()) == [("bwd", 2), ("fwd", 2)]


def test_a_padded_batch_records_a_mask(tmp_path: Path) -> None:
    (problem,) = counted(tmp_path, "padded:3x64")
    assert problem.features.mask == "bool" and problem.features.causal


def test_decoding_counts_its_steps_alone_and_as_one_kind(tmp_path: Path) -> None:
    steps = counted(tmp_path, "decode:2x40")
    assert {(one.n_q, one.n_kv) for one in steps} == {(1, 41 + i) for i in range(DECODED)}
    ((problem, count),) = shares.merged(steps).items()
    assert (problem.n_kv, count) == (40 + DECODED, 2 * DECODED)


def test_a_recording_leaves_dispatch_as_it_was(tmp_path: Path) -> None:
    before = dispatch.attention
    with pytest.raises(ZeroDivisionError), recording.recorded():
        _ = 1 / 0
    assert dispatch.attention is before


def test_a_flux_transformer_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    ((problem, count),) = counted(tmp_path, "forward:2x64", FLUX).items()
    assert (problem.batch, problem.heads, problem.n_q, problem.d, count) == (2, 2, 64 + 512, 16, 2)


def test_the_largest_share_comes_first() -> None:
    small, large = (Problem(batch=1, heads=4, kv_heads=4, n_q=n, n_kv=n, d=64, d_v=64, dtype="bf16") for n in (4096, 8192))
    assert shares.ordered([Counter({small: 1, large: 1})], H200) == [large, small]
    assert shares.ordered([Counter({small: 30, large: 1})], H200) == [small, large]
    assert shares.ordered([Counter({small: 1}), Counter({small: 1, large: 1})], H200)[0] == small, "all of one workload"


@pytest.mark.parametrize("text", ["forward:1x4096", "padded:8x512", "decode:8x1", "train:4"])
def test_a_workload_is_read_as_it_is_written(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "forward", "forward:0x8", "prefill:1x8", "forward:1x0", "forward:-1x8", "forward:1x99999999", "decode:2,8"]
)
def test_another_text_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(InputError, match=r"size outside|no workload"):
        parse(text)


def test_lengths_of_a_padded_batch_are_a_quarter_padding() -> None:
    workload = Workload("padded", 5, 100)
    assert lengths(workload, 100) == [50, 62, 75, 88, 100]
    assert padding_mask(workload, 100, "cpu").sum(1).tolist() == lengths(workload, 100)


@pytest.mark.parametrize("text", ["forward:2x24", "padded:2x24", "decode:2x24", "train:2x24"])
def test_a_model_with_attention_of_ours_is_as_right_as_with_pytorchs(tmp_path: Path, text: str) -> None:
    subject = find_subject(saved(tmp_path, LLAMA), layers=2)
    model = subject.build(device="cpu", dtype=torch.bfloat16)
    found = measuring.check(subject, model, parse(text), device="cpu", dtype=torch.bfloat16)
    assert found.right and 0 < found.tuned < 0.1


@pytest.mark.parametrize("text", ["forward:2x24", "padded:2x24", "decode:2x24", "train:2x24"])
def test_a_model_without_pytorchs_fused_attention_is_checked_beside_its_own(tmp_path: Path, text: str) -> None:
    subject = find_subject(saved(tmp_path, GPT_OSS), layers=2)
    assert subject.standard == "eager"
    model = subject.build(device="cpu", dtype=torch.bfloat16)
    found = measuring.check(subject, model, parse(text), device="cpu", dtype=torch.bfloat16)
    assert found.right and 0 < found.tuned < 0.1


def test_gradients_that_are_zero_but_for_rounding_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A softmax doesn't change where all its scores do: the gradient of a key's bias is 0.
    subject = find_subject(saved(tmp_path, BERT), layers=2)
    model = subject.build(device="cpu", dtype=torch.bfloat16)
    found = measuring.check(subject, model, parse("train:2x24"), device="cpu", dtype=torch.bfloat16)
    assert found.right and 0 < found.tuned < 0.2 and found.allowed < 0.5
    attend = dispatch.attention
    monkeypatch.setattr(dispatch, "attention", lambda q, *others, **words: attend(3 * q, *others, **words))
    assert not measuring.check(subject, model, parse("train:2x24"), device="cpu", dtype=torch.bfloat16).right


def test_a_workload_that_pytorchs_own_attention_fails_to_run_in_full_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = find_subject(saved(tmp_path, LLAMA), layers=1)
    judged = tuning.record_calls(subject, [parse("forward:3x8")], dtype=torch.float32, device="cpu")
    made = measuring.runner

    def fails(model: torch.nn.Module, inputs: Any, workload: Workload) -> Run:
        def step(prepared: Any) -> torch.Tensor:
            if workload.batch > measuring.CHECKED_BATCH and model.config._attn_implementation == "sdpa":  # type: ignore[union-attr]
                raise RuntimeError("mha_graph.execute failed")
            return made(model, inputs, workload).step(prepared)

        return Run(step)

    monkeypatch.setattr(measuring, "runner", fails)
    tuning.judge(subject, judged, device="cpu", dtype=torch.float32, say=lambda _text: None)
    assert judged[0].check is not None and judged[0].times is None
    assert judged[0].why == "PyTorch's own attention fails in it (RuntimeError: mha_graph.execute failed)"


@pytest.mark.parametrize("lost", [False, True])
def test_a_workload_in_which_pytorchs_own_attention_fails_is_left_out(tmp_path: Path, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = find_subject(saved(tmp_path, LLAMA), layers=1)
    results = measuring._results

    def failing(model: torch.nn.Module, inputs: Any, workload: Workload) -> list[torch.Tensor]:
        if workload.trains and model.config._attn_implementation == "sdpa":
            raise RuntimeError("mha_graph.execute failed\nat a line")
        return results(model, inputs, workload)

    monkeypatch.setattr(measuring, "_results", failing)
    monkeypatch.setattr(tuning, "_lost", lambda _device: lost)
    monkeypatch.setattr(measuring, "MOST_ROUNDS", 1)
    judged = tuning.record_calls(
        subject, [parse(text) for text in ("forward:1x8", "train:1x8", "forward:1x9")], dtype=torch.float32, device="cpu"
    )
    tuning.judge(subject, judged, device="cpu", dtype=torch.float32, say=lambda _text: None)
    first, failed, after = judged
    assert first.times is not None and not first.why
    assert (failed.check, failed.times, failed.why) == (
        None,
        None,
        "PyTorch's own attention fails in it (RuntimeError: mha_graph.execute failed)",
    )
    assert (after.times is None, "name it alone" in after.why) == (lost, lost)


@pytest.mark.parametrize("text", ["forward:2x24", "decode:2x24", "train:2x24"])
def test_wrong_attention_is_found_by_the_whole_models_outputs(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = find_subject(saved(tmp_path, LLAMA), layers=2)
    attend = dispatch.attention
    monkeypatch.setattr(dispatch, "attention", lambda q, *others, **words: attend(3 * q, *others, **words))
    model = subject.build(device="cpu", dtype=torch.bfloat16)
    assert not measuring.check(subject, model, parse(text), device="cpu", dtype=torch.bfloat16).right


def test_decoding_runs_begin_from_the_same_cache(tmp_path: Path) -> None:
    subject = find_subject(saved(tmp_path, LLAMA), layers=2)
    model, workload = subject.build(device="cpu", dtype=torch.float32), parse("decode:2x24")
    run = runner(model, subject.inputs(workload, device="cpu", dtype=torch.float32), workload)
    assert torch.equal(run(), run())


def test_each_implementation_is_timed_first_and_after_every_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = find_subject(saved(tmp_path, LLAMA), layers=1)
    model = subject.build(device="cpu", dtype=torch.float32)
    monkeypatch.setattr(measuring, "MOST_REPEATS", 1)
    monkeypatch.setattr(measuring, "LEAST_ROUNDS", 40)
    attended: list[str] = []
    monkeypatch.setattr(type(subject), "attend", lambda _self, _model, implementation: attended.append(implementation))
    monkeypatch.setattr(measuring, "FUSED", ())
    measuring.measure(subject, model, parse("forward:1x8"), device="cpu", dtype=torch.float32)
    rounds = [tuple(attended[at : at + 2]) for at in range(2, len(attended), 2)]
    assert set(rounds) == {("sdpa", "tuned"), ("tuned", "sdpa")} and len(rounds) >= 40


def test_times_are_of_both_implementations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOST_REPEATS", 1)
    monkeypatch.setattr(measuring, "MOST_ROUNDS", 2)
    subject = find_subject(saved(tmp_path, LLAMA), layers=1)
    model = subject.build(device="cpu", dtype=torch.float32)
    found = measuring.measure(subject, model, parse("forward:1x8"), device="cpu", dtype=torch.float32)
    assert found.tuned_ms > 0 and found.speedup == found.torch_ms / found.tuned_ms
    assert set(found.backends_ms) == set(measuring.FUSED) and all(ms > 0 for ms in found.backends_ms.values())
    best = measuring.Times(tuned_ms=10.0, torch_ms=9.0, backends_ms={"flash": 8.0, "cudnn": 11.0})
    assert (best.best_backend, best.against_best) == ("flash", 0.8)
    assert (replace(best, torch_ms=5.0).best_backend, replace(best, backends_ms={}).against_best) == ("torch", 0.9)


def test_a_model_without_pytorchs_fused_attention_is_timed_beside_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOST_REPEATS", 1)
    monkeypatch.setattr(measuring, "MOST_ROUNDS", 1)
    subject = find_subject(saved(tmp_path, GPT_OSS), layers=1)
    model = subject.build(device="cpu", dtype=torch.bfloat16)
    found = measuring.measure(subject, model, parse("forward:1x8"), device="cpu", dtype=torch.bfloat16)
    assert found.torch_ms > 0 and found.tuned_ms > 0 and found.backends_ms == {}


def test_a_backend_with_which_a_model_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = find_subject(saved(tmp_path, LLAMA), layers=1)
    model = subject.build(device="cpu", dtype=torch.float32)
    monkeypatch.setattr(measuring, "MOST_REPEATS", 1)
    usual = torch._C._get_sdp_priority_order()
    made, orders = measuring.runner, []

    def runs(*given: Any) -> Run:
        run = made(*given)

        def step(prepared: Any) -> torch.Tensor:
            orders.append(torch._C._get_sdp_priority_order())
            if orders[-1][0] == SDPBackend.CUDNN_ATTENTION.value:
                raise RuntimeError("cuDNN Frontend error")
            return run.step(prepared)

        return Run(step, run.prepare)

    monkeypatch.setattr(measuring, "runner", runs)
    found = measuring.measure(subject, model, parse("forward:1x8"), device="cpu", dtype=torch.float32)
    assert set(found.backends_ms) == {"flash", "efficient"}
    assert {order[0] for order in orders} == {measuring.BACKENDS[name].value for name in measuring.FUSED}
    assert torch._C._get_sdp_priority_order() == usual


def test_the_table_names_who_won_each_call() -> None:
    problem = Problem(batch=1, heads=4, kv_heads=4, n_q=64, n_kv=64, d=64, d_v=64, dtype="bf16")
    judged = Judged(parse("forward:1x64"), Counter({problem: 1}))
    report = ModelReport("model", find_target("h200"), "bf16", [judged])
    kernel = Outcome(
        template="flash_fwd", template_hash="0" * 16, variant_id="0" * 16, config=Config.of(), fate=Fate.CORRECT, source="measured",
        measurement=Measurement.of([20.0]), call_us=20.0,
    )  # fmt: skip
    record = TuningRecord(
        key=problem.key("h200"), problem=problem, outcome=kernel, provenance=Provenance(flashtune="0", torch="2", triton="3"),
        baseline=Baseline(backend="cudnn", measurement=Measurement.of([30.0]), call_us=30.0),
    )  # fmt: skip
    fa4 = Outcome.of_provider("fa4", "0" * 16, Measurement.of([15.0]))
    slow = replace(record, outcome=replace(kernel, call_us=40.0))
    for one, served, provider, speedup in [
        (record, "flash_fwd", None, 1.5), (slow, "PyTorch", "cudnn", 1.0), (replace(record, providers=(fa4,)), "fa4", "fa4", 2.0),
    ]:  # fmt: skip
        report.records = {problem: one}
        (row,) = report.calls()
        assert (row["served"], row["provider"], row["speedup"]) == (served, provider, speedup)


def test_weights_of_a_folder_are_used(tmp_path: Path) -> None:
    first = find_subject(saved(tmp_path, LLAMA), layers=None).build(device="cpu", dtype=torch.float32)
    torch.nn.init.ones_(first.model.layers[0].self_attn.q_proj.weight)
    first.save_pretrained(tmp_path)
    subject = find_subject(tmp_path, layers=None)
    assert subject.has_weights
    again = subject.build(device="cpu", dtype=torch.float32)
    assert torch.equal(again.model.layers[0].self_attn.q_proj.weight, torch.ones(64, 64))


def test_workloads_that_a_model_lacks_are_refused(tmp_path: Path) -> None:
    subject = find_subject(saved(tmp_path, LLAMA), layers=1)
    with pytest.raises(InputError, match="128 positions"):
        subject.inputs(parse("forward:1x129"), device="meta", dtype=torch.bfloat16)


@pytest.mark.usefixtures("quick")
def test_the_command_without_a_gpu_adds_predicted_records_and_says_so(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA)
    samples.write(tmp_path / "tuned.sqlite", (samples.result(samples.outcome("aaaa000000000001")),))
    words = ["model", str(tmp_path), "--gpu-name", "a100", "--layers", "1", "--workload", "forward:1x64", "--trials", "1", "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["database"] == str(tmp_path / "tuned.sqlite") and Path(found["database"] + ".json").exists()
    (call,) = found["calls"]
    assert call["source"] == "predicted" and call["speedup"] is None and call["share"] == 1.0
    assert found["workloads"][0]["speedup"] is None and found["workloads"][0]["right"] is None
    again = CliRunner().invoke(main, words[:-1])
    assert (
        f"{tmp_path / 'tuned.sqlite'} holds 2 records, 1 of these calls. Predicted records are not used by default. To use them: "
        in again.stdout
    )
    assert sorted(one.key.gpu for one in Library.of(tmp_path / "tuned.sqlite").winners()) == ["a100", "h200"], "another GPU's stays"
