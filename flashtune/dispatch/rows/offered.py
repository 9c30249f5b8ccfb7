"""Packed sequences by the library that was the fastest in the run of the record that decides, where no LSE is returned."""

from collections.abc import Hashable

from torch import Tensor

from flashtune.core.problems.problem import Problem
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.decisions.context import Memo
from flashtune.dispatch.decisions.frozen import Frozen
from flashtune.dispatch.decisions.soundness import sound_ones, warn_of_suspect
from flashtune.dispatch.policy.choose import Choice, Pool
from flashtune.dispatch.policy.offers import deciding_record, provider_choice
from flashtune.dispatch.providers.libraries import variant_of
from flashtune.dispatch.rows.kernel import place_of
from flashtune.dispatch.rows.libraries import PACKED, refusal, tried


def offered(memo: Memo, packed: Packed, numbers: Numbers, *, trained: bool) -> Choice | None:
    """The choice of a library for a call without an LSE, or for its training step where it is `trained`; None where kernels are to be
    compared."""
    if memo.pinned or packed.table is not None or numbers.dropout_p or packed.empty:
        return None
    device, problem = packed.query.device, problem_of(packed, numbers, "bwd" if trained else "fwd")
    if problem is None:
        return None
    if (plan := memo.settings.plan) is not None:
        return _planned(plan, packed, numbers, problem)
    place: Hashable = "offered", problem, device, packed.used is None, packed.cu_k is packed.cu_q, numbers[2:]
    if place not in memo.packed:
        memo.packed[place] = _chosen(memo, packed, numbers, trained=trained)
    found: Choice | None = memo.packed[place]
    if found is None or found.provider is None:
        return None
    variant = variant_of(found.provider, problem)
    failed = variant is not None and memo.kernels.failure(variant, device) is not None
    return None if failed else found


def _chosen(memo: Memo, packed: Packed, numbers: Numbers, *, trained: bool) -> Choice | None:
    """The same, decided anew."""
    problem, device = problem_of(packed, numbers, "bwd" if trained else "fwd"), packed.query.device
    assert problem is not None, "the caller looked"
    target, _, pool = memo.surroundings(device, problem)
    if not isinstance(pool, Pool):
        return None

    def takes(name: str) -> bool:
        return name in PACKED and refusal(name, packed, numbers, return_lse=False) is None

    record = deciding_record(pool, problem, target)
    provided = sound_ones(memo, problem, target, record, takes, [])
    choice = provider_choice(record, problem, target, provided, framework_serves=False)
    if choice is not None and choice.record is not None and choice.provider is not None:
        warn_of_suspect(memo, choice.record, choice.provider)
    return choice


def _planned(plan: Frozen, packed: Packed, numbers: Numbers, problem: Problem) -> Choice | None:
    """The same by a plan in force; raises InputError where its library doesn't take the call."""
    place = place_of(packed, problem)
    chosen = next((one for one in plan.named(place) if one.provider is not None), None)
    if chosen is None or chosen.provider is None:
        return None
    if (why := refusal(chosen.provider, packed, numbers, return_lse=False)) is not None:
        raise plan.unable(place, why)
    return chosen


def by_offer(memo: Memo, choice: Choice, packed: Packed, numbers: Numbers) -> Tensor | None:
    """Output by the library of a choice; None where it failed, which is remembered."""
    assert choice.provider is not None, "a library is chosen"
    out = tried(choice.provider, packed, numbers)
    problem = problem_of(packed, numbers, choice.spec.direction)
    assert problem is not None, "a choice is a problem's"
    place = place_of(packed, problem)
    if out is not None:
        memo.met.note(place, None, provider=choice.provider)
    elif memo.settings.plan is not None:
        raise memo.settings.plan.unable(place, f"{choice.provider} failed")
    return out
