"""Configs of archived runs, which earlier versions made, under today's axes: one table for all families."""

from collections.abc import Mapping
from typing import NamedTuple

from flashtune.core.problems.config import Config, Value


class Earlier(NamedTuple):
    """The axes of a family that earlier versions named otherwise, didn't have, or had beside today's."""

    renamed: Mapping[str, str] = {}
    """Today's names of axes."""
    retired: Mapping[str, tuple[Value, ...]] = {}
    """Axes that are facts of the kernel today, with the values whose kernels take no less time than today's (decision 0008)."""
    added: Mapping[str, Value] = {}
    """Values that kernels had before the axis came."""
    merged: Mapping[str, tuple[Value, Value, Mapping[str, Value]]] = {}
    """Axes with a value of which another one makes the same kernel today, where the config has these values."""


EARLIER = {
    "flash_fwd_hopper": Earlier(
        renamed={"stages": "num_stages", "lookahead": "intra_wg_overlap", "residents": "ctas_per_sm"},
        retired={"column_unit": (16, 32), "smem_columns": ("padded", "chunks")},
        added={"maximum": "running", "rescale": "always", "v_columns": "padded", "packed_heads": 1},
        merged={"rescale": ("always", "grown", {"maximum": "first"})},
    ),
    "flash_bwd_hopper": Earlier(
        retired={"ahead": (False,), "release": ("memory",), "exp_early": (False,), "column_unit": (16, 32)},
        added={"exp_poly": False, "wait_early": False, "persistent": False, "held": "none", "divided_queries": False},
        merged={"persistent": ("taken", "dynamic", {})},
    ),
    "flash_bwd_hopper_split": Earlier(retired={"section": (1, 2, 4, 8, 16), "DQ_held_columns": (0,)}, added={"divided_queries": False}),
}


def completed(template: str, config: Config) -> Config:
    """A config of any version under today's axes; one with a value that no kernel has today stays outside the declared space."""
    earlier = EARLIER.get(template)
    if earlier is None:
        return config
    values = config.as_dict()
    for name, new in earlier.renamed.items():
        if name in values and new not in values:
            values[new] = values.pop(name)
    values = {name: value for name, value in values.items() if value not in earlier.retired.get(name, ())}
    values = {**earlier.added, **values}
    for name, (value, todays, where) in earlier.merged.items():
        if values.get(name) == value and where.items() <= values.items():
            values[name] = todays
    return config if values == config.as_dict() else Config.of(values)
