"""Proposals of FlexAttention's kernel options: which combinations suit a problem on a GPU, in the order of Optuna's TPE sampler."""

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence

import optuna

from flashtune.core.dtypes import ITEMSIZE
from flashtune.core.errors import InputError
from flashtune.core.flex_options import PARTS, SHORTEST, refusal
from flashtune.core.problem import Problem, padded
from flashtune.core.target import Target

Options = Mapping[str, int]

MOST_REGISTERS = 320
"""Most float32 numbers of accumulators and scores per thread: more than its 255 registers, since compilers don't hold all at once."""

STARTS: Mapping[str, Sequence[tuple[int, ...]]] = {
    "fwd": [(128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 4, 3), (64, 128, 4, 3), (64, 32, 4, 3)],
    "bwd": [
        *[(64, 128, 128, 64, 8, 3), (64, 64, 64, 64, 4, 3), (64, 64, 64, 64, 4, 2), (64, 128, 128, 64, 8, 2), (32, 128, 128, 32, 4, 3)],
        *[(64, 128, 128, 64, 4, 2), (32, 64, 64, 32, 4, 3), (64, 128, 128, 64, 4, 3), (64, 64, 64, 64, 4, 1), (64, 128, 128, 64, 8, 1)],
        *[(32, 64, 64, 32, 4, 2), (64, 64, 128, 64, 4, 2), (64, 128, 64, 64, 8, 2), (128, 128, 128, 128, 8, 1)],
    ],
}
"""First candidates, values in the order of `PARTS`: PyTorch's defaults on several GPUs, and those that its own autotuning tries."""


TAKES = ("causal", "packed", "softcap")
"""Flags of problems that FlexAttention is tuned for, beside windows."""


def refuse_untunable(problem: Problem) -> None:
    """Raise InputError for a problem that FlexAttention isn't tuned for."""
    features = problem.features
    other = [name for name, on in features.flags().items() if on and name not in TAKES] + [features.mask] * (features.mask != "none")
    other += ["a mask or a score as code"] * bool(features.mods)
    if other or problem.dtype == "fp8":
        lacking = other[0] if other else "fp8"
        raise InputError(f"FlexAttention is tuned for bands, soft caps and packed sequences, not with {lacking}: leave it out")
    rows = problem.n_q * (1 if problem.lengths is None else problem.batch)
    if rows < SHORTEST:
        raise InputError(f"FlexAttention has a kernel without these options for {rows} queries: give at least {SHORTEST}")


def space(which: str, problem: Problem, target: Target) -> list[Options]:
    """All combinations of a kernel's options (`fwd` or `bwd`) that keep PyTorch's constraints, and the least of whose needs fits the GPU's
    registers and shared memory."""
    axes = PARTS[which]
    found = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [options for options in found if refusal(options) is None and _fits(which, options, problem, target)]


def _fits(which: str, options: Options, problem: Problem, target: Target) -> bool:
    d, d_v, size = padded(problem.d), padded(problem.d_v), ITEMSIZE[problem.dtype]
    least = 32 if problem.dtype != "fp32" else 16
    if min(value for name, value in options.items() if "BLOCK" in name) < least:
        # Products of 16-bit numbers in tiles of 16 rows waste most of a tensor core's rate.
        return False
    warps, stages = options[f"{which}_num_warps"], options[f"{which}_num_stages"]
    if which == "fwd":
        m, n = options["fwd_BLOCK_M"], options["fwd_BLOCK_N"]
        numbers, held = m * (d_v + n), m * d + n * (d + d_v) * max(1, stages - 1)
    else:
        m1, n1, m2, n2 = (options[f"bwd_BLOCK_{name}"] for name in ("M1", "N1", "M2", "N2"))
        numbers = max(n1 * (d + d_v) + 2 * m1 * n1, m2 * d + 2 * m2 * n2)
        held = max(m1, n2) * (d + d_v) * max(1, stages - 1)
    return numbers <= MOST_REGISTERS * target.warp_size * warps and held * size <= target.shared_bytes_per_block


class Proposals:
    """Options of one kernel, each proposed once: `STARTS`, then those nearest to what the sampler expects to be fast."""

    def __init__(self, which: str, problem: Problem, target: Target, seed: int | None) -> None:
        self.which, self.best = which, list[tuple[float, Options]]()
        """Ratios of times to the defaults' and options that were timed, the fastest first."""
        self._axes: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(values) for name, values in PARTS[which].items()
        }
        self._left = {tuple(options.values()): options for options in space(which, problem, target)}
        self._starts = [values for values in STARTS[which] if values in self._left]
        with warnings.catch_warnings(action="ignore", category=optuna.exceptions.ExperimentalWarning):
            sampler = optuna.samplers.TPESampler(n_startup_trials=10, multivariate=True, seed=seed)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(sampler=sampler)

    @property
    def left(self) -> int:
        """Number of options that weren't proposed."""
        return len(self._left)

    def next(self) -> Options | None:
        """The next options; the fastest known ones where none are left, and None where none are known either."""
        if not self._left:
            return self.best[0][1] if self.best else None
        if self._starts:
            return self._left.pop(self._starts.pop(0))
        trial = self._study.ask(self._axes)
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        asked = tuple(trial.params[name] for name in self._axes)

        def away(values: tuple[int, ...]) -> float:
            return sum(abs(math.log2(one / other)) for one, other in zip(values, asked, strict=True))

        return self._left.pop(min(self._left, key=away))

    def tell(self, options: Options, ratio: float) -> None:
        """Observe the ratio of the options' time to the defaults'; of those that fail nothing is told."""
        if all(one != options for _, one in self.best):
            self.best = sorted([*self.best, (ratio, options)], key=lambda one: one[0])
            self._study.add_trial(optuna.trial.create_trial(params=dict(options), distributions=self._axes, value=math.log(ratio)))


def finals(parts: Sequence[Proposals]) -> Iterator[Options]:
    """Options for the closing race: the fastest of each kernel together, then with the second and third of the last kernel, and with the
    second of the first one."""
    best = [[options for _, options in one.best] for one in parts]
    places = [(0,) * len(best), *((*(0,) * (len(best) - 1), place) for place in (1, 2)), *([(1, 0)] if len(best) > 1 else [])]
    for place in places:
        if all(at < len(known) for at, known in zip(place, best, strict=True)):
            yield {name: value for at, known in zip(place, best, strict=True) for name, value in known[at].items()}
