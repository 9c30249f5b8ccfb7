"""What rounding the weights of attention to e4m3 costs, against float64: `python benchmarks/fp8_weights.py`.

This is where the bounds for fp8 in `flashtune/core/tolerances.py` come from. Scores are normal with a standard deviation of up to 2.25
(natural units), values ~ N(0, 1); weights are rounded as a kernel does that multiplies PV as fp8, and nothing else is rounded. For each
case: the largest ||error|| / ||o||, and the largest |error| / (1 + |o|) of an element.
"""

import torch

LENGTHS, SIZES, SPREADS = (77, 512, 2048, 8192), (16, 64, 128), (0.25, 1.0, 2.25)
ROWS = 256


def errors(n: int, d: int, spread: float, *, causal: bool, seed: int = 0) -> tuple[float, float]:
    """The relative norm and the largest element's error for `ROWS` rows of one head."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.linspace(0, n - 1, min(n, ROWS)).long()
    scores = spread * torch.randn(len(rows), n, generator=generator, dtype=torch.float64)
    if causal:
        scores[torch.arange(n)[None, :] > rows[:, None]] = -torch.inf
    v = torch.randn(n, d, generator=generator, dtype=torch.float64)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    sums = weights.sum(-1, keepdim=True)
    exact = weights @ v / sums
    error = weights.float().to(torch.float8_e4m3fn).double() @ v / sums - exact
    return float(error.norm() / exact.norm()), float((error.abs() / (1 + exact.abs())).max())


def main() -> None:
    """Print a line for each case, and the largest of all."""
    worst_norm = worst_element = 0.0
    for causal in (False, True):
        for n in LENGTHS:
            for d in SIZES:
                for spread in SPREADS:
                    norm, element = errors(n, d, spread, causal=causal)
                    worst_norm, worst_element = max(worst_norm, norm), max(worst_element, element)
                    print(f"{'causal' if causal else 'full':6} N={n:<5} D={d:<4} sd={spread:<5} norm {norm:.4f}  element {element:.4f}")
    print(f"largest: norm {worst_norm:.4f}, element {worst_element:.4f}")


if __name__ == "__main__":
    main()
