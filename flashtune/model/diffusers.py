"""Models of diffusers as subjects of `flashtune model`: UNets and transformers of images."""

import inspect
from typing import Any

import torch

from flashtune.core.system.errors import InputError
from flashtune.model.places import Place
from flashtune.model.sources import SEED, explained, library, random_inputs
from flashtune.model.workloads import Workload

TEXT_TOKENS = {"unet": 77, "transformer": 512}
"""Tokens of a prompt as the text encoders of Stable Diffusion (CLIP) and Flux (T5) give them."""

LATENT_TOKENS = 4096
"""Tokens of a 1024 x 1024 image in Flux."""


class DiffusersModel:
    """A UNet or a Flux transformer of diffusers; weights are read from safetensors alone."""

    def __init__(self, place: Place, layers: int | None) -> None:
        diffusers = library("diffusers", "diffusers")
        named = str(place.config["_class_name"])
        found: Any = getattr(diffusers, named, None)
        if not (isinstance(found, type) and issubclass(found, diffusers.ModelMixin)):
            raise InputError(f"{place.path} is of {named}, which is no model of the installed diffusers: name a unet or transformer folder")
        if named not in ("UNet2DConditionModel", "FluxTransformer2DModel"):
            raise InputError(
                f"{named} takes inputs that flashtune doesn't make (it does for UNet2DConditionModel and FluxTransformer2DModel): "
                "record its calls with FLASHTUNE_CALLS=calls.json"
            )
        self._class: Any = found
        self._flux = named == "FluxTransformer2DModel"
        self._known = known = inspect.signature(found).parameters
        self._words = {key: value for key, value in place.config.items() if key in known}
        self._whole = True
        if layers is not None and self._flux:
            for key in ("num_layers", "num_single_layers"):
                if isinstance(count := self._config(key), int) and count > layers:
                    self._words[key], self._whole = layers, False
        self._path, self._folder = place.path, place.folder
        inside = place.folder is not None and place.folder.name in ("unet", "transformer")
        self.name = named if place.folder is None else (place.folder.parent if inside else place.folder).name
        self.has_weights = place.folder is not None and any(place.folder.glob("*.safetensors"))
        self.standard = "sdpa"
        self.defaults = (Workload("forward", 1 if self._flux else 2), Workload("train", 1))

    def _config(self, name: str) -> Any:
        return self._words.get(name, self._known[name].default)

    def build(self, *, device: str, dtype: torch.dtype) -> torch.nn.Module:
        """The model in evaluation mode on `device`."""
        with explained(f"diffusers can't build the model of {self._path}", "correct its config, or name another model"):
            return self._built(device, dtype)

    def _built(self, device: str, dtype: torch.dtype) -> torch.nn.Module:
        if device != "meta" and self.has_weights and self._whole:
            model = self._class.from_pretrained(self._folder, torch_dtype=dtype, local_files_only=True, use_safetensors=True)
            return model.to(device).eval()  # type: ignore[no-any-return]
        torch.manual_seed(SEED)
        usual = torch.get_default_dtype()
        # Modules are made in the dtype: diffusers warns of a later cast.
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                return self._class(**self._words).eval()  # type: ignore[no-any-return]
        finally:
            torch.set_default_dtype(usual)

    def inputs(self, workload: Workload, *, device: str, dtype: torch.dtype) -> dict[str, Any]:
        """Keyword arguments of the model's forward: latents, a prompt's embedding and a time step."""
        if workload.kind not in ("forward", "train"):
            raise InputError(f"{self.name} has no {workload.kind} workload: name forward:BATCH or train:BATCH")
        b, (_, random) = workload.batch, random_inputs(device, dtype)
        if self._flux:
            n, text = workload.n or LATENT_TOKENS, TEXT_TOKENS["transformer"]
            found: dict[str, Any] = {
                "hidden_states": random(b, n, self._config("in_channels")),
                "encoder_hidden_states": random(b, text, self._config("joint_attention_dim")),
                "pooled_projections": random(b, self._config("pooled_projection_dim")),
                "timestep": torch.full((b,), 0.5, device=device, dtype=dtype),
                "img_ids": torch.zeros(n, 3, device=device, dtype=dtype),
                "txt_ids": torch.zeros(text, 3, device=device, dtype=dtype),
            }
            if self._config("guidance_embeds"):
                found["guidance"] = torch.full((b,), 3.5, device=device, dtype=dtype)
            return found
        size = self._config("sample_size") or 64
        height, width = size if isinstance(size, list | tuple) else (size, size)
        width_of_text = self._config("cross_attention_dim")
        found = {
            "sample": random(b, self._config("in_channels"), height, width),
            "timestep": torch.full((b,), 500, device=device),
            "encoder_hidden_states": random(b, TEXT_TOKENS["unet"], width_of_text if isinstance(width_of_text, int) else width_of_text[0]),
        }
        if self._config("addition_embed_type") == "text_time":
            times = 6
            pooled = self._config("projection_class_embeddings_input_dim") - times * self._config("addition_time_embed_dim")
            found["added_cond_kwargs"] = {"text_embeds": random(b, pooled), "time_ids": random(b, times)}
        return found

    def attend(self, model: torch.nn.Module, implementation: str) -> None:
        """Switch the attention processors of a model that `build` made."""
        from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

        from flashtune.integrations import diffusers as tuned

        tuned.restore(model)
        # Flux's processors have no eager form: there PyTorch's attention in float32 is the reference.
        if not self._flux:
            model.set_attn_processor(AttnProcessor() if implementation == "eager" else AttnProcessor2_0())  # type: ignore[operator]
        if implementation == "tuned":
            tuned.apply(model)
