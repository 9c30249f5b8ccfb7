"""Rows take new hashes where their machine code is what it was, and nowhere else."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashtune.core.config import Config
from flashtune.core.problem import Features
from flashtune.core.results import TuningRecord
from flashtune.core.target import find_target
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.tuner.publish.generated import write_archives
from flashtune.tuner.publish.machine_code import Built, Order, build
from flashtune.tuner.publish.packing import Shipped, pack_kernels
from flashtune.tuner.publish.sources import source_for, variant_for

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from rehash import GENERATED, archive_in, compiled_in, is_current, renamed, replaced, same_code, sections_of, winners_of, work_of

DIVIDED = "    batch = program // tiles // kv_heads\n"


@pytest.fixture(scope="module")
def shipped() -> list[TuningRecord]:
    """The shipped rows."""
    with Store.open(shipped_path(), writable=False) as store:
        return store.winners()


@pytest.fixture(scope="module")
def today(shipped: list[TuningRecord]) -> TuningRecord:
    """A shipped row of a family that compiles in a second."""
    plain = (record for record in shipped if (record.key.gpu, record.key.d) == ("h200", 40) and record.problem.features == Features())
    wanted = {"loads": "tma", "combine": "kernel", "programs": 1, "num_stages": 3, "num_warps": 2}.items()
    decoding = (record for record in plain if record.outcome.template == "flash_decode")
    return next(record for record in decoding if all(record.outcome.config[axis] == value for axis, value in wanted))


def earlier(record: TuningRecord) -> TuningRecord:
    """The row as it was under another text."""
    return replace(record, outcome=replace(record.outcome, variant_id="0" * 16, template_hash="1" * 16))


def keep(folder: Path, record: TuningRecord, text: str) -> None:
    """Put the machine code of a text, as a row's kernel, into a folder of generated kernels."""
    order = Order(text=text, stem="kept", variant_id=record.outcome.variant_id, spec=record.problem.spec(), target=find_target("h200"))
    lay(folder, record, build(order))


def lay(folder: Path, record: TuningRecord, built: Built) -> None:
    """Put machine code into a folder of generated kernels, under the id of a row's kernel."""
    kept = replace(built, manifest=replace(built.manifest, variant_id=record.outcome.variant_id))
    packed = pack_kernels([Shipped(name="kept", text="", built=kept)])
    write_archives({folder / "sm90.kernels": packed.content})
    piece = packed.manifests[record.outcome.variant_id]
    kernel = {"variant_id": record.outcome.variant_id, "template": record.outcome.template, "arch": "90", "path": "kept.py"}
    fields = {"format": 2, "archives": {"90": packed.facts._asdict()}, "kernels": [kernel | {"manifest": [piece.sha256, *piece.place]}]}
    (folder / "index.json").write_text(json.dumps(fields | {"files": {}}))
    archive_in.cache_clear()


def test_a_row_whose_text_is_todays_is_left_alone(today: TuningRecord, tmp_path: Path) -> None:
    assert same_code([today], tmp_path) == ({}, [])


def test_other_words_and_the_same_code_give_the_new_hash(today: TuningRecord, tmp_path: Path) -> None:
    before = earlier(today)
    text = source_for(today).text
    # More lines, so that every line number differs as well.
    keep(tmp_path, before, "# An earlier wording.\n\n\n" + text.replace("# ", "# Once: "))
    same, changed = same_code([before, before], tmp_path)
    assert changed == []
    assert {(old, new.id, new.template_hash) for old, new in same.items()} == {
        ("0" * 16, today.outcome.variant_id, today.outcome.template_hash)
    }


def test_other_code_and_a_lost_file_need_a_search(today: TuningRecord, tmp_path: Path) -> None:
    before = earlier(today)
    assert same_code([before], tmp_path) == ({}, [before])
    text = source_for(today).text
    assert 'float("-inf")' in text
    keep(tmp_path, before, text.replace('float("-inf")', "-1.0e30"))
    assert same_code([before], tmp_path) == ({}, [before])


def shipped_code(record: TuningRecord) -> Built:
    found = compiled_in(GENERATED, record.outcome.variant_id, "90")
    assert found is not None
    return found


def test_machine_code_that_lies_ready_is_not_compiled(
    today: TuningRecord, shipped: list[TuningRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rehash.build", lambda order: pytest.fail("it lies ready"))
    before = earlier(today)
    lay(tmp_path, before, shipped_code(today))
    same, changed = same_code([before], tmp_path, generated=GENERATED)
    assert (list(same), changed) == (["0" * 16], [])
    other = next(record for record in shipped if record.outcome.template == "flash_fwd_hopper")
    lay(tmp_path, before, shipped_code(other))
    assert same_code([before], tmp_path, generated=GENERATED) == ({}, [before])


def test_sections_of_machine_code_differ_by_content_and_not_by_name(today: TuningRecord) -> None:
    built = shipped_code(today)
    code, name = built.codes[0], built.manifest.binaries[0].kernel
    found = sections_of(code, name)
    [(place, length)] = [(code.index(content), len(content)) for title, content in found if title == b".text."]
    assert length > 1000
    renamed_code = code.replace(name.encode(), name[::-1].encode())
    assert renamed_code != code and sections_of(renamed_code, name[::-1]) == found
    assert sections_of(code[:place] + bytes([code[place] ^ 1]) + code[place + 1 :], name) != found


def test_other_bookkeeping_is_the_same_work_and_another_product_is_not(today: TuningRecord, tmp_path: Path) -> None:
    before, text = earlier(today), source_for(today).text
    keep(tmp_path, before, text.replace(DIVIDED, DIVIDED + "    batch += tl.num_programs(0) >> 30\n", 1))
    assert same_code([before], tmp_path) == ({}, [before])
    same, changed = same_code([before], tmp_path, measure=work_of)
    assert (list(same), changed) == (["0" * 16], [])
    keep(tmp_path, before, text.replace("rescale = tl.exp2(", "rescale = 1.5 * tl.exp2("))
    assert same_code([before], tmp_path, measure=work_of) == ({}, [before])


def test_raced_results_take_the_place_of_those_whose_text_is_another(today: TuningRecord) -> None:
    with Store.open(shipped_path(), writable=False) as store:
        mine = [result for result in store.results() if result.problem == today.problem]
        others = [result for result in store.results(gpu="h200", d=64, n=512) if result.problem != today.problem]
    [raced] = mine
    assert is_current(raced)
    stale = replace(raced, outcomes=(earlier(today).outcome,))
    assert not is_current(stale)
    assert replaced([*others, stale], [raced]) == [*others, raced]
    # One that is current, such as another family's, stays beside it.
    assert replaced([*others, raced], [raced]) == [*others, raced, raced]
    # A kernel that a search of today wouldn't try gives way, though its text is what it was.
    config = Config.of(maximum="first")
    older = replace(raced, outcomes=(replace(today.outcome, template="flash_fwd_hopper", config=config),))
    assert not is_current(older) and replaced([*others, older], [raced]) == [*others, raced]
    assert sorted(record.outcome.variant_id for record in winners_of([raced, *others])) == sorted(
        result.best.variant_id for result in [raced, *others] if result.best
    )


def test_every_trial_of_a_renamed_kernel_is_renamed_and_no_other(today: TuningRecord) -> None:
    with Store.open(shipped_path(), writable=False) as store:
        result = next(result for result in store.results() if result.problem == today.problem)
    variant = replace(variant_for(today), template_hash="2" * 16)
    [found] = renamed([result], {today.outcome.variant_id: variant})
    for new, old in zip(found.outcomes, result.outcomes, strict=True):
        if old.variant_id == today.outcome.variant_id:
            assert new == replace(old, variant_id=variant.id, template_hash="2" * 16)
        else:
            assert new == old
    assert found.outcomes != result.outcomes


@pytest.mark.parametrize("axis", ["stages", "num_stages"])
def test_only_a_config_with_former_names_of_axes_is_written_anew(today: TuningRecord, axis: str) -> None:
    outcome = replace(today.outcome, template="flash_fwd_hopper", config=Config.of({axis: 2, "section": 1}))
    variant = replace(variant_for(today), template="flash_fwd_hopper", config=Config.of(num_stages=2))
    [found] = renamed([replace(today.as_result(), outcomes=(outcome,))], {outcome.variant_id: variant})
    assert found.outcomes[0].config == (variant.config if axis == "stages" else outcome.config)
