"""Masking of passwords in stored command lines and in URLs of databases within error messages.

Texts may be untrusted, so masking takes linear time: no pattern looks for an end from every possible beginning.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

MASK = "***"

# Compiled at first use: every process that reads records imports this, and hardly any has a password.
_WORD = r"\S+"
_USER = r"(?<=[\w+.-]):/+[^\s:/@'\"]*:"
_OPTION = r"[?&;][^=&;\s]*+"
_SECRET = r"(?i:pass|pwd|secret|token)"
_VALUE = r"[^&;\s'\"]+"
_VALUE_IN_WORD = r"[^&;]+"
_FILES = ("--score-mod", "--mask-mod")
"""Options whose values name a user's files."""
_FILES_INLINE = tuple(f"{name}=" for name in _FILES)


def mask_secrets(text: str) -> str:
    """`text` with `***` for the passwords of all URLs in it, before their @ and in their options (`?password=`)."""
    return _without_options(re.sub(_WORD, lambda word: _without_password(word[0]), text), _VALUE)


def command_line(words: Sequence[str]) -> str:
    """The shell command line of these words, with passwords masked, and the names of a user's functions, which no database holds."""
    # Imported late, since most records have no password.
    import shlex

    return shlex.join(
        MASK if before in _FILES else f"{word.partition('=')[0]}={MASK}" if word.startswith(_FILES_INLINE) else _masked_word(word)
        for before, word in pairwise(("", *words))
    )


def mask_command_line(text: str) -> str:
    """A command line with passwords masked, unchanged where it has none."""
    if not any(mark in text for mark in "@?&;"):
        # Every password comes with one of these marks, and shlex is slow for every record's command.
        return text
    import shlex

    try:
        words = shlex.split(text)
    except ValueError:
        # The command was cut short inside a quotation.
        return mask_secrets(text)
    return command_line(words) if any(_masked_word(word) != word for word in words) else text


def _masked_word(word: str) -> str:
    return _without_options(_without_password(word), _VALUE_IN_WORD)


def _without_password(word: str) -> str:
    """The word with user:password@ masked up to the last @, since an unquoted password may contain / and @."""
    end = word.rfind("@")
    user = re.compile(_USER).search(word, 0, max(end, 0))
    return word if user is None or user.end() == end else f"{word[: user.end()]}{MASK}{word[end:]}"


def _without_options(text: str, value: str) -> str:
    """The text with the values of options with a secret's name masked."""
    parts, done = [], 0
    for option in re.finditer(_OPTION, text):
        if option.start() < done or text[option.end() : option.end() + 1] != "=" or not re.search(_SECRET, option[0]):
            continue
        if found := re.compile(value).match(text, option.end() + 1):
            parts += [text[done : found.start()], MASK]
            done = found.end()
    return "".join([*parts, text[done:]])
