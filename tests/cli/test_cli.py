"""The command line as its users meet it: help that teaches, one-line errors with exit codes, and JSON that machines can read."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import flashtune

from flashtune import dispatch
from flashtune.cli.main import COMMANDS, main
from flashtune.core.code.index import read_index
from flashtune.core.problems.config import Config
from flashtune.core.records.results import Fate
from flashtune.db.store import Store
from flashtune.tuner.publish import machine_code


def rows_of(*words: str) -> list[dict[str, Any]]:
    result = flashtune(*words)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_help(command: str) -> None:
    result = flashtune(command, "--help")
    assert result.exit_code == 0
    found = main.get_command(None, command)  # type: ignore[arg-type]
    assert found is not None
    assert found.help
    undocumented = [p.name for p in found.params if getattr(p, "help", "-") in (None, "") and p.param_type_name == "option"]
    assert not undocumented


def test_help_answers_without_importing_torch() -> None:
    code = (
        "import sys; from flashtune.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=600)


def test_a_searchs_own_process_needs_no_torch() -> None:
    # On a GPU's machine its import would take seconds of each search, beside those of the children.
    modules = "flashtune.cli.search, flashtune.cli.progress, flashtune.tuner.searching, flashtune.tuner.propose.surrogate, flashtune.bench"
    code = f"import sys, {modules}; print([name for name in ('torch', 'triton') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]"


EXPLAIN = ("explain", "--gpu-name", "a100", "--n", "512", "--d", "64")

BAD_INPUT = {
    "unknown gpu": (("search", "--gpu-name", "h20", "--d", "64"), "h200"),
    "gpu without kernels": (("search", "--gpu-name", "v100", "--d", "64", "--n", "512"), "V100"),
    "d too large": (("search", "--gpu-name", "a100", "--d", "577"), "577"),
    "d of zero": (("search", "--gpu-name", "a100", "--d", "0"), "'--d': 0 is not in the range 1<=x<=1024"),
    "n of zero": (("search", "--gpu-name", "a100", "--d", "64", "--n", "0"), "'--n': 0 is not in the range"),
    "negative n": (("search", "--gpu-name", "a100", "--d", "64", "--n", "-5"), "'--n': -5 is not in the range"),
    "unknown dtype": (("search", "--gpu-name", "a100", "--d", "64", "--dtype", "int8"), "int8"),
    "heads that don't divide": (("search", "--gpu-name", "a100", "--d", "64", "--heads", "6", "--kv-heads", "4"), "6 query heads"),
    "dropout of one": (("search", "--gpu-name", "a100", "--d", "64", "--dropout", "1"), "'--dropout': 1.0 is not in the range 0<=x<1"),
    "dropout of NaN": (("search", "--gpu-name", "a100", "--d", "64", "--dropout", "nan"), "'--dropout': nan is not in the range 0<=x<1"),
    "soft cap of NaN": (("search", "--gpu-name", "a100", "--d", "64", "--softcap", "nan"), "'--softcap': nan is not in the range 0<=x<inf"),
    "negative window": (("search", "--gpu-name", "a100", "--d", "64", "--window", "-1"), "'--window': -1 is not in the range"),
    "a budget that is no time": (("search", "--gpu-name", "a100", "--d", "64", "--budget", "soon"), "soon"),
    "an unknown template": (("search", "--gpu-name", "a100", "--d", "64", "--n", "512", "--template", "flash"), "flash_fwd"),
    "tf32 for bf16": (("search", "--gpu-name", "a100", "--d", "64", "--dtype", "bf16", "--tf32"), "tf32"),
    "n beyond reason": (("search", "--gpu-name", "a100", "--d", "64", "--n", "2147483647"), "'--n': 2147483647 is not in the range"),
    "a word for a number": (("search", "--gpu-name", "a100", "--d", "64,x"), "flashtune search --help"),
    "a range of numbers": (("search", "--gpu-name", "a100", "--d", "64", "--n", "512-1024"), "'512-1024' is not a valid whole number"),
    "a folder of calls": (("search", "--gpu-name", "a100", "--calls", "."), "'.' is a directory"),
    "a missing option": (("search", "--gpu-name", "a100"), "--d"),
    "an unknown command": (("frobnicate",), "frobnicate"),
    "an option without a command": (("-V",), "No such option '-V'. (see flashtune --help)"),
    "a value for none": (("--version=3",), "Option '--version' does not take a value. (see flashtune --help)"),
    "an option without its value": (("show", "--gpu-name"), "Option '--gpu-name' requires an argument. (see flashtune show --help)"),
    "a storage that is no URL": (("search", "--gpu-name", "a100", "--d", "64", "--n", "512", "--storage", "study"), "sqlite:///"),
    "gpus that are none": (("search", "--gpu-name", "a100", "--d", "64", "--n", "512", "--gpus", "foo"), "--gpus 'foo'"),
    "gpus counted from one": (("search", "--gpu-name", "a100", "--d", "64", "--n", "512", "--gpus", "0", "--predict"), "--gpus '0'"),
    "a bias's gradient without one": ((*EXPLAIN, "--direction", "bwd", "--dbias"), "the mask is 'none': use mask='bias' or drop dbias"),
    "slopes' gradient without them": ((*EXPLAIN, "--direction", "bwd", "--dslopes"), "alibi is off: switch alibi on or drop dslopes"),
    "a gradient of a forward": ((*EXPLAIN, "--alibi", "--dslopes"), "use the direction bwd"),
    "tf32 in words of options": ((*EXPLAIN, "--tf32"), "drop tf32 or change the dtype"),
    "no heads": ((*EXPLAIN, "--heads", "0"), "'--heads': 0 is not in the range"),
    "no queries": ((*EXPLAIN, "--n-q", "0"), "'--n-q': 0 is not in the range"),
    "key heads that don't divide": ((*EXPLAIN, "--heads", "6", "--kv-heads", "4"), "make heads a multiple of kv_heads"),
    "explain without a gpu": (("explain", "--d", "64", "--n", "512"), "--gpu-name"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(case: str) -> None:
    words, telling = BAD_INPUT[case]
    result = flashtune(*words)
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("flashtune: ")
    assert telling in lines[0]


def test_a_command_ends_with_what_was_to_be_done_in_the_end() -> None:
    """It leaves without taking its modules apart, but neither without what is registered for the end nor with another status."""
    text = "import atexit; from flashtune.cli.main import main; atexit.register(print, 'in the end'); main({}, prog_name='flashtune')"
    for words, status in ((["--version"], 0), (["shwo"], 2)):
        done = subprocess.run([sys.executable, "-c", text.format(words)], capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (status, "in the end")


def test_a_full_disk_behind_the_output_is_one_line() -> None:
    words = [sys.executable, "-m", "flashtune.cli.main", "show", "--json"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert result.returncode == 4
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_a_refused_search_leaves_nothing_behind(tmp_path: Path) -> None:
    assert flashtune("search", "--gpu-name", "v100", "--d", "64", "--n", "512", "--db", str(tmp_path / "x.sqlite")).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_broken_database_is_one_line_and_is_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "broken.sqlite"
    path.write_bytes(b"SQLite format 3\0" + os.urandom(5000))
    before = path.read_bytes()
    for words in (("show",), ("verify",), ("search", "--gpu-name", "a100", "--d", "64", "--n", "512", "--trials", "1")):
        result = flashtune(*words, "--db", str(path))
        assert result.exit_code == 3, (words, result.output)
        assert len(result.stderr.strip().splitlines()) == 1
        assert path.read_bytes() == before


def test_a_missing_database_is_named(tmp_path: Path) -> None:
    result = flashtune("show", "--db", str(tmp_path / "none.sqlite"))
    assert result.exit_code == 3
    assert "none.sqlite" in result.stderr


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A predicted search of two problems, and what it printed."""
    path = tmp_path_factory.mktemp("cli") / "x.sqlite"
    words = ("search", "--gpu-name", "NVIDIA A100-SXM4-80GB", "--d", "64", "--n", "1024,2048", "--full", "--dtype", "fp16")
    return path, rows_of(*words, "--trials", "2", "--seed", "3", "--db", str(path), "--json")


def test_a_search_without_a_gpu_stores_predicted_rows(searched: tuple[Path, list[dict[str, Any]]]) -> None:
    path, printed = searched
    rows = rows_of("show", "--db", str(path), "--json")
    assert [(row["gpu"], row["n"], row["d"], row["dtype"], row["source"]) for row in rows] == [
        ("a100", 1024, 64, "fp16", "predicted"),
        ("a100", 2048, 64, "fp16", "predicted"),
    ]
    assert rows == [{**row, "origin": rows[0]["origin"]} for row in printed]
    for row in rows:
        assert row["features"] == {}
        assert row["direction"] == "fwd"
        assert row["template"] == "flash_fwd"
        assert row["config"]["BLOCK_M"] > 0
        assert row["median_us"] > 0
        assert row["tflops"] > 0
        assert row["framework_us"] is None, "nothing was timed"
        assert row["ended_by"] == "trials" and row["expected_regret"] >= 0


@pytest.mark.usefixtures("quick")
def test_a_family_that_is_named_is_searched_at_sizes_that_dont_suit_it(tmp_path: Path) -> None:
    words = ("search", "--gpu-name", "a100", "--d", "16", "--n", "64", "--batch", "1", "--heads", "2", "--full", "--dtype", "fp16")
    words += ("--template", "flash_decode", "--trials", "1", "--seed", "1", "--db", str(tmp_path / "x.sqlite"), "--json")
    assert [row["template"] for row in rows_of(*words)] == ["flash_decode"]


def test_tables_say_what_predicted_means(searched: tuple[Path, list[dict[str, Any]]]) -> None:
    result = flashtune("show", "--db", str(searched[0]))
    assert result.exit_code == 0
    assert "predicted: ranked by a cost model" in result.stdout.replace("\n", " ")
    assert "n1024-d64-fp16-full" in result.stdout


def test_filters_of_show_are_kept(searched: tuple[Path, list[dict[str, Any]]]) -> None:
    assert len(rows_of("show", "--db", str(searched[0]), "--n", "2048", "--json")) == 1
    assert rows_of("show", "--db", str(searched[0]), "--source", "measured", "--json") == []


@pytest.mark.parametrize("way", ["environment", "option"])
def test_explain_names_the_record_that_a_search_stored(
    way: str, searched: tuple[Path, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashtune import dispatch

    words = ["explain", "--gpu-name", "a100", "--d", "64", "--n", "1024", "--dtype", "fp16", "--json"]
    # Nobody measured anything on an A100.
    assert json.loads(flashtune(*words).stdout)["kind"] == "framework"
    monkeypatch.setenv("FLASHTUNE_UNMEASURED", "1")
    if way == "environment":
        monkeypatch.setenv("FLASHTUNE_DB", str(searched[0]))
    else:
        words += ["--db", str(searched[0])]
    dispatch.reload()
    result = flashtune(*words)
    dispatch.reload()
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["kind"] == "predicted"
    assert found["config"] == searched[1][0]["config"]
    assert found["likely_us"] == pytest.approx(searched[1][0]["likely_us"], abs=2e-3)
    low, about, high = found["likely_us"]
    # No other time: the cost model's own lies below that range.
    assert f"for exactly this problem on a100: about {about:.0f} us, likely {low:.0f} to {high:.0f}" in found["reason"]


@pytest.mark.parametrize("sizes", [("--d", "600"), ("--d", "64", "--d-v", "577"), ("--d", "4096", "--d-v", "8")])
def test_explain_says_of_heads_that_no_kernel_takes_what_calls_say(sizes: tuple[str, ...]) -> None:
    largest = max(int(word) for word in sizes if word.isdigit())
    found = json.loads(flashtune("explain", "--gpu-name", "h200", "--n", "64", *sizes, "--json").stdout)
    assert found["kind"] == "framework" and f"not {largest}, so PyTorch's own attention runs the call" in found["reason"]
    assert " on h200: framework" in flashtune("explain", "--gpu-name", "h200", "--n", "64", *sizes).stdout
    assert flashtune("search", "--gpu-name", "h200", "--n", "64", *sizes, "--predict").exit_code == 2


def test_explain_takes_switches_and_fp8() -> None:
    words = ("--gpu-name", "l4", "--d", "64", "--n", "1024", "--dtype", "float8_e4m3fn", "--alibi", "--sinks", "--json")
    result = flashtune("explain", *words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["kind"], found["template"], found["key"]["dtype"]) == ("default", "flash_fwd", "fp8")
    assert found["key"]["features"] == '{"alibi":true,"sinks":true}'


def test_explain_leaves_out_what_hides_nothing_as_calls_do() -> None:
    plain = flashtune(*EXPLAIN, "--causal", "--json").stdout
    for words in (("--window", "511"), ("--window", "100000")):
        assert json.loads(flashtune(*EXPLAIN, "--causal", *words, "--json").stdout) == json.loads(plain)
        said = flashtune(*EXPLAIN, "--causal", *words).stdout
        assert said.startswith("n512-d64-bf16-causal on a100: ") and "masks that hide no key at these sizes are left out" in said
    assert json.loads(flashtune(*EXPLAIN, "--causal", "--window", "510", "--json").stdout) != json.loads(plain)
    assert "hide no key" not in flashtune(*EXPLAIN, "--causal", "--window", "510").stdout
    assert flashtune(*EXPLAIN, "--window", "511", "--mask", "bias").stdout.startswith("n512-d64-bf16-full+bias on a100: ")


def test_the_diagonal_can_start_at_the_last_key() -> None:
    words = ("explain", "--gpu-name", "h200", "--d", "64", "--n", "1024", "--n-q", "4", "--causal", "--json")
    features = [json.loads(flashtune(*words, *more).stdout)["key"]["features"] for more in ((), ("--alignment", "bottom-right"))]
    assert features == ['{"causal":true}', '{"alignment":"bottom_right","causal":true}']


def test_rows_that_this_version_cannot_serve_give_way_or_are_named(
    searched: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which rows become kernels is asked here, not what the compiler makes of them.
    monkeypatch.setattr(machine_code, "build_all", lambda orders, jobs: ((order, "not asked for") for order in orders))
    path = tmp_path / "old.sqlite"
    with Store.open(searched[0], writable=False) as store:
        results = store.results()
    stale = replace(results[0].outcomes[0], variant_id="0" * 16, config=Config.of(GONE=1), rank=None)
    rank = next(outcome for outcome in results[0].outcomes if outcome.rank == 1)
    newest = replace(results[0], outcomes=(replace(stale, fate=rank.fate, measurement=rank.measurement, reason=""),))
    with Store.open(path, writable=True) as store:
        store.save(newest)
    (written := tmp_path / "written" / "index.json").parent.mkdir()
    written.write_text('{"format": 2, "archives": {}, "kernels": [], "files": {}}')
    for words in ((), ("--check",), ("--json",)):
        alone = flashtune("generate", "--db", str(path), "--out", str(written.parent), *words)
        assert alone.exit_code == 5 and alone.stdout == "" and "left out" in alone.stderr and "'GONE'" in alone.stderr
        assert (
            alone.stderr.strip()
            .splitlines()[-1]
            .endswith("holds no record with a kernel to generate: search first, or name another database")
        )
    assert [path.name for path in written.parent.rglob("*")] == ["index.json"]
    with Store.open(path, writable=True) as store:
        for result in results:
            store.save(result)
    both = flashtune("generate", "--db", str(path), "--out", str(tmp_path / "both"))
    assert both.exit_code == 0 and "left out" not in both.stderr
    assert list((tmp_path / "both").rglob("*.py"))
    exported = tmp_path / "exported.sqlite"
    assert flashtune("export", str(exported), "--db", str(path)).exit_code == 0
    for database in (path, exported):
        shown = json.loads(flashtune("show", "--db", str(database), "--json").stdout)
        assert "0" * 16 not in {row["variant"] for row in shown}


def test_generate_writes_kernels_that_regenerating_does_not_change(
    searched: tuple[Path, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("generate", "--db", str(searched[0]), "--out", str(tmp_path))
    first = flashtune(*words)
    assert first.exit_code == 0, first.output
    variants = {row["variant"] for row in searched[1]}
    assert {kernel.variant_id for kernel in read_index(tmp_path).kernels} == variants
    kept = (*words, "--check", "--sample", "0")
    assert flashtune(*kept).exit_code == 0
    monkeypatch.chdir(tmp_path.parent)
    assert flashtune("generate", "--db", str(searched[0]), "--out", tmp_path.name, "--check", "--sample", "0").exit_code == 0
    (tmp_path / read_index(tmp_path).kernels[0].path).write_text("changed")
    assert flashtune(*kept).exit_code == 1
    again = flashtune(*words)
    assert again.exit_code == 0
    assert "compiled" not in again.stderr


def test_export_ships_the_winners(searched: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    path = tmp_path / "shipped.sqlite"
    result = flashtune("export", str(path), "--db", str(searched[0]), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == 2
    exported = rows_of("show", "--db", str(path), "--json")
    assert [row["variant"] for row in exported] == [row["variant"] for row in searched[1]]
    again = flashtune("export", str(path), "--db", str(searched[0]))
    assert again.exit_code != 0
    assert len(again.stderr.strip().splitlines()) == 1
    assert flashtune("export", str(path), "--db", str(searched[0]), "--force").exit_code == 0


def test_an_export_of_nothing_is_one_line_that_names_the_filters_and_leaves_no_file(
    searched: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    path = tmp_path / "shipped.sqlite"
    result = flashtune("export", str(path), "--db", str(searched[0]), "--gpu-name", "h200", "--d", "64")
    assert result.exit_code == 5
    assert len(result.stderr.strip().splitlines()) == 1
    assert "holds nothing of gpu h200, d 64 to export: " in result.stderr
    assert not path.exists()


def test_verify_checks_every_row(searched: tuple[Path, list[dict[str, Any]]]) -> None:
    result = flashtune("verify", "--db", str(searched[0]), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["correct"] == 2
    assert found["wrong"] == 0
    assert all(0 < row["max_error"] <= 1 for row in found["rows"])
    assert {row["fate"] for row in found["rows"]} == {str(Fate.CORRECT)}


def test_several_values_can_follow_one_option() -> None:
    from flashtune.cli.problem_options import ProblemOptions
    from flashtune.cli.search import search

    with search.make_context("search", ["--gpu-name", "a100", "--d", "64", "--n", "512", "1024", "--dtype", "fp16", "--causal"]) as context:
        assert [p.label() for p in ProblemOptions.of(context, dict(context.params)).problems()] == [
            "n512-d64-fp16-causal",
            "n1024-d64-fp16-causal",
        ]


def test_the_default_grid_is_both_bands_and_both_half_types() -> None:
    from flashtune.cli.problem_options import ProblemOptions
    from flashtune.cli.search import search

    with search.make_context("search", ["--gpu-name", "a100", "--d", "64"]) as context:
        problems = ProblemOptions.of(context, dict(context.params)).problems()
    assert len(problems) == 24
    assert {p.n_kv for p in problems} == {512, 1024, 2048, 4096, 8192, 16384}
    assert all(p.batch * p.n_kv == 16384 and p.heads == 32 for p in problems)


def test_doctor_says_what_is_here() -> None:
    result = flashtune("doctor", "--json")
    found = json.loads(result.stdout)
    assert found["ok"] is (result.exit_code == 0)
    assert {"packages", "GPU", "ptxas"} <= {check["name"] for check in found["checks"]}


@pytest.fixture
def no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")


@pytest.fixture
def unwilling_gpu(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 that is seen, but takes no inputs."""
    from flashtune.core.gpu.target import find_target
    from flashtune.tuner import machine

    monkeypatch.setattr(machine, "local_gpus", lambda: (machine.LocalGpu(name="NVIDIA A100", target=find_target("a100")),))


@pytest.mark.usefixtures("no_gpu")
def test_bench_without_a_gpu_is_one_line_and_exit_code_4() -> None:
    result = flashtune("bench", "--d", "64")
    assert result.exit_code == 4
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.usefixtures("unwilling_gpu")
def test_bench_says_which_problem_the_gpu_cant_take() -> None:
    with dispatch.use(unmeasured=True):
        result = flashtune("bench", "--d", "64", "--n", "512", "--dtype", "fp16", "--causal")
    told = " ".join(result.stderr.split())
    assert told.count("the GPU can't take n512-d64-fp16-causal (") == 1
    assert told.endswith("free its memory, or take a smaller batch or fewer heads")


@pytest.mark.usefixtures("unwilling_gpu")
def test_verify_doesnt_pass_a_row_that_the_gpu_cant_take(searched: tuple[Path, list[dict[str, Any]]]) -> None:
    result = flashtune("verify", "--db", str(searched[0]), "--json")
    assert result.exit_code == 1, result.output
    rows = json.loads(result.stdout)["rows"]
    assert len(rows) == 2
    assert all("the GPU can't take" in row["reason"] for row in rows)
