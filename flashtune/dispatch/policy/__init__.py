"""Policy of kernel choice: pure functions of the problem, the GPU and the records; no tensors, no I/O, no clock."""

from flashtune.dispatch.policy.choices import Choice, Kind, Refusal
from flashtune.dispatch.policy.losses import torch_has
from flashtune.dispatch.policy.pool import Pool, group_of
from flashtune.dispatch.policy.ranking import choose, rank

__all__ = ["Choice", "Kind", "Pool", "Refusal", "choose", "group_of", "rank", "torch_has"]
