"""Forward calls on a GPU beyond numbers: threads, streams, CUDA graphs, torch.compile, views, first calls; whole outputs beside torch's."""

import threading
from typing import Any

import pytest
import torch
from call_checks import close, in_threads, inputs
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flashtune import dispatch
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.state import context

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="streams and graphs need a GPU")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def prepared_plans() -> int:
    """How many plans launch through the driver."""
    return sum(getattr(plan, "program", None) is not None for plan in context.current().plans.values())


def test_kernels_are_launched_through_the_driver() -> None:
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


def test_biases_that_the_copy_engine_does_not_take() -> None:
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


def test_threads_with_streams_of_their_own() -> None:
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


def test_first_calls_of_sixteen_threads_at_once() -> None:
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


def test_graphs_capture_first_and_later_calls() -> None:
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
        assert not context.current().kernels.broken, f"a capture marked kernels broken: {context.current().kernels.broken}"


def test_graphs_run_the_kernel_that_is_faster_on_the_gpu() -> None:
    """a step whose whole calls chose a slower kernel: a graph, captured first or later or by torch.compile, runs the other; calls don't"""
    q = torch.randn(1, 14, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 2, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if "CUDA graphs run" not in dispatch.explain(q, k, v, enable_gqa=True).reason:
        pytest.skip("no record of this GPU has another kernel for graphs")

    def replayed(run: Any) -> None:
        for _ in range(3):
            for x in (q, k, v):
                x.normal_()
            close(run(), sdpa(q, k, v, enable_gqa=True))

    for known in (False, True):
        dispatch.reload()
        sdpa(q, k, v, enable_gqa=True)
        if known:
            close(dispatch.attention(q, k, v, enable_gqa=True), sdpa(q, k, v, enable_gqa=True))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dispatch.attention(q, k, v, enable_gqa=True)
        plan = next(iter(context.current().plans.values()))
        assert isinstance(plan, KernelPlan) and isinstance(plan._in_graphs, KernelPlan) and plan._in_graphs.program is not None

        def replay(graph: torch.cuda.CUDAGraph = graph, out: torch.Tensor = out) -> torch.Tensor:
            graph.replay()
            return out

        replayed(replay)
        replayed(lambda: dispatch.attention(q, k, v, enable_gqa=True))
    compiled = torch.compile(lambda q, k, v: dispatch.attention(q, k, v, enable_gqa=True), mode="reduce-overhead")
    replayed(lambda: compiled(q, k, v).clone())


def test_compiled_calls() -> None:
    """torch.compile, with and without CUDA graphs of its own, gives what eager gives"""
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        dispatch.reload()
        compiled = torch.compile(lambda q, k, v: dispatch.attention(q * 2, k, v, is_causal=True) + 1, fullgraph=True, mode=mode)
        for _ in range(5):
            q, k, v = inputs(2, 8, 512, 128)
            with torch.no_grad():
                close(compiled(q, k, v), sdpa(q * 2, k, v, is_causal=True) + 1)


def test_eager_calls_after_graph_trees() -> None:
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


@pytest.mark.parametrize("way", ["dense", "decoding", "packed", "paged", "packed functions"])
def test_first_calls_in_graph_trees(way: str) -> None:
    """all that a first call allocates from a graph's pool is gone after it, for every way in, with an output that is eager's"""
    torch._dynamo.reset()
    dispatch.reload()
    q, k, v = inputs(2, 8, 256, 64)
    rows = [x.transpose(1, 2).reshape(512, 8, 64) for x in (q, k, v)]
    bounds = torch.tensor([0, 100, 512], dtype=torch.int32, device="cuda")
    table = torch.arange(32, dtype=torch.int32, device="cuda").view(2, 16)
    ones, used = torch.arange(3, dtype=torch.int32, device="cuda"), torch.tensor([250, 99], dtype=torch.int32, device="cuda")
    pages = [x.view(32, 16, 8, 64) for x in rows[1:]]

    def call() -> torch.Tensor:
        if way == "dense":
            return dispatch.attention(q, k, v, is_causal=True, softcap=20.0)
        if way == "decoding":
            return dispatch.attention(q[:, :, :1], k, v)
        if way == "paged":
            return dispatch.attention_varlen(rows[0][:2], *pages, ones, None, 1, 256, seqused_k=used, block_table=table)
        words = {"score_mod": lambda s, b, h, i, j: s + (i - j)} if way == "packed functions" else {}
        return dispatch.attention_varlen(*rows, bounds, bounds, 412, 412, **words)

    compiled = torch.compile(call, mode="reduce-overhead")
    with torch.no_grad(), dispatch.use(unmeasured=True):
        found = [compiled().clone() for _ in range(4)]
        for one in found:
            close(one, call())


def test_layouts_in_turn() -> None:
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


def test_views_that_are_only_marked_negative() -> None:
    """a view with the negative bit counts as what it stands for"""
    z = torch.randn(2, 4, 64, 32, dtype=torch.complex64, device="cuda")
    q = z.conj().imag
    k, v = (torch.randn(2, 4, 64, 32, device="cuda") for _ in range(2))
    torch.testing.assert_close(dispatch.attention(q, k, v), sdpa(q.resolve_neg(), k, v), atol=2e-2, rtol=2e-2)


def test_other_devices_and_streams() -> None:
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


def test_mispredicted_calls_are_served_by_the_fallback_kernel_from_then_on() -> None:
    """calls whose scores mispredict a frozen row max are served by the fallback kernel from the third on, and all later ones"""
    from flashtune.core.problems.problem import Features, Problem
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

    call("normal", 200)
    assert told().twin is not None, "the record that serves has no fallback kernel"
    assert (told().misled_programs, told().went_over, told().twin_serves) == (0, 0, False), "random numbers mispredict nothing"
    call("misled", 1)
    torch.cuda.synchronize()
    call("normal", 10)
    once = told().misled_programs
    assert once > 0 and not told().twin_serves, "one odd launch changes nothing"
    for _ in range(2):
        call("misled", 1)
        torch.cuda.synchronize()
    assert told().misled_programs == 3 * once
    call("misled", 1)
    assert told().misled_programs == 3 * once and (told().went_over, told().twin_serves) == (1, True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        call("misled", 2)
    finally:
        torch.use_deterministic_algorithms(before)
    assert told().misled_programs == 5 * once, "in deterministic mode one kernel serves"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatch.attention(*data["misled"], is_causal=True)
    counted = told().misled_programs
    graph.replay()
    assert told().misled_programs == counted, "the graph has the fallback kernel"
    close(out, expected["misled"])
    in_threads(4, lambda place: call("misled" if place % 2 else "normal", 100))
    call("normal", 200)
    dispatch.reload()
    call("normal", 1)
    assert told().twin_serves, "until the process ends"
