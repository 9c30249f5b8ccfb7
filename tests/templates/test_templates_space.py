"""The search spaces: sound defaults everywhere, constraints that hold, sizes that a search can walk."""

import itertools
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.gpu.target import Target, targets
from flashtune.core.problems.dtypes import DTYPES, DType
from flashtune.core.problems.lengths import Lengths
from flashtune.core.problems.problem import DIRECTIONS, FLAGS, MASK_KINDS, WIDEST_HEAD, Features, Problem, padded
from flashtune.templates import every_family, families, families_of_pages, family
from flashtune.templates.family import Family
from flashtune.templates.predicates import live_registers, shared_bytes
from flashtune.templates.rendering import render, variant_of

OURS = ("flash_decode", "flash_fwd")


@st.composite
def problems(draw: st.DrawFn, largest: int = 256) -> Problem:
    dtype = draw(st.sampled_from(DTYPES))
    window = st.one_of(st.none(), st.integers(0, 5000))
    features = Features(
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(window, window))),
        mask=draw(st.sampled_from(MASK_KINDS)),
        **{name: (name != "tf32" or dtype == "fp32") and draw(st.booleans()) for name in FLAGS},
    )
    sizes = {
        "batch": 1,
        "heads": 2,
        "kv_heads": 1,
        "n_q": 100,
        "n_kv": 200,
        "d": draw(st.integers(1, largest)),
        "d_v": draw(st.integers(1, largest)),
    }
    if features.latent:
        sizes["d_v"] = min(sizes["d"], sizes["d_v"])
    return Problem(**sizes, dtype=dtype, features=features, direction=draw(st.sampled_from(DIRECTIONS)))  # type: ignore[arg-type]


ours = st.sampled_from(OURS).map(family)
gpus = st.sampled_from(sorted(targets())).map(targets().__getitem__)


@given(problem=problems(WIDEST_HEAD), target=gpus)
def test_every_supported_problem_has_a_default_that_keeps_the_constraints(problem: Problem, target: Target) -> None:
    spec = problem.spec()
    for chosen in every_family().values():
        if chosen.supports(spec, target) is None:
            for config in [chosen.default(spec, target), *chosen.starts(spec, target)]:
                chosen.validate(config)
                assert chosen.violated(config, spec, target) is None


@pytest.mark.parametrize(("d", "d_v"), itertools.product((64, 128, 192, 256), repeat=2))
def test_keys_and_values_of_other_widths_have_defaults_over_pages(d: int, d_v: int) -> None:
    features = Features(causal=True, packed=True, page=16, alignment="bottom_right")
    lengths = Lengths(law="equal", longest=4096)
    wanted = Problem(batch=2, heads=8, kv_heads=8, n_q=512, n_kv=4096, d=d, d_v=d_v, dtype="bf16", features=features, lengths=lengths)
    for chosen in families_of_pages().values():
        assert chosen.inability(wanted, wanted.spec(), targets()["h200"]) is None
        assert chosen.starts(wanted.spec(), targets()["h200"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d_v", [64, 128, 192, 256])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_a_hopper_has_a_default_for_every_usual_head_size(d: int, d_v: int, dtype: DType) -> None:
    """Hypothesis seldom draws the multiples that TMA asks for."""
    target = targets()["h200"]
    for mask in MASK_KINDS:
        spec = Problem(batch=1, heads=2, kv_heads=1, n_q=100, n_kv=200, d=d, d_v=d_v, dtype=dtype, features=Features(mask=mask)).spec()
        for chosen in every_family().values():
            if chosen.supports(spec, target) is None:
                assert chosen.violated(chosen.default(spec, target), spec, target) is None


@given(chosen=ours, problem=problems(), data=st.data())
def test_any_config_of_the_space_renders_to_python(chosen: Family, problem: Problem, data: st.DataObject) -> None:
    spec = problem.spec()
    config = chosen.default(spec, targets()["h200"]).replace(**{axis.name: data.draw(st.sampled_from(axis.values)) for axis in chosen.axes})
    text = render(chosen, variant_of(chosen, spec, config))
    compile(text, "rendered", "exec")
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(("gpu", "dtype"), [("a100", "bf16"), ("rtx4090", "fp16"), ("h200", "fp32"), ("mi300x", "bf16")])
def test_configs_within_the_constraints_fit_the_gpu(gpu: str, dtype: DType) -> None:
    chosen, target = family("flash_fwd"), targets()[gpu]
    features = Features(causal=True, dropout=True)
    spec = Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=64, d=128, d_v=128, dtype=dtype, features=features).spec()
    configs = list(chosen.configs(spec, target))
    assert len(configs) == len(set(configs)) > 20
    for config in configs:
        chosen.validate(config)
        assert shared_bytes(config, spec, target) <= target.shared_bytes_per_block
        assert live_registers(config, spec, target) <= (232 if target.vendor == "nvidia" else 448)
        assert config.number("BLOCK_N") >= 32, "dropout draws for 32 columns at once"
        assert config["ORDER"] in ("longest_first", "grouped")
        assert target.vendor == "nvidia" or (config["maxnreg"] == 0 and config.number("num_stages") <= 2)


def test_the_space_of_a_usual_problem_has_a_few_hundred_to_a_few_thousand_configs() -> None:
    for name in OURS:
        for causal in (False, True):
            for d in (64, 128):
                features = Features(causal=causal)
                spec = Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=64, d=d, d_v=d, dtype="bf16", features=features).spec()
                assert 40 <= len(list(family(name).configs(spec, targets()["h200"]))) <= 5000


def test_a_family_says_why_it_cant_serve_a_gpu() -> None:
    spec = Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=64, d=64, d_v=64, dtype="fp16").spec()
    assert "Triton" in (family("flash_fwd").supports(spec, targets()["v100"]) or "")
    for slug in ("a100", "rtx4090", "mi300x"):
        assert family("flash_fwd").supports(spec, targets()[slug]) is None
    fp8 = Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=64, d=64, d_v=64, dtype="fp8").spec()
    # For an MI300X, whose own format is another, Triton emulates e4m3.
    for name, slug in itertools.product(("flash_fwd", "flash_decode"), ("a100", "mi250x", "mi300x")):
        assert "e4m3" in (family(name).supports(fp8, targets()[slug]) or "")
    assert all(family("flash_fwd").supports(fp8, targets()[slug]) is None for slug in ("l4", "h200", "b200"))


def test_a_flag_that_a_family_doesnt_declare_is_refused() -> None:
    spec = Problem(batch=1, heads=1, kv_heads=1, n_q=64, n_kv=64, d=64, d_v=64, dtype="fp16", features=Features(sinks=True)).spec()
    assert family("flash_fwd").supports(spec, targets()["h200"]) is None
    without = replace(family("flash_fwd"), flags=family("flash_fwd").flags - {"sinks"})
    assert without.supports(spec, targets()["h200"]) == "flash_fwd has no sinks"


def test_families_are_listed_under_their_own_names() -> None:
    assert set(OURS) <= set(families())
    assert all(name == chosen.name for name, chosen in families().items())


def test_families_travel_to_other_processes_by_their_names() -> None:
    assert all(pickle.loads(pickle.dumps(family)) is family for family in families().values())


def test_head_sizes_are_padded_to_powers_of_two() -> None:
    assert [padded(d) for d in (1, 16, 17, 64, 80, 128, 129, 256)] == [16, 16, 32, 64, 128, 128, 256, 256]
