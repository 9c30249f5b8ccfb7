"""Cards that the table lacks: described by their driver alone, known by names of their own, here and in processes that are handed them."""

import ctypes
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashtune.cli.main import main
from flashtune.cli.options import gpu_of
from flashtune.cli.search import choose_source
from flashtune.core.gpu import cards, target
from flashtune.core.gpu.cards import Facts
from flashtune.core.gpu.target import UNREPORTED_GBS, described_by_driver, find_target, slug_of, targets
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.pytorch import devices
from flashtune.core.records.results import Fate, Measurement, Outcome, Provenance, SearchResult
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.templates.rendering import text_hash, variant_of
from flashtune.tuner import machine
from flashtune.tuner.machine import devices_of, local_gpu, local_gpus, provenance


def facts_of(name: str, arch: int, sms: int, mhz: int, memory_mhz: int, bus: int, gb: int, l2_mb: int) -> Facts:
    """The driver's description of such a card; shared memory and threads are those of its architecture."""
    block, sm, threads = {80: (163, 164, 2048), 90: (227, 228, 2048), 100: (227, 228, 2048)}.get(arch, (99, 100, 1536))
    shared = block << 10, sm << 10
    return Facts(name, arch // 10, arch % 10, sms, mhz * 1000, memory_mhz * 1000, bus, l2_mb << 20, *shared, 65536, threads, 32, gb << 30)


IN_TABLE = {
    "h100": facts_of("NVIDIA H100 80GB HBM3", 90, 132, 1980, 2619, 5120, 80, 50),
    "h200": facts_of("NVIDIA H200", 90, 132, 1980, 3201, 6016, 141, 60),
    "a100": facts_of("NVIDIA A100-SXM4-80GB", 80, 108, 1410, 1593, 5120, 80, 40),
    "l4": facts_of("NVIDIA L4", 89, 58, 2040, 6251, 192, 24, 48),
    "rtx4090": facts_of("NVIDIA GeForce RTX 4090", 89, 128, 2520, 10501, 384, 24, 72),
}
NVL = facts_of("NVIDIA H100 NVL", 90, 132, 1785, 2619, 6016, 94, 60)
SLICE = facts_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 90, 60, 1980, 2619, 2560, 40, 25)
OTHERS = {
    # By datasheet: GB/s and dense 10^12 operations per second in bf16.
    "h100-nvl": (NVL, 3938, 835),
    "h100-80gb-hbm3-mig-3g-40gb": (SLICE, 1676, 450),
    "h200-nvl": (facts_of("NVIDIA H200 NVL", 90, 132, 1785, 3201, 6144, 141, 60), 4800, 835),
    "gh200-480gb": (facts_of("NVIDIA GH200 480GB", 90, 132, 1980, 2619, 6144, 96, 60), 4023, 989),
    "h20": (facts_of("NVIDIA H20", 90, 78, 1980, 2619, 6144, 96, 60), 4023, 148),
    "h800": (facts_of("NVIDIA H800", 90, 132, 1980, 2619, 5120, 80, 50), 3352, 989),
    "a10g": (facts_of("NVIDIA A10G", 86, 80, 1710, 6251, 384, 24, 6), 600, 70),
    "l40": (facts_of("NVIDIA L40", 89, 142, 2490, 9001, 384, 48, 96), 864, 181),
    "rtx-6000-ada-generation": (facts_of("NVIDIA RTX 6000 Ada Generation", 89, 142, 2505, 10001, 384, 48, 96), 960, 364),
    "rtx-pro-6000-blackwell-workstation-edition": (
        facts_of("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 120, 188, 2617, 14001, 512, 96, 128), 1792, 504,
    ),
    "gb200": (facts_of("NVIDIA GB200", 100, 152, 1965, 3996, 8192, 185, 126), 8184, 2310),
}  # fmt: skip


class Driver:
    """NVIDIA's driver of a machine with these cards."""

    def __init__(self, *facts: Facts) -> None:
        self.facts = facts

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDriverGetVersion(self, place: Any) -> int:
        place._obj.value = 13000
        return 0

    def cuDeviceGetCount(self, place: Any) -> int:
        place._obj.value = len(self.facts)
        return 0

    def cuDeviceGet(self, place: Any, index: int) -> int:
        place._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
        name.value = self.facts[device.value].name.encode()[: length - 1]
        return 0

    def cuDeviceGetAttribute(self, place: Any, attribute: int, device: Any) -> int:
        place._obj.value = self.facts[device.value][1 + cards._ATTRIBUTES.index(attribute)]
        return 0

    def cuDeviceTotalMem_v2(self, place: Any, device: Any) -> int:
        place._obj.value = self.facts[device.value].memory_bytes
        return 0


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets a driver with cards; what became known by it is forgotten afterwards."""
    before = dict(targets())

    def plug(*facts: Facts) -> None:
        target._know_cards_here.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(*facts))
        monkeypatch.setattr(machine, "_built_for", lambda: 13)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: facts[index].name)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    yield plug
    target._know_cards_here.cache_clear()
    devices._gpu.cache_clear()
    for slug in set(targets()) - set(before):
        del targets()[slug]


@pytest.mark.parametrize("slug", IN_TABLE)
def test_what_a_driver_says_of_a_card_of_the_table_is_its_row(slug: str) -> None:
    row, made = targets()[slug], described_by_driver(IN_TABLE[slug])
    same = ("arch", "vendor", "sms", "shared_bytes_per_sm", "registers_per_sm", "max_threads_per_sm", "warp_size", "boost_mhz")
    assert [getattr(made, name) for name in same] == [getattr(row, name) for name in same]
    assert made.shared_bytes_per_block <= row.shared_bytes_per_sm and made.compilable == row.compilable
    assert made.bandwidth_gbs == pytest.approx(row.bandwidth_gbs, rel=0.01)
    assert made.l2_bytes == row.l2_bytes and made.exp_per_clock == row.exp_per_clock
    assert made.peak_tflops == pytest.approx(row.peak_tflops, rel=0.01)


@pytest.mark.parametrize("slug", OTHERS)
def test_cards_that_the_table_lacks_have_slugs_and_figures_of_their_own(slug: str) -> None:
    facts, gbs, tflops = OTHERS[slug]
    made = described_by_driver(facts)
    assert made.slug == slug == slug_of(facts.name) and slug not in targets()
    assert made.bandwidth_gbs == pytest.approx(gbs, rel=0.03), "by the memory's clock and width, not a cousin's"
    assert made.peak_tflops["bf16"] == pytest.approx(tflops, rel=0.08)
    assert (made.sms, made.l2_bytes, made.compilable) == (facts.sms, facts.l2_bytes, True)


def test_a_card_here_is_found_by_slug_and_name_and_no_other_is(machine_with: Any) -> None:
    machine_with(NVL)
    for name in ("h100-nvl", "H100 NVL", "NVIDIA H100 NVL", "nvidia_h100_nvl"):
        assert find_target(name) == described_by_driver(NVL)
    assert find_target("h100") is targets()["h100"], "of the table stays of the table"
    assert local_gpu() == machine.LocalGpu(name="NVIDIA H100 NVL", target=described_by_driver(NVL))
    assert devices.target_of(torch.device("cuda", 0)) is find_target("h100-nvl")
    with pytest.raises(InputError, match=r"unknown GPU 'h100-nvx': did you mean h100-nvl"):
        find_target("h100-nvx")


def test_several_different_cards_of_one_machine_are_told_apart(machine_with: Any) -> None:
    machine_with(OTHERS["l40"][0], IN_TABLE["h200"], NVL, NVL)
    assert [gpu.target.slug for gpu in local_gpus() if gpu.target is not None] == ["l40", "h200", "h100-nvl", "h100-nvl"]
    assert [devices.target_of(torch.device("cuda", index)).slug for index in range(4)] == ["l40", "h200", "h100-nvl", "h100-nvl"]
    assert devices_of("1", find_target("l40")) == ()
    assert devices_of("1", find_target("h200")) == ("1",)
    assert devices_of("2", find_target("h100-nvl")) == ("2", "3")
    with pytest.raises(EnvironmentProblem, match="GPU 0 of this machine is NVIDIA L40, not NVIDIA H200 SXM"):
        devices_of("2", find_target("h200"))
    made = provenance(command="c", seed=1, measured=True, target=find_target("h100-nvl"))
    assert made.gpu_name == "NVIDIA H100 NVL"


def test_another_process_that_is_handed_a_card_knows_it(machine_with: Any) -> None:
    machine_with(NVL)
    code = "import pickle, sys, flashtune.core.gpu.target as t; x = pickle.load(sys.stdin.buffer); print(t.find_target(x.slug) is x)"
    card = pickle.dumps(find_target("h100-nvl"))
    told = subprocess.run([sys.executable, "-c", code], input=card, capture_output=True, timeout=600, check=True)
    assert told.stdout.strip() == b"True"
    assert pickle.loads(pickle.dumps(targets()["h200"])) == targets()["h200"]


def test_torchs_properties_do_where_the_driver_isnt_at_hand(machine_with: Any) -> None:
    machine_with()
    made = devices.described("NVIDIA H100 NVL", _properties(NVL), amd=False)
    assert replace(made, sources=()) == replace(described_by_driver(NVL), sources=()) and find_target("h100-nvl") is made
    silent = devices.described("NVIDIA Board", _properties(NVL._replace(memory_clock=0)), amd=False)
    assert silent.bandwidth_gbs == UNREPORTED_GBS


def _properties(facts: Facts) -> Any:
    class Properties:
        major, minor, multi_processor_count, clock_rate, memory_clock_rate, memory_bus_width, L2_cache_size = facts[1:8]
        shared_memory_per_block_optin, shared_memory_per_multiprocessor, regs_per_multiprocessor = facts[8:11]
        max_threads_per_multi_processor, warp_size, total_memory = facts[11:]

    return Properties


def flashtune(*words: str) -> Any:
    return CliRunner().invoke(main, list(words), env={"COLUMNS": "200"})


def test_the_records_of_its_architecture_serve_a_card_until_it_has_its_own(machine_with: Any, tmp_path: Path) -> None:
    machine_with(NVL)
    words = ("explain", "--n", "4096", "--d", "128", "--causal", "--heads", "16", "--batch", "4")
    for named in ((), ("--gpu-name", "h100-nvl")):
        shown = flashtune(*words, *named, "--json")
        assert shown.exit_code == 0, shown.output
        found = json.loads(shown.stdout)
        assert (found["gpu"], found["kind"]) == ("h100-nvl", "near_gpu") and found["record_key"]["gpu"] in ("h100", "h200"), found["reason"]
    path, own = tmp_path / "own.sqlite", _own_result(tmp_path)
    with Store.open(path, writable=True) as store:
        store.save(own)
    found = json.loads(flashtune(*words, "--db", str(path), "--json").stdout)
    assert (found["kind"], found["record_key"]["gpu"]) == ("exact", "h100-nvl")


def _own_result(tmp_path: Path) -> SearchResult:
    """The record that a search of an H100 NVL would save."""
    problem = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
    chosen, card = family("flash_fwd_hopper"), find_target("h100-nvl")
    variant = variant_of(chosen, problem.spec(), chosen.default(problem.spec(), card))
    outcome = Outcome(
        template=variant.template,
        template_hash=text_hash(chosen, variant),
        variant_id=variant.id,
        config=variant.config,
        fate=Fate.CORRECT,
        source="measured",
        measurement=Measurement.of([500.0]),
        finalist=True,
    )
    made_by = Provenance(flashtune="0.1.0", torch="2.11.0", triton="3.6.0", gpu_name=NVL.name)
    return SearchResult(gpu="h100-nvl", problem=problem, outcomes=(outcome,), provenance=made_by)


def test_rows_of_a_card_that_isnt_here_are_read_and_shown(machine_with: Any, tmp_path: Path) -> None:
    machine_with(NVL)
    result = _own_result(tmp_path)
    with Store.open(tmp_path / "own.sqlite", writable=True) as store:
        store.save(result)
    del targets()["h100-nvl"]
    machine_with()
    [row] = json.loads(flashtune("show", "--db", str(tmp_path / "own.sqlite"), "--json").stdout)
    assert (row["gpu"], row["unservable"]) == ("h100-nvl", None)
    elsewhere = flashtune("explain", "--gpu-name", "h200", "--n", "4096", "--d", "128", "--db", str(tmp_path / "own.sqlite"), "--json")
    assert json.loads(elsewhere.stdout)["record_key"] is None, "of which architecture it is nobody knows here"


def test_a_search_takes_the_card_that_is_here(machine_with: Any) -> None:
    machine_with(NVL, IN_TABLE["h200"])
    assert gpu_of(None).slug == "h100-nvl"
    assert choose_source(find_target("h100-nvl"), False) == choose_source(find_target("h200"), False) == "measured"
    with pytest.raises(EnvironmentProblem, match=r"is NVIDIA H100 NVL \(h100-nvl\) and NVIDIA H200 \(h200\), not NVIDIA H100 SXM: leave"):
        choose_source(find_target("h100"), False)
    machine_with()
    assert flashtune("search", "--d", "64").exit_code == 2 and "name one with --gpu-name" in flashtune("search", "--d", "64").stderr
