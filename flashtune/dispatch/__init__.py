"""Run time: `attention` by the best kernel known for this GPU and these sizes, and `explain` for the reason of the choice."""

import importlib
from typing import TYPE_CHECKING, Any

from flashtune import offer
from flashtune.core.system.collector import held_off

with held_off():
    from flashtune.dispatch.api import attention, explain
    from flashtune.dispatch.decisions.by_records import explain_problem
    from flashtune.dispatch.decisions.explanation import Explanation
    from flashtune.dispatch.flex import explain_flex, flex_attention
    from flashtune.dispatch.jagged import attention_jagged
    from flashtune.dispatch.state.context import Use, reload, use
    from flashtune.dispatch.state.freezing import freeze
    from flashtune.dispatch.state.recorded import save_calls
    from flashtune.dispatch.varlen import attention_varlen, explain_varlen

if TYPE_CHECKING:
    from flashtune.dispatch.parts.cascade import cascade
    from flashtune.dispatch.parts.merge import merge
    from flashtune.dispatch.parts.ring import ring
    from flashtune.dispatch.parts.tree import tree

offer()

__all__ = [
    "Explanation",
    "Use",
    "attention",
    "attention_jagged",
    "attention_varlen",
    "cascade",
    "explain",
    "explain_flex",
    "explain_problem",
    "explain_varlen",
    "flex_attention",
    "freeze",
    "merge",
    "reload",
    "ring",
    "save_calls",
    "tree",
    "use",
]

_PARTS = ("cascade", "merge", "ring", "tree")


def __getattr__(name: str) -> Any:
    """A function of `flashtune.dispatch.parts`, imported now: most programs call none."""
    if name not in _PARTS:
        raise AttributeError(f"module 'flashtune.dispatch' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f"flashtune.dispatch.parts.{name}"), name)
    return found
