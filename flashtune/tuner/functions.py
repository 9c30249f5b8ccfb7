"""Masks and scores as code in searches: a user's own functions by file and name, loaded, traced, and given to child processes by name.

The files are those of the command line. A database never names one: it holds the hash of what was traced.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flashtune.core.problems.config import Config, Direction
from flashtune.core.problems.lengths import Lengths
from flashtune.core.problems.problem import Problem
from flashtune.core.system.errors import InputError, first_line
from flashtune.templates.mods import bounds, known, structure
from flashtune.templates.mods.documents import SHORTEST_MEAN, bounds_of, documents_of
from flashtune.templates.mods.emit import Captured, Mods, emitted
from flashtune.templates.mods.graph import INDICES, Node
from flashtune.templates.mods.known import NAMED, Named
from flashtune.templates.mods.reader import Unsupported
from flashtune.templates.mods.scores import Score, known_structure
from flashtune.templates.mods.trace import at_pairs, traced_together

Tensor = torch.Tensor

ROWS = 1 << 26
"""Pairs of queries and keys at which a mask is evaluated at a time for lists of blocks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Functions:
    """Functions on one device: themselves, their graphs, and the tensors that they capture."""

    score_mod: Callable[..., Tensor] | None
    mask_mod: Callable[..., Tensor] | None
    score: Node | None
    mask: Node | None
    captured: tuple[Tensor, ...]

    def mods(self, direction: Direction) -> Mods:
        """The source of a pass's functions; a backward's is that without gradients of captured tensors."""
        types = tuple(Captured(x.dtype, x.dim()) for x in self.captured)
        return emitted(self.score, self.mask, types, backward=direction == "bwd")

    def scores(self, scores: Tensor, batch: int, head: int, first: int) -> Tensor:
        """The scores (rows, N_kv) of one head's rows from `first` on as the softmax takes them, by calling the functions."""
        rows, columns = scores.shape
        places = self._places(batch, head, range(first, first + rows), columns, scores.device)
        if self.score_mod is not None:
            scores = at_pairs(self.score_mod, scores, *places).to(scores.dtype)
        return scores if self.mask_mod is None else scores.masked_fill(~at_pairs(self.mask_mod, None, *places), float("-inf"))

    @staticmethod
    def _places(batch: int, head: int, rows: range, columns: int, device: torch.device) -> tuple[Tensor, ...]:
        numbers = (torch.tensor(batch), torch.tensor(head), torch.arange(rows.start, rows.stop), torch.arange(columns))
        return tuple(x.to(device, torch.int32) for x in numbers)

    def lists(self, problem: Problem, tile: tuple[int, int], device: torch.device, *, of_keys: bool) -> Tensor:
        """The mask's lists of blocks for tiles of these rows and columns: int32 (batches, heads, tiles, 2 + blocks).

        They hold for each tile of queries or (`of_keys`) of keys the number of blocks that need the mask, that of all visible ones, and
        their places.
        """
        n_q, n_kv = problem.n_q, problem.n_kv
        rows, columns = (-(-n // step) for n, step in zip((n_q, n_kv), tile, strict=True))
        shape = (problem.batch, problem.heads, *((columns, rows + 2) if of_keys else (rows, columns + 2)))
        if device.type == "meta":
            return torch.empty(shape, dtype=torch.int32, device=device)
        mods = self.mods("fwd")
        planes = [
            [self._kinds(batch, head, n_q, n_kv, tile, device) for head in range(problem.heads if mods.by_head else 1)]
            for batch in range(problem.batch if mods.by_batch else 1)
        ]
        kinds = torch.stack([torch.stack(plane) for plane in planes])
        kinds = kinds.transpose(2, 3) if of_keys else kinds
        numbers = [(kinds <= kind).sum(-1, keepdim=True, dtype=torch.int32) for kind in (0, 1)]
        return torch.cat((*numbers, torch.argsort(kinds, dim=-1, stable=True).to(torch.int32)), -1).expand(shape)

    def _kinds(self, batch: int, head: int, n_q: int, n_kv: int, tile: tuple[int, int], device: torch.device) -> Tensor:
        """Kinds of one head's tiles, (rows, columns): 0 needs the mask, 1 is visible, 2 hidden."""
        assert self.mask_mod is not None, "lists are a mask's"
        columns = -(-n_kv // tile[1])
        step = tile[0] * max(1, ROWS // (tile[0] * n_kv))
        found = []
        for first in range(0, n_q, step):
            rows = range(first, min(n_q, first + step))
            seen = at_pairs(self.mask_mod, None, *self._places(batch, head, rows, n_kv, device))
            # Rows past the end count as visible, keys past the end need the mask.
            pad = (0, columns * tile[1] - n_kv, 0, -len(rows) % tile[0])
            some, every = (torch.nn.functional.pad(seen, pad, value=value) for value in (False, True))
            every[:, n_kv:] = False
            some, every = (x.reshape(-1, tile[0], columns, tile[1]) for x in (some, every))
            visible, whole = some.any(3).any(1), every.all(3).all(1)
            found.append(torch.where(whole, 1, torch.where(visible, 0, 2)).to(torch.int8))
        return torch.cat(found)


class FunctionTensors:
    """The tensors of functions for launches of one problem's pass, by the kernel's config; lists of blocks are made once for each tile."""

    def __init__(self, functions: Functions, problem: Problem, device: torch.device) -> None:
        self.functions, self._problem, self._device = functions, problem, device
        self._lists: dict[tuple[int, int, bool], Tensor] = {}

    def __call__(self, config: Config) -> tuple[Tensor, ...]:
        """Captured tensors, then lists for the config's tiles: of queries in a forward, of keys and of queries in a backward, and none of
        packed sequences."""
        found = list(self.functions.captured)
        if self.functions.mask is not None and not self._problem.features.packed:
            backward = self._problem.direction == "bwd"
            found.append(self._of("", config, of_keys=backward))
            if backward and "DQ_BLOCK_M" in config:
                found.append(self._of("DQ_", config, of_keys=False))
        return tuple(found)

    def _of(self, prefix: str, config: Config, *, of_keys: bool) -> Tensor:
        tile = config.number(f"{prefix}BLOCK_M"), config.number(f"{prefix}BLOCK_N")
        if (*tile, of_keys) not in self._lists:
            self._lists[*tile, of_keys] = self.functions.lists(self._problem, tile, self._device, of_keys=of_keys)
        return self._lists[*tile, of_keys]


def register(named: Sequence[Named]) -> None:
    """Trace functions, so that this process finds them by their hashes; raises InputError for what can't be traced."""
    for one in named:
        mask = _registered(one).mask
        if one.score and mask is not None and structure.split(mask)[1] is None:
            # Records of packed sequences are of the score alone.
            _registered(Named(one.score))


def _registered(one: Named) -> Functions:
    functions = loaded(one, "cpu")
    try:
        for direction in ("fwd", "bwd"):
            NAMED[known.keep(functions.mods(direction))] = one
    except Unsupported as unsupported:
        raise InputError(f"{unsupported}: no kernel can be searched for it, and PyTorch's flex_attention runs the call") from None
    return functions


def with_functions(problem: Problem, one: Named) -> Problem:
    """The problem with the hash of functions, of packed sequences also with the band that is in their mask, as calls have it.

    Raises InputError where they can't be traced, are built in, run as packed sequences, or read beyond a captured tensor at these sizes.
    """
    if not any(one):
        raise InputError("the name of a function is empty: write FILE.py:NAME")
    functions = _registered(one)
    features, built_in = problem.features, known_structure(functions.score, functions.mask)
    if built_in is not None and not (features.packed and built_in[1].by_batch):
        raise InputError(f"{' and '.join(filter(None, one))} is built in: {_flags(*built_in)}")
    sizes: dict[str, int] = dict(zip(INDICES, (problem.batch, problem.heads, *problem.longest), strict=True))
    for text, output in ((one.score, functions.score), (one.mask, functions.mask)):
        if output is not None:
            bounds.check(text, output, functions.captured, sizes)
    instead = _packed_instead(problem, functions, one)
    if features.packed and functions.mask is not None and not features.banded:
        band, rest = structure.split(functions.mask)
        if band is not None:
            features = replace(features, causal=band[1] == 0, window=band, alignment="top_left")
        functions = functions if rest is not None else _registered(Named(one.score))
    found = replace(problem, features=replace(features, mods=functions.mods(problem.direction).hash))
    if instead is not None:
        raise instead
    return found


def _packed_instead(problem: Problem, functions: Functions, one: Named) -> known.PackedInstead | None:
    """Error with the remedy for a mask of documents that calls run as packed sequences, by the tensor of the functions' file; None where
    they have lists of blocks."""
    found, (batch, n) = documents_of(functions.score, functions.mask), (problem.batch, problem.n_kv)
    if found is None or problem.features.packed or problem.n_q != n or (batch > 1 and found.score.by_batch):
        return None
    runs = bounds_of(functions.captured[found.captured], batch, n)
    if runs is None or batch * n < SHORTEST_MEAN * (count := len(runs) - 1):
        return None
    band, score, mean = found.band, found.score, batch * n // count
    law = Lengths.met(int(runs.diff().max()), count, batch * n).law
    features = replace(
        problem.features, packed=True, causal=band[1] == 0, window=band, softcap=bool(score.softcap), alibi=bool(score.slope)
    )
    lengths = Lengths.of(law, count, count * mean)
    packed = replace(problem, batch=count, n_q=mean, n_kv=mean, features=features, lengths=lengths)
    options = " ".join([f"--packed {law}", f"--n {mean}", f"--batch {count}", *_options(band, score)])
    said = f"{' and '.join(filter(None, one))} is a mask of {count} documents, which calls run as packed sequences"
    return known.PackedInstead(f"{said}: search with {options}", packed)


def _options(band: structure.Band, score: Score) -> list[str]:
    """Options of a band, if there are such, and of a score."""
    left, right = band
    words = ["--causal"] if right == 0 else []
    words += [f"--window {left}"] if left is not None and right in (0, left) else []
    words += [f"--softcap {score.softcap:g}"] if score.softcap else []
    return words + (["--alibi"] if score.slope else [])


def _flags(band: structure.Band, score: Score) -> str:
    """The remedy for functions that `attention` has built in."""
    if band[1] not in (0, band[0]):
        return f"dispatch.attention takes it as window={band}, and no search of it is needed"
    words = _options(band, score)
    return f"search with {' '.join(words)}" if words else "search without it, since a scale changes no kernel"


def of_hash(name: str, device: torch.device | str) -> Functions:
    """The functions of a hash on a device; raises InputError for those of no file that this process was given."""
    if name not in NAMED:
        raise InputError(known.unknown(name))
    return loaded(NAMED[name], torch.device(device).type)


@cache
def loaded(one: Named, device: str) -> Functions:
    """Functions with the tensors of their files on a device, traced; raises InputError for what can't be."""
    if device == "meta":
        # Meta tensors have no values to trace with.
        real = loaded(one, "cpu")
        captured = tuple(x.to("meta") for x in real.captured)
        return Functions(score_mod=real.score_mod, mask_mod=real.mask_mod, score=real.score, mask=real.mask, captured=captured)
    score_mod, mask_mod = (_function(text, device) if text else None for text in one)
    try:
        score, mask, captured = traced_together(score_mod, mask_mod, torch.device(device))
    except Unsupported as unsupported:
        raise InputError(f"{unsupported}: no kernel can be searched for it, and PyTorch's flex_attention runs the call") from None
    if any(x.device.type != device for x in captured):
        raise InputError(f"{' and '.join(filter(None, one))} captures a tensor that is no variable of its file: make it one")
    return Functions(score_mod=score_mod, mask_mod=mask_mod, score=score, mask=mask, captured=tuple(x.detach() for x in captured))


def _function(text: str, device: str) -> Callable[..., Any]:
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise InputError(f"{text!r} names no function of a file: write FILE.py:NAME")
    found = _variables(os.path.realpath(path), device).get(name)
    if not callable(found):
        raise InputError(f"{path} has no function {name!r}: name one of its top level")
    function: Callable[..., Any] = found
    return function


@cache
def _variables(path: str, device: str) -> Mapping[str, Any]:
    """Variables of a file that was run as a module, whose tensors are on a device."""
    if not Path(path).is_file():
        raise InputError(f"there is no file {path}: name the one with the function")
    # Compilers look a function's module up by name, and those of two devices have other tensors.
    name = f"flashtune_functions_{device}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).parent))
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise InputError(f"{path} can't be run ({first_line(error)}): mend it, since a search imports it") from None
    finally:
        sys.path.remove(str(Path(path).parent))
    for variable, value in vars(module).items():
        if isinstance(value, Tensor):
            setattr(module, variable, value.detach().to(device))
    return vars(module)
