"""Packed sequences with a mask and a score as code by kernels in Triton's interpreter."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from interpreting import failures_of
from mods_machine import Coded
from packed_machine import Ragged, numbers_of
from triton.experimental.gluon._runtime import GluonJITFunction
from varlen_functions import CASES, RECOGNISED, agrees, explained, kernel_call, made, sequences_are_alone

from flashtune.core.gpu.target import find_target
from flashtune.core.system.errors import InputError
from flashtune.dispatch import varlen_flex
from flashtune.dispatch.call.sequences import Packed
from flashtune.dispatch.functions import decided as flex_decided
from flashtune.dispatch.functions import kernels as flex_kernels
from flashtune.dispatch.functions import trained as flex_autograd
from flashtune.dispatch.rows import operators as packed_ops
from flashtune.dispatch.state import context
from flashtune.templates import family

warnings.filterwarnings("ignore")


@contextmanager
def _kernels_alone() -> Iterator[None]:
    """Kernels have to serve: a call for each sequence fails."""

    def fails(*_: object) -> None:
        raise AssertionError("no kernel takes the call")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen_flex, "by_sequence", fails)
        patch.setattr(packed_ops, "by_sequence", fails)
        patch.setattr(flex_autograd, "by_sequence", fails)
        yield


def of_case(name: str) -> None:
    agrees(name)


def of_halves() -> None:
    agrees("both in a window", dtype=torch.float16, d=24, kind="fp16")


def of_nothing() -> None:
    for lengths in (((0, 0), (0, 0)), ((3, 0), (0, 0)), ((0, 0), (0, 3))):
        agrees("prefix", lengths, padding=0)


def of_neighbours() -> None:
    sequences_are_alone()


def of_other_lengths() -> None:
    """Another batch of sequences takes the same kernels."""
    agrees("prefix", ((3, 9), (3, 9)))
    count = len(flex_kernels.kernels_here())
    agrees("prefix", ((20, 0, 1, 30), (17, 2, 0, 5)), padding=3)
    assert len(flex_kernels.kernels_here()) == count


def _parsed_of(name: str) -> tuple[Any, ...]:
    given, functions, _ = made(name)
    return Packed(*given.tensors, *given.bounds), numbers_of(given), *functions


def of_explanations() -> None:
    said = explained("both")
    assert said.template == "flash_fwd" and said.backward.template == "flash_bwd" and "functions" in said.reason
    for name in RECOGNISED:
        assert explained(name).reason.startswith("the functions are built in: packed"), explained(name).reason
    for name in ("score of a causal mask", "mask in a band"):
        call = varlen_flex.call_of(*_parsed_of(name))
        assert not isinstance(call, (str, dict)) and call.kernel.variant.spec.banded, "a band in a mask narrows the keys that are walked"


def of_bits_that_repeat() -> None:
    """Deterministic gradients are those of kernels, except of captured tensors."""
    given, _, _ = made("both")
    given = given._replace(words=given.words | {"deterministic": True})
    with pytest.raises(InputError, match=r"no fixed order: leave deterministic out"):
        given.call()
    given, _, _ = made("causal relative")
    out, _ = given._replace(words=given.words | {"deterministic": True}).call()
    out[:9].sum().backward()


def of_bounds_that_change() -> None:
    """Bounds that are written to between both passes are an error, as those of calls without functions are."""
    given, _, _ = made("causal relative")
    out, _ = given.call()
    given.bounds[0].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def of_equal_calls() -> None:
    """Kernels are chosen once for equal calls, whose longest sequences may differ within an octave, and again for others."""
    chosen: list[object] = []
    choose = flex_decided._kernels
    context.current().forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_decided, "_kernels", lambda *given, **words: chosen.append(given) or choose(*given, **words))
        given, _, _ = made("causal relative")
        for longest in ((80, 80), (84, 84), (80, 80)):
            given._replace(longest=longest).call()
        assert len(chosen) == 1
        with torch.no_grad():
            for longest in ((80, 80), (80, 80), (800, 800)):
                given._replace(longest=longest).call()
        assert len(chosen) == 3


def of_calls_that_come_again() -> None:
    """A call like an earlier one is found again, with its own tensors and bounds; one of other lengths is decided."""
    decided: list[object] = []
    decide = varlen_flex.call_of
    context.current().forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen_flex, "call_of", lambda *given: decided.append(given) or decide(*given))
        given, _, _ = made("both in a window")
        given.call()
        bounds = tuple(torch.cat((x[:2] - torch.tensor([0, 1]), x[2:]), 0).int() for x in given.bounds)
        other = given._replace(tensors=[(-x.detach()).requires_grad_() for x in given.tensors], bounds=bounds)
        again = [other.call(), torch.autograd.grad(other.call()[0][:9].sum(), other.tensors)]
        assert len(decided) == 1
        context.current().forget()
        anew = [other.call(), torch.autograd.grad(other.call()[0][:9].sum(), other.tensors)]
        assert len(decided) == 2 and all(map(torch.equal, *map(_flat, (again, anew))))
        other._replace(longest=(90, 90)).call()
        assert len(decided) == 3


def _flat(found: Any) -> list[torch.Tensor]:
    return [torch.nan_to_num(x) for one in found for x in one]


HOPPERS: dict[str, dict[str, Any]] = {
    "prefix": {},
    "both in a window": {"persistent": True, "wait_early": True},
    "no derivative at 0": {"persistent": "dynamic"},
}
"""Cases of Hopper's backward, and axes of its configs."""


class _Machine(Coded, Ragged):
    """The stand-in for packed sequences with functions."""


def of_hoppers_gradients() -> None:
    kind = family("flash_bwd_hopper")
    for seed, (name, changes) in enumerate(HOPPERS.items()):
        call = kernel_call(
            name,
            kind,
            lambda spec, axes=changes: kind.default(spec, find_target("h200")).replace(**axes),
            ((5, 0, 130, 64, 1, 0), (70, 3, 130, 0, 200, 0)),
        )
        module, launches = next(call)
        for kernel, *launch in launches:
            if isinstance(kernel, GluonJITFunction):
                _Machine(module, (kernel, *launch), seed=seed).run()
            else:
                grid, args, options = launch
                kernel[grid](*args, **options)
        assert max(next(call)) < 5e-3, name


def main(*names: str) -> dict[str, str]:
    """Failures of the named cases, or without names of everything else."""
    assert all(name in CASES for name in names)
    return failures_of(globals(), of_case, names, _kernels_alone)
