"""Checks on a GPU what calls must keep to beyond numbers: threads, streams, CUDA graphs, torch.compile, views, first calls.

    python benchmarks/check_calls.py            # one line a check; exit code 1 where one fails

Each check compares whole outputs with torch's own or with a call made alone. What needs no GPU is in tests/test_dispatch_*.py.
"""

import argparse
import math
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

from flashtune import dispatch
from flashtune.dispatch.plans.drawing import random_bits

CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Adds a check; its docstring is the line that is printed."""
    CHECKS.append(function)
    return function


def inputs(b: int = 2, h: int = 8, n: int = 384, d: int = 128, dtype: torch.dtype = torch.bfloat16, **words: Any) -> list[torch.Tensor]:
    """Random q, k, v."""
    return [torch.randn(b, h, n, d, device="cuda", dtype=dtype, **words) for _ in range(3)]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raises where they differ by more than rounding to 16 bits does."""
    torch.testing.assert_close(ours.float(), theirs.float(), atol=3e-2, rtol=3e-2)


def prepared_plans() -> int:
    """How many plans launch through the driver."""
    from flashtune.dispatch.resolve import layers

    return sum(getattr(plan, "program", None) is not None for plan in layers.current().plans.values())


@check
def kernels_are_launched_through_the_driver() -> None:
    """plain, causal, shared heads, mask, bias, window, soft cap, ALiBi, sinks, dropout, fp8 and decoding go through prepared launches"""
    dispatch.reload()
    q, k, v = inputs()
    mask = torch.rand(384, 384, device="cuda") > 0.3
    slopes = torch.rand(8, device="cuda")
    calls: list[dict[str, Any]] = [
        {}, {"is_causal": True}, {"attn_mask": mask}, {"window": 64}, {"softcap": 20.0}, {"alibi_slopes": slopes}, {"sinks": slopes},
        {"dropout_p": 0.1, "seed": 3},
        {"attn_mask": torch.randn(1, 8, 384, 384, device="cuda", dtype=torch.bfloat16)}, {"return_lse": True},
    ]  # fmt: skip
    for words in calls:
        served = dispatch.explain(q, k, v, **words).kind
        before = prepared_plans()
        ours = dispatch.attention(q, k, v, **words)
        again = dispatch.attention(q, k, v, **words)
        ours, again = (x[0] if isinstance(x, tuple) else x for x in (ours, again))
        assert torch.equal(ours, again), f"{list(words)}: two calls differ"
        if not {"softcap", "alibi_slopes", "sinks", "dropout_p", "window", "return_lse"} & set(words):
            close(ours, sdpa(q, k, v, **words))
        assert served == "framework" or prepared_plans() == before + 1, f"{list(words)} (served: {served}) went through Triton"
    few = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    close(dispatch.attention(few, k, v), sdpa(few, k, v))
    fp8 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    wanted = sdpa(*(x.to(torch.bfloat16) for x in fp8))
    close(dispatch.attention(*fp8), wanted)
    close(dispatch.attention(*fp8, q_descale=2.0, k_descale=torch.full((), 0.5, device="cuda")), wanted)


@check
def biases_that_the_copy_engine_does_not_take() -> None:
    """biases whose rows or first element aren't aligned, whole or repeated, go through prepared launches, each call with its own"""
    dispatch.reload()
    q, k, v = inputs(2, 8, 333, 64)
    shapes = ((1, 8, 333, 333), (2, 8, 333, 333), (2, 1, 333, 333), (333, 333), (2, 8, 1, 333))
    for shape in shapes:
        before, biases = prepared_plans(), [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        served = dispatch.explain(q, k, v, attn_mask=biases[0]).kind
        for bias in biases:
            close(dispatch.attention(q, k, v, attn_mask=bias), sdpa(q, k, v, attn_mask=bias))
        assert served == "framework" or prepared_plans() == before + 1, f"{shape} (served: {served}) went through Triton"
    k, v = (x[:, :, :328].contiguous() for x in (k, v))
    shifted = torch.randn(333 * 328 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(333, 328)
    close(dispatch.attention(q, k, v, attn_mask=shifted), sdpa(q, k, v, attn_mask=shifted.clone()))


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """`work` of each index in a thread of its own, all at once; raises what the first that failed raised."""
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@check
def threads_with_streams_of_their_own() -> None:
    """16 threads on 8 streams share one plan, and every output is what the call gives alone"""
    streams = [torch.cuda.Stream() for _ in range(8)]
    sets = [inputs(1, 8, 512, 128) for _ in range(16)]
    wanted = [dispatch.attention(*one, is_causal=True) for one in sets]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(streams[index % 8]):
            outs = [dispatch.attention(*sets[index], is_causal=True) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
        if not all(torch.equal(out, wanted[index]) for out in outs):
            wrong.append(index)

    in_threads(16, work)
    assert not wrong, f"threads {wrong} got wrong outputs"


@check
def first_calls_of_sixteen_threads_at_once() -> None:
    """16 new threads make a first call of one signature at once, none with a CUDA context of its own"""
    dispatch.reload()
    q, k, v = inputs(1, 4, 640, 64)
    wanted = sdpa(q, k, v)
    torch.cuda.synchronize()
    barrier = threading.Barrier(16)

    def work(index: int) -> None:
        barrier.wait()
        for _ in range(3):
            close(dispatch.attention(q, k, v), wanted)

    in_threads(16, work)


@check
def graphs_capture_first_and_later_calls() -> None:
    """a CUDA graph captures a first call and a remembered one; replays follow new inputs, beside an eager loop on another stream"""
    for known in (False, True):
        dispatch.reload()
        q, k, v = inputs(2, 8, 1024, 64)
        if known:
            dispatch.attention(q, k, v, is_causal=True)
        # What torch itself sets up at a first call isn't part of the check.
        sdpa(q, k, v, is_causal=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dispatch.attention(q, k, v, is_causal=True)
        other = inputs(2, 8, 1024, 64)
        stream = torch.cuda.Stream()
        alone = dispatch.attention(*other, is_causal=True)
        for _ in range(5):
            for x in (q, k, v):
                x.normal_()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                beside = [dispatch.attention(*other, is_causal=True) for _ in range(20)]
            for _ in range(20):
                graph.replay()
            torch.cuda.synchronize()
            close(out, sdpa(q, k, v, is_causal=True))
            assert all(torch.equal(x, alone) for x in beside)
        from flashtune.dispatch.resolve import layers

        assert not layers.current().broken, f"a capture marked kernels broken: {layers.current().broken}"


@check
def dropout_in_a_graph_draws_anew() -> None:
    """unseeded dropout can be captured, and replays draw new masks"""
    dispatch.reload()
    q, k, v = inputs(1, 4, 256, 64)
    # What torch itself sets up at a first call isn't part of the check.
    sdpa(q, k, v, dropout_p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatch.attention(q, k, v, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert not torch.equal(first, out)


def recomputed(leaves: list[torch.Tensor], grad: torch.Tensor) -> None:
    """Raises where dropout that is computed again at these sizes, which torch trains, has other gradients than computed once."""

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = dispatch.attention(*tensors, dropout_p=0.1)
        return out

    def step() -> list[torch.Tensor]:
        out, more = attend(*leaves), torch.nn.functional.dropout(grad, 0.3)
        return [out.detach(), more, attend(*leaves).detach(), *torch.autograd.grad(out, leaves, grad)]

    said = dispatch.explain(*leaves, dropout_p=0.1)
    assert said.kind == "framework" and said.backward is None, f"torch is to train these sizes: {said.reason}"
    with torch.no_grad():
        said = dispatch.explain(*leaves, dropout_p=0.1)
    assert said.kind != "framework", f"a kernel is to serve without gradients: {said.reason}"
    device = leaves[0].device
    torch.manual_seed(1)
    wanted = step()
    torch.manual_seed(1)
    assert torch.equal(sdpa(*leaves, dropout_p=0.1), wanted[0]), "torch doesn't train these sizes"
    torch.manual_seed(1)
    out = checkpoint(attend, *leaves, use_reentrant=True)
    out.backward(grad)
    alike((out.detach(), *(x.grad for x in leaves)), (wanted[0], *wanted[3:]))  # type: ignore[arg-type]
    # By hand: twice from the same state, in this thread and in one of its own.
    torch.manual_seed(2)
    state = torch.cuda.get_rng_state()
    bits = random_bits(None, device)[0]
    with dispatch.use(unmeasured=True):
        seeded = gradients(dispatch.attention, leaves, grad, dropout_p=0.1, seed=bits)
    torch.cuda.set_rng_state(state)
    with torch.no_grad():
        first = [attend(*leaves), torch.nn.functional.dropout(grad, 0.3), attend(*leaves)]
    after = torch.cuda.get_rng_state()
    assert not torch.equal(first[0], first[2])

    def again(_: int) -> None:
        torch.cuda.set_rng_state(state)
        found = step()
        assert torch.equal(torch.cuda.get_rng_state(), after), "the generator moved on in another way"
        alike(tuple(found[:3]), tuple(first))
        alike((found[0], *found[3:]), seeded)

    again(0)
    in_threads(1, again)
    torch.manual_seed(3)
    fresh = attend(*leaves)
    torch.manual_seed(3)
    assert torch.equal(fresh, sdpa(*leaves, dropout_p=0.1)), "torch no longer trains what nobody computed without gradients"


@check
def dropout_is_computed_again_alike_where_torch_trains() -> None:
    """unseeded dropout at sizes that torch trains: by a reentrant checkpoint, and by hand after kernels computed it without gradients"""
    dispatch.reload()
    for sizes in ((1, 8, 512, 128), (4, 16, 512, 64)):
        leaves = inputs(*sizes, requires_grad=True)
        recomputed(leaves, torch.randn_like(leaves[0]))


@check
def compiled_calls() -> None:
    """torch.compile, with and without CUDA graphs of its own, gives what eager gives"""
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        dispatch.reload()
        compiled = torch.compile(lambda q, k, v: dispatch.attention(q * 2, k, v, is_causal=True) + 1, fullgraph=True, mode=mode)
        for _ in range(5):
            q, k, v = inputs(2, 8, 512, 128)
            with torch.no_grad():
                close(compiled(q, k, v), sdpa(q * 2, k, v, is_causal=True) + 1)


@check
def eager_calls_after_graph_trees() -> None:
    """what a first call allocates while graph trees warm up stays whole after them"""
    torch._dynamo.reset()
    dispatch.reload()
    compiled = torch.compile(lambda q, k, v: dispatch.attention(q, k, v, is_causal=True), mode="reduce-overhead")
    q, k, v = inputs(1, 16, 2048, 128)
    with torch.no_grad():
        for _ in range(4):
            compiled(q, k, v)
        junk = [torch.full((1 << 20,), 7, dtype=torch.int32, device="cuda") for _ in range(16)]
        for _ in range(3):
            close(dispatch.attention(q, k, v, is_causal=True), sdpa(q, k, v, is_causal=True))
            close(compiled(q, k, v), sdpa(q, k, v, is_causal=True))
        del junk


@check
def layouts_in_turn() -> None:
    """calls of one shape whose tensors differ in alignment and strides each get what they can be read with"""
    b, h, n, d = 2, 4, 200, 64
    for _ in range(2):
        for shift in (0, 1, 3, 8):
            for which in range(3):
                tensors = inputs(b, h, n, d)
                room = torch.zeros(b * h * n * d + 8, device="cuda", dtype=torch.bfloat16)
                moved = room[shift : shift + b * h * n * d].view(b, h, n, d).copy_(tensors[which])
                tensors[which] = moved
                close(dispatch.attention(*tensors, is_causal=True), sdpa(*(x.clone() for x in tensors), is_causal=True))
    packed = torch.randn(2, 300, 3, 8, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    close(dispatch.attention(q, k, v), sdpa(q, k, v))


@check
def views_that_are_only_marked_negative() -> None:
    """a view with the negative bit counts as what it stands for"""
    z = torch.randn(2, 4, 64, 32, dtype=torch.complex64, device="cuda")
    q = z.conj().imag
    k, v = (torch.randn(2, 4, 64, 32, device="cuda") for _ in range(2))
    torch.testing.assert_close(dispatch.attention(q, k, v), sdpa(q.resolve_neg(), k, v), atol=2e-2, rtol=2e-2)


@check
def other_devices_and_streams() -> None:
    """a call runs on the current stream: work enqueued before it is waited for"""
    q, k, v = inputs(4, 16, 1024, 64)
    stream = torch.cuda.Stream()
    dispatch.attention(q, k, v)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q2 = q * 2
        out = dispatch.attention(q2, k, v)
    stream.synchronize()
    close(out, sdpa(q * 2, k, v))


@check
def misled_calls_go_over_to_the_twin_and_come_back() -> None:
    """calls whose scores mislead a kernel that settles maxima are served by its twin, without waiting, and its own again later"""
    from flashtune.core.problem import Features, Problem
    from flashtune.dispatch.plans.misled import LONGEST_PERIOD
    from flashtune.tuner.verify.distributions import redistribute
    from flashtune.tuner.verify.inputs import make_inputs

    dispatch.reload()
    problem = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
    normal, misled = (make_inputs(problem, device="cuda", seed=0) for _ in range(2))
    redistribute(misled, "misled-100%")
    data = {name: (x.q, x.k, x.v) for name, x in (("normal", normal), ("misled", misled))}
    expected = {name: sdpa(*tensors, is_causal=True) for name, tensors in data.items()}

    def call(name: str, count: int) -> None:
        for _ in range(count):
            out = dispatch.attention(*data[name], is_causal=True)
        close(out, expected[name])

    def told() -> dispatch.Explanation:
        torch.cuda.synchronize()
        return dispatch.explain(*data["normal"], is_causal=True)

    call("normal", 50)
    assert told().twin is not None, "the row that serves has no twin"
    assert (told().misled_programs, told().went_over, told().twin_serves) == (0, 0, False), "random numbers mislead nothing"
    call("misled", 1)
    assert told().misled_programs > 0
    # Of the second fifty the first sees what the others counted while the host was ahead.
    call("misled", 50)
    call("misled", 50)
    assert (told().went_over, told().twin_serves) == (1, True)
    before, counted = torch.are_deterministic_algorithms_enabled(), told().misled_programs
    torch.use_deterministic_algorithms(True)
    try:
        call("misled", 2)
    finally:
        torch.use_deterministic_algorithms(before)
    assert told().misled_programs > counted, "in deterministic mode one kernel serves"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatch.attention(*data["misled"], is_causal=True)
    counted = told().misled_programs
    graph.replay()
    assert told().misled_programs == counted, "the graph has the twin"
    close(out, expected["misled"])
    in_threads(4, lambda place: call("misled" if place % 2 else "normal", 100))
    call("normal", 5 * LONGEST_PERIOD)
    assert not told().twin_serves, "it came back"
    assert "again" in told().reason


def gradients(attend: Callable[..., Any], leaves: list[torch.Tensor], grad: torch.Tensor, **words: Any) -> tuple[torch.Tensor, ...]:
    """The output of a call and its gradients by q, k and v."""
    out = attend(*leaves, **words)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


def in_float32(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    hidden: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention by its definition, in 16 bits at the end alone."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.mT / q.shape[3] ** 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias
    scores = scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : v.shape[2]] @ v).to(q.dtype)


def alike(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...]) -> None:
    """Raises where the norms of differences are more than what rounding to 16 bits does."""
    for a, b in zip(ours, theirs, strict=True):
        gap = float((a.float() - b.float()).norm() / b.float().norm())
        assert gap < 2e-2, f"they differ by {gap:.3g} of their norm"


def prepared_backwards() -> list[bool]:
    """For each plan of a backward whether it launches through the driver."""
    from flashtune.dispatch.resolve import layers

    found = [plan.backward for plan in layers.current().plans.values() if hasattr(plan, "backward")]
    return [getattr(plan, "program", None) is not None for backward in found for plan, _ in backward._plans.values()]


@check
def training_steps_are_launched_through_the_driver() -> None:
    """gradients of plain, causal, mask, bias, window, soft cap and ALiBi calls, strided or with shared heads, by prepared launches"""
    row = torch.arange(384, device="cuda")
    ahead = row[:, None] - row
    mask = torch.rand(2, 1, 384, 384, device="cuda") > 0.3
    bias = torch.randn(1, 8, 384, 384, device="cuda", dtype=torch.bfloat16)
    slopes = torch.rand(8, device="cuda")
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"is_causal": True}, {"hidden": ahead < 0}),
        ({"attn_mask": mask}, {"hidden": ~mask}),
        ({"attn_mask": bias}, {"bias": bias.float()}),
        ({"is_causal": True, "window": 64}, {"hidden": (ahead < 0) | (ahead > 64)}),
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"alibi_slopes": slopes}, {"bias": -slopes[:, None, None] * ahead.abs()}),
    ]
    with dispatch.use(unmeasured=True):
        for d in (64, 128):
            dispatch.reload()
            leaves = inputs(d=d, requires_grad=True)
            # Rows inside of heads, as a model's projections leave them.
            turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]
            grad = torch.randn_like(turned[0])
            few = [leaves[0], *(x.detach()[:, :2].contiguous().requires_grad_() for x in leaves[1:])]
            for some in (leaves, turned, few):
                for words, plain in cases:
                    wanted = gradients(partial(in_float32, **plain), some, grad)
                    for _ in range(2):
                        alike(gradients(dispatch.attention, some, grad, enable_gqa=some is few, **words), wanted)
            found = prepared_backwards()
            assert found and all(found), f"{found.count(False)} of {len(found)} backwards went through Triton"


@check
def some_gradients_and_that_of_the_lse() -> None:
    """the query's gradient alone, the keys' alone, the LSE's, and dropout's with a seed, twice the same"""
    grad = torch.randn(2, 8, 384, 128, device="cuda", dtype=torch.bfloat16)
    with dispatch.use(unmeasured=True):
        dispatch.reload()
        for wanted in ((True, False, False), (False, True, True)):
            leaves = [x.requires_grad_(asked) for x, asked in zip(inputs(), wanted, strict=True)]
            asking = [x for x in leaves if x.requires_grad]
            ours, theirs = (torch.autograd.grad(attend(*leaves), asking, grad) for attend in (dispatch.attention, sdpa))
            alike(ours, theirs)
        leaves = inputs(requires_grad=True)
        _, lse = dispatch.attention(*leaves, return_lse=True)
        scores = leaves[0].float() @ leaves[1].float().mT / 128**0.5
        ours, theirs = (torch.autograd.grad(x.sum(), leaves[:2]) for x in (lse, scores.logsumexp(-1)))
        alike(ours, theirs)
        # Sums in memory have no order, so that the last bits vary.
        drops = [gradients(dispatch.attention, leaves, grad, dropout_p=0.3, seed=5) for _ in range(2)]
        alike(*drops)


@check
def gradients_of_bias_slopes_and_sinks() -> None:
    """gradients of a bias of its own sizes or repeated, of ALiBi slopes and of sinks, beside those of q, k and v, twice the same"""
    row = torch.arange(384, device="cuda")
    ahead = row[:, None] - row
    grad = torch.randn(2, 8, 384, 128, device="cuda", dtype=torch.bfloat16)
    with dispatch.use(unmeasured=True):
        dispatch.reload()
        for dtype in (torch.bfloat16, torch.float32):
            for shape in ((2, 8, 384, 384), (1, 8, 384, 384), (384, 384), (2, 1, 1, 384), (8, 384, 1), (8, 1, 1)):
                leaves = [*inputs(requires_grad=True), torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)]
                # Heavy ones: a softmax sees no number for each row or head but for them, and rounding is all that is left without.
                sinks = (torch.randn(8, device="cuda") + math.log(384)).requires_grad_()
                served = dispatch.explain(*leaves, sinks=sinks)
                assert served.backward is not None, served.reason
                ours, theirs = (
                    torch.autograd.grad(attend(*leaves[:3], **{name: leaves[3]}, sinks=sinks), [*leaves, sinks], grad)
                    for attend, name in ((dispatch.attention, "attn_mask"), (in_float32, "bias"))
                )
                assert ours[3].shape == shape and ours[3].dtype == dtype
                alike(ours, theirs)
        leaves, slopes = inputs(requires_grad=True), torch.rand(8, device="cuda", requires_grad=True)
        for words, hidden in (({}, None), ({"is_causal": True}, ahead < 0)):
            ours = [
                torch.autograd.grad(dispatch.attention(*leaves, alibi_slopes=slopes, **words), [*leaves, slopes], grad) for _ in range(2)
            ]
            bias = -slopes[:, None, None] * ahead.abs()
            theirs = torch.autograd.grad(in_float32(*leaves, bias=bias, hidden=hidden), [*leaves, slopes], grad)
            alike(ours[0], theirs)
            assert torch.equal(ours[0][3], ours[1][3]), "the slopes' gradient is added up in one order"
        found = prepared_backwards()
        assert found and any(found), "no backward is launched through the driver"


@check
def training_steps_of_threads_with_streams_of_their_own() -> None:
    """4 threads on 2 streams take training steps of one shape at once, and every gradient is what the step gives alone"""
    streams = [torch.cuda.Stream() for _ in range(2)]
    sets = [inputs(1, 8, 512, 128, requires_grad=True) for _ in range(4)]
    grad = torch.randn_like(sets[0][0])
    torch.cuda.synchronize()
    # A decision that is for all threads.
    with dispatch.use(unmeasured=True, everywhere=True):
        dispatch.reload()
        wanted = [gradients(dispatch.attention, one, grad, is_causal=True) for one in sets]
        torch.cuda.synchronize()

        def work(index: int) -> None:
            with torch.cuda.stream(streams[index % 2]):
                found = [gradients(dispatch.attention, sets[index], grad, is_causal=True) for _ in range(60)]
                torch.cuda.current_stream().synchronize()
                for one in found:
                    alike(one, wanted[index])

        in_threads(4, work)
        assert all(prepared_backwards())


@check
def a_graph_captures_a_training_step() -> None:
    """a CUDA graph of a forward and its gradients, captured on a first call and on a known one, follows new inputs"""
    with dispatch.use(unmeasured=True):
        for known in (False, True):
            dispatch.reload()
            leaves = inputs(2, 8, 512, 64, requires_grad=True)
            grad = torch.randn_like(leaves[0])
            # What torch itself sets up at a first backward isn't part of the check.
            gradients(sdpa, leaves, grad, is_causal=True)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                if known:
                    gradients(dispatch.attention, leaves, grad, is_causal=True)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                captured = gradients(dispatch.attention, leaves, grad, is_causal=True)
            for _ in range(3):
                with torch.no_grad():
                    for x in (*leaves, grad):
                        x.normal_()
                junk = [torch.full((1 << 20,), 7, dtype=torch.int32, device="cuda") for _ in range(4)]
                graph.replay()
                torch.cuda.synchronize()
                alike(captured, gradients(sdpa, leaves, grad, is_causal=True))
                del junk


def main() -> None:
    """Run the checks that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only checks whose name holds this")
    chosen = [function for function in CHECKS if parser.parse_args().k in function.__name__]
    failed = 0
    for function in chosen:
        torch.manual_seed(0)
        try:
            function()
            print(f"passed  {function.__doc__}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {function.__doc__}\n{traceback.format_exc(limit=-4)}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
