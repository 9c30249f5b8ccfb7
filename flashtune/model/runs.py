"""Runs of a model under a workload: what is computed, what of it is timed, and the tensor that is compared."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashtune.core.system.errors import InputError
from flashtune.model.workloads import DECODED, Workload, lengths


def padding_mask(workload: Workload, n: int, device: torch.device | str) -> torch.Tensor:
    """Mask (batch, n) of a padded batch as models take it: 1 where there is a token, padding on the right."""
    ends = torch.tensor(lengths(workload, n), device=device)
    return (torch.arange(n, device=device) < ends[:, None]).long()


def output_of(found: Any) -> torch.Tensor:
    """The floating-point tensor that a model's result is judged by."""
    for name in ("logits", "sample", "last_hidden_state", "prediction_logits"):
        tensor = getattr(found, name, None)
        if isinstance(tensor, torch.Tensor):
            return tensor
    tensor = found[0] if isinstance(found, tuple | list) or hasattr(found, "__getitem__") else found
    if not isinstance(tensor, torch.Tensor):
        raise InputError(
            f"the model returned {type(found).__name__}, in which no output was found: record its calls (FLASHTUNE_CALLS) instead"
        )
    return tensor


@dataclass(frozen=True, slots=True)
class Run:
    """A workload's run in two parts: `prepare`, which isn't timed, makes what `step` takes, whose result is the output."""

    step: Callable[[Any], torch.Tensor]
    prepare: Callable[[], Any] = lambda: None

    def __call__(self) -> torch.Tensor:
        """Output of one run."""
        return self.step(self.prepare())


def runner(model: torch.nn.Module, inputs: dict[str, Any], workload: Workload) -> Run:
    """Runs of a workload on these inputs."""
    if workload.kind == "decode":
        return _decoding(model, inputs)

    def forward(_: None) -> torch.Tensor:
        with torch.no_grad():
            return output_of(model(**inputs))

    def training(_: None) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.enable_grad():
            out = output_of(model(**inputs))
            out.float().square().mean().backward()  # type: ignore[no-untyped-call]
        return out.detach()

    return Run(training if workload.trains else forward)


def _decoding(model: torch.nn.Module, inputs: dict[str, Any]) -> Run:
    """Decoding after a prefilled cache, of which each run takes a copy; tokens are the prompt's, so that runs can be compared."""
    with torch.no_grad():
        prompt = model(**inputs, use_cache=True)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    tokens = inputs[name]
    others: dict[str, Any] = {}
    # transformers has another name for it since 5.24, and drops the older one in 5.40.
    kept = next(one for one in ("cache", "past_key_values") if one in prompt)
    if name == "decoder_input_ids":
        others["encoder_outputs"] = (prompt.encoder_last_hidden_state,)

    def steps(cache: Any) -> torch.Tensor:
        outs = []
        with torch.no_grad():
            for i in range(DECODED):
                at = i % tokens.shape[1]
                found = model(**{name: tokens[:, at : at + 1]}, **others, **{kept: cache}, use_cache=True)
                outs.append(output_of(found))
        return torch.cat(outs, 1)

    return Run(steps, lambda: copy.deepcopy(prompt[kept]))
