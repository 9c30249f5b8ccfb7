"""Configs of Hopper's kernels with a mask and a score as code, beside each other and FlexAttention, on the functions of `mods`.

Prints a line for each function: median times in microseconds of the forward and of the backward by each config that compiles. Functions
that `attention` has built in, and those with learned tensors in the backward, don't depend on them.
"""

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.cases.mods import CASES, whole_calls
from benchmarks.shared.environment import argument_parser, names_of, this_gpu
from flashtune import dispatch
from flashtune.dispatch.functions import kernels as flex_kernels
from flashtune.dispatch.policy.choose import Choice, Refusal
from flashtune.dispatch.policy.orders import rank_coded
from flashtune.dispatch.state.context import Memo, serving
from flashtune.templates import families
from flashtune.tuner.timing.stopwatch import Stopwatch

Changes = dict[str, Any]

FORWARD: dict[str, Changes] = {
    "default": {},
    "grown": {"rescale": "grown"},
    "no turns": {"pingpong": False},
    "grown, no turns": {"rescale": "grown", "pingpong": False},
    "narrow": {"BLOCK_N": 64, "num_stages": 4, "pingpong": False},
    "narrow, turns": {"BLOCK_N": 64, "num_stages": 4},
    "three": {"BLOCK_M": 192, "BLOCK_N": 64, "num_stages": 2, "pingpong": False},
    "one tile": {"tiles": "one", "order": "fixed"},
    "in order": {"intra_wg_overlap": 0, "tiles": "one", "order": "fixed"},
    "two programs": {
        "BLOCK_M": 64, "BLOCK_N": 64, "intra_wg_overlap": 0, "tiles": "one", "order": "fixed", "ctas_per_sm": 2, "pingpong": False,
    },
}  # fmt: skip
BACKWARD: dict[str, Changes] = {
    "default": {},
    "early": {"wait_early": True},
    "dynamic": {"persistent": "dynamic"},
    "values held": {"held": "v"},
    "both held": {"held": "both"},
    "polynomial": {"exp_poly": True},
    "heads apart": {"section": 1},
}


class Configured:
    """A store of kernels of its own, whose configs are the defaults with changes; they are compiled as they are first called."""

    def __init__(self, forward: Changes, backward: Changes) -> None:
        self._changes = {"fwd": forward, "bwd": backward}
        self._memo = Memo()

    def _ranked(self, problem: Any, target: Any, *_: Any, **__: Any) -> Iterator[Choice]:
        changes = self._changes[problem.direction]
        for choice in rank_coded(problem, target, lambda _: [], families(), framework_serves=False):
            if isinstance(choice, Refusal) or (kind := choice.family) is None:
                continue
            config = kind.default(choice.spec, target).replace(**changes if "hopper" in kind.name else {})
            if (broken := kind.violated(config, choice.spec, target)) is not None:
                raise ValueError(f"breaks {broken}")
            yield choice._replace(config=config, origin="chosen by a benchmark")

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """These kernels serve in the block."""
        kept: Any = flex_kernels.rank_coded
        flex_kernels.rank_coded = self._ranked  # type: ignore[assignment]
        try:
            with serving(self._memo):
                yield
        finally:
            flex_kernels.rank_coded = kept


def line_of(name: str, n: int, d: int, options: Any, watch: Stopwatch) -> str:
    """Times of a function's passes by each config."""
    torch._dynamo.reset()
    mods, trained = CASES[name](n, options.heads)
    generator = torch.Generator("cuda").manual_seed(options.seed)
    shape = (1, options.heads, n, d)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_() for _ in range(3)]
    mask = None if mods[1] is None else create_block_mask(mods[1], None, None, n, n, device="cuda", _compile=True)
    theirs = whole_calls(torch.compile(flex_attention), tensors, trained, mods, mask)
    said = []
    for place, (which, configs) in enumerate((("forward", FORWARD), ("backward", BACKWARD))):
        runs: dict[str, Any] = {"flex": theirs[place]}
        for label, changes in configs.items():
            kernels = Configured(*(changes if place == i else {} for i in range(2)))

            def run(own: Any, kernels: Configured = kernels) -> object:
                with kernels.used():
                    return own()

            try:
                with kernels.used():
                    ours = whole_calls(dispatch.flex_attention, tensors, trained, mods, mask)
                runs[label] = lambda run=run, own=ours[place]: run(own)
                runs[label]()
            except Exception as error:
                said.append(f"{which} {label}: {type(error).__name__}: {error}"[:160])
        times = watch.rounds(list(runs.values()), options.rounds)
        said.append(f"{which} " + ", ".join(f"{label} {statistics.median(one):.0f}" for label, one in zip(runs, times, strict=True)))
    return f"{name} N={n} D={d}: " + "; ".join(said)


def main() -> None:
    """Run and print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--cases", type=lambda text: names_of(text, tuple(CASES), "cases"), default=tuple(CASES))
    parser.add_argument("--n", type=lambda text: [int(x) for x in text.split(",")], default=[4096])
    parser.add_argument("--d", type=lambda text: [int(x) for x in text.split(",")], default=[64, 128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dispatch.use(unmeasured=True, everywhere=True)
    watch = Stopwatch(torch.device("cuda"), this_gpu().l2_bytes)
    for n in options.n:
        for d in options.d:
            for name in options.cases:
                print(line_of(name, n, d, options, watch), flush=True)
