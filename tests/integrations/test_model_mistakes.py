"""`flashtune model`: what it can't take is one sentence, whoever refuses it, and what needs no model is told before any is loaded."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from db_samples import outcome, result, write
from test_model import FLUX, LLAMA, saved

from flashtune.cli.main import main
from flashtune.core.system.errors import InputError
from flashtune.db.card import write_card
from flashtune.db.library import Library
from flashtune.model import tuning
from flashtune.model.finding import find_subject
from flashtune.model.workloads import parse

UNET = {"_class_name": "UNet2DConditionModel"}
SPEECH = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[]", "is no JSON object"),
        ("{", "can't be read as a model's config"),
        ("{}", "neither model_type"),
        ('{"model_type": 3}', "neither model_type"),
        ('{"model_type": ["llama"]}', "neither model_type"),
        ('{"model_type": "none_such"}', "transformers can't read"),
        ('{"_class_name": "NoneSuch"}', "no model of the installed diffusers"),
        ('{"_class_name": "AutoencoderKL"}', "record its calls"),
    ],
)
def test_what_is_no_model_is_refused_in_one_sentence(tmp_path: Path, config: str, said: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match=said):
        find_subject(tmp_path, layers=None)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA | {"hidden_size": 1792, "num_attention_heads": 24, "head_dim": 128}, r"can't read .*hidden size \(1792\)"),
        (LLAMA | {"hidden_size": "64"}, "can't read .*'hidden_size' expected int"),
        (LLAMA | {"hidden_size": None}, "can't read .*'hidden_size' expected int"),
        (LLAMA | {"num_attention_heads": 0}, "can't read .*ZeroDivisionError"),
        (LLAMA | {"layer_types": ["none_such"] * 5}, "can't read .*layer_types"),
        (LLAMA | {"architectures": 3}, "can't read"),
        (LLAMA | {"rope_parameters": {"rope_type": "none_such", "rope_theta": 1e4}}, "can't build .*none_such"),
        (LLAMA | {"hidden_act": "none_such"}, "can't build .*none_such"),
        (LLAMA | {"hidden_size": -64}, "can't build .*negative dimension"),
        (LLAMA | {"pad_token_id": 100}, "can't build .*Padding_idx"),
        (LLAMA | {"num_key_value_heads": 3}, "4 heads, key 3"),
        (LLAMA | {"architectures": ["BertForMaskedLM"]}, "architectures 'BertForMaskedLM' and model_type 'llama'"),
        (LLAMA | {"architectures": ["ViTForImageClassification"]}, "'ViTForImageClassification' and model_type 'llama'"),
        (SPEECH | {"max_source_positions": "x"}, "can't read .*'max_source_positions' expected int"),
        (FLUX | {"num_layers": "1"}, "can't build"),
        (FLUX | {"attention_head_dim": 15}, "can't build|can't be run"),
        (UNET | {"sample_size": "x"}, "has no inputs for forward:2"),
        (UNET | {"block_out_channels": "x"}, "can't build .*block_out_channels"),
    ],
)
def test_a_config_that_its_library_refuses_is_one_sentence(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    pytest.importorskip("diffusers")

    def recorded() -> None:
        subject = find_subject(saved(tmp_path, config), layers=1)
        tuning.record_calls(subject, subject.defaults[:1], dtype=torch.bfloat16, device=None)

    with pytest.raises(InputError, match=said) as caught:
        recorded()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_weights_that_arent_the_models_are_one_sentence(tmp_path: Path) -> None:
    (saved(tmp_path, LLAMA) / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match="can't build"):
        find_subject(tmp_path, layers=None).build(device="cpu", dtype=torch.float32)


def test_an_architecture_that_serves_several_types_is_taken(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.internlm3", reason="transformers has this type since 5.23")
    saved(tmp_path, LLAMA | {"model_type": "internlm3", "head_dim": 16})
    assert type(find_subject(tmp_path, layers=1).build(device="meta", dtype=torch.bfloat16)).__name__ == "LlamaForCausalLM"


def test_every_workload_is_checked_before_any_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = find_subject(saved(tmp_path, LLAMA), layers=1)
    monkeypatch.setattr(subject, "build", lambda **_: pytest.fail("it was built"))
    with pytest.raises(InputError, match="128 positions"):
        tuning.record_calls(subject, [parse("forward:1x8"), parse("forward:1x129")], dtype=torch.bfloat16, device=None)


@pytest.mark.parametrize("config", [LLAMA, SPEECH])
def test_decoding_names_nothing_that_transformers_is_about_to_remove(tmp_path: Path, config: dict[str, Any]) -> None:
    subject = find_subject(saved(tmp_path, config), layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        (judged,) = tuning.record_calls(subject, [parse("decode:2x8")], dtype=torch.bfloat16, device=None)
    assert judged.counts


MISTAKES = {
    "there is no": ["nowhere"],
    "neither model_type": ["empty.json"],
    "is no workload": ["config.json", "--workload", "forward"],
    "unknown GPU": ["config.json", "--gpu-name", "none_such"],
    "is no time": ["config.json", "--budget", "soon"],
    "names no licence": ["config.json", "--licence", " "],
    "there is no folder": ["config.json", "--out", "nowhere/tuned.sqlite"],
    "isn't the file that": ["config.json", "--out", "other.sqlite"],
    "states 'MIT', not 'Apache-2.0'": ["config.json", "--out", "mit.sqlite"],
    "is not a SQLite database": ["config.json", "--out", "config.json"],
}


def test_mistakes_that_need_no_model_are_told_before_torch_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA)
    (tmp_path / "empty.json").write_text("{}")
    for name in ("other.sqlite", "mit.sqlite"):
        write(tmp_path / name, (result(outcome("aaaa000000000001")),))
        write_card(tmp_path / name, "MIT", Library.of(tmp_path / name).winners())
    with (tmp_path / "other.sqlite").open("ab") as file:
        file.write(bytes(4096))
    code = """
import json, sys
from click.testing import CliRunner
from flashtune.cli.main import main
for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(main, ["model", *words])
    print(json.dumps([result.exit_code, result.stderr, "torch" in sys.modules]))
"""
    words = [sys.executable, "-c", code, json.dumps([["--gpu-name", "a100", *given] for given in MISTAKES.values()])]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    for said, line in zip(MISTAKES, done.stdout.splitlines(), strict=True):
        code_of_exit, stderr, loaded = json.loads(line)
        assert said in stderr and code_of_exit in (2, 3) and not loaded, (said, line)
    assert "Traceback" not in done.stdout


def test_the_command_ends_with_the_exit_code_of_a_users_error(tmp_path: Path) -> None:
    saved(tmp_path, LLAMA | {"hidden_act": "none_such"})
    found = CliRunner().invoke(main, ["model", str(tmp_path), "--gpu-name", "a100"])
    assert found.exit_code == 2 and found.stderr.startswith("flashtune: transformers can't build") and found.stderr.count("\n") == 1
