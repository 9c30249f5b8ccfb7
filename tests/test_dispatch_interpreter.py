"""The kernel path for real, on the CPU: Triton's interpreter is switched on at import, so each test starts a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def interpreted(*arguments: str, examples: int = 0) -> str:
    words = {"TRITON_INTERPRET": "1", "FLASHTUNE_TEST_EXAMPLES": str(examples)}
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **words}, cwd=ROOT)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    return run.stdout


def test_kernels_agree_with_the_float64_reference_in_the_interpreter() -> None:
    """The table of test_dispatch_numbers.py, with fewer examples; FLASHTUNE_TEST_EXAMPLES=100 runs more by hand."""
    said = interpreted("-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "tests/test_dispatch_numbers.py", examples=6)
    assert " passed" in said and "failed" not in said


def test_tracers_and_transforms_compose_where_kernels_serve() -> None:
    said = interpreted("-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "tests/test_dispatch_tracers.py")
    assert " passed" in said and "failed" not in said


def test_the_interpreter_says_that_it_serves_and_leaves_bf16_to_the_framework() -> None:
    code = """
import torch
from flashtune import dispatch
q = torch.randn(1, 2, 20, 16)
found = dispatch.explain(q, q, q, is_causal=True)
print(found.kind, found.template, found.gpu, found.key, "interpreter" in found.reason)
half = q.bfloat16()
print(dispatch.explain(half, half, half).kind)
compiled = torch.compile(lambda x: dispatch.attention(x, x, x, is_causal=True), backend="aot_eager", fullgraph=True)
rows_first = q.transpose(1, 2).contiguous().transpose(1, 2)
for x in (q, rows_first):
    served, eager = compiled(x), dispatch.attention(x, x, x, is_causal=True)
    print(torch.equal(served, eager), served.stride() == eager.stride())
wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
print((compiled(q) - wanted).abs().max().item() < 1e-5)
"""
    lines = interpreted("-W", "ignore", "-c", code).splitlines()
    assert lines == ["default flash_fwd cpu None True", "framework", "True True", "True True", "True"]
