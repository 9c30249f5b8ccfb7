"""Where dropout's bits come from on a GPU."""

import concurrent.futures
import contextlib
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.pytorch import devices
from flashtune.dispatch.call.parse import Arguments, Options, parse
from flashtune.dispatch.decisions import backwards, resolve
from flashtune.dispatch.plans.forward import KernelPlan
from flashtune.dispatch.plans.launch import Code
from flashtune.dispatch.plans.plan import random_bits
from flashtune.dispatch.state.context import Memo

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


def test_threads_draw_other_bits_of_one_generator(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has read the position lets others run before it moves on."""

    def get_offset() -> int:
        position = generator.offset
        time.sleep(0.01)
        return position

    monkeypatch.setattr(generator, "get_offset", get_offset)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = {one.result()[0] for one in [pool.submit(random_bits, None, GPU) for _ in range(4)]}
    assert len(found) == 4 and generator.offset == 56


def test_a_call_draws_once_wherever_its_device_is(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
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
    plan = KernelPlan(call, Code(SimpleNamespace()), Q.stride())  # type: ignore[arg-type]
    # Tensors of the CPU stand for the GPU's.
    monkeypatch.setattr(torch, "empty_strided", lambda shape, strides, **_: torch.zeros(shape))
    values = {name: getattr(call, name) for name in call.__slots__} | {"device": GPU}
    plan.call = SimpleNamespace(**values)  # type: ignore[assignment]
    runs: list[tuple[int, ...]] = []
    plan.program = SimpleNamespace(run=lambda addresses, bits: runs.append(bits))  # type: ignore[assignment]
    plan._like_query = True
    plan.run(Q, Q, Q, None, None, None)
    generator.offset = 40
    assert runs == [random_bits(None, GPU)] and generator.offset == 44


def test_a_decoding_step_that_draws_isnt_served_as_one_of_another_length_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch may train the one and kernels the other."""
    asked: list[int] = []
    monkeypatch.setattr(devices, "target_of", lambda _: find_target("h200"))
    monkeypatch.setattr(backwards, "gradient_choice", lambda _, one, *__, **___: (asked.append(one.n_kv), (None, "torch trains"))[1])
    memo, q = Memo(), Q[:, :, :1]
    for n in (37, 38):
        k = torch.zeros(1, 2, n, 16)
        call = replace(parse(Arguments(q, k, k), Options(dropout_p=0.5)), device=torch.device("cuda", 0))
        [candidate] = resolve.candidates(memo, call, q, k, k, None, None, by_bucket=True)
        assert candidate.kind == "framework" and "torch trains" in candidate.explanation.reason
    assert asked == [37, 38]


def test_a_rate_in_a_tensor_of_no_dimensions_is_a_number_as_in_torch() -> None:
    found = [dispatch.attention(Q, Q, Q, dropout_p=rate, seed=3) for rate in (torch.tensor(0.5), 0.5)]
    assert torch.equal(*found)
