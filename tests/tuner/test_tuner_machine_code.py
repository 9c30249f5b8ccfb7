"""Machine code of generated kernels: reproducible, the very instructions of a launch by Triton's JIT, and fit for usual calls."""

import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from commands import flashtune
from shipped_rows import with_kernels

from flashtune.core.code.archive import Archive
from flashtune.core.code.binaries import Binary, Manifest, source_digest
from flashtune.core.code.index import INDEX, read_index
from flashtune.core.code.launching import LoadedKernel, keyword_plan, provided
from flashtune.core.code.shipped import PACKAGE, folder_of, manifest_in, shipped_index, shipped_manifest
from flashtune.core.problems.problem import Problem
from flashtune.templates import BITS, family
from flashtune.templates.loading import host_of, load_kernel
from flashtune.tuner.children.compile import compiling_for, machine_code_of, taking
from flashtune.tuner.publish import machine_code, packing
from flashtune.tuner.publish.generated import Arranged, archive_of, arrange, index_text, kept, orders_of, present_archive, write
from flashtune.tuner.publish.machine_code import IN_PARTS, ONE_TILE, OUTPUT_ALONE, SIZES, Built, Order, build, build_all, with_files
from flashtune.tuner.verify.inputs import make_inputs

pinned = pytest.mark.skipif(triton.__version__ != "3.6.0", reason="shipped code is compared with what Triton 3.6.0 compiles")


def ordered(one: Arranged) -> Order:
    return orders_of(one)[0]


# Not before a test needs them, since every worker collects this file.
@cache
def arranged() -> list[Arranged]:
    return arrange(with_kernels(bits=BITS))


@cache
def decode() -> Arranged:
    return next(one for one in arranged() if one.variant.template == "flash_decode" and one.variant.spec.causal)


@pytest.fixture(scope="module")
def built() -> Built:
    return build(ordered(decode()))


def sass(code: bytes, path: Path) -> list[str]:
    path.write_bytes(code)
    tool = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/.*", listing)


def test_instructions_are_those_of_a_launch_by_the_jit(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a user's process, which compiles with the lines.
    monkeypatch.delenv("TRITON_DISABLE_LINE_INFO")
    one = ordered(decode())
    module = load_kernel(one.text, "jit")
    record = decode().records[0]
    inputs = make_inputs(replace(record.problem, batch=1, heads=4, kv_heads=1), device="meta", seed=0)
    words = inputs.keywords | provided(module, inputs.q, inputs.k) | {"sms": one.target.sms}
    compared = 0
    with compiling_for(one.target):
        again = load_kernel(one.text, "again").launches(*inputs.arguments, **words)
        planned = keyword_plan(module.host, inputs.arguments, words).launches
        launches = module.launches(*inputs.arguments, **words)
        for (kernel, grid, args, options), (fresh, *_), launch in zip(launches, again, planned, strict=True):
            compiled = kernel.warmup(*args, grid=grid, **options)
            binary = built.manifest.matching(kernel.__name__, launch.arguments)
            assert binary is not None
            code = built.codes[built.manifest.binaries.index(binary)]
            ours, jits = sass(code, tmp_path / "ours"), sass(compiled.asm["cubin"], tmp_path / "jits")
            assert ours == jits
            assert len(ours) > 100
            assert len(code) < len(compiled.asm["cubin"]) / 2
            found = taken(fresh, grid, args, options, one, tmp_path)
            assert described(found) == described(compiled), "the JIT finds it, and launches it as what it compiles"
            compared += 1
    assert compared == len(built.manifest.binaries)


def taken(kernel: Any, grid: Any, args: Any, options: Any, one: Order, folder: Path) -> Any:
    """The JIT's findings for a kernel that was never compiled here."""
    triton_knobs: Any = triton.knobs
    with triton_knobs.cache.scope(), taking(kernel, machine_code_of(one.variant_id, one.text, one.target)) as found:
        triton_knobs.cache.dir = str(folder)
        compiled = kernel.warmup(*args, grid=grid, **options)
    assert found
    return compiled


def described(compiled: Any) -> dict[str, Any]:
    """All that Triton knows of a kernel beside its code, but where the library lay that it was linked with: the cache may hold another
    checkout's."""
    known = compiled.metadata._asdict()
    return known | {"extern_libs": [name for name, _ in known["extern_libs"]], "launched as": compiled.packed_metadata}


def test_code_that_serves_any_size_stands_once_and_masks_have_one_for_aligned_sizes() -> None:
    for one, manifest in manifests():
        for kernel in {binary.kernel for binary in manifest.binaries}:
            names = list(dict.fromkeys(re.sub(r"_\d+$", "", one.specialization) for one in manifest.of(kernel)))
            if names[-1] == IN_PARTS:
                # What adds up parts is launched where there are some alone.
                assert one.variant.spec.dbias and kernel in ("score_gradients", "sum_parts")
                names = names[:-1] if kernel == "score_gradients" else ["any_size"]
            if one.variant.config.get("dq_sums", "") == "own" and kernel in ("preprocess", "flash_bwd_hopper"):
                alone = [OUTPUT_ALONE] if kernel == "preprocess" else []
                assert names == ["any_size", *alone, *ONE_TILE[: 1 + len(alone)]], (one.kernel.path, kernel)
                continue
            # A page's second order of tiles may have code of its own.
            if {name.removesuffix("_unequal") for name in names} <= {f"page{page}" for page in machine_code.pages_of(manifest)}:
                continue
            assert names in (["any_size"], list(SIZES), ["any_size", OUTPUT_ALONE]), (one.kernel.path, kernel)
            if names == list(SIZES):
                assert one.variant.spec.mask != "none"
            elif names[-1] == OUTPUT_ALONE:
                assert one.variant.spec.direction == "bwd"


def manifests() -> Iterator[tuple[Arranged, Manifest]]:
    archive = shipped()
    for one in arranged():
        manifest = manifest_in(archive, shipped_index(PACKAGE), one.variant.id, "90")
        assert manifest is not None
        yield one, manifest


@cache
def shipped() -> Archive:
    """The archive of the checkout, unpacked."""
    found = present_archive(folder_of(PACKAGE), shipped_index(PACKAGE), "90")
    assert found is not None
    return found


def test_every_shipped_kernel_has_machine_code_of_its_very_text() -> None:
    for one, manifest in manifests():
        assert manifest.variant_id == one.variant.id
        assert manifest.source_sha256 == source_digest(one.text)
        for binary in manifest.binaries:
            code = manifest.code(binary)
            assert code[:4] == b"\x7fELF"
            # Neither the folder it was compiled in nor a compiler's time may stand in it.
            assert not {section for section in (b".debug_line", b".nv_debug_ptx_txt", b"/tmp", b"flashtune") if section in code}
            assert (binary.arch, binary.triton) == ("sm_90a", "3.6.0")
            assert 0 < binary.threads <= 1024
            assert binary.shared_bytes <= one.target.shared_bytes_per_block
            assert (binary.global_scratch_bytes, binary.profile_scratch_bytes, binary.cooperative) == (0, 0, False)


TWICE = """
from types import SimpleNamespace

def kernel(name):
    def warmup(*args, **options):
        return SimpleNamespace(name=name, args=args)
    return SimpleNamespace(__name__=name, warmup=warmup)

def counts_needed(q, k):
    return 0

def launches(q, k, v, out, lse, **words):
    sizes = 64, 64, 128
    return [(kernel("pack"), (1,), (size,), {}) for size in sizes] + [(kernel("attend"), (1,), (0,), {})]
"""


def test_a_kernel_that_a_call_launches_again_with_other_constants_has_a_binary_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = next(manifests())[1].binaries[0]

    def described(compiled: Any, *, specialization: str) -> tuple[Binary, bytes]:
        found = replace(plain, kernel=compiled.name, specialization=specialization, sha256=f"{compiled.name} {compiled.args}")
        return found, b""

    monkeypatch.setattr("flashtune.core.code.compiled.from_compiled", described)
    found = build(replace(ordered(decode()), text=TWICE)).manifest.binaries
    names = [(binary.kernel, binary.specialization) for binary in found]
    assert names == [("pack", "any_size"), ("pack", "any_size_2"), ("attend", "any_size")]


def test_the_archive_stays_small_and_each_piece_is_near() -> None:
    archive = shipped()
    assert archive.path.stat().st_size < 10_000_000
    # What a first call unpacks for one kernel.
    assert max(group.size for group in archive.groups) < 5_000_000
    places = {binary.sha256: binary.file for _, manifest in manifests() for binary in manifest.binaries}
    assert len(set(places.values())) == len(places), "equal code is there once"


def shaped(problem: Problem, n_kv: int) -> Problem:
    n_q = problem.n_q if problem.n_q != problem.n_kv else n_kv
    return replace(problem, batch=2, heads=2 * problem.gqa_ratio, kv_heads=2, n_q=n_q, n_kv=n_kv)


@cache
def host_sides() -> list[tuple[Arranged, Manifest, LoadedKernel]]:
    """Functions that a call runs of each shipped kernel beside its machine code."""
    return [
        (one, manifest, LoadedKernel(host_of(family(one.variant.template), one.variant.spec, one.variant.config)))
        for one, manifest in manifests()
    ]


@pytest.mark.parametrize("heads_inside", [False, True], ids=["BHND", "BNHD"])
@pytest.mark.parametrize("n_kv", [1, 197, 4096])
def test_usual_calls_meet_the_conditions_of_a_shipped_binary(n_kv: int, heads_inside: bool) -> None:
    for one, manifest, module in host_sides():
        inputs = make_inputs(
            shaped((one.records or one.fallbacks)[0].problem, n_kv), device="meta", seed=2**64 - 1, heads_inside=heads_inside
        )
        if not module.accepts(inputs.q, inputs.k, inputs.v, inputs.keywords["mask"]):
            continue
        words = inputs.keywords | provided(module, inputs.q, inputs.k) | {"sms": one.target.sms}
        assert module.host is not None
        launches = keyword_plan(module.host, inputs.arguments, words).launches
        if one.variant.spec.direction == "bwd":
            # Without a gradient of the LSE.
            launches += keyword_plan(module.host, (*inputs.arguments[:6], None, *inputs.arguments[7:]), words).launches
        for launch in launches:
            tried = {binary.specialization: binary.refusal(launch.arguments) for binary in manifest.of(launch.kernel)}
            assert None in tried.values(), (one.kernel.path, launch.kernel, tried)


def test_a_call_whose_offsets_pass_32_bits_is_refused() -> None:
    manifest = shipped_manifest(PACKAGE, decode().variant.id, "90")
    assert manifest is not None
    inputs = make_inputs(replace(decode().records[0].problem, batch=1), device="meta", seed=0)
    module = load_kernel(decode().text, decode().variant.id)
    far = torch.empty_strided(inputs.k.shape, (2**40, 2**35, inputs.k.shape[3], 1), device="meta", dtype=inputs.k.dtype)
    words = inputs.keywords | provided(module, inputs.q, far) | {"sms": 132}
    launch, *_ = keyword_plan(module.host, (inputs.q, far, inputs.v, inputs.out, inputs.lse), words).launches
    [binary] = manifest.of(launch.kernel)
    refusal = binary.refusal(launch.arguments)
    takes_strides = any(parameter.name == "stride_kh" for parameter in binary.parameters)
    assert (refusal is not None) == takes_strides


def operations(code: bytes, path: Path) -> list[str]:
    """The instructions in alphabetical order, without encodings, registers' numbers and places in the code."""
    return sorted(re.sub(r"/\*.*?\*/|\b(U?R|U?P|B)\d+\b|\b0x[0-9a-f]{3,}\b", "", line).strip() for line in sass(code, path))


class OfSmall(random.Random):
    """A choice among kernels that take a compiler the least time, without a twin in another type."""

    def sample(self, population: Any, k: int, **_: Any) -> list[Any]:
        alone = {one.kernel.path for one in arranged() if len(one.variants) == 1}
        return super().sample([path for path in population if "forward/d64_" in path and "hopper" in path and path in alone], k)


@pinned
def test_regenerating_what_ships_changes_nothing_with_a_sample_of_the_machine_code_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Text, and machine code by its hashes but for the sample's, in whose place the command gets what ships.
    compiled: list[tuple[Built, Built]] = []

    def compared(orders: Iterable[Order], *, jobs: int) -> Iterator[tuple[Order, Built]]:
        for order, built in build_all(orders, jobs=jobs):
            there = kept(order, shipped_index(PACKAGE), shipped(), machine_code.triton_version())
            assert isinstance(built, Built) and there is not None, built
            compiled.append((built, there))
            yield order, there

    monkeypatch.setattr("flashtune.cli.generate.random", SimpleNamespace(Random=OfSmall))
    monkeypatch.setattr(machine_code, "build_all", compared)
    result = flashtune("generate", "--check", "--sample", "1", "--jobs", "1")
    assert result.exit_code == 0 and " 0 files unlike" in result.stdout, result.output
    assert "compiled 1 of 1: " in result.stderr
    [(ours, theirs)] = compiled
    known = [[replace(binary, sha256="", file="") for binary in one.manifest.binaries] for one in (ours, theirs)]
    assert known[0] == known[1]
    for code, wanted in zip(ours.codes, theirs.codes, strict=True):
        # From the same PTX ptxas makes one of several codes of some, whose registers are numbered, and neighbours ordered, differently.
        found = operations(code, tmp_path / "ours")
        assert found == operations(wanted, tmp_path / "shipped") and len(found) > 100


@pytest.fixture
def folder(tmp_path: Path, built: Built) -> Path:
    packed = archive_of([decode()], "90", {(decode().variant.id, "90"): built}, None)
    assert packed is not None
    (tmp_path / "sm90.kernels").write_bytes(packed.content)
    write({INDEX: index_text([decode()], {}, {"90": packed}).encode()}, tmp_path)
    return tmp_path


def kept_in(folder: Path, order: Order, triton: str) -> Built | None:
    index = read_index(folder)
    return kept(order, index, present_archive(folder, index, "90"), triton)


def test_code_is_kept_as_long_as_text_and_triton_are_the_same(folder: Path, built: Built) -> None:
    version = built.manifest.binaries[0].triton
    own = ordered(decode())
    assert kept_in(folder, own, version) == built
    assert kept_in(folder, own, "3.7.0") is None
    assert kept_in(folder, replace(own, variant_id="0" * 16), version) is None
    assert kept_in(folder, replace(own, text=own.text + "\n"), version) is None


@pytest.mark.parametrize("place", [10, 40, 0.5, -10])
def test_damaged_code_is_not_kept(folder: Path, built: Built, place: float) -> None:
    path = folder / "sm90.kernels"
    content = bytearray(path.read_bytes())
    content[int(len(content) * place) if isinstance(place, float) else place] ^= 1
    path.write_bytes(content)
    assert kept_in(folder, ordered(decode()), built.manifest.binaries[0].triton) in (None, built)
    if place != 40:
        assert kept_in(folder, ordered(decode()), built.manifest.binaries[0].triton) is None


def test_packing_again_changes_no_byte_and_takes_groups_as_they_are(built: Built, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = present_archive(folder, read_index(folder), "90")
    built_of = {(decode().variant.id, "90"): built}
    anew = archive_of([decode()], "90", built_of, None)
    monkeypatch.setattr("flashtune.tuner.publish.packing.pack", lambda group: pytest.fail("packed again"))
    again = archive_of([decode()], "90", built_of, before)
    assert again is not None and again == anew and again.content == (folder / "sm90.kernels").read_bytes()


def test_nearly_all_shipped_kernels_serve_both_16_bit_types() -> None:
    index = shipped_index(PACKAGE)
    ids = {kernel.variant_id: kernel for kernel in index.kernels}
    with_sibling = [one for one in arranged() if one.sibling is not None]
    missing = [one.kernel.path for one in with_sibling if ids[one.variant.id].sibling != one.sibling.id]
    assert len(missing) <= len(with_sibling) // 50 and len(with_sibling) > 400, missing
    for one in with_sibling[::40]:
        found = shipped_manifest(PACKAGE, one.sibling.id, one.kernel.arch)
        assert found is not None and one.sibling.id not in ids and found.source_sha256 == source_digest(orders_of(one)[1].text)
        assert all(found.code(binary)[:4] == b"\x7fELF" for binary in found.binaries)


def test_the_same_text_gives_the_same_bytes_in_another_process_under_another_name_and_what_does_not_compile_costs_no_other(
    built: Built,
) -> None:
    good = replace(ordered(decode()), stem="another/place/altogether")
    bad = replace(good, stem="bad", text=good.text.replace("tl.program_id(0)", "tl.no_such_thing(0)"))
    found = {order.stem: result for order, result in build_all([bad, good], jobs=1)}
    other = found[good.stem]
    assert isinstance(other, Built) and other == built
    assert with_files(other, "x") == with_files(built, "x")
    assert isinstance(found["bad"], str)
    assert "CompilationError" in found["bad"]


def linger(order: Order) -> str:
    time.sleep(3600)
    return order.stem


def test_an_interruption_while_compilers_start_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(list[Order]):
        def __iter__(self) -> Iterator[Order]:
            yield self[0]
            raise KeyboardInterrupt

    monkeypatch.setattr(machine_code, "_attempt", linger)
    with pytest.raises(KeyboardInterrupt):
        list(build_all(Interrupted([ordered(decode())]), jobs=1))


def test_reading_shipped_code_takes_neither_triton_nor_torch() -> None:
    code = f"""
import sys
from flashtune.core.code.shipped import PACKAGE, shipped_manifest
manifest = shipped_manifest(PACKAGE, {decode().variant.id!r}, "90")
print(sum(len(manifest.code(binary)) for binary in manifest.binaries), sorted({{"torch", "triton"}} & set(sys.modules)))
"""
    ran: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[1] == "[]"
    assert int(ran.stdout.split()[0]) > 10_000


def test_threads_of_a_warp_specialised_kernel_are_all_of_its_warps() -> None:
    hopper: list[Binary] = [binary for _, manifest in manifests() for binary in manifest.of("flash_fwd_hopper")]
    assert hopper
    # A producer's warpgroup beside each consumer's, where num_warps of the launch is 4.
    assert {binary.threads // 32 for binary in hopper} <= {8, 12, 16, 20}


def test_code_with_like_instructions_is_packed_into_one_group() -> None:
    rng = random.Random(5)
    bodies = [rng.randbytes(16 * 400) for _ in range(3)]
    changed = [body[: 16 * cut] + rng.randbytes(32) + body[16 * cut :] for cut in (100, 200, 300) for body in bodies]
    groups = packing.alike_groups([*bodies, *changed], 4 * (16 * 400 + 32))
    assert sorted(map(sorted, groups)) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert packing.alike_groups([b"", b"a" * 100], 50) == [[0], [1]]
