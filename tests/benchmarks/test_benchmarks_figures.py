"""The figures page's numbers agree with the committed results and the shipped records."""

import json
import math
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import readme
from benchmarks.cases.archive import folder
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.templates.paged import flash_paged

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "README.md"
CALLS = folder() / "2026-11-22-h200-calls"


@cache
def shipped() -> tuple[TuningRecord, ...]:
    return tuple(Library.of(shipped_path()).records(gpu="h200"))


def one_line(path: Path) -> str:
    return " ".join(path.read_text().split())


def results(part: str) -> list[dict[str, Any]]:
    """A part's rows, of its run and of the one that measured what there was no time for."""
    files = sorted(CALLS.glob(f"{part}.json")) + (sorted(CALLS.glob("models_gemma2.json")) if part == "models" else [])
    return [row for file in files for row in json.loads(file.read_text())[part]]


def test_figures_of_calls_are_those_of_the_committed_runs() -> None:
    grid = results("grid")
    prefill = [one["speedup"] for one in grid if one["cell"] != "decoding"]
    decoding = [one["speedup"] for one in grid if one["cell"] == "decoding"]
    mean = math.exp(sum(map(math.log, prefill)) / len(prefill))
    said = one_line(PAGE)
    assert (
        f"runs at {min(prefill):.2f} to {max(prefill):.2f} times PyTorch's rate in prefill, a forward over the whole prompt "
        f"(geometric mean {mean:.2f} of {len(prefill)}); "
        f"decoding at {min(decoding):.2f} to {max(decoding):.2f}"
    ) in said
    for figure, words in (("tokens_ratio", "takes {} times as long as with PyTorch's"), ("new_tokens_ratio", "cuDNN {} times as long")):
        ratios = [one[figure] for one in results("models") if figure in one]
        assert words.format(f"{min(ratios):.2f} to {max(ratios):.2f}") in said
    plain = [one["ratio"] for one in results("host") if one["case"] in ("plain", "causal", "gqa")]
    assert f"A plain, causal or grouped-query call costs the host {min(plain):.1f} to {max(plain):.1f} times what PyTorch's costs" in said


def test_figures_of_backwards_are_those_of_the_rows() -> None:
    gains: dict[bool, list[float]] = {True: [], False: []}
    dropped: list[float] = []
    asked: list[float] = []
    for row in shipped():
        features = row.problem.features
        # Packed ones are beside another function.
        if row.problem.direction == "bwd" and row.problem.d <= 128 and row.framework_us is not None and not features.packed:
            group = gains[features.label() in ("full", "causal")] if not features.dropout else dropped if features.mask == "none" else []
            group = asked if features.dbias or features.dslopes else group
            group.append(row.framework_us / row.median_us)
    said = one_line(PAGE)
    sizes = sorted({row.problem.d for row in shipped() if row.problem.direction == "bwd" and row.problem.d <= 128})
    assert f"tuned backwards of D = {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} are" in said
    others = [
        row.framework_us / row.median_us
        for row in Library.of(shipped_path()).records(gpu="h100", direction="bwd")
        if row.problem.d <= 128 and row.framework_us is not None and row.problem.features.label() in ("full", "causal")
    ]
    assert f"those of D = 16 to 128 on an H100 {min(others):.2f} to {max(others):.2f} times" in said
    assert f"are {min(gains[True]):.2f} to {max(gains[True]):.2f} times as fast as cuDNN's for full and causal attention" in said
    assert (
        f"{min(gains[False]):.1f} to {max(gains[False]):.1f} times as fast as PyTorch's choice with a mask, a bias, ALiBi or a window"
        in said
    )
    assert f"{min(asked):.1f} to {max(asked):.1f} times where a bias or slopes get gradients" in said
    assert f"and {min(dropped):.1f} to {max(dropped):.1f} times with dropout" in said
    wide = [
        row.framework_us / row.median_us
        for row in Library.of(shipped_path()).records(gpu="h200", direction="bwd")
        if row.problem.d == 256 and row.framework_us is not None and row.problem.features.label() in ("full", "causal")
    ]
    assert f"of D = 256 they are {min(wide):.2f} to {max(wide):.2f} times as fast as cuDNN's" in said


def test_tables_of_forwards_are_written_into_the_page_and_nothing_else_is_touched() -> None:
    before = (PAGE).read_text()
    # The fixtures are the results of a folder that stays as it is.
    rows = readme.rows_of(sorted((folder() / "2026-11-21-h200-forward").glob("forward_[pf]*.json")))
    plain, features = readme.plain_table(rows), readme.feature_table(rows)
    assert "| D=128, causal | 350 (1.09x) | 500 (1.19x)" in plain and plain.count("\n") == 7
    assert "| window 1024, causal | 454 | Flex (1.65x) | 570 | Flex (1.88x) |" in features
    after = readme.rewritten(before, [plain, features])
    assert plain in after and features in after
    assert [line for line in after.split("\n") if line[:1] != "|"] == [line for line in before.split("\n") if line[:1] != "|"]
    with pytest.raises(ValueError, match="has 0 tables"):
        readme.rewritten(after.replace("| N = 4096 |", "| n |"), [features])


def test_rates_in_the_page_are_of_cells_that_were_timed_and_right() -> None:
    [file] = (folder() / "2026-11-21-h200-forward").glob("forward_features.json")
    row = json.loads(file.read_text())["rows"][0]
    assert readme.feature_table([row]) != readme.feature_table([])
    for fault in ({"wrong": "max_abs is 1"}, {"failed": "killed"}, {"times": {}}):
        assert readme.rows_of([Faulty(row | fault)]) == []  # type: ignore[list-item]


class Faulty:
    """A file with one cell."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._row = row

    def read_text(self) -> str:
        return json.dumps({"rows": [self._row]})


def test_tables_of_forwards_are_what_one_run_wrote() -> None:
    said = (PAGE).read_text()
    rows = readme.rows_of([readme.PLAIN_RUN])
    assert readme.rewritten(said, [readme.plain_table(rows), readme.feature_table(rows)]) == said


ROOMS = folder() / "2026-11-27-h100-functions-and-pages"
PACKED = folder() / "2026-11-28-h100-packed-and-documents"


def of_run(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOMS / file).read_text())
    return found


def mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def spoken(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def test_figures_of_packed_calls_are_those_of_the_run() -> None:
    cells, said = json.loads((PACKED / "packed.json").read_text())["packed"], one_line(PAGE)
    gains, torchs, equal = [], [], []
    for name in ("fwd", "bwd"):
        times = [cell[name] for cell in cells]
        gains.append([min(one["torch"], one["fa4"]) / one["ours"] for one in times])
        torchs.append(mean([one["torch"] / one["ours"] for one in times]))
        equal.append([one["ours"] / one["dense"] for one in times if "dense" in one])
    assert (
        f"({len(cells)} cells of `{PACKED.name}`): forwards run at {mean(gains[0]):.2f} times (geometric mean; {spoken(gains[0])})" in said
    )
    assert f"backwards at {mean(gains[1]):.2f} times ({spoken(gains[1])})" in said
    assert f"at {torchs[0]:.2f} and {torchs[1]:.2f} times its rate" in said
    assert (
        f"packed forwards of equal lengths took {spoken(equal[0])} times the dense kernel's time, backwards {spoken(equal[1])} times"
        in said
    )


def test_figures_of_paged_calls_are_those_of_the_run() -> None:
    cells, said = of_run("paged-configs.json")["1 queries"], one_line(PAGE)
    spec, target = Problem(batch=1, heads=4, kv_heads=1, n_q=1, n_kv=1, d=128, d_v=128, dtype="bf16").spec(), find_target("h100")
    defaults = {cache: flash_paged.chosen(spec, target, 4, narrow=cache == "fp8") for cache in ("bf16", "fp8")}
    gains: dict[str, list[float]] = {"bf16": [], "fp8": []}
    losses = []
    for cell in cells:
        best, default = min(cell["configs"].values()), defaults[cell["cache"]].items
        losses.append(cell["configs"][" ".join(f"{name}={value}" for name, value in default)] / best)
        if cell["keys"] == 32768 and cell["sequences"] >= 16:
            gains[cell["cache"]].append(cell["dense"] / best)
    assert f"by the best of {len(cells[0]['configs'])} configs at {spoken(gains['bf16'])} times" in said
    assert f"over fp8 caches at {spoken(gains['fp8'])} times" in said
    assert (
        f"Over {len(cells)} cells the default's config takes a median of {statistics.median(losses):.2f} times as long as the best" in said
    )


def test_figures_of_paged_steps_beside_another_library_are_those_of_the_run() -> None:
    cells, said = json.loads((PACKED / "paged.json").read_text())["1 queries"], one_line(PAGE)
    plain = [cell for cell in cells if cell["cache"] == "bf16"]
    dense = {page: [cell["dense"] / cell["ours"] for cell in plain if cell["page"] in page] for page in ((1, 16, 128), (1,))}
    assert f"at {spoken([cell['fa4'] / cell['ours'] for cell in plain])} times the rate of FlashAttention-4" in said
    assert (
        f"and at {spoken(dense[1, 16, 128])} times that of our kernel for a dense cache, {min(dense[1,]):.2f} of it over pages of 1" in said
    )
    rates = [cell["GB/s"] / 1000 for cell in plain]
    assert f"ours reads {min(rates):.1f} to {max(rates):.1f} TB/s" in said


def test_figures_of_documents_are_those_of_the_run() -> None:
    rows = {row["case"]: row for row in json.loads((PACKED / "mods.json").read_text())["rows"]}
    forward, backward = (rows["document"][way] for way in ("forward", "backward"))
    assert rows["document"]["served"].startswith("packed sequences of 8 documents") and forward["packed"] / forward["ours"] > 0.99
    assert f"it takes {forward['ours']:.0f} us to FlexAttention's {forward['flex']:.0f}" in one_line(PAGE)
    assert f"and its gradients {backward['ours']:.0f} to {backward['flex']:.0f}" in one_line(PAGE)


def test_figures_of_functions_are_those_of_the_runs() -> None:
    said = one_line(PAGE)
    rows = [row for file in ("mods-d128-chained.json", "mods-d64.json") for row in of_run(file)["rows"] if "forward" in row]
    pointers = [row for row in of_run("mods-d128-pointers.json")["rows"] if str(row.get("served")).startswith("flash_fwd ")]
    ways = ("forward", "backward")
    gains, slower = ([[row[way]["flex"] / row[way]["ours"] for row in of] for way in ways] for of in (rows, pointers))
    assert f"({len(rows)} cells) run forward at {mean(gains[0]):.2f} times its rate ({spoken(gains[0])})" in said
    assert f"backward at {mean(gains[1]):.2f} times ({spoken(gains[1])})" in said
    assert f"run seven of these functions at {mean(slower[0]):.2f} and {mean(slower[1]):.2f} times its rate" in said and len(pointers) == 7
    assert {round(row["lists_us"]) for row in rows if "lists_us" in row} <= {5, 6} and "Lists of blocks take 6 us" in said


def test_figures_of_functions_over_long_sequences_are_those_of_the_runs() -> None:
    said, runs = one_line(PAGE), folder() / "2026-11-28-h100-functions"
    rows_in = {name: json.loads((runs / f"{name}.json").read_text())["rows"] for name in ("long", "autotuned-16384", "autotuned-4096")}
    rows = [row for row in rows_in["long"] if "forward" in row]
    assert {row["case"] for row in rows_in["long"] if "failed" in row} == {"relative", "bias"}
    forward, backward = ([row[way]["flex"] / row[way]["ours"] for row in rows] for way in ("forward", "backward"))
    assert f"{len(rows)} cells run forward at {mean(forward):.2f} times its rate ({spoken(forward)})" in said
    assert f"backward at {mean(backward):.2f} times ({spoken(backward)}); lists" in said
    share = max(row["lists_us"] / row["forward"]["ours"] for row in rows if "lists_us" in row)
    assert f"lists of blocks take at most {100 * share:.1f} % of a forward" in said
    for name, words in (
        ("autotuned-16384", "a causal mask at N = 16384 at {} times its rate forward and {} times backward"),
        ("autotuned-4096", "a window at N = 4096 at {} and {} times"),
    ):
        (row,) = rows_in[name]
        assert words.format(*(f"{row[way]['flex_autotuned'] / row[way]['ours']:.2f}" for way in ("forward", "backward"))) in said


def test_figures_of_biases_are_those_of_the_run() -> None:
    said, ratios = one_line(PAGE), []
    for name in ("biases.json", "biases-16384.json"):
        rows = json.loads((folder() / "2026-11-28-h100-biases" / name).read_text())["rows"]
        assert [(row["case"], row["d"]) for row in rows] == [("relative", 128), ("bias", 128), ("relative", 64), ("bias", 64)]
        ratios += [[row[way]["flex"] / row[way]["ours"] for row in rows] for way in ("forward", "backward")]
    short, short_back, long, long_back = ratios
    assert f"these run forward at {spoken(short)} times its rate at N = 4096, and at {spoken(long)} times at 16384" in said
    assert f"a bias by every distance runs at {short_back[1]:.2f} and {short_back[3]:.2f} times at D = 128 and 64" in said
    assert f"({long_back[1]:.2f} and {long_back[3]:.2f} times at 16384)" in said
    assert f"collide, at {short_back[0]:.0f} and {short_back[2]:.0f} times ({long_back[0]:.0f} and {long_back[2]:.0f})" in said


def test_figures_beside_tuned_flex_attention_are_those_of_the_run() -> None:
    rows = json.loads((folder() / "2026-11-28-h200-autotuned" / "mods.json").read_text())["rows"]
    forward, backward = ([row[way]["flex_autotuned"] / row[way]["ours"] for row in rows] for way in ("forward", "backward"))
    narrow, wide = ("causal", "window", "document", "prefix"), ("document", "prefix", "dilated")
    assert [(row["case"], row["d"], row["n"]) for row in rows] == [
        *((case, 64, 4096) for case in narrow), *((case, 128, 4096) for case in wide), ("natten", 128, 16384)
    ]  # fmt: skip
    assert (
        f"forward {mean(forward):.2f} times its rate ({spoken(forward)}), backward {mean(backward):.2f} times ({spoken(backward)})"
        in one_line(PAGE)
    )


def test_figures_of_providers_are_those_of_the_run() -> None:
    run, said = of_run("providers.json"), one_line(PAGE)
    missed = sorted(round(100 * (row["ratio"] - 1)) for row in run["choices"] if not row["right"])
    assert f"in {len(run['choices']) - len(missed)} of {len(run['choices'])} calls" in said and len(missed) == 2
    assert f"in two one that took {missed[0]} and {missed[1]} % more time" in said


SEARCHED = folder() / "2026-11-27-h100-search-and-models"


def test_figures_of_searches_are_those_of_the_runs() -> None:
    said, runs = one_line(PAGE), [json.loads(file.read_text()) for file in sorted(SEARCHED.glob("unseen-*.json"))]
    tried = [run["sweep"]["tried_of"]["flash_fwd_hopper"][0] for run in runs]
    trials = [run["trials"] for run in runs]
    assert f"after {min(trials)} to {max(trials)} trials, is the fastest of the {min(tried)} to {max(tried)} candidates" in said
    assert {run["regret"] for run in runs} == {0.0} and len(runs) == 4
    text = one_line(SEARCHED / "search.txt")
    done, waited, count = (re.search(rule, text) for rule in (r"(\d+) ms: done", r"wait for compilers ([0-9.]+)", r"(\d+) trials"))
    assert done and waited and count
    assert (
        f"takes {int(done[1]) / 1000:.1f} s from the command to its end (D = 80, N = 2200; {count[1]} trials), {float(waited[1]):.1f} s"
        in said
    )


def test_figures_of_whole_models_are_those_of_the_run() -> None:
    said, models = one_line(PAGE), json.loads((SEARCHED / "whole_models.json").read_text())["models"]
    loads = [one for model in models.values() for one in model["workloads"]]
    speedups, against = ([one[name] for one in loads] for name in ("speedup", "against_best"))
    assert f"{mean(speedups):.2f} times the rate of PyTorch's own choice (geometric mean of {len(loads)} workloads)" in said
    assert f"{mean(against):.2f} times that of the fastest of its backends for each; least {min(against):.2f}, GPT-2's" in said
    seconds = [model["seconds"] for model in models.values()]
    assert f"The command takes {min(seconds):.0f} to {max(seconds):.0f} s" in said and len(models) == 6
    assert sum(one < 0.98 for one in against) == 2


LATER = folder() / "2026-11-28-h100-models-and-packed"
FILES = ("whole_models-in-order.json", "whole_models.json")


def test_figures_of_models_that_wait_for_the_host_are_those_of_the_runs() -> None:
    said = one_line(PAGE)
    forwards = [json.loads((LATER / file).read_text())["models"]["bert-base"]["workloads"][0] for file in FILES]
    assert "takes {:.1f} ms with PyTorch's choice in one run, {:.1f} ms in the other".format(*(row["torch_ms"] for row in forwards)) in said
    for file, names, words in (
        (
            "whole_models.json",
            ("bert-base", "vit-base"),
            "take {} times as long as with PyTorch's choice, and {} times as long as with the best",
        ),
        ("whole_models-in-order.json", ("whisper-small", "sdxl-unet"), "timed in one order, {} and {}."),
    ):
        models = json.loads((LATER / file).read_text())["models"]
        rows = [row for name in names for row in models[name]["workloads"]]
        assert all(row["right"] for row in rows)
        assert words.format(*(spoken([1 / row[key] for row in rows]) for key in ("speedup", "against_best"))) in said


def test_figures_of_packed_searches_are_those_of_the_shipped_records() -> None:
    rows = [row for row in Library.of(shipped_path()).records(gpu="h100") if row.problem.features.packed]
    ratios = {way: [row.framework_us / row.median_us for row in rows if row.problem.direction == way] for way in ("fwd", "bwd")}  # type: ignore[operator]
    assert len(rows) == 29 and len(ratios["fwd"]) == 19
    words = "forwards run at {} times the rate of PyTorch's `varlen_attn`, their gradients at {} times"
    assert words.format(spoken(ratios["fwd"]), spoken(ratios["bwd"])) in one_line(PAGE)


def test_figures_of_padding_free_steps_are_those_of_the_run() -> None:
    (step,), said = json.loads((SEARCHED / "padding_free.json").read_text())["steps"], one_line(PAGE)
    beside, took = step["beside torch's varlen_attn"], step["ms"]["flattened ours"]
    assert f"on {len(step['lengths'])} sequences of {min(step['lengths'])} to {max(step['lengths'])} tokens" in said
    assert (
        f"takes {took:.0f} ms: {step['ratio']:.2f} times the rate of the padded batch ({100 * step['padding']:.0f} % of it empty)" in said
    )
    assert f"{beside:.2f} times that of the same row" in said
