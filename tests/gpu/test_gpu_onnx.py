"""ONNX Attention's own node tests: what each asks for, said to `attention`, and the reference outputs that ONNX computes for it."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from branches import BRANCHES, Branch, forced, served

from flashtune import dispatch

pytest.importorskip("onnx")
DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")

Node = tuple[str, dict[str, Any], dict[str, Any], Any]
"""A test's name, its node's attributes, its inputs by name and the output Y."""


def nodes() -> list[Node]:
    """All of them, computed by ONNX's reference."""
    import numpy as np
    import onnx
    from onnx.backend.test.case.node import attention

    found: list[Node] = []

    def expect(node: Any, inputs: list[Any], outputs: list[Any], name: str, **_: Any) -> None:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        arrays = dict(zip([x for x in node.input if x], inputs, strict=True))
        found.append((name, attributes, arrays, dict(zip([x for x in node.output if x], outputs, strict=True))["Y"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "expect", expect)
        np.random.seed(0)
        for name in sorted(vars(attention.Attention)):
            if name.startswith("export"):
                getattr(attention.Attention, name)()
    return found


def tensor(x: Any) -> torch.Tensor:
    """A numpy array on the device; numpy has bfloat16 from another package."""
    if "bfloat16" in str(x.dtype):
        return torch.tensor(x.astype("float32")).to(DEVICE, torch.bfloat16)
    return torch.tensor(x).to(DEVICE)


def served_by_dispatch(attributes: dict[str, Any], arrays: dict[str, Any]) -> torch.Tensor:
    """Y of an ONNX Attention node: heads split off, the cache in front, and its rules said as a band, a mask and lengths."""
    inputs = {name: tensor(x) for name, x in arrays.items()}
    q, k, v = (inputs.pop(name) for name in ("Q", "K", "V"))
    packed = q.dim() == 3
    if packed:
        heads, kv_heads = attributes["q_num_heads"], attributes["kv_num_heads"]
        q, k, v = (x.unflatten(2, (count, -1)).transpose(1, 2) for x, count in ((q, heads), (k, kv_heads), (v, kv_heads)))
    past, new = 0, k.shape[2]
    if "past_key" in inputs:
        past = inputs["past_key"].shape[2]
        k, v = torch.cat([inputs["past_key"], k], 2), torch.cat([inputs["past_value"], v], 2)
    n_q, n_kv = q.shape[2], k.shape[2]
    mask = inputs.get("attn_mask")
    if mask is not None and mask.shape[-1] < n_kv:
        value = False if mask.dtype == torch.bool else float("-inf")
        mask = torch.nn.functional.pad(mask, (0, n_kv - mask.shape[-1]), value=value)
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    right = 0 if attributes.get("is_causal", 0) else right
    words: dict[str, Any] = {"window": (left, right)}
    lengths = inputs.get("nonpad_kv_seqlen")
    if lengths is not None or (past and new != n_q):
        # Each batch has a diagonal of its own, or one that is neither corner's: a mask.
        keys, rows = torch.arange(n_kv, device=DEVICE), torch.arange(n_q, device=DEVICE)[:, None]
        place = rows + (past if lengths is None else lengths.view(-1, 1, 1, 1) - n_q)
        seen = (keys <= place + right if right >= 0 else keys >= 0) & (keys >= place - left if left >= 0 else keys >= 0)
        seen = seen if lengths is None else seen & (keys < lengths.view(-1, 1, 1, 1))
        mask = seen if mask is None else mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
        words = {}
    elif past:
        # The last query stands over the last key.
        words["causal_alignment"] = "bottom_right"
    scale = attributes.get("scale")
    out = dispatch.attention(
        q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1], softcap=attributes.get("softcap", 0.0), **words
    )
    return out.transpose(1, 2).flatten(2) if packed else out


NODES = nodes()


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("node", NODES, ids=lambda node: re.sub("^test_attention_", "", node[0]))
def test_a_node_has_the_output_of_onnxs_reference(node: Node, branch: Branch, record_property: Callable[[str, str], None]) -> None:
    _, attributes, arrays, wanted = node
    with forced(branch):
        out = served_by_dispatch(attributes, arrays)
        record_property("served", by := served())
    wide = tensor(wanted)
    # ONNX's own tests allow 1e-3 of float32, and its reference rounds between its steps to the inputs' type.
    atol = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[wide.dtype]
    torch.testing.assert_close(out.to(wide.dtype), wide, atol=atol, rtol=atol)
    # Rows of fewer than 16 bytes, one number each, are no kernel's.
    refused = arrays["Q"].ndim == 4 and arrays["Q"].shape[3] == 1
    assert (by == "torch") == (branch == "torch" or refused), f"{by} served"
