"""Faults that small, whole and repeated launches are there to find: each is planted in a right launch, and the gate says what is wrong."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from attention_cases import by_the_book
from hopper_kernels import rendered

from flashtune.core.code.launching import launcher
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.rendering import variant_of
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.verify import correctness
from flashtune.tuner.verify.cases import BEYOND_FLOAT32, WITHIN_FLOAT32, crowd, huge
from flashtune.tuner.verify.correctness import SmallCases, Verifier, check, everywhere, oracle, places, whole
from flashtune.tuner.verify.distributions import PRESENT
from flashtune.tuner.verify.inputs import Inputs, make_inputs

PROBLEM = Problem(batch=2, heads=2, kv_heads=2, n_q=256, n_kv=256, d=16, d_v=16, dtype="fp16")
SEED = 3
TILE = 64
"""Rows of the stand-in's tiles."""

Launch = Callable[..., None]


@pytest.fixture(scope="module")
def full() -> Inputs:
    return make_inputs(PROBLEM, device="cpu", seed=SEED)


@pytest.fixture(scope="module")
def thorough(full: Inputs) -> Verifier:
    """Checks that a GPU's candidates pass."""
    return Verifier(PROBLEM, device="cpu", seed=SEED, full_size=full, thorough=True)


@pytest.fixture(scope="module")
def plain(full: Inputs) -> Verifier:
    """Small cases as they are, and slices at full size."""
    return Verifier(PROBLEM, device="cpu", seed=SEED, full_size=full, thorough=False)


def right(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, sms: int = 132, **words: Any) -> None:
    by_the_book(q, k, v, out, lse, **words)


def stale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, sms: int = 132, **words: Any) -> None:
    """Persistent programs, of which each begins its second tile with the first key block that it still holds of its first."""
    right(q, k, v, out, lse, **words)
    tiles = [(b, h, row) for b in range(q.shape[0]) for h in range(q.shape[1]) for row in range(0, q.shape[2], TILE)]
    for index in range(sms, min(2 * sms, len(tiles))):
        (b, h, row), before = tiles[index], tiles[index - sms]
        if before[:2] == (b, h):
            # The same keys are needed.
            continue
        rows, held = slice(row, row + TILE), k[b, h].clone()
        held[:32] = k[before[0], before[1], :32]
        words_here = words | {"mask": None if words["mask"] is None else words["mask"][b : b + 1, h : h + 1, rows]}
        place = (slice(b, b + 1), slice(h, h + 1))
        by_the_book(q[place][:, :, rows], held[None, None], v[place], out[place][:, :, rows], lse[place][:, :, rows], **words_here)


def test_a_right_launch_passes_whatever_is_asked_of_it(thorough: Verifier) -> None:
    found = thorough.verdict(right)
    assert found.reason == "" and 0 < found.error < 0.5


def test_equal_texts_run_the_small_cases_once_and_only_if_they_pass() -> None:
    """At another N there is nothing new to see in them."""
    few, more = (replace(PROBLEM, batch=1, n_q=n, n_kv=n) for n in (64, 128))
    assert SmallCases.serving(few, SEED) == SmallCases.serving(more, SEED) != SmallCases.serving(replace(few, n_q=1), SEED)
    assert SmallCases.serving(few, SEED) != SmallCases.serving(replace(few, features=Features(causal=True)), SEED)
    verifier = Verifier(few, device="cpu", seed=SEED, full_size=make_inputs(few, device="cpu", seed=SEED), thorough=False)
    rows: list[int] = []

    def counted(q: torch.Tensor, *tensors: torch.Tensor, **words: Any) -> None:
        rows.append(q.shape[2])
        right(q, *tensors, **words)

    first = verifier.verdict(counted, text="kernel")
    assert len(rows) > 1 and rows.pop() == 64 and not first.reason
    rows.clear()
    assert not verifier.verdict(counted, text="kernel").reason and rows == [64]
    wrong = verifier.verdict(lambda *tensors, **words: None, text="wrong")
    assert wrong.reason and verifier.verdict(lambda *tensors, **words: None, text="wrong") == wrong


def rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, sms: int = 132, **words: Any
) -> None:
    """Rows of a mask at multiples of 16 elements, whatever its stride."""
    mask = words["mask"]
    strides = [*mask.stride()[:2], mask.stride(2) // 16 * 16, mask.stride(3)]
    right(q, k, v, out, lse, sms=sms, **words | {"mask": mask.as_strided(mask.shape, strides, mask.storage_offset())})


@pytest.mark.parametrize("kind", ["bool", "bias"])
def test_rows_of_masks_at_any_stride_are_among_the_cases(kind: Literal["bool", "bias"]) -> None:
    problem = replace(PROBLEM, features=Features(mask=kind))
    verifier = Verifier(problem, device="cpu", seed=SEED, full_size=make_inputs(problem, device="cpu", seed=SEED))
    assert verifier.verdict(right).reason == "" != verifier.verdict(rounded).reason


def test_a_stale_stage_shows_where_a_program_has_a_second_tile(plain: Verifier, thorough: Verifier) -> None:
    assert plain.verdict(stale).reason == ""
    assert "programs for 1 multiprocessor" in thorough.verdict(stale).reason


def test_keys_that_one_tile_skips_are_missed_wherever_it_lies(full: Inputs, plain: Verifier, thorough: Verifier) -> None:
    seen = {(place.batch, place.head) for place in places(PROBLEM, SEED) if place.queries.stop > TILE and place.queries.start < 2 * TILE}
    b, h = next((p.batch, p.head) for p in everywhere(PROBLEM) if (p.batch, p.head) not in seen)

    def skips(*tensors: torch.Tensor, sms: int = 132, **words: Any) -> None:
        right(*tensors, **words)
        q, k, v, out, lse = tensors
        if q.shape == full.q.shape:
            place, rows = (slice(b, b + 1), slice(h, h + 1)), slice(TILE, 2 * TILE)
            by_the_book(
                q[place][:, :, rows], k[place][:, :, 32:], v[place][:, :, 32:], out[place][:, :, rows], lse[place][:, :, rows], **words
            )

    assert plain.verdict(skips).reason == ""
    assert f"(batch {b}, head {h})" in thorough.verdict(skips).reason


def test_launches_that_differ_within_the_tolerance_are_told_where_a_family_promises_the_same_bits(thorough: Verifier) -> None:
    turns = count()

    def races(*tensors: torch.Tensor, sms: int = 132, **words: Any) -> None:
        right(*tensors, **words)
        tensors[4][0, 0, 0] += 1e-5 * (next(turns) % 2)

    assert thorough.verdict(races, repeats=False).reason == ""
    assert "two launches on the same inputs differ in the LSE" in thorough.verdict(races).reason


@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "head"])
@pytest.mark.parametrize("mask", ["bool", "bias"])
def test_a_mask_of_the_first_batch_or_head_for_all_is_told(mask: Any, axis: int) -> None:
    problem = replace(PROBLEM, features=Features(mask=mask))

    def first_for_all(*tensors: torch.Tensor, **words: Any) -> None:
        right(*tensors, **words | {"mask": words["mask"].narrow(axis, 0, 1).expand(words["mask"].shape)})

    shared = make_inputs(replace(problem, n_q=40, n_kv=50), device="cpu", seed=1)
    if not (mask == "bias" and axis == 1):
        assert check(first_for_all, shared, oracle(shared, everywhere(shared.problem))).reason == ""
    verifier = Verifier(problem, device="cpu", seed=2)
    assert verifier.verdict(right).reason == ""
    assert verifier.verdict(first_for_all).reason


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a large negative number for -inf", lambda bias: bias.clamp_min(-20000.0)),
        (
            "-inf for the most negative number, which hides nothing that would show",
            lambda bias: bias.masked_fill(bias < -60000, -torch.inf),
        ),
        ("0 for the most negative number", lambda bias: bias.masked_fill((bias < -60000) & (bias > -torch.inf), 0.0)),
    ],
)
def test_what_hides_a_pair_in_a_bias_is_felt(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    problem = replace(PROBLEM, features=Features(mask="bias", causal=True))

    def changed(*tensors: torch.Tensor, **words: Any) -> None:
        right(*tensors, **words | {"mask": change(words["mask"])})

    assert bool(Verifier(problem, device="cpu", seed=2).verdict(changed).reason) == ("nothing" not in name)


def test_scores_that_outgrow_an_estimate_are_told_by_their_distribution(plain: Verifier, thorough: Verifier) -> None:
    def estimated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **words: Any) -> None:
        """Weights relative to the last keys' largest score, held to what fp16 can."""
        scores = words["scale"] * q.float() @ k.float().mT
        largest = scores[..., -64:].amax(-1, keepdim=True)
        weights = torch.exp(scores - largest).clamp_max(65504.0)
        out.copy_(weights @ v.float() / weights.sum(-1, keepdim=True))
        lse.copy_((largest + weights.sum(-1, keepdim=True).log())[..., 0])

    assert plain.verdict(estimated).reason == ""
    reasons = [correctness.compare(case.inputs, wanted, case.titles).reason for case, wanted in crowds_of(thorough, estimated)]
    assert any(name in reasons[0] for name in WITHIN_FLOAT32) and any(name in reasons[1] for name in BEYOND_FLOAT32)


def test_exponents_relative_to_a_rounded_maximum_are_told_where_scores_are_huge(plain: Verifier, thorough: Verifier) -> None:
    def rounded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, **words: Any) -> None:
        """The product with the scale isn't rounded where an instruction also subtracts the maximum, which is."""
        exponents = words["scale"] / math.log(2) * (q.double() @ k.double().mT)
        largest = exponents.float().amax(-1, keepdim=True)
        weights = torch.exp2((exponents - largest).float()).half().float()
        out.copy_(weights @ v.float() / weights.sum(-1, keepdim=True))
        lse.copy_((largest + weights.sum(-1, keepdim=True).log2())[..., 0] * math.log(2))

    assert plain.verdict(rounded).reason == ""
    (few, wanted), (large, wanted_of_large) = crowds_of(thorough, rounded)
    assert correctness.compare(few.inputs, wanted, few.titles).reason == ""
    assert "NaN" in correctness.compare(large.inputs, wanted_of_large, large.titles).reason


def crowds_of(verifier: Verifier, launch: Launch) -> list[Any]:
    """The cases of a verifier whose heads differ, after a launch."""
    found = [(case, wanted) for case, wanted in verifier.small.checks if case.titles]
    for case, _ in found:
        correctness.run(launch, case.inputs)
    return found


def test_a_crowd_has_every_distribution_and_a_right_launch_passes_each_feature() -> None:
    assert set(WITHIN_FLOAT32) | set(BEYOND_FLOAT32) == set(PRESENT)
    assert not huge(replace(PROBLEM, features=Features(mask="bias"))) and set(huge(PROBLEM)) < set(huge(replace(PROBLEM, dtype="bf16")))
    features = Features(causal=True, mask="bool", dropout=True, softcap=True, alibi=True, sinks=True)
    case = crowd(replace(PROBLEM, heads=4, features=features), ("random", "sink+8"), device="cpu", seed=1)
    inputs = case.inputs
    assert inputs.problem.heads == 4 and inputs.problem.features == features
    scores = inputs.parameters.scale * inputs.q.double() @ inputs.k.double().repeat_interleave(2, 1).mT
    raised = scores[..., 0].mean((0, 2))
    assert raised[:2].abs().max() < 1 and (raised[2:] - 8).abs().max() < 1
    assert check(right, inputs, oracle(inputs, everywhere(inputs.problem))).reason == ""


def test_outputs_too_large_to_compare_whole_are_compared_in_some_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole(PROBLEM, SEED) == everywhere(PROBLEM)
    monkeypatch.setattr(correctness, "WHOLE_SCORES", 3 * 256 * 256 + 1)
    some = whole(PROBLEM, SEED)
    assert len(some) == 3 and all(place in everywhere(PROBLEM) for place in some)
    # A gradient takes more products.
    assert len(whole(replace(PROBLEM, direction="bwd"), SEED)) == 1


@pytest.mark.parametrize(("changes", "programs"), [({}, 3), ({"ctas_per_sm": 2, "BLOCK_N": 64}, 6), ({"tiles": "one"}, 16)])
def test_persistent_programs_are_as_few_as_the_multiprocessors_they_are_told_of(changes: dict[str, Any], programs: int) -> None:
    problem = replace(PROBLEM, d=64, d_v=64, n_q=512)
    module = rendered(problem.spec(), **({"tiles": "chained"} | changes))
    grids = []
    for kernel, grid, _, _ in module.launches(*make_inputs(problem, device="meta", seed=0).arguments, **_words(problem, module)):
        grids.append((kernel.__name__, grid))
    assert grids == [("flash_fwd_hopper", (programs,))]


def _words(problem: Problem, module: Any) -> dict[str, Any]:
    """Words that `launcher` gives a module where a setting names `sms`."""
    given: list[dict[str, Any]] = []
    inputs = make_inputs(problem, device="meta", seed=0)
    counts = {"counts_needed": module.counts_needed, "counts_misses": module.counts_misses}
    heard = SimpleNamespace(**counts, launches=lambda *tensors, **words: given.append(words) or [])
    launcher(heard)(*inputs.arguments, **inputs.keywords, sms=3)  # type: ignore[arg-type]
    return given[0]


def test_what_a_family_promises_of_repeated_launches_goes_with_its_sources() -> None:
    chosen = family("flash_fwd")
    variant = variant_of(chosen, PROBLEM.spec(), chosen.default(PROBLEM.spec(), find_target("h200")))
    assert Source.of(chosen, variant).repeats
    assert not Source.of(replace(chosen, repeatable=False), variant).repeats
