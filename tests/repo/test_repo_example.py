"""CONTRIBUTING's worked example, a new feature, is a patch that applies to a copy of the package, and does there what the page says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCH = Path(__file__).with_name("squared.patch")

CALLS = """
import torch
from flashtune import dispatch
from flashtune.core.system.errors import InputError
from flashtune.dispatch.providers.libraries import PROVIDERS

draw = torch.Generator().manual_seed(1)
tensors = [torch.randn(1, 2, 40, 16, generator=draw).requires_grad_() for _ in range(3)]
wide = [x.detach().double().requires_grad_() for x in tensors]
scores = 0.25 * wide[0] @ wide[1].mT
wanted = (scores * scores).softmax(-1) @ wide[2]

def close(found):
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)

# With gradients PyTorch serves, without them the kernel.
out = dispatch.attention(*tensors, squared=True)
close(out)
for one, other in zip(torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(wanted.sum(), wide), strict=True):
    torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)
with torch.no_grad(), dispatch.use(unmeasured=True):
    assert dispatch.explain(*tensors, squared=True).template == "flash_fwd"
    close(dispatch.attention(*tensors, squared=True))
    assert not torch.equal(dispatch.attention(*tensors), dispatch.attention(*tensors, squared=True))
close(torch.compile(lambda *x: dispatch.attention(*x, squared=True), backend="aot_eager", fullgraph=True)(*tensors))
# Packed sequences by the kernel, pages by copies, and no library beside them.
rows = [x.detach()[0].transpose(0, 1) for x in tensors]
bounds, whole = torch.tensor([0, 40], dtype=torch.int32), wanted.detach()[0].transpose(0, 1)
packed = [*rows, bounds, bounds, 40, 40]
with torch.no_grad(), dispatch.use(unmeasured=True):
    assert dispatch.explain_varlen(*packed, squared=True).template == "flash_fwd"
    torch.testing.assert_close(dispatch.attention_varlen(*packed, squared=True).double(), whole, atol=1e-5, rtol=1e-5)
    pages = [x.unflatten(0, (5, 8)) for x in rows[1:]]
    table = {"block_table": torch.arange(5, dtype=torch.int32)[None], "seqused_k": torch.tensor([40], dtype=torch.int32)}
    found = dispatch.attention_varlen(rows[0], *pages, bounds, None, 40, 40, squared=True, **table)
    torch.testing.assert_close(found.double(), whole, atol=1e-5, rtol=1e-5)
found = torch.compile(lambda *x: dispatch.attention_varlen(*x, *packed[3:], squared=True), backend="aot_eager", fullgraph=True)(*rows)
torch.testing.assert_close(found.double(), whole, atol=1e-5, rtol=1e-5)
try:
    PROVIDERS["flash"].devices = ("cpu",)
    dispatch.attention_varlen(*packed, squared=True, implementation="flash")
except InputError as error:
    print(error)
try:
    dispatch.attention(*tensors, squared=True, score_mod=lambda s, b, h, i, j: s)
except InputError as error:
    print(error)
"""


def test_the_example_of_a_new_feature_serves_in_the_files_that_the_page_lists(tmp_path: Path) -> None:
    # With bytecode, which stays valid in a copy of the same times: nothing but what the patch changes is compiled anew.
    shutil.copytree(ROOT / "flashtune", tmp_path / "flashtune")
    applied = subprocess.run(
        ["git", "apply", "--numstat", "--apply", str(PATCH)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, f"the example rots: apply its steps anew, and write the difference to {PATCH} ({applied.stderr})"
    listed = re.findall(r"^ (flashtune/\S+) +\| +(\d+) ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    lines = [(name, sum(map(int, counts.split()))) for counts, name in re.findall(r"^(\d+\t\d+)\t(\S+)$", applied.stdout, re.MULTILINE)]
    assert lines and sorted((name, int(count)) for name, count in listed) == sorted(lines), "the page lists other files, or other numbers"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1", "FLASHTUNE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALLS], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    library, functions = done.stdout.splitlines()
    assert "it doesn't take float32 or float64 or squared" in library
    assert functions.startswith("squared is no argument beside score_mod and block_mask: ")
