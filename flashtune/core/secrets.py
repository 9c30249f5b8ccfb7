"""Passwords out of texts: command lines are stored and shipped, and URLs of databases are printed in errors."""

import re
import shlex
from collections.abc import Sequence

MASK = "***"

# user:password@ up to the last @: a password that should have been quoted may hold / and @ itself.
_PASSWORD = re.compile(r"([A-Za-z][\w+.-]*:/+[^\s:/@'\"]*:)(\S+)(?=@)")
_PASSWORD_IN_WORD = re.compile(_PASSWORD.pattern.replace(r"\S+", ".+"), re.DOTALL)
_QUERY = re.compile(r"([?&;][^=&;\s]*(?:pass|pwd|secret|token)[^=&;\s]*=)[^&;\s'\"]+", re.IGNORECASE)
_QUERY_IN_WORD = re.compile(_QUERY.pattern.replace(r"[^&;\s'\"]+", "[^&;]+"), re.IGNORECASE)


def mask_secrets(text: str) -> str:
    """`text` with `***` for the passwords of all URLs in it, before their @ and in their options (`?password=`)."""
    return _QUERY.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1{MASK}", text))


def command_line(words: Sequence[str]) -> str:
    """The words of a command as one would type them, with passwords masked."""
    return shlex.join(_masked_word(word) for word in words)


def mask_command_line(text: str) -> str:
    """A typed command with passwords masked; the same text where it holds none."""
    if not any(mark in text for mark in "@?&;"):
        # No password is without one of these, however it is quoted; shlex takes its time, and every row has a command.
        return text
    try:
        words = shlex.split(text)
    except ValueError:
        # Cut short inside a quotation.
        return mask_secrets(text)
    return command_line(words) if any(_masked_word(word) != word for word in words) else text


def _masked_word(word: str) -> str:
    return _QUERY_IN_WORD.sub(rf"\1{MASK}", _PASSWORD_IN_WORD.sub(rf"\1{MASK}", word))
