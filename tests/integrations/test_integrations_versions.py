"""Rules by which earlier versions of transformers make masks, as the newest one's functions make them: each means the same here."""

from typing import Any

import pytest
import torch
from tiny_models import made

from flashtune.core.system.errors import EnvironmentProblem

pytestmark = pytest.mark.usefixtures("one_thread")
NUMBERS = torch.tensor([[0, 0, 0, 1, 2, 2]])
"""Numbers of sequences: versions of transformers before 5.23 count these, and apply a rule to rows."""


@pytest.mark.parametrize("numbers_first", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_rules_of_earlier_transformers_are_recognised(window: int | None, numbers_first: bool) -> None:
    from transformers.masking_utils import (
        and_masks,
        causal_mask_function,
        packed_sequence_mask_function,
        sliding_window_causal_mask_function,
    )

    from flashtune.integrations import flattened
    from flashtune.integrations import transformers as tuned

    # In version 5.23 the numbers come first.
    rules = [
        causal_mask_function if window is None else sliding_window_causal_mask_function(window),
        packed_sequence_mask_function(NUMBERS),
    ]
    rule = and_masks(*(rules[::-1] if numbers_first else rules))
    config = made("mistral").config
    mask = tuned.attention_mask(1, 6, 6, mask_function=rule, local_size=window, allow_is_causal_skip=False, config=config)
    assert flattened.is_positions(mask)
    assert flattened.bounds_in_mask(mask)[0].tolist() == [0, 3, 4, 6]
    other = and_masks(lambda b, h, q_idx, kv_idx: q_idx > kv_idx, packed_sequence_mask_function(NUMBERS))
    whole = tuned.attention_mask(1, 6, 6, mask_function=other, allow_is_causal_skip=False, config=config)
    assert whole is not None and whole.shape == (1, 1, 6, 6)


def rule_of_chunks(numbers: torch.Tensor, size: int) -> Any:
    """As versions of transformers before 5.23 have it, in which chunks begin with the row."""
    from transformers.masking_utils import and_masks, chunked_causal_mask_function, packed_sequence_mask_function

    return and_masks(
        chunked_causal_mask_function(size, torch.zeros(len(numbers), dtype=torch.int64)), packed_sequence_mask_function(numbers)
    )


def test_chunks_of_earlier_transformers_begin_with_each_sequence() -> None:
    from flashtune.integrations import transformers as tuned

    numbers = torch.stack([torch.arange(4).repeat_interleave(torch.tensor(lengths)) for lengths in ((5, 11, 1, 9), (1, 13, 2, 10))])
    config = made("llama4").config
    for size in (2, 7, 26):
        mask = tuned.attention_mask(2, 26, 26, mask_function=rule_of_chunks(numbers, size), local_size=size, config=config)
        inside = torch.stack([torch.cat([torch.arange(int(n)) for n in row.bincount()]) for row in numbers])
        same = (numbers[:, :, None] == numbers[:, None]) & (inside[:, :, None] // size == inside[:, None] // size)
        assert mask is not None and torch.equal(mask, same.tril()[:, None])


def test_chunks_that_a_compiler_hides_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtune.integrations import flattened
    from flashtune.integrations import transformers as tuned

    config = made("llama4").config

    def mask(rows: int) -> torch.Tensor | None:
        numbers = NUMBERS[:, torch.arange(rows) % 6].cummax(1).values
        return tuned.attention_mask(1, rows, rows, mask_function=rule_of_chunks(numbers, 7), local_size=7, config=config)

    monkeypatch.setattr(flattened, "_CHUNKS_OF_ROWS", True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"install 5\.23 or newer, or compile without fullgraph"):
        torch.compile(mask, backend="eager", fullgraph=True)(8)
    torch.compile(mask, backend="eager", fullgraph=True)(7)
    torch.testing.assert_close(torch.compile(mask, backend="eager")(8), mask(8))


def test_transformers_whose_masks_hide_sequences_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtune.integrations import transformers as tuned

    monkeypatch.setattr("flashtune.integrations.transformers.transformers.__version__", "5.13.1")
    with pytest.raises(EnvironmentProblem, match=r"5\.13\.1 builds masks in an older way: install transformers 5\.14 or newer"):
        tuned.register()
