"""What torch's own attention gives where tensors don't lie at multiples of 16 bytes: `python benchmarks/torch_unaligned.py`.

For each backend q, k or v begins some bytes off, or its rows are some columns apart; the output is compared with float64. Each case has a
process of its own, since some end in a fault. Prints a line for each: the largest error, or what was raised.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

BACKENDS = ("default", "CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
LAYOUTS = [("bytes off", 2), ("bytes off", 8), ("columns", 65), ("columns", 72)]


def case(backend: str, kind: str, size: int, which: int) -> str:
    """The largest error of causal attention (2, 4, 200, 64) in bf16 with one tensor laid out so, or what was raised."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    b, h, n, d = 2, 4, 200, 64
    tensors = [torch.randn(b, h, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    if kind == "columns":
        moved = torch.randn(b, h, n, size, device="cuda", dtype=torch.bfloat16)[..., :d]
    else:
        moved = torch.randn(b * h * n * d + size // 2, device="cuda", dtype=torch.bfloat16)[size // 2 :].view(b, h, n, d)
    tensors[which] = moved
    wanted = sdpa(*(x.double().contiguous() for x in tensors), is_causal=True)
    try:
        if backend == "default":
            found = sdpa(*tensors, is_causal=True)
        else:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                found = sdpa(*tensors, is_causal=True)
        return f"{(found.double() - wanted).abs().max().item():.3g}"
    except RuntimeError as error:
        return str(error).splitlines()[0]


def apart(words: tuple[str, tuple[str, int], int]) -> str:
    """A case in its own process, as a line."""
    backend, (kind, size), which = words
    command = [sys.executable, __file__, backend, kind, str(size), str(which)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        said = done.stdout.strip() or (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        said = "killed after 60 s"
    return f"{backend}, {'qkv'[which]} {size} {kind}: {said}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(case(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        with ThreadPoolExecutor(16) as pool:
            for line in pool.map(apart, product(BACKENDS, LAYOUTS, range(3))):
                print(line, flush=True)
