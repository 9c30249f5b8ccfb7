"""Sequences that are flattened into rows of a batch, as padding-free training has them: where each begins, from arguments or positions."""

import functools
import weakref
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function
from transformers.utils.import_utils import is_tracing

from flashtune.core.pytorch.private import C
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.dispatch.plans.plan import capturing
from flashtune.integrations.sources import arguments_of_attention, source_of

Band = Literal["window", "chunks"]


class Bounds(NamedTuple):
    """Rows where sequences begin, with their number at the end, int32 (sequences + 1,), and most rows of one: of queries and of keys."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int


def given_bounds(arguments: Mapping[str, Any]) -> Bounds | None:
    """Bounds among an attention's arguments (transformers' FlashAttentionKwargs); None where one of them is missing. Nothing is read."""
    given: list[Any] = [arguments.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")]
    if any(one is None for one in given):
        return None
    # Some callers leave a length in a tensor; the collator gives numbers.
    longest_q, longest_k = (int(one) if isinstance(one, Tensor) else one for one in given[2:])
    return Bounds(given[0], given[1], longest_q, longest_k)


def is_positions(mask: Tensor | None) -> TypeGuard[Tensor]:
    """True if a mask is a result of `positions_as_mask`."""
    # No mask of keys has this shape, so that a caller's own integers aren't taken for positions.
    return mask is not None and mask.dim() == 4 and mask.shape[2:] == (1, 1) and not (mask.dtype == torch.bool or mask.is_floating_point())


def positions_as_mask(mask_function: Any, local_size: int | None, config: Any) -> Tensor | None:
    """Positions (B, N, 1, 1), integers, in place of a mask of causal sequences, which begin where a step isn't 1; None for any other rule.

    A sliding window of `local_size` is left to the attention. Four dimensions are what transformers hands on as it is.
    """
    positions, inner = _rule_of_rows(mask_function)
    if (
        positions is None
        or not (inner is causal_mask_function or (local_size is not None and band_of(inner) == "window"))
        or not _hands_on(type(config).__module__)
    ):
        return None
    return None if is_tracing(positions) or positions.is_meta else positions[:, :, None, None]


_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"


def _rule_of_rows(mask_function: Any) -> tuple[Tensor | None, Any]:
    """Integers (B, N) whose step isn't 1 where a sequence begins, and the rule within a sequence; None for other rules."""
    numbers, rule = _numbers_and_rule(mask_function)
    if numbers is None:
        return None, None
    if getattr(rule, "__qualname__", "") == _REMAPPED:
        found = _closed_over(rule, _REMAPPED)
        return found.get("position_ids"), found.get("mask_function")
    # Versions before 5.23 apply the rule to rows.
    return torch.arange(numbers.shape[1], device=numbers.device) + 2 * numbers, rule


def _numbers_and_rule(mask_function: Any) -> tuple[Tensor | None, Any]:
    """Numbers (B, N) of flattened sequences, and the one rule beside them, in either order; None for other rules."""
    rules = _closed_over(mask_function, "and_masks.<locals>.and_mask").get("mask_functions", ())
    packed = [rule for rule in rules if getattr(rule, "__qualname__", "") == _PACKED]
    if len(packed) != 1 or len(rules) != 2:
        return None, None
    numbers = _closed_over(packed[0], _PACKED).get("packed_sequence_mask")
    return (numbers, next(rule for rule in rules if rule is not packed[0])) if isinstance(numbers, Tensor) else (None, None)


def chunks_by_sequence(mask_function: Any, rows: int, chunk: int | None) -> Any:
    """The rule whose chunks begin with each flattened sequence: versions before 5.23 count them from the beginning of the row.

    `chunk` is the chunks' size where there are any. Raises EnvironmentProblem where a compiler hides these versions' sequences: without
    fullgraph PyTorch runs the mask's Python then.
    """
    if _CHUNKS_OF_ROWS and chunk is not None and rows > chunk and torch.compiler.is_dynamo_compiling():
        raise EnvironmentProblem(
            f"transformers {transformers.__version__} begins chunks with the row, not with each of its sequences, "
            "which fullgraph=True hides: install 5.23 or newer, or compile without fullgraph"
        )
    numbers, rule = _numbers_and_rule(mask_function)
    if numbers is None or band_of(rule) != "chunks":
        return mask_function
    numbers = numbers.contiguous()
    inside = torch.arange(numbers.shape[1], device=numbers.device) - torch.searchsorted(numbers, numbers)
    return and_masks(lambda b, h, q, k: rule(b, h, inside[b, q], inside[b, k]), packed_sequence_mask_function(numbers))


_CHUNKS_OF_ROWS = not hasattr(masking_utils, "remap_positions_for_packed_sequence")


def band_of(mask_function: Any) -> Band | None:
    """Which of transformers' causal bands of keys this rule is: a sliding window, or chunks that see nothing of one another."""
    rules = _closed_over(mask_function, "and_masks.<locals>.and_mask").get("mask_functions", ())
    names = sorted(getattr(rule, "__qualname__", "") for rule in rules)
    return next((band for band in _BANDS if names == ["causal_mask_function", _BANDS[band]]), None)


_BANDS: dict[Band, str] = {"window": "sliding_window_overlay.<locals>.inner_mask", "chunks": "chunked_overlay.<locals>.inner_mask"}


def band_as_mask(band: Band, size: int, device: torch.device | str) -> Tensor | None:
    """A mask that says a band by its shape alone, to attention that isn't told of it; None for a size of 1, which no shape says."""
    shape = (1, 1, 1, size) if band == "window" else (1, 1, size, 1)
    return torch.zeros((), dtype=torch.int16, device=device).expand(shape) if size > 1 else None


def band_in_mask(mask: Tensor | None) -> tuple[Band, int] | None:
    """The band and its size, if a mask is a result of `band_as_mask`."""
    if (
        mask is None
        or mask.dtype != torch.int16
        or mask.dim() != 4
        or mask.shape[:2] != (1, 1)
        or (mask.shape[2] == 1) == (mask.shape[3] == 1)
    ):
        return None
    return ("window", mask.shape[3]) if mask.shape[2] == 1 else ("chunks", mask.shape[2])


def _closed_over(function: Any, name: str) -> dict[str, Any]:
    """Values by name that a function closes over, if that is its own name."""
    if getattr(function, "__qualname__", "") != name:
        return {}
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


@functools.cache
def _hands_on(configuration: str) -> bool:
    """True where the model of a configuration's module only hands its masks on to attention: a few add to them, and ask for whole ones."""
    return bool(arguments_of_attention(configuration)) and "allow_is_causal_skip=False" not in source_of(configuration)


def bounds_in_mask(positions: Tensor, layer: int | None = None) -> Bounds:
    """Bounds of sequences by a result of `positions_as_mask`."""
    known = _known(positions, layer)
    found = known.found if known is not None else _remembered(positions, layer, _by_steps(positions[:, :, 0, 0]))
    assert found is not None, "kept for masks and for positions apart: their shapes differ"
    return found


def bounds_at_restarts(positions: Any, rows: int, layer: int | None = None) -> Bounds | None:
    """Bounds of sequences in the only row of a batch whose positions (1, `rows`) begin again; None if they never do, or aren't known.

    As flash attention has it in transformers, which makes no mask of them beside a cache. The host waits for the positions once a step;
    a compiler or a CUDA graph can't, and sees one sequence. `layer` is the number of the layer that asks.
    """
    if torch.compiler.is_compiling() or not isinstance(positions, Tensor) or positions.shape != (1, rows) or rows < 2:
        return None
    known = _known(positions, layer)
    if known is not None:
        # Of a warm-up's positions a graph that is captured mustn't keep the lengths.
        return None if known.found is None or capturing(positions.device) else known.found
    # This check takes longer than all others together.
    if positions.is_meta or is_tracing(positions):
        return None
    return _remembered(positions, layer, _by_restarts(positions))


class _Recent(NamedTuple):
    """Bounds that were computed last, None of one sequence, and of which positions."""

    base: weakref.ref[Tensor]
    state: tuple[Any, ...]
    layer: int | None
    found: Bounds | None


_recent: tuple[_Recent, ...] = ()
"""Bounds of the positions that a step's layers share, so that the host waits for them once. Kinds of layers may have masks of their own."""

_KEPT = 4
"""Most results that are remembered."""


def _known(positions: Tensor, layer: int | None) -> _Recent | None:
    """Bounds that an earlier layer of the step had computed, of this tensor or of views of one."""
    base, state = _base_of(positions), _state_of(positions)
    for known in _recent:
        if known.base() is base and known.state == state:
            if capturing(positions.device) or _in_backward():
                # Neither waits, and what is computed again in a backward is the forward.
                return known
            # Nothing says whether memory was written since; within a step, whose layers ask in order, it wasn't.
            if layer is None or known.layer is None or layer <= known.layer:
                return None
            _remembered(positions, layer, known.found)
            return known
    return None


def _in_backward() -> bool:
    return bool(C._current_graph_task_id() != -1)


def _remembered(positions: Tensor, layer: int | None, found: Bounds | None) -> Bounds | None:
    """The bounds that are given, kept for the layers that follow."""
    global _recent
    base, state = _base_of(positions), _state_of(positions)
    others = tuple(one for one in _recent if not (one.base() is base and one.state == state))
    _recent = (_Recent(weakref.ref(base), state, layer, found), *others)[:_KEPT]
    return found


def _base_of(positions: Tensor) -> Tensor:
    return positions if positions._base is None else positions._base


def _state_of(positions: Tensor) -> tuple[Any, ...]:
    return positions.shape, positions.stride(), positions.storage_offset(), positions.data_ptr()


def _by_steps(positions: Tensor) -> Bounds:
    """Bounds of sequences that begin where a step between positions (B, N) isn't 1, and with each row."""
    # One copy, since each number that is read from the device waits for it.
    host = positions.detach().cpu().numpy()
    begins = np.ones_like(host, dtype=bool)
    begins[:, 1:] = host[:, 1:] - host[:, :-1] != 1
    return _bounds_of(begins, positions.device)


def _by_restarts(positions: Tensor) -> Bounds | None:
    """Bounds of sequences that begin where positions (1, N) begin again; None of one sequence."""
    host = positions.detach().cpu().numpy()[0]
    later, before = host[1:], host[:-1]
    begins = np.ones_like(host, dtype=bool)
    begins[1:] = (later < before) | (later == host[0])
    return _bounds_of(begins, positions.device) if begins[1:].any() else None


def _bounds_of(begins: "np.typing.NDArray[np.bool_]", device: torch.device) -> Bounds:
    bounds = np.append(np.flatnonzero(begins), begins.size).astype(np.int32)
    longest = int(np.diff(bounds).max())
    cu = torch.from_numpy(bounds).to(device, non_blocking=True)
    return Bounds(cu, cu, longest, longest)


def whole_mask(positions: Tensor, window: int | None) -> Tensor:
    """The mask (B, 1, N, N), boolean, that a result of `positions_as_mask` stands for, with a sliding window of so many keys."""
    rows = positions[:, :, 0, 0]
    sequence = (rows.diff(dim=1, prepend=rows[:, :1] - 1) != 1).cumsum(1)
    seen = (sequence[:, :, None] == sequence[:, None]).tril()
    return (seen if window is None else seen.triu(1 - window))[:, None]


def bounds_of_chunks(bounds: Bounds | None, chunk: int, batch: int, rows: int, device: torch.device) -> Bounds:
    """Bounds of the chunks of sequences, each from its sequence's beginning on; of the `batch` rows of a batch without bounds.

    Nothing is read from the device: bounds of empty sequences fill up what may be missing.
    """
    total = batch * rows
    begins = torch.arange(0, total + 1, rows, dtype=torch.int32, device=device) if bounds is None else bounds.cu_q
    at = torch.arange(total, dtype=torch.int32, device=device)
    inside = at - begins[_number_of_sequence(begins, at)]
    cut = torch.where(inside % chunk == 0, at, total).sort().values
    most = min(total, total // chunk + len(begins) - 1)
    cu = torch.nn.functional.pad(cut[:most], (0, 1), value=total)
    longest = min(chunk, rows if bounds is None else bounds.longest_q)
    return Bounds(cu, cu, longest, longest)


def narrowed(mask: Tensor, bounds: Bounds, batch: int, rows: int, keys: int) -> Tensor:
    """A mask that broadcasts to (B, 1, N_q, N_kv), boolean or added to the scores, in which sequences see nothing of one another any more.

    Keys of a static cache that no sequence has yet are seen by none.
    """
    first = torch.arange(batch, dtype=torch.int32, device=mask.device)[:, None]
    of_queries = _number_of_sequence(bounds.cu_q, first * rows + torch.arange(rows, dtype=torch.int32, device=mask.device))
    own = keys if bounds.longest_k > rows else rows
    of_keys = _number_of_sequence(bounds.cu_k, first * own + torch.arange(keys, dtype=torch.int32, device=mask.device))
    same = (of_queries[:, :, None] == of_keys[:, None])[:, None]
    return mask & same if mask.dtype == torch.bool else torch.where(same, mask, -torch.inf)


def _number_of_sequence(begins: Tensor, at: Tensor) -> Tensor:
    return torch.searchsorted(begins, at, right=True) - 1
