"""Plans: what served a run's calls serves other processes by the same kernels, and nothing else does."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import ways
from interpreting import interpreted
from test_providers import libraries

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Variant
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records import plans
from flashtune.core.records.plans import Entry, Place, Served
from flashtune.core.system.errors import FlashtuneError, InputError
from flashtune.dispatch import api
from flashtune.dispatch.state.frozen import Met, versions
from flashtune.templates import family

__all__ = ["libraries"]

PROBLEM = Problem(batch=2, heads=2, kv_heads=1, n_q=9, n_kv=32, d=16, d_v=16, dtype="fp32", features=Features())
DENSE = Place("dense", "cpu", PROBLEM)


def written(folder: Path, *entries: Entry) -> Path:
    plans.write(folder / "plan.json", versions(entries), entries)
    return folder / "plan.json"


def test_processes_with_one_plan_have_equal_bits_and_say_equal_digests(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    first = interpreted("interpret_frozen", path, False, False)
    others = [interpreted("interpret_frozen", path, True, order) for order in (False, True, False)]
    assert [digest for digest, _ in others] == [first[0]] * 3
    assert [outputs for _, outputs in others] == [first[1]] * 3 and len(first[1]) == 9
    said = interpreted("interpret_unfrozen", path)
    assert len(said) == 6
    for line in said:
        assert line.startswith(f"the plan {path} has no call like ") and line.endswith(
            ": freeze a run that makes it, or run without the plan"
        )


@pytest.mark.parametrize("name", ["flashtune", "torch"])
def test_a_plan_of_another_version_is_refused(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, Entry(DENSE, (Served(),)))
    found = json.loads(path.read_text())
    found["versions"][name] = "0.0.1"
    path.write_text(json.dumps(found))
    with pytest.raises(InputError, match=rf"^the plan {path} is of '{name}' '0\.0\.1' \(here .*\): freeze it with these versions$"):
        dispatch.use(plan=path)


def test_a_plan_of_a_provider_that_is_not_here_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, Entry(DENSE, (Served(provider="fa4"),)))
    found = json.loads(path.read_text())
    found["versions"]["flash-attn-4"] = "4.0.0"
    path.write_text(json.dumps(found))
    with pytest.raises(InputError, match=r"is of 'flash-attn-4' '4\.0\.0' \(here None\)"):
        dispatch.use(plan=path)


def test_a_plan_that_leaves_versions_out_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, Entry(DENSE, (Served(),)))
    path.write_text(json.dumps({**json.loads(path.read_text()), "versions": {}}))
    with pytest.raises(InputError, match=r"is of 'flashtune' None \(here '.*'\): freeze it with these versions$"):
        dispatch.use(plan=path)


@pytest.mark.parametrize("way", ["paged", "functions", "gradients"])
def test_a_provider_is_named_only_where_it_may_serve(way: Any, tmp_path: Path) -> None:
    path = written(tmp_path, Entry(DENSE._replace(way=way), (Served(provider="cudnn"),)))
    with pytest.raises(InputError, match=f"its way {way} has the provider cudnn, and providers run no such calls"):
        dispatch.use(plan=path)


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "a list": lambda plan: [plan],
    "no format": lambda plan: {**plan, "format": "1"},
    "a later format": lambda plan: {**plan, "format": 2},
    "versions": lambda plan: {**plan, "versions": {"torch": 2}},
    "calls": lambda plan: {**plan, "calls": {}},
    "an entry": lambda plan: {**plan, "calls": [1]},
    "a way": lambda plan: {**plan, "calls": [{**plan["calls"][0], "way": "sparse"}]},
    "words": lambda plan: {**plan, "calls": [{**plan["calls"][0], "how": "lse"}]},
    "no server": lambda plan: {**plan, "calls": [{**plan["calls"][0], "served": []}]},
    "a size": lambda plan: {**plan, "calls": [{**plan["calls"][0], "problem": {**plan["calls"][0]["problem"], "d": "16"}}]},
    **{
        f"a server's {name}": lambda plan, name=name, value=value: {
            **plan,
            "calls": [{**plan["calls"][0], "served": [{**plan["calls"][0]["served"][0], name: value}]}],
        }
        for name, value in (("provider", "mine"), ("template", ["flash_fwd"]), ("config", {"BLOCK_M": 1.5}), ("config", None), ("text", 1))
    },
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_plan_is_refused_in_a_sentence(damage: str, tmp_path: Path) -> None:
    path = written(tmp_path, Entry(DENSE, (_kernel(),)))
    path.write_text(json.dumps(DAMAGES[damage](json.loads(path.read_text()))))
    with pytest.raises(FlashtuneError, match=": ") as caught:
        dispatch.use(plan=path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"format": 1}'])
def test_what_is_no_plan_is_refused_and_so_is_a_missing_one(text: str, tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path / "plan.json"):
        with pytest.raises(InputError, match=r": name a file that dispatch.freeze wrote$"):
            dispatch.use(plan=path)
        (tmp_path / "plan.json").write_text(text)


def _kernel(**changes: Any) -> Served:
    config = family("flash_fwd").default(PROBLEM.spec(), find_target("h200"))
    words = {"template": "flash_fwd", "config": config, "text": "0" * 64, **changes}
    return Served(**words)


def choices(folder: Path, served: Served, place: Place = DENSE) -> Any:
    with dispatch.use(plan=written(folder, Entry(place, (served,)))) as used:
        assert used.plan is not None
        return list(used.plan.choices(place))


def test_a_kernel_serves_only_with_the_text_that_was_frozen(tmp_path: Path) -> None:
    met = Met()
    made = _kernel()
    assert made.config is not None
    met.note(DENSE, Variant(template="flash_fwd", spec=PROBLEM.spec(), config=made.config))
    [entry] = met.entries()
    [choice] = choices(tmp_path, entry.served[0])
    assert choice.config == made.config and choice.kind == "frozen"
    with pytest.raises(InputError, match="a kernel of flash_fwd whose text is another one here: freeze it anew"):
        choices(tmp_path, made)
    with pytest.raises(InputError, match=r"^the plan .* names a kernel that isn't here \(unknown template 'flash_fwd_mine'"):
        choices(tmp_path, _kernel(template="flash_fwd_mine"))
    with pytest.raises(InputError, match="BLOCK_M"):
        choices(tmp_path, _kernel(config=made.config.replace(BLOCK_M=48)))


class _State:
    latched = True


class _Latch:
    state = _State()


class _Owner:
    latch = _Latch()


def test_a_kernel_whose_softmax_was_mispredicted_is_frozen_as_its_fallback_kernel() -> None:
    met, owner, chosen = Met(), _Owner(), _kernel().config
    assert chosen is not None
    other = chosen.replace(BLOCK_N=64 if chosen["BLOCK_N"] != 64 else 32)
    variant = Variant(template="flash_fwd", spec=PROBLEM.spec(), config=chosen)
    met.note(DENSE, variant, owner, fallback=other)
    assert [one.config for one in met.entries()[0].served] == [other]
    owner.latch.state.latched = False
    assert [one.config for one in met.entries()[0].served] == [chosen]
    met.note(DENSE, variant, owner, fallback=None, in_graphs=other)
    assert [(one.config, one.in_graphs) for one in met.entries()[0].served] == [(chosen, other)]


def test_a_plan_names_providers_and_pytorch(tmp_path: Path, libraries: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU.
    monkeypatch.setattr(api, "why_torch_now", lambda *_: None)
    place = Place("dense", "cpu", replace(PROBLEM, features=Features()))
    path = written(tmp_path, Entry(place, (Served(provider="fa4"),)), Entry(place._replace(how=("lse",)), (Served(),)))
    with dispatch.use(plan=path):
        said = dispatch.explain(*ways.tensors(), enable_gqa=True)
        assert (said.kind, said.provider, said.reason) == ("provider", "fa4", f"the plan {path} names it")
        out = ways.dense(ways.tensors())
        assert len(libraries) > 0
        libraries.clear()
        torch.testing.assert_close(ways.dense(ways.tensors(), return_lse=True)[0], out)
        assert not libraries and dispatch.explain(*ways.tensors(), enable_gqa=True, return_lse=True).kind == "framework"
        with pytest.raises(InputError, match=r"^the plan .* has no call like dense fwd n9x32-.*-causal-gqa2 \(batch 2, 2 heads\) on cpu: "):
            ways.dense(ways.tensors(), is_causal=True)
        # On what is named no record decides.
        ways.dense(ways.tensors(), is_causal=True, implementation="torch")


def test_nothing_served_is_no_plan(tmp_path: Path) -> None:
    dispatch.reload()
    with pytest.raises(InputError, match=r"^no call of this process can be frozen: "):
        dispatch.freeze(tmp_path / "plan.json")
    with pytest.raises(InputError, match=r"^a plan is named by its path, not 3$"):
        dispatch.freeze(3)  # type: ignore[arg-type]
