"""A block of a diffusion transformer, as others wrote it, whose tokens are on two ranks: `torchs_place` has a ring run its attention.
Here two processes of a CPU are the ranks; on GPUs start them by torchrun, with the backend "nccl"."""

import functools
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from flashtune import dispatch
from flashtune.integrations import torchs_place

RANKS, TOKENS = 2, 128


class Block(nn.Module):
    """Self-attention and a feed-forward of each token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, N, width)."""
        q, k, v = self.qkv(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed(F.layer_norm(x, x.shape[-1:]))


def rank(number: int, folder: str) -> None:
    """Compare this rank's tokens, and its gradients of the weights, with those of the whole."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=number, world_size=RANKS)
    torch.manual_seed(0)
    block, x = Block(width=64, heads=2), torch.randn(1, RANKS * TOKENS, 64)
    whole = block(x)
    wanted = torch.autograd.grad(whole.square().sum(), list(block.parameters()))

    with torchs_place(functools.partial(dispatch.ring, group=dist.group.WORLD)):
        own = block(x.chunk(RANKS, 1)[number])
        found = torch.autograd.grad(own.square().sum(), list(block.parameters()))
    torch.testing.assert_close(own, whole.chunk(RANKS, 1)[number], atol=1e-4, rtol=1e-4)
    for mine, all_of_them in zip(found, wanted, strict=True):
        dist.all_reduce(mine)
        torch.testing.assert_close(mine, all_of_them, atol=1e-3, rtol=1e-3)
    if number == 0:
        print(f"{RANKS} ranks of {TOKENS} tokens compute what one process does, gradients included")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (folder,), RANKS)
