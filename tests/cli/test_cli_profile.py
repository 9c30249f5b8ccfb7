"""`flashtune profile`: its JSON, its text, its speed without a GPU, and one line for bad input."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from commands import flashtune
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.cli import profile as command
from flashtune.cli.main import main
from flashtune.tuner.machine import LocalGpu

EXAMPLE = ["--b", "1", "--h", "12", "--n", "1024", "--d", "64", "--dtype", "fp16"]
STEP_FIELDS = {"name", "read_bytes", "write_bytes", "score_bytes", "flops", "matmul_flops", "exps", "intensity", "bound", "floor_us"}
MIB = 2**20


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about counting; on a machine with a GPU they must not start to measure."""
    monkeypatch.setattr(command, "gpu_may_be_present", lambda: False)


def run(*arguments: str) -> Result:
    return flashtune("profile", *arguments)


def run_json(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_has_the_promised_tensors_and_steps() -> None:
    found = run_json(*EXAMPLE)
    assert found["tensors"] == {"Q": 1572864, "K": 1572864, "V": 1572864, "S": 24 * MIB, "O": 1572864}
    assert [step["name"] for step in found["steps"]] == ["qk", "elementwise", "pv"]
    assert [step["read_bytes"] + step["write_bytes"] for step in found["steps"]] == [27 * MIB, 48 * MIB, 27 * MIB]
    for step in [*found["steps"], found["standard"], found["fused"], *found["strategies"]]:
        assert step.keys() >= STEP_FIELDS
        assert step["bound"] in ("compute", "memory", "exp")
        assert step["intensity"] == pytest.approx(step["flops"] / (step["read_bytes"] + step["write_bytes"]))


def test_json_of_separate_steps_names_each() -> None:
    found = run_json(*EXAMPLE, "--elementwise", "separate")
    assert [step["name"] for step in found["steps"]] == ["qk", "scale_mask", "softmax", "dropout", "pv"]


def test_json_without_a_gpu_says_so_and_leaves_measurements_null() -> None:
    found = run_json(*EXAMPLE)
    assert found["measured"] is None
    assert found["not_measured"] == "this machine has no GPU that torch can use"
    assert [(s["name"], s["time_us"], s["relative_error"]) for s in found["strategies"]] == [
        (name, None, None) for name in ("standard", "fused", "window", "low_rank")
    ]


def test_fp8_is_counted_with_scores_in_bf16_and_not_measured() -> None:
    found = run_json("--n", "1024", "--d", "64", "--dtype", "e4m3", "--gpu-name", "h200")
    assert found["measured"] is None and "take no fp8" in found["not_measured"]
    tensors = found["tensors"]
    assert (tensors["O"], tensors["S"]) == (2 * tensors["Q"], 2 * 16 * 1024 * 1024)


def test_json_of_the_v100_has_its_crossover_and_97_percent_of_scores_for_one_long_head() -> None:
    found = run_json("--b", "1", "--h", "1", "--n", "4096", "--d", "128", "--gpu-name", "Tesla V100-PCIE-16GB")
    assert found["target"]["slug"] == "v100"
    assert found["target"]["crossover"] == pytest.approx(125, abs=1)
    assert found["target"]["chosen_by"] == "name"
    assert found["standard"]["score_share"] == pytest.approx(0.97, abs=0.001)


def test_the_default_target_is_said_to_be_a_default() -> None:
    assert run_json(*EXAMPLE)["target"]["chosen_by"] == "default"
    assert "the default; name another with --gpu-name" in run(*EXAMPLE).output


def test_text_has_both_units_labelled() -> None:
    text = run(*EXAMPLE, "--gpu-name", "v100").output
    lines = {line.split()[0]: line.split() for line in text.splitlines() if "  " in line}
    assert lines["tensor"] == ["tensor", "MiB", "MB"]
    assert lines["Q"] == ["Q", "1.50", "1.57"] and lines["S"] == ["S", "24.00", "25.17"]
    assert lines["qk"][3:5] == ["27.00", "28.31"] and lines["elementwise"][3:5] == ["48.00", "50.33"] and lines["pv"][3] == "27.00"
    assert "crossover 124.4 FLOP/byte" in text
    assert "S is 94.1% of the standard pipeline's traffic: 96.00 of 102.00 MiB (100.66 of 106.95 MB)." in text
    assert text.rstrip().endswith("Nothing was measured: this machine has no GPU that torch can use.")


def test_another_gpu_than_the_named_one_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    here = LocalGpu(name="NVIDIA A10", target=command.find_target("a10"))
    monkeypatch.setattr(command, "gpu_may_be_present", lambda: True)
    monkeypatch.setattr(command, "local_gpu", lambda: here)
    found = run_json(*EXAMPLE, "--gpu-name", "h200")
    assert found["measured"] is None
    assert found["not_measured"] == "this machine has a NVIDIA A10, not a NVIDIA H200 SXM"


def test_a_gpu_outside_the_table_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpu_may_be_present", lambda: True)
    monkeypatch.setattr(command, "local_gpu", lambda: LocalGpu(name="NVIDIA T4", target=None))
    found = run_json(*EXAMPLE)
    assert (found["measured"], found["not_measured"]) == (None, "this machine's NVIDIA T4 is not in the table of GPUs")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        *(
            ([option, value], f"flashtune: Invalid value for '{name}': {value} is not in the range")
            for option, name, value in (
                ("--n", "--n", "0"),
                ("--n", "--n", "-5"),
                ("--b", "--batch' / '--b", "0"),
                ("--h", "--heads' / '--h", "0"),
                ("--n-q", "--n-q", "0"),
                ("--d", "--d", "0"),
                ("--d", "--d", "600"),
                ("--window", "--window", "-1"),
                ("--rank", "--rank", "0"),
            )
        ),
        (["--gpu-name", "h900"], "flashtune: unknown GPU 'h900': did you mean"),
        (["--dtype", "int8"], "flashtune: unknown dtype 'int8': use one of fp16, bf16, fp32"),
        (["--gpu-name", "v100", "--dtype", "bf16"], "flashtune: v100 has no bf16 matrix products"),
        (
            ["--n", "32", "--rank", "64"],
            "flashtune: --rank 64 is more than --n 32, the number of keys",
        ),
        (["--plot", "report.pdf"], "flashtune: --plot report.pdf has no known ending: use .html, .png, .svg"),
        (["--plot", "/nowhere/at/all.html"], "flashtune: --plot /nowhere/at/all.html can't be written: name a file in an existing folder"),
        (["--plot", "/tmp"], "flashtune: Invalid value for '--plot': File '/tmp' is a directory."),
        (["--causal", "--n", "64", "--n-q", "65"], "flashtune: --n-q 65 with --causal and --n 64 leaves queries without a key"),
        (["--heads", "6", "--kv-heads", "4"], "flashtune: 6 query heads can't share 4 key heads"),
        (["--n", "many"], "flashtune: Invalid value for '--n'"),
        (["--elementwise", "half"], "flashtune: Invalid value for '--elementwise'"),
        (["--no-such-option"], "flashtune: No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], line: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(line) and result.stderr.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_plot_path_in_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    result = run(*EXAMPLE, "--plot", str(tmp_path / "report.png"))
    tmp_path.chmod(stat.S_IRWXU)
    assert result.exit_code == 2 and "can't be written: name a file in an existing folder" in result.stderr


def test_nothing_is_left_behind_when_one_of_several_plots_is_refused(tmp_path: Path) -> None:
    assert run(*EXAMPLE, "--plot", str(tmp_path / "a.png"), "--plot", str(tmp_path / "a.gif")).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_it_takes_less_than_5_seconds_of_a_cpu_and_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from flashtune.cli.main import main; main(sys.argv[1:], standalone_mode=False); "
        "print([name for name in ('torch', 'matplotlib', 'triton', 'optuna') if name in sys.modules], file=sys.stderr)"
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-c", code, "profile", *EXAMPLE, "--json"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    after = os.times()
    # Not by the wall's clock, which goes on while others have the CPU.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 5
    assert json.loads(done.stdout)["tensors"]["S"] == 24 * MIB
    if not Path("/dev/kfd").exists():
        assert done.stderr.strip() == "[]"


@settings(max_examples=30)
@given(st.integers(1, 64), st.integers(1, 128), st.integers(1, 20000), st.integers(1, 256), st.sampled_from(["fp16", "bf16", "fp32"]))
def test_any_sizes_give_finite_json_and_text(b: int, h: int, n: int, d: int, dtype: str) -> None:
    options = ["--b", str(b), "--h", str(h), "--n", str(n), "--d", str(d), "--dtype", dtype, "--gpu-name", "l4"]
    runner = CliRunner()
    # Called without the group's fixtures: the named GPU keeps a machine that has another from measuring.
    for extra in ([], ["--json"]):
        result = runner.invoke(main, ["profile", *options, *extra])
        assert result.exit_code == 0, result.output
        assert "nan" not in result.stdout.lower() and "infinity" not in result.stdout.lower()


def test_causal_shared_heads_and_decoding_are_counted() -> None:
    plain, causal = (run_json("--n", "1024", "--d", "64", *more) for more in ((), ("--causal",)))
    assert causal["problem"]["causal"] and not plain["problem"]["causal"]
    # The fused kernel skips what is hidden, the standard pipeline computes all of S.
    assert causal["fused"]["matmul_flops"] == pytest.approx(plain["fused"]["matmul_flops"] * 1025 / 2048)
    assert causal["standard"]["matmul_flops"] == plain["standard"]["matmul_flops"]
    assert [strategy["name"] for strategy in causal["strategies"]] == ["standard", "fused", "window"]
    shared = run_json("--n", "1024", "--d", "64", "--heads", "16", "--kv-heads", "4")
    assert shared["tensors"]["K"] * 4 == shared["tensors"]["Q"] == plain["tensors"]["Q"]
    step = run_json(
        "--batch", "8", "--heads", "32", "--kv-heads", "8", "--n", "16384", "--n-q", "1", "--causal", "--d", "128", "--dtype", "bf16"
    )
    assert (step["problem"]["n"], step["problem"]["n_q"], step["problem"]["kv_heads"]) == (16384, 1, 8)
    assert step["fused"]["bound"] == "memory" and step["fused"]["matmul_flops"] == 4 * 8 * 32 * 16384 * 128


@pytest.mark.parametrize("old", [("--b", "2", "--h", "4"), ("--batch", "2", "--heads", "4")])
def test_options_have_the_names_of_search_and_keep_their_old_ones(old: tuple[str, ...]) -> None:
    found = run_json(*old, "--n", "256", "--d", "64")["problem"]
    assert (found["batch"], found["heads"]) == (2, 4)


@pytest.mark.parametrize(("words", "rank"), [((), 64), (("--n", "10"), 10), (("--rank", "32"), 32)])
def test_rank_defaults_to_64_or_to_all_keys_where_there_are_fewer(words: tuple[str, ...], rank: int) -> None:
    assert run_json(*words)["problem"]["rank"] == rank


def test_the_text_of_what_is_not_plain_says_so() -> None:
    assert "H=16 Hkv=4 N=1024 Nq=1 D=64 fp16 causal" in run("--kv-heads", "4", "--n", "1024", "--n-q", "1", "--causal", "--d", "64").stdout
