"""Verdicts on other providers, each checked as kernels are before its whole calls are timed (decision 0016)."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from flashtune.bench.judging import RefusedError, judged
from flashtune.bench.whole_calls import attention_call, training_step
from flashtune.core.pytorch import devices
from flashtune.core.records.results import PROVIDERS, Fate
from flashtune.core.system.errors import EnvironmentProblem, InputError, first_line
from flashtune.dispatch.policy.offers import OURS
from flashtune.dispatch.providers.libraries import PROVIDERS as INSTALLABLE
from flashtune.dispatch.rows.libraries import PACKED
from flashtune.dispatch.state import context
from flashtune.dispatch.state.context import Memo
from flashtune.dispatch.state.settings import Settings
from flashtune.tuner.children.tasks import failed_on_device
from flashtune.tuner.replies import Failed, Judged, Spent
from flashtune.tuner.timing.baseline import backend_name, pytorch_call
from flashtune.tuner.verify.correctness import Verifier
from flashtune.tuner.verify.inputs import Inputs

Call = Callable[[], object]


def judged_providers(inputs: Inputs, verifier: Verifier, spent: Spent) -> tuple[dict[str, Judged], dict[str, Call]]:
    """Verdicts on the providers that are installed here, by name, and calls, or training steps, of those to be timed.

    `spent` gets the seconds of each. PyTorch's own choice is checked by its backend's name and not timed, since it races anyway. Left out
    are its math backend where another takes the call, and FlexAttention, which compiles for longer than a candidate may. Calls with dropout
    stay with those who serve them in training, and no provider is given pages.
    """
    if inputs.problem.features.dropout or inputs.pages is not None:
        return {}, {}
    framework, packed = pytorch_call(inputs, step=True), inputs.problem.features.packed
    # Of packed sequences PyTorch's own choice is its varlen_attn.
    own = "" if framework is None else "flash" if packed else backend_name(framework)
    verdicts: dict[str, Judged] = {}
    calls: dict[str, Call] = {}
    for name in PROVIDERS:
        if name == "flex" or INSTALLABLE[name].missing() is not None or (packed and name not in PACKED):
            continue
        if name == "math" and own != "math" and (calls or framework is not None):
            continue
        with spent.on(f"judge {name}"):
            verdict = verdict_on(name, inputs, verifier)
        if isinstance(verdict, Failed):
            continue
        verdicts[name] = verdict
        if verdict.fate is Fate.CORRECT and name != own:
            calls[name] = call_of(name, inputs)
    return verdicts, calls


def call_of(name: str, inputs: Inputs) -> Call:
    """A whole call, or a training step, by a provider, by `torch`, which is PyTorch's own choice, or by `flashtune`, which is whoever
    dispatch chooses."""
    made: Callable[..., Call] = attention_call if inputs.problem.direction == "fwd" else training_step
    return made(inputs) if name == OURS else made(inputs, implementation=name)


def verdict_on(name: str, inputs: Inputs, verifier: Verifier) -> Judged | Failed:
    """The verdict on whoever `call_of` names, or the machine's fault that left none."""
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
        return failed if failed.inconclusive else Judged(fate=Fate.RUNTIME, versions=versions, reason=first_line(error))
    return Judged(fate=Fate.CORRECTNESS if found.reason else Fate.CORRECT, versions=versions, reason=found.reason, error=found.error)


def _computed(name: str, inputs: Inputs) -> Mapping[str, Tensor]:
    """Operands that whoever `call_of` names gives of some inputs, by name, in a dispatch state of its own unless dispatch chooses."""
    with nullcontext(context.current()) if name == OURS else _apart() as memo:
        try:
            given = call_of(name, inputs)()
            found = {"out": given} if isinstance(given, Tensor) else _gradients(inputs, given)
        except InputError as error:
            if memo.kernels.faults:
                raise EnvironmentProblem(first_line(error)) from error
            raise RefusedError(first_line(error), failed=bool(memo.kernels.broken)) from error
        if inputs.q.is_cuda:
            torch.cuda.synchronize()
    # Packed ones are (T, H, D), operands (1, H, T, D).
    return {one: x.transpose(0, 1)[None] for one, x in found.items()} if inputs.sequences else found


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
