"""The table of models: what its problems are, how one is found, and that figures are those of the classes it names."""

import inspect
import json
import re
from pathlib import Path

import pytest
from commands import flashtune

from flashtune.cli.problem_options import ProblemOptions
from flashtune.cli.search import search
from flashtune.core.records.models import Model, find_model, models
from flashtune.core.system.errors import InputError
from flashtune.db.library import shipped_path
from flashtune.db.store import Store

ASKED = {
    *("gpt2", "bert-base", "vit-b-16", "vit-l-16", "siglip-so400m-14", "clip-vit-l-14", "whisper-large-v3", "sd-1.5", "sdxl", "flux.1"),
    *("llama-2-7b", "llama-3-8b", "qwen2.5-7b", "qwen3-8b", "gemma-2-9b", "gemma-3-27b", "mistral-7b", "mixtral-8x7b", "phi-3-mini"),
    *("phi-4", "deepseek-v3", "gpt-oss"),
}


def labels(*words: str) -> list[str]:
    context = search.make_context("search", ["--gpu-name", "a100", *words])
    return [problem.label() for problem in ProblemOptions.of(context, dict(context.params)).problems()]


def test_the_models_that_people_run_are_there() -> None:
    assert models().keys() >= ASKED


@pytest.mark.parametrize("model", models().values(), ids=lambda model: model.slug)
def test_each_attention_is_a_problem_with_a_source(model: Model) -> None:
    assert model.sources and all(kind.n and kind.problem(n=kind.n[0], dtype="bf16") for kind in model.attentions)
    assert all(re.match(r"(\w+/)?config\.json of [\w.-]+/[\w.-]+|\w+ of (transformers|diffusers): ", source) for source in model.sources)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("llama-3-8b --n 8192", ["n8192-d128-bf16-causal-gqa4"]),
        ("LLAMA3_8B", ["n8192-d128-bf16-causal-gqa4"]),
        ("llama-3-8b --n 4096 8192 --dtype bf16,fp16", [f"n{n}-d128-{t}-causal-gqa4" for t in ("bf16", "fp16") for n in (4096, 8192)]),
        ("llama-3-8b --n 4096 --n-q 1", ["n1x4096-d128-bf16-full-gqa4"]),
        # A window that hides nothing is none.
        ("gemma-3-27b --n 1024 8192", [f"n{n}-d128-bf16-causal{w}-gqa2" for n, w in ((1024, ""), (8192, ""), (8192, "+window1023"))]),
        ("whisper-tiny", ["n1500-d64-bf16-full", "n448-d64-bf16-causal", "n448x1500-d64-bf16-full"]),
        ("whisper-tiny --n-q 1", ["n1x448-d64-bf16-full", "n1x1500-d64-bf16-full"]),
        ("gpt-oss", ["n8192-d64-bf16-causal+sinks-gqa8", "n8192-d64-bf16-causal+window127+sinks-gqa8"]),
        ("deepseek-v3", ["n4096-d192x128-bf16-causal"]),
    ],
)
def test_a_search_of_a_model_is_of_its_problems(words: str, wanted: list[str]) -> None:
    assert labels("--model", *words.split()) == wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "lama-3-8b"), "unknown model 'lama-3-8b': did you mean llama-3-8b"),
        (("--model", "zzz"), "unknown model 'zzz': flashtune show --models lists them"),
        (("--model", "gpt2", "--d", "64"), "--d was given together with --model gpt2"),
        (("--model", "gpt2", "--sinks"), "--sinks was given together with --model gpt2"),
        (("--model", "gpt2", "--full"), "--full was given together with --model gpt2"),
        (("--model", "bert-base", "--n-q", "1"), "--n-q 1 was given for bert-base, which writes no text"),
        ((), "neither --d nor --model was given"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_said(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        labels(*words)


def test_show_lists_them_and_profile_takes_one() -> None:
    shown = flashtune("show", "--models", "--json")
    assert {row["slug"] for row in json.loads(shown.output)} == models().keys()
    assert "deepseek-v3" in flashtune("show", "--models").output
    counted = flashtune("profile", "--model", "llama-3-8b", "--n", "1024", "--gpu-name", "a100", "--json")
    assert counted.exit_code == 0, counted.output
    problem = json.loads(counted.output[counted.output.index("{") :])["problem"]
    assert (problem["heads"], problem["kv_heads"], problem["n"], problem["d"]) == (32, 8, 1024, 128)


def test_show_says_which_attentions_are_measured_and_what_serves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "some.sqlite"
    with Store.open(shipped_path(), writable=False) as shipped, Store.open(path, writable=True) as some:
        for result in shipped.results():
            if result.gpu == "h200" and (result.problem.d, result.problem.n_q, result.problem.n_kv) == (96, 1, 4096):
                some.save(result)
    words = ("show", "--models", "--gpu-name", "h200", "--db", str(path))
    found = {row["slug"]: row["attentions"] for row in json.loads(flashtune(*words, "--json").output)}
    prefill, step = found["phi-3-mini"][0]["served"]
    assert (prefill["n_q"], prefill["kind"]) == (4096, "default"), "torch has no windows"
    assert (step["n"], step["n_q"], step["kind"], step["estimated_loss"]) == (4096, 1, "exact", None)
    assert [one["n_q"] for one in found["whisper-tiny"][2]["served"]] == [448], "crossing takes no step"
    assert found["bert-base"][0]["served"][0]["kind"] == "framework"
    table = flashtune(*words).output
    assert "measured" in table and "torch" in table and "untuned" in table
    assert "served" not in json.loads(flashtune("show", "--models", "--json").output)[0]["attentions"][0]


def test_models_are_listed_by_head_size_and_length_and_other_options_are_refused_by_name() -> None:
    found = json.loads(flashtune("show", "--models", "--d", "64", "--n", "8192", "--json").output)
    assert {row["slug"] for row in found} == {
        model.slug for model in models().values() if any(kind.d == 64 and 8192 in kind.n for kind in model.attentions)
    }
    assert found and all((kind["d"], kind["n"]) == (64, [8192]) for row in found for kind in row["attentions"])
    assert "no models match" in flashtune("show", "--models", "--d", "63").output
    for words in (("--source", "measured"), ("--dtype", "fp16"), ("--wide",), ("--db", "some.sqlite")):
        refused = flashtune("show", "--models", *words)
        assert refused.exit_code == 2 and len(refused.stderr.splitlines()) == 1, refused.output
        assert f"{words[0]} was given together with --models" in refused.stderr


def of_class(name: str) -> list[tuple[object, ...]]:
    """(heads, kv heads, D) by a configuration's or model's defaults, without what it doesn't say."""
    # Not at the top: every worker collects this file, and few run it.
    import diffusers
    import transformers

    if hasattr(diffusers, name):
        defaults = getattr(diffusers, name).__init__
        words = {key: value.default for key, value in inspect.signature(defaults).parameters.items()}
        if name == "FluxTransformer2DModel":
            return [(words["num_attention_heads"],) * 2 + (words["attention_head_dim"],)]
        heads = words["attention_head_dim"]
        return [(heads, heads, width // heads) for width in words["block_out_channels"][:3]]
    config = getattr(transformers, name)()
    heads = config.num_attention_heads
    if name == "DeepseekV3Config":
        return [(heads, config.num_key_value_heads, config.qk_nope_head_dim + config.qk_rope_head_dim)]
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    return [(heads, getattr(config, "num_key_value_heads", None) or heads, d)]


CLASSES = [
    (model, found[1])
    for model in models().values()
    for source in model.sources
    if (found := re.match(r"(\w+) of (?:transformers|diffusers)", source))
]


@pytest.mark.parametrize(("model", "name"), CLASSES, ids=lambda value: value if isinstance(value, str) else value.slug)
def test_figures_with_a_class_as_their_source_are_its_defaults(model: Model, name: str) -> None:
    import diffusers
    import transformers

    kinds = {(kind.heads, kind.kv_heads, kind.d) for kind in model.attentions}
    said = of_class(name)
    assert set(said) <= kinds and (kinds <= set(said) or len(model.sources) > 1)
    config = None if hasattr(diffusers, name) else getattr(transformers, name)()
    windows = {kind.window for kind in model.attentions} - {None}
    if name in ("MistralConfig", "Gemma2Config", "GptOssConfig"):
        assert windows == {config.sliding_window} and find_model(model.name) is model
