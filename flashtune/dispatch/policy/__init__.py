"""Which kernel serves a problem: pure functions of the problem, the GPU and the records; no tensors, no I/O, no clock."""

from flashtune.dispatch.policy.choices import Choice, Kind, Pool, Refusal, choose, group_of, rank, torch_has

__all__ = ["Choice", "Kind", "Pool", "Refusal", "choose", "group_of", "rank", "torch_has"]
