"""Verdicts on other providers, each checked as kernels are before its whole calls are timed (decision 0016)."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from flashtune.bench.whole_calls import attention_call, training_step
from flashtune.core.pytorch import devices
from flashtune.core.records.results import PROVIDERS, Fate
from flashtune.core.system.errors import EnvironmentProblem, InputError, first_line
from flashtune.dispatch.decisions import context
from flashtune.dispatch.decisions.context import Memo
from flashtune.dispatch.decisions.settings import Settings
from flashtune.dispatch.providers.libraries import PROVIDERS as INSTALLABLE
from flashtune.tuner.children.tasks import failed_on_device
from flashtune.tuner.replies import Judged
from flashtune.tuner.timing.baseline import backend_name, pytorch_call
from flashtune.tuner.verify.calls import RefusedError, judged
from flashtune.tuner.verify.correctness import Verifier
from flashtune.tuner.verify.inputs import Inputs

Call = Callable[[], object]


def judged_providers(inputs: Inputs, verifier: Verifier) -> tuple[dict[str, Judged], dict[str, Call]]:
    """Verdicts on the providers that are installed here, by name, and calls, or training steps, of those to be timed.

    PyTorch's own choice is checked by its backend's name and not timed, since it races anyway. Left out are its math backend where another
    takes the call, and FlexAttention, which compiles for longer than a candidate may. Packed sequences have no other provider than
    `attention_varlen` itself, and dropout's stay with those who serve it in training.
    """
    if inputs.problem.features.dropout or inputs.problem.features.packed:
        return {}, {}
    framework = pytorch_call(inputs, step=True)
    own = "" if framework is None else backend_name(framework)
    made = attention_call if inputs.problem.direction == "fwd" else training_step
    verdicts: dict[str, Judged] = {}
    calls: dict[str, Call] = {}
    for name in PROVIDERS:
        if name == "flex" or INSTALLABLE[name].missing() is not None:
            continue
        if name == "math" and own != "math" and (calls or framework is not None):
            continue
        if (verdict := _verdict(name, inputs, verifier)) is None:
            continue
        verdicts[name] = verdict
        if verdict.fate is Fate.CORRECT and name != own:
            calls[name] = made(inputs, implementation=name)
    return verdicts, calls


def _verdict(name: str, inputs: Inputs, verifier: Verifier) -> Judged | None:
    """The verdict on a provider; None where the machine's fault left none."""
    versions = devices.versions_of(name)
    try:
        # Whether it takes the problem at all shows before any oracle is made for it.
        _computed(name, inputs)
        found = judged(lambda one: _computed(name, one), verifier, f"provider {name}")
    except RefusedError as refusal:
        return Judged(fate=Fate.RUNTIME if refusal.failed else Fate.CONSTRAINT, versions=versions, reason=str(refusal))
    except Exception as error:
        # Libraries fail variously where a GPU or a head size isn't theirs.
        failed = failed_on_device(error)
        if failed.poisoned:
            raise
        return None if failed.inconclusive else Judged(fate=Fate.RUNTIME, versions=versions, reason=first_line(error))
    return Judged(fate=Fate.CORRECTNESS if found.reason else Fate.CORRECT, versions=versions, reason=found.reason, error=found.error)


def _computed(name: str, inputs: Inputs) -> Mapping[str, Tensor]:
    """Operands that a provider gives of some inputs, by name, in a dispatch state of its own."""
    with _apart() as memo:
        try:
            if inputs.problem.direction == "fwd":
                found = {"out": attention_call(inputs, implementation=name)()}
            else:
                found = _gradients(inputs, training_step(inputs, implementation=name)())
        except InputError as error:
            if memo.kernels.faults:
                raise EnvironmentProblem(first_line(error)) from error
            raise RefusedError(first_line(error), failed=bool(memo.kernels.broken)) from error
        if inputs.q.is_cuda:
            torch.cuda.synchronize()
    return found


def _gradients(inputs: Inputs, gradients: object) -> dict[str, Tensor]:
    """A training step's gradients by their operands' names; the slopes', whose rows' parts are operands, are left out."""
    assert isinstance(gradients, tuple), "a training step's gradients"
    names = ["dq", "dk", "dv", *["dbias"] * inputs.problem.features.dbias]
    found = dict(zip(names, gradients, strict=False))
    if "dbias" in found:
        found["dbias"] = found["dbias"].expand(inputs.operands["dbias"].shape)
    return found


@contextmanager
def _apart() -> Iterator[Memo]:
    """Serve calls by a state of its own, so that a case which a library can't take isn't remembered for others, and warn of nothing."""
    memo = Memo(Settings(alone=True))
    with warnings.catch_warnings(), context.serving(memo):
        warnings.simplefilter("ignore")
        yield memo
