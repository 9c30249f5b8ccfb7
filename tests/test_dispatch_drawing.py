"""Where dropout's bits come from on a GPU, and what is remembered of those that kernels drew without gradients."""

import concurrent.futures
import contextlib
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from flashtune import dispatch
from flashtune.dispatch import api
from flashtune.dispatch.call import Arguments, Options, parse
from flashtune.dispatch.plans import drawing, recalling
from flashtune.dispatch.plans.drawing import drawn_as, random_bits, recalled
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.recalling import RememberingPlan

GPU = torch.device("cuda", 0)
Q = torch.zeros(1, 2, 8, 16)


class Generator:
    """Stands in for a GPU's."""

    def __init__(self) -> None:
        self.seed, self.offset = 5, 40

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    found = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (found,))
    return found


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    found: set[int] = set()
    for module in (drawing, recalling):
        monkeypatch.setattr(module, "DRAWS", found)
    return found


def test_a_draw_is_recalled_where_the_generator_stood_before_it(generator: Generator, draws: set[int]) -> None:
    like, other = (drawn_as(parse(Arguments(x, Q, Q), Options(dropout_p=0.5))) for x in (Q, Q[:, :, :7]))
    first, second = (random_bits(None, GPU)[0] for _ in range(2))
    assert generator.offset == 48 and first != second
    drawing.remember(first ^ like)
    for _ in range(2):
        generator.offset = 40
        assert recalled(GPU, other) is None and generator.offset == 40
        assert recalled(GPU, like) == first and generator.offset == 44
        assert recalled(GPU, like) is None and generator.offset == 44
    generator.offset, generator.seed = 40, 6
    assert recalled(GPU, like) is None


def test_threads_draw_other_bits_of_one_generator(generator: Generator, draws: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has read the position lets others run before it moves on."""

    def get_offset() -> int:
        position = generator.offset
        time.sleep(0.01)
        return position

    monkeypatch.setattr(generator, "get_offset", get_offset)
    like = drawn_as(parse(Arguments(Q, Q, Q), Options(dropout_p=0.5)))
    for draw in (lambda: random_bits(None, GPU)[0], lambda: recalled(GPU, like)):
        generator.offset = 40
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = {one.result() for one in [pool.submit(draw) for _ in range(4)]}
        assert None not in found and len(found) == 4 and generator.offset == 56
        draws |= {bits ^ like for bits in found if bits is not None}


def test_where_no_more_can_be_remembered_torch_draws_as_it_will_with_gradients(
    generator: Generator, draws: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is remembered is never forgotten: kernels draw it again."""
    for module in (drawing, recalling):
        monkeypatch.setattr(module, "MOST_DRAWS", 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ran: list[int | None] = []
    call = SimpleNamespace(device=GPU, batch=1, heads=2, n_q=8, n_kv=8, dropout_p=0.5)
    forward = SimpleNamespace(call=call, build=None, run=lambda *given: (ran.append(given[4]), Q)[1:])
    plan = RememberingPlan(forward, torch_trains=True)  # type: ignore[arg-type]
    plan._framework = SimpleNamespace(run=lambda *given: ("torch's", given[4]))  # type: ignore[assignment]
    for _ in range(3):
        plan.run(Q, Q, Q, None, None, None)
    assert plan.run(Q, Q, Q, None, None, None) == ("torch's", None) and generator.offset == 52
    generator.offset = 44
    assert plan.run(Q, Q, Q, None, None, None) == (Q,) and generator.offset == 48
    assert ran[3] == ran[1] and len(set(ran)) == len(draws) == 3
    # Where kernels draw with gradients, too, save those of what alone may ask for one, they draw on.
    other = RememberingPlan(forward, torch_trains=False)  # type: ignore[arg-type]
    generator.offset = 100
    drawing._warn_of_more.cache_clear()
    with pytest.warns(RuntimeWarning, match="remembers 3 draws of dropout without gradients and no more.*give such calls a seed"):
        other.run(Q, Q, Q, None, None, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.run(Q, Q, Q, None, None, None)
    assert len(set(ran)) == 5 and len(draws) == 3


@pytest.mark.parametrize("remembered", [False, True])
def test_a_call_draws_once_wherever_its_device_is(
    generator: Generator, draws: set[int], monkeypatch: pytest.MonkeyPatch, remembered: bool
) -> None:
    """It changes to its device first, and the generator moves on once: what is computed again is to begin where this began."""
    current = [1]

    @contextlib.contextmanager
    def device(_: object) -> Any:
        current.append(0)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    for name, value in (("_cuda_getDevice", lambda: current[-1]), ("_cuda_getCurrentRawStream", lambda _: 7)):
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call = parse(Arguments(Q, Q, Q), Options(dropout_p=0.5))
    plan = KernelPlan(call, SimpleNamespace(), Q)  # type: ignore[arg-type]
    # Tensors of the CPU stand for the GPU's.
    monkeypatch.setattr(torch, "empty_strided", lambda shape, strides, **_: torch.zeros(shape))
    values = {name: getattr(call, name) for name in call.__slots__} | {"device": GPU}
    plan.call = SimpleNamespace(**values)  # type: ignore[assignment]
    runs: list[tuple[int, ...]] = []
    plan.program = SimpleNamespace(run=lambda addresses, stream, bits: runs.append(bits))  # type: ignore[assignment]
    plan._like_query = True
    (RememberingPlan(plan, torch_trains=True) if remembered else plan).run(Q, Q, Q, None, None, None)
    generator.offset = 40
    assert runs == [random_bits(None, GPU)] and generator.offset == 44
    assert (runs[0][0] ^ drawn_as(plan.call) in draws) == remembered


def test_a_decoding_step_that_draws_isnt_served_as_one_of_another_length_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may train the one and kernels the other, and only what torch trains is remembered."""
    asked: list[bool] = []
    monkeypatch.setattr(api.growing, "span_of", lambda _: asked.append(True))
    k = torch.zeros(1, 2, 37, 16)
    dispatch.attention(Q[:, :, :1], k, k, dropout_p=0.5)
    assert not asked
    dispatch.attention(Q[:, :, :1], k, k, dropout_p=0.5, seed=1)
    assert asked


def test_what_a_gpu_drew_changes_no_call_on_the_cpu(draws: set[int]) -> None:
    """Asking what was drawn takes a number out of a tensor, which fake ones don't have."""
    draws.add(12345)
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 16, requires_grad=True)
        assert dispatch.attention(q, q, q, dropout_p=0.1).shape == q.shape


def test_a_rate_in_a_tensor_of_no_dimensions_is_a_number_as_in_torch() -> None:
    found = [dispatch.attention(Q, Q, Q, dropout_p=rate, seed=3) for rate in (torch.tensor(0.5), 0.5)]
    assert torch.equal(*found)
