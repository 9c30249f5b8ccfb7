"""A hub folder of the shipped records serves this GPU through the real `kernels` package, as float64 defines it."""

import math
from typing import Any

import pytest
import torch

from flashtune.core.gpu.target import find_target
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.tuner.publish.hub import write_hub

get_local_kernel = getattr(pytest.importorskip("kernels"), "get_local_kernel", None)
if get_local_kernel is None:
    # The repository's own folder of this name was found.
    pytest.skip("the kernels package isn't installed", allow_module_level=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Store.open(shipped_path(), writable=False) as store:
        records = store.records(d=128, dtype="bf16")
    folder = tmp_path_factory.mktemp("hub")
    write_hub(folder, records)
    return get_local_kernel(folder)


def own_arch() -> str:
    return find_target(torch.cuda.get_device_name()).arch


@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "bias", "decode", "gqa"])
def test_a_hub_folder_serves_what_is_right(kernel: Any, kind: str) -> None:
    if own_arch() != "90":
        pytest.skip("the shipped records are for Hopper")
    torch.manual_seed(5)
    n_q, heads = (1 if kind == "decode" else 2048), (16 if kind == "gqa" else 8)
    kv_heads = 4 if kind == "gqa" else 8
    q, k, v = (
        torch.randn(4, n, h, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for n, h in ((n_q, heads), (2048, kv_heads), (2048, kv_heads))
    )
    words: dict[str, Any] = {"is_causal": kind == "causal", "enable_gqa": kind == "gqa"}
    if kind == "bool":
        words["attn_mask"] = (torch.rand(4, 1, n_q, 2048, device="cuda") < 0.7).logical_or(torch.eye(n_q, device="cuda").bool())
    if kind == "bias":
        words["attn_mask"] = torch.randn(1, heads, n_q, 2048, device="cuda", dtype=torch.bfloat16)
    out = kernel.attention(q, k, v, **words)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)),
        **{**words, "attn_mask": x if (x := words.get("attn_mask")) is None or x.dtype is torch.bool else x.double()},
    )
    error = (out.double() - exact).norm() / exact.norm()
    assert math.isfinite(error) and error < 0.01, kernel.explain(q, k, v, **words)
    if kind in ("plain", "causal"):
        assert kernel.explain(q, k, v, **words).startswith("flash_fwd"), kernel.explain(q, k, v, **words)


def test_a_graph_of_a_hub_kernel_replays_what_a_call_gives(kernel: Any) -> None:
    if own_arch() != "90":
        pytest.skip("the shipped records are for Hopper")
    q, k, v = (torch.randn(4, 8, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = kernel.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.attention(q, k, v)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
