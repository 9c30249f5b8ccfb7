"""Lazy definition of PyTorch operators: only tracers need them, and every new process would wait for them.

Lookups that bypass Python, as from an AOTInductor package, find them after any access to torch.ops.flashtune.
"""

import threading
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.problems import reference
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.parameters import PER_HEAD
from flashtune.core.problems.problem import FLAGS, Features, MaskKind, Problem
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.attention import out_strides
from flashtune.core.pytorch.dtypes import output_torch_dtype
from flashtune.dispatch.call import inspection
from flashtune.dispatch.call.call import Call, Outputs, PerHead, Returned
from flashtune.dispatch.call.inspection import DECIDED, GRADIENTS, autocast, switched_off, transformed, why_torch_ever
from flashtune.dispatch.call.parse import Arguments, Options, parse, seed_bits, signed
from flashtune.dispatch.decisions import backwards
from flashtune.dispatch.plans import pytorch
from flashtune.dispatch.plans.autograd import refuse_twice
from flashtune.dispatch.plans.gradients import BackwardInputs
from flashtune.dispatch.plans.plan import capturing, random_bits
from flashtune.dispatch.policy.offers import OURS
from flashtune.dispatch.providers.libraries import traced_backend
from flashtune.dispatch.state import context
from flashtune.dispatch.state.context import Memo


def define_lazily(define: Callable[[], None], name: str = "flashtune") -> None:
    """Call `define` at the first lookup in a namespace of torch.ops, in any thread; once more where it was interrupted."""
    namespace: Any = getattr(torch.ops, name)
    lock, state = threading.RLock(), {"defined": False, "defining": False}

    def lookup(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with lock:
            # Defining an operator looks it up, too.
            if not (state["defined"] or state["defining"]):
                state["defining"] = True
                try:
                    define()
                    state["defined"] = True
                finally:
                    state["defining"] = False
            return type(namespace).__getattr__(namespace, name)

    # PyTorch's namespaces are modules, for which __getattr__ serves missing names (PEP 562).
    namespace.__getattr__ = lookup


class CallNumbers(NamedTuple):
    """Scalar arguments of an operator but for the seed; `left` and `right` include `is_causal`.

    Where `trains` is True, kernels compute gradients, too, and the output comes with its LSE.
    """

    dropout_p: float
    scale: float
    left: int
    right: int
    softcap: float
    causal_alignment: str
    return_lse: bool
    allow_tf32: bool
    deterministic: bool
    trains: bool

    @classmethod
    def of(cls, call: Call, causal_alignment: str, *, trains: bool) -> "CallNumbers":
        """Numbers of a checked call."""
        sides, tf32 = call.band.keywords(), call.problem is not None and call.problem.features.tf32
        numbers = call.dropout_p, call.scale, sides["window_left"], sides["window_right"], call.softcap
        return cls(*numbers, causal_alignment, call.return_lse or trains, tf32, call.deterministic, trains)

    def options(self, query: Tensor, key: Tensor) -> Options:
        """Options of `attention` for these and 4-D tensors."""
        kwargs = {name: x for name, x in self._asdict().items() if name in Options._fields}
        return Options(**kwargs, window=(self.left, self.right), enable_gqa=query.shape[1] != key.shape[1])


def schema_of(numbers: type[Any]) -> str:
    """Numbers of a named tuple as an operator's schema has them."""
    kinds = {name: str(getattr(kind, "__name__", kind)).replace(" | None", "?") for name, kind in numbers.__annotations__.items()}
    return ", ".join(f"{kind} {name}" for name, kind in kinds.items())


_NUMBERS = schema_of(CallNumbers)
_PER_HEAD = ", ".join(f"Tensor? {name}" for name in PER_HEAD)
_FORWARD = f"(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, {_PER_HEAD}, int? seed, {_NUMBERS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    "(Tensor dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor state, Tensor? attn_mask, "
    "Tensor? alibi_slopes, Tensor? sinks, bool of_query, bool of_keys, bool of_mask, bool of_slopes, bool of_sinks, "
    f"{_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_KEEP = "(Tensor like, int seed, int batch, int heads, int n_q, int n_kv, float p) -> Tensor"

_forwards = threading.local()
"""In `memo`, the dispatch state under which the forward ran whose gradients this thread computes."""


def traced(arguments: Arguments, options: Options) -> Returned:
    """`attention` while a compiler traces it, without a graph break."""
    if inspection.nested(arguments, options):
        return inspection.torchs(*arguments[:4], options)
    arguments = Arguments(*autocast(*arguments[:4]), arguments.seed, arguments.per_head)
    call = parse(arguments, options)
    inspection.refuse_distributed(call, arguments, options)
    named = options.implementation
    why_torch = "transformed" if transformed() or switched_off() else why_torch_ever(*arguments[:4], arguments.per_head)
    if named not in (None, OURS):
        why_torch = "another implementation is named"
    # A forward without gradients may be recomputed with them, and has to drop the same pairs.
    draws = call.torch_draws and (why_torch is None or why_torch in GRADIENTS)
    trains = (draws or why_torch in GRADIENTS) and _trains(call, () if why_torch is None else GRADIENTS[why_torch])
    if trains or (why_torch is None and not draws):
        out, lse = _node(call, arguments, CallNumbers.of(call, options.causal_alignment, trains=trains and why_torch is not None))
    else:
        keep = None
        if call.dropout_p and not call.fused_by_torch:
            sizes = (call.batch, call.heads, call.n_q, call.n_kv)
            if arguments.seed is None:
                keep = torch.rand(sizes, device=call.device) >= call.dropout_p
            else:
                keep = torch.ops.flashtune.dropout_keep(arguments.query, signed(seed_bits(arguments.seed)), *sizes, call.dropout_p)
        with traced_backend(named, call):
            out, lse = pytorch.attention_by_torch(call, *arguments[:4], keep, arguments.per_head)
    return (out, lse) if call.return_lse else out  # type: ignore[return-value]


def _node(call: Call, arguments: Arguments, numbers: CallNumbers) -> Outputs:
    """Output and, where `return_lse` is set, LSE by the operator."""
    given = [x if x is None or isinstance(x, Tensor) else torch.full((), x, device=call.device) for x in arguments.per_head or PerHead()]
    per_head = PerHead(*given)
    if per_head.sinks is not None and numbers.trains:
        # Their gradient is summed over batches before it is rounded.
        per_head = per_head._replace(sinks=per_head.sinks.float())
    seed = None if arguments.seed is None else signed(seed_bits(arguments.seed))
    tensors = *call.views(*arguments[:3]), call.small_mask(arguments.attn_mask), *per_head.views(call)
    out, lse, _ = torch.ops.flashtune.attention(*tensors, seed, *numbers)
    return call.restored(out), call.restored(lse) if call.return_lse else None


def _trains(call: Call, requested: Sequence[str]) -> bool:
    """True where backward kernels may serve calls like this one, with `requested` gradients beside dQ, dK and dV."""
    problem = call.problem
    if problem is None:
        return False
    # Sizes don't matter: only the existence of a measured record counts.
    f, device = problem.features, call.device
    # A tracer may hold symbolic truth values, which a branch makes constants, and sizes, for which `index` does and `int` doesn't.
    flags = [name for name, flag in (("causal", f.causal), *((name, getattr(f, name)) for name in FLAGS)) if flag]
    window = None if f.window is None else [None if side is None else index(side) for side in f.window]
    deterministic, composite = (True if flag else False for flag in (call.deterministic, backwards.composite(call)))  # noqa: SIM210
    place, ratio = -1 if device.index is None else device.index, index(problem.heads) // index(problem.kv_heads)
    return _trainable(
        device.type, place, problem.dtype, problem.d, problem.d_v, ratio, f.mask, window, [*flags, *requested], deterministic, composite
    )


def _trainable(
    device: str,
    index: int,
    dtype: DType,
    d: int,
    d_v: int,
    ratio: int,
    mask: MaskKind,
    window: Sequence[int | None] | None,
    flags: Sequence[str],
    deterministic: bool,
    composite: bool,
) -> bool:
    """True where backward kernels may serve problems like this one, of usual sizes.

    `flags` are the features and requested gradients that are True; `composite` is the result of `backwards.composite`. A compiler that
    traces treats the result as a constant, and passes plain values alone.
    """
    target = devices.target_of(torch.device(device, index) if index >= 0 else torch.device(device))
    left, right = window or (None, None)
    features = Features(mask=mask, window=None if window is None else (left, right), **dict.fromkeys(flags, True))  # type: ignore[arg-type]
    sizes = {"batch": 1, "heads": ratio, "kv_heads": 1, "n_q": 1, "n_kv": 1, "d": d, "d_v": d_v}
    problem = backwards.usual(Problem(**sizes, dtype=dtype, features=features, direction="bwd", lengths=None))
    memo = context.current()
    with memo.lock:
        return backwards.gradient_choice(memo, problem, target, deterministic=deterministic, composite=composite)[0] is not None


# As torch.compiler.assume_constant_result sets it, whose import brings the compiler.
_trainable._dynamo_marked_constant = True  # type: ignore[attr-defined]


def define(eager: Callable[..., Any]) -> None:
    """Define the operators; `eager` is flashtune.dispatch.attention."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        attn_mask, *per_head = others[: 1 + len(PER_HEAD)]
        seed, numbers = others[1 + len(PER_HEAD)], CallNumbers(*others[2 + len(PER_HEAD) :])
        bits = None
        if numbers.dropout_p and (numbers.trains or seed is not None or not capturing(query.device)):
            # The same with gradients and without, since a recomputed checkpoint has run without them first.
            bits = random_bits(seed, query.device)[0]
        # Repeatability concerns the backward alone.
        options = numbers._replace(deterministic=False).options(query, key)
        # Where a kernel computes the backward, PyTorch's operations would need memory of all scores for the LSE.
        DECIDED.kernels = numbers.trains
        try:
            with torch.no_grad():
                given = dict(zip(PER_HEAD, per_head, strict=True))
                found = eager(query.detach(), key.detach(), value.detach(), attn_mask, seed=bits, **options._asdict(), **given)
        finally:
            DECIDED.kernels = False
        out, lse = found if numbers.return_lse else (found, query.new_empty(0, dtype=torch.float32))
        if out.stride() != out_strides(tuple(out.shape), query.stride()):
            # PyTorch's own backends may choose other strides.
            out = _like_query(query, value.shape[3]).copy_(out)
        state = torch.tensor([signed(bits or 0)]) if numbers.dropout_p else query.new_empty(0, dtype=torch.int64)
        return out, lse.contiguous(), state

    operator = torch.library.custom_op(
        "flashtune::attention", attention, mutates_args=(), schema=_FORWARD, tags=(torch.Tag.nondeterministic_seeded,)
    )

    @operator.register_fake
    def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
        numbers = CallNumbers(*others[2 + len(PER_HEAD) :])
        lse = query.new_empty(query.shape[:3] if numbers.return_lse else (0,), dtype=torch.float32)
        state = torch.empty(1, dtype=torch.int64) if numbers.dropout_p else query.new_empty(0, dtype=torch.int64)
        return _like_query(query, value.shape[3]), lse, state

    backward = torch.library.custom_op("flashtune::attention_gradients", _gradients, mutates_args=(), schema=_BACKWARD)

    @backward.register_fake
    def _(dout: Tensor, dlse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
        _, _, _, attn_mask, slopes, sinks, of_query, of_keys, of_mask, of_slopes, of_sinks, *_ = others
        more = [
            query.new_empty(0) if x is None or not requested else x.new_empty(x.shape)
            for x, requested in ((attn_mask, of_mask), (slopes, of_slopes), (sinks, of_sinks))
        ]
        return *_written(query, key, value, of_query, of_keys), *more

    operator.register_autograd(_differentiated, setup_context=_keep)
    backward.register_autograd(refuse_twice, setup_context=lambda ctx, inputs, output: None)
    keep = torch.library.custom_op("flashtune::dropout_keep", _dropout_keep, mutates_args=(), schema=_KEEP)

    @keep.register_fake
    def _(like: Tensor, seed: int, batch: int, heads: int, n_q: int, n_kv: int, p: float) -> Tensor:
        return like.new_empty((batch, heads, n_q, n_kv), dtype=torch.bool)


def _dropout_keep(like: Tensor, seed: int, batch: int, heads: int, n_q: int, n_kv: int, p: float) -> Tensor:
    """The reference's dropout mask on the device of `like`; an operator, since tracing would unroll its loop over heads."""
    return reference.dropout_keep(seed % 2**64, 0, batch, heads, n_q, n_kv, p, device=like.device)


def _like_query(query: Tensor, columns: int) -> Tensor:
    """Empty output with the query's memory order."""
    shape = query.shape[0], query.shape[1], query.shape[2], columns
    return query.new_empty_strided(shape, out_strides(shape, query.stride()), dtype=output_torch_dtype(query.dtype))


def _written(query: Tensor, key: Tensor, value: Tensor, of_query: bool, of_keys: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised gradients, each laid out as its input; empty for those not requested."""
    dq, dk, dv = (
        x.new_empty_strided(x.shape, out_strides((x.shape[0], x.shape[1], x.shape[2], x.shape[3]), x.stride()))
        if requested
        else x.new_empty(0)
        for x, requested in ((query, of_query), (key, of_keys), (value, of_keys))
    )
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save the inputs, the output, the LSE and the random state for the backward."""
    query, key, value, attn_mask, *per_head = inputs[: 4 + len(PER_HEAD)]
    given = PerHead(*per_head)
    ctx.save_for_backward(query, key, value, *output, attn_mask, given.alibi_slopes, given.sinks)
    ctx.numbers = inputs[5 + len(PER_HEAD) :]
    # Autograd's threads have no layers of their own.
    ctx.memo = context.current()
    ctx.set_materialize_grads(False)


def _differentiated(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    """Gradients of all arguments of the forward operator."""
    query, key, value, *others = ctx.saved_tensors
    names = ["query", "key", "value", "attn_mask", *PER_HEAD]
    wanted = [*names[:4], "alibi_slopes", "sinks"]
    found: dict[str, Tensor | None] = {}
    if dout is not None or dlse is not None:
        dout = torch.zeros_like(others[0]) if dout is None else dout
        requested = [ctx.needs_input_grad[names.index(name)] for name in wanted]
        given = gradients(ctx.memo, requested, dout, dlse, query, key, value, *others, numbers=ctx.numbers)
        found = dict(zip(wanted, given, strict=True))
    return *(found.get(name) for name in names), *(None,) * (1 + len(ctx.numbers))


def gradients(memo: Memo, requested: Sequence[bool], *tensors: Tensor | None, numbers: Sequence[Any]) -> Any:
    """Requested gradients of query, key, value, mask, slopes and sinks, by the operator, which takes these tensors."""
    of_query, of_key, of_value, *of_others = requested
    # Autograd's threads have no layers of their own.
    _forwards.memo = memo
    try:
        found = torch.ops.flashtune.attention_gradients(*tensors, of_query, of_key or of_value, *of_others, *numbers)
    finally:
        _forwards.memo = None
    return tuple(grad if wanted else None for grad, wanted in zip(found, requested, strict=True))


def _gradients(dout: Tensor, dlse: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    """Gradients by the best backward kernel that takes the call, else by the reference."""
    query, key, value, out, lse, state, attn_mask, alibi_slopes, sinks, *rest = others
    memo = getattr(_forwards, "memo", None) or context.current()
    tensors = query, key, value, attn_mask, alibi_slopes, sinks
    kinds = tuple(None if x is None else (x.shape, x.dtype) for x in tensors)
    requested, numbers = rest[:5], CallNumbers(*rest[5:])
    per_head = PerHead(alibi_slopes=alibi_slopes, sinks=sinks)
    backward = backwards.backward_of(
        memo,
        (kinds, query.device, numbers),
        lambda: parse(Arguments(query, key, value, attn_mask, per_head=per_head), numbers.options(query, key)),
    )
    seed = int(state.item()) % 2**64 if numbers.dropout_p else 0
    inputs = BackwardInputs(query, key, value, out, lse, dout, dlse, attn_mask, alibi_slopes, sinks, seed, *requested)
    return tuple(query.new_empty(0) if grad is None else grad for grad in backward.gradients(inputs))
