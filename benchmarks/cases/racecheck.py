"""Accesses that `compute-sanitizer --tool racecheck` reports in persistent Hopper kernels, by instruction and line.

Every kernel runs once, on a little problem with two programs, so that each goes from tile to tile, and its output is compared with float64.
Reported addresses are looked up in the disassembled kernel: the instruction, the line of the rendered text that it comes from, and the
warps. All of it is printed and written to racecheck.json, and the sanitizer's output to racecheck-NAME.txt. `--replace OLD NEW` changes a
line of the rendered text first, to see the report on a planted fault; the output may then be wrong.

Needs a GPU of compute capability 9.0, and compute-sanitizer on the PATH.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.shared.environment import argument_parser, output_folder
from flashtune.core.code.launching import compiler_options, provided
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem
from flashtune.templates import family
from flashtune.templates.loading import load_kernel
from flashtune.templates.rendering import render, variant_of

FAMILY = family("flash_fwd_hopper")
RUN = Path(__file__).parent.parent / "run.py"
SMS = 2
"""Multiprocessors that the kernel is launched for: as many programs."""

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
    rescale="always",
    v_columns="padded",
    packed_heads=1,
)
KERNELS: dict[str, tuple[dict[str, int | str | bool], Features]] = {
    "running": ({"maximum": "running"}, Features()),
    "settling": ({"maximum": "first", "rescale": "grown", "order": "drawn"}, Features(causal=True)),
    "loop": ({"maximum": "first", "rescale": "grown", "tiles": "loop"}, Features()),
    "one": ({"maximum": "running", "tiles": "one"}, Features()),
}
"""Chained tiles; chained and drawn tiles whose maxima settle; tiles in a loop; one tile a program, for comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """An instruction that takes part in a hazard, with its line of the rendered text."""

    kind: str
    offset: str
    instruction: str
    line: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A line of the disassembly, and the innermost line of the rendered text that it was made of."""

    text: str
    line: int | None


def problem_of(features: Features) -> Problem:
    """Six tiles of a program, several key blocks in each, ragged at both ends."""
    return Problem(batch=1, heads=4, kv_heads=2, n_q=330, n_kv=330, d=64, d_v=64, dtype="bf16", features=features)


def text_of(name: str, replaced: list[str] | None) -> str:
    """The rendered text of a kernel, with a line replaced if one is named; raises SystemExit where the text lacks that line."""
    changes, features = KERNELS[name]
    problem = problem_of(features)
    text = render(FAMILY, variant_of(FAMILY, problem.spec(), Config.of(PLAIN, **changes)))
    if replaced:
        old, new = replaced
        if old not in text:
            raise SystemExit(f"the text of {name!r} has no {old!r}: take a line of the rendered kernel")
        text = text.replace(old, new)
    return text


def launch(name: str, replaced: list[str] | None, folder: Path) -> None:
    """One launch in this process; its machine code goes to the folder, the verdict on its output to the terminal."""
    import torch

    from flashtune.tuner.verify.correctness import compare, everywhere, oracle, stacked
    from flashtune.tuner.verify.inputs import make_inputs

    problem = problem_of(KERNELS[name][1])
    module = load_kernel(text_of(name, replaced), f"racecheck_{name}")
    # Made on the CPU: the sanitizer looks at each kernel that is launched.
    made = make_inputs(problem, device="cpu", seed=0)
    inputs = type(made)(problem=problem, operands={key: x.cuda() for key, x in made.operands.items()}, parameters=made.parameters)
    words = provided(module, inputs.q, inputs.k) | {"sms": SMS} | inputs.keywords
    for kernel, grid, arguments, options in module.launches(*inputs.arguments, **words):
        compiled = kernel[grid](*arguments, **compiler_options(options))
        (folder / f"{name}.cubin").write_bytes(compiled.asm["cubin"])
        print(f"{kernel.__name__} on {grid[0]} programs", flush=True)
    torch.cuda.synchronize()
    for key, x in inputs.operands.items():
        made.operands[key].copy_(x)
    verdict = compare(made, stacked(problem, oracle(made, everywhere(problem))))
    print(verdict.reason or f"right: at most {verdict.error:.2f} of the tolerance", flush=True)
    if verdict.reason and not replaced:
        raise SystemExit(1)


def disassembled(cubin: Path) -> dict[int, Instruction]:
    """The instructions of a kernel by their offsets, each with its line of the rendered text."""
    tool = shutil.which("nvdisasm") or _of_triton("nvdisasm")
    shown = subprocess.run([tool, "-g", "-c", str(cubin)], capture_output=True, text=True, check=True, timeout=60).stdout
    found: dict[int, Instruction] = {}
    line: int | None = None
    for row in shown.splitlines():
        if source := re.search(r'//## File "([^"]*)", line (\d+)', row):
            # Of inlined calls nvdisasm names the innermost first; lines of Triton's own library say less than who called them.
            inner = "flashtune_rendered" in source[1]
            outer = re.search(r'inlined at "[^"]*flashtune_rendered[^"]*", line (\d+)', row)
            line = int(source[2]) if inner else int(outer[1]) if outer else line
        elif code := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", row):
            found[int(code[1], 16)] = Instruction(text=" ".join(code[2].split()), line=line)
    return found


def _of_triton(tool: str) -> str:
    from triton import knobs

    return str(getattr(knobs.nvidia, tool).path)


def races(said: str) -> list[tuple[list[tuple[str, int]], int]]:
    """Races of the sanitizer's analysis: the accesses of each, by kind and offset, and its number of hazards."""
    found: list[tuple[list[tuple[str, int]], int]] = []
    first: tuple[str, int] | None = None
    for row in said.splitlines():
        # `Race reported between Write access at NAME+0x10 in FILE:LINE`, `and Read access at 0x20 in ... [16 hazards]`, older and newer.
        match = re.search(r"(Race reported between|and)\s+(\w+) access at\s+(.*)", row)
        if not match:
            continue
        offset = re.search(r"\+0x([0-9a-f]+)", match[3]) or re.search(r"\b0x([0-9a-f]+)", match[3])
        access = match[2], int(offset[1], 16) if offset else -1
        if match[1] != "and":
            first = access
        hazards = re.search(r"\[(\d+) hazards?\]", row)
        if first is not None and (match[1] == "and" or hazards):
            found.append(([first] if access == first else [first, access], int(hazards[1]) if hazards else 0))
    return found


def hazards(said: str) -> Counter[tuple[str, str, str]]:
    """Hazards that the sanitizer lists: kind of hazard, kind of access with its offset, and warp, counted."""
    found: Counter[tuple[str, str, str]] = Counter()
    kind = ""
    for row in said.splitlines():
        if (match := re.search(r"\b(RAW|WAR|WAW) hazard detected at __shared__ 0x[0-9a-f]+", row)) is not None:
            kind = match[1]
        elif kind and (match := re.search(r"(Read|Write) Thread \((\d+),.*?\) at (.*)", row)) is not None:
            offset = re.search(r"\+0x([0-9a-f]+)", match[3]) or re.search(r"\b0x([0-9a-f]+)", match[3])
            found[kind, f"{match[1]} 0x{offset[1] if offset else '?'}", f"warp {int(match[2]) // 32}"] += 1
    return found


def addresses(said: str) -> Counter[str]:
    """Words of shared memory with hazards, counted."""
    return Counter(re.findall(r"hazard detected at __shared__ (0x[0-9a-f]+)", said))


def sanitized(names: list[str], replaced: list[str] | None, folder: Path, limit_s: float) -> dict[str, str]:
    """Racecheck's output on one launch of each kernel, all at once; raises SystemExit where there is no such tool."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    try:
        options = subprocess.run([tool, "--help"], capture_output=True, text=True, timeout=30).stdout
    except FileNotFoundError:
        raise SystemExit("racecheck needs compute-sanitizer, which isn't on the PATH: add CUDA's bin folder") from None
    chosen = ["--kernel-regex", "kns=flash_fwd_hopper"] if "--kernel-regex" in options else []
    command = [tool, "--tool", "racecheck", "--racecheck-report", "all", "--print-limit", "4000", *chosen]
    command += [sys.executable, str(RUN), "racecheck"]
    more = ["--replace", *replaced] if replaced else []
    logs = {name: folder / f"racecheck-{name}.txt" for name in names}
    running = {
        name: subprocess.Popen([*command, "--launch", name, *more], stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True)
        for name, log in logs.items()
    }
    until = time.monotonic() + limit_s
    for name, process in running.items():
        try:
            process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            # With what the sanitizer started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with logs[name].open("a") as log:
                log.write(f"\nstopped after {limit_s:g} s\n")
    return {name: log.read_text() for name, log in logs.items()}


def report_of(name: str, replaced: list[str] | None, folder: Path, said: str) -> dict[str, object]:
    """Print and return racecheck's report on a kernel, by instruction and line."""
    own = [row for row in said.splitlines() if not row.startswith("=====")]
    print(f"== {name}: {' / '.join(own[-6:])}", flush=True)
    if not (folder / f"{name}.cubin").exists():
        return {"kernel": name, "failed": said[-2000:]}
    code, lines = disassembled(folder / f"{name}.cubin"), text_of(name, replaced).splitlines()

    def access(kind: str, offset: int) -> Access:
        found = code.get(offset)
        line = found.line if found else None
        text = lines[line - 1].strip() if line and line <= len(lines) else ""
        return Access(kind=kind, offset=f"0x{offset:x}", instruction=found.text if found else "?", line=line, text=text)

    made = [{"accesses": [asdict(access(*one)) for one in pair], "hazards": number} for pair, number in races(said)]
    for race in made:
        print(f"race, {race['hazards']} hazards")
        for one in race["accesses"]:  # type: ignore[attr-defined]
            print(f"  {one['kind']:5s} {one['offset']:>7s}  {one['instruction'][:60]:60s} line {one['line']}: {one['text'][:110]}")
    counted = hazards(said)
    for (kind, where, warp), number in sorted(counted.items(), key=lambda item: -item[1])[:40]:
        one = access(*_parted(where))
        print(f"{number:5d} {kind} {where:14s} {warp:8s} {one.instruction[:44]:44s} line {one.line}: {one.text[:90]}")
    words = addresses(said)
    print(f"{len(words)} words of shared memory: {', '.join(sorted(words)[:8])}{' ...' if len(words) > 8 else ''}")
    print(
        "\n".join(row for row in said.splitlines() if "RACECHECK SUMMARY" in row or "stopped after" in row or "rror:" in row)[:1500],
        flush=True,
    )
    single = [{"kind": kind, "access": where, "warp": warp, "count": number} for (kind, where, warp), number in counted.items()]
    return {"kernel": name, "races": made, "hazards": single, "addresses": dict(words)}


def _parted(where: str) -> tuple[str, int]:
    kind, offset = where.split(" ")
    return kind, int(offset, 16) if offset != "0x?" else -1


def main() -> None:
    """Report on the kernels that are named, or be the process that launches one."""
    parser = argument_parser(__doc__)
    parser.add_argument("--kernels", default="running,settling", help=f"of {', '.join(KERNELS)} (default: %(default)s)")
    parser.add_argument("--replace", nargs=2, metavar=("OLD", "NEW"), help="change the rendered text")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds for all kernels, which run at once (default: %(default)s)")
    parser.add_argument("--launch", choices=KERNELS, help="launch one kernel in this process, and nothing more")
    options = parser.parse_args()
    folder, names = output_folder(), options.kernels.split(",")
    if options.launch:
        launch(options.launch, options.replace, folder)
        return
    said = sanitized(names, options.replace, folder, options.limit)
    found = [report_of(name, options.replace, folder, said[name]) for name in names]
    (folder / "racecheck.json").write_text(json.dumps(found, indent=1))
