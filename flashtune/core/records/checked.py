"""Checked raw values of rows and tables that others may have written, and the text forms that they may hold."""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from flashtune.core.problems.dtypes import DTYPES
from flashtune.core.problems.problem import DIRECTIONS, LARGEST_HEAD, ProblemKey
from flashtune.core.system.files import parse_json
from flashtune.core.system.words import canonical, shown

LARGEST = 2**31 - 1
"""Largest whole number that every database's INTEGER holds."""
NAME_LENGTH = 64
TEXT_LENGTH = 4000
FEATURES_LENGTH = 255

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, lone surrogates, line separators and the marks that reorder text: none may be printed to a terminal."""

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")

WordT = TypeVar("WordT", bound=str)


class RowError(ValueError):
    """Error for a value that flashtune would not write, in this `column` of a row."""

    def __init__(self, column: str, why: str) -> None:
        super().__init__(f"{column} {why}")
        self.column = column


class Row(NamedTuple):
    """Raw values of one row by column; each method returns one checked value, or raises RowError."""

    values: Mapping[str, object]

    def missing(self, column: str) -> bool:
        """True if the value is NULL."""
        return self.values[column] is None

    def text(self, column: str, *, limit: int, pattern: re.Pattern[str] | None = None, empty: bool = False) -> str:
        """A printable text of at most `limit` characters that matches all of `pattern`."""
        value = self.values[column]
        if not isinstance(value, str):
            raise RowError(column, f"is {shown(value)}, not a text")
        if len(value) > limit:
            raise RowError(column, f"has {len(value)} characters, more than {limit}")
        if UNPRINTABLE.search(value):
            raise RowError(column, f"is {shown(value)}, which holds control characters")
        if (not value and not empty) or (value and pattern is not None and not pattern.fullmatch(value)):
            raise RowError(column, f"is {shown(value)}, which is no name")
        return value

    def word(self, column: str) -> str:
        """A checked slug or hash."""
        return self.text(column, limit=NAME_LENGTH, pattern=_WORD)

    def one_of(self, column: str, known: tuple[WordT, ...]) -> WordT:
        """One of the known words."""
        value = self.values[column]
        for word in known:
            if isinstance(value, str) and value == word:
                return word
        raise RowError(column, f"is {shown(value)}, not one of {', '.join(known)}")

    def integer(self, column: str, low: int, high: int = LARGEST) -> int:
        """A whole number in low .. high."""
        value = self.values[column]
        if type(value) is not int or not low <= value <= high:
            raise RowError(column, f"is {shown(value)}, not a whole number from {low} to {high}")
        return value

    def real(self, column: str, *, zero: bool = False, infinite: bool = False, most: float = math.inf) -> float:
        """A positive finite number; zero or infinity only where they are allowed."""
        value = self.values[column]
        number = float(value) if type(value) in (int, float) and isinstance(value, int | float) else math.nan
        if not (0 < number <= most or (zero and number == 0)) or (math.isinf(number) and not infinite):
            raise RowError(column, f"is {shown(value)}, not a positive finite number")
        return number

    def json(self, column: str, limit: int) -> dict[str, Any]:
        """A JSON object in canonical form (sorted keys, no blanks), so that equal values are equal texts."""
        text = self.text(column, limit=limit)
        try:
            value = parse_json(text)
        except ValueError as error:
            raise RowError(column, f"is {shown(text)}, which is no JSON") from error
        if not isinstance(value, dict) or canonical(value) != text:
            raise RowError(column, f"is {shown(text)}, not a JSON object in canonical form")
        return value


def tidy(text: str, limit: int = TEXT_LENGTH) -> str:
    """One printable line of at most `limit` characters."""
    plain = UNPRINTABLE.sub(" ", text)
    return plain if len(plain) <= limit else plain[: limit - 1] + "…"


def read_key(row: Row) -> ProblemKey:
    """Key in a row with its columns, with checked numbers and names."""
    return ProblemKey(
        gpu=row.word("gpu"),
        n=row.integer("n", 1),
        d=row.integer("d", 1, LARGEST_HEAD),
        dtype=row.one_of("dtype", DTYPES),
        direction=row.one_of("direction", DIRECTIONS),
        d_v=row.integer("d_v", 1, LARGEST_HEAD),
        n_q=row.integer("n_q", 1),
        features=_features(row),
        gqa_ratio=row.integer("gqa_ratio", 1),
        bh_bucket=row.integer("bh_bucket", 1),
        spread=row.integer("spread", 0),
    )


def _features(row: Row) -> str:
    """Checked text of the features."""
    text = row.values["features"]
    return text if isinstance(text, str) and _sound(text) else canonical(row.json("features", FEATURES_LENGTH))


@functools.lru_cache(maxsize=1024)
def _sound(text: str) -> bool:
    """True if the text is a JSON object in canonical form; cached, since hundreds of rows share a few texts."""
    try:
        Row({"features": text}).json("features", FEATURES_LENGTH)
    except RowError:
        return False
    return True
