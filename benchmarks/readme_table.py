"""Prints README's tables of gains, from the shipped database and the committed results: `python benchmarks/readme_table.py`."""

import json
from pathlib import Path

from forward_cells import LENGTHS, TOKENS

from flashtune.db.library import Library, shipped_path

FEATURES = Path(__file__).parent / "results" / "2026-11-21-h200-forward" / "forward_features.json"

CASES = {
    "mask": "boolean mask (1, 1, N, N)",
    "bias": "additive bias (1, H, N, N)",
    "dropout": "dropout 0.1, causal",
    "window": "window 1024, causal",
    "alibi": "ALiBi, causal",
    "softcap": "soft cap 30, causal",
    "gqa": "4 query heads to a key head, causal",
}
"""The feature cells and what they are called."""


def plain_table() -> str:
    """Tuned TFLOP/s and the ratio to the framework's default attention, bf16 on an H200, as Markdown."""
    every = Library.of(shipped_path()).records(gpu="h200", dtype="bf16")
    # Small problems have rows of the same N and D.
    full = [r for r in every if r.problem.batch * r.key.n == TOKENS and r.key.n_q == r.key.n and r.key.gqa_ratio == 1]
    rows = {(r.key.d, r.key.n, r.key.features): r for r in full}
    lines = ["| N | " + " | ".join(str(n) for n in LENGTHS) + " |", "|---|" + "---|" * len(LENGTHS)]
    for d in (64, 128, 256):
        for name, features in (("full", "{}"), ("causal", '{"causal":true}')):
            found = [rows[d, n, features] for n in LENGTHS if (d, n, features) in rows]
            if len(found) == len(LENGTHS):
                cells = [f"{r.tflops:.0f} ({r.framework_us / r.median_us:.2f}x)" if r.framework_us else "" for r in found]
                lines.append(f"| D={d}, {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def feature_table() -> str:
    """TFLOP/s beside the best of cuDNN, FlashAttention-2, FlexAttention and the memory-efficient kernel in one run, as Markdown."""
    rows = json.loads(FEATURES.read_text())["rows"]
    lines = ["| N = 4096 | D=64 | D=128 |", "|---|---|---|"]
    for case, words in CASES.items():
        cells = [
            f"{row['rates']['flashtune']:.0f} ({row['ratio_to'][row['best_peer']]:.2f}x {row['best_peer']})"
            for row in rows
            if row["case"] == case
        ]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(plain_table())
    print()
    print(feature_table())
