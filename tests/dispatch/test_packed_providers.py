"""Packed sequences by functions of PyTorch and of libraries, which callers name: stand-ins with their signatures."""

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from test_providers import close, drawn, libraries

from flashtune import dispatch
from flashtune.core.problems import reference
from flashtune.core.problems.band import Band
from flashtune.core.system.errors import InputError
from flashtune.dispatch.rows.libraries import PACKED

__all__ = ["libraries"]


def packed(q_rows: tuple[int, ...] = (5, 0, 9), k_rows: tuple[int, ...] = (7, 3, 20), d: int = 16) -> tuple[list[torch.Tensor], list[Any]]:
    """Packed query, key and value of sequences of these lengths with rows of none behind them, and the other positional arguments."""
    leaves = [drawn(sum(rows) + 2, heads, d, seed=heads).requires_grad_() for heads, rows in ((4, q_rows), (2, k_rows), (2, k_rows))]
    with torch.no_grad():
        for x in leaves:
            x[-2:] = torch.nan
    bounds = [torch.tensor([0, *accumulate(rows)]) for rows in (q_rows, k_rows)]
    return leaves, [*bounds, max(q_rows), max(k_rows)]


@pytest.fixture
def varlen(libraries: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Arguments that fakes of the libraries' functions of packed sequences get, and of PyTorch's, with their own signatures."""

    def computed(q: Any, k: Any, v: Any, cu_q: torch.Tensor, cu_k: torch.Tensor, used: torch.Tensor | None, **words: Any) -> torch.Tensor:
        assert cu_q.dtype is cu_k.dtype is torch.int32
        (left, right), sinks = words["window"], words["sinks"]
        outs = []
        for b in range(len(cu_q) - 1):
            one, keys = q[cu_q[b] : cu_q[b + 1]], slice(cu_k[b], cu_k[b + 1] if used is None else cu_k[b] + used[b])
            band = Band(left=left, right=right, diagonal=keys.stop - keys.start - len(one))
            more: dict[str, Any] = {} if sinks is None else {"sinks": sinks[None]}
            rows = (x.transpose(0, 1)[None] for x in (one, k[keys], v[keys]))
            out, _ = reference.attention(*rows, band=band, scale=words["scale"], softcap=words["softcap"], dtype=torch.float32, **more)
            outs.append(out[0].transpose(0, 1))
        # As kernels leave rows of no sequence, whose gradients they don't write either.
        rest = q[cu_q[-1] :, :, : v.shape[-1]] * torch.nan
        return torch.cat([*outs, rest + k[cu_k[-1] :].sum() + v[cu_k[-1] :].sum()])

    def fa4(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, seqused_q: Any = None, seqused_k: Any = None, page_table: Any = None, softmax_scale: Any = None,
        causal: bool = False, window_size: Any = (None, None), learnable_sink: Any = None, softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Any:  # fmt: skip
        libraries.append({"deterministic": deterministic, "longest": (max_seqlen_q, max_seqlen_k)})
        words = {"window": (None, 0) if causal else window_size, "scale": softmax_scale, "softcap": softcap, "sinks": learnable_sink}
        return computed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, **words), None

    def fa2(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
        softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
    ) -> Any:  # fmt: skip
        libraries.append({"deterministic": deterministic, "longest": (max_seqlen_q, max_seqlen_k)})
        window = tuple(None if side < 0 else side for side in window_size)
        words = {"window": (None, 0) if causal else window, "scale": softmax_scale, "softcap": softcap, "sinks": None}
        return computed(q, k, v, cu_seqlens_q, cu_seqlens_k, None, **words)

    def flash(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, return_aux: Any = None,
        scale: float | None = None, window_size: Any = (-1, -1), enable_gqa: bool = False, seqused_k: Any = None,
    ) -> Any:  # fmt: skip
        assert enable_gqa
        libraries.append({"deterministic": torch.are_deterministic_algorithms_enabled(), "longest": (max_q, max_k)})
        window = tuple(None if side < 0 else side for side in window_size)
        return computed(query, key, value, cu_seq_q, cu_seq_k, seqused_k, window=window, scale=scale, softcap=0.0, sinks=None)

    sys.modules["flash_attn"].flash_attn_varlen_func = fa2  # type: ignore[attr-defined]
    sys.modules["flash_attn.cute"].flash_attn_varlen_func = fa4  # type: ignore[attr-defined]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)
    for one in PACKED.values():
        monkeypatch.setattr(one, "takes", one.takes | {"float32 or float64"})
    looked_up_anew()
    yield libraries
    looked_up_anew()


def looked_up_anew() -> None:
    """Forget the functions that were found."""
    for one in PACKED.values():
        for name in ("_found", "_known"):
            one.__dict__.pop(name, None)


SIDES: list[dict[str, Any]] = [
    {}, {"is_causal": True}, {"window_size": (5, 0)}, {"window_size": (3, 4)}, {"window_size": (-1, 2)},
    {"softcap": 2.0}, {"sinks": drawn(4)}, {"seqused_k": torch.tensor([7, 0, 11])},
]  # fmt: skip


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("words", SIDES, ids=str)
def test_a_librarys_arguments_of_packed_sequences_mean_what_the_callers_do(
    name: str, words: dict[str, Any], varlen: list[dict[str, Any]]
) -> None:
    leaves, others = packed()
    named = partial(dispatch.attention_varlen, *leaves, *others, enable_gqa=True, scale=0.3, **words)
    lacks = {"flash": {"softcap", "sinks"}, "fa2": {"sinks", "seqused_k"}, "fa4": set[str]()}[name] & words.keys()
    with torch.set_grad_enabled("seqused_k" not in words):
        if lacks:
            with pytest.raises(InputError, match=rf"^implementation='{name}' \(.*\) can't run this call, since it doesn't take "):
                named(implementation=name)
            assert not varlen
            return
        found = named(implementation=name)
        close(found, named(implementation="torch").double())
        if found.requires_grad:
            grads, wanted = (torch.autograd.grad(out.sum(), leaves) for out in (found, named()))
            torch.testing.assert_close(grads, wanted, atol=2e-5, rtol=2e-5)
        said = dispatch.explain_varlen(*leaves, *others, enable_gqa=True, implementation=name, **words)
    assert (said.kind, said.provider) == ("provider", name) and f"the caller named {name}" in said.reason
    assert varlen[-1] == {"deterministic": False, "longest": (9, 20)}


def test_a_version_without_later_parameters_serves_calls_that_need_none_of_them(
    varlen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer: Any = sys.modules["torch.nn.attention.varlen"].varlen_attn  # type: ignore[attr-defined]

    def older(
        query: Any,
        key: Any,
        value: Any,
        cu_seq_q: Any,
        cu_seq_k: Any,
        max_q: int,
        max_k: int,
        *,
        scale: Any = None,
        window_size: Any = (-1, -1),
    ) -> Any:
        words = {"scale": scale, "window_size": window_size, "enable_gqa": True}
        return newer(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **words)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    leaves, others = packed()
    call = partial(dispatch.attention_varlen, *leaves, *others, enable_gqa=True, is_causal=True)
    close(call(implementation="flash"), call(implementation="torch").double())
    said = r"^implementation='flash' \(.*\) can't run this call, since its version has no seqused_k: pip install -U torch"
    with torch.no_grad(), pytest.raises(InputError, match=said):
        call(implementation="flash", seqused_k=torch.tensor([7, 0, 11]))


def test_a_library_gets_no_packed_call_that_it_would_mean_otherwise(varlen: list[dict[str, Any]]) -> None:
    leaves, others = packed()
    odd, _ = packed(d=12)
    for tensors, words, said in [
        (leaves, {"is_causal": True, "causal_alignment": "top_left"}, "a diagonal that doesn't end at the last key"),
        (leaves, {"dropout_p": 0.5}, "it doesn't take dropout"),
        (leaves, {"alibi_slopes": torch.ones(4)}, "it doesn't take ALiBi"),
        (leaves, {"return_lse": True}, "it doesn't take an LSE"),
        (leaves, {"scale": -1.0}, "a scale of 0 or below"),
        (leaves, {"deterministic": True}, "repeatable gradients"),
        (leaves, {"seqused_k": torch.tensor([7, 0, 11])}, "gradients beside keys that aren't used"),
        (leaves, {"score_mod": lambda x, *_: 2 * x}, "it doesn't take masks and scores as functions"),
        (odd, {}, "multiples of 8, not 12"),
    ]:
        for call in (dispatch.attention_varlen, dispatch.explain_varlen):
            with pytest.raises(InputError, match=said):
                call(*tensors, *others, enable_gqa=True, implementation="fa4", **words)
    with pytest.raises(InputError, match=r"'cudnn' .* it doesn't run on cpu tensors"):
        dispatch.attention_varlen(*leaves, *others, enable_gqa=True, implementation="cudnn")
    with pytest.raises(InputError, match=r"'math' .* it doesn't take packed sequences"):
        dispatch.attention_varlen(*leaves, *others, enable_gqa=True, implementation="math")
    assert not varlen
    same = [leaves[0], leaves[0], leaves[0], others[0], others[0], 9, 9]
    words = {"is_causal": True, "causal_alignment": "top_left"}
    close(dispatch.attention_varlen(*same, implementation="fa4", **words), dispatch.attention_varlen(*same, **words).double())


def test_a_library_that_fails_for_packed_sequences_is_tried_once(varlen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = inspect.signature(sys.modules["flash_attn.cute"].flash_attn_varlen_func)

    def fails(*given: Any, **words: Any) -> Any:
        tried.append(1)
        raise AssertionError("Unsupported compute capability")

    fails.__signature__ = real  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules["flash_attn.cute"], "flash_attn_varlen_func", fails)
    leaves, others = packed()
    with pytest.warns(RuntimeWarning, match="fa4 with .* failed on cpu"), pytest.raises(InputError, match="Unsupported compute capability"):
        dispatch.attention_varlen(*leaves, *others, enable_gqa=True, implementation="fa4")
    with pytest.raises(InputError, match="Unsupported compute capability"):
        dispatch.attention_varlen(*leaves, *others, enable_gqa=True, implementation="fa4")
    assert len(tried) == 1
