"""Masks of documents: keys of the query's own document alone, and of those a band."""

from typing import Any, NamedTuple

import torch

from flashtune.templates.mods.graph import INTEGERS, Node, loads, numbered
from flashtune.templates.mods.scores import Score, known_score
from flashtune.templates.mods.structure import WIDE, Band, conditions, joined

aten = torch.ops.aten

SHORTEST_MEAN = 64
"""Mean tokens of documents from which they are packed sequences: half a tile of queries. Not measured: each document begins a tile of its
own, which shorter ones leave empty for the most part."""


class Documents(NamedTuple):
    """Mask of a tensor of document numbers and a band, beside a known score.

    `captured` is the tensor's place among the captured ones: (N,), or with `by_batch` (B, N).
    """

    captured: int
    by_batch: bool
    band: Band
    score: Score


def documents_of(score: Node | None, mask: Node | None) -> Documents | None:
    """The mask of documents that a mask is beside a score; None for any other mask or score."""
    terms = [] if mask is None else conditions(mask)
    equal = [pair for pair in map(_equal, terms) if pair is not None]
    if mask is None or len(equal) != 1:
        return None
    [(term, one, _)] = equal
    # Where the mask shows anything the numbers of both documents are equal, and so is whatever is computed from them.
    alike = [x for x in loads([mask]) if x.captured == one.captured and _places(x) is not None]
    band = joined((x for x in terms if x is not term), numbered([mask], alike))
    known = None if band is None else Score() if score is None else known_score(score, band)
    return None if band is None or known is None else Documents(one.captured, len(one.arguments) == 2, band, known)


def bounds_of(ids: torch.Tensor, rows: int, n: int) -> torch.Tensor | None:
    """Places where documents begin in so many rows of n, one after the other, with the number of all tokens at the end, int32 on the host;
    None where a document's number comes back after another one."""
    host = ids.detach()[..., :n][: rows if ids.dim() == 2 else n].cpu().expand(rows, n)
    begins = torch.ones((rows, n), dtype=torch.bool)
    begins[:, 1:] = host[:, 1:] != host[:, :-1]
    ordered = host.sort(-1).values
    if not torch.equal((ordered[:, 1:] != ordered[:, :-1]).sum(-1), begins[:, 1:].sum(-1)):
        return None
    return torch.cat((begins.flatten().nonzero().flatten(), torch.tensor([rows * n]))).int()


def _equal(x: Any) -> tuple[Node, Node, Node] | None:
    """A condition that documents of a query and a key are equal, with their loads."""
    if not isinstance(x, Node) or x.kind != "operation" or x.target.overloadpacket is not aten.eq:
        return None
    one, other = map(_exactly, x.arguments)
    places = [_places(one), _places(other)]
    together = isinstance(one, Node) and isinstance(other, Node) and one.captured == other.captured and one.dtype in (*INTEGERS, torch.bool)
    return (x, one, other) if together and places in _PAIRS else None


_PAIRS = [[(*b, "q_idx"), (*b, "kv_idx")][::turn] for b in ((), ("b",)) for turn in (1, -1)]


def _places(x: Any) -> tuple[str, ...] | None:
    """The inputs that a load of documents has as indices."""
    names = tuple(getattr(_exactly(index, WIDE), "name", "") for index in x.arguments) if isinstance(x, Node) and x.kind == "load" else ()
    return names if names[-1:] in (("q_idx",), ("kv_idx",)) and names[:-1] in ((), ("b",)) else None


def _exactly(x: Any, types: tuple[torch.dtype, ...] = INTEGERS) -> Any:
    """The value of which this one is a cast to types that hold it."""
    while isinstance(x, Node) and x.kind == "operation" and x.target.overloadpacket is aten._to_copy:
        [source] = x.operands
        if x.dtype not in types or torch.promote_types(source.dtype, x.dtype) is not x.dtype:
            break
        x = source
    return x
