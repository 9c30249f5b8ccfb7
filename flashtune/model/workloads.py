"""Workloads of a model: forwards, padded batches, decoding steps and training steps of stated sizes."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from flashtune.core.errors import InputError

Kind = Literal["forward", "padded", "decode", "train"]

KINDS: tuple[Kind, ...] = get_args(Kind)

DECODED = 16
"""Tokens of one timed run of a `decode` workload: its keys grow by one with each."""

PADDING = 0.25
"""Share of a `padded` workload's tokens that are padding: rows end at lengths spread evenly around it."""

MOST = 1 << 20
"""Largest batch and largest number of tokens that are taken."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One way of running a model: `batch` sequences of `n` tokens (None: the model's own size, as of images).

    `forward` computes without gradients, `padded` does so on sequences of unequal lengths, `decode` generates `DECODED` tokens after `n`,
    and `train` computes gradients, too.
    """

    kind: Kind
    batch: int
    n: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.batch}" + ("" if self.n is None else f"x{self.n}")

    @property
    def trains(self) -> bool:
        """True if gradients are computed."""
        return self.kind == "train"


def parse(text: str) -> Workload:
    """The workload that a text such as `forward:1x4096` or `train:8` names; raises InputError for any other text."""
    found = re.fullmatch(r"([a-z]+):(\d{1,7})(?:x(\d{1,7}))?", text.strip())
    kind: Kind | None = next((one for one in KINDS if found is not None and one == found[1]), None)
    if found is None or kind is None:
        raise InputError(f"{text!r} is no workload: write KIND:BATCHxTOKENS with a kind of {', '.join(KINDS)}, as decode:8x4096")
    batch, n = int(found[2]), None if found[3] is None else int(found[3])
    if not 0 < batch <= MOST or (n is not None and not 0 < n <= MOST):
        raise InputError(f"{text!r} has a size outside of 1 to {MOST}: write sizes that the model takes")
    return Workload(kind, batch, n)


def lengths(workload: Workload, n: int) -> list[int]:
    """Tokens of each sequence of a padded batch, `n` at most, whose mean is 1 - `PADDING` of `n` where there are several."""
    if workload.batch == 1:
        return [n]
    least = 1 - 2 * PADDING
    return [max(1, round(n * (least + (1 - least) * i / (workload.batch - 1)))) for i in range(workload.batch)]


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
    if name == "decoder_input_ids":
        others["encoder_outputs"] = (prompt.encoder_last_hidden_state,)

    def steps(cache: Any) -> torch.Tensor:
        outs = []
        with torch.no_grad():
            for i in range(DECODED):
                at = i % tokens.shape[1]
                found = model(**{name: tokens[:, at : at + 1]}, **others, past_key_values=cache, use_cache=True)
                outs.append(output_of(found))
        return torch.cat(outs, 1)

    return Run(steps, lambda: copy.deepcopy(prompt.past_key_values))
