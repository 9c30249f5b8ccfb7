"""Plans of dense calls by a plan in force, in place of records: their places, and the candidates that it names."""

import functools
from collections.abc import Iterator

from flashtune.core.pytorch import devices
from flashtune.core.records.plans import Place
from flashtune.dispatch.call.call import Call, PerHead
from flashtune.dispatch.call.inspection import GRADIENTS
from flashtune.dispatch.decisions import backwards
from flashtune.dispatch.decisions.explanation import explanation_by
from flashtune.dispatch.decisions.resolve import Candidate, by_rank, provided_by
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.policy.offers import OURS
from flashtune.dispatch.providers.provider import ProviderPlan, Tensors
from flashtune.dispatch.state.context import Memo
from flashtune.dispatch.state.frozen import Frozen


def place_of(call: Call, why_torch: str | None, name: str | None = None) -> Place | None:
    """Place of a dense call in a plan, where a record may decide on it; `name` is the implementation that the caller names."""
    if (
        call.problem is None
        or (call.out_of_reach and not call.large)
        or not (why_torch is None or why_torch in GRADIENTS)
        or name not in (None, OURS)
    ):
        return None
    requested = None if why_torch is None else GRADIENTS[why_torch]
    flags = {"lse": call.return_lse, "seed": call.seeded, "deterministic": call.deterministic, "named": name is not None}
    how = (*(f"gradient of {one}" for one in requested or ()), *(flag for flag, there in flags.items() if there))
    return Place("dense" if requested is None else "trained", devices.slug_here(call.device), call.problem, how)


def note(memo: Memo, place: Place | None, candidate: Candidate | None) -> None:
    """Keep who served a call: a candidate, None for PyTorch."""
    if place is None or memo.pinned:
        return
    plan = None if candidate is None else candidate.plan
    if candidate is None or not isinstance(plan, KernelPlan):
        memo.met.note(place, None, provider=plan.provider if isinstance(plan, ProviderPlan) else "")
        return
    fallback = None if plan.fallback is None else plan.fallback.config
    memo.met.note(place, candidate.variant, plan, fallback=fallback, in_graphs=plan.in_graphs)


def candidates(
    memo: Memo, plan: Frozen, place: Place, call: Call, tensors: Tensors, per_head: PerHead | None = None
) -> Iterator[Candidate]:
    """Plans of a call at a place by the plan in force; raises InputError where it has none that serves here."""
    why, problem = "", place.problem
    for choice in plan.choices(place):
        said = functools.partial(explanation_by, choice, problem, place.gpu)
        if choice.provider is not None:
            yield provided_by(memo, call, problem, choice.provider, tensors, per_head, said)
        elif choice.family is None:
            yield Candidate(TorchPlan.of(call, *tensors), "framework", said)
        elif place.way == "dense":
            yield from by_rank(memo, call, problem, tensors, choices=[choice])
        else:
            given = (*call.views(*tensors[:3]), call.small_mask(tensors[3]))
            for one in by_rank(memo, backwards.forward_of(call), problem, given, choices=[choice]):
                yield one._replace(trains=True)
        failed = None if choice.variant is None else memo.kernels.failure(choice.variant, call.device)
        why = failed or "it doesn't take these tensors"
    raise plan.unable(place, why)
