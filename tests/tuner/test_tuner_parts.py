"""The parts of a search one by one: inputs, oracle checks, compile facts, the cost model, studies and worker processes."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_cases import band_of, by_the_book
from compiling import cross_compile
from hypothesis import given
from hypothesis import strategies as st
from naps import die, die_first, nap
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton import knobs

from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import DIRECTIONS, Features, Problem
from flashtune.core.records.results import Fate
from flashtune.core.system.errors import first_line
from flashtune.templates import family
from flashtune.templates.family import blocks_of_problem
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children import compile, tasks
from flashtune.tuner.children import workers as workers_module
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.replies import Checked, Compiled, Failed, Ready, Rounds
from flashtune.tuner.timing import conditions
from flashtune.tuner.timing.baseline import backend_name, pytorch_call
from flashtune.tuner.verify import correctness
from flashtune.tuner.verify.inputs import make_inputs

PROBLEM = Problem(batch=2, heads=4, kv_heads=2, n_q=100, n_kv=140, d=16, d_v=24, dtype="fp32")
EVERYTHING = Features(causal=True, alignment="bottom_right", window=(60, 0), mask="bias", dropout=True, softcap=True)


@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
@pytest.mark.parametrize("features", [Features(), Features(mask="bool"), Features(alibi=True), EVERYTHING], ids=lambda f: f.label())
def test_a_right_launch_passes_the_oracle(features: Features, dtype: DType) -> None:
    problem = replace(PROBLEM, features=features, dtype=dtype)
    full = make_inputs(problem, device="cpu", seed=1)
    found = correctness.Verifier(problem, device="cpu", seed=2, full_size=full).verdict(by_the_book)
    assert found.reason == ""
    assert 0 < found.error < 0.5


def spoiled(kind: str, **words: Any) -> Any:
    def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **given: Any) -> None:
        by_the_book(q, k, v, out, lse, **{**given, **words})
        if kind == "last row":
            out[..., -1, :] = float("nan")
        elif kind == "one element":
            out[0, 0, 0, 0] += 1e-2
        elif kind == "base 2 lse":
            lse.mul_(1.4426950408889634)
        elif kind == "finite lse":
            lse.clamp_(min=-1e30)
        elif kind == "other head":
            out.copy_(out.roll(1, 1))

    return launch


@pytest.mark.parametrize("kind", ["last row", "one element", "base 2 lse", "other head"])
def test_a_wrong_launch_is_told_apart(kind: str) -> None:
    found = correctness.Verifier(PROBLEM, device="cpu", seed=2).verdict(spoiled(kind))
    assert found.reason
    assert found.error > 1


def test_empty_rows_must_have_an_lse_of_minus_infinity() -> None:
    problem = replace(PROBLEM, features=Features(causal=True))
    assert "-inf" in correctness.Verifier(problem, device="cpu", seed=2).verdict(spoiled("finite lse")).reason


def rounded_to_e4m3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **words: Any) -> None:
    """A right launch for plain fp8 inputs whose weights, relative to the row's largest, are e4m3."""
    q_wide, k_wide, v_wide = (x.float() * f[..., None, None] for x, f in zip((q, k, v), words["descale"], strict=True))
    ratio = q.shape[1] // k.shape[1]
    scores = words["scale"] * (q_wide @ k_wide.repeat_interleave(ratio, 1).mT)
    if words["window_right"] == 0:
        scores = scores.masked_fill(~reference.visible(band_of(words), q.shape[2], k.shape[2]), float("-inf"))
    largest = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    lse.copy_((largest + total.log())[..., 0])
    out.copy_((weights.to(torch.float8_e4m3fn).float() @ v_wide.repeat_interleave(ratio, 1)) / total.clamp_min(1e-30))


@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_rounded_to_e4m3_are_right_and_a_tenth_off_is_not(causal: bool, d: int) -> None:
    problem = replace(PROBLEM, dtype="fp8", n_q=300, n_kv=300, d=d, d_v=d, features=Features(causal=causal))
    for seed in range(3):
        verifier = correctness.Verifier(problem, device="cpu", seed=seed, full_size=make_inputs(problem, device="cpu", seed=seed))
        found = verifier.verdict(rounded_to_e4m3)
        assert found.reason == "" and 0.2 < found.error < 0.8

        def off(*tensors: torch.Tensor, **words: Any) -> None:
            q, k, v = words["descale"]
            rounded_to_e4m3(*tensors, **{**words, "descale": (q, k, 1.1 * v)})

        assert "norm" in verifier.verdict(off).reason


@pytest.mark.parametrize("place", range(3), ids=["q", "k", "v"])
def test_every_factor_of_fp8_is_felt(place: int) -> None:
    def swapped(*tensors: torch.Tensor, **words: Any) -> None:
        factors = list(words["descale"])
        factors[place] = factors[place].flip(1)
        by_the_book(*tensors, **{**words, "descale": tuple(factors)})

    assert correctness.Verifier(replace(PROBLEM, dtype="fp8"), device="cpu", seed=2).verdict(swapped).reason


def test_alibis_slopes_and_diagonal_are_felt() -> None:
    problem = replace(PROBLEM, features=Features(alibi=True, alignment="bottom_right"))
    for words in ({"slopes": None}, {"diagonal": 0}):
        assert correctness.Verifier(problem, device="cpu", seed=2).verdict(spoiled("", **words)).reason
    slopes = make_inputs(problem, device="cpu", seed=0).keywords["slopes"]
    assert slopes.shape == (2, 4) and slopes[1].tolist() == [2**-2, 2**-4, 2**-6, 2**-8]


def test_sinks_are_felt_in_every_head() -> None:
    problem = replace(PROBLEM, features=Features(causal=True, sinks=True))
    verifier = correctness.Verifier(problem, device="cpu", seed=2)
    assert verifier.verdict(spoiled("")).reason == ""
    assert verifier.verdict(spoiled("", sinks=None)).reason
    for head in range(4):
        more = 0.2 * torch.eye(4)[head]

        def heavier(*tensors: torch.Tensor, more: torch.Tensor = more, **words: Any) -> None:
            by_the_book(*tensors, **{**words, "sinks": words["sinks"] + more})

        assert verifier.verdict(heavier).reason


@pytest.mark.parametrize("words", [{"diagonal": 1}, {"window_left": 59}, {"softcap": 0.0}, {"seed": 12345}, {"mask": None}], ids=str)
def test_every_argument_is_felt(words: dict[str, Any]) -> None:
    problem = replace(PROBLEM, features=EVERYTHING)
    assert correctness.Verifier(problem, device="cpu", seed=2).verdict(spoiled("", **words)).reason


@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
def test_inputs_stand_in_poisoned_memory(dtype: DType) -> None:
    inputs = make_inputs(replace(PROBLEM, dtype=dtype), device="cpu", seed=0)
    for tensor in (inputs.q, inputs.k, inputs.v):
        assert torch.isfinite(tensor.float()).all() and tensor.float().std() > 0.9
        buffer = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        assert buffer[: tensor.storage_offset()].isnan().all()
        assert buffer[tensor.storage_offset() + tensor.numel() :].isnan().all()
        assert tensor.data_ptr() % 16 == 0


@pytest.mark.parametrize("slug", ["rtx4090", "mi300x"])
def test_a_variant_compiles_for_both_makers_architectures_without_a_gpu(slug: str) -> None:
    target, chosen = find_target(slug), family("flash_fwd")
    problem = Problem(batch=1, heads=4, kv_heads=2, n_q=512, n_kv=512, d=64, d_v=64, dtype="bf16", features=Features(causal=True))
    variant = variant_of(chosen, problem.spec(), chosen.default(problem.spec(), target))
    facts = cross_compile(render(chosen, variant), f"{variant.template}_{variant.id}", problem, target)
    assert 16 <= facts.registers <= 512
    assert facts.tensor_core_ops > 0
    assert 0 < facts.shared_bytes <= target.shared_bytes_per_block
    assert facts.threads == variant.config.number("num_warps") * target.warp_size


def test_compilers_build_what_launches_a_kernel_where_there_is_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A C compiler is asked for the launcher by the process that compiles; that it fails costs nothing. Without a driver it isn't asked."""
    target, chosen = find_target("h200"), family("flash_fwd")
    problem = Problem(batch=1, heads=4, kv_heads=2, n_q=512, n_kv=512, d=64, d_v=64, dtype="bf16", features=Features(causal=True))
    source = tasks.Source.of(chosen, variant_of(chosen, problem.spec(), chosen.default(problem.spec(), target)))
    asked: list[str] = []

    def fails(name: str, src: str, *_: Any) -> str:
        asked.append(name)
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(knobs.build, "impl", fails)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    for here in (False, True):
        if here:
            monkeypatch.setattr(compile.ctypes, "CDLL", str)
        reply = tasks.compile_candidate(source, problem, target)
        assert isinstance(reply, Compiled) and reply.facts.registers
        assert asked == (["__triton_launcher"] if here else [])


def test_a_variant_that_cannot_compile_is_a_reply() -> None:
    reply = tasks.compile_candidate(
        tasks.Source(text="def counts_needed(*a):\n    raise ValueError('no')\n", stem="bad"), PROBLEM, find_target("a100")
    )
    assert reply.fate is Fate.COMPILE
    assert reply.reason == "ValueError: no"


sizes = st.integers(1, 300)
windows = st.none() | st.tuples(st.none() | st.integers(0, 200), st.none() | st.integers(0, 200))


@given(
    sizes,
    sizes,
    st.booleans(),
    st.sampled_from(["top_left", "bottom_right"]),
    windows,
    st.sampled_from([16, 64]),
    st.sampled_from([16, 32]),
)
def test_key_blocks_are_those_that_rows_see(
    n_q: int, n_kv: int, causal: bool, alignment: Any, window: Any, block_m: int, block_n: int
) -> None:
    problem = replace(PROBLEM, n_q=n_q, n_kv=n_kv, features=Features(causal=causal, alignment=alignment, window=window))
    band = reference.visible(problem.band, n_q, n_kv)
    assert problem.visible_pairs() == int(band.sum())
    expected = 0
    for start in range(0, n_q, block_m):
        seen = band[start : start + block_m].any(0).nonzero()
        expected += 0 if seen.numel() == 0 else int(seen.max()) // block_n - int(seen.min()) // block_n + 1
    assert blocks_of_problem(problem, block_m, block_n) == expected


def test_a_compilers_error_is_told_by_its_cause() -> None:
    class CompilationError(Exception):
        pass

    error = CompilationError("at 36:4:\n    gl.warp_specialize(\n    ^")
    error.__cause__ = RuntimeError("async_copy has been removed; call async_store instead\nand more")
    assert first_line(error) == "RuntimeError: async_copy has been removed; call async_store instead"


def test_a_killed_or_hanging_worker_costs_one_task() -> None:
    with Workers(jobs=1) as workers:
        assert isinstance(workers.submit("compile", nap, 0.0, limit_s=3600).reply(), Checked)
        killed = workers.submit("compile", die, signal.SIGKILL, limit_s=3600).reply()
        assert isinstance(killed, Failed) and killed.fate is Fate.COMPILE
        assert "died" in killed.reason
        hung = workers.submit("compile", nap, 3600.0, limit_s=1).reply()
        assert isinstance(hung, Failed) and hung.fate is Fate.TIMEOUT
        assert isinstance(workers.submit("compile", nap, 0.0, limit_s=3600).reply(), Checked)


def test_an_idle_worker_that_is_killed_costs_no_task() -> None:
    with Workers(jobs=1) as workers:
        for _ in range(2):
            reply = workers.submit("compile", nap, 0.0, limit_s=3600).reply()
            assert isinstance(reply, Checked)
            [pool] = workers._pools.values()
            os.kill(int(reply.error), signal.SIGKILL)
            while pool.active:
                time.sleep(0.01)


def test_a_task_whose_process_dies_before_it_begins_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workers_module._START, "compile", die_first)
    with Workers(jobs=1) as workers:
        reply = workers.submit("compile", nap, 0.0, limit_s=3600).reply()
    assert isinstance(reply, Failed) and reply.inconclusive
    assert reply.reason == "its process died before stage 'compile' began"


def test_a_task_is_handed_over_whole_before_an_interruption() -> None:
    """Python runs handlers in the main thread, whichever thread gets the signal: those that this one blocks come by another."""
    handed: list[bool] = []

    class Pool:
        active = True

        def schedule(self, *_: Any, **__: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10):
                time.sleep(0.001)
            handed.append(True)
            return Future()

    over = threading.Event()
    beside = threading.Thread(target=over.wait)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        beside.start()
        workers = Workers(jobs=1)
        workers._pools["compile", 0] = Pool()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            workers.submit("compile", nap, 0.0, limit_s=3600)
        assert handed == [True]
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
        beside.join()


def test_a_candidates_text_is_rendered_once_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is compiled and timed, in the closing race, and beside each trial while it is the fastest."""
    rendered: list[str] = []

    def counted(chosen: Any, variant: Any) -> str:
        rendered.append(variant.id)
        return render(chosen, variant)

    monkeypatch.setattr(tasks, "render", counted)
    tasks._text.cache_clear()
    chosen, target = family("flash_fwd"), find_target("a100")
    spec = Problem(batch=1, heads=2, kv_heads=2, n_q=64, n_kv=64, d=64, d_v=64, dtype="fp16").spec()
    variant = variant_of(chosen, spec, chosen.default(spec, target))
    sources = {tasks.Source.of(chosen, variant) for _ in range(3)}
    source = tasks.Source(text=render(chosen, variant), stem=f"flash_fwd_{variant.id}", variant_id=variant.id)
    assert rendered == [variant.id] and sources == {source}


def test_pytorchs_backend_is_told_by_what_it_runs() -> None:
    """A CPU has two; of a gradient both passes are seen."""
    problem = Problem(batch=1, heads=2, kv_heads=2, n_q=64, n_kv=64, d=64, d_v=64, dtype="fp16", features=Features(causal=True))
    for direction in DIRECTIONS:
        inputs = make_inputs(replace(problem, direction=direction), device="cpu", seed=0)
        for backend, name in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.MATH, "math")):
            call = pytorch_call(inputs)
            assert call is not None
            with sdpa_kernel(backend):
                assert backend_name(call) == name


def test_final_candidates_race_without_a_pytorch_whose_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its math backend holds all scores, so that memory may be too small for it alone; what broke the process is told."""
    stopwatch: Any = SimpleNamespace(samples=lambda runs, **_: [[1.0] * 15 for _ in runs])
    nothing: Any = None
    monkeypatch.setattr(tasks, "_ready", lambda *_: tasks._Bench(PROBLEM, nothing, nothing, stopwatch))
    monkeypatch.setattr(tasks, "launch_of", lambda *_: lambda: None)

    def failing(error: Exception) -> Any:
        def fail(_: object) -> None:
            raise error

        monkeypatch.setattr("flashtune.tuner.timing.baseline.pytorch_call", fail)
        return tasks.race_finalists([Any, Any], PROBLEM, find_target("h200"), 0, 0.1)

    raced = failing(RuntimeError("CUDA out of memory. Tried to allocate 64.00 GiB"))
    assert isinstance(raced, Rounds) and len(raced.times) == 2 and raced.backend is None
    broken = failing(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert isinstance(broken, Failed) and broken.poisoned
    assert isinstance(tasks.race_finalists([Any, Any], PROBLEM, find_target("h200"), 0, 0.1, False), Rounds), "which isn't called, then"


def test_preparations_neither_call_pytorch_nor_blame_a_candidate_for_a_broken_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's call builds plans or imports its compiler for seconds, for which oracles and checks beside it would wait."""
    broken: list[bool] = []

    def ready(*_: object) -> Any:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        nothing: Any = None
        return tasks._Bench(PROBLEM, nothing, nothing, nothing)

    def called(_: object) -> None:
        raise AssertionError("PyTorch isn't called before there is a winner")

    monkeypatch.setattr(tasks, "_start_triton", lambda: None)
    monkeypatch.setattr(tasks, "_ready", ready)
    monkeypatch.setattr(tasks, "_rehearse", lambda _: None)
    monkeypatch.setattr("flashtune.tuner.timing.baseline.pytorch_call", called)
    monkeypatch.setattr(conditions, "gpu_id", lambda: "0")
    hashed: list[bool] = []
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: hashed.append(True))
    assert isinstance(tasks.prepare_device(PROBLEM, find_target("h200"), 0), Ready)
    assert hashed, "the first launch would wait for it"
    broken.append(True)
    failed = tasks.prepare_device(PROBLEM, find_target("h200"), 0)
    assert isinstance(failed, Failed) and failed.poisoned
