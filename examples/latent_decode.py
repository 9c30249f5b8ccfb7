"""Multi-head latent attention: decoding over a cache of latents (the absorbed form), beside keys and values of each head.

    python examples/latent_decode.py

DeepSeek's models keep one vector of each token in the place of keys and values of all heads: its latent, and a rotated part. Where the
projections of keys and values are moved to the query and the output, what is left of a decoding step is attention of all heads over one
key head, whose first columns are the values.
"""

import torch
from torch import Tensor

from flashtune import dispatch

# DeepSeek-V3 has 128 heads, latents of 512 columns, 64 rotated ones, and keys and values of 128 and 128.
HEADS, LATENT, ROTATED, CONTENT, VALUE, PAGE = 16, 64, 16, 32, 32, 16


def absorbed(content: Tensor, rotated: Tensor, up_k: Tensor, up_v: Tensor, cache: Tensor, table: Tensor, used: Tensor) -> Tensor:
    """Output (B, heads, value) of one token of each sequence; the cache is (blocks, page, 1, latent + rotated)."""
    query = torch.cat((torch.einsum("bhc,hcl->bhl", content, up_k), rotated), -1)
    bounds, most = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device), table.shape[1] * PAGE
    words = {"block_table": table, "seqused_k": used, "enable_gqa": True, "scale": (CONTENT + ROTATED) ** -0.5}
    # Values are a view of the cache, so that each latent is read once.
    out = dispatch.attention_varlen(query, cache, cache[..., :LATENT], bounds, None, 1, most, **words)
    return torch.einsum("bhl,hvl->bhv", out, up_v)


def plain(content: Tensor, rotated: Tensor, up_k: Tensor, up_v: Tensor, tokens: Tensor) -> Tensor:
    """The same for one sequence, by keys and values that are made of its tokens (N, latent + rotated)."""
    keys = torch.cat((torch.einsum("nl,hcl->hnc", tokens[:, :LATENT], up_k), tokens[:, LATENT:].expand(HEADS, -1, -1)), -1)
    values = torch.einsum("nl,hvl->hnv", tokens[:, :LATENT], up_v)
    return dispatch.attention(torch.cat((content, rotated), -1)[:, None], keys, values)[:, 0]


def main() -> None:
    """Compare both."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths, pages = [70, 9, 33], 5
    cache = torch.randn(len(lengths) * pages, PAGE, 1, LATENT + ROTATED, device=device)
    table = torch.randperm(len(cache), device=device).view(len(lengths), pages).int()
    content, rotated = (torch.randn(len(lengths), HEADS, size, device=device) for size in (CONTENT, ROTATED))
    up = [torch.randn(HEADS, size, LATENT, device=device) / LATENT**0.5 for size in (CONTENT, VALUE)]
    found = absorbed(content, rotated, *up, cache, table, torch.tensor(lengths, dtype=torch.int32, device=device))
    for b, count in enumerate(lengths):
        wanted = plain(content[b], rotated[b], *up, cache[table[b].long()].flatten(0, 2)[:count])
        torch.testing.assert_close(found[b], wanted, atol=1e-4, rtol=1e-4)
    print(f"{len(lengths)} sequences decode over latents as over keys and values of {HEADS} heads")


if __name__ == "__main__":
    main()
