"""Planted template families for fault tests: one that is right, and ones that are wrong in every way that a candidate can be."""

from jinja2 import DictLoader

from flashtune.core.config import Config
from flashtune.templates.family import Axis, Family

RIGHT = '''
import torch
import triton
import triton.language as tl


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om,
    heads, group, n_q, n_kv, scale, D: tl.constexpr, BLOCK: tl.constexpr,
):
    """64 query rows of one head at a time: short, and right for full attention on contiguous tensors."""
    program = tl.program_id(0)
    tiles = tl.cdiv(n_q, 64)
    index, rows = program // tiles, program % tiles * 64 + tl.arange(0, 64)  # [64]
    batch, head = index // heads, index % heads
    k_ptr += batch * stride_kb + head // group * stride_kh
    v_ptr += batch * stride_vb + head // group * stride_vh
    offs_d = tl.arange(0, D)  # [D]
    inside = (rows < n_q)[:, None]
    q_tile = tl.load(q_ptr + batch * stride_qb + head * stride_qh + rows[:, None] * stride_qm + offs_d[None, :], mask=inside)  # [64, D]
    row_max = tl.full([64], float("-inf"), tl.float32)  # [64]
    row_sum = tl.zeros([64], tl.float32)  # [64]
    acc = tl.zeros([64, D], tl.float32)  # [64, D]
    for start in range(0, n_kv, BLOCK):
        offs_n = start + tl.arange(0, BLOCK)  # [BLOCK]
        kept = offs_n < n_kv
        k_tile = tl.load(k_ptr + offs_n[:, None] * stride_kn + offs_d[None, :], mask=kept[:, None], other=0.0)  # [BLOCK, D]
        v_tile = tl.load(v_ptr + offs_n[:, None] * stride_vn + offs_d[None, :], mask=kept[:, None], other=0.0)  # [BLOCK, D]
        scores = tl.where(kept[None, :], tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale, float("-inf"))  # [64, BLOCK]
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        probs = tl.exp(scores - new_max[:, None])  # [64, BLOCK]
        alpha = tl.exp(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(probs, 1)
        acc = tl.dot(probs, v_tile, acc * alpha[:, None], input_precision="ieee")
        row_max = new_max
    result = acc / row_sum[:, None]
    tl.store(out_ptr + batch * stride_ob + head * stride_oh + rows[:, None] * stride_om + offs_d[None, :], result, mask=inside)
    tl.store(lse_ptr + index * n_q + rows, row_max + tl.log(row_sum), mask=rows < n_q)


def accepts(q, k, v, mask):
    return True


def counts_needed(q, k):
    return 0


def launches(q, k, v, out, lse, *, mask, scale, diagonal, window_left, window_right, softcap, dropout_p, seed, offset, sms, counts):
    batch, heads, n_q, d = q.shape
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    args = (q, k, v, out, lse, *strides, heads, heads // k.shape[1], n_q, k.shape[2], scale, d, 64)
    return [(attention_forward, (batch * heads * triton.cdiv(n_q, 64),), args, {"num_warps": 4})]


def launch(*tensors, **words):
    for kernel, grid, args, options in launches(*tensors, **words):
        kernel[grid](*args, **options)
'''

_EDITS = {
    "right": ("", ""),
    "hang": ("def launch(*tensors, **words):", "def launch(*tensors, **words):\n    while True:\n        pass\n"),
    "hang_on_gpu": (
        "    for start in range(0, n_kv, BLOCK):",
        "    while tl.load(lse_ptr) != 1234.5:\n        tl.store(lse_ptr, 0.0)\n    for start in range(0, n_kv, BLOCK):",
    ),
    "crash": ("def launch(*tensors, **words):", "def launch(*tensors, **words):\n    import os\n\n    os.abort()\n"),
    "wrong": ("acc / row_sum[:, None]", "acc / row_sum[:, None] * 1.05"),
    "unwritten": ("row_max + tl.log(row_sum), mask=rows < n_q", "row_max + tl.log(row_sum), mask=rows < n_q - 1"),
    "sticky": ("    offs_d = tl.arange(0, D)  # [D]", "    offs_d = tl.arange(0, D) + (1 << 40)  # [D]"),
    "raises": ("def launch(*tensors, **words):", "def launch(*tensors, **words):\n    raise RuntimeError('planted')\n"),
    "broken": ("    row_max = tl.full(", "    row_max = undefined_name + tl.full("),
    "unrendered": ("import torch\n", "import torch\n{{ missing.name }}\n"),
    "compiler_crash": (
        "def accepts(",
        "import os\n\nif not __import__('triton').knobs.runtime.interpret:\n    os.abort()\n\n\ndef accepts(",
    ),
}


def planted_family(kind: str, choices: int = 1) -> Family:
    """A family that goes wrong in the way `kind` says, with `choices` configs."""
    return Family(
        name=f"planted_{kind}",
        axes=(
            Axis(name="CHOICE", values=tuple(range(choices)), why="tells configs apart"),
            Axis(name="BLOCK_M", values=(1,), why="rows"),
            Axis(name="BLOCK_N", values=(64,), why="keys"),
        ),
        constraints=(),
        supports=lambda spec, target: None,
        default=lambda spec, target: Config.of(CHOICE=0, BLOCK_M=1, BLOCK_N=64),
        starts=lambda spec, target: [],
        interpretable=True,
        path_axes=("CHOICE",),
    )


def planted_templates() -> DictLoader:
    """The planted texts as templates; the variant is named in them, so that every candidate has a file of its own."""
    texts = {}
    for kind, (before, after) in _EDITS.items():
        assert before in RIGHT, kind
        texts[f"planted_{kind}.py.jinja"] = "# {{ variant.id }}\n" + (RIGHT.replace(before, after, 1) if before else RIGHT)
    return DictLoader(texts)
