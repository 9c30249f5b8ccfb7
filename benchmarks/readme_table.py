"""Prints README's tables of gains, from the shipped database and the committed results: `python benchmarks/readme_table.py`."""

from forward_cells import LENGTHS, TOKENS

from flashtune.core.results import TuningRecord
from flashtune.db.library import Library, shipped_path

CASES = {
    '{"mask":"bool"}': "boolean mask (1, 1, N, N)",
    '{"mask":"bias"}': "additive bias (1, H, N, N)",
    '{"causal":true,"dropout":true}': "dropout 0.1, causal",
    '{"causal":true,"window":1024}': "window 1024, causal",
    '{"alibi":true,"causal":true}': "ALiBi, causal",
    '{"causal":true,"softcap":true}': "soft cap 30, causal",
    '{"causal":true}': "4 query heads to a key head, causal",
}
"""The features of rows and what they are called."""


def cell(record: TuningRecord | None) -> str:
    """TFLOP/s, and how many times as fast as the framework's default attention, where that can express the problem."""
    if record is None:
        return ""
    gain = f" ({record.framework_us / record.median_us:.2f}x)" if record.framework_us else ""
    return f"{record.tflops:.0f}{gain}"


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
                cells = [cell(r) for r in found]
                lines.append(f"| D={d}, {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def feature_table() -> str:
    """The same for problems with features, N = 4096."""
    every = Library.of(shipped_path()).records(gpu="h200", dtype="bf16", n=4096)
    lines = ["| N = 4096 | D=64 | D=128 |", "|---|---|---|"]
    for features, words in CASES.items():
        shared = 4 if "heads" in words else 1
        found = {r.key.d: r for r in every if r.key.features == features and r.key.n_q == 4096 and r.key.gqa_ratio == shared}
        lines.append(f"| {words} | {cell(found.get(64))} | {cell(found.get(128))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(plain_table())
    print()
    print(feature_table())
