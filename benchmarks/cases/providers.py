"""Other libraries' attention behind one call: host time of naming one, and what is chosen with our kernels hidden, beside the best of all.

`host` are calls that leave the GPU idle: `attention(implementation=...)` beside PyTorch's function, with that backend alone switched on.
`choices` are calls on a GPU that nothing is known of: no kernels, no records, the first call of each measured by `use(confirm=True)`. Then
all that serve take turns with the choice, back to back.

Prints a line for each figure, writes providers.json after each, and exits with 1 where one could not be measured.
"""

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.shared.environment import argument_parser, names_of, this_gpu
from benchmarks.shared.turns import DEVICE, guarded, host_in_turns, medians, report, tensors, timed_in_turns
from flashtune import dispatch
from flashtune.dispatch.decisions import confirming
from flashtune.dispatch.providers.libraries import PROVIDERS
from flashtune.dispatch.providers.provider import ProviderPlan
from flashtune.dispatch.providers.torch_backends import TorchBackend
from flashtune.dispatch.state import context

ALLOWED = 1.02
"""Largest time of the choice over that of the best implementation at which the choice counts as right."""


def cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Tensors and arguments of calls of models: prefill, shared heads, windows, soft caps, masks, decoding, images."""
    mask = torch.rand(2, 1, 1, 1024, device=DEVICE) > 0.2
    return {
        "d64": (tensors(4, 16, 2048, 64), {}),
        "d64 causal": (tensors(4, 16, 2048, 64), {"is_causal": True}),
        "d128 causal": (tensors(2, 16, 4096, 128), {"is_causal": True}),
        "shared heads": (tensors(2, 32, 2048, 128, kv_heads=8), {"is_causal": True, "enable_gqa": True}),
        "d256 causal": (tensors(1, 8, 2048, 256), {"is_causal": True}),
        "window": (tensors(1, 32, 4096, 128), {"window": (1023, 0), "causal_alignment": "bottom_right"}),
        "short": (tensors(8, 12, 128, 64), {}),
        "padding": (tensors(2, 16, 1024, 64), {"attn_mask": mask}),
        "captions": (tensors(2, 10, 4096, 64, n_kv=77), {}),
        "d72": (tensors(8, 16, 256, 72), {}),
        "decoding": (tensors(8, 32, 1, 128, kv_heads=8, n_kv=4096), {"enable_gqa": True}),
        "chunk": (tensors(1, 32, 256, 128, kv_heads=8, n_kv=4096), {"enable_gqa": True}),
    }


def serving(qkv: Any, words: dict[str, Any]) -> list[str]:
    """Names of the providers that serve a call, and of PyTorch's own choice; FlexAttention, which compiles, for windows alone."""
    found = [one.name for one in dispatch.explain(*qkv, **words).providers if one.why is None and one.name in PROVIDERS]
    return ["torch", *(name for name in found if name != "flex" or "window" in words)]


def host_part() -> Iterator[dict[str, Any]]:
    """Host time of naming each backend of PyTorch."""
    q, k, v = tensors(1, 8, 512, 128)

    def measured(backend: TorchBackend) -> dict[str, Any]:
        named = partial(dispatch.attention, q, k, v, implementation=backend.name)
        ours = medians(host_in_turns({"named": named}))["named"]
        with sdpa_kernel([backend.backend]):
            alone = medians(host_in_turns({"torch": lambda: sdpa(q, k, v)}))["torch"]
        return {"case": backend.name, "named_us": ours, "torch_us": alone, "more_us": round(ours - alone, 2)}

    with torch.no_grad():
        for backend in PROVIDERS.values():
            if isinstance(backend, TorchBackend) and backend.name in serving((q, k, v), {}):
                yield from guarded({"case": backend.name}, partial(measured, backend))


def choices_part() -> Iterator[dict[str, Any]]:
    """The choice of a first call, measured lazily without kernels, beside all that serve."""

    def measured(name: str, qkv: Any, words: dict[str, Any]) -> dict[str, Any]:
        dispatch.attention(*qkv, **words)
        plans = [plan for plan in context.current().plans.values() if isinstance(plan, ProviderPlan)]
        calls = {"chosen": partial(dispatch.attention, *qkv, **words)}
        calls |= {other: partial(dispatch.attention, *qkv, implementation=other, **words) for other in serving(qkv, words)}
        chosen = plans[0].provider if plans else "torch"
        times = medians(timed_in_turns(calls, rounds=15, repeats=20))
        best = min((other for other in times if other != "chosen"), key=lambda other: times[other])
        ratio = times["chosen"] / times[best]
        return {"case": name, "chosen": chosen, "best": best, "ratio": ratio, "right": ratio <= ALLOWED, **times}

    confirming.KERNELS = 0
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, (qkv, words) in cases().items():
            os.environ["FLASHTUNE_OWN_DB"] = str(Path(folder) / f"{name}.sqlite")
            dispatch.reload()
            with dispatch.use(alone=True, confirm=True):
                yield from guarded({"case": name}, partial(measured, name, qkv, words), limit_s=180.0)


PARTS = {"host": host_part, "choices": choices_part}


def main() -> None:
    """Run the parts that are named."""
    parser = argument_parser(__doc__)
    parser.add_argument("--parts", type=lambda text: names_of(text, PARTS, "parts"), default=",".join(PARTS), help="(default: %(default)s)")
    options = parser.parse_args()
    this_gpu()
    report("providers", {name: PARTS[name] for name in options.parts})


if __name__ == "__main__":
    main()
