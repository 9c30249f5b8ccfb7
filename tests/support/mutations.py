"""Random changes of a JSON value: names dropped, values of other types, values swapped, flags flipped, numbers moved."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

STRANGE = st.sampled_from(
    [None, True, False, 0, 1, -1, 2**40, 10**30, 0.5, float("nan"), float("inf"), "", "x", "fwd", "a" * 300, [], ["a"], {}, {"a": 1}]
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a value."""
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*above, name)
        yield from places(inner, (*above, name))


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for name in place:
        value = value[name]
    return value


@st.composite
def mutated(draw: st.DrawFn, value: Any, most: int = 3) -> Any:
    """A copy of a value with one to `most` changes, each at a random place."""
    changed = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        found = list(places(changed))
        if not found:
            return draw(STRANGE)
        *path, name = draw(st.sampled_from(found))
        holder = _at(changed, tuple(path))
        kind = draw(st.sampled_from(["drop", "replace", "swap", "twist"]))
        if kind == "drop":
            del holder[name]
        elif kind == "replace":
            holder[name] = draw(STRANGE)
        elif kind == "swap":
            # Places of one kind, as ids of kernels.
            alike = [other for other in found if type(_at(changed, other)) is type(holder[name]) and other[-1:] == (name,)]
            *other, last = draw(st.sampled_from(alike or found))
            holder[name], _at(changed, tuple(other))[last] = copy.deepcopy(_at(changed, (*other, last))), copy.deepcopy(holder[name])
        else:
            holder[name] = _twisted(holder[name])
    return changed


def _twisted(value: Any) -> Any:
    """A value near to this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    if isinstance(value, str):
        return value[:-1] + chr(ord(value[-1]) ^ 1) if value else "y"
    return [value]
