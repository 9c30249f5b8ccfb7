"""The index of generated kernels is data: whatever a file holds, reading it gives an index that can be looked up, or one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated

from flashtune.core.code.index import INDEX, read_index
from flashtune.core.system.errors import EnvironmentProblem

SHA = "0123456789abcdef" * 4
KERNELS: list[dict[str, Any]] = [
    {"variant_id": "a" * 16, "template": "flash_fwd", "arch": "90", "path": "sm90/a.py", "manifest": [SHA, 0, 0, 9]},
    {
        "variant_id": "b" * 16,
        "template": "flash_fwd",
        "arch": "90",
        "path": "sm90/b.py",
        "sibling": "c" * 16,
        "sibling_manifest": [SHA, 0, 9, 9],
    },
]
FIELDS = {"format": 2, "archives": {"90": {"sha256": SHA, "groups": [[5, 18]]}}, "kernels": KERNELS, "files": {"sm90/a.py": SHA}}


def looked_up(folder: Path, fields: Any) -> None:
    (folder / INDEX).write_text(json.dumps(fields))
    found = read_index(folder)
    for arch in ("90", "100"):
        for name in ("a" * 16, "c" * 16, "d" * 16):
            found.manifest_of(name, arch)
    hash((found.kernels, tuple(found.files.items()), tuple(found.archives.items())))


@pytest.mark.parametrize("name", ["variant_id", "template", "arch", "path", "sibling"])
@pytest.mark.parametrize("value", [["a"], {"a": 1}, 7, None, True])
def test_a_kernel_named_by_anything_but_a_text_is_one_sentence(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="is no index of generated kernels") as caught:
        looked_up(tmp_path, FIELDS | {"kernels": [KERNELS[0] | {name: value}]})
    assert "\n" not in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_changed_index_is_one_sentence_or_can_be_looked_up(tmp_path: Path, data: st.DataObject) -> None:
    said = ""
    try:
        looked_up(tmp_path, data.draw(mutated(FIELDS)))
    except EnvironmentProblem as error:
        said = str(error)
    assert "\n" not in said and len(said) < 400
