"""Passwords out of texts: command lines are stored and shipped, and URLs of databases are printed in errors.

Texts may be a stranger's, so masking takes a time that grows as they do: no pattern looks for an end from every possible beginning.
"""

import re
import shlex
from collections.abc import Sequence

MASK = "***"

_WORD = re.compile(r"\S+")
_USER = re.compile(r"(?<=[\w+.-]):/+[^\s:/@'\"]*:")
_OPTION = re.compile(r"[?&;][^=&;\s]*+")
_SECRET = re.compile(r"pass|pwd|secret|token", re.IGNORECASE)
_VALUE = re.compile(r"[^&;\s'\"]+")
_VALUE_IN_WORD = re.compile(r"[^&;]+")


def mask_secrets(text: str) -> str:
    """`text` with `***` for the passwords of all URLs in it, before their @ and in their options (`?password=`)."""
    return _without_options(_WORD.sub(lambda word: _without_password(word[0]), text), _VALUE)


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
    return _without_options(_without_password(word), _VALUE_IN_WORD)


def _without_password(word: str) -> str:
    """user:password@ is masked up to the last @: a password that should have been quoted may hold / and @ itself."""
    end = word.rfind("@")
    user = _USER.search(word, 0, max(end, 0))
    return word if user is None or user.end() == end else f"{word[: user.end()]}{MASK}{word[end:]}"


def _without_options(text: str, value: re.Pattern[str]) -> str:
    """The values of all options with a secret's name are masked."""
    parts, done = [], 0
    for option in _OPTION.finditer(text):
        if option.start() < done or text[option.end() : option.end() + 1] != "=" or not _SECRET.search(option[0]):
            continue
        if found := value.match(text, option.end() + 1):
            parts += [text[done : found.start()], MASK]
            done = found.end()
    return "".join([*parts, text[done:]])
