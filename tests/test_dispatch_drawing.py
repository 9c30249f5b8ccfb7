"""Where dropout's bits come from on a GPU, and what is remembered of those that kernels drew without gradients."""

import contextlib
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashtune.dispatch.call import Arguments, Options, parse
from flashtune.dispatch.plans import drawing
from flashtune.dispatch.plans.drawing import drawn_as, random_bits, recalled
from flashtune.dispatch.plans.forward import KernelPlan

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
def draws(monkeypatch: pytest.MonkeyPatch) -> drawing.Draws:
    found = drawing.Draws()
    monkeypatch.setattr(drawing, "DRAWS", found)
    return found


def test_a_draw_is_recalled_where_the_generator_stood_before_it(generator: Generator, draws: drawing.Draws) -> None:
    like, other = (drawn_as(parse(Arguments(x, Q, Q), Options(dropout_p=0.5))) for x in (Q, Q[:, :, :7]))
    first, second = (random_bits(None, GPU)[0] for _ in range(2))
    assert generator.offset == 48 and first != second
    draws.remember(first ^ like)
    for _ in range(2):
        generator.offset = 40
        assert recalled(GPU, other) is None and generator.offset == 40
        assert recalled(GPU, like) == first and generator.offset == 44
        assert recalled(GPU, like) is None and generator.offset == 44
    generator.offset, generator.seed = 40, 6
    assert recalled(GPU, like) is None


def test_what_is_remembered_is_bounded_and_the_oldest_go_first(draws: drawing.Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "REMEMBERED", 8)
    assert not draws.newer
    for draw in range(100):
        draws.remember(draw)
        assert draws.newer and len(draws.newer) + len(draws.older) < 16 + 1
        assert all(before in draws for before in range(max(0, draw - 7), draw + 1))
    assert 50 not in draws
    # What is drawn again counts once.
    for _ in range(100):
        draws.remember(99)
    assert 98 in draws


def test_a_call_from_before_what_is_remembered_is_warned_of_once(
    generator: Generator, draws: drawing.Draws, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "REMEMBERED", 8)
    like = drawn_as(parse(Arguments(Q, Q, Q), Options(dropout_p=0.5)))
    for _ in range(20):
        draws.remember(random_bits(None, GPU)[0] ^ like)
    # Nothing was drawn at the last of these, and nothing was forgotten of the other seed.
    for seed, offset in ((5, 40 + 4 * 15), (6, 40), (5, generator.offset)):
        generator.seed, generator.offset = seed, offset
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert (recalled(GPU, like) is None) == (offset != 40 + 4 * 15)
    generator.seed, generator.offset = 5, 40
    with pytest.warns(RuntimeWarning, match="the last 8 draws of dropout without gradients.*give such calls a seed"):
        assert recalled(GPU, like) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recalled(GPU, like) is None and generator.offset == 40


def test_threads_remember_all_of_what_they_draw(draws: drawing.Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "REMEMBERED", 4000)
    threads = [
        threading.Thread(target=lambda place=place: [draws.remember(place + i) for i in range(1000)]) for place in range(0, 4000, 1000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(draw in draws for draw in range(4000))


@pytest.mark.parametrize("remembered", [False, True])
def test_a_call_draws_once_wherever_its_device_is(
    generator: Generator, draws: drawing.Draws, monkeypatch: pytest.MonkeyPatch, remembered: bool
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
    values = {name: getattr(call, name) for name in call.__slots__} | {"device": GPU, "remembered": remembered}
    plan.call = SimpleNamespace(**values)  # type: ignore[assignment]
    runs: list[tuple[int, ...]] = []
    plan.program = SimpleNamespace(run=lambda addresses, stream, bits: runs.append(bits))  # type: ignore[assignment]
    plan._like_query = True
    monkeypatch.setattr("flashtune.dispatch.plans.forward.DRAWS", draws)
    plan.run(Q, Q, Q, None, None, None)
    generator.offset = 40
    assert runs == [random_bits(None, GPU)] and generator.offset == 44
    assert (runs[0][0] ^ plan._drawn_as in draws) == remembered
