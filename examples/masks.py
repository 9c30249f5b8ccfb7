"""Masks and scores as code: the functions that the guides and the commands name, such as `--mask-mod examples/masks.py:dilated`.

The numbers suit rows of up to 16384 tokens and 32 heads; the site draws the masks with the small ones.
"""

import torch

N, HEADS = 16384, 32
WINDOW = 1024  # drawn with 14
SINKS = 128  # drawn with 4
BLOCK = 32  # drawn with 8
SIDE = 64  # drawn with 8
REACH = 6  # drawn with 1
TRUNK, BRANCH = 4096, 1024  # drawn with 16, 24
START = 1024  # drawn with 20

# What a function reads by index: one number of each token, sequence or head.
document = torch.bucketize(torch.arange(N), torch.tensor([START, 5 * START // 2]), right=True)
prefix = torch.full((64,), START)
length = torch.full((64,), 2 * START)
stem = (torch.arange(N) - TRUNK) % BRANCH < BRANCH // 3
slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS)
table = torch.zeros(HEADS, 257)


def causal(b, h, q_idx, kv_idx):
    """Each token sees itself and those before it."""
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    """Each token sees itself and the 1024 before it."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= WINDOW)


def prefix_lm(b, h, q_idx, kv_idx):
    """All see the prompt, as long as `prefix` says for the sequence; what follows is causal."""
    return (kv_idx < prefix[b]) | (q_idx >= kv_idx)


def same_document(b, h, q_idx, kv_idx):
    """Documents lie one after the other in a row; each is causal and sees itself alone."""
    return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)


def padded(b, h, q_idx, kv_idx):
    """All see the tokens of their sequence and not the padding behind them."""
    return kv_idx < length[b]


def sink_window(b, h, q_idx, kv_idx):
    """A causal window, and the first 128 tokens, which all see (StreamingLLM)."""
    return (q_idx >= kv_idx) & ((q_idx - kv_idx <= WINDOW) | (kv_idx < SINKS))


def global_window(b, h, q_idx, kv_idx):
    """A window to both sides; the first 128 tokens see all, and all see them (Longformer)."""
    return (kv_idx < SINKS) | (q_idx < SINKS) | ((q_idx - kv_idx).abs() <= WINDOW // 2)


def dilated(b, h, q_idx, kv_idx):
    """Every second token within a window to both sides."""
    return ((q_idx - kv_idx).abs() <= WINDOW) & ((q_idx - kv_idx) % 2 == 0)


def strided(b, h, q_idx, kv_idx):
    """Blocks on the diagonal, and every fourth block before it (Sparse Transformer)."""
    distance = q_idx // BLOCK - kv_idx // BLOCK
    return (q_idx >= kv_idx) & (distance % 4 == 0)


def neighbourhood(b, h, q_idx, kv_idx):
    """Pixels of an image, 64 to a line, see the 13 x 13 around them (NATTEN)."""
    across, down = q_idx % SIDE - kv_idx % SIDE, q_idx // SIDE - kv_idx // SIDE
    return (across.abs() <= REACH) & (down.abs() <= REACH)


def tree(b, h, q_idx, kv_idx):
    """Branches that share a trunk, each with a stem and leaves that don't see each other (tree decoding)."""
    same_branch = (q_idx - TRUNK) // BRANCH == (kv_idx - TRUNK) // BRANCH
    same_leaf = q_idx // BLOCK == kv_idx // BLOCK
    return (q_idx >= kv_idx) & ((kv_idx < TRUNK) | (same_branch & (stem[kv_idx] | same_leaf)))


def block_diffusion(b, h, q_idx, kv_idx):
    """Noised tokens before clean ones, in blocks: noised blocks see themselves and earlier clean ones, clean blocks are causal."""
    noised, of_noised = q_idx < N // 2, kv_idx < N // 2
    block, of_block = q_idx % (N // 2) // BLOCK, kv_idx % (N // 2) // BLOCK
    own = noised & of_noised & (block == of_block)
    clean = torch.where(noised, block > of_block, block >= of_block)
    return own | (~of_noised & clean)


def alibi(score, b, h, q_idx, kv_idx):
    """A score falls with the distance, by a slope of each head (ALiBi)."""
    return score - slopes[h] * (q_idx - kv_idx).abs()


def soft_cap(score, b, h, q_idx, kv_idx):
    """Scores stay within 20 (Gemma 2)."""
    return 20.0 * torch.tanh(score / 20.0)


def relative(score, b, h, q_idx, kv_idx):
    """A learned bias of each head by distance, up to 128 to each side."""
    return score + table[h, (q_idx - kv_idx).clamp(-128, 128) + 128]
