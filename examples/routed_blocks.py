"""Training steps of attention whose blocks a router picks (top-k of block means): the lists are new at each step, and they are the mask."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from flashtune import dispatch

BLOCK, TOKENS, TOP = 64, 512, 3


class RoutedAttention(nn.Module):
    """Each block of queries sees its own keys and those of the blocks whose means are most like its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention of tokens (batch, TOKENS, width)."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        out = dispatch.flex_attention(q, k, v, block_mask=routed(q.detach(), k.detach()))
        return self.out(out.transpose(1, 2).flatten(2))


def routed(q: torch.Tensor, k: torch.Tensor) -> BlockMask:
    """The BlockMask of the best blocks of each block of queries; nothing of it is read by the host."""
    of_queries, of_keys = (x.unflatten(2, (-1, BLOCK)).mean(3) for x in (q, k))
    likeness = of_queries @ of_keys.mT
    likeness.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    places = likeness.topk(TOP).indices.int()
    number = torch.full(places.shape[:3], TOP, dtype=torch.int32, device=q.device)
    return BlockMask.from_kv_blocks(number, places, BLOCK_SIZE=BLOCK, seq_lengths=(TOKENS, TOKENS), compute_q_blocks=False)


def main() -> None:
    """Take a few steps."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = RoutedAttention(128, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x = torch.randn(1, TOKENS, 128, device=device)
    target = torch.roll(x, BLOCK, 1)
    for step in range(4):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: {TOP} of {TOKENS // BLOCK} blocks, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
