"""Faults planted in Hopper kernels, which the gate of a search has to find.

Each fault is a line of a rendered kernel that is replaced, and a part of the reason that the gate has to give; the same kernel without the
replacement has to pass. A hang or a crash costs one line. Writes gate.json and exits with 1 where a fault passed or a right kernel didn't.
"""

import json
import os
from dataclasses import dataclass, replace

from benchmarks.shared.environment import argument_parser, made_by, output_folder, this_gpu
from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Fate
from flashtune.templates import family
from flashtune.templates.rendering import render, variant_of
from flashtune.tuner.children import tasks
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.replies import Failed

FAMILY = family("flash_fwd_hopper")
LIMIT_S = 90.0
"""Seconds for one kernel: it is compiled, and inputs may have to be made."""

PLAIN: dict[str, int | str | bool] = dict(
    BLOCK_M=128,
    BLOCK_N=64,
    num_stages=2,
    intra_wg_overlap=1,
    pingpong=False,
    tiles="chained",
    section=1,
    order="fixed",
    ctas_per_sm=1,
    maximum="running",
    rescale="always",
    v_columns="padded",
    packed_heads=1,
)
PROBLEM = Problem(batch=2, heads=4, kv_heads=4, n_q=2048, n_kv=2048, d=64, d_v=64, dtype="fp16")
MASKED = replace(PROBLEM, features=Features(mask="bool"))
CLOCK = 'gl.inline_asm_elementwise("mov.u32 $0, %clock; /* $1 */", "=r,r", [offs_m], dtype=gl.int32, is_pure=False, pack=1)'


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Fault to plant: a line of a kernel, its replacement, and a part of the gate's reason."""

    name: str
    old: str
    new: str
    says: str
    problem: Problem = PROBLEM
    config: tuple[tuple[str, int | str | bool], ...] = ()

    def text(self, *, planted: bool) -> str:
        """The kernel's text with the fault or without; raises ValueError where the template no longer has the line."""
        config = Config.of(PLAIN, **dict(self.config))
        found = render(FAMILY, variant_of(FAMILY, self.problem.spec(), config))
        if found.count(self.old) != 1:
            raise ValueError(f"{self.name}: the kernel has {self.old!r} {found.count(self.old)} times, not once")
        return found.replace(self.old, self.new) if planted else found


FAULTS = (
    Fault(
        name="stale queries in a second tile",
        old="q_tile = smem.q.smem.index(next_slot)",
        new="q_tile = smem.q.smem.index(slot)",
        says="on programs for",
    ),
    Fault(
        name="stale values at the end of a second tile",
        old="product = start_pv(state.p_tile, smem.v.smem.index((block - 1) % STAGES), acc)",
        new="product = start_pv(state.p_tile, smem.v.smem.index((block - gl.where(iteration > 0, 2, 1)) % STAGES), acc)",
        says="on programs for",
        config=(("tiles", "loop"),),
    ),
    Fault(
        name="keys that one row tile of a long sequence skips",
        old="    first = 0\n",
        new="    first = gl.where((row >= 1024) & (row < 1152) & (n_kv > 1024), 1, 0)\n",
        says="n2048-",
    ),
    Fault(
        name="an LSE that depends on the time",
        old="lse = (row_max + gl.log2(row_sum)) * LN_2",
        new=f"lse = 1e-6 * ({CLOCK} & 15).to(gl.float32) + (row_max + gl.log2(row_sum)) * LN_2",
        says="two launches on the same inputs differ",
    ),
    Fault(
        name="the first head's mask for all",
        old="coord.head * sizes.mask_per_head",
        new="coord.head * 0",
        says="off by",
        problem=MASKED,
    ),
    Fault(
        name="the first batch's mask for all",
        old="coord.batch * sizes.mask_per_batch",
        new="coord.batch * 0",
        says="off by",
        problem=MASKED,
    ),
    Fault(
        name="maxima that aren't raised where rows outgrow them",
        old="if vote_outgrown(part, row_sum, W) != 0:",
        new="if vote_outgrown(part, row_sum, W) > 1:",
        says="",
        config=(("maximum", "first"), ("rescale", "grown")),
    ),
    Fault(
        name="tiles beyond float32 that aren't computed again",
        old="wrong = vote_overflowed(row_sum, W) != 0",
        new="wrong = vote_overflowed(row_sum, W) > 1",
        says="",
        config=(("maximum", "first"), ("rescale", "grown")),
    ),
)


def judged(workers: Workers, fault: Fault, source: Source, target: Target, *, planted: bool, seed: int) -> tuple[bool, str]:
    """The gate's verdict on a kernel: True where it is the right one, and its reason."""
    reply = workers.submit("device", tasks.recheck_on_device, source, fault.problem, target, seed, limit_s=LIMIT_S).reply()
    if isinstance(reply, Failed):
        return planted and reply.fate is Fate.CORRECTNESS and fault.says in reply.reason, f"{reply.fate}: {reply.reason}"
    return not planted, f"right, {reply.error:.2f} of the tolerance"


def faults(workers: Workers, target: Target, only: str, seed: int) -> list[dict[str, object]]:
    """Verdicts on kernels with each fault and without; a hang or a crash costs one of them."""
    rows: list[dict[str, object]] = []
    waiting = []
    seen = set()
    for fault in (fault for fault in FAULTS if only in fault.name):
        for planted in (False, True):
            source = Source(text=fault.text(planted=planted), stem="planted" if planted else "right")
            # Several faults are planted in one kernel.
            if (source.text, fault.problem) not in seen:
                seen.add((source.text, fault.problem))
                fixed = (source, fault.problem, target)
                compiling = workers.submit("compile", tasks.compile_candidate, *fixed, limit_s=workers.limits.compile_s)
                waiting.append((fault, planted, source, compiling))
    for fault, planted, source, compiling in waiting:
        compiling.reply()
        good, said = judged(workers, fault, source, target, planted=planted, seed=seed)
        rows.append({"fault": fault.name, "planted": planted, "as_it_should": good, "said": said})
        print(f"{'ok  ' if good else 'BAD '} {fault.name}{'' if planted else ', not planted'}: {said}", flush=True)
    return rows


def main() -> None:
    """Plant, check, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only faults whose name holds this")
    options = parser.parse_args()
    target = this_gpu()
    if not target.is_hopper:
        raise SystemExit(f"check_gate plants faults in Hopper kernels, and this machine has an {target.slug}: run it on an H100 or H200")
    with Workers(jobs=os.cpu_count() or 1) as workers:
        rows = faults(workers, target, options.only, options.seed)
    found = {"provenance": made_by(options.seed), "faults": rows}
    (output_folder() / "gate.json").write_text(json.dumps(found, indent=1))
    if not all(row["as_it_should"] for row in rows):
        raise SystemExit(1)
