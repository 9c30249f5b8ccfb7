"""Reads of a function's code: names, attributes of its variables, and whether it reads what can't be followed."""

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any

_BY_NAME = frozenset(
    (
        "globals", "locals", "vars", "eval", "exec", "attrgetter", "methodcaller", "__dict__", "__getattr__", "__getattribute__",
        "__reduce__", "__reduce_ex__", "__getstate__", "__import__", "grad", "stride", "data_ptr", "storage_offset",
    )
)  # fmt: skip
"""Names by which a function may read what isn't followed."""
_ASKING = ("getattr", "hasattr")
"""Built-in functions that take the name of an attribute, which is followed where it is written out."""
LOOKING = (getattr, hasattr, vars, globals, locals, eval, exec, __import__)
"""Built-in functions that read what isn't followed, under any name."""
_IDLE = frozenset(("CACHE", "PRECALL", "PUSH_NULL", "RESUME", "EXTENDED_ARG", "NOP"))

Chains = tuple[tuple[str, ...], ...]
"""Attributes that are read of a value, each followed by those that are read of it in turn."""


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those within it may read from its module or from objects, as text for `getattr`, too."""
    inner = [name for x in _within(code) for name in names_of(x)]
    texts = [x for x in code.co_consts if isinstance(x, str) and x.isidentifier()]
    return tuple(dict.fromkeys((*code.co_names, *texts, *inner)))


@functools.lru_cache(maxsize=1024)
def reads_elsewhere(code: types.CodeType) -> bool:
    """True if a function or one within it imports or looks values up by names that aren't written out, which can't be followed."""
    steps = _steps(code)
    if not _BY_NAME.isdisjoint(code.co_names) or any(x.opname in ("IMPORT_NAME", "MATCH_CLASS") for x in steps):
        return True
    asked = any(x.argval in _ASKING and not _written_out(steps[place + 1 :]) for place, x in enumerate(steps) if x.opname != "LOAD_CONST")
    return asked or any(reads_elsewhere(x) for x in _within(code))


@functools.lru_cache(maxsize=4096)
def chains_of(code: types.CodeType, name: str, *, of_module: bool = False) -> Chains | None:
    """Attributes that a function and those within it read of a variable, theirs or (`of_module`) their module's; None where they do
    anything else with its value."""
    if "__class__" in code.co_freevars:
        # `super()` reads the first variable by itself.
        return None
    shared, steps, found = name in (*code.co_cellvars, *code.co_freevars), _steps(code), dict[tuple[str, ...], None]()
    for place, step in enumerate(steps):
        variables = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        mine = "GLOBAL" in step.opname or step.opname.endswith("_NAME") if of_module else "FAST" in step.opname or "DEREF" in step.opname
        # A cell is handed on to a function within.
        if not mine or name not in variables or (shared and step.opname.startswith("LOAD_FAST")):
            continue
        chain = tuple(x.argval for x in _attributes(steps[place + 1 :]))
        if not step.opname.startswith("LOAD_") or name in variables[:-1] or not chain:
            return None
        found[chain] = None
    for inner in _within(code):
        if of_module or name in inner.co_freevars:
            chains = chains_of(inner, name, of_module=of_module)
            if chains is None:
                return None
            found |= dict.fromkeys(chains)
    return tuple(found)


def _within(code: types.CodeType) -> list[types.CodeType]:
    return [x for x in code.co_consts if isinstance(x, types.CodeType)]


def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [x for x in dis.get_instructions(code) if x.opname not in _IDLE]


def _attributes(steps: list[dis.Instruction]) -> Iterator[dis.Instruction]:
    for x in steps:
        if x.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return
        yield x


def _written_out(steps: list[dis.Instruction]) -> bool:
    """True for the arguments of `getattr` and a call: a variable or attributes of one, a text, and no more than a default."""
    given: list[Any] = steps[:1]
    if not given or not given[0].opname.startswith("LOAD_") or isinstance(given[0].argval, tuple) or given[0].opname == "LOAD_CONST":
        return False
    rest = steps[1 + len(list(_attributes(steps[1:]))) :]
    named = bool(rest) and rest[0].opname == "LOAD_CONST" and isinstance(rest[0].argval, str)
    return named and any(x.opname == "CALL" and x.arg == 2 + more for more, x in enumerate(rest[1:3]))
