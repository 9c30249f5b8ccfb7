"""Compare what serves the frozen problems with what served them when they were frozen: `python guard/choices.py`."""

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import frozen

from flashtune import dispatch
from flashtune.core.problems.lengths import LAWS, Lengths
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.models import models
from flashtune.db.library import Library, shipped_path

GPUS = ("h100", "h200")
SIZES = ("batch", "heads", "kv_heads", "n_q", "n_kv", "d", "d_v")
LENGTHS = (1024, 4096, 16384)


def name_of(problem: Problem, gpu: str) -> str:
    """A problem on a GPU in one line, which `problem_of` reads."""
    sizes = [f"{name}={getattr(problem, name)}" for name in SIZES]
    if problem.lengths is not None:
        sizes.append(f"{problem.lengths.law}={problem.lengths.longest}")
    return " ".join([gpu, problem.direction, problem.dtype, *sizes, json.dumps(problem.features.as_json(), separators=(",", ":"))])


def problem_of(name: str) -> tuple[Problem, str]:
    """The problem and the GPU that a line of `name_of` names."""
    gpu, direction, dtype, *rest = name.split(" ")
    sizes: dict[str, Any] = {key: int(value) for key, _, value in (word.partition("=") for word in rest[:-1])}
    # Of packed sequences the law of their lengths and the longest.
    lengths = [Lengths(law=law, longest=sizes.pop(law)) for law in LAWS if law in sizes]
    features = Features.from_json(json.loads(rest[-1]))
    problem = Problem(**sizes, dtype=dtype, direction=direction, features=features, lengths=next(iter(lengths), None))  # type: ignore[arg-type]
    return problem, gpu


def served(names: Iterable[str]) -> dict[str, list[str | None]]:
    """Kind, template, config and fallback config of what serves each of these."""
    found: dict[str, list[str | None]] = {}
    for name in names:
        choice = dispatch.explain_problem(*problem_of(name))
        config, fallback = (None if one is None else one.label() for one in (choice.config, choice.twin))
        found[name] = [choice.kind, choice.template, config, fallback]
    return found


def current(new: bool) -> dict[str, Any]:
    """Kernels that serve the frozen problems today, and where they may be `new` all keys of the shipped database and the models', too."""
    return served(sorted({*frozen.read("choices"), *(_problems() if new else ())}))


def _problems() -> Iterator[str]:
    for record in Library.of(shipped_path()).records():
        yield name_of(record.problem, record.key.gpu)
    for attention in (one for model in models().values() for one in model.attentions):
        for n in {*attention.n, *(LENGTHS if attention.causal else ())}:
            problems = [attention.problem(n=n, dtype="bf16"), attention.problem(n=n, dtype="bf16", direction="bwd")]
            if attention.causal:
                problems.append(attention.problem(n=n, n_q=1, batch=1, dtype="bf16"))
            yield from (name_of(problem, gpu) for problem in problems for gpu in GPUS)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # The user's own results and kernels have no say.
        os.environ |= {
            "FLASHTUNE_CACHE": folder,
            "FLASHTUNE_OWN_DB": f"{folder}/own.sqlite",
            "FLASHTUNE_DB": "",
            "FLASHTUNE_UNMEASURED": "",
        }
        sys.exit(frozen.main("choices", __doc__, current))
