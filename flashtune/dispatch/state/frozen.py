"""Servers of the calls so far (`Met`), of which `dispatch.freeze` writes a plan, and a plan in force (`Frozen`), in place of records."""

import importlib.metadata
import threading
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flashtune
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import DECODE_ROWS, Problem, next_power_of_two
from flashtune.core.records import plans
from flashtune.core.records.calls import kind_of
from flashtune.core.records.plans import Entry, Place, Plan, Served
from flashtune.core.system.errors import InputError
from flashtune.core.system.words import shown
from flashtune.dispatch.plans.kernels import text_digest
from flashtune.dispatch.policy.choose import Choice
from flashtune.dispatch.providers.libraries import PROVIDERS
from flashtune.templates import family as family_of

MOST_PLACES = 32768
"""Kinds of calls of a process whose servers are kept."""


class _Server(NamedTuple):
    """Server of a call: a kernel with the fallback that runs once the `owner` of its latch says so, and with the config that CUDA graphs
    run; a provider; or PyTorch's own choice."""

    variant: Variant | None = None
    provider: str = ""
    fallback: Config | None = None
    in_graphs: Config | None = None
    owner: "weakref.ref[Any] | None" = None

    def served(self) -> Served:
        """The same as data."""
        if self.variant is None:
            return Served(provider=self.provider)
        latch = getattr(None if self.owner is None else self.owner(), "latch", None)
        state, config = getattr(latch, "state", None), self.variant.config
        if self.fallback is not None and state is not None and state.latched:
            config = self.fallback
        chosen = Variant(template=self.variant.template, spec=self.variant.spec, config=config)
        text = text_digest(family_of(chosen.template), chosen)
        return Served(template=chosen.template, config=config, in_graphs=self.in_graphs, text=text)


class Met:
    """Servers of the calls so far by their place; later calls find theirs in a plan cache and don't get here."""

    def __init__(self) -> None:
        self._found: dict[Place, list[_Server]] = {}
        self._lock = threading.Lock()

    def note(self, place: Place, variant: Variant | None, owner: Any = None, *, alone: bool = False, **more: Any) -> None:
        """Keep the server of a call: the kernel of a `variant`, whose `owner` has its latch, or None for a `provider` or PyTorch. It
        replaces earlier ones where it is `alone`; `more` are fields of a server."""
        server = _Server(variant, owner=None if owner is None else weakref.ref(owner), **more)
        with self._lock:
            if place not in self._found and len(self._found) >= MOST_PLACES:
                return
            others = [one for one in self._found.get(place, ()) if (one.variant, one.provider) != (variant, server.provider)]
            self._found[place] = [server] if alone else [*others, server]

    def entries(self) -> list[Entry]:
        """Servers of all calls, as data."""
        with self._lock:
            found = dict(self._found)
        plain: dict[Place, dict[Served, None]] = {}
        for place, servers in found.items():
            plain.setdefault(place.plain(), {}).update(dict.fromkeys(one.served() for one in servers))
        return [Entry(place, tuple(served)) for place, served in plain.items()]


class Frozen:
    """A plan in force: calls like those that it was frozen from run by the same kernels, and others are refused.

    A call has the servers of its own entry, else of the entry whose lengths are nearest among those that differ in sizes alone, in the same
    octaves.
    """

    def __init__(self, plan: Plan, path: Path) -> None:
        self.plan, self.path, self.digest = plan, path, plan.digest
        self._alike: dict[Hashable, list[Entry]] = {}
        for entry in plan.entries:
            self._alike.setdefault(_octaves(entry.place), []).append(entry)

    @classmethod
    def read(cls, path: Path) -> "Frozen":
        """The plan of a file; raises InputError where it is none, or of other versions than those installed."""
        found = cls(plans.read(path), path)
        here = versions(found.plan.entries)
        for name in sorted({*here, *found.plan.versions}):
            theirs = found.plan.versions.get(name)
            if here.get(name) != theirs:
                of = f"{shown(name)} {shown(theirs)} (here {shown(here.get(name))})"
                raise InputError(f"the plan {path} is of {of}: freeze it with these versions")
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def choices(self, place: Place) -> Iterator[Choice]:
        """Servers of a call in the order of the plan; raises InputError where the plan has none."""
        found = self.named(place)
        if not found:
            remedy = "freeze a run that makes it, or run without the plan"
            raise InputError(f"the plan {self.path} has no call like {place.label()}: {remedy}")
        yield from found

    def unable(self, place: Place, why: str) -> InputError:
        """Error where what the plan names for a call can't run it here."""
        what = f"what the plan {self.path} names for {place.label()} can't run here ({why})"
        return InputError(f"{what}: freeze it anew, or run without it")

    def named(self, place: Place) -> list[Choice]:
        """The same without an error: empty where the plan has no such call."""
        spec, note = place.problem.spec(), f"the plan {self.path} names it"
        problem, alike = place.plain().problem, self._alike.get(_octaves(place.plain()), ())
        found = []
        for one in min(alike, key=lambda entry: _distance(entry.place.problem, problem)).served if alike else ():
            if one.provider:
                found.append(Choice(kind="provider", spec=spec, note=note, provider=one.provider))
            elif not one.template or one.config is None:
                found.append(Choice(kind="framework", spec=spec, note=note))
            else:
                found.append(self._kernel(one, one.config, Choice(kind="frozen", spec=spec, note=note, in_graphs=one.in_graphs)))
        return found

    def _kernel(self, served: Served, config: Config, choice: Choice) -> Choice:
        """The choice of a kernel, whose text is checked."""
        try:
            family = family_of(served.template)
            for one in (config, choice.in_graphs):
                if one is not None:
                    family.validate(one)
        except InputError as error:
            raise InputError(f"the plan {self.path} names a kernel that isn't here ({error}): freeze it anew") from error
        if text_digest(family, Variant(template=family.name, spec=choice.spec, config=config)) != served.text:
            raise InputError(f"the plan {self.path} names a kernel of {family.name} whose text is another one here: freeze it anew")
        return choice._replace(family=family, config=config)

    def trains(self, problem: Problem, gpu: str) -> Choice | None:
        """Kernel for the gradients of problems like this one, of any sizes; None where the plan has none."""

        def kind(one: Problem) -> Hashable:
            return one.dtype, one.d, one.d_v, one.gqa_ratio, one.features

        for entry in self.plan.entries:
            if entry.place.way == "gradients" and entry.place.gpu == gpu and kind(entry.place.problem) == kind(problem):
                return next((one for one in self.choices(entry.place) if one.family is not None), None)
        return None


def _octaves(place: Place) -> Hashable:
    """Common parts of calls that one entry is for."""
    one = place.problem
    rows = one.n_q if one.n_q <= DECODE_ROWS else next_power_of_two(one.n_q)
    return place.way, place.gpu, place.how, kind_of(one), rows, next_power_of_two(one.n_kv)


def _distance(one: Problem, other: Problem) -> tuple[Any, ...]:
    """Order of entries for a call: its own, then by lengths."""
    crowd = abs(one.batch * one.heads - other.batch * other.heads)
    return one != other, abs(one.n_kv - other.n_kv), abs(one.n_q - other.n_q), crowd, repr(one)


def versions(entries: Sequence[Entry]) -> dict[str, str]:
    """Versions here of everything that decides on what these entries run, by package."""
    packages = {"torch", "triton", *(PROVIDERS[one.provider].package for entry in entries for one in entry.served if one.provider)}
    found = {"flashtune": flashtune.__version__}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return found if cudnn is None else {**found, "cuDNN": str(cudnn)}
