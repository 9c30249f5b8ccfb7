"""cuDNN's own fp8 attention as a peer, where its frontend is installed (`pip install nvidia-cudnn-frontend`); torch has no way to it.

It takes one factor for a whole tensor. On Hopper (cuDNN 9.19) its output is e4m3 as well, times `OUTPUTS`, and so are its weights, times
`WEIGHTS`.
"""

from collections.abc import Callable
from typing import Any

import torch

from flashtune.core.problems.problem import Problem
from flashtune.tuner.verify.inputs import Inputs

WEIGHTS = 256.0
"""Weights of up to 1 are multiplied by this before they are rounded to e4m3, whose largest number is 448."""

OUTPUTS = 32.0
"""Factor of outputs."""

ONE = (1, 1, 1, 1)


def graph_of(cudnn: Any, problem: Problem, scale: float, *, stats: bool, **how: Any) -> tuple[Any, dict[str, Any]]:
    """The graph of a forward, and its tensors by name: q, k, v, o of (B, N, H, D) in memory, factors, largest values, and
    on demand `stats`, the LSE.

    `cudnn` is the frontend's module; `how` goes to its `pygraph`.
    """
    p, kinds = problem, cudnn.data_type
    graph = cudnn.pygraph(io_data_type=kinds.FP8_E4M3, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, **how)

    def inside(heads: int, rows: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (p.batch, heads, rows, width), (rows * heads * width, width, heads * width, 1)

    shapes = {"q": inside(p.heads, p.n_q, p.d), "k": inside(p.kv_heads, p.n_kv, p.d), "v": inside(p.kv_heads, p.n_kv, p.d_v)}
    tensors = {name: graph.tensor(name=name, dim=dim, stride=stride, data_type=kinds.FP8_E4M3) for name, (dim, stride) in shapes.items()}
    for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"):
        tensors[name] = graph.tensor(name=name, dim=ONE, stride=ONE, data_type=kinds.FLOAT)
    band = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0} if p.features.causal else {}
    o, lse, amax_s, amax_o = graph.sdpa_fp8(**tensors, generate_stats=stats, attn_scale=scale, **band)
    dim, stride = inside(p.heads, p.n_q, p.d_v)
    o.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kinds.FP8_E4M3)
    found = {**tensors, "o": o, "amax_s": amax_s, "amax_o": amax_o}
    for name in ("amax_s", "amax_o"):
        found[name].set_output(True).set_dim(ONE).set_stride(ONE).set_data_type(kinds.FLOAT)
    if stats:
        lse.set_output(True).set_dim((p.batch, p.heads, p.n_q, 1)).set_stride((p.heads * p.n_q, p.n_q, 1, 1)).set_data_type(kinds.FLOAT)
        found["stats"] = lse
    return graph, found


def built(cudnn: Any, problem: Problem, scale: float, handle: Any) -> tuple[Any, dict[str, Any]]:
    """`graph_of`, ready to run: without an LSE, or with one where cuDNN has no kernel that leaves it out; raises as the frontend does."""
    for stats in (False, True):
        graph, names = graph_of(cudnn, problem, scale, stats=stats, handle=handle)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except cudnn.cudnnGraphNotSupportedError:
            if stats:
                raise
        else:
            break
    return graph, names


def call(inputs: Inputs) -> Callable[[], torch.Tensor] | None:
    """Its call on these fp8 inputs, whose factors are taken to be one for all heads; gives e4m3 (B, H, N_q, D_v), the output times OUTPUTS.

    None where it lacks a feature; raises ImportError where the frontend isn't installed, and the frontend's own errors.
    """
    p, given = inputs.problem, inputs.parameters
    f = p.features
    if (
        f.mask != "none"
        or f.dropout
        or f.alibi
        or f.softcap
        or f.sinks
        or f.window is not None
        or p.dtype != "fp8"
        or given.descale is None
    ):
        return None
    if f.causal and given.band.diagonal:
        return None
    import cudnn  # type: ignore[import-not-found]  # pyright: ignore[reportMissingImports]

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(inputs.q.device).cuda_stream)
    graph, names = built(cudnn, p, given.scale, handle)

    def number(value: float | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(value, dtype=torch.float32, device=inputs.q.device).reshape(ONE).clone()

    stored = torch.empty((p.batch, p.n_q, p.heads, p.d_v), dtype=inputs.q.dtype, device=inputs.q.device)
    held = {name: inputs.operands[name].transpose(1, 2).contiguous() for name in ("q", "k", "v")}
    held |= {f"descale_{name}": number(factor[0, 0]) for name, factor in zip("qkv", given.descale, strict=True)}
    held |= {"scale_s": number(WEIGHTS), "descale_s": number(1 / WEIGHTS), "scale_o": number(OUTPUTS)}
    held |= {"o": stored, "amax_s": number(0.0), "amax_o": number(0.0)}
    held |= {"stats": torch.empty((p.batch, p.heads, p.n_q, 1), device=inputs.q.device)} if "stats" in names else {}
    pack = {names[name]: tensor for name, tensor in held.items()}
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=inputs.q.device)

    def run() -> torch.Tensor:
        graph.execute(pack, workspace, handle=handle)
        return stored.transpose(1, 2)

    return run
