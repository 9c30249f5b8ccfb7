"""Judgement of a call's output by any plan: against float64 at some rows of each head, on copies of the inputs between guard bands."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flashtune.core.problems.oracles import expected_at
from flashtune.core.problems.passes import Place
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch.surroundings import Kept, Poisoned, guarded_copy
from flashtune.dispatch.call.call import Call
from flashtune.dispatch.call.parse import Arguments

MOST_HEADS = 128
"""Heads of all batches that are compared with float64; of more, these are spread evenly."""

ROWS = 32
"""Rows at the beginning, in the middle and at the end of a head that are compared with float64."""

TWICE = 2.0
"""Largest distance of two correct outputs, in tolerances: each may be off by one."""


class Judge:
    """Expected values of one call without gradients and dropout, and `given`, copies of its arguments to run plans on."""

    def __init__(self, call: Call, problem: Problem, given: Arguments) -> None:
        query, key, value = map(guarded_copy, given[:3])
        mask = None if given.attn_mask is None else guarded_copy(given.attn_mask)
        self.given = given._replace(query=query, key=key, value=value, attn_mask=mask)
        tensors = {"query": query, "key": key, "value": value, **({} if mask is None else {"mask": mask})}
        self._problem, self._kept = problem, Kept(tensors)
        q, k, v = call.views(*given[:3])
        parameters = call.parameters(call.full_mask(given[3]), given.per_head)
        self._places = _places(problem)
        self._expected = expected_at(problem, {"q": q, "k": k, "v": v}, parameters, self._places)
        self._bound = problem.contract.bounds(problem.spec())["out"]
        self._shape = (problem.batch, problem.heads, problem.n_q, problem.d_v)
        self.torchs: Tensor | None = None

    def run(self, run: Callable[[], Tensor]) -> tuple[Tensor, str]:
        """Output of a plan that runs on `given`, and the reason why it is wrong, or ""."""
        poisoned = Poisoned([math.prod(self._shape)], self.given.query.dtype, self.given.query.device)
        out = run()
        where = self._kept.changed() or poisoned.changed()
        return out, f"it writes into the {where}, or beside it" if where else self._reason(out)

    def _reason(self, out: Tensor) -> str:
        label = self._problem.label()
        if bool(torch.isnan(out).any()):
            return f"{label}: NaN or unwritten elements in the output"
        found, bound = out.reshape(self._shape), self._bound
        ratios = []
        for place, values in zip(self._places, self._expected, strict=True):
            wanted = values["out"]
            gap = found[place.batch, place.head, place.queries].to(wanted.dtype) - wanted
            ratios.append((gap.abs() / self._allowed(wanted)).max())
            if bound.relative_norm is not None:
                ratios.append(gap.norm() / (bound.relative_norm * wanted.norm()).clamp_min(1e-30))
        worst = torch.stack(ratios).max().item()
        if not worst <= 1.0:
            return f"{label}: the output is off by {worst:.3g} tolerances"
        if self.torchs is not None:
            gap, wanted = out.float() - self.torchs.float(), self.torchs.float()
            if not bool((gap.abs() <= TWICE * self._allowed(wanted)).all()):
                return f"{label}: the output differs from PyTorch's"
        return ""

    def _allowed(self, wanted: Tensor) -> Tensor:
        """Largest error of each element: the bound's, which is for values about 1, grows with the size of a caller's."""
        size = wanted.square().mean().sqrt().clamp_min(1.0)
        return self._bound.atol * size + self._bound.rtol * wanted.abs()


def _places(problem: Problem) -> list[Place]:
    """Rows of heads that are compared with float64."""
    count, n = problem.batch * problem.heads, problem.n_q
    chosen = range(count) if count <= MOST_HEADS else [place * (count - 1) // (MOST_HEADS - 1) for place in range(MOST_HEADS)]
    starts = (0,) if n <= 3 * ROWS else (0, n // 2 - ROWS // 2, n - ROWS)
    rows = [slice(start, n if n <= 3 * ROWS else start + ROWS) for start in starts]
    return [Place(batch=one // problem.heads, head=one % problem.heads, queries=part) for one in chosen for part in rows]
