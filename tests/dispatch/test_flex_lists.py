"""BlockMasks whose lists say what is visible: by kernels in the interpreter, by PyTorch on a CPU, and what is refused."""

from typing import Any

import pytest
import torch
from interpreting import interpreted
from list_cases import Lists, causal, drawn, errors
from mod_cases import oracle
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flashtune import dispatch
from flashtune.core.system.errors import InputError
from flashtune.dispatch.functions.by_torch import _as_listed

BOUND = 5e-6


def test_kernels_show_what_is_listed() -> None:
    assert not {name: said for name, said in interpreted("interpret_lists", *map(str, range(12))).items() if said}


def test_kernels_keep_the_promises_of_lists() -> None:
    assert not {name: said for name, said in interpreted("interpret_lists").items() if said}


@pytest.mark.parametrize("seed", range(0, 12, 6))
def test_torch_shows_what_is_listed(seed: int) -> None:
    for number in range(seed, seed + 6):
        given = drawn(number)
        assert given.call(dispatch.explain_flex).kind == "framework"
        assert max(errors(given, dispatch.flex_attention)) <= BOUND
        plain = [x.detach() for x in given.tensors]
        out = Lists(plain, given.mask, given.visible, given.score).call(dispatch.flex_attention)
        right, _ = oracle(*(x.double() for x in plain), given.score, lambda *_, given=given: given.visible)
        torch.testing.assert_close(out.double(), right, atol=2e-5, rtol=2e-5)


# With a mask_mod and full blocks, and without.
@pytest.mark.parametrize(("trained", "seed"), [(True, 5), (False, 10)])
def test_a_compiler_keeps_what_is_listed(trained: bool, seed: int) -> None:
    given = drawn(seed)
    tensors = [x.detach().requires_grad_(trained) for x in given.tensors]
    attend = torch.compile(dispatch.flex_attention, backend="aot_eager", fullgraph=True)
    out = attend(*tensors, given.score, given.mask, enable_gqa=True)
    right, _ = oracle(*(x.double() for x in tensors), given.score, lambda *_: given.visible)
    torch.testing.assert_close(out.double(), right, atol=2e-5, rtol=2e-5)


def under(number: Any, places: Any, **words: Any) -> Any:
    """Output of a call of one head and three blocks each way, under lists of one row or of several."""
    x = torch.randn(1, 1, 48, 16)
    mask = BlockMask.from_kv_blocks(
        torch.tensor(number), torch.tensor(places), BLOCK_SIZE=16, **({"compute_q_blocks": False, "seq_lengths": (48, 48)} | words)
    )
    for function in (dispatch.flex_attention, dispatch.explain_flex):
        found = function(x, x, x, None, mask)
    return found


@pytest.mark.parametrize(
    ("number", "places", "said"),
    [
        ([[[1, 1, 1]]], [[[[0], [3], [2]]]], "have block 3, and the keys have 3 blocks: give 0 to 2"),
        ([[[1, 1, 1]]], [[[[0], [-1], [2]]]], "have block -1"),
        ([[[1, 2, 1]]], [[[[0], [1], [2]]]], "has 2 for a row of 1 places: give 0 to 1"),
        ([[[1, -2, 1]]], [[[[0], [1], [2]]]], "has -2 for a row"),
        ([[[1, 1]]], [[[[0], [1]]]], "have 2 rows of blocks, and the queries 3: list all rows"),
        ([[1, 1, 1]], [[[0], [1], [2]]], r"have 2 and 3 dimensions: give \(B, H, rows\)"),
        ([[[1, 1, 1]]], [[[[0.0], [1.0], [2.0]]]], "are torch.float32: give whole numbers"),
    ],
)
@pytest.mark.parametrize("mask_mod", [None, causal])
def test_lists_that_name_no_block_are_refused_in_a_sentence(number: Any, places: Any, said: str, mask_mod: Any) -> None:
    with pytest.raises(InputError, match=said):
        under(number, places, mask_mod=mask_mod)


def test_lists_of_another_device_are_refused_in_a_sentence() -> None:
    x = torch.randn(1, 1, 48, 16)
    lists = [torch.ones(size, dtype=torch.int32, device="meta") for size in ((1, 1, 3), (1, 1, 3, 1))]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, compute_q_blocks=False, seq_lengths=(48, 48))
    with pytest.raises(InputError, match="are on meta, and query is on cpu: move them"):
        dispatch.flex_attention(x, x, x, None, mask)


def test_what_follows_the_listed_blocks_of_a_row_is_not_read() -> None:
    assert under([[[1, 0, 1]]], [[[[0, 77], [99, -5], [2, 3]]]]).kind == "framework"


def test_torchs_kernels_get_lists_that_lead_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where PyTorch walks the lists as they are: places and numbers beyond a row would be faults there."""
    x = torch.randn(1, 2, 48, 16)
    number, places = torch.tensor([[[3, 9, 1]]]), torch.tensor([[[[2, 0, 2], [1, -7, 50], [0, 1, 2]]]])
    mask = BlockMask.from_kv_blocks(number, places, BLOCK_SIZE=16, compute_q_blocks=False, seq_lengths=(48, 48))
    monkeypatch.setattr(Tensor, "device", property(lambda self: torch.device("cuda") if self is x else torch.device("cpu")))
    clean = _as_listed(mask, x, x)
    assert _as_listed(mask, x, x) is clean
    monkeypatch.undo()
    assert clean.kv_num_blocks.tolist() == [[[2, 1, 1]]]
    rows = [clean.kv_indices[0, 0, row, :count].tolist() for row, count in enumerate((2, 1, 1))]
    assert rows == [[0, 2], [1], [0]]
    assert clean.q_num_blocks.tolist() == [[[2, 1, 1]]]
