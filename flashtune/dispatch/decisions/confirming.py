"""Lazy measuring: at the first call of a key without a measured record the likely implementations race, and the outcome is stored."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Variant
from flashtune.core.problems.problem import DECODE_ROWS, Problem, ProblemKey
from flashtune.core.pytorch import devices
from flashtune.core.records.nearness import octaves
from flashtune.core.records.results import Baseline, Fate, Measurement, Outcome, Provenance, SearchResult, TuningRecord
from flashtune.core.records.versions import suspicion
from flashtune.core.system.errors import FlashtuneError
from flashtune.dispatch.call.call import Call
from flashtune.dispatch.call.parse import Arguments
from flashtune.dispatch.decisions import resolve
from flashtune.dispatch.decisions.judging import Judge
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.plan import Plan, capturing
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.policy.records import Pool
from flashtune.dispatch.providers.libraries import PROVIDERS, plan_of, torchs_choice, variant_of
from flashtune.dispatch.providers.provider import ProviderPlan
from flashtune.dispatch.state.context import Memo
from flashtune.templates import families

BUDGET_S = 0.05
"""Seconds for which a key is timed, all implementations together, after a first run of each."""
KERNELS = 2
"""Kernels that are timed: the policy's first choices, measured or not."""
READING_US = 200.0
"""Shortest interval that is timed, in microseconds: shorter calls are repeated within it."""
ROUNDS = 15
"""Most rounds: enough for a median to 1 % of a call with a spread of a few percent."""


def confirmed(memo: Memo, call: Call, given: Arguments) -> Plan | None:
    """Plan that took the least time for a call without gradients and dropout, stored in the user's database for its key.

    None where nothing is to be measured: the key has a measured record, or was measured by this process; under capture; for features that
    PyTorch computes by operations on all scores.
    """
    problem = call.problem
    if problem is None or call.empty or call.composite or call.dropout_p or memo.pinned or capturing(call.device):
        return None
    target, _, pool = memo.surroundings(call.device, problem)
    key = problem.key(target.slug)
    if not isinstance(pool, Pool) or _known(memo, pool, key):
        return None
    memo.confirmed.add(key)
    wrong: dict[Variant, str] = {}
    try:
        plans = _plans(memo, call, problem, given, wrong)
        alone = len(plans) == 1 and None in plans
        times = [] if alone or not plans else race([functools.partial(plan.run, *given) for plan in plans.values()], call.device)
    except torch.OutOfMemoryError:
        memo.warn_once("flashtune: the GPU's memory is too small to measure a call: it runs unmeasured")
        return None
    found = dict(zip(plans, map(Measurement.of, times), strict=False))
    if not (found or wrong):
        return None
    try:
        _save(_result(problem, target, found, wrong, torchs_choice(call, given[:4]), call.device))
        memo.renew()
    except (FlashtuneError, OSError) as error:
        memo.warn_once(f"flashtune: what was measured of a call isn't kept ({error}): it is measured again by the next process")
    return plans[min(found, key=lambda one: found[one].median_us)] if found else None


def _known(memo: Memo, pool: Pool, key: ProblemKey) -> bool:
    """True where a key was measured, with today's providers; for a decode step, whose keys grow with each token, also where one within an
    octave was."""
    near = 1.0 if key.n_q <= DECODE_ROWS else 0.0

    def covers(other: ProblemKey) -> bool:
        same = other.n_q == key.n_q and other.bh_bucket == key.bh_bucket and octaves(other.n, key.n) <= near
        return same and replace(other, n=key.n) == key

    same = (one for other in pool.keys if covers(other) for one in pool.exact(other, frozenset()))
    return any(one.outcome.source == "measured" and not _doubted(one) for one in same) or any(map(covers, memo.confirmed))


def _doubted(record: TuningRecord) -> bool:
    """True where a provider that is installed was judged with other versions."""
    return any(
        PROVIDERS[one.template].missing() is None and suspicion(record, one, devices.versions_of(one.template)) for one in record.providers
    )


def _plans(memo: Memo, call: Call, problem: Problem, given: Arguments, wrong: dict[Variant, str]) -> dict[Variant | None, Plan]:
    """Plans whose output is right, each of which ran once: kernels, other providers, and PyTorch's own choice (None). The reasons of
    `wrong` providers are added to these, PyTorch's choice among them by its backend."""
    judge, torchs, choice = Judge(call, problem, given), TorchPlan.of(call, *given[:4]), torchs_choice(call, given[:4])
    found: dict[Variant | None, Plan] = {}
    out, why = judge.run(lambda: torchs.run(*judge.given)[0])
    backend = variant_of(choice, problem) if choice in PROVIDERS else None
    if not why:
        found[None], judge.torchs = torchs, out
    else:
        memo.warn_once(f"flashtune: PyTorch's own choice, {choice}, is wrong at a call ({why}): another runs such calls where one can")
        wrong |= {} if backend is None else {backend: why}
    for candidate in resolve.candidates(memo, call, *given[:4], None, ours=True):
        if len(found) > KERNELS:
            break
        if candidate.variant is not None and candidate.variant not in found:
            found |= _run_once(memo, call, judge, candidate.variant, candidate.plan, wrong)
    # PyTorch's own choice races anyway, math holds all scores in memory, and FlexAttention compiles for tens of seconds.
    left_out = {choice, *(["math"] * (call.device.type == "cuda")), *(["flex"] * call.fused_by_torch)}
    for name in PROVIDERS:
        if name not in left_out and PROVIDERS[name].refusal(call, given[:4], given.per_head) is None:
            variant = variant_of(name, problem)
            assert variant is not None, "a problem describes the call"
            found |= _run_once(memo, call, judge, variant, plan_of(name, call, given[:4], given.per_head), wrong)
    return found


def _run_once(
    memo: Memo, call: Call, judge: Judge, variant: Variant, plan: "KernelPlan | ProviderPlan | TorchPlan", wrong: dict[Variant, str]
) -> dict[Variant | None, Plan]:
    """The plan by its variant, if it runs and is right; empty otherwise, and a provider is added to the `wrong` ones."""
    given, why = judge.given, ""

    def run() -> Tensor:
        nonlocal why
        out, why = judge.run(lambda: plan.run(*given)[0])
        return out

    out = memo.kernels.tried(variant, call.device, lambda: plan.build(*given[:4], given.per_head), run)
    if out is not None and not why:
        return {variant: plan}
    if why:
        memo.warn_once(f"flashtune: {variant.template} is wrong at a call, and isn't measured: {why}")
        wrong |= {variant: why} if variant.template in PROVIDERS else {}
    return {}


def race(runs: Sequence[Callable[[], object]], device: torch.device) -> list[list[float]]:
    """Microseconds of whole calls of each run, in rounds of changing order, within `BUDGET_S` or one round."""
    wait: Callable[[], object] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
    found: list[list[float]] = [[] for _ in runs]
    repeats = [1] * len(runs)
    ends = time.perf_counter() + BUDGET_S
    for turn in range(ROUNDS):
        for place in range(len(runs)) if turn % 2 else reversed(range(len(runs))):
            wait()
            begun = time.perf_counter()
            for _ in range(repeats[place]):
                runs[place]()
            wait()
            us = (time.perf_counter() - begun) / repeats[place] * 1e6
            found[place].append(us)
            if not turn:
                repeats[place] = max(1, math.ceil(READING_US / us))
        if time.perf_counter() > ends:
            break
    # The first round also waits for clocks and caches.
    return [times[1:] or times for times in found]


def _result(
    problem: Problem,
    target: Target,
    times: dict[Variant | None, Measurement],
    wrong: dict[Variant, str],
    torchs: str,
    device: torch.device,
) -> SearchResult:
    here = devices.here(device.index) if device.type == "cuda" else devices.Here("", "", "")
    ranked = sorted((one for one in times if one is not None and one.template not in PROVIDERS), key=lambda one: times[one].median_us)
    others = [one for one in times if one is not None and one not in ranked]
    outcomes = [_outcome(one, times[one], rank) for rank, one in enumerate(ranked, start=1)]
    outcomes += [Outcome.of_provider(one.template, one.id, times[one], versions=devices.versions_of(one.template)) for one in others]
    for one, why in wrong.items():
        words: dict[str, Any] = {"versions": devices.versions_of(one.template), "fate": Fate.CORRECTNESS, "reason": why}
        outcomes.append(Outcome.of_provider(one.template, one.id, **words))
    return SearchResult(
        gpu=target.slug,
        problem=problem,
        outcomes=tuple(outcomes),
        provenance=Provenance(
            flashtune=flashtune.__version__,
            torch=torch.__version__,
            triton=here.triton,
            driver=here.driver,
            gpu_name=here.gpu_name,
            command="dispatch.use(confirm=True)",
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        ),
        baseline=Baseline(backend=torchs, measurement=times[None], call_us=times[None].median_us) if None in times else None,
    )


def _outcome(variant: Variant, time_us: Measurement, rank: int) -> Outcome:
    """Outcome of a kernel by whole calls."""
    from flashtune.templates.rendering import text_hash

    return Outcome(
        template=variant.template,
        template_hash=text_hash(families()[variant.template], variant),
        variant_id=variant.id,
        config=variant.config,
        fate=Fate.CORRECT,
        source="measured",
        measurement=time_us,
        finalist=True,
        rank=rank,
        call_us=time_us.median_us,
    )


def _save(result: SearchResult) -> None:
    """Store in the user's own database, as a search does."""
    from flashtune.db.library import overlay_path
    from flashtune.db.store import Store

    with Store.open(overlay_path(), writable=True) as store:
        store.save(result)
