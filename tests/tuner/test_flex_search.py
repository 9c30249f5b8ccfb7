"""The search for FlexAttention's kernel options: its space, its masks, its loop with stand-in processes, and the command."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from flashtune.cli.main import main
from flashtune.core import flex_attention, flex_options, reference
from flashtune.core.errors import InputError, NoKernelFound
from flashtune.core.lengths import Lengths
from flashtune.core.problem import Features, Problem
from flashtune.core.results import Fate, Measurement, Provenance
from flashtune.core.target import find_target
from flashtune.db.library import Library
from flashtune.db.store import Store
from flashtune.tuner import machine
from flashtune.tuner.propose.flex import Options, Proposals, finals, refuse_untunable, space
from flashtune.tuner.replies import Failed, FlexCompiled, FlexReady, FlexTimed
from flashtune.tuner.search import flex
from flashtune.tuner.timing.flex import FlexBench, eager, mask_mod_of

H100 = find_target("h100")
BWD = Problem(
    batch=16, heads=16, kv_heads=16, n_q=1024, n_kv=1024, d=64, d_v=64, dtype="bf16", direction="bwd", features=Features(packed=True),
    lengths=Lengths.of("uniform", 16, 16384),
)  # fmt: skip
PROVENANCE = Provenance(flashtune="0", torch="2.11.0", triton="3.6.0", created_at="2026-11-27T10:00:00+00:00", seed=3)


@pytest.mark.parametrize("which", ["fwd", "bwd"])
@pytest.mark.parametrize(("d", "dtype"), [(64, "bf16"), (128, "bf16"), (256, "fp16"), (64, "fp32")])
def test_every_point_of_the_space_is_one_that_a_database_may_hold(which: str, d: int, dtype: Any) -> None:
    points = space(which, replace(BWD, d=d, d_v=d, dtype=dtype), H100)
    assert len(points) > 20 and len({tuple(sorted(one.items())) for one in points}) == len(points)
    assert all(flex_options.refusal(one) is None and flex_options.fits(one, (128, 128)) for one in points)


@pytest.mark.parametrize("d", [64, 128])
def test_pytorchs_defaults_on_an_h100_are_in_the_space(d: int) -> None:
    keys = tuple(flex_options.BACKWARD)
    assert dict(zip(keys, (64, 128, 128, 64, 8, 3), strict=True)) in space("bwd", replace(BWD, d=d, d_v=d), H100)
    forward = (128, 128, 4, 3) if d == 64 else (128, 64, 8, 3)
    assert dict(zip(flex_options.FORWARD, forward, strict=True)) in space("fwd", replace(BWD, d=d, d_v=d), H100)


def test_proposals_are_valid_begin_with_the_defaults_and_never_repeat() -> None:
    proposals = Proposals("bwd", BWD, H100, seed=1)
    assert proposals.next() == dict(zip(flex_options.BACKWARD, (64, 128, 128, 64, 8, 3), strict=True))
    seen: list[Options] = []
    for _ in range(60):
        options = proposals.next()
        assert options is not None and options not in seen and flex_options.refusal(options) is None
        seen.append(options)
        proposals.tell(options, 1.0 + 0.1 * options["bwd_num_stages"])
    assert proposals.best[0][0] == pytest.approx(1.1) and proposals.left > 0
    assert sum(one["bwd_num_stages"] == 1 for one in seen[-20:]) > 7, "the sampler follows what was fast"


def test_the_closing_race_joins_the_fastest_of_each_kernel() -> None:
    parts = [Proposals(which, BWD, H100, seed=0) for which in ("fwd", "bwd")]
    for one in parts:
        for ratio in (0.9, 0.8, 0.7, 0.6):
            one.tell(one.next() or {}, ratio)
    found = list(finals(parts))
    assert len(found) == 4 and all(flex_options.refusal(one) is None and len(one) == 10 for one in found)
    assert found[0] == {**parts[0].best[0][1], **parts[1].best[0][1]}


def dense(problem: Problem) -> torch.Tensor:
    """Visible pairs, each sequence's band by the reference, beside each other."""
    total = problem.batch if problem.lengths is not None else 1
    seen = torch.zeros(problem.n_q * total, problem.n_kv * total, dtype=torch.bool)
    row = column = 0
    for n_q, n_kv in problem.sequences() if problem.lengths is not None else ((problem.n_q, problem.n_kv),):
        band = problem.features.band(n_q, n_kv)
        seen[row : row + n_q, column : column + n_kv] = reference.visible(band, n_q, n_kv, torch.device("cpu"))
        row, column = row + n_q, column + n_kv
    return seen


@pytest.mark.parametrize(
    ("features", "sizes"),
    [
        ({"causal": True}, (1, 150, 150)),
        ({"causal": True, "alignment": "bottom_right"}, (1, 130, 150)),
        ({"window": (7, 3)}, (1, 150, 150)),
        ({"packed": True}, (5, 30, 30)),
        ({"packed": True, "causal": True}, (5, 30, 30)),
        ({"packed": True, "causal": True, "window": (9, 0), "alignment": "bottom_right"}, (5, 30, 44)),
    ],
)
def test_the_mask_is_that_of_the_problem(features: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    batch, n_q, n_kv = sizes
    lengths = Lengths.of("lognormal", batch, batch * n_kv) if features.get("packed") else None
    words: dict[str, Any] = {"features": Features(**features), "lengths": lengths, "direction": "fwd"}
    problem = replace(BWD, batch=batch, n_q=n_q, n_kv=n_kv, **words)
    mod = mask_mod_of(problem, torch.device("cpu"))
    wanted = dense(problem)
    assert mod is not None
    i, j = (torch.arange(n) for n in wanted.shape)
    zero = torch.zeros((), dtype=torch.long)
    found = torch.vmap(torch.vmap(lambda i, j: mod(zero, zero, i, j), (None, 0)), (0, None))(i, j)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "changes", [{"features": Features(alibi=True)}, {"features": Features(mask="bool")}, {"n_q": 64}, {"dtype": "fp8"}]
)
def test_other_problems_are_refused_in_a_sentence(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="FlexAttention"):
        refuse_untunable(replace(BWD, **{"lengths": None, "features": Features(), "direction": "fwd", **changes}))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kernel_options: Any, block_mask: Any, **_: Any) -> torch.Tensor:
    """A stand-in for the compiled FlexAttention: some options don't compile, others are wrong."""
    if kernel_options and kernel_options["fwd_num_stages"] == 5:
        raise RuntimeError("out of resource: shared memory, Required: 1, Hardware limit: 0\nmore")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense(SMALL)[None, None])
    return out if not kernel_options or kernel_options["fwd_num_stages"] != 4 else out + (out.detach() > 0.5) * 0.2


SMALL = replace(BWD, batch=4, heads=2, kv_heads=2, n_q=40, n_kv=40, d=16, d_v=16, dtype="fp32", lengths=Lengths.of("uniform", 4, 160))


def test_candidates_are_compared_with_the_defaults_before_they_are_timed() -> None:
    bench = FlexBench(SMALL, 1 << 20, "cpu", 0, compiled=attention)
    options: dict[str, int] = dict.fromkeys(flex_options.FORWARD, 4) | {"fwd_num_stages": 3}
    assert bench.load(options) == {} and set(bench.candidate) == {"fwd", "bwd", "call"}
    assert len(bench.candidate["bwd"]()) == len(bench.candidate["call"]()) == 3
    assert (
        bench.load(options | {"fwd_num_stages": 5})["fwd"] == "RuntimeError: out of resource: shared memory, Required: 1, Hardware limit: 0"
    )
    failed = bench.load(options | {"fwd_num_stages": 4})
    assert failed == {"fwd": "its numbers differ from those of FlexAttention's defaults"} and set(bench.candidate) == {"bwd"}


def test_whole_calls_are_timed_in_turns() -> None:
    times = eager([lambda: time.sleep(0.002), lambda: None], 0.01, lambda: None)
    assert len(times[0]) == len(times[1]) >= 5 and Measurement.of(times[0]).median_us > Measurement.of(times[1]).median_us


class StandIns:
    """Stand-ins for the processes, with a known best; some options fail, and some hang."""

    def __init__(self, wide: int = 4, gain: float = 0.6) -> None:
        self.wide, self.gain = wide, gain
        self.waves: list[int] = []
        self.timing = False
        self.compiled: list[Options] = []

    def prepare(self) -> int:
        return self.wide

    def compile(self, wave: Sequence[Options]) -> list[FlexCompiled | Failed]:
        assert not self.timing and len(wave) <= self.wide
        assert all(flex_options.refusal(one) is None for one in wave)
        self.waves.append(len(wave))
        self.compiled = list(wave)
        return [self._compiled(options) for options in wave]

    def _compiled(self, options: Options) -> FlexCompiled | Failed:
        if options.get("bwd_num_stages") == 5:
            return Failed(fate=Fate.TIMEOUT, reason="killed after 90 s in stage 'device'")
        return FlexCompiled(failed={"bwd": "RuntimeError: no"} if options.get("bwd_num_warps") == 2 else {})

    def time(self, place: int, options: Options, budget_s: float, *, calls: bool) -> FlexTimed | Failed:
        assert self.compiled[place] == options
        away = abs(math.log2(options.get("bwd_BLOCK_N1", 64)) - 6) + abs(options.get("bwd_num_stages", 2) - 2)
        ratios = {"fwd": 0.9 + 0.01 * options["fwd_num_stages"], "bwd": self.gain + 0.1 * away}
        ratios["call"] = sum(ratios.values()) / 2
        kept = {which: ratio for which, ratio in ratios.items() if calls or which != "call"}
        if options.get("bwd_num_warps") == 2:
            del kept["bwd"]
        return FlexTimed(
            times={which: (Measurement.of([1000.0 * ratio] * 12), Measurement.of([1000.0] * 12)) for which, ratio in kept.items()}
        )


def tune(processes: StandIns, problem: Problem = BWD, **words: Any) -> flex.FlexFound:
    return flex.tune(processes, problem, H100, PROVENANCE, **{"trials": 40, "deadline": None, **words})


def test_the_search_finds_the_best_options_and_the_database_serves_them_back(tmp_path: Path) -> None:
    processes = StandIns()
    seen: list[tuple[int, float | None]] = []
    found = tune(processes, listener=lambda tried, best: seen.append((tried, best)))
    assert found.tried == 40 and processes.waves == [4] * 11 and seen[-1][0] == 40
    assert found.options is not None and found.options["bwd_BLOCK_N1"] == 64 and found.options["bwd_num_stages"] == 2
    assert found.ratios["bwd"] == pytest.approx(0.6) and found.ratios["call"] < 0.8 and found.result is not None
    with Store.open(tmp_path / "own.sqlite", writable=True) as store:
        store.save(found.result)
    [record] = Library.of(tmp_path / "own.sqlite").winners()
    assert record.tunes_flex and record.outcome.config.as_dict() == dict(sorted(found.options.items())) and record.problem == BWD
    assert record.provider_times() == {"flex": record.outcome.call_us} and {one.call_us for one in record.providers} == {
        record.outcome.call_us,
        1000.0,
    }


def test_options_that_gain_nothing_are_not_stored() -> None:
    found = tune(StandIns(gain=1.2))
    assert found.result is None and found.options is not None


def test_a_deadline_ends_the_waves_after_the_first() -> None:
    processes = StandIns()
    assert tune(processes, deadline=time.monotonic() - 1.0).tried == 4 and len(processes.waves) == 2


def test_the_space_of_a_forward_ends_the_search() -> None:
    forward = replace(BWD, direction="fwd", d=256, d_v=256)
    processes = StandIns(wide=16)
    found = tune(processes, forward, trials=10_000)
    assert found.tried == len(space("fwd", forward, H100)) and found.options is not None and set(found.options) == set(flex_options.FORWARD)


def test_a_search_in_which_nothing_works_says_why() -> None:
    class Broken(StandIns):
        def _compiled(self, options: Options) -> FlexCompiled | Failed:
            return Failed(fate=Fate.TIMEOUT, reason="killed after 90 s in stage 'device'")

    with pytest.raises(NoKernelFound, match=r"no options of FlexAttention's work for .* on h100: killed after 90 s"):
        tune(Broken(), trials=8)


class Machine:
    """A stand-in for `Workers`, which notes the tasks of each process, and answers those of preparation."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.seen = list(replies), list[tuple[str, int]]()

    def submit(self, crew: str, task: Any, *arguments: Any, limit_s: float, device: int = 0) -> Any:
        self.seen.append((task.__name__, device))
        answer = self.replies.pop(0) if self.replies else FlexReady(processes=9)
        return SimpleNamespace(reply=lambda: answer)


def test_each_process_prepares_before_it_compiles_and_as_many_run_as_fit() -> None:
    machine = Machine(FlexReady(processes=3))
    processes = flex.FlexProcesses(machine, BWD, H100, 0, 8)  # type: ignore[arg-type]
    assert processes.prepare() == 3 and machine.seen == [("prepare_flex", place) for place in range(3)]
    machine.seen.clear()
    processes.compile([{"a": 1}, {"a": 2}])
    assert machine.seen == [("prepare_flex", 0), ("prepare_flex", 1), ("compile_flex", 0), ("compile_flex", 1)]
    processes.time(1, {"a": 2}, 0.1, calls=False)
    assert machine.seen[-1] == ("time_flex", 1)
    failing = Machine(Failed(fate=Fate.RUNTIME, reason="OutOfMemoryError: CUDA out of memory"))
    with pytest.raises(NoKernelFound, match=r"FlexAttention can't take .*out of memory.*: free the GPU"):
        flex.FlexProcesses(failing, BWD, H100, 0, 8).prepare()  # type: ignore[arg-type]


def search(*words: str, **settings: Any) -> Any:
    return CliRunner().invoke(main, ["search", "--implementation", "flex", "--d", "64", "--dtype", "bf16", *words], **settings)


def test_without_a_gpu_the_command_says_so_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_may_be_present", lambda: False)
    for words in ([], ["--gpu-name", "h100"], ["--predict", "--gpu-name", "h100"]):
        found = search(*words)
        assert found.exit_code == 4
        said = "FlexAttention is tuned only by measuring, and this machine has no GPU: run the search where the GPU is"
        assert said in found.stderr and len(found.stderr.strip().splitlines()) == 1


def test_the_command_tunes_stores_and_prints(monkeypatch: pytest.MonkeyPatch, own_database: Path) -> None:
    monkeypatch.setattr(machine, "gpu_may_be_present", lambda: True)
    monkeypatch.setattr(machine, "local_gpus", lambda: (machine.LocalGpu(name=H100.name, target=H100),))
    monkeypatch.setattr(flex, "FlexProcesses", lambda workers, problem, target, seed, most: StandIns())
    words = ["--n", "1024", "--batch", "16", "--packed", "uniform", "--full", "--direction", "bwd", "--trials", "8", "--seed", "1"]
    found = search(*words, "--json")
    assert found.exit_code == 0, found.output
    [row] = json.loads(found.stdout)
    assert row["stored"] and row["gain"]["bwd"] > 1.2 and row["default_call_us"] == 1000.0 and row["direction"] == "bwd"
    [record] = Library.of(own_database).winners()
    assert record.key.spread == 2 and record.outcome.config.as_dict() == dict(sorted(row["options"].items()))
    shown = search(*words, env={"COLUMNS": "200"})
    assert "FlexAttention's defaults over tuned options: forward" in shown.stdout and "(stored)" in shown.stdout
    assert "8 candidates of FlexAttention's options" in shown.stderr
    listed = CliRunner().invoke(main, ["show", "--db", str(own_database), "--json"])
    assert json.loads(listed.stdout)[0]["providers_call_us"] == {"flex": pytest.approx(record.outcome.call_us, abs=1e-3)}
    checked = CliRunner().invoke(main, ["verify", "--db", str(own_database)])
    assert checked.exit_code == 4 and "1 skipped: flex is no kernel of flashtune" in checked.stderr
    refused = search(*words, "--template", "flash_fwd")
    assert refused.exit_code == 2 and "--template is for kernels of flashtune" in refused.stderr


@pytest.mark.parametrize(("batches", "heads"), [(None, None), (2, None), (2, 3)])
def test_blocks_of_large_masks_are_found_in_strips(batches: int | None, heads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device, sizes = torch.device("cpu"), (batches, heads, 700, 900)

    def seen(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return ((i + 150 * b >= j) & (j >= 300 * h)) | (i > 500)

    whole = flex_attention.block_mask(seen, sizes, device)
    for rows in (1, 200, 300):
        monkeypatch.setattr(flex_attention, "PAIRS_AT_ONCE", rows * 900 * (batches or 1) * (heads or 1))
        found = flex_attention.block_mask(seen, sizes, device)
        assert (found.mask_mod, found.seq_lengths, found.BLOCK_SIZE) == (whole.mask_mod, whole.seq_lengths, whole.BLOCK_SIZE)
        pairs = [
            (one.to_dense(), one.full_kv_num_blocks, one.kv_num_blocks, one.full_q_num_blocks, one.q_num_blocks) for one in (found, whole)
        ]
        assert all(torch.equal(*both) for both in zip(*pairs, strict=True))
