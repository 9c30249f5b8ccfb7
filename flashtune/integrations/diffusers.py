"""diffusers: `TunedProcessor` gives one attention processor's calls to dispatch.attention, `apply` all those of a model.

    from flashtune.integrations import diffusers as tuned

    tuned.apply(pipeline.unet)  # or pipeline.transformer

Importing this module doesn't import diffusers; making a processor without `inner` does.
"""

import functools
from typing import Any

import torch

from flashtune.core.system.errors import InputError
from flashtune.integrations.swap import torchs_place


class TunedProcessor:
    """Attention processor around another one, whose calls of PyTorch's attention go to dispatch.attention.

    `inner` is any processor that calls F.scaled_dot_product_attention, itself or by diffusers' backend "native"; None is diffusers' own,
    AttnProcessor2_0. Arguments and results are those of `inner`. Raises InputError for a processor with weights of its own.
    """

    def __init__(self, inner: Any = None) -> None:
        if inner is None:
            from diffusers.models.attention_processor import AttnProcessor2_0

            inner = AttnProcessor2_0()
        if isinstance(inner, torch.nn.Module):
            raise InputError(f"{type(inner).__name__} has weights, which a model finds only in place: call the model in torchs_place()")
        self.inner = inner

        @functools.wraps(inner.__call__)
        def call(*arguments: Any, **words: Any) -> Any:
            with torchs_place():
                return inner(*arguments, **words)

        # diffusers inspects the signature of the instance's __call__ to see which arguments the processor takes.
        self.__call__ = call  # type: ignore[method-assign]

    def __call__(self, *arguments: Any, **words: Any) -> Any:
        """Result of `inner`."""
        with torchs_place():
            return self.inner(*arguments, **words)


def apply(model: Any) -> None:
    """Wrap every attention processor of a diffusers model (`unet`, `transformer`, `vae`) in a `TunedProcessor`, each once.

    Raises InputError, and changes nothing, where a processor has weights of its own.
    """
    model.set_attn_processor(
        {name: old if isinstance(old, TunedProcessor) else TunedProcessor(old) for name, old in model.attn_processors.items()}
    )


def restore(model: Any) -> None:
    """Unwrap the processors of a model that `apply` wrapped."""
    model.set_attn_processor({name: getattr(old, "inner", old) for name, old in model.attn_processors.items()})
