"""Correct before fast: a candidate's output and LSE against the float64 oracle, on random, ragged, poisoned inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from flashtune.core import reference
from flashtune.core.problem import DECODE_ROWS, Features, Problem
from flashtune.core.tolerances import tolerance
from flashtune.tuner.inputs import Inputs, make_inputs

Launch = Callable[..., None]
"""A rendered module's `launch`."""

SLICE_ROWS = 64
"""Rows of one head that are compared at full size, at each of the places that are checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`error` is the largest error over its tolerance (<= 1 passes); `reason` says what is wrong, empty when right."""

    error: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Expected:
    """The oracle's rows [first, first + len) of head `head` in batch `batch`."""

    batch: int
    head: int
    first: int
    out: torch.Tensor
    lse: torch.Tensor


def small_cases(problem: Problem) -> list[Problem]:
    """Ragged little problems with the problem's own spec: what tile edges, empty rows and shared heads get wrong."""
    ratio = problem.gqa_ratio

    def case(n_q: int, n_kv: int, features: Features) -> Problem:
        return replace(problem, batch=min(2, problem.batch), heads=2 * ratio, kv_heads=2, n_q=n_q, n_kv=n_kv, features=features)

    f = problem.features
    if f.window is not None:
        left, right = (None if side is None else min(side, 70) for side in f.window)
        f = replace(f, window=(left, right))
    flipped = replace(f, alignment="top_left" if f.alignment == "bottom_right" else "bottom_right")
    cases = [case(193, 321, f), case(1, 77, f), case(320, 320, f), case(97, 515, flipped)]
    if problem.n_q <= DECODE_ROWS:
        # Enough keys that many programs share them.
        cases.append(case(problem.n_q, 2177, flipped))
    return [*cases, case(391, 130, flipped)] if f.has_diagonal else cases


def make_extreme(inputs: Inputs) -> None:
    """Change the inputs so that scores defeat an estimate of a row's maximum.

    The first 40 keys, to which kernels come first or last, have scores up to some 100 (natural units), and all of a row's lie around 150
    or around -150. The first 64 rows' scores are a fortieth of that and the next 64 rows' a twelfth, so that their weights can be held
    relative to such an estimate. Of a boolean mask the last 140 columns are hidden.
    """
    d = inputs.problem.d
    shift = (150 / (inputs.keywords["scale"] * d)) ** 0.5
    inputs.k[:, :, :40] *= 24.0
    inputs.k.add_(shift)
    inputs.q[:, :, ::2] += shift
    inputs.q[:, :, 1::2] -= shift
    inputs.q[:, :, :64] /= 40
    inputs.q[:, :, 64:128] /= 12
    if inputs.problem.features.mask == "bool":
        inputs.keywords["mask"] = inputs.keywords["mask"].clone()
        inputs.keywords["mask"][..., -140:] = False


def places(problem: Problem, seed: int) -> list[tuple[int, int, int, int]]:
    """(batch, head, first row, rows) to compare at full size: the first, last and two random places."""
    generator = torch.Generator().manual_seed(seed)
    rows = min(SLICE_ROWS, problem.n_q)

    def pick(high: int) -> int:
        return int(torch.randint(0, high, (1,), generator=generator))

    last = problem.n_q - rows
    found = [(0, 0, 0, rows), (problem.batch - 1, problem.heads - 1, last, rows)]
    return found + [(pick(problem.batch), pick(problem.heads), pick(last + 1), rows) for _ in range(2)]


def oracle(inputs: Inputs, where: list[tuple[int, int, int, int]]) -> list[Expected]:
    """The float64 oracle at these places (see `places`) of `inputs`."""
    p, words = inputs.problem, inputs.keywords
    found = []
    for batch, head, first, rows in where:
        at = slice(batch, batch + 1), slice(head, head + 1), slice(first, first + rows)
        shared = slice(head // p.gqa_ratio, head // p.gqa_ratio + 1)
        slopes, descale = words.get("slopes"), words.get("descale")
        keep = None
        if p.features.dropout:
            index = batch * p.heads + head
            keep = reference.dropout_keep_rows(
                words["seed"], words["offset"], index, first, rows, p.n_kv, words["dropout_p"], inputs.q.device
            )
        out, lse = reference.attention(
            inputs.q[at],
            inputs.k[at[0], shared],
            inputs.v[at[0], shared],
            mask=None if words["mask"] is None else words["mask"][at],
            scale=words["scale"],
            band=p.band.from_row(first),
            softcap=words["softcap"],
            keep=keep,
            dropout_p=words["dropout_p"],
            slopes=None if slopes is None else slopes[at[:2]],
            descale=None if descale is None else (descale[0][at[:2]], descale[1][at[0], shared], descale[2][at[0], shared]),
        )
        found.append(Expected(batch, head, first, out[0, 0], lse[0, 0]))
    return found


def everywhere(problem: Problem) -> list[tuple[int, int, int, int]]:
    """All rows of all heads, as places."""
    return [(b, h, 0, problem.n_q) for b in range(problem.batch) for h in range(problem.heads)]


def check(launch: Launch, inputs: Inputs, expected: list[Expected]) -> Verdict:
    """Run `launch` on poisoned outputs and compare; every element of the output must have been written."""
    bounds = tolerance(inputs.problem.spec())
    inputs.poison()
    launch(*inputs.arguments, **inputs.keywords)
    if torch.isnan(inputs.out).any() or torch.isnan(inputs.lse).any():
        name = "output" if torch.isnan(inputs.out).any() else "LSE"
        return Verdict(error=float("inf"), reason=f"{inputs.problem.label()}: NaN or unwritten elements in the {name}")
    worst = 0.0
    for want in expected:
        rows = slice(want.first, want.first + want.lse.shape[0])
        out = inputs.out[want.batch, want.head, rows].double()
        lse = inputs.lse[want.batch, want.head, rows].double()
        if not torch.equal(torch.isinf(lse), torch.isinf(want.lse)):
            return Verdict(error=float("inf"), reason=f"{inputs.problem.label()}: the LSE is -inf on the wrong rows")
        finite = torch.isfinite(want.lse)
        ratios = {
            "output": ((out - want.out).abs() / (bounds.atol + bounds.rtol * want.out.abs())).max(),
            "LSE": ((lse - want.lse)[finite].abs() / bounds.lse_atol).max() if finite.any() else torch.zeros(()),
            "output's norm": (out - want.out).norm() / (bounds.relative_norm * want.out.norm()).clamp_min(1e-30),
        }
        for name, ratio in ratios.items():
            worst = max(worst, float(ratio))
            if not ratio <= 1:
                return Verdict(error=float(ratio), reason=f"{inputs.problem.label()}: {name} is off by {float(ratio):.3g} tolerances")
    return Verdict(error=worst)


class Verifier:
    """Checks candidates of one problem; inputs and oracles are made once and serve every candidate.

    The small cases serve all N of a spec; the full-size places are this problem's own.
    """

    def __init__(self, problem: Problem, *, device: torch.device | str, seed: int, full_size: Inputs | None = None) -> None:
        self._cases = list(self._prepare(problem, device, seed))
        self._full = (full_size, oracle(full_size, places(problem, seed))) if full_size is not None else None

    @staticmethod
    def _prepare(problem: Problem, device: torch.device | str, seed: int) -> Iterator[tuple[Inputs, list[Expected]]]:
        for index, small in enumerate(small_cases(problem)):
            inputs = make_inputs(small, device=device, seed=seed + index, heads_inside=index % 2 == 1)
            yield inputs, oracle(inputs, everywhere(small))
            if index == 0 and problem.dtype in ("bf16", "fp16") and torch.device(device).type == "cuda":
                # Not for other types: rounding such scores to TF32 or adding them up as fp8's products do is not exact enough. Kernels that
                # Triton's interpreter runs look for their maxima in every block, and it would take a fifth of the time there.
                extreme = make_inputs(small, device=device, seed=seed)
                make_extreme(extreme)
                yield extreme, oracle(extreme, everywhere(small))

    def verdict(self, launch: Launch) -> Verdict:
        """The first failure, or the largest error of all checks."""
        worst = 0.0
        for inputs, expected in [*self._cases, *([self._full] if self._full else [])]:
            found = check(launch, inputs, expected)
            if found.reason:
                return found
            worst = max(worst, found.error)
        return Verdict(error=worst)
