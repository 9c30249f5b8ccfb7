"""Calls of every way in, served by a plan or before one is frozen, and calls that no plan has; see test_frozen."""

import hashlib
from typing import Any

import torch
import ways

from flashtune import dispatch


def main(path: str, frozen: bool, backwards: bool) -> Any:
    """Digests of the plan and of all outputs and gradients, with `backwards` of the ways in in the other order."""
    if not frozen:
        outputs = _bits(backwards)
        return dispatch.freeze(path), outputs
    with dispatch.use(plan=path) as plan:
        outputs = _bits(backwards)
        assert dispatch.freeze(path + ".again") == plan.digest, "it froze itself"
        said = dispatch.explain(*ways.tensors(), enable_gqa=True)
        assert (said.kind, said.template, said.twin) == ("frozen", "flash_decode", None)
        return plan.digest, outputs


def _bits(backwards: bool) -> dict[str, str]:
    found = {}
    names = list(ways.WAYS)
    for way in reversed(names) if backwards else names:
        for grad in (False, True)[: 1 + (way != "paged")]:
            given = ways.tensors(requires_grad=grad)
            with torch.set_grad_enabled(grad):
                out = ways.WAYS[way](given)
            values = [out.detach(), *(torch.autograd.grad(out.square().sum(), given) if grad else ())]
            found[f"{way} {grad}"] = hashlib.sha256(b"".join(x.contiguous().numpy().tobytes() for x in values)).hexdigest()
    return found
