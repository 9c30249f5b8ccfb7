"""Padding-free training steps of a Llama-shaped model of transformers, beside the same sequences in a padded batch with SDPA.

A step is forward, loss, backward and update, on sequences whose lengths follow a law (drawn with a fixed seed) and leave a share of the
padded batch empty. Padded batches have a mask of padding, by SDPA (`padded sdpa`) and by ours (`padded ours`). Flattened ones have all
sequences in one row: by ours with the bounds that transformers' collator returns (`flattened ours`) and with positions alone
(`flattened positions`), and by PyTorch's varlen_attn (`flattened torch`). All train one model in turns, and have one first loss.

Prints a line for each head size, `ratio` being the median of `padded sdpa` over that of `flattened ours`, and writes padding_free.json.
"""

import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.shared import turns
from benchmarks.shared.environment import argument_parser, numbers_of, this_gpu
from flashtune.core.problems.lengths import LAWS, Law, Lengths
from flashtune.integrations import transformers as tuned

PADDED, FLATTENED, POSITIONS = "padded", "flattened, with bounds", "flattened, by positions"
"""Kinds of batches."""

WAYS = {
    "padded sdpa": (PADDED, "sdpa"),
    "padded ours": (PADDED, tuned.NAME),
    "flattened ours": (FLATTENED, tuned.NAME),
    "flattened positions": (POSITIONS, tuned.NAME),
    "flattened torch": (FLATTENED, "varlen_of_torch"),
}
"""The batch and the attention of each way."""

APART = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Share by which first losses may differ."""


def lengths_of(law: Law, sequences: int, longest: int, padding: float) -> tuple[int, ...]:
    """Lengths of sequences that leave this share of a batch empty whose rows are as long as the longest."""
    tokens = round((1.0 - padding) * sequences * longest)
    return Lengths(law=law, longest=longest).drawn(sequences, tokens)


def batches(lengths: tuple[int, ...], vocabulary: int, device: str) -> dict[str, dict[str, Any]]:
    """Batches of every kind, with labels, of random sequences of these lengths."""
    from transformers import DataCollatorWithFlattening

    drawn = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, vocabulary, (n,), generator=drawn) for n in lengths]
    tokens, labels = (torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value) for value in (0, -100))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    found: dict[str, dict[str, Any]] = {PADDED: {"input_ids": tokens, "labels": labels, "attention_mask": mask}}
    for kind, bounds in ((FLATTENED, True), (POSITIONS, False)):
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)
        found[kind] = dict(collator([{"input_ids": x} for x in sequences], return_tensors="pt"))
    return {kind: {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()} for kind, batch in found.items()}


def torchs_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *, scaling: float | None = None, **words: Any
) -> tuple[torch.Tensor, None]:
    """PyTorch's packed attention with the signature of transformers' modules."""
    from torch.nn.attention.varlen import varlen_attn

    bounds = [words[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")]
    # Earlier versions share key heads without being told.
    told = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out: Any = varlen_attn(q, k, v, *bounds, scale=scaling, window_size=(-1, 0), **told)
    return out[None], None


def model_of(given: Any, d: int) -> Any:
    """The model of these sizes, in training, with weights of a fixed seed."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=given.hidden, intermediate_size=given.hidden * 11 // 4, num_hidden_layers=given.layers, head_dim=d,
        num_attention_heads=given.heads, num_key_value_heads=given.kv_heads, vocab_size=given.vocabulary,
        max_position_embeddings=given.longest,
    )  # fmt: skip
    transformers.AttentionInterface.register("varlen_of_torch", torchs_attention)
    tuned.register()
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(given.device, dtype_of(given)).train()


def dtype_of(given: Any) -> torch.dtype:
    """Element type: that of training on a GPU, and one that a CPU has products for."""
    return torch.float32 if given.device == "cpu" else torch.bfloat16


def steps(model: Any, of: dict[str, dict[str, Any]], update: str) -> dict[str, Callable[[], float]]:
    """A whole step of each way, which returns its loss without a wait for it."""
    parameters = list(model.parameters())
    made: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-4, foreach=True),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-5, foreach=True),
    }
    optimizer = made[update]()

    def step(way: str) -> Any:
        kind, implementation = WAYS[way]
        model.config._attn_implementation = implementation
        loss = model(**of[kind], use_cache=False).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return {way: functools.partial(step, way) for way in WAYS}


def first_losses(calls: dict[str, Callable[[], Any]], device: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Loss, seconds and, on a GPU, peak memory in GiB of each way's first steps; and why the others can't run."""
    found, notes = {}, {}
    for way, call in calls.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        try:
            found[way] = {"loss": float(call()), "seconds": time.perf_counter() - started}
        except Exception as error:
            if way != "flattened torch":
                raise
            notes[way] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        else:
            if device == "cuda":
                found[way]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found, notes


def row(given: Any, d: int) -> dict[str, Any]:
    """Milliseconds of a step by every way, and the ratio."""
    lengths = lengths_of(given.law, given.sequences, given.longest, given.padding)
    of = batches(lengths, given.vocabulary, given.device)
    # Without updates the first losses are of the same weights.
    model = model_of(given, d)
    first, notes = first_losses(steps(model, of, "none"), given.device)
    losses = {way: one["loss"] for way, one in first.items()}
    if max(losses.values()) - min(losses.values()) > APART[dtype_of(given)] * min(losses.values()):
        raise ValueError(f"the same sequences have different losses: {losses}")
    calls = {way: call for way, call in steps(model, of, given.update).items() if way in first}
    times = turns.medians(turns.timed_in_turns(calls, rounds=given.rounds, repeats=given.repeats, device=given.device))
    empty = 1.0 - sum(lengths) / (len(lengths) * max(lengths))
    return {
        "d": d, "law": given.law, "lengths": list(lengths), "padding": empty, "update": given.update,
        "ms": {way: time / 1e3 for way, time in times.items()},
        "ratio": times["padded sdpa"] / times["flattened ours"],
        "beside torch's varlen_attn": times["flattened torch"] / times["flattened ours"] if "flattened torch" in times else None,
        "first": first, "notes": notes,
    }  # fmt: skip


def main() -> None:
    """Time steps at the head sizes that are named."""
    parser = argument_parser(__doc__)
    parser.add_argument("--d", type=numbers_of, default=(64,), help="head sizes, with commas between them (default: 64)")
    parser.add_argument("--law", choices=LAWS, default="uniform", help="law of lengths (default: %(default)s)")
    parser.add_argument("--padding", type=float, default=0.43, help="share of the padded batch that is empty (default: %(default)s)")
    sizes = {"sequences": 16, "longest": 2048, "hidden": 1024, "layers": 12, "heads": 16, "kv-heads": 4, "vocabulary": 32000}
    for name, size in {**sizes, "rounds": 7, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="(default: %(default)s)")
    parser.add_argument("--update", choices=("none", "sgd", "adamw"), default="adamw", help="of the weights (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a head size is given up (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu for a look at small sizes (default: %(default)s)")
    given = parser.parse_args()
    if given.device == "cuda":
        this_gpu()

    def rows() -> Iterator[dict[str, Any]]:
        for d in given.d:
            yield from turns.guarded({"d": d}, functools.partial(row, given, d), limit_s=given.limit)

    turns.report("padding_free", {"steps": rows})
