"""Padding-free training of transformers: sequences in one row of a batch are as each alone, by their bounds and by their positions."""

import copy
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tiny_models import cache_argument, made, static_cache_fails

from flashtune import dispatch
from flashtune.core.problems.tolerances import TOLERANCES
from flashtune.core.system.errors import InputError
from flashtune.core.system.versions import minor

# Not else: every worker collects this file, and few run it.
if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")
MODELS = ("llama", "mistral", "gemma2", "gpt_oss", "qwen3", "gpt2")
LENGTHS = (5, 11, 1, 9)
TOKENS = torch.randint(1, 61, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
BOUND = TOLERANCES["fp32"]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> "PreTrainedModel":
    from flashtune.integrations import transformers as tuned

    found = made(request.param)
    found.set_attn_implementation(tuned.register())
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Positional arguments of the packed calls, in order."""
    found: list[Any] = []
    attend = dispatch.attention_varlen
    monkeypatch.setattr(dispatch, "attention_varlen", lambda *given, **options: found.append(given) or attend(*given, **options))
    return found


def collated(way: str, tokens: torch.Tensor = TOKENS) -> dict[str, Any]:
    """A flattened batch as transformers' collator makes it; `way` is what tells of its sequences, a cache beside it or not."""
    from transformers import DataCollatorWithFlattening

    collator = DataCollatorWithFlattening(return_flash_attn_kwargs="bounds" in way)
    batch = collator([{"input_ids": part.tolist()} for part in tokens[0].split(LENGTHS)], return_tensors="pt")
    if way == "bounds alone":
        del batch["position_ids"]
    return {name: x for name, x in batch.items() if name != "labels"} | {"use_cache": "cache" in way}


def note_reads(monkeypatch: pytest.MonkeyPatch, read: list[str]) -> None:
    """Note by which rule positions are read."""
    from flashtune.integrations import flattened

    for rule in ("steps", "restarts"):
        computed = getattr(flattened, f"_by_{rule}")

        def noted(positions: torch.Tensor, rule: str = rule, computed: Any = computed) -> Any:
            read.append(rule)
            return computed(positions)

        monkeypatch.setattr(flattened, f"_by_{rule}", noted)


WAYS = pytest.mark.parametrize("way", ["bounds and positions", "bounds beside a cache", "positions", "positions beside a cache"])


def logits_of(model: "PreTrainedModel", **batch: Any) -> torch.Tensor:
    found: torch.Tensor = model(**batch).logits[0]
    return found


def alone(model: "PreTrainedModel", tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """Logits of each sequence by itself, one after the other."""
    return torch.cat([logits_of(model, input_ids=part, use_cache=False) for part in tokens.split(LENGTHS, 1)])


def gradients(model: "PreTrainedModel", logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@WAYS
def test_logits_and_gradients_are_those_of_each_sequence_alone(model: "PreTrainedModel", way: str, calls: list[Any]) -> None:
    flat = logits_of(model, **collated(way))
    assert len(calls) == model.config.num_hidden_layers, "every layer is a packed call"
    found = gradients(model, flat)
    separate = alone(model)
    assert (flat - separate).norm() < BOUND.relative_norm * separate.norm()
    torch.testing.assert_close(flat, separate, atol=BOUND.atol * float(separate.abs().max()), rtol=BOUND.rtol)
    wanted = gradients(model, separate)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, atol=BOUND.atol * scale + 1e-9, rtol=BOUND.rtol, msg=name)


@WAYS
@torch.no_grad()
def test_a_sequence_changes_no_bit_of_its_neighbours(model: "PreTrainedModel", way: str) -> None:
    other = TOKENS.clone()
    other[0, LENGTHS[0] : sum(LENGTHS[:2])] = 61 - other[0, LENGTHS[0] : sum(LENGTHS[:2])]
    before, after = (logits_of(model, **collated(way, tokens)).split(LENGTHS) for tokens in (TOKENS, other))
    assert [torch.equal(x, y) for x, y in zip(before, after, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize("model", ["gemma2"], indirect=True)
def test_positions_are_read_once_a_step_and_given_bounds_never(
    model: "PreTrainedModel", calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    read: list[str] = []
    note_reads(monkeypatch, read)
    batch = collated("positions")
    logits_of(model, **batch).sum().backward()
    # Versions before 5.23 number the sequences for each kind of mask anew.
    once = ["steps"] * (1 if minor(transformers.__version__) >= (5, 23) else 2)
    assert read == once, "of masks of both kinds and two layers"
    assert len({id(given[3]) for given in calls}) == len(once) and all(given[5:] == (11, 11) for given in calls)
    batch["position_ids"] = torch.cat([torch.arange(n) for n in (5, 12, 9)])[None]
    logits_of(model, **batch)
    batch["position_ids"][0, 5:] = torch.arange(21)
    logits_of(model, **batch)
    assert read == once * 3 and calls[-1][3].tolist() == [0, 5, 26], "positions that were written are read again"
    for way in ("bounds and positions", "bounds beside a cache", "bounds alone"):
        logits_of(model, **collated(way))
    assert read == once * 3


def test_a_graph_that_is_captured_after_a_warm_up_keeps_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtune.integrations import flattened

    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert flattened.bounds_at_restarts(positions, 5, 0) is not None
    monkeypatch.setattr(flattened, "capturing", lambda _device: True)
    assert flattened.bounds_at_restarts(positions, 5, 1) is None


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@pytest.mark.parametrize("written", ["in inference mode", "by another library"])
@torch.no_grad()
def test_positions_that_are_written_unseen_are_read_once_a_step(
    model: "PreTrainedModel", written: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their version doesn't tell, as of what collectives write."""
    read: list[str] = []
    note_reads(monkeypatch, read)
    with torch.inference_mode(written == "in inference mode"):
        for way, rule in (("positions", "steps"), ("positions beside a cache", "restarts")):
            batch = collated(way)
            for bounds in ([0, 5, 17, 26], [0, 9, 26]):
                batch["position_ids"].numpy()[0] = np.concatenate([np.arange(n) for n in np.diff(bounds)])
                logits_of(model, **batch)
                assert calls[-1][3].tolist() == bounds
            assert read == [rule] * 2
            read.clear()


def checkpointed(model: "PreTrainedModel") -> "PreTrainedModel":
    """A copy in training that computes its layers again in a backward."""
    model = copy.deepcopy(model).train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_what_is_computed_again_in_a_backward_reads_no_positions(model: "PreTrainedModel", monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    note_reads(monkeypatch, read)
    logits_of(checkpointed(model), **collated("positions")).sum().backward()
    assert read == ["steps"]


@pytest.mark.parametrize("model", ["llama"], indirect=True)
@torch.no_grad()
def test_one_sequence_is_no_packed_call(model: "PreTrainedModel", calls: list[Any]) -> None:
    for words in ({}, {"position_ids": torch.arange(26)[None] + 7}, {"use_cache": True}, {"attention_mask": torch.ones_like(TOKENS)}):
        logits_of(model, input_ids=TOKENS, **{"use_cache": False, **words})
    model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert not calls


@pytest.mark.parametrize("model", ["llama", "gemma2"], indirect=True)
def test_autocast_and_checkpoints_change_nothing(model: "PreTrainedModel", calls: list[Any]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        flat, separate = logits_of(model, **collated("positions")), alone(model)
    assert {given[0].dtype for given in calls} == {torch.float32}, "rotary positions are in float32"
    assert (flat - separate).norm() < 2 * TOLERANCES["bf16"].relative_norm * separate.norm()
    wanted = gradients(model, logits_of(model, **collated("positions")))
    again = checkpointed(model)
    found = gradients(again, logits_of(again, **collated("positions")))
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("model", ["mistral"], indirect=True)
@torch.no_grad()
def test_several_rows_of_sequences_are_packed_together(model: "PreTrainedModel", calls: list[Any]) -> None:
    rows = TOKENS.view(2, 13)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((4, 9), (6, 7))])
    found = model(input_ids=rows, position_ids=positions, use_cache=False).logits
    assert calls[0][3].tolist() == [0, 4, 13, 19, 26] and calls[0][5] == 9
    parts = [row[None] for tokens, cut in zip(rows, (4, 6), strict=True) for row in (tokens[:cut], tokens[cut:])]
    wanted = torch.cat([logits_of(model, input_ids=part, use_cache=False) for part in parts])
    torch.testing.assert_close(found.flatten(0, 1), wanted, atol=BOUND.atol * float(wanted.abs().max()), rtol=BOUND.rtol)


@torch.no_grad()
def test_a_window_that_attention_isnt_told_stays_in_the_mask(calls: list[Any]) -> None:
    from flashtune.integrations import transformers as tuned

    model = made("qwen2_moe")
    wanted = logits_of(model, **collated("positions"))
    model.set_attn_implementation(tuned.register())
    found = logits_of(model, **collated("positions"))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def static(model: "PreTrainedModel", longest: int) -> dict[str, Any]:
    from transformers import StaticCache

    return {cache_argument(model): StaticCache(model.config, max_cache_len=longest)}


IN_MASKS = ("qwen2_moe", "llama4")
"""Models whose attention isn't told of its windows or chunks."""


@pytest.mark.parametrize("name", [*IN_MASKS, "gemma2", "mistral"])
@pytest.mark.parametrize("way", ["bounds and positions", "bounds beside a cache", "bounds alone", "positions", "positions beside a cache"])
@torch.no_grad()
def test_windows_and_chunks_of_some_layers_are_of_each_sequence_like_all_others(name: str, way: str) -> None:
    import transformers

    from flashtune.integrations import transformers as tuned

    model = made(name)
    # Llama 4 gives its attention no positions, so that beside a cache no layer knows of sequences.
    unknown = name == "llama4" and way == "positions beside a cache"
    wanted = logits_of(model, **collated(way)) if unknown else alone(model)
    if name == "llama4" and way == "positions":
        right = torch.allclose(logits_of(model, **collated(way)), wanted, atol=1e-4)
        assert right == (minor(transformers.__version__) >= (5, 23)), "docs/support.md says which versions are wrong"
    model.set_attn_implementation(tuned.register())
    for cache in [{}, static(model, 26), static(model, 40)] if "cache" in way else [{}]:
        found = logits_of(model, **collated(way), **cache)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", IN_MASKS)
@torch.no_grad()
def test_windows_and_chunks_of_whole_rows_are_the_models_own(name: str) -> None:
    from flashtune.integrations import transformers as tuned

    model = made(name)
    tokens = torch.randint(1, 61, (2, 23), generator=torch.Generator().manual_seed(5))
    padded = torch.ones_like(tokens)
    padded[1, :5] = 0
    calls = [{}, {"attention_mask": padded}, {"use_cache": True}, {"use_cache": True, "attention_mask": padded}]
    wanted = [model(tokens, **{"use_cache": False, **words}).logits for words in calls]
    words = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    continued = model.generate(tokens, **words)
    model.set_attn_implementation(tuned.register())
    for given, one in zip(calls, wanted, strict=True):
        found = model(tokens, **{"use_cache": False, **given}).logits
        seen = padded.bool() if "attention_mask" in given else torch.ones_like(padded, dtype=torch.bool)
        torch.testing.assert_close(found[seen], one[seen], atol=1e-4, rtol=1e-4)
    assert torch.equal(model.generate(tokens, **words), continued)
    if static_cache_fails(name):
        for implementation in ("eager", "sdpa", tuned.NAME):
            model.set_attn_implementation(implementation)
            with pytest.raises(TypeError, match=r"create_chunked_causal_mask\(\) got an unexpected keyword argument 'block_sequence_ids'"):
                model.generate(tokens, **words, cache_implementation="static")
    else:
        assert torch.equal(model.generate(tokens, **words, cache_implementation="static"), continued)


@pytest.mark.parametrize(("batch", "lengths"), [(1, (5, 11, 1, 9)), (2, (13, 13)), (1, (26,)), (1, (0, 7, 14, 0, 5))])
def test_chunks_begin_with_each_sequence(batch: int, lengths: tuple[int, ...]) -> None:
    from flashtune.integrations import flattened

    ends = np.cumsum((0, *lengths))
    cu = torch.tensor(ends, dtype=torch.int32)
    for chunk in (1, 3, 7, 26, 99):
        bounds = None if batch == 2 else flattened.Bounds(cu, cu, max(lengths), max(lengths))
        found = flattened.bounds_of_chunks(bounds, chunk, batch, 26 // batch, cu.device)
        wanted = sorted({at for start, end in itertools.pairwise(ends) for at in range(start, end, chunk)} | {26})
        assert sorted(set(found.cu_q.tolist())) == wanted and found.cu_q.tolist() == sorted(found.cu_q.tolist())
        assert found.longest_q >= int(np.diff(wanted).max())


def test_a_band_of_one_key_and_integers_of_others_are_no_bands() -> None:
    from flashtune.integrations import flattened

    for band in ("window", "chunks"):
        assert flattened.band_as_mask(band, 1, "cpu") is None
        said = flattened.band_as_mask(band, 5, "cpu")
        assert said is not None and flattened.band_in_mask(said) == (band, 5) == flattened.band_in_mask(said.clone())
    for other in (torch.ones(1, 1, 1, 5), torch.ones(1, 1, 4, 5).short(), torch.ones(2, 1, 1, 5).short(), torch.ones(1, 5).short()):
        assert flattened.band_in_mask(other) is None


def test_models_that_change_their_masks_get_whole_ones() -> None:
    import transformers
    from transformers.masking_utils import create_causal_mask

    from flashtune.integrations import transformers as tuned

    positions = collated("positions")["position_ids"]
    for name, shape in (("Llama", (1, 26, 1, 1)), ("Falcon", (1, 1, 26, 26))):
        config, _ = getattr(transformers, f"{name}Config")(), getattr(transformers, f"{name}Model")
        config._attn_implementation = tuned.register()
        mask = create_causal_mask(config, torch.zeros(1, 26, 32), None, None, position_ids=positions)
        assert mask is not None and mask.shape == shape


def test_bounds_windows_and_position_biases_of_plain_calls(calls: list[Any]) -> None:
    from flashtune.integrations import flattened
    from flashtune.integrations import transformers as tuned

    q, k = torch.randn(1, 4, 26, 16), torch.randn(1, 2, 26, 16)
    bounds = torch.tensor([0, 5, 16, 17, 26], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None, :, None, None]
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": torch.tensor(11), "max_length_k": torch.tensor(11)}
    module = torch.nn.Module()
    same = flattened.whole_mask(positions, None).tril() | flattened.whole_mask(positions, None).mT
    near = torch.ones(26, 26, dtype=torch.bool).triu(-3)
    attend = torch.nn.functional.scaled_dot_product_attention
    for causal, seen in ((True, same.tril() & near), (False, same & near & near.T)):
        out, _ = tuned.attention_forward(module, q, k, k, None, sliding_window=4, is_causal=causal, **lengths)
        torch.testing.assert_close(out, attend(q, k, k, seen, enable_gqa=True).transpose(1, 2), atol=BOUND.atol, rtol=BOUND.rtol)
    assert len(calls) == 2
    bias = torch.randn(1, 4, 26, 26)
    for whole in (near, torch.zeros(26, 26).masked_fill(~near, -torch.inf)):
        out, _ = tuned.attention_forward(module, q, k, k, whole[None, None], **lengths)
        torch.testing.assert_close(out, attend(q, k, k, same & near, enable_gqa=True).transpose(1, 2), atol=BOUND.atol, rtol=BOUND.rtol)
    out, _ = tuned.attention_forward(module, q, k, k, None, sliding_window=4, position_bias=bias, **lengths)
    wanted = attend(q, k, k, bias.masked_fill(~(same.tril() & near), -torch.inf), enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=BOUND.atol, rtol=BOUND.rtol)
    out, _ = tuned.attention_forward(module, q, k, k, positions, sliding_window=4, position_bias=bias)
    wanted = attend(q, k, k, bias.masked_fill(~(same.tril() & near), -torch.inf), enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=BOUND.atol, rtol=BOUND.rtol)


@pytest.mark.parametrize("shape", [(1, 1, 1, 26), (1, 1, 26, 26)])
def test_integers_of_a_caller_are_no_positions(shape: tuple[int, ...]) -> None:
    from flashtune.integrations import transformers as tuned

    q = torch.randn(1, 4, 26, 16)
    with pytest.raises(InputError, match=r"attention_mask has four dimensions and dtype torch\.int64: use bool"):
        tuned.attention_forward(torch.nn.Module(), q, q, q, torch.ones(shape, dtype=torch.int64))


@pytest.mark.parametrize("model", ["mistral"], indirect=True)
@torch.no_grad()
def test_a_compiled_model_reads_bounds_and_separates_positions(model: "PreTrainedModel") -> None:
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    wanted = alone(model)
    for way in ("bounds and positions", "positions"):
        found = logits_of(compiled, **collated(way))
        torch.testing.assert_close(found, wanted, atol=BOUND.atol * float(wanted.abs().max()), rtol=BOUND.rtol)


@pytest.mark.parametrize("shape", [(2, 1, 13, 13), (2, 1, 13, 20), (1, 1, 1, 20), (2, 4, 1, 13)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_bounds_hold_beside_whole_masks_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from flashtune.integrations import transformers as tuned

    q, k = torch.randn(2, 4, 13, 16), torch.randn(2, 2, shape[-1], 16)
    cu = torch.tensor([0, 4, 13, 19, 26], dtype=torch.int32)
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + torch.eye(13, shape[-1]) > 0.3
    seen = seen if shape[2] > 1 else torch.ones(shape, dtype=torch.bool)
    given = seen if dtype == torch.bool else torch.zeros(shape).masked_fill(~seen, -torch.inf)
    words = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 9, "max_length_k": 9}
    out, _ = tuned.attention_forward(torch.nn.Module(), q, k, k, given, **words)
    # Rows of a static cache that aren't written yet are nobody's.
    same = torch.stack([torch.block_diag(torch.ones(n, n), torch.ones(13 - n, 13 - n)) for n in (4, 6)])
    same = torch.nn.functional.pad(same, (0, shape[-1] - 13)).bool()[:, None]
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, same & seen, enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=BOUND.atol, rtol=BOUND.rtol)


def test_bounds_of_keys_in_a_cache_hold_beside_whole_masks() -> None:
    from flashtune.integrations import transformers as tuned

    q, k = torch.randn(2, 2, 1, 16), torch.randn(2, 2, 9, 16)
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (1, 9))
    words = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k, "max_length_q": 1, "max_length_k": 9}
    seen = torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(2)) > 0.5
    out, _ = tuned.attention_forward(torch.nn.Module(), q, k, k, seen, **words)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, k, seen)
    torch.testing.assert_close(out, wanted.transpose(1, 2), atol=BOUND.atol, rtol=BOUND.rtol)
