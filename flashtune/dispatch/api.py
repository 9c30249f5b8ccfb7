"""`attention`: PyTorch's F.scaled_dot_product_attention, run by the best kernel known for the GPU and the sizes."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch.overrides import has_torch_function_unary, has_torch_function_variadic

from flashtune.core.problems.band import Window
from flashtune.core.problems.parameters import PER_HEAD
from flashtune.core.problems.problem import MAX_HEAD_DIM
from flashtune.core.pytorch.attention import autocasting, in_columns
from flashtune.core.pytorch.flex import Mod
from flashtune.core.pytorch.private import FORWARD_AD, C, scripted
from flashtune.dispatch import operators, training
from flashtune.dispatch.call import inspection
from flashtune.dispatch.call.call import Call, Outputs, PerHead, Returned, trained_as
from flashtune.dispatch.call.inspection import (
    GRADIENT,
    ON_THE_CPU,
    PERHAPS_FAKE,
    flash_attention_on,
    places_in_memory,
    prepared,
    why_torch_now,
)
from flashtune.dispatch.call.parse import Arguments, Options, check_window, parse, seed_bits, settled, unwrapped
from flashtune.dispatch.decisions import by_plan, resolve
from flashtune.dispatch.decisions.explanation import Explanation
from flashtune.dispatch.decisions.resolve import Candidate
from flashtune.dispatch.operators import define_lazily
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.plan import Plan, Plans, capturing, restorer
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.policy.offers import TORCHS, measured_record, offers
from flashtune.dispatch.policy.records import Pool
from flashtune.dispatch.providers.libraries import PROVIDERS
from flashtune.dispatch.providers.provider import ProviderPlan
from flashtune.dispatch.state import recorded as calls
from flashtune.dispatch.state.context import STACK, Memo, current
from flashtune.dispatch.typed import DenseKeywords, with_signature_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

functions: Any = None
"""The module of masks and scores as code, which is above this one, and puts itself here: some masks come back as windows."""


@overload
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[False] = ...,
    **keywords: Unpack[DenseKeywords],
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: Literal[True],
    **keywords: Unpack[DenseKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., scale: float | None = ..., enable_gqa: bool = ..., *, return_lse: bool = ...,
    **keywords: Unpack[DenseKeywords],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | Window | None = None,
    softcap: float = 0.0,
    causal_alignment: str = "top_left",
    return_lse: bool = False,
    seed: int | None = None,
    allow_tf32: bool = False,
    alibi_slopes: torch.Tensor | None = None,
    q_descale: torch.Tensor | float | None = None,
    k_descale: torch.Tensor | float | None = None,
    v_descale: torch.Tensor | float | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    score_mod: Mod | None = None,
    block_mask: "BlockMask | Mod | None" = None,
    implementation: str | None = None,
) -> Returned:
    """softmax(scale query keyᵀ) value, with the signature and meaning of F.scaled_dot_product_attention.

    Tensors have two or more dimensions, and leading ones broadcast. Rows with nothing to attend to give 0.

    Args:
        query: (..., Hq, N_q, D).
        key: (..., Hkv, N_kv, D).
        value: (..., Hkv, N_kv, D_v). In decoding steps with D above 256, values that are the first columns of keys (`key[..., :D_v]`) are
            read with these, once for both.
        attn_mask: a boolean mask, True for visible pairs, or a floating-point bias, which is added to the scores. It broadcasts to
            (..., Hq, N_q, N_kv); kernels never expand it in memory. torch.nn.attention.bias.CausalBias is causal without a mask.
            Kernels treat a bias below -1.1e38 as -inf. If a whole row has such bias, its output is 0; PyTorch gives the values' mean.
        dropout_p: rate of dropped probabilities, from 0 to 1.
        is_causal: hide the keys right of the diagonal.
        scale: factor of the scores; None is 1 / sqrt(D).
        enable_gqa: allow Hq to be a multiple of Hkv.
        window: W, or (left, right) with None or -1 for unbounded: query i sees keys i - left .. i + right. `is_causal` sets right to 0.
        softcap: c > 0 turns each score s into c tanh(s / c), before masks and bias; kernels come within 3e-6 c of it.
        causal_alignment: where the diagonal of `is_causal` and `window` starts if N_q != N_kv: "top_left" as in PyTorch, or
            "bottom_right" as in flash-attn, which aligns the last query with the last key.
        return_lse: return (output, lse). The lse is the natural logarithm of the softmax's denominator before dropout, float32
            (..., Hq, N_q), -inf for rows with nothing to attend to.
        seed: 64 bits that fix dropout's mask as a function of absolute indices (flashtune.core.problems.reference.dropout_keep with
            offset 0). None samples from PyTorch's generator: the same state of the generator gives the same mask, with gradients or
            without. Kernels drop other pairs than PyTorch.
        allow_tf32: allow kernels to multiply float32 inputs as TF32.
        alibi_slopes: float32 (Hq,) or (B, Hq), as in flash-attn. The score of query i and key j loses slope |i + shift - j|, after
            softcap and before masks; the shift is that of `causal_alignment`.
        q_descale: factor of torch.float8_e4m3fn queries: a number or a float32 tensor for all, or one for each head, (H,) or (B, H). It
            must be above 0, which isn't checked in tensors. The output is bfloat16. If a factor changes from call to call, or under CUDA
            graphs, give a tensor: a number is written to the device at its first call.
        k_descale: the same for keys, by the heads of the key.
        v_descale: the same for values, by the heads of the key; any number.
        sinks: attention sinks as in GPT-OSS, (Hq,) or (B, Hq), float32 or in the output's dtype: a logit of each query head (finite or
            -inf) that joins each softmax's denominator, as one more key whose value is 0 would. It isn't scaled, capped or masked. It is
            part of the LSE; if a row has nothing else to attend to, its LSE is the sink.
        deterministic: gradients are bitwise repeatable, as torch.use_deterministic_algorithms requires of all operations. Kernels that
            accumulate in no fixed order don't run then. If PyTorch runs the call, its math backend does, with memory for all scores.
        score_mod: scores as a function, (score, b, h, q_idx, kv_idx) to a score, as in `flex_attention`.
        block_mask: a mask as a function, as there: a BlockMask or a mask_mod. Together with score_mod or block_mask only scale,
            enable_gqa, return_lse and implementation are taken.
        implementation: who runs the call, whatever the records say: "flashtune" (kernels of ours), "torch" (PyTorch's own choice), its
            backends "flash", "cudnn", "efficient" and "math", "flex" (FlexAttention), "fa4" (flash-attn-4), "fa2" (flash-attn),
            "cudnn_fe" (nvidia-cudnn-frontend, heads to 512) or "ffpa" (ffpa-attn, heads from 320 to 1024). Under torch.compile PyTorch's
            are traced as its own operation, and so are calls that name another.

    Returns:
        The output (..., Hq, N_q, D_v), and with `return_lse` (output, lse).

    Raises:
        InputError: for arguments that make no sense, and for an implementation that can't run the call.
        InputTypeError: for arguments of a wrong type.

    flashtune.dispatch.policy.choose.rank chooses the kernel. If none can run the call, PyTorch's operations do, with every feature and
    gradients: on the CPU, for float64, for heads larger than 512 (in decoding steps 576), for gradients of heads beyond 256 except on
    Hopper, for dropout without a seed while a CUDA graph is captured, and if sdpa_kernel excludes flash attention. Some features (softcap,
    return_lse, seed) then take memory for all scores.

    If a gradient is needed, kernels run a call in three cases: a backward record was measured on the GPU's architecture; the call is
    full or causal on Hopper, with heads of 257 to 512 and at least 1,024 queries and keys; or `use(unmeasured=True)` allows unmeasured
    kernels. Otherwise PyTorch runs it, under a mask without cuDNN, whose gradients can be NaN there. A bias, slopes and sinks get
    gradients of their own sizes. Kernels have first derivatives only.
    """
    if score_mod is not None or block_mask is not None:
        if not (
            attn_mask is alibi_slopes is q_descale is k_descale is v_descale is sinks is None is window
            and (seed is None and causal_alignment == "top_left" and dropout_p is softcap is _ZERO)
            and is_causal is allow_tf32 is deterministic is False
        ):
            functions.refuse_arguments_of_attention(locals())
        words = scale, enable_gqa, return_lse
        found: Returned = functions.flex_attention(query, key, value, score_mod, block_mask, *words, implementation=implementation)
        return found
    if has_torch_function_variadic(query, key, value):
        return inspection.overridden(attention, **locals())
    if attn_mask is not None:
        if inspection.is_causal_bias(attn_mask):
            is_causal, causal_alignment = inspection.causal_of(attn_mask, query, key, is_causal)
            attn_mask = None
        elif has_torch_function_unary(attn_mask):
            return inspection.overridden(attention, **locals())
    per_head = None
    if alibi_slopes is not None or sinks is not None or q_descale is not None or k_descale is not None or v_descale is not None:
        per_head = PerHead(alibi_slopes, q_descale, k_descale, v_descale, sinks)
    # A plain tuple: a named one takes several times as long to make.
    options: tuple[Any, ...]
    options = (dropout_p, is_causal, scale, enable_gqa, window, softcap, causal_alignment, return_lse, allow_tf32, deterministic)
    if implementation is not None:
        options = (*options, implementation)
    if torch.compiler.is_compiling():
        return operators.traced(Arguments(query, key, value, attn_mask, seed, per_head), Options(*settled(options)))
    if not (
        is_causal.__class__ is enable_gqa.__class__ is return_lse.__class__ is allow_tf32.__class__ is deterministic.__class__ is bool
        and dropout_p.__class__ is softcap.__class__ is float
        and (scale is None or scale.__class__ is float)
    ):
        options = settled(options)
    if window is not None:
        check_window(window)
    if seed is not None:
        seed_bits(seed)
    signature: tuple[Any, ...] | None = None
    direct: Callable[..., torch.Tensor] | None = None
    plans = STACK.get().plans
    try:
        recent = plans.recent
        if (
            recent is not None
            and attn_mask is None
            and per_head is None
            and recent.seeded is (seed is not None)
            and recent.options == options
            and recent.check(query, key, value)
            and (recent.grad_mode is None or recent.grad_mode is torch.is_grad_enabled())
            and (recent.cast_to is None or recent.cast_to is torch.get_autocast_dtype(query.device.type))
            and FORWARD_AD._current_level < 0
            and not C._len_torch_dispatch_stack()
            and flash_attention_on()
            and (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16 == 0
        ):
            plan: Plan | None = recent.plan
            direct = recent.plan.direct
        else:
            # Without an argument it queries CUDA, in a quarter of the time.
            cast = torch.is_autocast_enabled() if query.is_cuda else autocasting(query.device.type)
            if cast or query.is_neg() or key.is_neg() or value.is_neg() or (attn_mask is not None and attn_mask.is_neg()):
                query, key, value, attn_mask = prepared(query, key, value, attn_mask)
            if per_head is not None:
                per_head = per_head.resolved()
            signature, plan = looked_up(plans, query, key, value, attn_mask, per_head, options, seed is not None, cast)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # An argument isn't a tensor, has no sizes or memory, or can't be hashed or compared; parsing raises the error.
        signature, plan = None, None
    if direct is not None:
        return direct(query, key, value)
    if plan is None:
        out, lse = _first_call(signature, Arguments(query, key, value, attn_mask, seed, per_head), Options(*options))
    else:
        out, lse = plan.run(query, key, value, attn_mask, seed, per_head)
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def looked_up(
    plans: Plans, query: Any, key: Any, value: Any, attn_mask: Any, per_head: Any, options: Any, seeded: bool, cast: bool
) -> tuple[tuple[Any, ...], Plan | None]:
    """Signature of a call, and its plan, if it is cached: it is put on the fast path then, where it has one."""
    why_torch = why_torch_now(query, key, value, attn_mask, per_head)
    memory = None
    if attn_mask is not None or (
        why_torch is not ON_THE_CPU and (why_torch in PERHAPS_FAKE or (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16)
    ):
        memory = places_in_memory(query, key, value, attn_mask, why_torch)
    if why_torch is ON_THE_CPU or why_torch in PERHAPS_FAKE:
        distributed = [inspection.is_distributed(x) for x in (query, key, value, attn_mask)]
        if any(distributed):
            memory = memory, *distributed
    latent = query.shape[-1:] > (MAX_HEAD_DIM,) and in_columns(key, value)
    signature = (
        query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), query.dtype, key.dtype, value.dtype,
        query.device, key.device, value.device, options, seeded, memory, why_torch, None if per_head is None else per_head.signature(),
        latent,
    )  # fmt: skip
    plan = plans.get(signature)
    if plan is not None and memory is None and per_head is None and (why_torch is None or why_torch is GRADIENT):
        cast_to = torch.get_autocast_dtype(query.device.type) if cast else None
        plans.served(signature, plan, options, seeded=seeded, cast_to=cast_to, tensors=(query, key, value), latent=latent)
    return signature, plan


@with_signature_of(attention)
def explain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, return_lse: bool = False,
    **keywords: Unpack[DenseKeywords],
) -> Explanation:  # fmt: skip
    """Explanation of the choice for the same call of `attention`, whose arguments it takes; kernels are built, and none is launched.

    Raises as `attention` does.
    """
    dense = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    bound = inspect.signature(attention).bind(*dense, return_lse=return_lse, **keywords)
    bound.apply_defaults()
    kwargs = bound.arguments
    if kwargs["score_mod"] is not None or kwargs["block_mask"] is not None:
        found: Explanation = functions.explained_by_flex(dict(kwargs))
        return found
    kwargs["scale"], kwargs["dropout_p"] = unwrapped(kwargs["scale"]), unwrapped(kwargs["dropout_p"])
    if inspection.is_causal_bias(kwargs["attn_mask"]):
        kwargs["is_causal"], kwargs["causal_alignment"] = inspection.causal_of(
            kwargs["attn_mask"], kwargs["query"], kwargs["key"], kwargs["is_causal"]
        )
        kwargs["attn_mask"] = None
    query, key, value, mask = (kwargs.pop(name) for name in ("query", "key", "value", "attn_mask"))
    per_head = PerHead(*(kwargs.pop(name) for name in PER_HEAD))
    seed, shown = kwargs.pop("seed"), Options(**{name: kwargs[name] for name in Options._fields})
    if inspection.is_torchs(Arguments(query, key, value, mask, seed, per_head), shown):
        return Explanation(kind="framework", reason="PyTorch's own function runs nested tensors and classes that override it", gpu="")
    if all(isinstance(x, torch.Tensor) for x in (query, key, value)) and (mask is None or isinstance(mask, torch.Tensor)):
        query, key, value, mask = prepared(query, key, value, mask)
    call = parse(Arguments(query, key, value, mask, seed, per_head), shown)
    inspection.refuse_distributed(call, Arguments(query, key, value, mask, seed, per_head), shown)
    memo = current()
    with memo.lock:
        why_torch = why_torch_now(query, key, value, mask, per_head)

        def builds(one: Candidate) -> bool:
            build = partial(_plan_of(memo, call, one).build, query, key, value, mask, per_head)
            return bool(memo.kernels.tried(one.variant, call.device, build, lambda: True))

        # A kernel that can't be built here runs no call, so that the next candidate is explained.
        chosen = next(filter(builds, _candidates(memo, call, Arguments(query, key, value, mask, seed, per_head), shown, why_torch)))
        plan, record, problem = chosen.plan, None, call.problem
        if problem is not None and (why_torch is None or why_torch in inspection.GRADIENTS):
            problem = problem if why_torch is None else trained_as(problem, inspection.GRADIENTS[why_torch])
            target, _, pool = memo.surroundings(call.device, problem)
            record = measured_record(pool, problem, target) if isinstance(pool, Pool) else None

        def refusal(name: str) -> str | None:
            if why_torch in inspection.SEEN_THROUGH or inspection.perhaps_fake(why_torch, query):
                return why_torch
            return PROVIDERS[name].refusal(call, (query, key, value, mask), per_head)

        said = replace(chosen.explanation, providers=offers(record, refusal))
        return said.remembering(plan.misprediction) if isinstance(plan, KernelPlan) else said


def _candidates(memo: Memo, call: Call, arguments: Arguments, options: Options, why_torch: str | None, **words: Any) -> Iterator[Candidate]:
    """Plans for a call, best first: by the records, or the one of the implementation that the caller names."""
    tensors, per_head = arguments[:4], arguments.per_head
    plan, place = memo.settings.plan, by_plan.place_of(call, why_torch, options.implementation)
    if plan is not None and place is not None and not calls.within_packed():
        return by_plan.candidates(memo, plan, place, call, tensors, per_head)
    # A sequence of packed ones that a plan leaves to PyTorch is PyTorch's, too.
    name = TORCHS if plan is not None and calls.within_packed() else options.implementation
    if name is not None:
        return resolve.forced(memo, call, tensors, per_head, why_torch, name)
    return resolve.candidates(memo, call, *tensors, why_torch, per_head, **words)


def _plan_of(memo: Memo, call: Call, candidate: Candidate) -> Plan:
    """Plan of a candidate, with its gradients where kernels compute them."""
    plan = candidate.plan
    return training.TrainingPlan(memo, call, plan) if candidate.trains and not isinstance(plan, ProviderPlan) else plan


def _first_call(signature: tuple[Any, ...] | None, arguments: Arguments, options: Options) -> Outputs:
    """Check, choose, run and cache; a kernel that can't be built here gives way to the next choice."""
    if signature is None and inspection.nested(arguments, options):
        return inspection.torchs(*arguments[:4], options), None
    memo = current()
    call = parse(arguments, options)
    inspection.refuse_distributed(call, arguments, options)
    plan = TorchPlan.of(call, *arguments[:4])
    draws = call.dropout_p > 0.0 and arguments.seed is None
    if draws and torch.cuda.is_initialized() and capturing(call.device):  # type: ignore[no-untyped-call]
        # Not cached: the next call outside of a capture may be a kernel's.
        return plan.captured(*arguments)
    with memo.lock:
        if signature is not None and (decided := memo.plans.get(signature)) is not None:
            # Another thread cached a plan while this one waited for the lock.
            return decided.run(*arguments)
        why_torch = why_torch_now(*arguments[:4], arguments.per_head)
        calls.meet(memo, call, arguments, why_torch)
        place = None if calls.within_packed() else by_plan.place_of(call, why_torch, options.implementation)
        if memo.settings.confirm and why_torch is None and options.implementation is None:
            from flashtune.dispatch.decisions import confirming

            if (best := confirming.confirmed(memo, call, arguments)) is not None:
                if signature is not None:
                    memo.keep(signature, best)
                return best.run(*arguments)
        for candidate in _candidates(memo, call, arguments, options, why_torch, by_bucket=True):
            if candidate.kind == "framework":
                break
            chosen = _plan_of(memo, call, candidate)
            build = partial(chosen.build, *arguments[:4], arguments.per_head)
            back = restorer(call.device) if draws else None
            outputs = memo.kernels.tried(candidate.variant, call.device, build, partial(chosen.run, *arguments))
            if outputs is None:
                if back is not None:
                    back()
                continue
            by_plan.note(memo, place, candidate)
            if signature is not None:
                memo.keep(signature, chosen)
            return outputs
        by_plan.note(memo, place, None)
    if signature is not None:
        memo.keep(signature, plan)
    return plan.run(*arguments)


_ZERO = inspect.signature(attention).parameters["softcap"].default
"""Default of `dropout_p` and `softcap`: one object, which calls that leave them out have."""

define_lazily(partial(operators.define, attention))
# torch.jit.script substitutes PyTorch's operation for it.
scripted()[id(attention)] = "aten::scaled_dot_product_attention"
