"""JSON file of what served a process's calls: `dispatch.freeze` writes it, `dispatch.use(plan=...)` serves by it.

Such a file may come from another machine, so everything in it is checked; it holds names, numbers and digests, and no code.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.calls import entry_of, problem_of_entry
from flashtune.core.records.results import PROVIDERS
from flashtune.core.system.errors import EnvironmentProblem, InputError
from flashtune.core.system.files import parse_json, read_bounded, write_whole
from flashtune.core.system.words import shown

FORMAT = 1

MOST_BYTES = 1 << 24
"""Bytes of the largest file that is read or written; an entry takes 300 to 600 bytes."""

Way = Literal["dense", "trained", "gradients", "packed", "paged", "functions"]
"""What is served: a dense forward, one whose gradients kernels compute, gradients of dense calls, and passes of the other ways in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Server of a call: a kernel by its template, config and the SHA-256 of its text, with the config that CUDA graphs run where that is
    another; a provider by its name; or PyTorch's own choice, where all are empty."""

    template: str = ""
    config: Config | None = None
    in_graphs: Config | None = None
    text: str = ""
    provider: str = ""


class Place(NamedTuple):
    """Calls that are served alike: the way in, the GPU's slug, the problem, and sorted words for what else the choice depends on."""

    way: Way
    gpu: str
    problem: Problem
    how: tuple[str, ...] = ()

    def plain(self) -> "Place":
        """Copy whose problem is as a file holds it: equal features may be written in several ways."""
        return self._replace(problem=problem_of_entry(entry_of(self.problem)))

    def label(self) -> str:
        """The short form for messages."""
        sizes = f"batch {self.problem.batch}, {self.problem.heads} heads"
        return " ".join((self.way, self.problem.direction, self.problem.label(), f"({', '.join((sizes, *self.how))})", f"on {self.gpu}"))


class Entry(NamedTuple):
    """Calls, and their servers, of which the first that takes a call's tensors serves."""

    place: Place
    served: tuple[Served, ...]


class Plan(NamedTuple):
    """A file's versions by package, its entries, and the SHA-256 of its text."""

    versions: Mapping[str, str]
    entries: tuple[Entry, ...]
    digest: str


def write(path: Path, versions: Mapping[str, str], entries: Iterable[Entry]) -> str:
    """Write a file, whose text doesn't depend on the order of the entries; returns the SHA-256 of its text.

    Raises InputError for more entries than a file holds, and EnvironmentProblem where it can't be written.
    """
    lines = sorted(json.dumps(_as_json(one), sort_keys=True) for one in entries)
    head = f'{{\n"format": {FORMAT},\n"versions": {json.dumps(dict(versions), sort_keys=True)},\n"calls": ['
    text = (head + ",".join(f"\n{line}" for line in lines) + "\n]\n}\n").encode()
    if len(text) > MOST_BYTES:
        raise InputError(f"the plan of {len(lines)} calls would have more than {MOST_BYTES} bytes: freeze a run of fewer shapes")
    try:
        write_whole(path, text)
    except OSError as error:
        raise EnvironmentProblem(f"{path} can't be written ({error.strerror}): name a file in a folder that can be written to") from error
    return hashlib.sha256(text).hexdigest()


def read(path: Path) -> Plan:
    """The plan in a file; raises InputError where it is missing or no plan, and EnvironmentProblem where it can't be read."""
    remedy = "name a file that dispatch.freeze wrote"
    try:
        text = read_bounded(path, MOST_BYTES)
        found = parse_json(text)
    except FileNotFoundError as error:
        raise InputError(f"there is no plan {path}: {remedy}") from error
    except ValueError as error:
        raise InputError(f"{path} is no plan ({error}): {remedy}") from error
    except OSError as error:
        raise EnvironmentProblem(f"{path} can't be read ({error.strerror}): {remedy}") from error
    if not isinstance(found, dict) or found.keys() != {"format", "versions", "calls"} or not isinstance(found["calls"], list):
        raise InputError(f"{path} is no plan (it isn't an object of a format, versions and calls): {remedy}")
    if type(found["format"]) is not int or found["format"] != FORMAT:
        raise InputError(f"{path} has the format {shown(found['format'])}, and this flashtune knows {FORMAT}: freeze it with this one")
    versions = found["versions"]
    if not isinstance(versions, dict) or not all(isinstance(x, str) for x in versions.values()):
        raise InputError(f"{path} has the versions {shown(versions)}, not a text for each package: freeze it again")
    entries = []
    for number, one in enumerate(found["calls"], 1):
        try:
            entries.append(_entry(one))
        except InputError as error:
            raise InputError(f"call {number} of {path} is invalid ({error}): freeze it again") from error
    return Plan(versions, tuple(entries), hashlib.sha256(text).hexdigest())


def _as_json(entry: Entry) -> dict[str, Any]:
    place = entry.place
    served = [
        {"template": one.template, "text": one.text, "provider": one.provider}
        | {name: None if config is None else config.as_dict() for name, config in (("config", one.config), ("in_graphs", one.in_graphs))}
        for one in entry.served
    ]
    return {"way": place.way, "gpu": place.gpu, "how": list(place.how), "problem": entry_of(place.problem), "served": served}


def _entry(found: Any) -> Entry:
    """One entry; raises InputError for one that `write` would not write."""
    if not isinstance(found, dict) or found.keys() != {"way", "gpu", "how", "problem", "served"}:
        raise InputError(f"it is {shown(found)}, not an object of a way, a GPU, words, a problem and what served")
    if found["way"] not in get_args(Way) or not isinstance(found["gpu"], str):
        raise InputError(f"its way is {shown(found['way'])} and its GPU {shown(found['gpu'])}")
    how, served = found["how"], found["served"]
    if not isinstance(how, list) or not all(isinstance(x, str) for x in how) or not isinstance(served, list) or not served:
        raise InputError(f"its words are {shown(how)} and its servers {shown(served)}, not a list of texts and one of objects")
    place = Place(found["way"], found["gpu"], problem_of_entry(found["problem"]), tuple(how))
    found_servers = tuple(map(_served, served))
    if place.way in ("paged", "functions", "gradients") and any(one.provider for one in found_servers):
        raise InputError(f"its way {place.way} has the provider {found_servers[0].provider}, and providers run no such calls")
    return Entry(place, found_servers)


def _served(found: Any) -> Served:
    if not isinstance(found, dict) or found.keys() != {"template", "text", "provider", "config", "in_graphs"}:
        raise InputError(f"a server is {shown(found)}, not an object of a template, a text, a provider and configs")
    words = [found[name] for name in ("template", "text", "provider")]
    if not all(isinstance(x, str) for x in words) or (found["provider"] and found["provider"] not in PROVIDERS):
        raise InputError(f"a server has the names {shown(words)}")
    configs = {name: _config(found[name]) for name in ("config", "in_graphs")}
    if bool(found["template"]) is (configs["config"] is None) or (found["template"] and found["provider"]):
        raise InputError("a server is neither a kernel with its config, nor a provider, nor PyTorch")
    return Served(template=found["template"], text=found["text"], provider=found["provider"], **configs)


def _config(found: Any) -> Config | None:
    if found is None:
        return None
    if not isinstance(found, dict) or not found or not all(type(x) in (int, str, bool) for x in found.values()):
        raise InputError(f"a config is {shown(found)}, not an object of numbers and texts")
    return Config.of(found)
