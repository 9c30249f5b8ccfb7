"""Compare the bits of random calls with those of another revision, in Triton's interpreter: `python guard/bits.py REVISION [--calls 400]`.

Each way in is called with the same random tensors and words by both, forward and backward; calls that differ are printed with their words.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WAYS = ("dense", "packed", "paged", "functions", "packed functions")


def drawn(way: str, number: int) -> dict[str, Any]:
    """Words of a random call: its sizes and features, the same for every revision."""
    dice = random.Random(f"{way} {number}")
    heads = dice.choice(((1, 1), (2, 1), (3, 3), (4, 2)))
    words: dict[str, Any] = {"way": way, "number": number, "heads": heads, "dtype": dice.choice(("float16", "float32"))}
    words |= {"d": dice.choice((16, 24, 32, 64)), "n_q": dice.randint(1, 70), "n_kv": dice.randint(1, 90)}
    words["grad"] = way != "paged" and dice.random() < 0.5
    options: dict[str, Any] = {"scale": dice.choice((None, None, 0.3, -0.2))}
    if way != "functions":
        options["is_causal"] = dice.random() < 0.4
    if way in ("dense", "packed", "paged"):
        options["softcap"] = dice.choice((0.0, 0.0, 5.0))
        words |= {"slopes": dice.random() < 0.2, "sinks": dice.random() < 0.2}
    if way in ("dense", "packed") and dice.random() < 0.2:
        options |= {"dropout_p": 0.25, "seed": 7}
    if way == "dense" and dice.random() < 0.3:
        options["window"] = (dice.randint(0, 20), dice.choice((0, 5)))
    return words | {"options": options}


def call(words: dict[str, Any]) -> Any:
    """The outputs of such a call, and its gradients."""
    import torch

    from flashtune import dispatch

    made = torch.Generator().manual_seed(words["number"])
    dtype, options = getattr(torch, words["dtype"]), dict(words["options"])
    (heads, kv_heads), d, n_q, n_kv = words["heads"], words["d"], words["n_q"], words["n_kv"]

    def tensor(*shape: int) -> Any:
        return torch.randn(shape, generator=made).to(dtype).requires_grad_(words["grad"])

    for name in ("slopes", "sinks"):
        if words.get(name):
            options["alibi_slopes" if name == "slopes" else name] = torch.rand(heads, generator=made)
    options["enable_gqa"] = True
    if words["way"] in ("dense", "functions"):
        given = [tensor(2, heads, n_q, d), tensor(2, kv_heads, n_kv, d), tensor(2, kv_heads, n_kv, d)]
        if words["way"] == "dense":
            found = dispatch.attention(*given, return_lse=True, **options)
        else:
            found = dispatch.flex_attention(
                *given, lambda s, b, h, i, j: s + (i - j) * 0.1, lambda b, h, i, j: i + 5 >= j, return_lse=True, **options
            )
    else:
        bounds = [torch.tensor([0, n // 3, n], dtype=torch.int32) for n in (n_q, n_kv)]
        given = [tensor(n_q, heads, d), tensor(n_kv, kv_heads, d), tensor(n_kv, kv_heads, d)]
        if words["way"] == "paged":
            given[1:] = [tensor(12, 16, kv_heads, d), tensor(12, 16, kv_heads, d)]
            table = torch.randperm(12, generator=made).int().view(2, 6)
            used = torch.tensor([n_kv, n_kv // 2], dtype=torch.int32)
            found = dispatch.attention_varlen(
                *given, bounds[0], None, n_q, n_kv, block_table=table, seqused_k=used, return_lse=True, **options
            )
        else:
            if words["way"] == "packed functions":
                options["score_mod"] = lambda s, b, h, i, j: s * torch.cos((i - j) * 0.1)
            found = dispatch.attention_varlen(*given, *bounds, n_q, n_kv, return_lse=True, **options)
    out, lse = found
    if not words["grad"]:
        return out, lse
    return out, lse, *torch.autograd.grad(out, given, torch.randn(out.shape, generator=made).to(dtype))


def digest(words: dict[str, Any], run: Callable[[dict[str, Any]], Any] = call) -> str:
    """Bits of a call's results in few letters, or its error."""
    try:
        results = run(words)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    every = hashlib.sha256()
    for x in results:
        every.update(f"{tuple(x.shape)} {x.dtype}".encode() + x.detach().contiguous().numpy().tobytes())
    return every.hexdigest()[:16]


def digests(count: int) -> dict[str, str]:
    """Digests of so many random calls of each way in, by their words."""
    from flashtune import dispatch

    with warnings.catch_warnings(), dispatch.use(unmeasured=True):
        warnings.simplefilter("ignore")
        every = [drawn(way, number) for number in range(count) for way in WAYS]
        return {json.dumps(words): digest(words) for words in every}


def of_tree(tree: Path, count: int, cache: str) -> "subprocess.Popen[str]":
    """A process that prints digests by the package of a tree."""
    settings = {"PYTHONPATH": f"{tree}:{tree}/kernels/sm90", "TRITON_INTERPRET": "1", "FLASHTUNE_CACHE": cache, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--digests", "--calls", str(count)]
    return subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True)


def main() -> int:
    """The command: compare with a revision, or print digests of the package that is imported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", nargs="?", default="HEAD")
    parser.add_argument("--calls", type=int, default=40, help="calls of each way in (%(default)s)")
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.digests:
        print(json.dumps(digests(given.calls)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, given.revision], cwd=ROOT, check=True)
        try:
            processes = [of_tree(tree, given.calls, f"{folder}/{name}") for name, tree in (("here", ROOT), ("there", other))]
            here, there = (json.loads(one.communicate()[0]) for one in processes)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    apart = [f"{words}: {there[words]} became {here[words]}" for words in here if here[words] != there[words]]
    print(f"bits: {len(here)} calls, {len(apart)} changed", *apart, sep="\n")
    return bool(apart)


if __name__ == "__main__":
    raise SystemExit(main())
