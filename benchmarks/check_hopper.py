"""Checks `flash_fwd_hopper` on a Hopper GPU and times it beside cuDNN: `python benchmarks/check_hopper.py [--only numerics|times]`.

Numerics: every path of the template over a table of hard cases against the float64 reference, in child processes with a time limit
(a kernel that deadlocks never returns). Times: a list of configs interleaved with cuDNN's attention, L2 flushed before each launch.
Writes check_hopper.json to the folder named by OUT (default: the current one) and a short table to stdout.
"""

import argparse
import importlib.util
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashtune.core import reference  # noqa: E402
from flashtune.core.config import Config, KernelSpec  # noqa: E402
from flashtune.core.target import find_target  # noqa: E402
from flashtune.core.tolerances import tolerance  # noqa: E402
from flashtune.templates.flash_fwd_hopper import FAMILY  # noqa: E402
from flashtune.templates.rendering import render, variant_of  # noqa: E402

TARGET = find_target("h200")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

PLAIN: dict[str, Any] = {
    "BLOCK_M": 128, "BLOCK_N": 128, "consumers": 2, "stages": 2, "lookahead": 1, "pingpong": "none", "release": "mbarrier",
    "tiles": "chained", "order": "ascending", "section": 1, "idle_sms": 0, "producer_registers": 24,
}  # fmt: skip
THREE: dict[str, Any] = {"BLOCK_M": 192, "consumers": 3, "producer_registers": 32}


def spec_of(d: int = 128, d_v: int | None = None, dtype: str = "bf16", **features: Any) -> KernelSpec:
    """A forward spec; features are off unless given."""
    plain: dict[str, Any] = {"causal": False, "window": False, "mask": "none", "dropout": False, "softcap": False}
    return KernelSpec(direction="fwd", dtype=dtype, d=d, d_v=d_v or d, tf32=False, **{**plain, **features})  # type: ignore[arg-type]


def config_of(**changes: Any) -> Config:
    """PLAIN with some axes changed."""
    return Config.of({**PLAIN, **changes})


def load(spec: KernelSpec, config: Config) -> Any:
    """Renders and imports a variant; raises ValueError where it breaks a constraint."""
    variant = variant_of(FAMILY, spec, config)
    if (broken := FAMILY.violated(config, spec, TARGET)) is not None:
        raise ValueError(f"{broken.name}: {config.label()}")
    path = Path(tempfile.gettempdir()) / f"hopper_{variant.id}.py"
    path.write_text(render(FAMILY, variant))
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


# ---- numerics -----------------------------------------------------------------------------------------------------------------------

SIZES = [
    # batch, heads, kv_heads, n_q, n_kv
    (2, 4, 4, 256, 256),
    (1, 3, 3, 1, 1),
    (2, 4, 2, 77, 201),
    (1, 6, 2, 515, 130),
    (3, 2, 1, 129, 640),
    (2, 8, 8, 1000, 1000),
    (1, 40, 8, 333, 517),
]


def cases_of(spec: KernelSpec) -> list[dict[str, Any]]:
    """The cases that a spec's kernels are checked on."""
    cases = []
    for index, (batch, heads, kv_heads, n_q, n_kv) in enumerate(SIZES):
        case: dict[str, Any] = {
            "batch": batch, "heads": heads, "kv_heads": kv_heads, "n_q": n_q, "n_kv": n_kv, "diagonal": 0, "left": None, "right": None,
            "scale": 0.13 if index % 3 else -0.09, "softcap": 7.0, "p": 0.2, "layout": "bnhd" if index % 2 else "bhnd",
        }  # fmt: skip
        if spec.causal:
            case["right"] = 0
        if spec.window:
            case["left"] = (5, 64, 130, None)[index % 4] if not spec.causal else (5, 64, 130, 0)[index % 4]
            case["right"] = 0 if spec.causal else (17, None, 0, 100)[index % 4]
        cases.append(case)
        if spec.causal or spec.window:
            cases.append({**case, "diagonal": n_kv - n_q})
    return cases


def tensor(batch: int, heads: int, n: int, d: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Random (B, H, N, D), contiguous or a view of (B, N, H, D)."""
    if layout == "bnhd":
        return torch.randn(batch, n, heads, d, device="cuda", dtype=dtype).transpose(1, 2)
    return torch.randn(batch, heads, n, d, device="cuda", dtype=dtype)


def check(module: Any, spec: KernelSpec, case: dict[str, Any]) -> dict[str, Any]:
    """Error over tolerance of output, LSE and norm (each <= 1 passes), with poisoned outputs and a guard band beside them."""
    torch.manual_seed(case["n_q"] * 1000 + case["n_kv"])
    dtype, batch, heads, n_q, n_kv = DTYPES[spec.dtype], case["batch"], case["heads"], case["n_q"], case["n_kv"]
    q = tensor(batch, heads, n_q, spec.d, case["layout"], dtype)
    k = tensor(batch, case["kv_heads"], n_kv, spec.d, case["layout"], dtype)
    v = tensor(batch, case["kv_heads"], n_kv, spec.d_v, case["layout"], dtype)
    mask = None
    if spec.mask == "bool":
        mask = torch.rand(1, heads, n_q, n_kv, device="cuda") > 0.4
        mask[:, :, n_q // 2] = False
        mask = mask.expand(batch, heads, n_q, n_kv)
    elif spec.mask == "bias":
        mask = torch.randn(batch, 1, n_q, n_kv, device="cuda", dtype=dtype)
        mask[:, :, n_q // 3] = float("-inf")
        mask = mask.expand(batch, heads, n_q, n_kv)
    keep, p, seed, offset = None, 0.0, 2**40 + 12345, 7
    if spec.dropout:
        p = case["p"]
        keep = reference.dropout_keep(seed, offset, batch, heads, n_q, n_kv, p, device="cuda")
    softcap = case["softcap"] if spec.softcap else 0.0
    guarded = torch.full((batch, heads, n_q + 3, spec.d_v), float("nan"), device="cuda", dtype=dtype)
    out = guarded[:, :, :n_q]
    lse = torch.full((batch * heads * n_q + 64,), float("nan"), device="cuda")
    assert module.accepts(q, k, v, mask)
    module.launch(
        q, k, v, out, lse[: batch * heads * n_q].view(batch, heads, n_q), mask=mask, scale=case["scale"], diagonal=case["diagonal"],
        window_left=-1 if case["left"] is None else case["left"], window_right=-1 if case["right"] is None else case["right"],
        softcap=softcap, dropout_p=p, seed=seed, offset=offset,
    )  # fmt: skip
    torch.cuda.synchronize()
    want, want_lse = reference.attention(
        q, k, v, mask=mask, scale=case["scale"], left=case["left"], right=case["right"], diagonal=case["diagonal"], softcap=softcap,
        keep=keep, dropout_p=p,
    )  # fmt: skip
    bound = tolerance(spec)
    got, got_lse = out.double(), lse[: batch * heads * n_q].view(batch, heads, n_q).double()
    seen = want_lse > float("-inf")
    ratio = ((got - want).abs() / (bound.atol + bound.rtol * want.abs())).max().item()
    norm = ((got - want).norm() / want.norm().clamp_min(1e-30)).item() / bound.relative_norm
    lse_error = (got_lse - want_lse)[seen].abs().max().item() / bound.lse_atol if seen.any() else 0.0
    clean = bool(guarded[:, :, n_q:].isnan().all()) and bool(lse[batch * heads * n_q :].isnan().all())
    empty = bool((got_lse[~seen] == float("-inf")).all()) and bool((got.masked_select(~seen[..., None]) == 0).all())
    passed = clean and empty and not got.isnan().any().item() and ratio <= 1 and norm <= 1 and lse_error <= 1
    return {"passed": bool(passed), "ratio": ratio, "norm": norm, "lse": lse_error, "clean": clean, "empty": empty, "case": case}


def numerics_units() -> list[tuple[KernelSpec, Config]]:
    """The variants whose numbers are checked: every path of the template, every feature, every head size."""
    paths = [
        config_of(),
        config_of(tiles="chained", release="named", pingpong="named"),
        config_of(tiles="chained", pingpong="mbarrier", BLOCK_N=64, stages=3),
        config_of(tiles="loop"),
        config_of(tiles="loop", lookahead=0, pingpong="named", release="named"),
        config_of(tiles="one", stages=3),
        config_of(tiles="one", lookahead=0),
        config_of(tiles="one", BLOCK_M=64, consumers=1, BLOCK_N=64),
        config_of(tiles="loop", lookahead=2, BLOCK_N=64, stages=3),
        config_of(tiles="chained", lookahead=2, BLOCK_N=64, stages=3),
        config_of(tiles="chained", lookahead=2, BLOCK_N=64, stages=3, release="named", pingpong="named"),
        config_of(tiles="one", lookahead=2, BLOCK_N=64, release="named", pingpong="named"),
    ]
    banded = [
        config_of(order="serpentine", section=4),
        config_of(tiles="chained", release="named", pingpong="named", order="descending", section=8, idle_sms=1),
        config_of(tiles="loop", order="serpentine", section=2),
        config_of(tiles="one", order="descending", section=4, BLOCK_N=64, stages=4),
    ]
    units = [(spec_of(), path) for path in paths] + [(spec_of(causal=True), path) for path in paths[4:] + banded]
    for config in (
        config_of(BLOCK_N=64, stages=3),
        config_of(BLOCK_N=64, tiles="one", lookahead=0, release="named"),
    ):
        for features in (
            {"window": True}, {"causal": True, "window": True}, {"causal": True, "softcap": True}, {"mask": "bool"}, {"mask": "bias"},
            {"causal": True, "dropout": True}, {"causal": True, "mask": "bias", "dropout": True, "softcap": True, "window": True},
        ):  # fmt: skip
            units.append((spec_of(64, dtype="fp16" if config["tiles"] == "one" else "bf16", **features), config))
    units += [(spec_of(64, causal=causal), config_of(**THREE, stages=3)) for causal in (False, True)]
    units += [(spec_of(64, causal=True), config_of(**THREE, stages=3, pingpong="named", tiles="one"))]
    units += [(spec_of(64, causal=True), config_of(BLOCK_M=256, BLOCK_N=64, stages=3))]
    units += [(spec_of(d, causal=True, dtype="fp16"), config_of()) for d in (32, 72, 96)]
    units += [(spec_of(d, d_v, causal=True), config_of(tiles="loop", BLOCK_N=64)) for d, d_v in ((256, 256), (192, 192), (192, 128))]
    units += [(spec_of(64, causal=True), config_of(lookahead=2, stages=3, order="serpentine", section=4))]
    units += [(spec_of(64, causal=True, window=True), config_of(tiles="one", lookahead=2, stages=2))]
    units += [(spec_of(192, 128), config_of(tiles="one", BLOCK_N=64)), (spec_of(64, 128), config_of(tiles="loop"))]
    return units


def child_numerics(index: int) -> None:
    """In a child: one variant over all its cases, a JSON line each."""
    spec, config = numerics_units()[index]
    module = load(spec, config)
    for case in cases_of(spec):
        print(json.dumps({"begin": case}), flush=True)
        print(json.dumps(check(module, spec, case)), flush=True)


def run_numerics(limit_s: float, jobs: int) -> list[dict[str, Any]]:
    """Every variant in a child of its own, `jobs` at once."""
    units = numerics_units()
    waiting: queue.Queue[int] = queue.Queue()
    for index in range(len(units)):
        waiting.put(index)
    results: list[dict[str, Any]] = []

    def work() -> None:
        while True:
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            spec, config = units[index]
            out, note = run_child(["--child-numerics", str(index)], limit_s)
            rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            checked = [row for row in rows if "passed" in row]
            failed = [row for row in checked if not row["passed"]]
            if note and rows and "begin" in rows[-1]:
                failed.append({"stopped in": rows[-1]["begin"]})
            results.append(
                {
                    "spec": spec.label(),
                    "config": config.as_dict(),
                    "cases": len(checked),
                    "wanted": len(cases_of(spec)),
                    "failed": failed,
                    "note": note,
                    "worst": max((max(r["ratio"], r["norm"], r["lse"]) for r in checked), default=None),
                }
            )

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def run_child(arguments: list[str], limit_s: float) -> tuple[str, str]:
    """What a child printed, and why it ended early (empty where it didn't)."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen([sys.executable, __file__, *arguments], stdout=out, stderr=err)
        note = ""
        try:
            if child.wait(limit_s) != 0:
                note = "failed"
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            note = f"stopped after {limit_s:.0f} s"
        out.seek(0)
        err.seek(0)
        tail = err.read().strip().splitlines()[-3:] if note else []
        return out.read(), " | ".join([note, *tail]) if note else ""


# ---- times --------------------------------------------------------------------------------------------------------------------------


def timed_configs(d: int, causal: bool) -> list[Config]:
    """The configs raced for one head size."""
    order: dict[str, Any] = {"order": "descending", "section": 8} if causal else {}
    snake: dict[str, Any] = {"order": "serpentine", "section": 8} if causal else {"section": 4}
    if d == 64:
        base: list[dict[str, Any]] = [
            {**THREE, "stages": 3},
            {**THREE, "stages": 3, "release": "named"},
            {**THREE, "stages": 3, "pingpong": "named"},
            {**THREE, "stages": 3, "release": "named", "pingpong": "named"},
            {**THREE, "stages": 2, "tiles": "one"},
            {**THREE, "stages": 3, "tiles": "loop"},
            {"stages": 3},
            {"stages": 3, "release": "named", "pingpong": "named"},
            {"stages": 2, "tiles": "one"},
            {"BLOCK_M": 256, "BLOCK_N": 64, "stages": 4},
            {"stages": 3, "lookahead": 2},
            {"stages": 3, "lookahead": 2, "release": "named"},
            {"stages": 3, "lookahead": 2, "pingpong": "named"},
            {"stages": 3, "lookahead": 2, "pingpong": "mbarrier"},
            {"stages": 3, "tiles": "one", "lookahead": 2},
            {**THREE, "BLOCK_N": 64, "stages": 4, "lookahead": 2},
        ]
    elif d == 128:
        base = [
            {},
            {"release": "named"},
            {"pingpong": "named"},
            {"pingpong": "mbarrier"},
            {"release": "named", "pingpong": "named"},
            {"tiles": "one"},
            {"tiles": "one", "pingpong": "mbarrier"},
            {"tiles": "loop"},
            {"tiles": "loop", "release": "named"},
            {"BLOCK_N": 64, "stages": 4},
            {"idle_sms": 1},
            {"BLOCK_N": 64, "stages": 4, "lookahead": 2},
            {"BLOCK_N": 64, "stages": 4, "lookahead": 2, "release": "named"},
        ]
    else:
        base = [
            {"BLOCK_N": 64, "tiles": "loop"},
            {"BLOCK_N": 64, "tiles": "loop", "release": "named"},
            {"BLOCK_N": 64, "tiles": "loop", "pingpong": "named"},
            {"BLOCK_N": 64, "tiles": "one"},
            {"BLOCK_N": 64, "tiles": "one", "release": "named"},
            {"BLOCK_N": 64, "tiles": "one", "pingpong": "named"},
            {"BLOCK_N": 64, "tiles": "one", "lookahead": 0, "pingpong": "named"},
            {"BLOCK_N": 64, "tiles": "loop", "lookahead": 2},
        ]
    configs = [config_of(**{**order, **changes}) for changes in base]
    configs += [config_of(**{**snake, **base[0]}), config_of(**{**snake, **base[1]})]
    if causal:
        one = next(changes for changes in base if changes.get("tiles") == "one")
        configs += [config_of(**{**one, "order": "descending", "section": section}) for section in (1, 2, 32)]
    return list(dict.fromkeys(configs))


PROBLEMS = [(d, n, causal) for d in (64, 128, 256) for causal in (False, True) for n in (4096, 16384, 1024)]


def child_compile(share: int, shares: int) -> None:
    """In a child: fills Triton's cache with a share of the raced variants."""
    pairs = list(dict.fromkeys((d, causal, config) for d, _, causal in PROBLEMS for config in timed_configs(d, causal)))
    for d, causal, config in pairs[share::shares]:
        x = torch.empty(1, 1, 64, d, device="cuda", dtype=torch.bfloat16)
        lse = torch.empty(1, 1, 64, device="cuda")
        for kernel, grid, arguments, options in load(spec_of(d, causal=causal), config).launches(x, x, x, x, lse, **call(d)):
            compiled = kernel.warmup(*arguments, grid=grid, **options)
            print(json.dumps({"d": d, "causal": causal, "config": config.label(), "shared": compiled.metadata.shared}), flush=True)


def call(d: int) -> dict[str, Any]:
    """The keyword arguments of a plain call."""
    return {
        "mask": None, "scale": d**-0.5, "diagonal": 0, "window_left": -1, "window_right": -1, "softcap": 0.0, "dropout_p": 0.0, "seed": 0,
        "offset": 0,
    }  # fmt: skip


def child_times(index: int, rounds: int, skip: list[str]) -> None:
    """In a child: the race of one problem, a JSON line a config."""
    d, n, causal = PROBLEMS[index]
    batch, heads = 16384 // n, 2048 // d
    q, k, v = (torch.randn(batch, heads, n, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lse = torch.empty(batch, heads, n, device="cuda")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    flops = 4 * batch * heads * n * n * d / (2 if causal else 1)

    def cudnn() -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    want = cudnn().float()
    runs: dict[str, Any] = {"cudnn": cudnn}
    for config in timed_configs(d, causal):
        label = config.label()
        if label in skip:
            continue
        print(json.dumps({"begin": label}), flush=True)
        try:
            module = load(spec_of(d, causal=causal), config)
            out = torch.full_like(q, float("nan"))
            [(kernel, grid, arguments, options)] = module.launches(q, k, v, out, lse, **call(d))
            kernel[grid](*arguments, **options)
            torch.cuda.synchronize()
        except Exception as error:  # a config that can't be built or run is a row of the result
            print(json.dumps({"label": label, "error": repr(error)[:300]}), flush=True)
            continue
        error_ = (out.float() - want).abs().max().item()
        if not error_ < 0.02:
            print(json.dumps({"label": label, "error": f"differs from cuDNN by {error_}"}), flush=True)
            continue
        runs[label] = lambda kernel=kernel, grid=grid, arguments=arguments, options=options: kernel[grid](*arguments, **options)
    print(json.dumps({"begin": "times"}), flush=True)
    samples: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            # One untimed launch first, so that clocks and power are those of this kernel.
            run()
            for _ in range(2):
                flush.zero_()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                end.synchronize()
                samples[label].append(begin.elapsed_time(end))
    for label, times in samples.items():
        median = statistics.median(times)
        print(json.dumps({"label": label, "ms": median, "min_ms": min(times), "tflops": flops / median / 1e9}), flush=True)


def run_times(limit_s: float, jobs: int, rounds: int) -> list[dict[str, Any]]:
    """Compiles in parallel, then races problem after problem."""
    shares = jobs
    threads = [threading.Thread(target=run_child, args=(["--child-compile", str(i), str(shares)], limit_s)) for i in range(shares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = []
    for index, (d, n, causal) in enumerate(PROBLEMS):
        skip: list[str] = []
        for _ in range(3):
            out, note = run_child(["--child-times", str(index), str(rounds), json.dumps(skip)], limit_s)
            rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            timed = [row for row in rows if "tflops" in row]
            if timed or not rows or "begin" not in rows[-1] or rows[-1]["begin"] == "times":
                break
            skip.append(rows[-1]["begin"])
        errors = [row for row in rows if "error" in row] + [{"label": label, "error": "hung or crashed"} for label in skip]
        results.append({"d": d, "n": n, "causal": causal, "rows": timed, "errors": errors, "note": note})
        show(results[-1])
    return results


def show(result: dict[str, Any]) -> None:
    """A few lines on one race."""
    rows = sorted(result["rows"], key=lambda row: row["ms"])
    base = next((row["tflops"] for row in rows if row["label"] == "cudnn"), float("nan"))
    print(f"d{result['d']} n{result['n']} {'causal' if result['causal'] else 'full'}: cudnn {base:.0f} {result['note']}", flush=True)
    for row in rows[:4]:
        print(f"    {row['tflops']:6.1f} {row['tflops'] / base:5.3f} {short(row['label'])}", flush=True)
    for row in result["errors"][:4]:
        print(f"    ERROR {short(row['label'])}: {row['error']}", flush=True)


def short(label: str) -> str:
    """What of a config differs from PLAIN."""
    plain = Config.of(PLAIN).label().split()
    return " ".join(word for word in label.split() if word not in plain) or "(plain)"


def main() -> None:
    """Parses, runs, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("numerics", "times"))
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--limit", type=float, default=75.0, help="seconds that one child may take")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child-numerics", type=int)
    parser.add_argument("--child-compile", type=int, nargs=2)
    parser.add_argument("--child-times", nargs=3)
    options = parser.parse_args()
    if options.child_numerics is not None:
        return child_numerics(options.child_numerics)
    if options.child_compile is not None:
        return child_compile(*options.child_compile)
    if options.child_times is not None:
        index, rounds, skip = options.child_times
        return child_times(int(index), int(rounds), json.loads(skip))
    path = Path(os.environ.get("OUT", ".")) / "check_hopper.json"
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    begin = time.time()
    if options.only != "times":
        found["numerics"] = run_numerics(options.limit, options.jobs)
        path.write_text(json.dumps(found, indent=1))
        good = [unit for unit in found["numerics"] if not unit["failed"] and not unit["note"] and unit["cases"] == unit["wanted"]]
        print(f"numerics: {len(good)} of {len(found['numerics'])} units pass in {time.time() - begin:.0f} s")
        for unit in found["numerics"]:
            if unit not in good:
                worst = f"{unit['cases']}/{unit['wanted']} cases, {len(unit['failed'])} failed, {unit['note'][:300]}"
                print(f"  FAIL {unit['spec']} {short(Config.of(unit['config']).label())}: {worst}")
                for row in unit["failed"][:2]:
                    print(f"      {json.dumps(row)[:400]}")
    if options.only != "numerics":
        found["times"] = run_times(options.limit, options.jobs, options.rounds)
    found["seconds"] = time.time() - begin
    path.write_text(json.dumps(found, indent=1))
    print(f"{found['seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
