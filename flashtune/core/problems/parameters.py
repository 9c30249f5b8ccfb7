"""Parameters of a launch beside its operands, equal for every pass. Importing this needs no PyTorch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from flashtune.core.problems.band import Band

if TYPE_CHECKING:
    import torch

PER_HEAD: dict[str, Literal["heads", "kv_heads"]] = {
    "alibi_slopes": "heads",
    "q_descale": "heads",
    "k_descale": "kv_heads",
    "v_descale": "kv_heads",
    "sinks": "heads",
}
"""Parameters per head, by callers' names, with the field of a problem that counts those heads."""

FACTORS = ("q_descale", "k_descale", "v_descale")
"""Factors of fp8 inputs; a launch takes them together, as `descale`."""

PER_HEAD_FLAGS = {"alibi_slopes": "alibi"} | {name: name for name in PER_HEAD if name not in (*FACTORS, "alibi_slopes")}
"""The feature that each of the others needs; a launch uses callers' names, but for `slopes`."""

_NO_FORMULA = ("seed", "offset", "lengths", "mods")
"""Parameters that the reference's formula takes in another form."""

DROPOUT_STEPS = 32768
"""Values of a dropout draw (15 bits): the resolution of its rates."""


def dropout_threshold(p: float) -> int:
    """The number of the 2^15 values of a draw that drop a pair: p rounded to 1/32768."""
    return round(p * DROPOUT_STEPS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallParameters:
    """Parameters of a launch beside its operands, equal for every pass.

    `mask` is a view expanded to (B, Hq, N_q, N_kv); `slopes` (B, Hq) are ALiBi's; `descale` are factors of fp8 inputs: q (B, Hq),
    k and v (B, Hkv); `sinks` (B, Hq) are logits. `seed` (64 bits) and `offset` fix dropout's mask. `lengths` of packed sequences are as in
    LaunchInputs, where the band's diagonal is 1 or 0. `mods` is a mask and a score as code for the reference: scores (rows, N_kv) of a
    batch and a head from a row on, to those of the softmax; launches take tensors in its place.
    """

    scale: float
    band: Band
    mask: "torch.Tensor | None" = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    slopes: "torch.Tensor | None" = None
    descale: "tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None" = None
    sinks: "torch.Tensor | None" = None
    lengths: "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None" = None
    mods: "Callable[[torch.Tensor, int, int, int], torch.Tensor] | None" = None

    def per_head(self) -> "dict[str, torch.Tensor]":
        """The parameters per head, by the names of `PER_HEAD`."""
        found = dict(zip(FACTORS, self.descale or (), strict=False))
        found |= {name: getattr(self, launch_name(name)) for name in PER_HEAD_FLAGS}
        return {name: found[name] for name in PER_HEAD if found.get(name) is not None}

    def formula(self) -> dict[str, Any]:
        """The keyword arguments of `flashtune.core.problems.reference.attention`, but for dropout's kept pairs."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NO_FORMULA}

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of a rendered module's `launch`, without parameters per head that are None."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("band", "mods")}
        return {name: value for name, value in found.items() if value is not None or name == "mask"} | self.band.keywords()


def per_head_words(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `CallParameters.per_head`: the parameters per head, by the names of `CallParameters`."""
    found = {launch_name(name): values[name] for name in PER_HEAD_FLAGS if name in values}
    factors = tuple(values[name] for name in FACTORS if name in values)
    return found | {"descale": factors} if factors else found


def launch_name(name: str) -> str:
    """The name that a launch and `CallParameters` have for a parameter of `PER_HEAD_FLAGS`."""
    return "slopes" if name == "alibi_slopes" else name
