"""Packed and paged calls against a stand-in for the driver: every launch of a call gets that call's own tensors, also at repeated calls."""

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from driven import Driven, config_of, drive, serve_by
from launched import RECORDS
from test_dispatch_gradient_plans import Decoding, library  # noqa: F401
from test_dispatch_misled import PROGRAMS, Counts
from triton.runtime.errors import OutOfResources

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import settles
from flashtune.core.pytorch import devices
from flashtune.core.system.errors import InputTypeError
from flashtune.dispatch.plans import kernels
from flashtune.dispatch.plans.misprediction import MISPREDICTIONS
from flashtune.dispatch.plans.program import Program
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.rows import packed as packed_calls
from flashtune.dispatch.rows.kernel import Kernel
from flashtune.dispatch.state import context
from flashtune.templates import family

BOUNDS = (0, 100, 230)
FAMILIES = {"hopper": ("flash_fwd_hopper", "flash_bwd_hopper"), "pointers": ("flash_fwd", "flash_bwd")}
HANDED_ON: set[str] = {"delta", "lse_2", "sums", "part_out", "part_sums"}
"""Scratch memory that one launch of a call writes and another one reads."""


@pytest.fixture
def driven(library: Decoding, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:  # noqa: F811
    yield drive(library, monkeypatch)
    monkeypatch.undo()
    context.current().forget()


def packed(rows: int, *names: str) -> dict[str, torch.Tensor]:
    """Tensors of a call by their names in kernels, with these beside those that all calls have."""
    found = {
        "q": torch.zeros(rows, 4, 64).half().requires_grad_(), "k": torch.zeros(240, 2, 64).half().requires_grad_(),
        "v": torch.zeros(240, 2, 64).half().requires_grad_(), "cu_q": torch.tensor(BOUNDS), "cu_k": torch.tensor(BOUNDS).int(),
    }  # fmt: skip
    more = {"used_k": torch.tensor([100, 7]), "slopes": torch.zeros(2, 4), "sinks": torch.zeros(4, requires_grad=True)}
    return found | {name: more[name] for name in names}


def attend(given: dict[str, torch.Tensor], **words: Any) -> Any:
    named = {"seqused_k": "used_k", "alibi_slopes": "slopes", "sinks": "sinks"}
    words |= {word: given[name] for word, name in named.items() if name in given}
    tensors = [given[name] for name in ("q", "k", "v", "cu_q", "cu_k")]
    return dispatch.attention_varlen(*tensors, 130, 130, enable_gqa=True, return_lse=True, **words)


def checked(launches: list[tuple[str, dict[str, int]]], given: dict[str, torch.Tensor], *, copied: str = "") -> set[str]:
    """The tensors that launches got, all of them the call's own but for one that is `copied`. What launches hand on to each other is the
    same memory for all, and no tensor's."""
    handed_on = HANDED_ON if len(launches) > 1 else set[str]()
    known, scratch = {name: x.data_ptr() for name, x in given.items()}, dict[str, int]()
    found: set[str] = set()
    for kernel, addresses in launches:
        for parameter, address in addresses.items():
            name = parameter.removesuffix("_ptr").removesuffix("_desc")
            # Hopper's backward reads the LSE that its first kernel padded.
            name = "lse_2" if (kernel, parameter) == ("flash_bwd_hopper", "lse_desc") else name
            assert address, f"{parameter} has no address"
            found.add(name)
            if name in handed_on:
                assert scratch.setdefault(name, address) == address, f"{parameter} isn't handed on"
            if name in handed_on or name == copied:
                assert address not in known.values(), f"{parameter} is a tensor's"
            elif name in known:
                assert address == known[name], f"{parameter} isn't the call's"
    assert len(set(scratch.values())) == len(scratch)
    return found


@pytest.mark.parametrize(
    ("names", "words"), [((), {}), (("sinks",), {"is_causal": True}), (("used_k", "slopes"), {}), ((), {"scale": -0.5})], ids=str
)
@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_launches_get_the_tensors_of_their_call(
    driven: Driven, kind: str, names: tuple[str, ...], words: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_by(monkeypatch, *FAMILIES[kind])
    if kind == "hopper" and names == ("used_k", "slopes"):
        names = ("sinks",)
    # The third call has another number of rows, and the last one the first one's plan, with gradients and without.
    for rows in (230, 230, 250, 230):
        for trains in (True, False):
            given = packed(rows, *names)
            with torch.set_grad_enabled(trains):
                (out, lse), launches = driven.since(partial(attend, given, **words))
                # Forwards need a positive scale: the sign goes into a copy.
                moved = "q" if "scale" in words else ""
            assert checked(launches, given | {"out": out, "lse": lse}, copied=moved) >= {
                "q",
                "k",
                "v",
                "out",
                "lse",
                "cu_q",
                "cu_k",
                *names,
            }
            if not trains:
                continue
            dout, dlse = torch.zeros_like(out), torch.zeros_like(lse)
            asked = [given[name] for name in ("q", "k", "v")]
            grads, launches = driven.since(partial(torch.autograd.grad, (out, lse), asked, (dout, dlse)))
            made = dict(zip(("dq", "dk", "dv"), grads, strict=True))
            tensors = given | {"out": out, "lse": lse, "dout": dout, "dlse": dlse} | made
            assert checked(launches, tensors) >= {"q", "k", "v", "out", "dout", "lse", "dlse", "cu_q", "cu_k", *made}


def test_gradients_keep_their_launches_for_tensors_that_lie_alike_alone(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[Kernel] = []
    launch = Kernel.launch
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *given: looked_up.append(kernel) or launch(kernel, *given))
    serve_by(monkeypatch, *FAMILIES["pointers"])
    given = packed(230)
    # One key head for all: rows of a stride of 0.
    given |= {name: torch.zeros(240, 1, 64).half().requires_grad_() for name in ("k", "v")}

    def step(pack: Any = None) -> int:
        views = given | {name: given[name].expand(-1, 2, -1) for name in ("k", "v")}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, pack) if pack else contextlib.nullcontext():
            out, _ = attend(views)
            before = len(looked_up)
            torch.autograd.grad(out.sum(), [given[name] for name in ("q", "k", "v")])
        return len(looked_up) - before

    assert [step(), step()] == [1, 0]
    # Saved tensors come back with other strides.
    assert step(lambda x: x.contiguous()) == 1


@pytest.mark.parametrize("packs", [False, True])
def test_merged_parts_are_launched_by_the_driver_each_with_its_own_memory(driven: Driven, packs: bool) -> None:
    def parts(rows: int, *, trained: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = (rows, 4, 64) if packs else (1, 4, rows, 64)
        return [(torch.zeros(shape, requires_grad=trained), torch.zeros((*shape[:-3], 4, rows))) for _ in range(3)]

    def said(given: list[tuple[torch.Tensor, torch.Tensor]], found: Any) -> dict[str, int]:
        outs, lses = zip(*given, strict=True)
        names = [*[(f"outs.{i}", x) for i, x in enumerate(outs)], *[(f"lses.{i}", x) for i, x in enumerate(lses)]]
        return {name: x.data_ptr() for name, x in (*names, ("out", found[0]), ("lse", found[1]))}

    for rows in (8, 8, 12, 8):
        given = parts(rows)
        found, [(kernel, got)] = driven.since(partial(dispatch.merge, given, packed=packs))
        assert kernel == "merge_kernel" and got == said(given, found)
        assert [(x.shape, x.stride()) for x in found] == [(x.shape, x.stride()) for x in given[0]]
    assert driven.tried == ["merge_kernel"] * 2
    given = parts(8, trained=True)
    (out, lse), [(_, got)] = driven.since(partial(dispatch.merge, given, packed=packs))
    assert got == said(given, (out, lse))
    _, [(kernel, got)] = driven.since(partial(torch.autograd.grad, out.sum(), [one for one, _ in given]))
    assert kernel == "gradients_kernel" and got["out"] == out.data_ptr() and "dlse" not in got
    with pytest.raises(InputTypeError, match="packed must be"):
        dispatch.merge(parts(8), packed=1)  # type: ignore[arg-type]


def test_packed_calls_take_shipped_machine_code_and_compile_what_it_does_not_take(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [one for one in RECORDS if one.problem.features.packed and one.problem.features.causal and one.problem.d == 64]
    chosen = [next(one for one in records if one.problem.direction == direction) for direction in ("fwd", "bwd")]

    def ranked(problem: Any, *_: Any, **__: Any) -> Any:
        for one in chosen:
            if one.problem.direction == problem.direction:
                yield Choice("near_n", problem.spec(), "", one, family(one.outcome.template), one.outcome.config)

    def loaded(*_: object) -> Any:
        loads.append(None)
        return load(*_)

    load, loads = kernels.load, list[None]()
    monkeypatch.setattr(kernels, "load", loaded)
    monkeypatch.setattr(packed_calls, "rank_packed", ranked)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    # Code is shipped for 32-bit bounds alone.
    for dtype, compiles in ((torch.int32, False), (torch.int32, False), (torch.int64, True)):
        bounds = torch.tensor([0, 100, 512], dtype=dtype)
        q, k, v = (torch.zeros(512, 4, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        (out, _), launches = driven.since(partial(attend, {"q": q, "k": k, "v": v, "cu_q": bounds, "cu_k": bounds}, is_causal=True))
        _, others = driven.since(partial(torch.autograd.grad, out.sum(), (q, k, v)))
        assert "flash_fwd_hopper" in dict(launches) and "flash_bwd_hopper" in dict(others)
        assert bool(driven.tried) == bool(loads) == compiles


@pytest.fixture
def mispredicted(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Packed calls are served by a record whose kernel has a frozen row maximum; the memory that it counts in."""
    settling = [one for one in RECORDS if one.problem.features.packed and settles(one.outcome.config)]
    record = next(one for one in settling if one.fallback is not None and one.problem.d == 64)
    other = record.fallback.config if record.fallback else None

    def ranked(problem: Any, *_: Any, **__: Any) -> Any:
        yield Choice("near_n", problem.spec(), "", record, family(record.outcome.template), record.outcome.config, fallback=other)

    found = Counts()
    monkeypatch.setattr(packed_calls, "rank_packed", ranked)
    monkeypatch.setattr(MISPREDICTIONS, "of", lambda device, key: found.misprediction)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    return found


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fallback_serves_packed_calls_from_when_on_their_softmax_was_mispredicted(
    driven: Driven, mispredicted: Counts, deterministic: bool
) -> None:
    words: Any = {"is_causal": True, "deterministic": deterministic}
    plain: Any = {"is_causal": True}
    q, bounds = torch.zeros(512, 4, 64, dtype=torch.bfloat16), torch.tensor([0, 100, 512], dtype=torch.int32)
    given = q, q, q, bounds, bounds, 412, 412

    def said() -> Any:
        return dispatch.explain_varlen(*given, **words)

    def kernels_of(rows: int) -> list[Any]:
        made: list[Any] = []
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(Program, "run", lambda program, *_: made.append(program))
            for _ in range(rows):
                dispatch.attention_varlen(*given, **words)
        return [config_of(one) for one in made]

    settled, fallback = said().config, dispatch.explain_varlen(*given, **plain).twin
    assert settles(settled) and fallback is not None and not settles(fallback)
    assert said().twin == (None if deterministic else fallback)
    assert kernels_of(3) == [settled] * 3
    mispredicted.misprediction.programs = PROGRAMS
    mispredicted.launch(PROGRAMS, 2)
    assert kernels_of(3) == [settled if deterministic else fallback] * 3
    with torch.no_grad():
        dispatch.attention_varlen(*given, **plain)
    assert dispatch.explain_varlen(*given, **plain).twin_serves
    assert said().twin_serves is not deterministic
    dispatch.reload()
    # Chosen anew, as after other calls, the latch is the same.
    assert kernels_of(2) == [settled if deterministic else fallback] * 2


def test_a_fallback_for_packed_calls_that_cannot_be_built_leaves_them_to_what_serves(driven: Driven, mispredicted: Counts) -> None:
    # No machine code is shipped for 64-bit bounds.
    q, bounds = torch.zeros(512, 4, 64, dtype=torch.bfloat16), torch.tensor([0, 100, 512])
    given: Any = q, q, q, bounds, bounds, 412, 412
    wanted = dispatch.explain_varlen(*given, is_causal=True).config
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        dispatch.attention_varlen(*given, is_causal=True)
        mispredicted.launch(PROGRAMS, 2)
        driven.fails["flash_fwd_hopper"] = OutOfResources(300_000, 232_448, "shared memory")
        for _ in range(3):
            before = len(driven.launches)
            dispatch.attention_varlen(*given, is_causal=True)
            assert len(driven.launches) == before + 1
    assert len([one for one in warned if "shared memory" in str(one.message)]) == 1
    said = dispatch.explain_varlen(*given, is_causal=True)
    assert said.config == wanted and not said.twin_serves


@pytest.mark.parametrize("splits", [None, 1, 3])
def test_paged_launches_get_the_tensors_of_their_call(driven: Driven, splits: int | None) -> None:
    for narrow in (False, True, False):
        for _ in range(2):
            dtype = torch.float8_e4m3fn if narrow else torch.float16
            given = {"q": torch.zeros(2, 4, 64).half(), "k": torch.zeros(9, 16, 2, 64).to(dtype), "v": torch.zeros(9, 16, 2, 64).to(dtype)}
            given |= {
                "cu_q": torch.arange(3),
                "table": torch.zeros(2, 300).int(),
                "used_k": torch.tensor([4000, 9]),
                "sinks": torch.zeros(4),
            }
            factors = {"k_descale": torch.ones(2, 2), "v_descale": torch.ones(2)} if narrow else {}
            words: dict[str, Any] = {"seqused_k": given["used_k"], "block_table": given["table"], "sinks": given["sinks"], **factors}
            tensors, words["num_splits"] = [given[name] for name in ("q", "k", "v", "cu_q")], splits

            call = partial(dispatch.attention_varlen, *tensors, None, 1, 4800, enable_gqa=True, return_lse=True, **words)
            (out, lse), launches = driven.since(call)
            known = given | factors | {"out": out, "lse": lse}
            found = checked(launches, known)
            assert found >= {"q", "k", "v", "out", "lse", "cu_q", "table", "used_k", "sinks", *factors}
            assert (splits == 1) or {"part_out", "part_sums"} <= found


def over_pages(
    queries: int, *, sequences: int = 3, page: int = 16, cache: torch.dtype = torch.float16, heads: int = 32, d: int = 64
) -> Any:
    """Tensors of a call whose sequences have equally many queries, and its arguments beside them."""
    rows, bounds = sequences * queries, torch.arange(sequences + 1) * queries
    given = {"q": torch.zeros(rows, heads, d).half(), "cu_q": bounds, "table": torch.zeros(sequences, 9).int()}
    given |= {name: torch.zeros(9, page, heads // 4, d).to(cache) for name in ("k", "v")} | {"used_k": torch.full((sequences,), 99)}
    words = {"seqused_k": given["used_k"], "block_table": given["table"], "enable_gqa": True, "return_lse": True}
    return given, [*(given[name] for name in ("q", "k", "v", "cu_q")), None, queries, 99], words


@pytest.mark.parametrize("names", [(), ("slopes", "sinks")])
def test_chunks_over_pages_get_the_tensors_of_their_call_on_hopper(driven: Driven, names: tuple[str, ...]) -> None:
    # The third call has another number of rows, and the last one the first one's plan; a negative scale goes into a copy of the queries.
    for queries, scale in ((300, 0.1), (300, 0.1), (310, 0.1), (300, 0.1), (300, -0.1)):
        given, tensors, words = over_pages(queries)
        given |= {name: x for name, x in (("slopes", torch.zeros(3, 32)), ("sinks", torch.zeros(32))) if name in names}
        words |= {word: given[name] for word, name in (("alibi_slopes", "slopes"), ("sinks", "sinks")) if name in names}
        (out, lse), launches = driven.since(partial(dispatch.attention_varlen, *tensors, scale=scale, **words))
        assert [name for name, _ in launches] == ["flash_fwd_hopper"]
        found = checked(launches, given | {"out": out, "lse": lse}, copied="q" if scale < 0 else "")
        assert found >= {"q", "k", "v", "out", "lse", "cu_q", "table", "used_k", "counter", *names}


@pytest.mark.parametrize(
    ("queries", "more", "words", "template"),
    [
        (300, {}, {}, "flash_fwd_hopper_paged"),
        (300, {"page": 256, "d": 256}, {"is_causal": True, "softcap": 2.0}, "flash_fwd_hopper_paged"),
        (128, {"sequences": 16}, {"window_size": (16, 0)}, "flash_fwd_hopper_paged"),
        (64, {"sequences": 16}, {}, "flash_paged"),
        (1, {"sequences": 200}, {}, "flash_paged"),
        (20, {"sequences": 200}, {}, "flash_paged"),
        # Fewer tiles than a third of the multiprocessors.
        (300, {"sequences": 1, "heads": 8}, {}, "flash_paged"),
        (300, {}, {"num_splits": 1}, "flash_paged"),
        (300, {"page": 8}, {}, "flash_paged"),
        (300, {"page": 48}, {}, "flash_paged"),
        (300, {"cache": torch.float8_e4m3fn}, {}, "flash_paged"),
        # A page may have the first key of a window and the last of all.
        (300, {}, {"window_size": (15, 0)}, "flash_paged"),
        (300, {}, {"window_size": (40, 0), "causal_alignment": "top_left"}, "flash_paged"),
    ],
    ids=str,
)
def test_chunks_that_fill_a_hopper_gpu_are_its_own_kernels(
    driven: Driven, queries: int, more: dict[str, Any], words: dict[str, Any], template: str
) -> None:
    _, tensors, beside = over_pages(queries, **more)
    assert dispatch.explain_varlen(*tensors, **beside, **words).template == template
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "target_of", lambda device: find_target("b200"))
        context.current().forget()
        assert dispatch.explain_varlen(*tensors, **beside, **words).template == "flash_paged"


def test_pages_that_hoppers_kernel_cannot_take_here_are_served_by_plain_pointers(driven: Driven) -> None:
    given, tensors, words = over_pages(300)
    driven.fails["flash_fwd_hopper"] = OutOfResources(300_000, 232_448, "shared memory")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            (out, lse), launches = driven.since(partial(dispatch.attention_varlen, *tensors, **words))
            assert launches[0][0] == "attention_forward"
            checked(launches, given | {"out": out, "lse": lse})
    assert len([one for one in warned if "flash_fwd_hopper_paged" in str(one.message)]) == driven.tried.count("flash_fwd_hopper") == 1
    assert dispatch.explain_varlen(*tensors, **words).template == "flash_paged"


def test_a_kernel_that_cannot_be_built_gives_way_to_the_next_family_and_is_remembered(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_by(monkeypatch, *FAMILIES["hopper"], *FAMILIES["pointers"])
    driven.fails |= dict.fromkeys(("flash_fwd_hopper", "flash_bwd_hopper"), OutOfResources(300_000, 232_448, "shared memory"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for rows in (230, 230, 250):
            given = packed(rows)
            (out, lse), launches = driven.since(partial(attend, given))
            assert [name for name, _ in launches] == ["attention_forward"]
            checked(launches, given | {"out": out, "lse": lse})
            asked = [given[name] for name in ("q", "k", "v")]
            _, launches = driven.since(partial(torch.autograd.grad, out.sum(), asked))
            assert [name for name, _ in launches] == ["row_deltas", "key_gradients", "query_gradients"]
    said = [str(one.message) for one in warned if "flashtune" in str(one.message)]
    assert len(said) == 2 and all("failed on cpu and is skipped from now on: OutOfResources" in one for one in said)
    assert driven.tried.count("flash_fwd_hopper") == 1
    found = dispatch.explain_varlen(*[given[name] for name in ("q", "k", "v", "cu_q", "cu_k")], 130, 130, enable_gqa=True)
    assert found.template == "flash_fwd" and "out of resource" in found.refused[0]
    assert found.backward is not None and found.backward.template == "flash_bwd"
