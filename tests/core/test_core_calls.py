"""The file of calls: what is written is read, lists are thinned whatever their order, nobody who adds loses anything, junk is refused."""

import json
import multiprocessing
import os
import random
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records import calls
from flashtune.core.system.errors import EnvironmentProblem, InputError

PREFILL = Problem(batch=2, heads=8, kv_heads=2, n_q=300, n_kv=300, d=64, d_v=64, dtype="bf16", features=Features(causal=True))
STEP = replace(PREFILL, n_q=1, features=Features())
ODD = Features(window=(7, None), mask="bias", alibi=True, dbias=True, dslopes=True, dropout=True, alignment="bottom_right")
TRAINED = replace(PREFILL, d_v=40, dtype="fp16", direction="bwd", features=ODD)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    problems = [PREFILL, STEP, TRAINED, replace(PREFILL, dtype="fp32", features=Features(tf32=True, sinks=True, window=(5, 9)))]
    calls.add(path, problems)
    assert set(calls.read(path)) == set(problems)
    found = json.loads(path.read_text())
    assert found["format"] == 1 and len(path.read_text().splitlines()) == 5 + len(problems), "a line for each"
    assert {"batch": 2, "heads": 8, "kv_heads": 2, "n_q": 1, "n_kv": 300} | {"features": {}} | found["calls"][0] in found["calls"]


def test_a_sequence_that_grows_is_a_step_for_each_octave_of_keys() -> None:
    kept = calls.thinned(replace(STEP, n_kv=n) for n in range(1, 601))
    assert [one.n_kv for one in kept] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600]
    others = [replace(STEP, n_q=2, n_kv=600), replace(STEP, batch=16, n_kv=300), replace(STEP, features=Features(sinks=True), n_kv=40)]
    assert set(calls.thinned([*kept, *others])) == {*kept, *others}, "kinds of steps are thinned by themselves"


def test_calls_that_are_no_steps_keep_their_own_lengths_up_to_four_of_an_octave() -> None:
    lengths = [577, 1025, 77, 1500]
    assert [one.n_kv for one in calls.thinned(replace(PREFILL, n_q=n, n_kv=n) for n in lengths)] == sorted(lengths)
    kept = calls.thinned(replace(PREFILL, n_q=n, n_kv=n) for n in range(513, 1500))
    assert [one.n_kv for one in kept] == [1021, 1022, 1023, 1024, 1496, 1497, 1498, 1499]


def test_one_key_of_the_database_is_one_problem() -> None:
    assert calls.thinned(replace(PREFILL, batch=batch) for batch in (5, 8, 7)) == [replace(PREFILL, batch=8)]
    kinds: list[Any] = [Features(), ODD, *(Features(window=window) for window in ((5, 9), (7, 13), (16, None), (13, None), (0, 3)))]
    drawn = [replace(TRAINED, n_q=40, n_kv=77, batch=batch, features=features).seen() for batch in range(1, 9) for features in kinds]
    assert {one.key("") for one in calls.thinned(drawn)} == {one.key("") for one in drawn}
    assert len(calls.thinned(drawn)) == len({one.key("") for one in drawn})


def test_thinning_knows_no_order_and_may_be_done_in_parts() -> None:
    draw = random.Random(3)
    every = [
        replace(draw.choice((PREFILL, STEP, TRAINED)), batch=draw.randint(1, 9), n_q=n, n_kv=draw.choice((n, draw.randint(1, 3000))))
        for n in (draw.choice((1, 2, draw.randint(1, 3000))) for _ in range(800))
    ]
    whole = calls.thinned(every)
    assert len(whole) < len(every)
    for _ in range(4):
        draw.shuffle(every)
        cut = draw.randint(1, 799)
        assert calls.thinned([*calls.thinned(every[:cut]), *calls.thinned(every[cut:])]) == whole == calls.thinned(every)


def add_some(path: Path, start: int) -> None:
    for n in range(start, start + 4 * 16, 16):
        calls.add(path, [replace(PREFILL, d=d, d_v=d) for d in (n, n + 8)])


def test_processes_lose_nothing_of_each_others(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add_some, args=(path, start)) for start in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert {one.d for one in calls.read(path)} == {start + 8 * step for start in (1, 2, 3) for step in range(8)}
    assert os.listdir(tmp_path) == ["calls.json"]


def test_what_is_added_goes_through_links_and_keeps_the_files_mode(tmp_path: Path) -> None:
    path, link = tmp_path / "calls.json", tmp_path / "link.json"
    link.symlink_to(path)
    calls.add(link, [PREFILL])
    path.chmod(0o640)
    calls.add(link, [STEP])
    assert link.is_symlink() and set(calls.read(path)) == {PREFILL, STEP} and stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_file_that_was_only_begun_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    path.touch()
    calls.add(path, [])
    assert calls.read(path) == []


def entry(**words: Any) -> str:
    found = {"batch": 1, "heads": 2, "kv_heads": 1, "n_q": 3, "n_kv": 4, "d": 64, "d_v": 64, "dtype": "bf16", "direction": "fwd"}
    return json.dumps({"format": 1, "calls": [{**found, "features": {}, **words}]})


JUNK: dict[str, tuple[str, str]] = {
    "no JSON": ("batch 1", "no file of calls"),
    "not even text": ("\x00\xff", "no file of calls"),
    "deep": ("[" * 100_000, "no file of calls"),
    "a number with too many digits": ("9" * 5000, "no file of calls"),
    "a list": ("[]", "lacks a format or a list of calls"),
    "a card": ('{"format": 1, "sha256": "0"}', "lacks a format or a list of calls"),
    "newer": ('{"format": 2, "calls": []}', "has the format 2, and this flashtune knows 1"),
    "a format that is none": ('{"format": true, "calls": []}', "has the format True"),
    "an entry that is none": ('{"format": 1, "calls": [[1]]}', "call 1 of calls.json is invalid (it is [1]"),
    "a field more": (entry(more=1), "not an object of batch, heads"),
    "a size that is none": (entry(batch=1.5), "batch is 1.5, not an integer"),
    "a truth value": (entry(n_q=True), "n_q is True, not an integer"),
    "nothing to attend to": (entry(n_kv=0), "n_kv must be at least 1, not 0"),
    "heads": (entry(heads=3, kv_heads=2), "3 query heads can't share 2 key heads"),
    "a head size": (entry(d=1025), "d=1025 is too large"),
    "an unknown type": (entry(dtype="fp4"), "unknown dtype 'fp4'"),
    "a type that is no name": (entry(dtype=[1]), "dtype is [1], not a string"),
    "a direction": (entry(direction="up"), "unknown direction 'up'"),
    "features that are none": (entry(features="causal"), "features are 'causal', not an object"),
    "an unknown feature": (entry(features={"paged": True}), "unknown feature 'paged'"),
    "a feature's value": (entry(features={"causal": "yes"}), "feature 'causal' has the impossible value 'yes'"),
    "a gradient of a forward's": (entry(features={"mask": "bias", "dbias": True}), "can't be requested from a forward"),
    "long": (entry(dtype=["x" * 500]), "dtype is ['xxx"),
}


@pytest.mark.parametrize("what", JUNK)
def test_a_file_that_makes_no_sense_is_refused_in_a_sentence_and_left_as_it_is(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, said = JUNK[what]
    path = Path("calls.json")
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        calls.read(path)
    assert "calls.json" in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 400
    with pytest.raises(InputError):
        calls.add(path, [PREFILL])
    assert path.read_text(encoding="latin-1") == text and os.listdir() == ["calls.json"]


def test_what_is_too_large_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    path.write_bytes(b" " * (calls.MOST_BYTES + 1))
    with pytest.raises(InputError, match="it has more than"):
        calls.read(path)


def test_no_file_grows_beyond_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "calls.json"
    calls.add(path, [PREFILL])
    before = path.read_bytes()
    monkeypatch.setattr(calls, "MOST_BYTES", len(before) + 10)
    with pytest.raises(InputError, match="so it stays as it is: name another file"):
        calls.add(path, [replace(PREFILL, d=32, d_v=32)])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["calls.json"]
    assert calls.read(path) == [PREFILL]


def test_a_pipe_that_somebody_writes_is_read(tmp_path: Path) -> None:
    """As in `--calls <(...)`."""
    calls.add(tmp_path / "calls.json", [PREFILL])
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cp", "calls.json", "pipe"], cwd=tmp_path):
        assert calls.read(tmp_path / "pipe") == [PREFILL]
    with pytest.raises(EnvironmentProblem, match=r"can't be written \(File or stream is not seekable"):
        calls.add(tmp_path / "pipe", [PREFILL])


@pytest.mark.parametrize("path", ["nul\0.json", "half\ud800.json", "x" * 300])
def test_names_that_no_file_has_are_refused_in_a_sentence(path: str) -> None:
    for doing in (calls.read, lambda path: calls.add(path, [PREFILL])):
        with pytest.raises(EnvironmentProblem, match=r"can't be (read|written) \([^N]"):
            doing(Path(path))


def test_places_that_hold_no_file_are_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*none\.json: call dispatch\.save_calls"):
        calls.read(tmp_path / "none.json")
    with pytest.raises(EnvironmentProblem, match=r"can't be read \(Is a directory\)"):
        calls.read(tmp_path)
    with pytest.raises(EnvironmentProblem, match=r"can't be written \(Is a directory\)"):
        calls.add(tmp_path, [])
    with pytest.raises(EnvironmentProblem, match=r"can't be written \(No such file or directory\)"):
        calls.add(tmp_path / "none" / "calls.json", [])
    with pytest.raises(InputError, match="/dev/null is no regular file"):
        calls.add(Path("/dev/null"), [])
