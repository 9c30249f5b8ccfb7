"""Attention from a table of kernels: the launcher of the folders that `flashtune export --hub` writes, which hold copies of this module
and of those it imports, and run without flashtune."""

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flashtune.core.code.launches import Host
from flashtune.core.code.launching import LoadedKernel, launcher
from flashtune.core.gpu.target import plain_words
from flashtune.core.problems.band import Sides
from flashtune.core.problems.config import Config, KernelSpec, Variant
from flashtune.core.problems.parameters import CallParameters
from flashtune.core.problems.problem import DECODE_ROWS, MAX_HEAD_DIM, Features, MaskKind, Problem, ProblemKey
from flashtune.core.pytorch.attention import autocasting, out_strides, transformed
from flashtune.core.pytorch.dtypes import KERNEL_DTYPES
from flashtune.core.pytorch.private import C, sdpa
from flashtune.core.records.checked import Row as Values
from flashtune.core.records.checked import read_key
from flashtune.core.records.nearness import distance, octaves
from flashtune.core.system.errors import InputError
from flashtune.core.system.files import read_json
from flashtune.core.system.words import counted, shown

FORMAT = 1
"""Format of the table."""

MOST_BYTES = 1 << 26
"""Bytes of the largest table that is read; one of a thousand records has a hundredth of it."""

MOST_OCTAVES = 1.0
"""Doublings of N_q and of N_kv up to which a record serves other lengths."""

_PLAIN = (Tensor, torch.nn.Parameter)

_FLAWS = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""Errors of reading a value of another type or shape than an export writes."""

_Read = TypeVar("_Read")


class Row(NamedTuple):
    """A record of the table: its key, the kernel that won (None where PyTorch did), and its time in microseconds."""

    key: ProblemKey
    kernel: str | None
    median_us: float


class Gpu(NamedTuple):
    """A GPU of the table: its architecture (None where the exporter didn't know the card), and its names."""

    arch: str | None
    names: frozenset[str]


class Table(NamedTuple):
    """The records of a folder, its kernels by id, and its GPUs by slug."""

    rows: tuple[Row, ...] = ()
    kernels: Mapping[str, Variant] = {}
    gpus: Mapping[str, Gpu] = {}

    @classmethod
    def read(cls, path: Path) -> "tuple[Table, str]":
        """The sound part of the table in a file, and what is wrong with the rest (empty: nothing).

        A kernel is sound if its id is that of its template, spec and config; a record is if its kernel's spec is that of its problem.
        """
        flaws: list[str] = []
        try:
            found = read_json(path, MOST_BYTES)
            if found["format"] != FORMAT:
                raise ValueError(f"it has the format {shown(found['format'])}, not {FORMAT}")
            kernels = dict(_sound(_kernel, found["kernels"].items(), flaws))
            gpus = dict(_sound(_gpu, found["gpus"].items(), flaws))
            rows = tuple(_sound(functools.partial(_row, kernels, gpus), ((one,) for one in found["records"]), flaws))
        except (OSError, *_FLAWS) as error:
            return cls(), f"can't be read ({error!r})"
        return cls(rows, kernels, gpus), f"has {counted(len(flaws), 'damaged part')} ({flaws[0]})" if flaws else ""

    def ranked(self, problem: Problem, gpu: str | None, arch: str | None) -> list[Row]:
        """The records that may serve a problem, best first: those of the GPU before others of its architecture (None: of any), then the
        nearest in lengths, batches and heads. Head sizes, dtype, features and heads to a key head are the problem's own."""
        key = problem.key("")
        found: list[tuple[bool, float, float, int, Row]] = []
        for place, row in enumerate(self.rows):
            other = row.key
            same = all(getattr(other, name) == getattr(key, name) for name in ("direction", "d", "d_v", "dtype", "features", "gqa_ratio"))
            theirs = self.gpus[other.gpu].arch
            elsewhere = arch is not None and (theirs != arch if theirs is not None else other.gpu != gpu)
            if not same or elsewhere or not _near(key, other):
                continue
            apart = distance(key, replace(other, gpu=""))
            found.append((gpu is not None and other.gpu != gpu, apart, row.median_us, place, row))
        return [row for *_, row in sorted(found)]


def _sound(read: Callable[..., _Read], parts: Iterable[tuple[Any, ...]], flaws: list[str]) -> Iterator[_Read]:
    """Results of `read` for the parts that it can read; the others' errors become flaws."""
    for part in parts:
        try:
            yield read(*part)
        except _FLAWS as error:
            flaws.append(str(error) if isinstance(error, ValueError) else repr(error))


def _kernel(name: str, found: Mapping[str, Any]) -> tuple[str, Variant]:
    variant = Variant(template=found["template"], spec=KernelSpec(**found["spec"]), config=Config.of(found["config"]))
    if variant.id != name:
        raise InputError(f"kernel {shown(name)} isn't what its id says")
    return name, variant


def _gpu(slug: str, found: Mapping[str, Any]) -> tuple[str, Gpu]:
    arch, names = found["arch"], found["names"]
    if not isinstance(arch, str | None) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"GPU {shown(slug)} has the architecture {shown(arch)} and the names {shown(names)}")
    return slug, Gpu(arch, frozenset(names))


def _row(kernels: Mapping[str, Variant], gpus: Mapping[str, Gpu], found: Mapping[str, Any]) -> Row:
    """A record with the types that a database's records have, of a sound kernel for its problem."""
    key, name = read_key(Values(found["key"])), found["kernel"]
    problem = Problem(
        batch=1,
        heads=key.gqa_ratio,
        kv_heads=1,
        n_q=key.n_q,
        n_kv=key.n,
        d=key.d,
        d_v=key.d_v,
        dtype=key.dtype,
        features=Features.from_json(json.loads(key.features)),
        direction=key.direction,
    )
    if key.gpu not in gpus or not (name is None or name in kernels):
        raise InputError(f"the record of {problem.label()} names {shown(key.gpu)} and {shown(name)}, which aren't sound")
    if name is not None and kernels[name].spec != problem.spec():
        raise InputError(f"the record of {problem.label()} names a kernel of {kernels[name].spec.label()}")
    return Row(key, name, Values(found).real("median_us"))


def module_of(variant: Variant) -> str:
    """The name of the module that holds a variant's text."""
    return f"{variant.template}_{variant.spec.label().replace('-', '_')}_{variant.id}"


def _near(a: ProblemKey, b: ProblemKey) -> bool:
    """True if a record of one key may serve lengths of the other."""
    if (a.n_q <= DECODE_ROWS) != (b.n_q <= DECODE_ROWS):
        return False
    return max(octaves(a.n, b.n), octaves(a.n_q, b.n_q)) <= MOST_OCTAVES


class Chosen(NamedTuple):
    """The record and the kernel of a call, its problem, and its mask as a view of all scores."""

    row: Row
    kernel: LoadedKernel
    problem: Problem
    mask: Tensor | None


class Standalone:
    """Attention by the kernels of one folder.

    `table` is its file, `hosts` the host code of each family, and `load` imports the module of a kernel's text by its name. What is damaged
    in the table is left out, with one warning: PyTorch serves in its place.
    """

    def __init__(self, table: Path, hosts: Mapping[str, Callable[[KernelSpec, Config], Host]], load: Callable[[str], ModuleType]) -> None:
        self._hosts, self._load = hosts, load
        self._table, damage = Table.read(table)
        if damage:
            warnings.warn(f"{table} {damage}, and PyTorch runs the calls of what is left out: export the folder again", stacklevel=2)
        self._kernels: dict[str, LoadedKernel | None] = {}
        self._ranked = functools.lru_cache(4096)(self._ranked_on)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """softmax(scale query keyᵀ) value, with the signature and meaning of F.scaled_dot_product_attention.

        query (B, Hq, N_q, D), key (B, Hkv, N_kv, D), value (B, Hkv, N_kv, D_v); returns (B, Hq, N_q, D_v) in their dtype. A kernel of this
        folder serves a call where a record's head sizes, dtype, features and heads to a key head are the call's, and its lengths are within
        a factor of two; PyTorch serves every other call, and those whose gradient is needed. `explain` says which.

        Rows with nothing to attend to give 0.
        """
        chosen = self._chosen(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if not isinstance(chosen, str):
            out = self._launched(chosen, query, key, value, scale)
            if out is not None:
                return out
        found: Tensor = sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return found

    def explain(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **words: Any) -> str:
        """The kernel that serves a call with `attention`'s arguments, or the reason why PyTorch does, in a line."""
        chosen = self._chosen(query, key, value, attn_mask, **words)
        if isinstance(chosen, str):
            return f"PyTorch runs the call: {chosen}"
        row = chosen.row
        return f"{chosen.kernel.name} runs the call, by a record of {row.key.gpu} at N={row.key.n} (kernel {row.kernel})"

    def _chosen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Chosen | str:
        """The kernel of a call; the reason where PyTorch serves it."""
        why = _why_torch(query, key, value, attn_mask) or _unlike(query, key, value, attn_mask, enable_gqa=enable_gqa)
        if why or dropout_p or (is_causal and attn_mask is not None) or not (scale is None or isinstance(scale, (int, float))):
            return why or "its options are PyTorch's alone"
        kind: MaskKind = "none" if attn_mask is None else "bool" if attn_mask.dtype is torch.bool else "bias"
        problem = _problem(query, key, value, kind, is_causal)
        ranked = self._ranked(problem, query.device)
        mask = None if attn_mask is None else attn_mask.expand(problem.batch, problem.heads, problem.n_q, problem.n_kv)
        for row in ranked:
            if row.kernel is None:
                return f"its own attention won at N={row.key.n} on {row.key.gpu}"
            loaded = self._loaded(row.kernel)
            if loaded is not None and loaded.accepts(query, key, value, mask):
                return Chosen(row, loaded, problem, mask)
        return "no record is near this problem" if not ranked else "no kernel takes tensors of this layout"

    def _ranked_on(self, problem: Problem, device: torch.device) -> list[Row]:
        """The records for a problem on a device, best first; of any GPU in Triton's interpreter."""
        if device.type == "cpu":
            return self._table.ranked(problem, None, None)
        facts = torch.cuda.get_device_properties(device)
        name = "".join(plain_words(facts.name))
        gpu = next((slug for slug, known in self._table.gpus.items() if name in known.names), None)
        return self._table.ranked(problem, gpu, f"{facts.major}{facts.minor}")

    def _loaded(self, name: str) -> LoadedKernel | None:
        """The kernel of an id; None, with one warning, where this Triton can't import it."""
        if name not in self._kernels:
            kernel = self._table.kernels[name]
            try:
                host = self._hosts[kernel.template](kernel.spec, kernel.config)
                self._kernels[name] = LoadedKernel(host, self._load(module_of(kernel)), f"{kernel.template} {kernel.spec.label()}")
            except Exception as error:
                self._fail(name, error)
        return self._kernels[name]

    def _fail(self, name: str, error: Exception) -> None:
        """Leave out a kernel from now on."""
        self._kernels[name] = None
        self._ranked.cache_clear()
        warnings.warn(f"kernel {name} can't run here, so other kernels or PyTorch run its calls: {error}", stacklevel=4)

    def _launched(self, chosen: Chosen, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
        """The output of a kernel on the current stream; None, with one warning, where it can't be compiled or launched."""
        row, kernel, problem, mask = chosen
        shape = (problem.batch, problem.heads, problem.n_q, problem.d_v)
        out = torch.empty_strided(shape, out_strides(shape, query.stride()), dtype=query.dtype, device=query.device)
        lse = torch.empty(shape[:3], dtype=torch.float32, device=query.device)
        parameters = CallParameters(
            scale=1 / math.sqrt(problem.d) if scale is None else float(scale),
            band=problem.band,
            mask=mask,
        )
        try:
            with torch.cuda.device(query.device) if query.device.type == "cuda" else nullcontext():
                launcher(kernel)(query, key, value, out, lse, **parameters.keywords())
        except Exception as error:
            assert row.kernel is not None, "only kernels are launched"
            self._fail(row.kernel, error)
            return None
        return out


def _why_torch(*tensors: Tensor | None) -> str | None:
    """The reason why only PyTorch's operations can serve these tensors now, or None where a kernel may."""
    given = [x for x in tensors if x is not None]
    if torch.compiler.is_compiling() or transformed() or C._len_torch_dispatch_stack() or C._is_tracing():
        return "a compiler, a transform or a tracer watches torch's operations"
    if any(type(x) not in _PLAIN for x in given):
        return "tensor subclasses have their own dispatch"
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "the call's gradient is needed"
    device = given[0].device
    if any(x.device != device for x in given) or autocasting(device.type):
        return "its tensors are on several devices, or under autocast"
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return "flash attention is switched off (torch.nn.attention.sdpa_kernel)"
    if device.type == "cuda":
        return None if torch.version.cuda is not None else "the kernels are for NVIDIA's GPUs"
    return None if device.type == "cpu" and _interpreting() else "kernels run on GPUs (or on the CPU with TRITON_INTERPRET=1)"


def _interpreting() -> bool:
    """True if Triton's interpreter runs kernels."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def _unlike(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, enable_gqa: bool) -> str | None:
    """The reason why shapes or dtypes are none of the table's, or None."""
    if not (q.dim() == k.dim() == v.dim() == 4 and q.shape[0] == k.shape[0] == v.shape[0]):
        return "q, k and v need four dimensions and equal batches"
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or 0 in (*q.shape, *k.shape, *v.shape):
        return "the shapes of q, k and v don't fit, or one of them is empty"
    if max(q.shape[3], v.shape[3]) > MAX_HEAD_DIM:
        return f"no kernel takes heads larger than {MAX_HEAD_DIM}"
    if q.shape[1] != k.shape[1] and (not enable_gqa or q.shape[1] % k.shape[1]):
        return "the heads of q and k differ without enable_gqa"
    if q.dtype not in KERNEL_DTYPES or not q.dtype == k.dtype == v.dtype or any(x.is_neg() or x.is_conj() for x in (q, k, v)):
        return "no kernel takes these dtypes"
    if mask is None:
        return None
    if mask.dtype not in (torch.bool, q.dtype) or mask.dim() > 4:
        return "no kernel takes this mask's dtype"
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    fits = all(size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(full), strict=False))
    return None if fits else "the mask's shape doesn't broadcast"


def _problem(q: Tensor, k: Tensor, v: Tensor, mask: MaskKind, is_causal: bool) -> Problem:
    """The problem of a call, without a band that hides nothing."""
    (batch, heads, n_q, d), (_, kv_heads, n_kv, d_v) = q.shape, v.shape
    band = Sides.of(None, is_causal, "top_left").band(n_q, n_kv)
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        n_q=n_q,
        n_kv=n_kv,
        d=d,
        d_v=d_v,
        dtype=KERNEL_DTYPES[q.dtype],
        features=Features.within(band, mask=mask),
    )
