"""transformers: `register()` makes dispatch.attention an attention implementation that models select by name.

    from flashtune.integrations import transformers as tuned

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=tuned.register())

Importing this module imports transformers (5.10 or newer).
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, prepare_padding_mask, sdpa_mask
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from flashtune import dispatch
from flashtune.core import reference
from flashtune.core.errors import EnvironmentProblem, InputError

NAME = "tuned_attention"
"""Default name for `attn_implementation`."""

_MEANT_OTHERWISE = ("flash", "flex", "sdpa", "eager", "|", "/")
"""Parts of a name that transformers interprets itself, wherever they occur: "flash", for one, is fetched from the hub."""

logger = logging.get_logger(__name__)


def register(name: str = NAME) -> str:
    """Register dispatch.attention and its masks with transformers under `name`, for all models of this process; returns the name.

    Pass it to `from_pretrained(..., attn_implementation=name)` or `model.set_attn_implementation(name)`. Calling it again changes nothing.

    Raises InputError for a name that transformers interprets otherwise, EnvironmentProblem where transformers is too old.
    """
    meant = [word for word in _MEANT_OTHERWISE if word in name.lower()]
    if meant or not name:
        what = f"transformers gives {meant[0]!r} in the name {name!r} a meaning of its own" if meant else "the name is empty"
        raise InputError(f"{what}: take another, {NAME!r} for example")
    if not {"q_length", "q_offset"} <= inspect.signature(sdpa_mask).parameters.keys():
        raise EnvironmentProblem("this transformers builds masks in an older way: install transformers 5.10 or newer")
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
        (B, 1, N_q, N_kv) boolean: the whole mask, for any other rule; also where a position is known on the GPU alone.
    """
    everything: Callable[[], torch.Tensor | None] = functools.partial(
        sdpa_mask, batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, local_size, False, False,
        device=device, **others,
    )  # fmt: skip
    if allow_is_causal_skip and _left_to_the_kernel(mask_function, local_size, kv_length, config):
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
            return everything() if kv_offset else padding
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
    `position_bias` is added to the scores. Sequences that are packed into one row come with `cu_seq_lens_q` and `cu_seq_lens_k`, where each
    begins, and `max_length_q` and `max_length_k`, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes them; no mask is read
    then. Raises InputError for a paged cache.
    """
    if cache is not None:
        raise InputError(
            "continuous batching keeps its keys in pages, which dispatch.attention doesn't read: use attn_implementation='sdpa'"
        )
    if others.get("output_attentions"):
        logger.warning_once("tuned attention computes no attention weights: output_attentions=True needs attn_implementation='eager'")
    mask, window = attention_mask, None
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    band = (None if sliding_window is None else sliding_window - 1, 0) if causal else None
    if others.get("cu_seq_lens_q") is not None and len(query) == 1 and position_bias is None:
        return _packed(
            query, key, value, others, window_size=band, dropout_p=dropout, scale=scaling, softcap=softcap or 0.0, sinks=s_aux
        ), None
    if mask is None or mask.dim() == 2:
        # Masks of four dimensions include the diagonal.
        window = band
        if mask is not None:
            n = mask.shape[1]
            key, value = key[:, :, :n], value[:, :, :n]
            position_bias = None if position_bias is None else position_bias[..., :n]
            # Stride 0 over columns means that all are True: nothing is padded.
            mask = mask[:, None, None] if mask.stride(1) else None
    else:
        mask = mask[..., : key.shape[2]]
        mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
    if position_bias is not None:
        mask = reference.joined(position_bias.to(query.dtype), mask)
    shared = query.shape[1] != key.shape[1]
    sinks = None if s_aux is None else s_aux.float()
    # Positional where possible: keyword arguments cost the host more.
    out = dispatch.attention(
        query, key, value, mask, dropout, False, scaling, shared, window=window, softcap=softcap or 0.0,
        causal_alignment="bottom_right", sinks=sinks,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: dict[str, Any], *, sinks: torch.Tensor | None, **words: Any
) -> torch.Tensor:
    """Attention of sequences that are packed into the only row of a batch: (1, N_q, Hq, D_v)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds = [lengths[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")]
    out = dispatch.attention_varlen(q, k, v, *bounds, enable_gqa=True, sinks=None if sinks is None else sinks.float(), **words)
    return out[None]  # type: ignore[no-any-return]


def _left_to_the_kernel(mask_function: Any, local_size: int | None, kv_length: int, config: Any) -> bool:
    """True for causal attention, or a sliding window that `attention_forward` gets as an argument, too."""
    if mask_function is causal_mask_function:
        return True
    if local_size is None:
        return False
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    rules = cells[0] if len(cells) == 1 and isinstance(cells[0], tuple) else ()
    names = sorted(getattr(rule, "__qualname__", "") for rule in rules)
    if names != ["causal_mask_function", "sliding_window_overlay.<locals>.inner_mask"]:
        return False
    return kv_length <= local_size or _says_its_window(type(config).__module__)


@functools.cache
def _says_its_window(configuration: str) -> bool:
    """True where the model of a configuration's module passes its window to its attention: a few leave that to the mask alone."""
    module = sys.modules.get(configuration.replace("configuration_", "modeling_"))
    try:
        text = inspect.getsource(module) if module is not None else ""
    except OSError:
        return False
    calls = re.findall(r"attention_interface\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)", text)
    return bool(calls) and all("sliding_window=" in call for call in calls)
