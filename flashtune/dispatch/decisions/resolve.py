"""Plans of a call: the policy's choices in their order, with their kernels, and the explanation of each."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import DECODE_ROWS, Problem, unfit_heads
from flashtune.core.pytorch import devices
from flashtune.core.pytorch.attention import UNSOUND
from flashtune.core.records.results import TuningRecord
from flashtune.core.records.versions import TITLES
from flashtune.dispatch.call.call import Call, PerHead, trained_as
from flashtune.dispatch.call.inspection import GRADIENTS, SEEN_THROUGH, TRANSFORMED
from flashtune.dispatch.call.parse import cannot_serve
from flashtune.dispatch.call.sequences import by_octaves
from flashtune.dispatch.decisions import backwards
from flashtune.dispatch.decisions.explanation import Explanation, explained
from flashtune.dispatch.decisions.soundness import instead_of_torchs, sound_ones, warn_of_suspect, warn_of_wrong
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.plans.forward import Fallback, KernelPlan
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.policy.choose import BUCKET, Choice, Kind, Pool, Refusal, choice_of_bucket, rank, torch_has
from flashtune.dispatch.policy.offers import TORCHS, deciding_record, measured_record, provider_choice
from flashtune.dispatch.policy.orders import rank_coded, rank_packed
from flashtune.dispatch.providers.libraries import PROVIDERS, plan_of, variant_of
from flashtune.dispatch.providers.provider import ProviderPlan, Tensors
from flashtune.dispatch.providers.torch_backends import TorchBackend
from flashtune.dispatch.state.context import Memo
from flashtune.templates import families, families_for
from flashtune.templates.family import Family

_AS_IN_TRAINING = "dropout without a seed runs as in training, and there"
"""The beginning of a reason for PyTorch: a forward that is recomputed for gradients has to drop the same pairs."""


class Candidate(NamedTuple):
    """Plan that may serve, the step of the policy that chose it, and a factory of its explanation; `variant` is None for PyTorch,
    and for another provider a name under which its failures are kept.

    Where `trains` is True, kernels compute the gradients, too, and the plan is that of the forward (`forward_of`).
    """

    plan: TorchPlan | KernelPlan | ProviderPlan
    kind: Kind
    said: Callable[[], Explanation]
    variant: Variant | None = None
    trains: bool = False

    @property
    def explanation(self) -> Explanation:
        """Explanation, formatted on demand: a growing sequence makes a choice per token."""
        return self.said()


def candidates(
    memo: Memo,
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    torch_only: str | None,
    per_head: PerHead | None = None,
    *,
    by_bucket: bool = False,
    ours: bool = False,
) -> Iterator[Candidate]:
    """Plans for a call as `_candidates` orders them, each of which says who doesn't serve since it is wrong; before PyTorch's own choice
    comes another backend where that choice is wrong."""
    told: list[str] = []
    tensors, problem = (q, k, v, mask), call.problem
    if problem is not None and torch_only is not None:
        problem = trained_as(problem) if torch_only in GRADIENTS else None
    for one in _candidates(memo, call, tensors, torch_only, per_head, told, by_bucket, ours):
        instead = instead_of_torchs(memo, call, problem, tensors, per_head) if one.kind == "framework" and not ours else None
        if instead is not None:
            yield provided_by(memo, call, problem, instead[0], tensors, per_head, functools.partial(telling, one.said, told, *instead))
        yield one._replace(said=functools.partial(telling, one.said, told)) if told else one


def telling(said: Callable[[], Explanation], told: Sequence[str], name: str = "", why: str = "") -> Explanation:
    """An explanation with what was `told` of those who don't serve; of the backend of a name in PyTorch's place, and why."""
    found, told = said(), tuple(dict.fromkeys((*told, *[why] * bool(why))))
    own = f"; PyTorch's own choice is wrong for such calls, so {PROVIDERS[name].title} runs the call" if name else ""
    words: dict[str, Any] = {"kind": "provider", "provider": name} if name else {}
    return replace(found, reason="; ".join((found.reason + own, *told)), refused=(*told, *found.refused), **words)


def _candidates(
    memo: Memo, call: Call, tensors: Tensors, torch_only: str | None, per_head: PerHead | None, told: list[str], by_bucket: bool, ours: bool
) -> Iterator[Candidate]:
    """Plans for a call, best first; the last is always PyTorch's.

    `torch_only` is the reason why only PyTorch can serve, if there is one. A kernel that refuses these strides or pointers, or that failed
    before, excludes the other tuned ones of its family; the family's default is still tried, since it may accept them. With `by_bucket` a
    decode step begins with the choice for its length bucket. With `ours` kernels serve wherever they can, measured or not. Findings about
    providers that would serve otherwise are `told`.
    """
    problem = call.problem
    if call.large and torch_only is None and problem is not None and not ours:
        yield from _by_provider(memo, call, problem, tensors, per_head, told)
    torch_only = torch_only or call.out_of_reach
    if torch_only in GRADIENTS and problem is not None:
        if not (ours or GRADIENTS[torch_only]):
            yield from _by_provider(memo, call, trained_as(problem), tensors, per_head, told)
        if not call.large:
            why = yield from _trained(memo, call, problem, tensors, GRADIENTS[torch_only], ours=ours)
            torch_only = f"{torch_only}, and {why}"
        if call.device.type == "cuda" and not call.large:
            unsound = UNSOUND[call.mask_kind != "none"]
            torch_only += "".join(f" (without {TITLES.get(name, name)}, whose {fault.wrong})" for name, fault in unsound.items())
    fused = call.fused_by_torch and not ours
    if torch_only is None and problem is not None and call.torch_draws and not memo.pinned:
        # A forward without gradients may be recomputed with them, and has to drop the same pairs.
        target = devices.target_of(call.device)
        chosen, why = backwards.gradient_choice(memo, trained_as(problem), target, deterministic=call.deterministic, composite=ours)
        fused = fused and chosen is None
        if chosen is None:
            torch_only = f"{_AS_IN_TRAINING} {why}"
    if torch_only is None and problem is not None:
        if devices.INTERPRETING:
            memo.warn_of_missing()
        if not ours:
            yield from _by_provider(memo, call, problem, tensors, per_head, told)
        yield from by_rank(memo, call, problem, tensors, framework_serves=fused, by_bucket=by_bucket)
        return
    memo.warn_of_missing()
    gpu = devices.slug_here(call.device)
    key = problem.key(gpu) if problem is not None and gpu != call.device.type else None
    said = functools.partial(
        Explanation, kind="framework", reason=f"{torch_only}, so PyTorch's own attention runs the call", gpu=gpu, key=key
    )
    yield Candidate(plan=TorchPlan.of(call, *tensors), kind="framework", said=said)


def forced(memo: Memo, call: Call, tensors: Tensors, per_head: PerHead | None, torch_only: str | None, name: str) -> Iterator[Candidate]:
    """Plan of the implementation that the caller names; raises InputError, with the cause and the remedy, where it can't serve.

    Under transforms, modes, tracers and subclasses (`SEEN_THROUGH`), and with nothing to compute, PyTorch's operations serve any name;
    under transforms a backend that is named comes first.
    """
    nothing = call.empty or not call.d or not call.d_v
    reason = f"the caller named {name}" + ", and there is nothing to compute" * nothing
    said = functools.partial(Explanation, reason=reason, gpu=devices.slug_here(call.device))
    backend = PROVIDERS.get(name)
    if torch_only is TRANSFORMED and isinstance(backend, TorchBackend) and not nothing:
        yield Candidate(backend.transformed(call, tensors), "provider", functools.partial(said, kind="provider", provider=name))
        return
    if name == TORCHS or torch_only in SEEN_THROUGH or nothing:
        yield Candidate(TorchPlan.of(call, *tensors), "framework", functools.partial(said, kind="framework"))
        return
    why: str | None = None
    if name in PROVIDERS:
        warn_of_wrong(memo, call, name)
        found = provided_by(memo, call, call.problem, name, tensors, per_head, functools.partial(said, kind="provider", provider=name))
        yield found
        why = None if found.variant is None else memo.kernels.failure(found.variant, call.device)
    else:
        for one in candidates(memo, call, *tensors, torch_only, ours=True):
            if one.kind == "framework":
                why = one.explanation.reason.removesuffix(", so PyTorch's own attention runs the call")
                break
            yield one
    raise cannot_serve(name, str(why))


def _by_provider(
    memo: Memo, call: Call, problem: Problem, tensors: Tensors, per_head: PerHead | None, told: list[str]
) -> Iterator[Candidate]:
    """Plan of the provider that was the fastest for a problem of a call, where one was; findings about faster ones are `told`."""
    target, _, pool = memo.surroundings(call.device, problem)
    if memo.pinned or call.dropout_p or not isinstance(pool, Pool):
        return

    def takes(name: str) -> bool:
        variant = variant_of(name, problem)
        failed = variant is not None and memo.kernels.failure(variant, call.device) is not None
        return not failed and PROVIDERS[name].refusal(call, tensors, per_head) is None

    record = measured_record(pool, problem, target)
    if record is None and problem.features.latent:
        # Providers read values beside keys: a record of such calls holds for them.
        plain = replace(problem, features=replace(problem.features, latent=False))
        yield from _by_provider(memo, call, plain, tensors, per_head, told)
        return
    if record is None:
        # Growing sequences share the look-up of their length bucket.
        alike = replace(problem, n_kv=-(-problem.n_kv // BUCKET) * BUCKET)
        if (alike, target.slug) not in memo.deciding:
            memo.deciding[alike, target.slug] = deciding_record(pool, alike, target)
        record = memo.deciding[alike, target.slug]
    provided = sound_ones(memo, problem, target, record, takes, told)
    found = provider_choice(record, problem, target, provided, framework_serves=call.fused_by_torch, families=families().values())
    if found is None:
        return
    said = functools.partial(explained, found, problem, target, ())
    if found.provider is None:
        yield Candidate(TorchPlan.of(call, *tensors), "framework", said)
    else:
        if found.record is not None:
            warn_of_suspect(memo, found.record, found.provider)
        yield provided_by(memo, call, problem, found.provider, tensors, per_head, said)


def provided_by(
    memo: Memo,
    call: Call,
    problem: Problem | None,
    name: str,
    tensors: Tensors,
    per_head: PerHead | None,
    said: Callable[[], Explanation],
) -> Candidate:
    """Plan of a provider for a problem of a call."""
    return Candidate(plan_of(name, call, tensors, per_head), "provider", said, variant_of(name, problem))


def _trained(
    memo: Memo, call: Call, problem: Problem, tensors: Tensors, requested: Sequence[str], *, ours: bool
) -> Generator[Candidate, None, str]:
    """Plans of kernels for a call that needs gradients, `requested` beside dQ, dK and dV; returns the reason why there are no more."""
    target, trained = devices.target_of(call.device), trained_as(problem, requested)
    words = {"deterministic": call.deterministic, "composite": ours or backwards.composite(call)}
    chosen, why = backwards.gradient_choice(memo, trained, target, **words)
    if chosen is not None:
        for forward in candidates(memo, backwards.forward_of(call), *call.views(*tensors[:3]), call.small_mask(tensors[3]), None):
            if forward.kind == "framework":
                return f"no kernel runs the forward ({forward.explanation.reason})"
            both = lambda one=forward: replace(one.explanation, backward=explained(chosen, trained, target, ()))  # noqa: E731
            yield forward._replace(said=both, trains=True)
    return why


def _ranked(
    memo: Memo, problem: Problem, target: Target, records: Pool | Sequence[TuningRecord], known: Mapping[str, Family], **words: Any
) -> Iterator[Choice | Refusal]:
    """The policy's order, and before it the choice for the length bucket of a decode step.

    Not with a mask or a bounded band, which may hide keys at some lengths only.
    """
    plain = problem.features.mask == "none" and not problem.features.banded
    if problem.n_q <= DECODE_ROWS and plain and isinstance(records, Pool) and not memo.pinned:
        bucket = (replace(problem, n_kv=-(-problem.n_kv // BUCKET) * BUCKET), target.slug, words["framework_serves"])
        if bucket not in memo.buckets:
            memo.buckets[bucket] = choice_of_bucket(problem, target, records, known, **words)
        if (choice := memo.buckets[bucket]) is not None:
            yield choice
    yield from rank(problem, target, records, known, **words)


def by_rank(
    memo: Memo,
    call: Call,
    problem: Problem,
    tensors: Tensors,
    *,
    framework_serves: bool = False,
    by_bucket: bool = False,
    choices: Iterable[Choice] | None = None,
) -> Iterator[Candidate]:
    """Plans in the policy's order, or of these `choices`, of kernels that can be built and accept these tensors."""
    q, k, v = call.views(*tensors[:3])
    mask = call.full_mask(tensors[3])
    interpreted = call.device.type == "cpu"
    refused: list[str] = []
    failed: set[str] = set()
    if (pinned := memo.pinned.get("fwd")) is not None and pinned.accepts(q, k, v, mask):
        said = functools.partial(Explanation, kind="exact", reason="its kernel is pinned", gpu=devices.target_of(call.device).slug)
        yield Candidate(plan=KernelPlan(call, Code(pinned), q.stride()), kind="exact", said=said)
    ranked: Iterable[Choice | Refusal]
    if choices is not None:
        target, ranked = devices.target_of(call.device), choices
    else:
        target, known, records = memo.surroundings(call.device, problem)
        words: dict[str, Any] = {"framework_serves": framework_serves, "unmeasured": memo.unmeasured or interpreted}
        words["compiled"] = functools.partial(kernels.has_code, arch=target.arch)
        surroundings = (problem, target, records, known)
        ranked = _ranked(memo, *surroundings, **words) if by_bucket else rank(*surroundings, **words)
    for choice in ranked:
        if isinstance(choice, Refusal):
            refused.append(_refusal(choice, memo.warn_once))
            continue
        family, variant = choice.family, choice.variant
        said = functools.partial(explained, choice, problem, target, tuple(refused), interpreted=interpreted)
        if family is None or variant is None:
            yield Candidate(plan=TorchPlan.of(call, q, k, v, mask), kind=choice.kind, said=said)
            continue
        if family.name in failed and choice.record is not None:
            continue
        code = memo.kernels.code(family, variant, call.device, target)
        why: str | None = "it doesn't take these strides or addresses"
        if isinstance(code, str):
            why = code
        elif code.module.accepts(q, k, v, mask):
            if choice.record is not None and call.device.type == "cuda":
                memo.warn_of_elsewhere(choice.record, call.device)
            fallback, in_graphs = (
                _beside(memo, call, choice, config, target, q.stride()) for config in (choice.fallback, choice.in_graphs)
            )
            plan = KernelPlan(call, code, q.stride(), fallback=fallback, in_graphs=in_graphs)
            yield Candidate(plan=plan, kind=choice.kind, said=said, variant=variant)
            why = memo.kernels.failure(variant, call.device)
            if why is None:
                # The next ones follow for callers that compare plans.
                continue
        refused.append(f"{variant.template} {variant.id}: {why}")
        failed.add(family.name)


def _beside(memo: Memo, call: Call, choice: Choice, config: Config | None, target: Target, q_strides: tuple[int, ...]) -> Fallback | None:
    """Kernel of the choice's family with another config; its code is loaded at the first switch to it."""
    family = choice.family
    if family is None or config is None:
        return None

    def plan() -> KernelPlan | None:
        with memo.lock:
            code = memo.kernels.code(family, kernels.variant(family, choice.spec, config), call.device, target)
            return None if isinstance(code, str) else KernelPlan(call, code, q_strides)

    return Fallback(config=config, plan=plan)


def explained_problem(memo: Memo, problem: Problem, target: Target) -> Explanation:
    """Explanation for `problem` on `target`, without tensors: strides and compilers aren't considered."""
    refused: list[str] = []
    if problem.features.packed:
        problem = by_octaves(problem)
    if problem.features.mods or problem.features.packed:
        ranking: Any = rank_coded if problem.features.mods else rank_packed
        records = lambda one: memo.pool(one.key(target.slug), target)  # noqa: E731
        ranked = ranking(problem, target, records, families_for(problem), unmeasured=memo.unmeasured)
        return explained(next(one for one in ranked if isinstance(one, Choice)), problem, target, refused)
    pool = memo.pool(problem.key(target.slug), target)
    if problem.features.dropout:
        return _by_kernels(memo, problem, target, pool)
    deciding, told = deciding_record(pool, problem, target), list[str]()
    installed = sound_ones(memo, problem, target, deciding, lambda name: PROVIDERS[name].missing() is None, told)
    other = provider_choice(deciding, problem, target, installed, framework_serves=torch_has(problem), families=families().values())
    found = explained(other, problem, target, refused) if other is not None else _by_kernels(memo, problem, target, pool)
    return telling(lambda: found, told) if told else found


def _by_kernels(memo: Memo, problem: Problem, target: Target, pool: Pool) -> Explanation:
    """Explanation of the kernel that serves `problem`, or of PyTorch."""
    refused: list[str] = []

    def torchs(reason: str) -> Explanation:
        return Explanation(kind="framework", reason=reason, gpu=target.slug, key=problem.key(target.slug))

    if (large := unfit_heads(problem.d, problem.d_v)) is not None:
        return torchs(f"{large}, so PyTorch's own attention runs the call")
    if problem.direction == "bwd":
        chosen, why = backwards.gradient_choice(memo, problem, target, composite=problem.features.softcap)
        if chosen is None or chosen.family is None:
            return torchs(f"{why}, so PyTorch's own attention computes the gradient")
        return explained(chosen, problem, target, refused)
    words = {"framework_serves": torch_has(problem), "unmeasured": memo.unmeasured}
    # As `_candidates` does for calls whose mask of dropout PyTorch would draw (`Call.torch_draws`).
    if problem.features.dropout and not problem.features.softcap:
        chosen, why = backwards.gradient_choice(memo, trained_as(problem), target)
        if chosen is None:
            return torchs(f"{_AS_IN_TRAINING} {why}, so PyTorch's own attention runs the call")
        words["framework_serves"] = False
    for choice in rank(problem, target, pool, families(), **words, compiled=functools.partial(kernels.has_code, arch=target.arch)):
        if isinstance(choice, Choice):
            return explained(choice, problem, target, refused)
        refused.append(_refusal(choice))
    raise AssertionError("the ranking ends with PyTorch")


def _refusal(refusal: Refusal, warn: Callable[[str], None] | None = None) -> str:
    """A refusal as a line; invalid records are warned of once."""
    record = refusal.record
    if record is None:
        return refusal.reason
    key = record.key
    text = f"record of {record.origin or 'a database'} (gpu {key.gpu}, n {key.n}, d {key.d}, {key.dtype}): {refusal.reason}"
    if refusal.invalid and warn is not None:
        warn(f"flashtune: {text} (search it again or delete the record)")
    return text
