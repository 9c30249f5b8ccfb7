"""Inputs for timing alone, without the float64 forward that a backward's inputs take: at N = 4096 that is seconds for each problem."""

from dataclasses import replace

import torch

from flashtune.core.problem import Problem
from flashtune.core.torch_dtypes import TORCH_DTYPES
from flashtune.tuner.verify.inputs import Inputs, make_inputs, without_repeats


def random_inputs(problem: Problem, *, seed: int, device: str = "cuda") -> Inputs:
    """A problem's inputs. A backward's O, LSE and gradients are random like the rest: no kernel's time depends on them.

    The LSE is above 9, so that probabilities are below 1 and nothing becomes infinite.
    """
    inputs = make_inputs(problem.forward(), device=device, seed=seed)
    if problem.direction == "fwd":
        return inputs
    generator = torch.Generator(device).manual_seed(seed)
    operands = {}
    for operand in problem.contract.operands:
        kind, shape = TORCH_DTYPES[operand.dtype(problem)], operand.shape(problem)
        if operand.name == "dbias" and inputs.parameters.mask is not None:
            # The bias's own sizes, from which it is expanded.
            own = torch.empty(without_repeats(inputs.parameters.mask).shape, device=device, dtype=kind)
            operands[operand.name] = own.expand(shape)
        else:
            operands[operand.name] = torch.randn(shape, device=device, generator=generator).to(kind)
    operands |= {name: getattr(inputs, name) for name in ("q", "k", "v")}
    operands["lse"] = operands["lse"].abs() + 9.0
    return replace(inputs, problem=problem, operands=operands)
