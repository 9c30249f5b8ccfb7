"""Bad arguments are refused in one sentence with the value and the remedy, and torch refuses them too (or documents that it should)."""

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashtune import dispatch
from flashtune.core.system.errors import FlashtuneError, InputError, InputTypeError
from flashtune.dispatch import api

Q = torch.randn(2, 4, 8, 16)
E4M3 = Q.to(torch.float8_e4m3fn)
GQA = torch.randn(2, 2, 8, 16)
NESTED = torch.nested.nested_tensor([torch.randn(4, 3, 16), torch.randn(4, 5, 16)])
JAGGED = torch.nested.nested_tensor([torch.randn(n, 4, 16) for n in (5, 9)], layout=torch.jagged).transpose(1, 2)
NO_NESTED = (
    "query is a nested tensor, which PyTorch's own attention alone takes, and that without {}: pad it to a dense one and mask the padding"
)

BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], type[FlashtuneError], str]] = [
    ("not-a-tensor", (Q.tolist(), Q, Q), {}, InputTypeError, "query must be a tensor, not list"),
    ("none-key", (Q, None, Q), {}, InputTypeError, "key must be a tensor, not NoneType"),
    ("sparse", (Q, Q, Q.to_sparse()), {}, InputTypeError, "value has the layout torch.sparse_coo"),
    ("int", (Q.int(), Q.int(), Q.int()), {}, InputTypeError, "query has dtype torch.int32"),
    ("complex", (Q, Q + 0j, Q), {}, InputTypeError, "key has dtype torch.complex64"),
    ("mixed-dtypes", (Q, Q.half(), Q), {}, InputTypeError, "mixed dtypes (query torch.float32, key torch.float16"),
    ("mixed-devices", (Q, Q, Q.to("meta")), {}, InputError, "value on meta"),
    ("one-dimension", (Q[0, 0, 0], Q, Q), {}, InputError, "query has the shape (16,)"),
    ("d-differs", (Q, Q[..., :8], Q), {}, InputError, "query has the head size 16 and key 8"),
    ("n-differs", (Q, Q[:, :, :5], Q), {}, InputError, "key has 5 tokens and value 8"),
    ("heads", (Q, GQA, GQA), {}, InputError, "query has 4 heads, key 2 and value 2: pass enable_gqa=True"),
    ("heads-more-keys", (GQA, Q, Q), {}, InputError, "query has 2 heads, key 4 and value 4: make them equal"),
    ("heads-none", (Q, Q[:, :0], Q[:, :0]), {"enable_gqa": True}, InputError, "query has 4 heads, key 0 and value 0"),
    ("heads-indivisible", (Q, Q[:, :3], Q[:, :3]), {"enable_gqa": True}, InputError, "make both 1 or divisors of the query's heads"),
    ("heads-unshared", (Q, Q[:, :3], Q[:, :3]), {}, InputError, "query has 4 heads, key 3 and value 3: make them equal or 1"),
    ("batch", (Q, torch.randn(3, 4, 8, 16), Q), {}, InputError, "batch sizes of query (2, 4, 8, 16), key (3, 4, 8, 16)"),
    ("mask-list", (Q, Q, Q, [[True]]), {}, InputTypeError, "attn_mask must be a tensor or None, not list"),
    ("mask-dtype", (Q, Q, Q, torch.zeros(8, 8, dtype=torch.int)), {}, InputTypeError, "attn_mask has dtype torch.int32"),
    ("mask-half", (Q, Q, Q, torch.zeros(8, 8).half()), {}, InputTypeError, "torch.float16: use bool (True attends), float32"),
    ("mask-double", (Q, Q, Q, torch.zeros(8, 8).double()), {}, InputTypeError, "attn_mask has dtype torch.float64"),
    ("mask-device", (Q, Q, Q, torch.zeros(8, 8, device="meta")), {}, InputError, "attn_mask is on meta and query on cpu"),
    ("mask-shape", (Q, Q, Q, torch.zeros(8, 7)), {}, InputError, "attn_mask of shape (8, 7) doesn't broadcast to the scores (2, 4, 8, 8)"),
    ("mask-rank", (Q, Q, Q, torch.zeros(1, 1, 1, 8, 8)), {}, InputError, "attn_mask of shape (1, 1, 1, 8, 8)"),
    ("dropout-above-1", (Q, Q, Q), {"dropout_p": 1.1}, InputError, "dropout_p=1.1 is not a probability"),
    ("dropout-negative", (Q, Q, Q), {"dropout_p": -0.1}, InputError, "dropout_p=-0.1"),
    ("dropout-text", (Q, Q, Q), {"dropout_p": "0.1"}, InputTypeError, "dropout_p must be a number, not str"),
    ("causal-tensor", (Q, Q, Q), {"is_causal": torch.ones(8, 8)}, InputTypeError, "is_causal must be True or False, not Tensor"),
    ("scale-text", (Q, Q, Q), {"scale": "1"}, InputTypeError, "scale must be a number, not str"),
    ("scale-tensor", (Q, Q, Q), {"scale": torch.ones(1)}, InputTypeError, "scale must be a number, not Tensor"),
    ("scale-learnt", (Q, Q, Q), {"scale": torch.tensor(1.0, requires_grad=True)}, InputTypeError, "scale must be a number, not Tensor"),
]
OURS: list[tuple[str, tuple[Any, ...], dict[str, Any], type[FlashtuneError], str]] = [
    ("dropout-empty", (Q, Q, Q), {"dropout_p": torch.ones(0)}, InputTypeError, "dropout_p must be a number, not Tensor"),
    ("dropout-two", (Q, Q, Q), {"dropout_p": torch.ones(2)}, InputTypeError, "dropout_p must be a number, not Tensor"),
    ("scale-large", (Q, Q, Q), {"scale": 1e308}, InputError, "scale=1e+308 is larger than float32 holds: give a number below 3.4e+38"),
    (
        "scale-double",
        (Q.double(),) * 3,
        {"scale": -(2**1024)},
        InputError,
        "scale is larger than float64 holds: give a number below",
    ),
    ("softcap-large", (Q, Q, Q), {"softcap": 2**1024}, InputError, "softcap is larger than float32 holds: give a number below"),
    ("softcap-small", (Q, Q, Q), {"softcap": 1e-50}, InputError, "softcap=1e-50 is less than float32's 1.2e-38: give a larger cap, or 0"),
    ("factor-large", (E4M3,) * 3, {"k_descale": 1e308}, InputError, "k_descale=1e+308 is larger than float32 holds: give a number below"),
    ("factor-of-values", (E4M3,) * 3, {"v_descale": 10**400}, InputError, "v_descale is larger than float32 holds: give a number below"),
    ("nested", (NESTED, NESTED, NESTED), {"softcap": 1.0}, InputTypeError, "query is a nested tensor"),
    ("jagged-softcap", (JAGGED,) * 3, {"softcap": 1.0}, InputTypeError, NO_NESTED.format("softcap")),
    ("jagged-window", (JAGGED,) * 3, {"window": 3}, InputTypeError, NO_NESTED.format("window")),
    ("jagged-lse", (JAGGED,) * 3, {"return_lse": True, "seed": 3}, InputTypeError, NO_NESTED.format("return_lse and seed")),
    ("jagged-alibi", (JAGGED,) * 3, {"alibi_slopes": torch.ones(4)}, InputTypeError, NO_NESTED.format("alibi_slopes")),
    ("jagged-keys", (Q, JAGGED, JAGGED), {"sinks": torch.ones(4)}, InputTypeError, "key is a nested tensor"),
    # torch calls this an error, in these words where a backend checks it.
    (
        "causal-and-mask",
        (Q, Q, Q, torch.zeros(8, 8)),
        {"is_causal": True},
        InputError,
        "Explicit attn_mask should not be set when is_causal=True: give",
    ),
    ("scale-nan", (Q, Q, Q), {"scale": float("nan")}, InputError, "scale=nan is not finite"),
    ("softcap-negative", (Q, Q, Q), {"softcap": -1.0}, InputError, "softcap=-1.0 is negative"),
    ("softcap-infinite", (Q, Q, Q), {"softcap": float("inf")}, InputError, "softcap=inf is not finite"),
    ("softcap-none", (Q, Q, Q), {"softcap": None}, InputTypeError, "softcap must be a number, not NoneType"),
    ("window-negative", (Q, Q, Q), {"window": -2}, InputError, "window=-2 is out of range"),
    ("window-float", (Q, Q, Q), {"window": 4.0}, InputTypeError, "window=4.0 is not a window"),
    ("window-true", (Q, Q, Q), {"window": True}, InputTypeError, "window=True is not a window"),
    ("window-three", (Q, Q, Q), {"window": (1, 2, 3)}, InputTypeError, "window=(1, 2, 3) is not a window"),
    ("window-list", (Q, Q, Q), {"window": [1, -5]}, InputError, "window=[1, -5] is out of range"),
    ("alignment", (Q, Q, Q), {"causal_alignment": "lower"}, InputError, "unknown causal_alignment 'lower'"),
    ("alignment-unhashable", (Q, Q, Q), {"causal_alignment": []}, InputError, "unknown causal_alignment []"),
    ("seed-float", (Q, Q, Q), {"seed": 1.5, "dropout_p": 0.1}, InputTypeError, "seed must be an integer, not float"),
    ("seed-large", (Q, Q, Q), {"seed": 2**64, "dropout_p": 0.1}, InputError, "seed=18446744073709551616 does not fit into 64 bits"),
    ("alibi-number", (Q, Q, Q), {"alibi_slopes": 0.5}, InputTypeError, "alibi_slopes must be a tensor or None, not float"),
    ("alibi-half", (Q, Q, Q), {"alibi_slopes": torch.ones(4).half()}, InputTypeError, "alibi_slopes has dtype torch.float16: use float32"),
    (
        "alibi-heads",
        (Q, Q, Q),
        {"alibi_slopes": torch.ones(3)},
        InputError,
        "alibi_slopes of shape (3,) doesn't broadcast to the heads",
    ),
    ("alibi-rank", (Q, Q, Q), {"alibi_slopes": torch.ones(1, 2, 4)}, InputError, "alibi_slopes of shape (1, 2, 4)"),
    ("alibi-sparse", (Q, Q, Q), {"alibi_slopes": torch.ones(4).to_sparse()}, InputTypeError, "alibi_slopes is nested or sparse"),
    ("factor-nested", (E4M3,) * 3, {"k_descale": NESTED}, InputTypeError, "k_descale is nested or sparse"),
    ("alibi-device", (Q, Q, Q), {"alibi_slopes": torch.ones(4, device="meta")}, InputError, "alibi_slopes is on meta and query on cpu"),
    ("sinks-number", (Q, Q, Q), {"sinks": 0.5}, InputTypeError, "sinks must be a tensor or None, not float"),
    (
        "sinks-half",
        (Q, Q, Q),
        {"sinks": torch.ones(4).half()},
        InputTypeError,
        "sinks has dtype torch.float16: use float32 or the output's",
    ),
    ("sinks-of-key-heads", (Q, Q, Q), {"sinks": torch.ones(2)}, InputError, "sinks of shape (2,) doesn't broadcast to the heads"),
    ("factor-of-float32", (Q, Q, Q), {"q_descale": 2.0}, InputError, "q_descale is set for inputs of torch.float32: only"),
    ("factor-text", (E4M3, E4M3, E4M3), {"v_descale": "2"}, InputTypeError, "v_descale must be a number, not str"),
    ("factor-nan", (E4M3, E4M3, E4M3), {"k_descale": float("nan")}, InputError, "k_descale=nan is not finite"),
    ("factor-zero", (E4M3, E4M3, E4M3), {"q_descale": 0.0}, InputError, "q_descale is 0.0: factors of queries and keys must be above 0"),
    (
        "factor-negative",
        (E4M3, E4M3, E4M3),
        {"k_descale": -2.0},
        InputError,
        "k_descale is -2.0: factors of queries and keys must be",
    ),
    ("factor-double", (E4M3, E4M3, E4M3), {"k_descale": torch.ones(()).double()}, InputTypeError, "k_descale has dtype torch.float64"),
    ("factor-of-other-heads", (E4M3,) * 3, {"q_descale": torch.ones(2, 2)}, InputError, "doesn't broadcast to the heads (2, 4)"),
    ("fp8-and-bf16", (E4M3, E4M3, Q.bfloat16()), {}, InputTypeError, "mixed dtypes (query torch.float8_e4m3fn"),
    ("e5m2", (Q.to(torch.float8_e5m2),) * 3, {}, InputTypeError, "query has dtype torch.float8_e5m2: use"),
    ("lse-text", (Q, Q, Q), {"return_lse": "yes"}, InputTypeError, "return_lse must be True or False, not str"),
]


def ids(cases: list[tuple[str, tuple[Any, ...], dict[str, Any], type[FlashtuneError], str]]) -> list[Any]:
    return [pytest.param(*case[1:], id=case[0]) for case in cases]


@pytest.mark.parametrize(("arguments", "words", "kind", "message"), ids(BAD + OURS))
def test_bad_input_is_one_sentence_with_the_value_and_the_remedy(
    arguments: tuple[Any, ...], words: dict[str, Any], kind: type[FlashtuneError], message: str
) -> None:
    for entry in (dispatch.attention, dispatch.explain):
        with pytest.raises(kind, match=re.escape(message)) as caught:
            entry(*arguments, **words)
        text = str(caught.value)
        assert "\n" not in text and ": " in text and len(text) < 250
        assert isinstance(caught.value, TypeError if kind is InputTypeError else ValueError)


# What torch serves although it makes no sense, key and value of different lengths on the CPU for one.
SERVED_BY_TORCH = {"n-differs", "heads-none", "mixed-devices", "mask-device", "dropout-negative"}


@pytest.mark.parametrize(
    ("arguments", "words", "kind", "message"),
    ids([case for case in BAD if case[0] not in SERVED_BY_TORCH]),
)
def test_what_is_refused_torch_refuses_too(
    arguments: tuple[Any, ...], words: dict[str, Any], kind: type[FlashtuneError], message: str
) -> None:
    with pytest.raises((RuntimeError, TypeError, IndexError)) as caught:
        F.scaled_dot_product_attention(*arguments, **words)
    # What catches torch's error catches ours.
    theirs = caught.type if caught.type in (TypeError, IndexError) else RuntimeError
    assert issubclass(kind, theirs), f"{theirs.__name__}: {caught.value}"


def test_a_bad_call_is_refused_again_after_a_good_one() -> None:
    for _ in range(2):
        dispatch.attention(Q, Q, Q, dropout_p=0.1, seed=1)
        with pytest.raises(InputTypeError):
            dispatch.attention(Q, Q, Q, dropout_p=0.1, seed="1")
        with pytest.raises(InputError):
            dispatch.attention(Q, Q, Q[:, :, :5])


def test_explain_names_no_kernel_that_cannot_be_built_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise RuntimeError("out of shared memory")

    variant = SimpleNamespace(id="0" * 16, template="flash_decode", config=SimpleNamespace(label=lambda: "BLOCK_M=64"))
    kernel = SimpleNamespace(plan=SimpleNamespace(build=build), variant=variant, trains=False)
    found = api.resolve.candidates
    monkeypatch.setattr(api.resolve, "candidates", lambda *given: itertools.chain([kernel], found(*given)))
    with (
        dispatch.use(unmeasured=False),
        pytest.warns(RuntimeWarning, match="flash_decode with BLOCK_M=64 failed on cpu.*out of shared memory"),
    ):
        assert dispatch.explain(Q, Q, Q).kind == "framework"
