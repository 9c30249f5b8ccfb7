"""Masks and scores as code over packed sequences, from the command line to the record that serves a call."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import db_samples as samples
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flashtune import dispatch
from flashtune.cli.main import main
from flashtune.core.gpu.target import find_target
from flashtune.core.problems import reference
from flashtune.core.problems.band import Window
from flashtune.core.problems.config import Config
from flashtune.core.problems.lengths import Lengths
from flashtune.core.problems.oracles import expected_at
from flashtune.core.problems.passes import Place
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.system.errors import InputError
from flashtune.db.store import Store
from flashtune.dispatch import varlen_flex
from flashtune.dispatch.call.sequences import Numbers, Packed
from flashtune.dispatch.functions import by_torch as flex_torch
from flashtune.dispatch.functions import decided as flex_decided
from flashtune.dispatch.functions import kernels as flex_kernels
from flashtune.dispatch.functions import traced as flex_functions
from flashtune.dispatch.functions.blocks import FlexCall
from flashtune.dispatch.functions.kernels import Sequences
from flashtune.dispatch.state.context import Memo
from flashtune.templates import families, family
from flashtune.templates.mods.known import Named
from flashtune.tuner import functions
from flashtune.tuner.propose.space import SearchSpace
from flashtune.tuner.timing import baseline
from flashtune.tuner.verify.correctness import SmallCases, Verifier
from flashtune.tuner.verify.inputs import make_inputs

H200 = find_target("h200")
FILE = """
import torch

prefix = torch.tensor([9, 3, 1])
table = torch.randn(2, 33, generator=torch.Generator().manual_seed(2))
rows = torch.randn(2, 40, generator=torch.Generator().manual_seed(3))


def prefix_lm(b, h, q_idx, kv_idx):
    return (kv_idx < prefix[b]) | (q_idx >= kv_idx)


def relative(score, b, h, q_idx, kv_idx):
    return score + table[h, (q_idx - kv_idx).clamp(-16, 16) + 16] * (b + 1) + rows[h, q_idx]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sparse(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 11) & (q_idx % 3 != kv_idx % 5)


def slopes(score, b, h, q_idx, kv_idx):
    return score - rows[h, b].abs() * (q_idx - kv_idx).abs()


def few(score, b, h, q_idx, kv_idx):
    return score * prefix[b + 1]
"""
SMALL = Problem(
    batch=3, heads=2, kv_heads=1, n_q=20, n_kv=20, d=16, d_v=16, dtype="fp32",
    features=Features(packed=True), lengths=Lengths.of("one_long", 3, 60),
)  # fmt: skip
WIDE = Problem(
    batch=16, heads=2, kv_heads=2, n_q=1024, n_kv=1024, d=64, d_v=64, dtype="bf16",
    features=Features(packed=True), lengths=Lengths.of("one_long", 16, 16384),
)  # fmt: skip


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    dispatch.reload()
    yield
    dispatch.reload()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "mods.py"
    path.write_text(FILE)
    return path


def coded(file: Path, problem: Problem = SMALL, *, score: str = "relative", mask: str = "prefix_lm") -> Problem:
    """The problem with these functions of the file."""
    return functions.with_functions(problem, Named(f"{file}:{score}" if score else "", f"{file}:{mask}" if mask else ""))


def tabled(file: Path, problem: Problem = WIDE) -> Problem:
    """A problem as long as it likes, by functions that read nothing by position."""
    return coded(file, problem, score="", mask="sparse")


# --- the key ----------------------------------------------------------------------------------------------------------------------


@given(
    st.text("0123456789abcdef", min_size=16, max_size=16),
    st.booleans(),
    st.sampled_from([None, (16, None), (None, 8), (16, 0)]),
    st.sampled_from(["equal", "uniform", "one_long"]),
)
def test_a_hash_and_lengths_come_back_from_the_key(name: str, causal: bool, window: Window | None, law: Any) -> None:
    features = Features(mods=name, packed=True, causal=causal, window=window)
    problem = replace(WIDE, features=features, lengths=Lengths.of(law, 16, 16384))
    key = problem.key("h100")
    assert Features.from_json(json.loads(key.features)) == features
    assert key.spread == {"equal": 1, "uniform": 2, "one_long": 8}[law]
    assert (problem.spec().mods, problem.spec().packed, problem.spec().banded) == (name, True, features.banded)
    assert f"mods-{name}" in problem.label() and ("causal" in problem.label()) is features.causal
    assert key != replace(problem, features=replace(features, mods="")).key("h100")


def test_a_band_that_is_in_a_mask_is_that_of_the_problem_as_calls_have_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = coded(file, mask="causal"), coded(file, mask="sparse")
    assert whole.features == Features(packed=True, causal=True, mods=coded(file, mask="").features.mods), "nothing of the mask is left"
    assert part.features == Features(packed=True, causal=True, window=(11, 0), mods=part.features.mods) != whole.features
    given_band = coded(file, replace(SMALL, features=Features(packed=True, window=(5, 5))), mask="sparse")
    assert given_band.features.window == (5, 5), "a caller's own band stays, and the mask is evaluated"
    assert coded(file).features == Features(packed=True, mods=coded(file).features.mods)
    monkeypatch.setattr(functions, "NAMED", {})
    functions.register([Named(f"{file}:relative", f"{file}:causal")])
    assert functions.NAMED[whole.features.mods] == Named(f"{file}:relative"), "verify finds its record"


def test_what_cannot_be_searched_is_named_in_a_sentence(file: Path) -> None:
    with pytest.raises(InputError, match="is built in: search with --causal"):
        coded(file, score="", mask="causal")
    assert coded(file, score="slopes", mask="").features.mods, "slopes of each sequence aren't built in"
    with pytest.raises(InputError, match="reads index 3 of dimension 0"):
        coded(file, score="few", mask="")
    with pytest.raises(InputError, match="reads index 48 of dimension 1"):
        coded(file, replace(SMALL, n_q=33, n_kv=33, lengths=Lengths.of("one_long", 3, 99)), mask="")
    with pytest.raises(InputError, match="stand beside no other feature"):
        coded(file, replace(SMALL, features=Features(packed=True, softcap=True)))


# --- the checks -------------------------------------------------------------------------------------------------------------------


def stand_in(
    problem: Problem, index_of: Callable[[int], int] = lambda b: b, first_of: Callable[[int], int] = lambda start: 0
) -> Callable[..., None]:
    """A launch of a pass by float64, a sequence at a time; `index_of` and `first_of` change the number and the first position of one."""
    made = functions.of_hash(problem.features.mods, "cpu")

    def attended(operands: list[Any], words: Any, b: int, start: int, diagonal: int) -> tuple[Any, Any]:
        q, k, v = operands
        heads = []
        for h in range(q.shape[1]):
            one = [x[:, slice(h, h + 1) if x.shape[1] > 1 else slice(None)] for x in (q, k, v)]

            def mods(scores: Any, h: int = h) -> Any:
                return made.scores(scores[0, 0], index_of(b), h, first_of(start))[None, None]

            band = replace(problem.band, diagonal=diagonal)
            heads.append(reference.attention(*one, scale=words["scale"], mods=mods, band=band, dtype=torch.float64))
        outs, sums = zip(*heads, strict=True)
        return torch.cat(outs, 1), torch.cat(sums, 1)

    def launch(q: Any, k: Any, v: Any, out: Any, lse: Any, *others: Any, lengths: Any, **words: Any) -> None:
        assert words["mods"](Config.of(BLOCK_M=64, BLOCK_N=64)) == made.captured, "no lists of blocks"
        of_q, of_k = (x.tolist() for x in lengths[:2])
        for b in range(len(of_q) - 1):
            here, there = slice(of_q[b], of_q[b + 1]), slice(of_k[b], of_k[b + 1])
            diagonal = words["diagonal"] * (of_k[b + 1] - of_k[b] - of_q[b + 1] + of_q[b])
            leaves = [x[:, :, part].double().requires_grad_(bool(others)) for x, part in ((q, here), (k, there), (v, there))]
            found, sums = attended(leaves, words, b, of_q[b], diagonal)
            if not others:
                out[:, :, here], lse[:, :, here] = found.to(out.dtype), sums.to(lse.dtype)
                continue
            dout, dlse, *gradients = others
            loss = (found * dout[:, :, here]).sum() + (sums * dlse[:, :, here])[sums.isfinite()].sum()
            for x, part, one in zip(gradients, (here, there, there), torch.autograd.grad(loss, leaves), strict=True):
                x[:, :, part] = one.to(x.dtype)

    return launch


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", ["prefix_lm", "sparse"])
def test_each_sequence_is_compared_with_its_own_functions(mask: str, direction: Any, file: Path) -> None:
    problem = coded(file, replace(SMALL, direction=direction), mask=mask)
    verifier = Verifier(problem, device="cpu", seed=1, full_size=make_inputs(problem, device="cpu", seed=1), thorough=True)
    for case, _ in verifier.small.checks:
        assert len(case.inputs.sequences) <= problem.batch, "a captured tensor has no more sequences"
        assert max(map(max, case.inputs.sequences)) <= problem.longest[1] == 30
    assert verifier.verdict(stand_in(problem), repeats=False).reason == ""
    faults = {"number": {"index_of": lambda b: 0}, "position": {"first_of": lambda start: min(start, 1)}}
    for name, fault in faults.items():
        assert "off by" in verifier.verdict(stand_in(problem, **fault), repeats=False).reason, name  # type: ignore[arg-type]


def test_small_cases_are_of_so_many_sequences_as_the_problem_has(file: Path) -> None:
    problem = coded(file, mask="")
    other = coded(file, replace(SMALL, batch=2, lengths=Lengths.of("one_long", 2, 60)), mask="")
    assert SmallCases.serving(problem, 1) != SmallCases.serving(other, 1)


def test_the_baseline_is_one_call_of_flex_attention_with_a_document_mask(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention as module

    monkeypatch.setattr(baseline, "compiled_flex", lambda *, dynamic: module.flex_attention)
    for mask in ("prefix_lm", "sparse", ""):
        problem = coded(file, mask=mask)
        inputs = make_inputs(problem, device="cpu", seed=4)
        call = baseline.pytorch_call(inputs)
        assert call is not None and baseline.pytorch_call(inputs, "math") is None
        found: Any = call()
        for index, (part, _) in enumerate(inputs.parts()):
            start = sum(n for n, _ in inputs.sequences[:index])
            [right] = expected_at(part.problem, part.operands, part.parameters, [Place(batch=index, head=1)])
            torch.testing.assert_close(found[0, 1, start : start + part.problem.n_q].double(), right["out"], atol=1e-5, rtol=1e-5)


# --- the search -------------------------------------------------------------------------------------------------------------------


def test_packed_functions_are_searched_without_a_gpu(file: Path, tmp_path: Path) -> None:
    """Takes as long as a search's processes need to start, so it is of gradients alone; test_packed_search has the forward."""
    path = str(tmp_path / "a.sqlite")
    words = ["--gpu-name", "a100", "--packed", "one_long", "--d", "16", "--n", "16", "--batch", "2", "--heads", "2", "--dtype", "fp16"]
    words += ["--direction", "bwd", "--score-mod", f"{file}:relative", "--mask-mod", f"{file}:causal"]
    result = CliRunner().invoke(main, ["search", *words, "--trials", "1", "--seed", "1", "--db", path, "--json"])
    assert result.exit_code == 0, result.output
    [row] = json.loads(result.stdout)
    assert (row["template"], row["fate"], row["source"]) == ("flash_bwd", "correct", "predicted"), "the interpreter checked it"
    with Store.open(path, writable=False) as store:
        [record] = store.records()
    assert (record.key.spread, record.problem.features.packed, record.problem.features.causal) == (1, True, True)
    for unmeasured, kind, reason in ((False, "default", "no record has"), (True, "predicted", "predicted, not measured, with")):
        with dispatch.use(path, alone=True, unmeasured=unmeasured):
            explained = json.loads(CliRunner().invoke(main, ["explain", "--json", *words]).stdout)
        assert explained["kind"] == kind and f"{reason} these functions" in explained["reason"]


def test_every_family_with_places_for_functions_is_searched(file: Path) -> None:
    for direction in ("fwd", "bwd"):
        space = SearchSpace(families(), tabled(file, replace(WIDE, direction=direction)), H200)
        taking = {one.name for one in families().values() if one.functions and one.direction == direction}
        assert tuple(space.families) and set(space.families) == taking


# --- the record that serves -------------------------------------------------------------------------------------------------------


def configs_of(problem: Problem, template: str | None = None) -> list[Config]:
    """Configs of a family that serve packed sequences, by its own rules for their sizes."""
    kind = family(template or f"flash_{problem.direction}_hopper")
    found = (kind.resized(config, problem, H200) for config in kind.starts(problem.spec(), H200))
    return list(dict.fromkeys(config for config in found if kind.unfit(config, problem.spec(), H200) is None))


def database(path: Path, *made: tuple[Problem, Config], framework_us: float = 600.0) -> Path:
    """Measured records of these, of Hopper's families."""
    found = []
    for place, (problem, config) in enumerate(made):
        template = f"flash_{problem.direction}_hopper"
        outcome = samples.outcome(f"{place:016x}", 300.0, template=template, config=config, finalist=True, rank=1)
        found.append(samples.result(outcome, framework_us=framework_us, of=problem))
    return samples.write(path, tuple(found))


class Loaded(SimpleNamespace):
    """A kernel that isn't here; plans refer to it weakly."""


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of an H200 that are never loaded."""

    def kernel(choice: Any, device: Any, target: Any) -> Any:
        spec, config = choice.spec, choice.config
        code = SimpleNamespace(module=SimpleNamespace(accepts=lambda *given: True))
        return Loaded(variant=choice.variant, spec=spec, config=config, choice=choice, record=choice.record, failed="", code=code)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flex_kernels.devices, "target_of", lambda device: H200)
    monkeypatch.setattr(Memo, "surroundings", lambda memo, device, of: (H200, families(), memo.pool(of.key("h200"), H200)))
    monkeypatch.setattr(flex_kernels, "kernels_here", lambda made={}: made)
    monkeypatch.setattr(flex_kernels, "loaded_kernel", kernel)
    monkeypatch.setattr(flex_decided, "_chosen_in", lambda memo, chosen={}: chosen)
    monkeypatch.setattr(flex_torch, "why_torch", lambda *given, **words: None)


def call_of(
    file: Path, *, score: str = "", mask: str = "sparse", n: int = 1024, batch: int = 16, trains: bool = False, **words: Any
) -> Any:
    """A call of `attention_varlen` and its explanation, half of whose tokens are in one sequence, on the pretended GPU."""
    made = functions.loaded(Named(f"{file}:{score}" if score else "", f"{file}:{mask}"), "cpu")
    q, k, v = (torch.empty(n * batch, 2, 64, dtype=torch.bfloat16).as_subclass(OnGpu).requires_grad_(trains) for _ in range(3))
    bounds = torch.zeros(batch + 1, dtype=torch.int32)
    numbers = Numbers(n * batch // 2, n * batch // 2, 0.125, -1, -1, True, 0.0, 0.0, True, False)._replace(**words)
    packed = Packed(q, k, v, bounds, bounds)
    with pytest.MonkeyPatch.context() as patch:
        # Captured tensors are on the CPU, as these are.
        patch.setattr(
            flex_functions,
            "functions_of",
            lambda score_mod, mask_mod, device, sizes: flex_functions._traced(score_mod, mask_mod, torch.device("cpu")),
        )
        found = varlen_flex.call_of(packed, numbers, made.score_mod, made.mask_mod)
    assert isinstance(found, FlexCall), found
    return found, varlen_flex.explained_with_functions(found, packed)


@pytest.mark.parametrize(("score", "mask"), [("", "sparse"), ("slopes", "causal"), ("", "prefix_lm")])
def test_a_call_takes_the_config_of_the_record_that_a_search_of_its_functions_made(
    score: str, mask: str, file: Path, tmp_path: Path, pretended: None
) -> None:
    problem, gradients = (
        functions.with_functions(
            # Positions and numbers of sequences reach as far as the file's tensors.
            replace(SMALL, batch=3, heads=2, kv_heads=2, d=64, d_v=64, dtype="bf16", direction=direction),
            Named(f"{file}:{score}" if score else "", f"{file}:{mask}"),
        )
        for direction in ("fwd", "bwd")
    )
    problem, gradients = (
        replace(WIDE, direction=one.direction, features=one.features, lengths=WIDE.lengths) for one in (problem, gradients)
    )
    config, of_gradients = configs_of(problem)[-1], configs_of(gradients)[-1]
    with dispatch.use(database(tmp_path / "a.sqlite", (problem, config), (gradients, of_gradients)), alone=True):
        call, said = call_of(file, score=score, mask=mask, trains=True)
        assert call.kernel.config == config and call.kernel.variant.spec == problem.spec()
        assert call.kernels.backward.config == of_gradients and call.kernels.backward.variant.spec == gradients.spec()
        assert (said.kind, said.record_key, said.median_us) == ("exact", problem.key("h200"), 300.0)
        assert "of the record" in said.reason and "measured with these functions: 300.0 us" in said.reason
        assert said.backward.kind == "exact" and said.backward.config == of_gradients
        again, _ = call_of(file, score=score, mask=mask, trains=True)
        assert again.kernel is call.kernel
        _, near = call_of(file, score=score, mask=mask, n=512)
        assert near.kind == "near_n" and near.config == config
        assert dispatch.explain_problem(problem, "h200").config == config
        assert dispatch.explain_problem(replace(WIDE, features=Features(packed=True, mods="1" * 16)), "h200").record_key is None
    with dispatch.use(samples.write(tmp_path / "e.sqlite", ()), alone=True):
        call, said = call_of(file, score=score, mask=mask)
        assert call.kernel.record is None and said.kind == "default" and "not measured" in said.reason


def test_the_nearest_lengths_count(file: Path, tmp_path: Path, pretended: None) -> None:
    skewed, even = tabled(file), tabled(file, replace(WIDE, lengths=Lengths.of("equal", 16, 16384)))
    first, second = configs_of(skewed)[:2]
    with dispatch.use(database(tmp_path / "a.sqlite", (skewed, first), (even, second)), alone=True):
        assert call_of(file)[0].kernel.config == first
        assert call_of(file, max_q=1024, max_k=1024)[0].kernel.config == second


def test_kernels_serve_though_pytorch_was_faster_in_a_search(file: Path, tmp_path: Path, pretended: None) -> None:
    problem = tabled(file)
    config = configs_of(problem)[3]
    with dispatch.use(database(tmp_path / "a.sqlite", (problem, config), framework_us=100.0), alone=True):
        call, said = call_of(file)
        assert call.kernel.config == config and said.framework_us == 100.0
        assert dispatch.explain_problem(problem, "h200").kind == "exact"


def test_bits_that_repeat_are_of_no_record_whose_bits_vary(file: Path, tmp_path: Path, pretended: None) -> None:
    problem = tabled(file, replace(WIDE, direction="bwd"))
    config = configs_of(problem)[0]
    with dispatch.use(database(tmp_path / "a.sqlite", (problem, config)), alone=True):
        assert call_of(file, trains=True)[0].kernels.backward.config == config
        found = call_of(file, trains=True, deterministic=True)[0].kernels.backward
        assert (found.variant.template, found.record) == ("flash_bwd", None)


@pytest.mark.parametrize("unmeasured", [False, True])
def test_a_predicted_record_serves_where_unmeasured_ones_may(unmeasured: bool, file: Path, tmp_path: Path, pretended: None) -> None:
    problem = tabled(file)
    config = configs_of(problem)[3]
    outcome = samples.outcome("0" * 16, 300.0, template="flash_fwd_hopper", config=config, source="predicted", finalist=True, rank=1)
    path = samples.write(tmp_path / "a.sqlite", (samples.result(outcome, framework_us=None, of=problem),))
    with dispatch.use(path, alone=True, unmeasured=unmeasured):
        call, said = call_of(file)
        assert (call.kernel.config == config) is unmeasured and said.kind == ("predicted" if unmeasured else "default")


def test_a_call_without_a_gpu_looks_no_record_up(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memo, "pool", lambda *given, **words: pytest.fail("the interpreter's times mean nothing"))
    monkeypatch.setattr(flex_kernels, "loaded_kernel", lambda choice, *_: f"no {choice.kind} here")
    x = torch.empty(8, 2, 64, dtype=torch.float16)
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    sequences = Sequences((bounds, bounds, None), Numbers(8, 8, 0.125, -1, -1, True, 0.0, 0.0, True, False))
    mods = functions.loaded(Named("", f"{file}:sparse"), "cpu").mods("fwd")
    dispatch.reload()
    assert flex_kernels.kernel_of("fwd", x, x, x, mods, sequences=sequences) == "no default here"
    dispatch.reload()
