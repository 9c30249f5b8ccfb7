"""Packed sequences by the library that was the fastest in the run of the record that decides, where no LSE is returned."""

from collections.abc import Hashable

from torch import Tensor

from flashtune.core.problems.problem import Problem
from flashtune.dispatch.call.sequences import Numbers, Packed, problem_of
from flashtune.dispatch.decisions.soundness import sound_ones, warn_of_suspect
from flashtune.dispatch.policy.choose import Choice, Pool
from flashtune.dispatch.policy.offers import deciding_record, provider_choice
from flashtune.dispatch.providers.libraries import variant_of
from flashtune.dispatch.rows.kernel import place_of
from flashtune.dispatch.rows.libraries import PACKED, refusal, tried
from flashtune.dispatch.state.context import Memo
from flashtune.dispatch.state.frozen import Frozen


def offered(memo: Memo, packed: Packed, numbers: Numbers, *, trained: bool) -> tuple[Choice, Problem] | None:
    """The choice of a library for a call without an LSE, or for its training step where it is `trained`, and the problem; None where
    kernels are to be compared."""
    if memo.pinned or packed.table is not None or numbers.dropout_p or packed.empty:
        return None
    device, problem = packed.query.device, problem_of(packed, numbers, "bwd" if trained else "fwd")
    if problem is None:
        return None
    if (plan := memo.settings.plan) is not None:
        return None if (named := _planned(plan, packed, numbers, problem)) is None else (named, problem)
    place: Hashable = "offered", problem, device, packed.used is None, packed.cu_k is packed.cu_q, numbers[2:]
    if place not in memo.packed:
        memo.packed[place] = _chosen(memo, packed, numbers, problem)
    found: Choice | None = memo.packed[place]
    if found is None or found.provider is None:
        return None
    variant = variant_of(found.provider, problem)
    failed = variant is not None and memo.kernels.failure(variant, device) is not None
    return None if failed else (found, problem)


def _chosen(memo: Memo, packed: Packed, numbers: Numbers, problem: Problem) -> Choice | None:
    """The choice for a problem, decided anew."""
    target, _, pool = memo.surroundings(packed.query.device, problem)
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


def by_offer(memo: Memo, choice: Choice, problem: Problem, packed: Packed, numbers: Numbers) -> Tensor | None:
    """Output by the library of a choice for a problem; None where it failed, which is remembered."""
    assert choice.provider is not None, "a library is chosen"
    out = tried(choice.provider, packed, numbers)
    if out is None and memo.settings.plan is not None:
        raise memo.settings.plan.unable(place_of(packed, problem), f"{choice.provider} failed")
    # Once for each problem: later calls get here, too.
    noted = "noted", choice.provider, problem, packed.used is None
    if out is not None and noted not in memo.packed:
        memo.packed[noted] = True
        memo.met.note(place_of(packed, problem), None, provider=choice.provider)
    return out
