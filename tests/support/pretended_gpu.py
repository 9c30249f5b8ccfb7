"""A pretended GPU for dispatch: CPU tensors are served as if they were on an H200, by the reference in the kernels' place."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import by_the_book

from flashtune import dispatch
from flashtune.core.code.launching import LoadedKernel
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.pytorch import devices
from flashtune.core.records.results import Baseline, Fate, Measurement, Outcome, Provenance, SearchResult, Source
from flashtune.db.store import Store
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.state.context import Memo
from flashtune.templates import families, family
from flashtune.templates.family import Family
from flashtune.templates.rendering import text_hash, variant_of

H200 = find_target("h200")
POINTERS = family("flash_fwd")
PROBLEM = Problem(batch=2, heads=4, kv_heads=4, n_q=40, n_kv=40, d=16, d_v=16, dtype="fp32", features=Features(causal=True))
Q = torch.randn(2, 4, 40, 16, generator=torch.Generator().manual_seed(1))


class Machine:
    """A pretended GPU: `launched` are the variants that ran, `fails` those that raise, `refuses` the families
    and ids of variants that accept nothing."""

    def __init__(self) -> None:
        self.loaded: list[Variant] = []
        self.launched: list[Variant] = []
        self.fails: dict[str, BaseException] = {}
        self.refuses: set[str] = set()
        self.spoil = False

    def load(self, family: Family, variant: Variant) -> Any:
        self.loaded.append(variant)

        def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **words: Any) -> None:
            self.launched.append(variant)
            if variant.id in self.fails:
                raise self.fails[variant.id]
            by_the_book(q, k, v, out, lse, **words)

        def accepts(*tensors: torch.Tensor | None) -> bool:
            return not self.refuses & {family.name, variant.id}

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *tensors, num_warps, enable_fp_fusion, **words: launch(*tensors, **words)

        def launches(*tensors: torch.Tensor, **words: Any) -> list[Any]:
            return [(Kernel(), (1,), tensors, {"num_warps": 4, **words})]

        return LoadedKernel(None, SimpleNamespace(accepts=accepts, counts_needed=lambda q, k: 0, launches=launches))  # type: ignore[arg-type]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """CPU tensors are served as if they were on an H200, from this test's own database."""
    machine = Machine()
    monkeypatch.setattr(devices, "INTERPRETING", True)
    monkeypatch.setattr(kernels, "load", machine.load)
    monkeypatch.setattr(Memo, "surroundings", lambda memo, device, problem: (H200, families(), memo.pool(problem.key("h200"), H200)))
    monkeypatch.setenv("FLASHTUNE_UNMEASURED", "1")
    dispatch.reload()
    yield machine
    monkeypatch.undo()
    dispatch.reload()


def config_of(block_m: int = 64, block_n: int = 32) -> Config:
    config = POINTERS.default(PROBLEM.spec(), H200).replace(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=2)
    assert POINTERS.violated(config, PROBLEM.spec(), H200) is None
    return config


def save(
    path: Path,
    problem: Problem = PROBLEM,
    *,
    gpu: str = "h200",
    config: Config | None = None,
    source: Source = "measured",
    framework_us: float | None = 200.0,
) -> Variant:
    """One search's winner, written to a database as a search would."""
    variant = variant_of(POINTERS, problem.spec(), config_of())
    if config is not None:
        # Whatever it holds: one outside the declared space would never be rendered for its hash.
        variant = replace(variant, config=config)
    outcome = Outcome(
        template=variant.template,
        template_hash=text_hash(POINTERS, variant_of(POINTERS, problem.spec(), config_of())),
        variant_id=variant.id,
        config=variant.config,
        fate=Fate.CORRECT,
        source=source,
        measurement=Measurement.of([100.0, 100.0]) if source == "measured" else Measurement.predicted(100.0),
        max_error=0.1,
        finalist=True,
        rank=1,
    )
    baseline = None
    if framework_us is not None and source == "measured":
        baseline = Baseline(backend="cudnn", measurement=Measurement.of([framework_us]))
    provenance = Provenance(flashtune="0", torch="2", triton="3", created_at="2026-11-01T00:00:00+00:00")
    with Store.open(path, writable=True) as store:
        store.save(SearchResult(gpu=gpu, problem=problem, outcomes=(outcome,), provenance=provenance, baseline=baseline))
    return variant


def attend(**words: Any) -> torch.Tensor:
    out = dispatch.attention(Q, Q, Q, is_causal=True, **words)
    assert isinstance(out, torch.Tensor)
    return out


def assert_right(out: torch.Tensor) -> None:
    wanted, _ = reference.attention(Q, Q, Q, scale=0.25, band=Band(right=0))
    torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)
