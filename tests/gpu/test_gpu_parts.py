"""Parts of attention on a GPU: random splits against float64, bits, graphs, compilers, prefixes, drafts, and rings over NCCL."""

import math
import os
from typing import Any

import parts_cases as cases
import pytest
import torch
from torch import Tensor

from flashtune import dispatch
from flashtune.core.system.errors import InputError

DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
SPLITS = 500 if ON_GPU else 20
DTYPES = [torch.float16, torch.bfloat16, torch.float32]

on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def parts(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    found = [(normal(*shape, dtype=dtype), 4 * normal(*shape[:-1], dtype=torch.float32)) for _ in range(count)]
    for out, lse in found:
        lse[torch.rand(lse.shape, device=DEVICE) < 0.3] = -math.inf
        out[lse == -math.inf] = math.nan
    return [(out.requires_grad_(), lse.requires_grad_()) for out, lse in found]


def run(given: Any, grads: Any) -> list[Tensor]:
    """Output, LSE and all gradients."""
    found = dispatch.merge(given)
    return [*found, *torch.autograd.grad(found, [x for part in given for x in part], grads)]


@pytest.mark.parametrize("block", range(0, SPLITS, 20))
def test_random_splits_are_within_twice_the_rounding_of_one_call(block: int) -> None:
    # Kernels compute forward and backward wherever one takes the call.
    with dispatch.use(unmeasured=True):
        for seed in range(block, block + 20):
            cases.agrees(cases.drawn(seed, DTYPES[seed % 3], DEVICE, most=300 if ON_GPU else 40))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [1, 7, 64, 72, 80, 128, 192, 256, 512, 1000])
def test_head_sizes_against_float64(d: int, dtype: torch.dtype) -> None:
    shape = (2, 3, 77, d)
    given, grads = parts(3, shape, dtype), (normal(*shape, dtype=dtype), normal(*shape[:-1], dtype=torch.float32))
    wide = [(x.detach().double().requires_grad_(), y.detach().double().requires_grad_()) for x, y in given]
    for mine, true in zip(run(given, grads), run(wide, [x.double() for x in grads]), strict=True):
        unit = max(4 * cases.ROUNDING[dtype], 4e-6)
        torch.testing.assert_close(mine.double(), true, atol=unit * (8 + d**0.5), rtol=unit)


@pytest.mark.parametrize("d", [64, 72, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_a_row_depend_on_no_other(dtype: torch.dtype, d: int) -> None:
    shape = (5, 3, 101, d)
    given, grads = parts(4, shape, dtype), (normal(*shape, dtype=dtype), normal(*shape[:-1], dtype=torch.float32))
    found = run(given, grads)
    for place in ((slice(0, 1),), (slice(3, 5),), (slice(None), slice(1, 2)), (slice(None), slice(None), slice(7, 8))):
        alone = [tuple(x.detach()[place].requires_grad_() for x in part) for part in given]
        again = run(alone, [x[place] for x in grads])
        assert all(torch.equal(x[place].nan_to_num(), y.nan_to_num()) for x, y in zip(found, again, strict=True))


@on_gpu
def test_nothing_waits_and_graphs_replay_with_other_numbers() -> None:
    shape = (2, 4, 65, 128)
    given, grads = parts(3, shape, torch.bfloat16), (normal(*shape), normal(*shape[:-1], dtype=torch.float32))
    run(given, grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(given, grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(given, grads)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = run(given, grads)
    other = parts(3, shape, torch.bfloat16)
    with torch.no_grad():
        for pair, fresh in zip(given, other, strict=True):
            for x, y in zip(pair, fresh, strict=True):
                x.copy_(y)
    graph.replay()
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(held, run(other, grads), strict=True))


@on_gpu
def test_compiled_calls_with_gradients() -> None:
    leaves = [normal(2, 4, n, 64, dtype=torch.float16).requires_grad_() for n in (100, 70, 70)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        found = [dispatch.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 30), slice(30, 70))]
        return dispatch.merge(found)

    grads = normal(2, 4, 100, 64, dtype=torch.float16), normal(2, 4, 100, dtype=torch.float32)
    found = []
    for one in (function, torch.compile(function, fullgraph=True)):
        out = one(*leaves)
        found.append([*out, *torch.autograd.grad(out, leaves, grads)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=5e-3, rtol=5e-3)


@on_gpu
@pytest.mark.parametrize("name", ["flashtune", "torch", "flash", "cudnn", "efficient", "math", "flex", "fa4", "fa2", "cudnn_fe", "ffpa"])
def test_whoever_returns_an_lse_gives_its_gradient(name: str) -> None:
    tensors = [normal(2, 4, n, 128).requires_grad_() for n in (256, 384, 384)]
    grads = normal(2, 4, 256, 128), normal(2, 4, 256, dtype=torch.float32)
    found = []
    with dispatch.use(unmeasured=True):
        for words, leaves in (({"implementation": name}, tensors), ({}, [x.detach().double().requires_grad_() for x in tensors])):
            try:
                bounds = (slice(0, 128), slice(128, 384))
                given = [dispatch.attention(leaves[0], *(x[:, :, part] for x in leaves[1:]), return_lse=True, **words) for part in bounds]
            except InputError as error:
                pytest.skip(str(error))
            out, lse = dispatch.merge(given)
            found.append(torch.autograd.grad((out, lse), leaves, (grads[0].to(out.dtype), grads[1])))
    for mine, true in zip(*found, strict=True):
        assert float((mine.double() - true).abs().max()) < 0.02 * float(true.abs().max()) + 0.02


@pytest.mark.parametrize("trains", [False, True])
def test_a_prefix_of_many_requests(trains: bool) -> None:
    # Queries of each request, keys of its suffix; padding behind them holds NaN.
    queries, keys, count = [3, 0, 1, 40, 7], [9, 4, 1, 64, 30], 700
    q, prefix = normal(sum(queries) + 5, 8, 64), [normal(count, 2, 64) for _ in range(2)]
    suffix = [normal(sum(keys) + 5, 2, 64) for _ in range(2)]
    for x in (q, *suffix):
        x[-5:] = math.nan
    leaves = [x.requires_grad_(trains) for x in (q, *prefix, *suffix)]
    starts, of_suffix = (torch.tensor([0, *one]).cumsum(0).int().to(DEVICE) for one in (queries, keys))
    words: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "return_lse": True}
    with dispatch.use(unmeasured=True):
        found = dispatch.cascade(q, tuple(prefix), tuple(suffix), starts, of_suffix, 40, 64, **words)
    wide = [x.detach().double().requires_grad_(trains) for x in leaves]
    whole = [torch.cat([torch.cat([x, one]) for one in y[: sum(keys)].split(keys)]) for x, y in zip(wide[1:3], wide[3:], strict=True)]
    longer = torch.tensor([0, *(n + count for n in keys)]).cumsum(0).int().to(DEVICE)
    wanted = dispatch.attention_varlen(wide[0], *whole, starts, longer, 40, 64 + count, **words)
    results = [[*found], [*wanted]]
    if trains:
        dout, dlse = normal(*q.shape), normal(8, q.shape[0], dtype=torch.float32)
        for place, (out, of_leaves) in enumerate(((found, leaves), (wanted, wide))):
            masked = torch.where(out[1] == -math.inf, 0.0, dlse)
            results[place] += torch.autograd.grad(out, of_leaves, (dout.to(out[0].dtype), masked))
    for mine, true in ([x.detach() for x in pair] for pair in zip(*results, strict=True)):
        clean = torch.where(true == -math.inf, 0.0, true.double())
        error = float((torch.where(mine == -math.inf, 0.0, mine.double()) - clean).abs().max())
        assert error < 0.02 * float(clean.abs().max()) + 1e-3


@on_gpu
def test_paged_requests_and_drafts_under_a_graph() -> None:
    keys, values = (normal(400, 16, 2, 128) for _ in range(2))
    table, used = torch.randperm(300, device=DEVICE)[:240].view(8, 30).int(), torch.randint(1, 480, (8,), device=DEVICE).int()
    pages, starts = torch.arange(300, 364, device=DEVICE), torch.arange(9, device=DEVICE).int()
    q, drafts = normal(8, 8, 128), (normal(8, 2, 6, 128), normal(8, 2, 6, 128))
    parents, queries = torch.tensor([-1, 0, 0, 1, 1, 2], device=DEVICE), normal(8, 8, 6, 128)
    words: dict[str, Any] = {"seqused_k": used, "block_table": table, "enable_gqa": True, "num_splits": 4}

    def step() -> list[Tensor]:
        shared = dispatch.cascade(q, (keys, values), (keys, values), starts, None, 1, 480, prefix_table=pages, **words)
        return [shared, dispatch.tree(queries, (keys, values), drafts, parents, **words)]

    with torch.no_grad():
        whole = torch.cat([pages.expand(8, -1).int(), table], 1)
        wanted = dispatch.attention_varlen(
            q, keys, values, starts, None, 1, 94 * 16, **words | {"block_table": whole, "seqused_k": used + 64 * 16}
        )
        eager = step()
        torch.testing.assert_close(eager[0], wanted, atol=2e-2, rtol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = step()
        used.copy_(torch.randint(1, 480, (8,), device=DEVICE))
        graph.replay()
        assert all(map(torch.equal, held, step()))
        # A parent out of range is a root, and no fault.
        dispatch.tree(queries, (keys, values), drafts, parents + 100, **words)
        torch.cuda.synchronize()


def _rank(rank: int, count: int, place: str) -> None:
    import torch.distributed as dist
    from test_parts_ring import CASES, pieces

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(place, count), rank=rank, world_size=count)
    for seed, words in enumerate(CASES[:3]):
        words, causal = {k: v for k, v in words.items() if k not in ("dtype", "sinks")}, words.get("is_causal", False)
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn((2, h, 256 * count, 128), generator=generator).bfloat16().cuda() for h in (8, 2, 2, 8)]
        whole = [x.double().requires_grad_() for x in tensors[:3]]
        wanted = dispatch.attention(*whole, enable_gqa=True, **words)
        wanted = [wanted, *torch.autograd.grad(wanted, whole, tensors[3].double())]
        mine = [pieces(x, rank, count, causal).contiguous().requires_grad_() for x in tensors]
        with dispatch.use(unmeasured=True):
            out = dispatch.ring(*mine[:3], enable_gqa=True, **words)
            found = [out, *torch.autograd.grad(out, mine[:3], mine[3].detach())]
        for x, y in zip(found, wanted, strict=True):
            true = pieces(y, rank, count, causal)
            assert float((x.double() - true).abs().max()) < 0.02 * float(true.abs().max()) + 1e-3
    dist.destroy_process_group()


@on_gpu
@pytest.mark.parametrize("count", [2, 4, 8])
def test_rings_over_nccl(count: int, tmp_path: Any) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    torch.multiprocessing.spawn(_rank, (count, str(tmp_path / "store")), nprocs=count)
