"""transformers: `register()` makes dispatch.attention an attention implementation that models select by name.

    from flashtune.integrations import transformers as tuned

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=tuned.register())

Padding-free batches (DataCollatorWithFlattening) are packed sequences then, forward and backward: nothing else has to be said.

Importing this module imports transformers (5.14 or newer).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, prepare_padding_mask, sdpa_mask
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.core.system.versions import LOWEST_TRANSFORMERS, minor
from flashtune.integrations import flattened
from flashtune.integrations.sources import arguments_of_attention, attends_itself

NAME = "tuned_attention"
"""Default name for `attn_implementation`."""

_MEANT_OTHERWISE = ("flash", "flex", "sdpa", "eager", "|", "/")
"""Parts of a name that transformers interprets itself, wherever they occur: "flash", for one, is fetched from the hub."""

logger = logging.get_logger(__name__)


def register(name: str = NAME) -> str:
    """Register dispatch.attention and its masks with transformers under `name`, for all models of this process; returns the name.

    Pass it to `from_pretrained(..., attn_implementation=name)` or `model.set_attn_implementation(name)`. Calling it again changes nothing.
    A model that computes its attention itself (Bloom, XGLM) goes on doing so, with the mask that its code reads, and a warning says so.

    Raises InputError for a name that transformers interprets otherwise, EnvironmentProblem where transformers is too old.
    """
    meant = [word for word in _MEANT_OTHERWISE if word in name.lower()]
    if meant or not name:
        what = f"transformers gives {meant[0]!r} in the name {name!r} a meaning of its own" if meant else "the name is empty"
        raise InputError(f"{what}: take another, {NAME!r} for example")
    if minor(transformers.__version__) < minor(LOWEST_TRANSFORMERS):
        raise EnvironmentProblem(
            f"transformers {transformers.__version__} builds masks in an older way: install transformers {LOWEST_TRANSFORMERS} or newer"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    return name


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> torch.Tensor | None:
    """Mask for `attention_forward`, in a reduced form; the arguments are transformers' (AttentionMaskInterface).

    Causal attention and sliding windows are left to the kernel. Returns the rest:
        None: nothing is padded.
        (B, n) boolean: True for each of the first n keys that counts. Keys from n on don't exist yet, as in a static cache.
        (B, N, 1, 1) integers: positions of causal sequences that are flattened into rows; each sees itself alone.
        (1, 1, 1, size), (1, 1, size, 1) of int16: a window, or chunks, that the model leaves to its mask; nothing is padded.
        (B, 1, N_q, N_kv) boolean: the whole mask, for any other rule; also where a position is known on the GPU alone.
        (B, 1, N_q, N_kv) floating-point: 0 and the least number, for a model that computes its attention itself.
    """
    if config is not None and attends_itself(type(config).__module__):
        logger.warning_once(f"{type(config).__name__}'s model computes its attention itself: no registered implementation can run it")
        place: Any = q_offset
        return eager_mask(  # type: ignore[no-any-return]
            batch_size, q_length, kv_length, place, kv_offset, mask_function, attention_mask=attention_mask, device=device, **others
        )
    if attention_mask is None and q_length == kv_length:
        chunk = local_size if local_size == getattr(config, "attention_chunk_size", None) else None
        mask_function = flattened.chunks_by_sequence(mask_function, q_length, chunk)
    everything: Callable[[], torch.Tensor | None] = functools.partial(
        sdpa_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size, False, False,
        device=device, **others,
    )  # fmt: skip
    if attention_mask is None and q_length == kv_length and not is_tracing():
        positions = flattened.positions_as_mask(
            mask_function, local_size if _window_reaches(local_size, kv_length, config) else None, config
        )
        if positions is not None:
            return positions
    left, band = _left_to_the_kernel(mask_function, local_size, kv_length, kv_offset, config)
    if allow_is_causal_skip and left:
        if isinstance(q_offset, torch.Tensor):
            if is_tracing(q_offset):
                return everything()
            q_offset = int(q_offset)
        seen = q_offset + q_length - kv_offset
    elif allow_is_bidirectional_skip and mask_function is bidirectional_mask_function:
        seen = kv_length
    else:
        return everything()
    if not q_length <= seen <= kv_length and mask_function is not bidirectional_mask_function:
        return everything()
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        if kv_offset or padding.shape[1] != seen:
            padding = padding[:, kv_offset : kv_offset + seen]
        if is_tracing(padding) or padding.is_meta or not padding.all():
            # A model may pass the mask back in to be made again, without the offset of the keys.
            return everything() if kv_offset or band is not None else padding
    if band is not None:
        # A compiler can't cut chunks, and chunks of a cache began before its first key.
        cut = band == "window" or not (kv_offset or kv_length > q_length or is_tracing() or torch.device(device).type == "meta")
        said = flattened.band_as_mask(band, local_size, device) if cut and local_size and seen == kv_length else None
        return everything() if said is None else said
    return None if seen == kv_length else torch.ones((1, 1), dtype=torch.bool, device=device).expand(batch_size, seen)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the signature of transformers' modules: query (B, Hq, N_q, D), key (B, Hkv, N_kv, D), value (B, Hkv, N_kv, D_v).

    Key heads aren't repeated. Returns (B, N_q, Hq, D_v), and no weights.

    `attention_mask` is a result of this module's `attention_mask`, or a caller's own of four dimensions, boolean or added to the scores.
    `sliding_window` counts the query's own key. `s_aux` (Hq,) are attention sinks: one more logit for each head, with no value behind it.
    `position_bias` is added to the scores.

    Sequences that are flattened into one row, as DataCollatorWithFlattening makes it, are packed sequences (`dispatch.attention_varlen`),
    and no mask is made. `cu_seq_lens_q` and `cu_seq_lens_k`, where each begins, with `max_length_q` and `max_length_k` say so without a
    wait for the GPU (return_flash_attn_kwargs=True). Without them `position_ids` that begin again do, where there is no padding: the host
    waits for them once a step; under a compiler only a mask from transformers tells.

    Raises InputError for a paged cache, and for a mask of four dimensions with integers.
    """
    if cache is not None:
        raise InputError(
            "continuous batching keeps its keys in pages, which dispatch.attention doesn't read: use attn_implementation='sdpa'"
        )
    if others.get("output_attentions"):
        logger.warning_once("tuned attention computes no attention weights: output_attentions=True needs attn_implementation='eager'")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    sinks = None if s_aux is None else s_aux.float()
    mask, window, chunk = _read(attention_mask, sliding_window)
    if attention_mask is not None and attention_mask.dim() == 2:
        n = attention_mask.shape[1]
        key, value = key[:, :, :n], value[:, :, :n]
        position_bias = None if position_bias is None else position_bias[..., :n]
    bounds = _bounds(module, query, key, mask, chunk, causal, others)
    reduced = mask is None or mask.dim() == 2 or flattened.is_positions(mask)
    if bounds is not None and position_bias is None and reduced:
        left = None if window is None else window - 1
        options = {"window_size": (left, 0 if causal else left), "dropout_p": dropout, "scale": scaling, "softcap": softcap or 0.0}
        return _packed(query, key, value, bounds, sinks=sinks, **options), None
    band = None
    if bounds is None if mask is None else mask.dim() == 2:
        # Masks of four dimensions include the diagonal.
        band = (None if window is None else window - 1, 0) if causal else None
        mask = None if mask is None else mask[:, None, None]
    else:
        mask = _whole(_of_band(query, key, window, causal) if mask is None else mask, window, bounds, key.shape[2], query)
    if position_bias is not None:
        mask = reference.joined(position_bias.to(query.dtype), mask)
    shared = query.shape[1] != key.shape[1]
    # Positional where possible: keyword arguments cost the host more.
    out = dispatch.attention(
        query, key, value, mask, dropout, False, scaling, shared, window=band, softcap=softcap or 0.0,
        causal_alignment="bottom_right", sinks=sinks,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _read(mask: torch.Tensor | None, window: int | None) -> tuple[torch.Tensor | None, int | None, int | None]:
    """A mask without the band that it says, and the window and the size of chunks that attention has then."""
    if mask is None:
        return None, window, None
    # Stride 0 over columns means that all are True: nothing is padded.
    if mask.dim() == 2:
        return (mask if mask.stride(1) else None), window, None
    band = flattened.band_in_mask(mask)
    if band is None:
        return mask, window, None
    return (None, band[1], None) if band[0] == "window" else (None, None, band[1])


def _whole(mask: torch.Tensor, window: int | None, bounds: flattened.Bounds | None, keys: int, query: torch.Tensor) -> torch.Tensor:
    """A mask of four dimensions as dispatch.attention takes it, in which sequences are separate where bounds are known."""
    if flattened.is_positions(mask):
        return flattened.whole_mask(mask, window)
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise InputError(f"attention_mask has four dimensions and dtype {mask.dtype}: use bool, or floats that are added to the scores")
    mask = mask[..., :keys]
    mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    return mask if bounds is None else flattened.narrowed(mask, bounds, len(query), query.shape[2], keys)


def _of_band(query: torch.Tensor, key: torch.Tensor, window: int | None, causal: bool) -> torch.Tensor:
    """The whole mask (1, 1, N_q, N_kv) of causal attention, or any, over a window of keys."""
    seen = torch.ones((1, 1, query.shape[2], key.shape[2]), dtype=torch.bool, device=query.device)
    seen = seen if window is None else seen.triu(1 - window).tril(window - 1)
    return seen.tril() if causal else seen


def _bounds(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    chunk: int | None,
    causal: bool,
    others: dict[str, Any],
) -> flattened.Bounds | None:
    """Bounds of the flattened sequences of a call, or of their chunks; None where its rows are sequences themselves."""
    found = flattened.given_bounds(others)
    if found is None and flattened.is_positions(mask):
        found = flattened.bounds_in_mask(mask, getattr(module, "layer_idx", None))
    # Beside a cache transformers makes no mask of positions.
    elif found is None and mask is None and causal and len(query) == 1 and query.shape[2] == key.shape[2]:
        found = flattened.bounds_at_restarts(others.get("position_ids"), query.shape[2], getattr(module, "layer_idx", None))
    return found if chunk is None else flattened.bounds_of_chunks(found, chunk, len(query), query.shape[2], query.device)


def _packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: flattened.Bounds, **options: Any) -> torch.Tensor:
    """Attention of sequences that are flattened into the rows of a batch: (B, N_q, Hq, D_v)."""
    # Views, as models make query, key and value.
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = dispatch.attention_varlen(q, k, v, *bounds, enable_gqa=True, **options)
    return out.unflatten(0, (len(query), query.shape[2]))  # type: ignore[no-any-return]


def _left_to_the_kernel(
    mask_function: Any, local_size: int | None, kv_length: int, kv_offset: int, config: Any
) -> tuple[bool, flattened.Band | None]:
    """True for causal attention, alone or over a band of keys, and the band where the mask must tell it: a few models leave that to it."""
    if mask_function is causal_mask_function:
        return True, None
    band = flattened.band_of(mask_function)
    if band is None or local_size is None:
        return False, None
    # Chunks begin with the sequence, not with the keys that a cache still has.
    if (band == "window" and _window_reaches(local_size, kv_length, config)) or kv_offset + kv_length <= local_size:
        return True, None
    return _only_hands_on(type(config).__module__), band


def _window_reaches(local_size: int | None, kv_length: int, config: Any) -> bool:
    """True where `attention_forward` gets a sliding window as an argument, or the window hides nothing."""
    return local_size is not None and (kv_length <= local_size or _says_its_window(type(config).__module__))


@functools.cache
def _says_its_window(configuration: str) -> bool:
    """True where the model of a configuration's module passes its window to its attention: a few leave that to the mask alone."""
    calls = arguments_of_attention(configuration)
    return bool(calls) and all("sliding_window=" in call for call in calls)


@functools.cache
def _only_hands_on(configuration: str) -> bool:
    """True where the model of a configuration's module gives its attention the mask as it is, or none."""
    calls = arguments_of_attention(configuration)
    return bool(calls) and all("attention_mask," in call or "None," in call for call in calls)
