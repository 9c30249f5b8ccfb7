"""Packed sequences by others' functions: PyTorch's varlen_attn, flash-attn-4 and flash-attn. They serve where a caller names them alone."""

import functools
import inspect
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from flashtune.core.pytorch.private import C
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.plans.plan import capturing
from flashtune.dispatch.providers.libraries import PROVIDERS, refused, variant_of
from flashtune.dispatch.providers.library import found_in
from flashtune.dispatch.providers.provider import AT_THE_START, OTHER_BANDS, features_anywhere, undescribed
from flashtune.dispatch.state.context import current

UNUSED = "keys that aren't used"


class Varlen:
    """A library's function of packed sequences, with its own gradients; a sequence's last query is on the diagonal of its last key."""

    def __init__(
        self,
        package: str,
        module: str,
        function: str,
        names: Mapping[str, str],
        takes: frozenset[str],
        unbounded: int | None,
        **allows: Any,
    ) -> None:
        """`names` are the function's words for ours, `unbounded` its value for a side of a window without a bound. `allows` are passed
        where a version asks for them: others do the same without."""
        self.package, self._module, self._function, self._names = package, module, function, names
        self.takes, self._unbounded, self._allows = takes, unbounded, allows

    @functools.cached_property
    def _found(self) -> tuple[Callable[..., Any] | None, str | None]:
        """Its function, or None and the reason."""
        return found_in(self.package, self._module, self._function, [name for of, name in self._names.items() if of != "used"])

    @functools.cached_property
    def _known(self) -> Set[str]:
        """Names of its function's parameters, none where there is no function."""
        function, _ = self._found
        return set() if function is None else inspect.signature(function).parameters.keys()

    def missing(self, packed: Packed) -> str | None:
        """Reason why it can't be used on this machine for such a call, with the remedy; None where it can."""
        if self._found[1] is None and packed.used is not None and (name := self._names["used"]) not in self._known:
            return f"its version has no {name}: pip install -U {self.package}"
        return self._found[1]

    def words(self, packed: Packed, numbers: Numbers) -> dict[str, Any]:
        """Keywords of its function for a call that it takes, beside query, key and value."""
        causal = numbers.left < 0 and numbers.right == 0
        window = tuple(self._unbounded if side < 0 else side for side in (numbers.left, numbers.right))
        ours = {
            "cu_q": packed.cu_q.int(), "cu_k": packed.cu_k.int(), "max_q": int(numbers.max_q), "max_k": int(numbers.max_k),
            "scale": numbers.scale, "causal": causal, "softcap": numbers.softcap, "sinks": packed.sinks,
            "used": None if packed.used is None else packed.used.int(), "deterministic": torch.are_deterministic_algorithms_enabled(),
        }  # fmt: skip
        # A causal band goes by the word for it, where there is one.
        ours["window"] = (self._unbounded, self._unbounded) if causal and "causal" in self._names else window
        found = {name: ours[of] for of, name in self._names.items() if of != "used" or packed.used is not None}
        return found | {name: value for name, value in self._allows.items() if name in self._known}

    def run(self, packed: Packed, numbers: Numbers) -> Tensor:
        """Output (T_q, Hq, D_v)."""
        compute, _ = self._found
        assert compute is not None, "it refuses calls where it is missing"
        index = packed.query.device.index
        if index is not None and C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(packed, numbers)
        # Functions leave rows of no sequence as they find them in memory, in the output and in gradients.
        of_q, of_k = (
            (torch.arange(len(x), device=x.device) >= cu[-1])[:, None, None]
            for x, cu in ((packed.query, packed.cu_q), (packed.key, packed.cu_k))
        )
        given = [_cleared(x, rows) for x, rows in zip(packed[:3], (of_q, of_k, of_k), strict=True)]
        found = compute(*given, **self.words(packed, numbers))
        out: Tensor = found[0] if isinstance(found, tuple) else found
        return out.masked_fill(of_q, 0.0)


def _cleared(x: Tensor, rows: Tensor) -> Tensor:
    """The tensor, whose gradient is 0 in these rows."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    x = x.view_as(x)
    x.register_hook(lambda grad: grad.masked_fill(rows, 0.0))  # type: ignore[no-untyped-call]
    return x


_BOUNDS = {"max_q": "max_seqlen_q", "max_k": "max_seqlen_k", "cu_q": "cu_seqlens_q", "cu_k": "cu_seqlens_k"}
_NUMBERS = {"scale": "softmax_scale", "causal": "causal", "window": "window_size", "softcap": "softcap", "deterministic": "deterministic"}

PACKED: Mapping[str, Varlen] = {
    "flash": Varlen(
        "torch",
        "torch.nn.attention.varlen",
        "varlen_attn",
        {name: name for name in ("max_q", "max_k", "scale")}
        | {"cu_q": "cu_seq_q", "cu_k": "cu_seq_k", "window": "window_size", "used": "seqused_k"},
        frozenset({OTHER_BANDS, UNUSED}),
        -1,
        enable_gqa=True,
    ),
    "fa4": Varlen(
        "flash-attn-4",
        "flash_attn.cute",
        "flash_attn_varlen_func",
        _BOUNDS | _NUMBERS | {"sinks": "learnable_sink", "used": "seqused_k"},
        frozenset({OTHER_BANDS, UNUSED, "a soft cap", "sinks", "values of another head size"}),
        None,
    ),
    "fa2": Varlen("flash-attn", "flash_attn", "flash_attn_varlen_func", _BOUNDS | _NUMBERS, frozenset({OTHER_BANDS, "a soft cap"}), -1),
}
"""Functions of packed sequences by their providers' names."""


def features_of(packed: Packed, numbers: Numbers, *, return_lse: bool) -> list[str]:
    """Features of a call beyond plain and causal attention, in words for messages."""
    bounded = max(numbers.left, numbers.right) >= 0
    # One list of bounds for both: lengths are equal, and the diagonals the same.
    alike = packed.cu_q is packed.cu_k and packed.used is None
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in packed[:3])
    found = {
        "paged caches": packed.table is not None,
        OTHER_BANDS: bounded and not (numbers.left < 0 and numbers.right == 0),
        AT_THE_START: bounded and not (numbers.bottom_right or alike),
        **features_anywhere(numbers, packed.query.dtype, packed.slopes, packed.sinks, return_lse=return_lse),
        UNUSED: packed.used is not None,
        "gradients beside keys that aren't used": packed.used is not None and trains,
        "values of another head size": packed.query.shape[2] != packed.value.shape[-1],
    }
    return [*(feature for feature, there in found.items() if there), *undescribed(problem_of(packed, numbers))]


def refuse(name: str, packed: Packed, numbers: Numbers, *, return_lse: bool) -> None:
    """Raise InputError, with the cause and the remedy, where a provider can't serve a call."""
    if (why := refusal(name, packed, numbers, return_lse=return_lse)) is not None:
        raise refused(PROVIDERS[name], why)


def refusal(name: str, packed: Packed, numbers: Numbers, *, return_lse: bool) -> str | None:
    """Reason why a provider can't serve a call; None where it should."""
    provider, library = PROVIDERS[name], PACKED.get(name)
    device, (query, _, value, *_) = packed.query.device, packed
    if library is None:
        why = provider.missing() or provider.lacks(["paged caches" if packed.table is not None else "packed sequences"], device)
    else:
        lacking = [one for one in features_of(packed, numbers, return_lse=return_lse) if one not in library.takes]
        why = f"it doesn't take {' or '.join(lacking)}" if lacking else None
        why = library.missing(packed if why is None else packed._replace(used=None)) or provider.lacks([], device) or why
        if why is None and (query.shape[2] | value.shape[-1]) % 8:
            why = f"it takes head sizes in multiples of 8, not {query.shape[2]} and {value.shape[-1]}"
    return why


def by_provider(name: str, packed: Packed, numbers: Numbers, *, return_lse: bool) -> Tensor:
    """Output by a library; raises InputError where it can't serve the call, or failed at its first one of this kind."""
    refuse(name, packed, numbers, return_lse=return_lse)
    out = tried(name, packed, numbers)
    if out is None:
        variant = variant_of(name, problem_of(packed, numbers))
        why = None if variant is None else current().kernels.failure(variant, packed.query.device)
        raise refused(PROVIDERS[name], str(why))
    return out


def tried(name: str, packed: Packed, numbers: Numbers) -> Tensor | None:
    """Output by a library that takes the call; None where it failed at this one or at its first one of this kind."""
    library, memo, device = PACKED[name], current(), packed.query.device
    variant = variant_of(name, problem_of(packed, numbers))
    if variant is not None and memo.kernels.failure(variant, device) is not None:
        return None
    place = "library", name, variant
    build: Callable[[], None] = lambda: None  # noqa: E731
    if place not in memo.packed and not capturing(device):
        build = functools.partial(_build, library, packed, numbers)
    out = memo.kernels.tried(variant, device, build, functools.partial(library.run, packed, numbers))
    if out is not None:
        memo.packed[place] = True
    return out


def _build(library: Varlen, packed: Packed, numbers: Numbers) -> None:
    """Run a library's kernels once, forward and backward, since they are compiled at a call; an exception here is their fault."""
    out = library.run(packed, numbers)
    if out.requires_grad:
        wanted = [x for x in packed if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(out, wanted, torch.zeros_like(out))
