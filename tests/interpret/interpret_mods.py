"""Masks and scores as code through dispatch with kernels in Triton's interpreter."""

import itertools
import warnings
from typing import Any

import numpy
import torch
from mod_cases import CASES, OPERATIONS, Case, oracle, random_case

from flashtune import dispatch
from flashtune.core.code.launching import Tensors
from flashtune.dispatch import flex
from flashtune.dispatch.functions import blocks as flex_blocks
from flashtune.dispatch.functions import decided as flex_decided
from flashtune.dispatch.functions import kernels as flex_kernels
from flashtune.dispatch.plans.program import COUNTS
from flashtune.dispatch.rows.kernel import Kernel, layout

warnings.filterwarnings("ignore")


Report = tuple[str, float, float, list[float]]
"""Explanation of a call, and the largest errors over the largest numbers of output, LSE and gradients."""


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    finite = theirs.isfinite()
    assert torch.equal(ours.isfinite(), finite), "infinite where the oracle isn't"
    if not finite.any():
        return 0.0
    return float((ours[finite].double() - theirs[finite]).abs().max() / theirs[finite].abs().max().clamp(min=1e-3))


def report(case: Case, dtype: torch.dtype = torch.float32) -> Report:
    generator = torch.Generator().manual_seed(5)
    batch = case.heads // 2
    shapes = [(batch, case.heads, case.n_q, 16), (batch, batch, case.n_kv, 16), (batch, batch, case.n_kv, 32)]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    captured = case.captured(generator)
    score_mod, mask_mod = case.functions(*captured)
    mask: Any = mask_mod
    if mask_mod is not None and case.block_mask:
        from torch.nn.attention.flex_attention import create_block_mask

        mask = create_block_mask(mask_mod, batch, case.heads, case.n_q, case.n_kv, device="cpu", BLOCK_SIZE=16)
    given = {"score_mod": score_mod, "block_mask": mask, "enable_gqa": True, "return_lse": True}
    served = flex.explain_flex(*tensors, **given).reason
    out, lse = dispatch.flex_attention(*tensors, **given)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    seen = lse.isfinite()
    ((out * weights).sum() + lse[seen].sin().sum()).backward()
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    twins = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in captured]
    out64, lse64 = oracle(*doubles, *case.functions(*twins))
    ((out64 * weights.double()).sum() + lse64[seen].sin().sum()).backward()
    pairs = [(x, y) for x, y in zip([*tensors, *captured], [*doubles, *twins], strict=True) if x.requires_grad]
    # Where scores don't matter, and where a mask alone reads a tensor, there may be no gradient instead of zeros.
    gradients = [gap(*(torch.zeros_like(z) if z.grad is None else z.grad for z in both)) for both in pairs]
    return served, gap(out.detach(), out64.detach()), gap(lse.detach(), lse64.detach()), gradients


def poisoned() -> bool:
    """True if output and gradients are those of the first keys where all keys behind them are NaN and hidden."""
    q, k, v = (torch.randn(1, 2, 96, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    k[:, :, 64:], v[:, :, 64:] = torch.nan, torch.nan
    given = [x.requires_grad_() for x in (q, k, v)]
    dispatch.flex_attention(*given, None, lambda b, h, q, k: k < 64).sum().backward()
    return all(bool(x.grad[:, :, :64].isfinite().all()) for x in given)  # type: ignore[index]


def changed() -> float:
    """Error after the document numbers of a mask that was called before have changed."""
    document = torch.zeros(48, dtype=torch.int32)

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return document[q] == document[k]

    x = torch.randn(1, 2, 48, 16, generator=torch.Generator().manual_seed(7))
    dispatch.flex_attention(x, x, x, None, same)
    document[20:] = 1
    return gap(dispatch.flex_attention(x, x, x, None, same), oracle(x.double(), x.double(), x.double(), None, same)[0])


def rebound() -> float:
    """Error after the numbers of a mask that was called before are another tensor, where the first one lay and of its version."""
    memory = numpy.zeros(48, dtype=numpy.int32)
    document = torch.from_numpy(memory)

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return document[q] == document[k]

    q, k, v = (torch.randn(1, 2, 48, 16, generator=torch.Generator().manual_seed(7 + i)) for i in range(3))
    for _ in range(2):
        dispatch.flex_attention(q, k, v, None, same)
    memory[20:] = 1
    document = torch.from_numpy(memory)
    return gap(dispatch.flex_attention(q, k, v, None, same), oracle(q.double(), k.double(), v.double(), None, same)[0])


def unseen() -> float:
    """Largest error of output and gradients after the numbers that a mask reads were written without a new version of their tensor: of the
    mask itself and of one BlockMask, whose blocks are made of whole tiles or aren't, and all are listed or the first of each row."""
    from torch.nn.attention.flex_attention import BlockMask

    n, found = 40, [0.0]
    limit, table = torch.tensor([9, 30]), torch.randn(2, generator=torch.Generator().manual_seed(3)).requires_grad_()
    memory = limit.numpy()

    def prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < limit[b]) | (q >= k)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[h] * (q - k)

    def masks(size: int) -> list[Any]:
        blocks = -(-n // size)
        places = torch.arange(blocks, dtype=torch.int32).expand(1, 1, blocks, blocks)
        every, some = (torch.full((1, 1, blocks), count, dtype=torch.int32) for count in (blocks, 1))
        return [BlockMask.from_kv_blocks(count, places, BLOCK_SIZE=size, mask_mod=prefix, seq_lengths=(n, n)) for count in (every, some)]

    def first(b: Any, h: Any, q: Any, k: Any) -> Any:
        return prefix(b, h, q, k) & (k < 16)

    given = [torch.randn(2, 2, n, 16, generator=torch.Generator().manual_seed(7 + i)).requires_grad_() for i in range(3)]
    doubles, kept = [x.detach().double().requires_grad_() for x in given], [prefix, *masks(16), *masks(128)]
    for limits in ((9, 30), (33, 2)):
        memory[:] = limits
        for block_mask, mod in [*zip(kept, itertools.repeat(None)), (kept[1], score)]:
            out = dispatch.flex_attention(*given, mod, block_mask)
            right = oracle(*doubles, mod, first if block_mask is kept[2] else prefix)[0]
            pairs = zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(right.sum(), doubles), strict=True)
            found += [gap(out, right), *(gap(x, y) for x, y in pairs)]
    return max(found)


def kernels() -> dict[str, int]:
    """Kernels in all after functions made anew, after another number in them, and after another length."""

    def call(n: int, number: float) -> int:
        x, table = torch.randn(1, 1, n, 16), torch.randn(n)
        dispatch.flex_attention(x, x, x, lambda s, b, h, q, k: s * number + table[k])
        return made() - before

    def made() -> int:
        return sum(not isinstance(one, str) for one in flex_kernels.kernels_here().values())

    before = made()
    call(20, 0.7)
    return {"alike": call(20, 0.7), "another number": call(20, 0.8), "another length": call(37, 0.8)}


def lists() -> list[str]:
    """Lists of blocks that differ from those of the mask at all pairs, of kinds of tiles and of a BlockMask's own lists."""
    from mods_machine import lists_of, seen_by
    from torch.nn.attention.flex_attention import create_block_mask

    n_q, n_kv, wrong = 100, 130, list[str]()
    document = torch.randint(0, 4, (2, 300), generator=torch.Generator().manual_seed(5)).sort(-1).values

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (document[b, q] == document[b, k]) & (q + 20 * h >= k)

    query, key = torch.zeros(2, 4, n_q, 16), torch.zeros(2, 4, n_kv, 16)
    for size in (64, 16):
        mask = create_block_mask(mask_mod, 2, 4, n_q, n_kv, device="cpu", BLOCK_SIZE=size)
        call: Any = flex_decided.call_of(query, key, key, None, mask, None, True, None, False)
        seen = seen_by(mask_mod, 2, 4, n_q, n_kv)
        blocks = torch.nn.functional.pad(seen, (0, size - 1, 0, size - 1)).unfold(2, size, size).unfold(3, size, size).flatten(4)
        # What a BlockMask says of a block holds for its tiles: its first pair is visible, and the others are in a block that is.
        coarse = torch.stack((blocks.any(-1), blocks.all(-1))).repeat_interleave(size, 3).repeat_interleave(size, 4)[..., :n_q, :n_kv]
        coarse = coarse[1] | (coarse[0] & ((torch.arange(n_q)[:, None] + torch.arange(n_kv)) % 2 == 0))
        for tile in ((64, 32), (32, 64)):
            for of_keys in (False, True):
                made, _ = flex_blocks.blocks(call, call.kernel, query, key, tile, of_keys=of_keys)
                found = made.expand(*query.shape[:2], -1, -1)
                right = lists_of(coarse if size == 64 else seen, tile, of_keys=of_keys)
                listed = torch.arange(right.shape[-1] - 2) < right[..., 1:2]
                same = torch.equal(found[..., :2], right[..., :2]) and torch.equal(found[..., 2:][listed], right[..., 2:][listed])
                if not (same and bool(((found[..., 2] >= 0) & (found[..., 2] < right.shape[-1] - 2)).all())):
                    wrong.append(f"{size} {tile} {of_keys}")
    return wrong


def built_in() -> dict[str, Any]:
    """Explanations and errors of masks that are windows, without gradients."""
    found: dict[str, Any] = {}
    for name in ("causal", "window"):
        generator = torch.Generator().manual_seed(6)
        q, k, v = (torch.randn(1, 2, 70, 16, generator=generator) for _ in range(3))
        mask = CASES[name].functions()[1]
        out, lse = dispatch.flex_attention(q, k, v, None, mask, return_lse=True)
        out64, lse64 = oracle(q.double(), k.double(), v.double(), None, mask)
        found[name] = dispatch.explain_flex(q, k, v, None, mask).reason, gap(out, out64), gap(lse, lse64)
    return found


def layouts() -> float:
    """Largest error of output and gradients of transposed tensors with odd head sizes in float16's autocast, and in inference mode."""
    generator = torch.Generator().manual_seed(8)
    q, k, v = (
        torch.randn(2, n, 3, d, generator=generator).half().transpose(1, 2).requires_grad_() for n, d in ((33, 24), (41, 24), (41, 40))
    )
    table = torch.randn(3, generator=generator).half().requires_grad_()

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        s += table[h] * (q - k)
        return s

    with torch.autocast("cpu", torch.float16):
        served = dispatch.explain_flex(q, k, v, score, CASES["heads"].functions()[1]).reason
        out = dispatch.flex_attention(q, k, v, score, CASES["heads"].functions()[1])
    assert served.startswith("flash_fwd"), served
    out.backward(torch.ones((), dtype=torch.float16).expand_as(out))
    ours = [q, k, v, table]
    q64, k64, v64, table64 = (x.detach().double().requires_grad_() for x in ours)
    out64, _ = oracle(q64, k64, v64, lambda s, b, h, q, k: s + table64[h] * (q - k), CASES["heads"].functions()[1])
    out64.sum().backward()
    pairs = zip(ours, (q64, k64, v64, table64), strict=True)
    found = [gap(out.detach(), out64.detach()), *(gap(x.grad, y.grad) for x, y in pairs)]  # type: ignore[arg-type]
    with torch.inference_mode():
        limit = torch.tensor([9, 30])
        again = dispatch.flex_attention(q, k, v, None, lambda b, h, q, k: k < limit[b])
        found.append(gap(again, oracle(q64, k64, v64, None, lambda b, h, q, k: k < limit[b])[0]))
    return max(found)


def learned() -> list[float]:
    """Errors of gradients of learned biases in float16 over those of rounding once: each is a sum over many pairs of queries and keys, none
    of which is rounded by itself. The right ones are of the output that was given, whose rounding PyTorch's gradients have, too."""
    generator, found = torch.Generator().manual_seed(8), []
    q, k, v, weights = (torch.randn(2, 4, 128, 16, generator=generator).half() for _ in range(4))
    places = torch.meshgrid(*map(torch.arange, (2, 4, 128, 128)), indexing="ij")
    for make, size in (
        (lambda x: lambda s, b, h, q, k: s + x[(q - k).clamp(-4, 4) + 4], (9,)),
        (lambda x: lambda s, b, h, q, k: s + (x[(q - k).clamp(-2, 2) + 2] * 1.5).float(), (5,)),
        (lambda x: lambda s, b, h, q, k: s + 2 * x[k % 4 + h], (7,)),
    ):
        table = torch.randn(size, generator=generator).half().requires_grad_()
        out = dispatch.flex_attention(q, k, v, make(table))
        assert dispatch.explain_flex(q, k, v, make(table)).reason.startswith("flash_fwd")
        [ours] = torch.autograd.grad(out, table, weights)
        twin = table.detach().double().requires_grad_()
        scores = make(twin)(q.double() @ k.double().mT / 4, *places).double()
        delta = (weights.double() * out.detach().double()).sum(-1, keepdim=True)
        of_scores = scores.softmax(-1) * (weights.double() @ v.double().mT - delta)
        [theirs] = torch.autograd.grad(scores, twin, of_scores.detach())
        found.append(float((ours.double() - theirs).abs().mean() / (theirs.half().double() - theirs).abs().mean()))
    return found


def empty() -> list[float]:
    """Errors under a BlockMask of one block without an end, as PyTorch makes it of no mask, and of a mask in it."""
    from torch.nn.attention.flex_attention import BlockMask

    one, found = torch.ones(1, 1, 1, dtype=torch.int32), []
    given = [torch.randn(2, 2, n, 16, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (40, 70, 70)]
    doubles = [x.detach().double().requires_grad_() for x in given]
    for mask_mod in (None, lambda b, h, q, k: (q + k) % 3 > 0):
        mask = BlockMask.from_kv_blocks(one, one[..., None] - 1, BLOCK_SIZE=1 << 30, mask_mod=mask_mod, seq_lengths=(1, 1))
        for score in (None, lambda s, b, h, q, k: s + torch.sin(q - k + 0.5)):
            out, right = dispatch.flex_attention(*given, score, mask), oracle(*doubles, score, mask_mod)[0]
            pairs = zip(torch.autograd.grad(out.sum(), given), torch.autograd.grad(right.sum(), doubles), strict=True)
            found += [gap(out, right), *(gap(x, y) for x, y in pairs)]
    return found


def watched() -> dict[Any, Any]:
    """Launches of every plan from here on by kernel and key: equal keys have equal ones, and tensors come in the order of the plan's."""
    seen: dict[Any, Any] = {}
    run = Kernel.launch

    def checked(self: Any, words: Any, tensors: Any, plan: Any, mods: Any = (), numbers: Any = ()) -> Any:
        made, given = plan(self.code.module), [*tensors, *mods]
        key = self.variant, words, layout(given)
        if isinstance(tensors, Tensors):
            # Counts are found at each launch.
            given[COUNTS] = made.tensors[COUNTS]
        assert all(x is y for x, y in zip(given, made.tensors, strict=True)), "another order"
        assert seen.setdefault(key, made.launches) == made.launches, "a key with two plans"
        return run(self, words, tensors, lambda _: made, mods, numbers)

    Kernel.launch = checked  # type: ignore[method-assign]
    return seen


def types_of_masks() -> set[str]:
    """Types of the masks of all loads, stores and additions from here on."""
    from triton.runtime.interpreter import interpreter_builder as builder

    seen: set[str] = set()

    def watch(name: str, place: int) -> None:
        run = getattr(builder, name)

        def watched(*arguments: Any) -> Any:
            seen.add(str(arguments[place].data.dtype))
            return run(*arguments)

        setattr(builder, name, watched)

    watch("create_masked_load", 1)
    watch("create_masked_store", 2)
    watch("create_atomic_rmw", 3)
    return seen


def main() -> dict[str, Any]:
    plans, masks = watched(), types_of_masks()
    return {
        "cases": {name: report(case) for name, case in CASES.items()},
        # A batch of one, but for those that read its number.
        "operations": {
            name: report(Case(lambda f=f: (f, None), n_q=20, n_kv=24, heads=4 if name in ("halves", "logical") else 2))
            for name, f in OPERATIONS.items()
        },
        "random": [report(random_case(seed)) for seed in range(2)],
        "poisoned": poisoned(),
        "changed": max(changed(), rebound(), unseen()),
        "kernels": kernels(),
        "built_in": built_in(),
        "lists": lists(),
        "layouts": layouts(),
        "learned": learned(),
        "empty": empty(),
        "plans": len(plans),
        "masks": masks,
    }
