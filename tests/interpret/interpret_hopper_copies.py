"""Kernels that go before a Hopper kernel, `pack_mask` and `transpose_v`, in Triton's interpreter.

Their order is the key within sixteen that every place of transposed values is to hold.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from hopper_kernels import launches, problem, rendered, words_of

from flashtune.core.problems.problem import Features
from flashtune.tuner.verify.inputs import make_inputs

SHAPE = (2, 2, 66, 100)
"""Batches, query heads, N_q and N_kv of the cases: tiles and blocks that end early."""

B, H, M, N = SHAPE

MASKS: dict[str, Callable[[], torch.Tensor]] = {
    "full": lambda: drawn(*SHAPE),
    "one matrix for all": lambda: drawn(1, 1, M, N),
    "one for each head": lambda: drawn(1, H, M, N),
    "one for each batch": lambda: drawn(B, 1, M, N),
    "keys": lambda: drawn(B, 1, 1, N),
    "rows": lambda: drawn(1, H, M, 1),
    "one bit": lambda: drawn(1, 1, 1, 1),
    "columns first": lambda: drawn(B, H, N, M).transpose(2, 3),
    "heads inside": lambda: drawn(B, M, H, N).transpose(1, 2),
    "every third column from an odd address": lambda: drawn(B, H, M, 3 * N + 1)[..., 1::3],
    "backwards in batches by a view": lambda: drawn(3, H, M, N)[1:],
}


def drawn(*shape: int) -> torch.Tensor:
    return torch.rand(shape) < 0.6


def packed(stored: torch.Tensor, block_n: int, block_m: int) -> bool:
    """True if a launch packs `stored`, expanded, into the words of `words_of`, each matrix that it doesn't repeat once."""
    wanted = replace(problem(16, Features(mask="bool"), dtype="fp16"), batch=B, heads=H, kv_heads=1, n_q=M, n_kv=N)
    inputs = make_inputs(wanted, device="cpu", seed=0)
    mask = stored.expand(SHAPE)
    module = rendered(wanted.spec(), BLOCK_N=block_n, BLOCK_M=block_m, intra_wg_overlap=0)
    assert module.accepts(inputs.q, inputs.k, inputs.v, mask)
    (kernel, grid, arguments, options), attention = launches(module, inputs, mask=mask)
    assert kernel is module.pack_mask
    words = arguments[1].fill_(-1)
    kernel[grid](*arguments, **options)
    blocks, rows = -(-N // block_n), -(-M // block_m) * block_m
    room = torch.zeros(*stored.shape[:2], rows, blocks * block_n, dtype=torch.bool)
    room[:, :, :M, :N] = mask[: stored.shape[0], : stored.shape[1]]
    expected = words_of(room.unflatten(3, (blocks, block_n)).transpose(2, 3)).to(words.dtype)
    # Words to the next batch and to the next head, as the attention kernel is told.
    told = dict(zip(attention[0].arg_names, attention[2], strict=True))
    steps = stored.shape[1] if stored.shape[0] > 1 else 0, int(stored.shape[1] > 1)
    return torch.equal(words, expected) and (told["mask_per_batch"], told["mask_per_head"]) == steps and told["mask_bits_ptr"] is words


VALUES = [(64, 1, False), (64, 128, False), (40, 77, True), (24, 130, True), (128, 300, False), (8, 16, True)]
"""D_v, N_kv and whether the heads of a row lie side by side."""


def transposed(d_v: int, n_kv: int, heads_inside: bool, order: torch.Tensor) -> bool:
    """True if the transposed values of random bytes are those in `order`, with zeros after the last key."""
    wanted = replace(problem(64, d_v=d_v, dtype="fp8"), n_q=64, n_kv=n_kv)
    inputs = make_inputs(wanted, device="cpu", seed=n_kv, heads_inside=heads_inside)
    bits = inputs.v.view(torch.uint8)
    bits.copy_(torch.randint(1, 256, bits.shape))
    (kernel, grid, arguments, options), _ = launches(rendered(wanted.spec(), BLOCK_M=64, intra_wg_overlap=0), inputs)
    found = arguments[1].fill_(255)
    kernel[grid](*arguments, **options)
    room = -(-n_kv // 16) * 16
    keys = torch.arange(room) // 16 * 16 + order.repeat(room // 16)
    padded = torch.nn.functional.pad(bits, (0, 0, 0, room - n_kv))
    return torch.equal(found, padded[:, :, keys].transpose(2, 3))


def main(keys: list[int]) -> list[str]:
    """Cases that came out wrong; block sizes have words of their own types."""
    torch.manual_seed(0)
    order, blocks = torch.tensor(keys), [(64, 64), (128, 128), (256, 64)]
    wrong = [f"{name} {sizes}" for name, make in MASKS.items() for sizes in blocks if not packed(make(), *sizes)]
    return [*wrong, *(str(case) for case in VALUES if not transposed(*case, order))]
