"""The table of GPUs: its figures are plausible and sourced, and every name that people and drivers use finds its row."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.gpu.target import Target, find_target, targets
from flashtune.core.system.errors import InputError

ALL = list(targets().values())
PROMISED = {
    *("v100", "a100", "a100-40gb", "a10", "l4", "l40s", "rtx3090", "rtx4090", "rtx5090"),
    *("h100", "h100-pcie", "h200", "b200", "mi250x", "mi300x"),
}

each_target = pytest.mark.parametrize("target", ALL, ids=lambda target: target.slug)


def test_every_promised_gpu_is_in_the_table() -> None:
    assert targets().keys() >= PROMISED and all(targets()[slug].slug == slug for slug in targets())


@each_target
def test_figures_have_sources_and_are_plausible(target: Target) -> None:
    assert len(target.sources) >= 2 and all(len(source) > 10 for source in target.sources)
    assert 50 <= target.sms <= 512
    assert 48 * 1024 <= target.shared_bytes_per_block <= target.shared_bytes_per_sm <= 256 * 1024
    assert target.registers_per_sm in (65536, 131072)
    assert target.max_threads_per_sm in (1536, 2048)
    assert target.warp_size == (32 if target.vendor == "nvidia" else 64)
    assert 4 * 2**20 <= target.l2_bytes <= 256 * 2**20
    assert 250 <= target.bandwidth_gbs <= 10000
    assert 1000 <= target.boost_mhz <= 3000
    assert target.exp_per_clock == 16
    assert {"fp32", "fp16"} <= target.peak_tflops.keys() <= {"fp32", "tf32", "bf16", "fp16", "fp8"}
    assert 0 < target.peak_tflops["fp32"] <= target.peak_tflops["fp16"] <= 3000


@each_target
def test_peaks_follow_from_units_and_clock(target: Target) -> None:
    """Units do a power of two of operations per clock; vendors quote peaks at clocks a little under or over the boost clock."""
    for name, peak in target.peak_tflops.items():
        per_clock = peak * 1e12 / (target.sms * target.boost_mhz * 1e6)
        assert 0.9 < per_clock / 2 ** round(math.log2(per_clock)) < 1.05, f"{name}: {per_clock:.0f} operations per unit and clock"
    # Types with half of the bytes are twice as fast.
    peaks = target.peak_tflops
    for wide, narrow, ratio in (("tf32", "fp16", 2), ("bf16", "fp16", 1), ("fp16", "fp8", 2)):
        assert not {wide, narrow} <= peaks.keys() or peaks[narrow] / peaks[wide] == pytest.approx(ratio, rel=0.02)


@each_target
def test_arch_tells_the_vendor_and_what_triton_compiles(target: Target) -> None:
    if target.vendor == "nvidia":
        assert target.capability == int(target.arch)
        assert target.compilable == (target.capability >= 80)
    else:
        assert target.arch.startswith("gfx9") and target.capability is None and target.compilable
        assert not target.has_tma


def test_only_hopper_and_later_have_the_tensor_copy_engine() -> None:
    assert {t.slug for t in ALL if t.has_tma} == {"h100", "h100-pcie", "h200", "b200", "rtx5090"}
    assert {t.slug for t in ALL if t.is_hopper} == {"h100", "h100-pcie", "h200"}


@each_target
def test_every_name_of_a_target_finds_it_whatever_the_case_and_punctuation(target: Target) -> None:
    for name in (target.slug, target.name, *target.aliases, *target.driver_names):
        for written in (name, name.upper(), name.lower(), name.replace("-", " "), name.replace(" ", "_"), f"  {name} "):
            assert find_target(written) is target, written


def test_no_name_is_claimed_by_two_targets() -> None:
    """The look-up keeps the first row of a shared name, so a clash would be silent: each row must find itself (above) and no other."""
    names = [name for target in ALL for name in {target.slug, *target.aliases, *target.driver_names}]
    plain = [find_target(name).slug for name in names]
    assert plain == [target.slug for target in ALL for _ in {target.slug, *target.aliases, *target.driver_names}]


@pytest.mark.parametrize(
    ("reported", "slug"),
    [
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100-PCIE-16GB", "v100"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2"),
    ],
)
def test_what_drivers_report_is_found(reported: str, slug: str) -> None:
    assert find_target(reported).slug == slug


@pytest.mark.parametrize(("wrong", "near"), [("h201", "h200"), ("rtx 4080", "rtx4090"), ("mi300", "mi300x"), ("a100-90gb", "a100")])
def test_an_unknown_gpu_is_refused_with_the_nearest_names(wrong: str, near: str) -> None:
    with pytest.raises(InputError, match="unknown GPU") as error:
        find_target(wrong)
    hint = str(error.value).split("did you mean ")[1].split("?")[0].split(", ")
    assert near in hint and 1 <= len(hint) <= 3
    assert repr(wrong) in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_code == 2


def test_a_name_like_no_other_gets_the_whole_list() -> None:
    with pytest.raises(InputError) as error:
        find_target("qqqqqqqq")
    assert all(slug in str(error.value) for slug in targets())


@given(st.text(max_size=30))
def test_any_text_finds_a_gpu_or_is_refused_in_one_line(text: str) -> None:
    try:
        answer = find_target(text).slug
    except InputError as error:
        answer = str(error)
    assert answer in targets() or (answer.startswith("unknown GPU") and "\n" not in answer)
