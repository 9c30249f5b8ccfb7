"""Runs `transpose_v` of rendered Hopper modules in Triton's interpreter and prints one JSON list; a test starts it as a child process.

Usage: interpret_transpose_v.py ORDER, a JSON list of the key within sixteen that every place is to hold; the variable
TRITON_INTERPRET=1 has to be set before Triton is imported. Printed is the name of each case that came out wrong.
"""

import json
import sys
from dataclasses import replace

import torch
from hopper_kernels import launches, problem, rendered

from flashtune.tuner.verify.inputs import make_inputs

CASES = [(64, 1, False), (64, 128, False), (40, 77, True), (24, 130, True), (128, 300, False), (8, 16, True)]
"""D_v, N_kv and whether the heads of a row lie side by side."""


def run(d_v: int, n_kv: int, heads_inside: bool, order: torch.Tensor) -> bool:
    """True if the transposed values of random bytes are those in `order`, with zeros after the last key."""
    wanted = replace(problem(64, d_v=d_v, dtype="fp8"), n_q=64, n_kv=n_kv)
    inputs = make_inputs(wanted, device="cpu", seed=n_kv, heads_inside=heads_inside)
    bits = inputs.v.view(torch.uint8)
    bits.copy_(torch.randint(1, 256, bits.shape))
    (kernel, grid, arguments, options), _ = launches(rendered(wanted.spec(), BLOCK_M=64, intra_wg_overlap=0), inputs)
    transposed = arguments[1].fill_(255)
    kernel[grid](*arguments, **options)
    room = -(-n_kv // 16) * 16
    keys = torch.arange(room) // 16 * 16 + order.repeat(room // 16)
    padded = torch.nn.functional.pad(bits, (0, 0, 0, room - n_kv))
    return torch.equal(transposed, padded[:, :, keys].transpose(2, 3))


def main() -> None:
    """Run all cases."""
    order = torch.tensor(json.loads(sys.argv[1]))
    print(json.dumps([str(case) for case in CASES if not run(*case, order)]))


if __name__ == "__main__":
    main()
