"""diffusers on a GPU with dispatch.attention inside, on both branches: a UNet with cross-attention, and Flux's two kinds of blocks."""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from branches import BRANCHES, Branch, forced, served

pytest.importorskip("diffusers")
DEVICE = os.environ.get("FLASHTUNE_TEST_DEVICE", "cuda")

pytestmark = pytest.mark.filterwarnings("ignore")


def unet() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), norm_num_groups=4, cross_attention_dim=24, attention_head_dim=4, layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return model, (torch.randn(2, 4, 16, 16), 3, torch.randn(2, 7, 24)), {}


def flux() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    words = {
        "hidden_states": torch.randn(2, 20, 4),
        "encoder_hidden_states": torch.randn(2, 9, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([1.0, 3.0]),
        "img_ids": torch.randn(20, 3),
        "txt_ids": torch.randn(9, 3),
    }
    return model, (), words


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("block", [unet, flux], ids=["unet", "flux"])
def test_outputs_and_gradients_are_the_models_own(
    block: Callable[[], Any], dtype: torch.dtype, branch: Branch, record_property: Callable[[str, str], None]
) -> None:
    from flashtune.integrations.diffusers import apply, restore

    torch.manual_seed(0)
    model, given, words = block()
    model = model.to(DEVICE, dtype)

    def moved(x: Any) -> Any:
        return x.to(DEVICE, dtype) if isinstance(x, torch.Tensor) else x

    given, words = tuple(map(moved, given)), {name: moved(x) for name, x in words.items()}

    exact = results(copy.deepcopy(model).float(), [x.float() if isinstance(x, torch.Tensor) else x for x in given], words)
    # Torch's own isn't run beside: cuDNN takes the strides of a first gradient for those of all later ones (torch 2.11).
    with forced(branch):
        apply(model)
        ours = results(model, given, words)
        by = served()
        restore(model)
    record_property("served", by)
    assert (by == "torch") == (branch == "torch"), f"{by} served"
    largest = max(float(right.norm()) for right in exact[1:])
    for mine, right in zip(ours, exact, strict=True):
        off, norm = float((mine.float() - right).norm()), float(right.norm())
        assert off <= (1e-4 if dtype == torch.float32 else 1e-2) * max(norm, 1e-2 * largest), f"off by {off:.3g} of {norm:.3g}"


def results(model: Any, given: Any, words: dict[str, Any]) -> list[torch.Tensor]:
    """The output, and the weights' gradients of a loss that is scaled as losses are in half precision."""
    dtype = next(model.parameters()).dtype
    words = {name: x.to(dtype) for name, x in words.items()}
    model.zero_grad()
    # Convolutions that round to TF32 would hide what attention does.
    with torch.backends.cudnn.flags(allow_tf32=False):
        out = model(*given, **words).sample
        (16.0 * out.float().square().sum() / out.shape[0]).backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
