"""Prints README's table of gains from the shipped database: `python benchmarks/readme_table.py`."""

from flashtune.db.library import Library, shipped_path

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def table() -> str:
    """Tuned TFLOP/s and the ratio to the framework's default attention, bf16 on an H200, as Markdown."""
    rows = {(r.key.d, r.key.n, r.problem.features.causal): r for r in Library.of(shipped_path()).records(gpu="h200", dtype="bf16")}
    lines = ["| N | " + " | ".join(str(n) for n in LENGTHS) + " |", "|---|" + "---|" * len(LENGTHS)]
    for d in (64, 128):
        for causal in (False, True):
            cells = []
            for n in LENGTHS:
                record = rows[d, n, causal]
                assert record.framework_us is not None
                cells.append(f"{record.tflops:.0f} ({record.framework_us / record.median_us:.2f}x)")
            lines.append(f"| D={d}, {'causal' if causal else 'full'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
