"""Types of the ways in for readers and type checkers: keywords that overloads share, and the signatures of explanations."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict, TypeVar

from torch import Tensor

from flashtune.core.problems.band import Window
from flashtune.core.pytorch.flex import Mod
from flashtune.dispatch.decisions.explanation import Explanation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_Explains = TypeVar("_Explains", bound=Callable[..., Explanation])


class Keywords(TypedDict, total=False):
    """Keywords that both take."""

    softcap: float
    causal_alignment: str
    seed: int | None
    allow_tf32: bool
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    deterministic: bool
    score_mod: Mod | None
    implementation: str | None


class DenseKeywords(Keywords, total=False):
    """Keywords of `attention` but for `return_lse`, which decides what it returns."""

    window: int | Window | None
    q_descale: Tensor | float | None
    k_descale: Tensor | float | None
    v_descale: Tensor | float | None
    block_mask: "BlockMask | Mod | None"


class PackedKeywords(Keywords, total=False):
    """Keywords of `attention_varlen` but for `return_lse` and `return_aux`."""

    scale: float | None
    window_size: tuple[int | None, int | None]
    enable_gqa: bool
    seqused_k: Tensor | None
    block_table: Tensor | None
    num_splits: int | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    is_causal: bool
    dropout_p: float
    mask_mod: Mod | None


def with_signature_of(call: Callable[..., object]) -> Callable[[_Explains], _Explains]:
    """Decorator that gives an explanation the parameters of the function that it explains, for readers."""

    def decorate(function: _Explains) -> _Explains:
        function.__signature__ = inspect.signature(call).replace(return_annotation=Explanation)  # type: ignore[attr-defined]
        return function

    return decorate
