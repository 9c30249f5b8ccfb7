"""The family `flash_decode`: attention forward for few query rows, whose keys are split over many programs; for every GPU."""

from flashtune.core.config import Config, KernelSpec
from flashtune.core.target import Target
from flashtune.templates.family import Axis, Family
from flashtune.templates.predicates import REGISTERS_FIT, SCALAR_PRODUCTS_ARE_SHORT, SHARED_MEMORY_FITS, STAGES_EXIST

AXES = (
    Axis(name="BLOCK_M", values=(16, 32, 64), why="rows of a tile"),
    Axis(name="BLOCK_N", values=(32, 64, 128, 256), why="key rows of a step"),
    Axis(name="num_warps", values=(1, 2, 4, 8), why="warps"),
    Axis(name="num_stages", values=(1, 2, 3, 4, 5, 6), why="key blocks in flight"),
    Axis(name="programs", values=(1, 2, 3, 4, 6, 8, 16), why="programs to an SM"),
    Axis(name="combine", values=("kernel", "last"), why="who adds up splits"),
    Axis(name="loads", values=("pointer", "tma"), why="how K and V are read"),
)

FAMILY = Family(
    name="flash_decode",
    axes=AXES,
    constraints=(REGISTERS_FIT, SHARED_MEMORY_FITS, STAGES_EXIST, SCALAR_PRODUCTS_ARE_SHORT),
    supports=lambda s, t: None,
    default=lambda s, t: Config.of(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3, programs=2, combine="kernel", loads="pointer"),
    starts=lambda s, t: [],
    interpretable=True,
    path_axes=("combine", "loads"),
)
