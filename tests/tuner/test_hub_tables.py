"""Whatever a hub folder's table says, a call gives attention's numbers and no exception: kernels serve only what they compute."""

import json
import math
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import test_export_hub as hub
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashtune.core import standalone
from flashtune.core.code.launching import LoadedKernel
from flashtune.core.problems.config import KernelSpec
from flashtune.core.records.results import TuningRecord
from flashtune.core.standalone import Standalone, module_of
from flashtune.templates import family
from flashtune.tuner.propose.space import record_of
from flashtune.tuner.publish.hub import write_hub
from flashtune.tuner.publish.winners import variant_for

RECORDS = [cast(TuningRecord, record_of(result)) for result in hub.RESULTS[:4]]
SPECS = {module_of(variant): variant.spec for variant in map(variant_for, RECORDS)}
"""What the kernel in each module of the folder computes, whatever a table says of it."""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hub")
    write_hub(folder, RECORDS)
    [path] = folder.rglob("table.json")
    return json.loads(path.read_text())


def loaded(name: str) -> ModuleType:
    return cast(ModuleType, SimpleNamespace(spec=SPECS[name]))


def launched(kernel: LoadedKernel) -> Any:
    """Launch of a kernel that computes what its module does: NaN where it would read what the call doesn't have."""

    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **words: Any) -> None:
        spec: KernelSpec = kernel.module.spec  # type: ignore[union-attr]
        if (q.shape[3], v.shape[3], q.dtype) != (spec.d, spec.d_v, torch.float16) or (spec.mask != "none" and words["mask"] is None):
            out.fill_(math.nan)
            return
        mask = words["mask"] if spec.mask != "none" else None
        out.copy_(sdpa(q, k, v, mask, is_causal=spec.causal, scale=words["scale"], enable_gqa=True))

    return launch


torch.manual_seed(5)
CALLS: list[tuple[list[torch.Tensor], dict[str, Any]]] = [
    ([torch.randn(2, heads, 64, d).half() for heads in (group * 2, 2, 2)], words)
    for d in (32, 64)
    for group in (1, 2)
    for words in (
        {"enable_gqa": True},
        {"is_causal": True, "enable_gqa": True},
        {"attn_mask": torch.randn(64, 64).half(), "enable_gqa": True},
    )
]


def served(path: Path) -> tuple[int, int]:
    """Numbers of warnings and of calls that kernels serve, all of which have the right numbers."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hosts = {name: family(name).host for name in ("flash_fwd", "flash_decode")}
        folder = Standalone(path, hosts, loaded)  # type: ignore[arg-type]
        for operands, words in CALLS:
            found, wanted = folder.attention(*operands, **words), sdpa(*operands, **words)
            assert (found - wanted).abs().max() < 0.01, folder.explain(*operands, **words)
        kernels = sum(not folder.explain(*operands, **words).startswith("PyTorch") for operands, words in CALLS)
    return len(said), kernels


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_interpreting", lambda: True)
    monkeypatch.setattr(standalone, "launcher", launched)


def test_a_sound_table_serves_by_its_kernels_without_a_warning(table: Any, tmp_path: Path, interpreted: None) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    assert served(path) == (0, 4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(data=st.data())
def test_a_changed_table_gives_right_numbers_and_at_most_one_warning(
    table: Any, tmp_path: Path, interpreted: None, data: st.DataObject
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data.draw(mutated(table))))
    said, _ = served(path)
    assert said <= 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_table_with_changed_bytes_gives_right_numbers_and_at_most_one_warning(
    table: Any, tmp_path: Path, interpreted: None, data: st.DataObject
) -> None:
    content = bytearray(json.dumps(table).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from(b'0123456789"{}[],:ae \\') | st.integers(0, 255))
    path = tmp_path / "table.json"
    path.write_bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))])
    said, _ = served(path)
    assert said <= 1


def test_a_folder_without_its_table_warns_once_and_torch_serves(tmp_path: Path, interpreted: None) -> None:
    assert served(tmp_path / "table.json") == (1, 0)
