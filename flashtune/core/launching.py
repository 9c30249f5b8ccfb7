"""What a rendered kernel's launch takes from its device: how many multiprocessors there are, and counts that programs share."""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

_COUNTS: dict[tuple[torch.device, int], torch.Tensor] = {}
_UNREAD: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}


@functools.cache
def sms_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; 16 where nothing is timed, as in the interpreter, for which few programs will do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def counts_of(device: torch.device, size: int) -> torch.Tensor | None:
    """At least `size` int32 counts on the device, zero before a launch and after it; None where `size` is 0.

    Launches on the current stream share them, one after the other. A graph that is being captured gets counts of its own, since it may be
    replayed on any stream.
    """
    if size == 0:
        return None
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(size, dtype=torch.int32, device=device)
    place = device, torch.cuda.current_stream(device).cuda_stream
    if place not in _COUNTS or _COUNTS[place].numel() < size:
        _COUNTS[place] = torch.zeros(size, dtype=torch.int32, device=device)
    return _COUNTS[place]


def tells_misled(module: ModuleType) -> bool:
    """Whether launches of a rendered module count programs that their scores misled (`misled`)."""
    return "misled" in (module.launches.__kwdefaults__ or ())


def copyable_mask(module: ModuleType, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask (B, Hq, N_q, N_kv) of a forward as the copy engine takes it: itself, or a copy that looks the same, in aligned rows and
    without what is repeated. Host code would make that at every launch, too, but couldn't be recorded then."""
    if mask is None or not hasattr(module, "compact_bias") or module.copyable(mask):
        return mask
    copied: torch.Tensor = module.compact_bias(mask)[..., : mask.shape[3]]
    return copied.expand(mask.shape)


def unread(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where misled programs are counted if nobody reads it: two int32 on the device."""
    if device not in _UNREAD:
        _UNREAD[device] = torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    return _UNREAD[device]


def provided(module: ModuleType, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """The keyword arguments `sms`, `counts` and `misled` for a launch of a rendered module with these, on the current stream."""
    found: dict[str, Any] = {"sms": sms_of(q.device), "counts": counts_of(q.device, module.counts_needed(q, k))}
    if tells_misled(module):
        found["misled"] = unread(q.device)
    return found


def compiler_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a launch as Triton takes them: multiply-adds are fused unless they say otherwise, whatever its default is."""
    return {"enable_fp_fusion": True, **options}


def launcher(module: ModuleType) -> Callable[..., None]:
    """A function that runs the launches of a rendered module on the current stream, given what is `provided` for each call.

    Settings that name `sms` or `counts` take their place: a module asked about fewer multiprocessors starts fewer programs.
    """

    def launch(q: torch.Tensor, k: torch.Tensor, *tensors: torch.Tensor | None, **settings: Any) -> None:
        for kernel, grid, args, options in module.launches(q, k, *tensors, **(provided(module, q, k) | settings)):
            kernel[grid](*args, **compiler_options(options))

    return launch
