"""Random inputs of a problem's pass, in memory poisoned with NaN, with the arguments of a launch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from types import MappingProxyType
from typing import Any

import torch

from flashtune.core.problems import reference
from flashtune.core.problems.dtypes import DType, output_dtype
from flashtune.core.problems.oracles import forward_oracle
from flashtune.core.problems.parameters import FACTORS, PER_HEAD, CallParameters, per_head_words
from flashtune.core.problems.passes import Place
from flashtune.core.problems.problem import Problem, next_power_of_two
from flashtune.core.pytorch.dtypes import TORCH_DTYPES
from flashtune.tuner.functions import FunctionTensors, of_hash
from flashtune.tuner.verify.pages import Pages, guarded, pages_of

SOFTCAP = 20.0
"""Soft cap of generated inputs: small enough to bend scores of random data."""

DROPOUT_P = 0.1


Steps = tuple[int, ...]
"""Greatest common divisors of a tensor's strides with 16, by dimension: of a stride kernels and Triton's JIT ask no more."""


def steps_of(x: torch.Tensor) -> Steps:
    """Steps of a tensor."""
    return tuple(math.gcd(stride, 16) for stride in x.stride())


def spaced(shape: Sequence[int], steps: Steps) -> tuple[int, ...]:
    """Least strides of a tensor whose dimensions lie in this order in memory, and which has these steps."""
    strides, extent = [1], shape[-1]
    for size, step in zip(reversed(shape[:-1]), reversed(steps[:-1]), strict=True):
        stride = -(-extent // step) * step
        # Of 16 any multiple will do.
        stride += step * (step < 16 and stride % (2 * step) == 0)
        strides.insert(0, stride)
        extent = stride * size
    return tuple(strides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Operands of one problem's pass by name, in their order, with the keyword parameters of `launch`.

    Of packed sequences operands are (1, H, T, D) as kernels take them, and `sequences` are the lengths of each one's queries and keys;
    those in `poisoned` are NaN, and nothing of them is compared. `mods` makes the tensors of a mask and a score as code. `pages` are caches
    that hold the same keys and values, for launches over pages.
    """

    problem: Problem
    operands: dict[str, torch.Tensor]
    parameters: CallParameters
    sequences: tuple[tuple[int, int], ...] = ()
    poisoned: frozenset[int] = frozenset()
    mods: FunctionTensors | None = None
    pages: Pages | None = None

    @property
    def q(self) -> torch.Tensor:
        """Queries (B, Hq, N_q, D)."""
        return self.operands["q"]

    @property
    def k(self) -> torch.Tensor:
        """Keys (B, Hkv, N_kv, D)."""
        return self.operands["k"]

    @property
    def v(self) -> torch.Tensor:
        """Values (B, Hkv, N_kv, D_v)."""
        return self.operands["v"]

    @property
    def out(self) -> torch.Tensor:
        """The output (B, Hq, N_q, D_v)."""
        return self.operands["out"]

    @property
    def lse(self) -> torch.Tensor:
        """The LSE (B, Hq, N_q)."""
        return self.operands["lse"]

    @property
    def mask(self) -> torch.Tensor | None:
        """The caller's mask, of one batch and head where it repeats: PyTorch expands a boolean one into a bias of its shape."""
        mask = self.parameters.mask
        return None if mask is None else mask[: None if mask.stride(0) else 1, : None if mask.stride(1) else 1]

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Positional arguments of `launch`."""
        over = {} if self.pages is None else {"k": self.pages.k, "v": self.pages.v}
        return tuple((self.operands | over).values())

    @property
    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `launch`."""
        more: dict[str, Any] = {} if self.mods is None else {"mods": self.mods}
        if self.pages is not None and self.parameters.lengths is not None:
            # As calls have them, with bounds that growing lengths share.
            begins, bounds = self.parameters.lengths[0], tuple(map(next_power_of_two, self.longest))
            more |= {"lengths": (begins, begins, self.pages.used), "table": self.pages.table, "pages": (*bounds, None)}
        return self.parameters.keywords() | more

    @property
    def longest(self) -> tuple[int, int]:
        """Largest numbers of queries and of keys of a packed sequence."""
        return max(n_q for n_q, _ in self.sequences), max(n_kv for _, n_kv in self.sequences)

    def group(self, batch: int, kv_head: int) -> "Inputs":
        """Views of one key head with its query heads, as inputs of a problem of their own; without dropout, whose mask depends on the
        head's number."""
        p = self.problem
        assert not p.features.dropout, "another head has another mask"
        heads = slice(kv_head * p.gqa_ratio, (kv_head + 1) * p.gqa_ratio)
        places = {"batch": slice(batch, batch + 1), "heads": heads, "kv_heads": slice(kv_head, kv_head + 1)}
        return self._views(replace(p, batch=1, heads=p.gqa_ratio, kv_heads=1), places)

    def alone(self, batch: int) -> "Inputs":
        """Views of one batch, as inputs of a problem of their own; without dropout's own mask of it."""
        return self._views(replace(self.problem, batch=1), {"batch": slice(batch, batch + 1)})

    def _views(self, problem: Problem, places: dict[str, slice]) -> "Inputs":
        """Views of these parts of axes, as inputs of a problem."""

        def part(x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
            return x[tuple(places.get(axis, slice(None)) for axis in axes)]

        per_head = {name: part(x, ("batch", PER_HEAD[name])) for name, x in self.parameters.per_head().items()}
        mask = None if self.parameters.mask is None else part(self.parameters.mask, ("batch", "heads"))
        return Inputs(
            problem=problem,
            operands={o.name: part(self.operands[o.name], o.axes) for o in problem.contract.operands},
            parameters=replace(self.parameters, mask=mask, **per_head_words(per_head)),
        )

    def parts(self) -> list[tuple["Inputs", Sequence[int]]]:
        """Dense inputs, and the batches of each that count: all of these inputs, or each packed sequence that isn't poisoned."""
        if not self.sequences:
            return [(self, range(self.problem.batch))]
        return [(self.sequence(index), (index,)) for index in range(len(self.sequences)) if index not in self.poisoned]

    def sequence(self, index: int) -> "Inputs":
        """Views of a packed sequence as inputs of a dense problem: its batches repeat it, so that the one of this index has the sequence's
        dropout mask and numbers per head."""
        ends = [tuple(accumulate(lengths)) for lengths in zip(*self.sequences, strict=True)]
        n_q, n_kv = self.sequences[index]
        rows = {"n_q": slice(ends[0][index] - n_q, ends[0][index]), "n_kv": slice(ends[1][index] - n_kv, ends[1][index])}
        p = self.problem
        p = replace(p, n_q=n_q, n_kv=n_kv, lengths=None, features=p.features.of_one)
        views = {o.name: self.operands[o.name][tuple(rows.get(axis, slice(None)) for axis in o.axes)] for o in p.contract.operands}
        return Inputs(
            problem=p,
            operands={o.name: views[o.name].expand(o.shape(p)) for o in p.contract.operands},
            parameters=replace(self.parameters, band=p.band, lengths=None),
        )

    @property
    def steps(self) -> dict[str, Steps]:
        """Steps of the operands (of four dimensions), the mask and the parameters per head, by name."""
        tensors = {name: x for name, x in self.operands.items() if x.dim() == 4} | self.parameters.per_head()
        if self.parameters.mask is not None:
            tensors["mask"] = self.parameters.mask
        return {name: steps_of(x) for name, x in tensors.items()}

    def store(self) -> None:
        """Copy the present keys and values into the pages, if there are any."""
        if self.pages is not None:
            self.pages.store(self.k, self.v)

    def poison(self) -> None:
        """Fill the written operands with NaN, so that unwritten elements fail the comparison."""
        for operand in self.problem.contract.written:
            without_repeats(self.operands[operand.name]).fill_(float("nan"))


def without_repeats(x: torch.Tensor) -> torch.Tensor:
    """Distinct elements of an expanded tensor, each once."""
    return x[tuple(slice(None if stride else 1) for stride in x.stride())]


def alibi_slopes(heads: int, device: torch.device | str) -> torch.Tensor:
    """2^(-8 i / H) for head i = 1 .. H: float32 (H,), the slopes of Press et al. ("Train Short, Test Long", ICLR 2022)."""
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=device))


def own_mask(problem: Problem, device: torch.device | str, generator: torch.Generator, steps: Steps) -> torch.Tensor:
    """Mask (B, H, N_q, N_kv) that differs between batches and heads, and hides a third of the keys from each.

    Even heads don't see the first third of the keys, odd heads not the last; the last row sees no key. A bias hides them with -inf, and in
    the second half of the heads with its type's most negative number; both also occur at random among normal numbers. A row that would see
    such numbers alone gets none of them, since kernels differ from the reference there (decision 0003).
    """
    p = problem
    shape = p.batch, p.heads, p.n_q, p.n_kv
    sampled = torch.rand(shape, device=device, generator=generator)
    third = torch.zeros((p.heads, 1, p.n_kv), dtype=torch.bool, device=device)
    third[0::2, :, : p.n_kv // 3] = True
    third[1::2, :, p.n_kv - p.n_kv // 3 :] = True
    if p.features.mask == "bool":
        allowed = guarded(shape, torch.bool, device, spaced(shape, steps))
        allowed.copy_((sampled < 0.8) & ~third)
        allowed[..., -1, :] = False
        return allowed
    kind = TORCH_DTYPES[output_dtype(p.dtype)]
    bias = guarded(shape, kind, device, spaced(shape, steps))
    bias.normal_(generator=generator)
    with_lowest = torch.arange(p.heads, device=device) >= p.heads // 2
    lowest = (sampled > 0.9) | (third & with_lowest[:, None, None])
    hidden = (sampled < 0.1) | (third & ~with_lowest[:, None, None])
    lowest &= ~hidden
    seen = reference.visible(p.band, p.n_q, p.n_kv, device)
    lowest &= (seen & ~hidden & ~lowest).any(-1, keepdim=True)
    bias.masked_fill_(lowest, torch.finfo(kind).min).masked_fill_(hidden, -math.inf)
    bias[..., -1, :] = -math.inf
    return bias


def _allocated(shape: tuple[int, ...], kind: torch.dtype, device: torch.device | str, steps: Steps | None) -> torch.Tensor:
    """Uninitialised tensor between NaN (true, of a boolean one), contiguous or with these steps; of a meta tensor nothing is allocated."""
    strides = None if steps is None else spaced(shape, steps)
    if torch.device(device).type != "meta":
        return guarded(shape, kind, device, strides)
    if strides is None:
        return torch.empty(shape, dtype=kind, device=device)
    return torch.empty_strided(shape, strides, dtype=kind, device=device)


def _shared_bool_mask(problem: Problem, device: torch.device | str, generator: torch.Generator | None, steps: Steps | None) -> torch.Tensor:
    """Boolean mask (1, 1, N_q, N_kv), true for four of five pairs and for none of the last row; uninitialised without a generator."""
    mask = _allocated((1, 1, problem.n_q, problem.n_kv), torch.bool, device, steps)
    if generator is not None:
        mask.copy_(torch.rand(mask.shape, device=device, generator=generator) < 0.8)
        mask[..., -1, :] = False
    return mask


def make_inputs(
    problem: Problem,
    *,
    device: torch.device | str,
    seed: int,
    heads_inside: bool = False,
    own_masks: bool = False,
    sequences: tuple[tuple[int, int], ...] = (),
    poisoned: frozenset[int] = frozenset(),
    like: Mapping[str, Steps] = MappingProxyType({}),
) -> Inputs:
    """Standard normal operands (and mask, where the problem has one) on `device`; written operands are only allocated, and those written by
    an earlier forward come from the forward's oracle.

    Tensors are contiguous (B, H, N, D), or with `heads_inside` views of (B, N, H, D), as projections leave them. ALiBi's slopes are the
    geometric series of its paper; fp8 tensors have factors between 0.5 and 1.5, one per head; sinks weigh about as much as all keys
    together. All batches share a mask, and all heads a boolean one; with `own_masks` it is `own_mask`'s.

    Packed sequences lie one after the other as in calls of dispatch, with the problem's lengths or those of `sequences`; `poisoned` ones
    are NaN. Over pages there are also caches with their keys and values.

    Tensors that `like` has by name get its steps (`Inputs.steps`), so that kernels compiled for those serve these as well.

    On the "meta" device nothing is allocated: such inputs serve to compile a launch without a GPU.
    """
    meta = torch.device(device).type == "meta"
    generator = None if meta else torch.Generator(device=device).manual_seed(seed)
    p, f = problem, problem.features
    sequences = () if p.lengths is None else sequences or p.sequences()
    # Packed tensors are one batch with the rows of all sequences, and bounds between them.
    sizes, bounds = p, None
    if sequences:
        to_q, to_k = ([0, *accumulate(lengths)] for lengths in zip(*sequences, strict=True))
        sizes = replace(p, batch=1, n_q=to_q[-1], n_kv=to_k[-1])
        begins = torch.tensor(to_q, dtype=torch.int32, device=device)
        # One list for both, as callers have it, says that lengths are equal, and diagonals with them.
        bounds = [begins, begins if to_q == to_k else torch.tensor(to_k, dtype=torch.int32, device=device)]

    def allocated(name: str, shape: tuple[int, ...], dtype: DType, sampled: bool) -> torch.Tensor:
        inside = (heads_inside or bool(sequences)) and len(shape) == 4
        order = (0, 2, 1, 3) if inside else tuple(range(len(shape)))
        stored, kind, steps = tuple(shape[axis] for axis in order), TORCH_DTYPES[dtype], like.get(name)
        tensor = _allocated(stored, kind, device, None if steps is None else tuple(steps[axis] for axis in order))
        if sampled and not meta:
            # PyTorch generates no random fp8 numbers.
            small = kind.itemsize == 1
            tensor.copy_(torch.randn(stored, device=device, generator=generator)) if small else tensor.normal_(generator=generator)
        return tensor.transpose(1, 2) if inside else tensor

    def per_head(name: str, x: torch.Tensor) -> torch.Tensor:
        repeated, steps = x.expand(p.batch, x.shape[-1]), like.get(name)
        if steps is None or steps_of(repeated) == steps:
            return repeated
        return torch.empty_strided(repeated.shape, spaced(repeated.shape, steps), device=device).copy_(repeated)

    def factor(heads: int) -> torch.Tensor:
        shape = p.batch, heads
        return torch.empty(shape, device=device) if meta else torch.rand(shape, device=device, generator=generator) + 0.5

    def sink_logits() -> torch.Tensor:
        sampled = torch.empty((p.heads,), device=device) if meta else torch.randn((p.heads,), device=device, generator=generator)
        return sampled + math.log(p.n_kv)

    mask = None
    if f.mask != "none" and own_masks and generator is not None:
        mask = own_mask(p, device, generator, like.get("mask", (16, 16, 16, 1)))
    elif f.mask == "bias":
        mask = allocated("mask", (1, p.heads, p.n_q, p.n_kv), output_dtype(p.dtype), sampled=True)
    elif f.mask == "bool":
        mask = _shared_bool_mask(p, device, generator, like.get("mask"))
    of_q, of_k, of_v = FACTORS
    mods = FunctionTensors(of_hash(f.mods, device), p, torch.device(device)) if f.mods else None
    parameters = CallParameters(
        scale=p.d**-0.5,
        mods=None if mods is None else mods.functions.scores,
        band=p.band if bounds is None else replace(p.band, diagonal=int(f.alignment == "bottom_right")),
        mask=None if mask is None else mask.expand(p.batch, p.heads, p.n_q, p.n_kv),
        softcap=SOFTCAP if f.softcap else 0.0,
        dropout_p=DROPOUT_P if f.dropout else 0.0,
        seed=seed,
        slopes=per_head("alibi_slopes", alibi_slopes(p.heads, device)) if f.alibi else None,
        descale=(per_head(of_q, factor(p.heads)), per_head(of_k, factor(p.kv_heads)), per_head(of_v, factor(p.kv_heads)))
        if p.dtype == "fp8"
        else None,
        sinks=per_head("sinks", sink_logits()) if f.sinks else None,
        lengths=None if bounds is None else (bounds[0], bounds[1], None),
    )
    operands = {}
    for o in p.contract.operands:
        # Allocated at the bias's own sizes and expanded like the mask.
        shape = tuple(mask.shape) if o.name == "dbias" and mask is not None else o.shape(sizes)
        operands[o.name] = allocated(o.name, shape, o.dtype(p), sampled=not o.written and not o.from_forward).expand(o.shape(sizes))
        if sequences:
            x = operands[o.name]
            operands[o.name] = x.as_strided(x.shape, (0, *x.stride()[1:]), x.storage_offset())
    if f.latent:
        operands["v"] = operands["k"][..., : p.d_v]
    inputs = Inputs(problem=p, operands=operands, parameters=parameters, sequences=sequences, poisoned=poisoned, mods=mods)
    for index in poisoned:
        part = inputs.sequence(index)
        for o in p.contract.operands:
            without_repeats(part.operands[o.name]).fill_(float("nan"))
    if p.features.page:
        inputs = replace(inputs, pages=pages_of(p.features.page, sequences, (inputs.k, inputs.v), generator, latent=f.latent))
        inputs.store()
    if not meta:
        run_forward(inputs)
    return inputs


_FORWARD_ROWS = 1024
"""Rows of a head that the forward's oracle computes at a time, since their scores are float64."""


def run_forward(inputs: Inputs) -> None:
    """Recompute the operands that the forward writes, by the oracle; does nothing for a forward's own inputs."""
    p = inputs.problem
    from_earlier = [operand for operand in p.contract.operands if operand.from_forward]
    if not from_earlier:
        return
    for part, batches in inputs.parts():
        p = part.problem
        for batch, head, start in product(batches, range(p.heads), range(0, p.n_q, _FORWARD_ROWS)):
            place = Place(batch=batch, head=head, queries=slice(start, start + _FORWARD_ROWS))
            [found] = forward_oracle(p, part.operands, part.parameters, [place])
            for operand in from_earlier:
                part.operands[operand.name][operand.at(place, p)] = found[operand.name].to(part.operands[operand.name].dtype)
