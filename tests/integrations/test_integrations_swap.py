"""dispatch.attention in torch's place: for one thread, for a while, nested, through exceptions, beside what others put there."""

import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from flashtune import dispatch
from flashtune.core.pytorch.private import sdpa
from flashtune.core.system.errors import InputError, InputTypeError
from flashtune.integrations import swap, torchs_place

Q = torch.randn(1, 2, 12, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads whose calls reached dispatch.attention."""
    names: list[str] = []

    def recorded(*arguments: object, **words: object) -> object:
        names.append(threading.current_thread().name)
        return attention(*arguments, **words)  # type: ignore[arg-type]

    attention = dispatch.attention
    monkeypatch.setattr(dispatch, "attention", recorded)
    return names


def call() -> torch.Tensor:
    return F.scaled_dot_product_attention(Q, Q, Q, is_causal=True)


def test_it_serves_inside_and_not_outside_nested_too(served: list[str]) -> None:
    wanted = call()
    with torchs_place():
        with torchs_place():
            torch.testing.assert_close(call(), wanted)
        torch.testing.assert_close(call(), wanted)
        torch.testing.assert_close(F.scaled_dot_product_attention(Q, Q, Q, None, 0.0, True), wanted)
    assert len(served) == 3
    call()
    assert len(served) == 3 and F.scaled_dot_product_attention is sdpa


def test_another_function_gets_the_arguments_that_are_not_pytorchs_own(served: list[str]) -> None:
    got: list[dict[str, Any]] = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **words: Any) -> torch.Tensor:
        got.append(words)
        if "attn_mask" in words:
            raise InputError("no mask is taken")
        return query + 1

    with torchs_place(attend):
        assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q, None, 0.0, True, scale=0.5), Q + 1)
        F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.0, is_causal=False)
        with pytest.raises(InputError, match="no mask is taken"):
            F.scaled_dot_product_attention(Q, Q, Q, torch.ones(Q.shape[2], Q.shape[2], dtype=torch.bool))
        with torchs_place():
            call()
    assert [sorted(words) for words in got] == [["is_causal", "scale"], [], ["attn_mask"]] and len(served) == 1

    def within(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **words: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, **words) + 1

    compiled = torch.compile(lambda: call() * 2, backend="eager")
    wanted = call()
    for attend_here, more in ((within, 1), (None, 0), (within, 1)):
        with torchs_place(attend_here):
            torch.testing.assert_close(compiled(), (wanted + more) * 2)
    assert F.scaled_dot_product_attention is sdpa
    with pytest.raises(InputTypeError, match="attend must be a function"), torchs_place(3):  # type: ignore[arg-type]
        pass


def test_an_exception_restores_torchs_function(served: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), torchs_place():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is sdpa

    @torchs_place()
    def model(fail: bool) -> torch.Tensor:
        return [][0] if fail else call()

    model(False)
    with pytest.raises(IndexError):
        model(True)
    assert len(served) == 1 and F.scaled_dot_product_attention is sdpa


def test_a_torch_module_is_served(served: list[str]) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    with torchs_place():
        layer(Q[0]).sum().backward()
    assert served and layer.self_attn.in_proj_weight.grad is not None


def test_other_threads_keep_torchs_function_and_leave_in_any_order(served: list[str]) -> None:
    inside, outside_done = threading.Event(), threading.Event()
    wrong: list[BaseException] = []

    def within() -> None:
        try:
            with torchs_place():
                inside.set()
                assert outside_done.wait(600)
                call()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=within, name="within")
    thread.start()
    assert inside.wait(600)
    call()
    # Torch's own bias finds torch's function by its place, in which another thread's stands.
    wanted = sdpa(Q[:, :, :5], Q, Q, attn_mask=causal_lower_right(5, 12)._materialize(Q.device))
    torch.testing.assert_close(F.scaled_dot_product_attention(Q[:, :, :5], Q, Q, attn_mask=causal_lower_right(5, 12)), wanted)
    with torchs_place():
        outside_done.set()
        thread.join()
        call()
    assert not wrong and sorted(served) == ["MainThread", "within"]
    assert F.scaled_dot_product_attention is sdpa and swap._users == 0


def test_what_others_put_over_it_stays(served: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # What stands there now is what has to stand there after this test.
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
    with torchs_place():
        inner = F.scaled_dot_product_attention
        theirs = lambda *arguments, **words: inner(*arguments, **words)  # noqa: E731
        monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
        call()
    assert F.scaled_dot_product_attention is theirs and len(served) == 1
    call()
    assert len(served) == 1
    with torchs_place():
        call()
        outside = threading.Thread(target=call)
        outside.start()
        outside.join()
    assert len(served) == 2 and F.scaled_dot_product_attention is theirs


def test_ours_in_torchs_place_for_good_goes_along_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", dispatch.attention)
    with torchs_place():
        call()
    assert F.scaled_dot_product_attention is dispatch.attention
    call()


def test_what_is_pickled_meanwhile_has_torchs_function_by_its_place() -> None:
    with torchs_place():
        pickled = pickle.dumps(F.scaled_dot_product_attention)
        assert pickle.loads(pickled) is F.scaled_dot_product_attention is not sdpa
    assert pickle.loads(pickled) is sdpa


def test_a_compiled_model_is_served() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True) * 2, backend="eager", fullgraph=True)
    with torchs_place():
        torch.testing.assert_close(compiled(Q), sdpa(Q, Q, Q, is_causal=True) * 2)
    torch.testing.assert_close(compiled(Q), sdpa(Q, Q, Q, is_causal=True) * 2)


def test_what_ours_refuses_and_torch_takes_is_torchs(served: list[str]) -> None:
    mask = torch.ones(12, 12, dtype=torch.bool).tril(5)
    mask[3] = False

    def said(*words: Any, **more: Any) -> Any:
        # PyTorch's CPU path takes both up to 2.13.
        try:
            return F.scaled_dot_product_attention(Q, Q, Q, mask, *words, **more)
        except RuntimeError as error:
            return str(error)

    wanted = said(is_causal=True)
    with torchs_place():
        found = said(is_causal=True), said(0.0, True)
    for one in found:
        assert one == wanted if isinstance(wanted, str) else torch.equal(one, wanted)
    assert len(served) == 2


def test_what_both_refuse_is_said_in_the_words_of_both() -> None:
    with torchs_place(), pytest.raises(TypeError, match="dropout_p") as caught:
        F.scaled_dot_product_attention(Q, Q, Q, dropout_p="much")  # type: ignore[arg-type]
    assert "dropout_p must be a number, not str" in str(caught.value.__context__)
