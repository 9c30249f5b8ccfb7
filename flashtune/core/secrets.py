"""Passwords out of texts: command lines are stored and shipped, and URLs of databases are printed in errors.

Texts may be a stranger's, so masking takes a time that grows as they do: no pattern looks for an end from every possible beginning.
"""

import re
from collections.abc import Sequence

MASK = "***"

# Compiled when they are first used: every process that reads rows imports this, and hardly one holds a password.
_WORD = r"\S+"
_USER = r"(?<=[\w+.-]):/+[^\s:/@'\"]*:"
_OPTION = r"[?&;][^=&;\s]*+"
_SECRET = r"(?i:pass|pwd|secret|token)"
_VALUE = r"[^&;\s'\"]+"
_VALUE_IN_WORD = r"[^&;]+"


def mask_secrets(text: str) -> str:
    """`text` with `***` for the passwords of all URLs in it, before their @ and in their options (`?password=`)."""
    return _without_options(re.sub(_WORD, lambda word: _without_password(word[0]), text), _VALUE)


def command_line(words: Sequence[str]) -> str:
    """The words of a command as one would type them, with passwords masked."""
    # As in `mask_command_line`.
    import shlex

    return shlex.join(_masked_word(word) for word in words)


def mask_command_line(text: str) -> str:
    """A typed command with passwords masked; the same text where it holds none."""
    if not any(mark in text for mark in "@?&;"):
        # No password is without one of these, however it is quoted; shlex takes its time, and every row has a command.
        return text
    import shlex

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
    user = re.compile(_USER).search(word, 0, max(end, 0))
    return word if user is None or user.end() == end else f"{word[: user.end()]}{MASK}{word[end:]}"


def _without_options(text: str, value: str) -> str:
    """The values of all options with a secret's name are masked."""
    parts, done = [], 0
    for option in re.finditer(_OPTION, text):
        if option.start() < done or text[option.end() : option.end() + 1] != "=" or not re.search(_SECRET, option[0]):
            continue
        if found := re.compile(value).match(text, option.end() + 1):
            parts += [text[done : found.start()], MASK]
            done = found.end()
    return "".join([*parts, text[done:]])
