"""Both branches of `attention` by force, torch's own operations and kernels, and who served a call in the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest

from flashtune import dispatch
from flashtune.dispatch import api
from flashtune.dispatch.call.inspection import GRADIENTS
from flashtune.dispatch.decisions import backwards, resolve
from flashtune.dispatch.plans.gradients import GradientPlan
from flashtune.dispatch.plans.plan import Plan
from flashtune.dispatch.plans.pytorch import TorchPlan
from flashtune.dispatch.state.context import current
from flashtune.dispatch.training import TrainingPlan

Branch = Literal["torch", "kernels"]

BRANCHES: tuple[Branch, ...] = ("torch", "kernels")


@contextmanager
def forced(branch: Branch) -> Iterator[None]:
    """All calls of this thread are served by torch, or by kernels wherever one takes the call; plans that are known are forgotten."""
    with pytest.MonkeyPatch.context() as patch, dispatch.use(unmeasured=True):
        _force(patch, branch)
        forget()
        try:
            yield
        finally:
            forget()


def _force(patch: pytest.MonkeyPatch, branch: Branch) -> None:
    if branch == "torch":
        why_now = api.why_torch_now

        def why_torch(*tensors: Any) -> str | None:
            why = why_now(*tensors)
            return "a test has torch serve it" if why is None or why in GRADIENTS else why

        patch.setattr(api, "why_torch_now", why_torch)
        return
    ranked, gradient_choice = resolve.rank, backwards.gradient_choice
    patch.setattr(resolve, "rank", lambda *given, **words: ranked(*given, **{**words, "framework_serves": False}))
    patch.setattr(backwards, "gradient_choice", lambda *given, **words: gradient_choice(*given, **{**words, "composite": True}))


def forget() -> None:
    """No plan is known."""
    memo = current()
    with memo.lock:
        memo.plans.clear()
        memo.buckets.clear()
        memo.backwards.clear()


def served() -> str:
    """Who served the call that was decided on last: "torch", a template, or of a call with gradients "template + template" (or formula)."""
    known = list(current().plans.values())
    return _named(known[-1]) if known else "torch"


def _named(plan: Plan) -> str:
    if isinstance(plan, TorchPlan):
        return "torch"
    if isinstance(plan, TrainingPlan):
        found = {_template(made) if isinstance(made, GradientPlan) else "formula" for made, _ in plan.backward._plans.values()}
        return " + ".join([_named(plan.forward), *sorted(found)])
    return _template(plan)


def _template(plan: Any) -> str:
    return str(plan.code.module.name.split()[0])
