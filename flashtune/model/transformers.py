"""Models of transformers as subjects of `flashtune model`: language models, encoders, vision models, and speech recognition."""

from typing import Any

import torch

from flashtune.core.system.errors import InputError, first_line
from flashtune.model.places import Place
from flashtune.model.runs import padding_mask
from flashtune.model.sources import SEED, explained, library, random_inputs
from flashtune.model.workloads import Workload


class TransformersModel:
    """A model of transformers, built from its config; code of the folder is never run, and weights are read from safetensors alone."""

    def __init__(self, place: Place, layers: int | None) -> None:
        self._transformers = library("transformers", "transformers")
        words = {key: value for key, value in place.config.items() if key not in ("auto_map", "quantization_config")}
        self.config = self._transformers.AutoConfig.for_model(**words)
        self._path, self._folder = place.path, place.folder
        self._whole = layers is None or not _shortened(self.config, layers)
        self._class = self._class_of()
        self.name = place.folder.name if place.folder is not None else self.config.model_type
        self.standard = "sdpa" if getattr(self._class, "_supports_sdpa", True) else "eager"
        self.has_weights = place.folder is not None and any(place.folder.glob("*.safetensors"))
        self._input = getattr(self._class, "main_input_name", "input_ids")
        self._text = self.config.get_text_config()
        self.defaults = self._default_workloads()

    def _class_of(self) -> Any:
        usual = [auto[type(self.config)] for auto in self._mappings() if type(self.config) in auto]
        for name in self.config.architectures or ():
            found: Any = getattr(self._transformers, str(name), None)
            if isinstance(found, type) and issubclass(found, self._transformers.PreTrainedModel):
                if found not in usual and not isinstance(self.config, getattr(found, "config_class", None) or object):
                    other = f"model_type {self.config.model_type!r}, which {name} doesn't take"
                    raise InputError(f"{self._path} has architectures {name!r} and {other}: correct one of them")
                return found
        if not usual:
            raise InputError(f"transformers has no model class for {self.config.model_type}: name a config with its architectures")
        return usual[0]

    def _mappings(self) -> list[Any]:
        autos = ("AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")
        return [getattr(self._transformers, auto)._model_mapping for auto in autos]

    @property
    def _decodes(self) -> bool:
        name: str = self._class.__name__
        return name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))

    def _default_workloads(self) -> tuple[Workload, ...]:
        if self._input == "pixel_values":
            return (Workload("forward", 8), Workload("train", 8))
        if self._input == "input_features":
            return (Workload("forward", 4), Workload("decode", 4))
        longest = self._longest()
        n = min(4096, longest)
        if not self._decodes:
            return (Workload("forward", 8, min(512, n)), Workload("padded", 8, min(512, n)), Workload("train", 8, min(512, n)))
        asked = n if n < longest else n - 64
        return (
            Workload("forward", 1, n),
            Workload("padded", 4, min(2048, n)),
            Workload("decode", 8, max(1, asked)),
            Workload("train", 2, min(2048, n)),
        )

    def _longest(self) -> int:
        return int(getattr(self._text, "max_position_embeddings", None) or 4096)

    def build(self, *, device: str, dtype: torch.dtype) -> torch.nn.Module:
        """The model in evaluation mode on `device`."""
        with explained(f"transformers can't build the model of {self._path}", "correct its config, or name another model"):
            if device != "meta" and self.has_weights and self._whole:
                model = self._class.from_pretrained(self._folder, dtype=dtype, local_files_only=True, use_safetensors=True, device_map=None)
                return model.to(device).eval()  # type: ignore[no-any-return]
            torch.manual_seed(SEED)
            with torch.device(device):
                model = self._class._from_config(self.config, dtype=dtype)
            return model.eval()  # type: ignore[no-any-return]

    def inputs(self, workload: Workload, *, device: str, dtype: torch.dtype) -> dict[str, Any]:
        """Keyword arguments of the model's forward."""
        generator, random = random_inputs(device, dtype)
        if workload.kind == "decode" and not self._decodes:
            raise InputError(f"{self.name} doesn't generate tokens, so {workload} can't be run: name forward, padded or train")
        if self._input == "pixel_values":
            size = self.config.image_size
            height, width = size if isinstance(size, list | tuple) else (size, size)
            return {"pixel_values": random(workload.batch, getattr(self.config, "num_channels", 3), height, width)}
        if self._input == "input_features":
            frames = 2 * self.config.max_source_positions
            n = 1 if workload.kind == "decode" else min(workload.n or 64, self.config.max_target_positions)
            tokens = torch.full((workload.batch, n), 1, device=device)
            return {"input_features": random(workload.batch, self.config.num_mel_bins, frames), "decoder_input_ids": tokens}
        if self._input != "input_ids":
            raise InputError(
                f"{self.name} takes {self._input}, of which flashtune makes none: record its calls with FLASHTUNE_CALLS=calls.json"
            )
        n = workload.n or min(512, self._longest())
        top = n + (1 if workload.kind == "decode" else 0)
        if top > self._longest():
            raise InputError(f"{workload} has more tokens than the {self._longest()} positions of {self.name}: name fewer")
        ids = torch.randint(1, self._text.vocab_size, (workload.batch, n), device=device, generator=generator)
        found: dict[str, Any] = {"input_ids": ids}
        if workload.kind == "padded":
            found["attention_mask"] = padding_mask(workload, n, device)
        if getattr(self.config, "is_encoder_decoder", False):
            found["decoder_input_ids"] = ids
        if self._decodes and workload.kind != "decode":
            # Without a cache, models look into their positions for packed sequences, which meta tensors can't answer.
            found["use_cache"] = not workload.trains or device == "meta"
        return found

    def attend(self, model: torch.nn.Module, implementation: str) -> None:
        """Switch the attention of a model that `build` made."""
        from flashtune.integrations import transformers as tuned

        name = tuned.register() if implementation == "tuned" else implementation
        try:
            model.set_attn_implementation(name)  # type: ignore[operator]
        except ValueError as error:
            raise InputError(
                f"{self.name} can't be given another attention ({first_line(error)}): its model ignores attn_implementation"
            ) from error


def _shortened(config: Any, layers: int) -> bool:
    """Cut a config to so many layers at most; True if that changed it."""
    changed = False
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name in ("num_hidden_layers", "encoder_layers", "decoder_layers"):
            count = getattr(part, name, None)
            if isinstance(count, int) and count > layers:
                setattr(part, name, layers)
                changed = True
        kinds = getattr(part, "layer_types", None)
        if isinstance(kinds, list) and len(kinds) > layers:
            part.layer_types = kinds[:layers]
    return changed
