"""diffusers' attention processors with dispatch.attention inside: a small random UNet with cross-attention, in float32."""

import pytest
import torch

from flashtune import dispatch
from flashtune.core.system.errors import InputError
from flashtune.integrations.diffusers import TunedProcessor, apply, restore

# diffusers isn't imported at the top: every worker collects this file, and one runs it.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of queries that reached dispatch.attention."""
    shapes: list[tuple[int, ...]] = []

    def recorded(query: torch.Tensor, *others: object, **words: object) -> object:
        shapes.append(tuple(query.shape))
        return attention(query, *others, **words)  # type: ignore[arg-type]

    attention = dispatch.attention
    monkeypatch.setattr(dispatch, "attention", recorded)
    return shapes


def test_a_unet_computes_the_same_with_tuned_processors(served: list[tuple[int, ...]]) -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, cross_attention_dim=12, attention_head_dim=4, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    noise, text = torch.randn(2, 4, 8, 8), torch.randn(2, 5, 12)
    with torch.no_grad():
        wanted = unet(noise, 3, text).sample
        assert not served
        apply(unet)
        apply(unet)
        assert all(type(processor.inner) is AttnProcessor2_0 for processor in unet.attn_processors.values())
        torch.testing.assert_close(unet(noise, 3, text).sample, wanted)
        assert len(served) == len(unet.attn_processors)
        restore(unet)
        unet(noise, 3, text)
    assert len(served) == len(unet.attn_processors)


def test_a_processor_has_its_own_arguments_and_gradients(served: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture) -> None:
    from diffusers.models.attention_processor import Attention, AttnProcessor2_0

    class Louder(AttnProcessor2_0):
        def __call__(self, attn: Attention, hidden_states: torch.Tensor, gain: float = 1.0, **others: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gain * super().__call__(attn, hidden_states)

    x = torch.randn(1, 6, 16, requires_grad=True)
    attention = Attention(query_dim=16, heads=2, dim_head=8, processor=TunedProcessor())
    plain = attention(x)
    attention.set_processor(TunedProcessor(Louder()))
    torch.testing.assert_close(attention(x, gain=3.0), 3 * plain)
    plain.sum().backward()
    assert x.grad is not None and served == [(1, 2, 6, 8)] * 2


def test_a_processor_with_weights_is_refused() -> None:
    with pytest.raises(InputError, match="Linear has weights"):
        TunedProcessor(torch.nn.Linear(2, 2))
