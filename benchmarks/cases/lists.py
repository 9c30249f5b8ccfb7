"""Lists of blocks as masks: our kernels beside FlexAttention and, where they are installed, cuDNN's block-sparse kernels.

Every row of blocks lists as many random blocks. Times are wall times until the GPU is done, the host's part among them, of calls back to
back in turns; lists are kept with their BlockMask, but for "new lists", where each call has a new one. `of dense` is our time without
empty blocks times the share of those that are left, over our time: 1 where time falls with the blocks.
"""

import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.shared import turns
from benchmarks.shared.environment import argument_parser, numbers_of
from flashtune import dispatch

ROUNDS, REPEATS = 9, 10
COMPILED = torch.compile(flex_attention)


def _lists(of: dict[str, int]) -> tuple[Tensor, Any]:
    """Places of the listed blocks (1, heads, rows, count), and their BlockMask, whose lists have all columns for PyTorch to transpose."""
    blocks = of["n"] // of["block"]
    count = max(1, round(blocks * (100 - of["empty"]) / 100))
    places = torch.rand(1, of["heads"], blocks, blocks, device=turns.DEVICE).argsort(-1).int()
    number = torch.full(places.shape[:3], count, dtype=torch.int32, device=turns.DEVICE)
    mask = BlockMask.from_kv_blocks(number, places, BLOCK_SIZE=of["block"], seq_lengths=(of["n"], of["n"]))
    return places[..., :count].contiguous(), mask


def _cudnn(of: dict[str, int], tensors: list[Tensor], places: Tensor, dout: Tensor) -> dict[str, Any]:
    """Calls of cuDNN's block-sparse kernels, forward and backward, None for those that aren't installed or don't take the call."""
    try:
        bsa = importlib.import_module("cudnn").BSA
    except (ImportError, AttributeError):
        return {}
    words = {"block_sparse_num": places.shape[-1], "sparse_block_size": of["block"]}
    plain, found = [x.detach() for x in tensors], dict[str, Any]()
    try:
        out, lse = bsa.block_sparse_attention_forward(*plain, places, **words)
        found["forward"] = lambda: bsa.block_sparse_attention_forward(*plain, places, **words)
        bsa.block_sparse_attention_backward(dout, *plain, out, lse, places, **words)
        found["backward"] = lambda: bsa.block_sparse_attention_backward(dout, *plain, out, lse, places, **words)
    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
        print(f"  cuDNN: {str(error).splitlines()[0][:200]}", flush=True)
    return found


def _of_lists(of: dict[str, int], dense: dict[tuple[Any, ...], dict[str, float]]) -> dict[str, Any]:
    """Microseconds of both passes by each, and what they are to ours."""
    tensors = [torch.randn(1, of["heads"], of["n"], of["d"], device=turns.DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    places, mask = _lists(of)
    dout = torch.randn_like(tensors[0])
    # PyTorch compiles nothing for smaller blocks.
    functions = {"ours": dispatch.flex_attention} | ({"flex": COMPILED} if of["block"] >= 128 else {})
    outs = {name: function(*tensors, block_mask=mask) for name, function in functions.items()}
    seen = {name: out.detach().float() for name, out in outs.items()}
    apart = float((seen["ours"] - seen["flex"]).norm() / seen["flex"].norm()) if "flex" in seen else None
    theirs = _cudnn(of, tensors, places, dout)

    def forward(function: Any, *, new: bool = False) -> Any:
        now = mask
        if new:
            now = BlockMask.from_kv_blocks(
                mask.kv_num_blocks, places, BLOCK_SIZE=of["block"], seq_lengths=(of["n"],) * 2, compute_q_blocks=False
            )
        with torch.no_grad():
            return function(*tensors, block_mask=now)

    calls = {
        "forward": {name: functools.partial(forward, function) for name, function in functions.items()},
        "backward": {name: functools.partial(torch.autograd.grad, out, tensors, dout, retain_graph=True) for name, out in outs.items()},
    }
    calls["forward"]["new lists"] = functools.partial(forward, dispatch.flex_attention, new=True)
    row: dict[str, Any] = {**of, "served": dispatch.explain_flex(*tensors, block_mask=mask).template, "apart": apart}
    times: dict[str, float] = {}
    for which, every in calls.items():
        every |= {"cudnn": theirs[which]} if which in theirs else {}
        found = turns.medians(turns.timed_in_turns(every, rounds=ROUNDS, repeats=REPEATS))
        times[which] = found["ours"]
        row |= {f"{which} {name}": time for name, time in found.items()}
        row |= {f"{which} over {name}": found[name] / found["ours"] for name in ("flex", "cudnn") if name in found}
    whole = dense.setdefault(tuple(of[name] for name in ("n", "d", "block", "heads")), times)
    left = places.shape[-1] / mask.kv_indices.shape[-1]
    return row | {f"{which} of dense": whole[which] * left / times[which] for which in times}


def main() -> None:
    """Time lists over sizes of heads and blocks, lengths and shares of empty blocks."""
    parser = argument_parser(__doc__)
    parser.add_argument("--n", type=numbers_of, default=[16384], help="tokens, with commas between them")
    parser.add_argument("--d", type=numbers_of, default=[64, 128], help="head sizes, with commas between them")
    parser.add_argument("--block", type=numbers_of, default=[64, 128], help="sizes of blocks, with commas between them")
    parser.add_argument("--empty", type=numbers_of, default=[50, 75, 90], help="percent of empty blocks, with commas between them")
    parser.add_argument("--heads", type=int, default=16)
    given = parser.parse_args()
    # What is to be measured serves.
    dispatch.use(unmeasured=True, everywhere=True)
    # A backward is timed many times.
    torch._functorch.config.donated_buffer = False
    dense: dict[tuple[Any, ...], dict[str, float]] = {}

    def lists() -> Iterator[dict[str, Any]]:
        for n, d, block in itertools.product(given.n, given.d, given.block):
            for empty in (0, *given.empty):
                of = {"n": n, "d": d, "block": block, "heads": given.heads, "empty": empty}
                yield from turns.guarded(of, functools.partial(_of_lists, of, dense), limit_s=180.0)

    turns.report("lists", {"lists": lists})
