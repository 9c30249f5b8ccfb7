"""Masking of passwords in stored command lines and in URLs of databases within error messages.

Texts may be untrusted, so masking takes linear time: no pattern looks for an end from every possible beginning.
"""

import re
from collections.abc import Sequence
from itertools import pairwise

MASK = "***"

# Compiled at first use: every process that reads records imports this, and hardly any has a password.
_USER = r"(?<=[\w+.-]):/+[^:/]*:"
"""What precedes a password in SQLAlchemy's pattern of a URL, with any number of slashes: a user's name may hold @, quotes and blanks."""
_PORT = r"\d++(?:[/?][^\s@]*+)?['\"),.;:]*+\s"
"""A port in place of a password within a longer text: an @ of a later word is no part of its URL."""
_OPTION = r"[?&;][^=&;\s]*+"
_SECRET = r"(?i:pass|pwd|secret|token)"
_FILES = ("--score-mod", "--mask-mod")
"""Options whose values name a user's files."""
_FILES_INLINE = tuple(f"{name}=" for name in _FILES)


def mask_secrets(text: str) -> str:
    """`text` with `***` for the passwords of all URLs in it, before their @ and in their options (`?password=`).

    A URL that is all of the text is for `mask_url`: of options within a longer text the first word alone is known to be the value.
    """
    user, parts, start, done, last = re.compile(_USER), [], 0, 0, text.rfind("@")
    while (found := user.search(text, start)) is not None and found.end() <= last:
        start = found.end()
        if (port := re.compile(_PORT).match(text, start)) is not None:
            start = port.end()
            continue
        first = text.index("@", start)
        # An unquoted password may hold an @, too.
        blank = re.compile(r"\s|\Z").search(text, first)
        assert blank is not None, "the end is one"
        if (end := text.rindex("@", first, blank.start())) > start:
            parts += [text[done:start], MASK]
            start = done = end
    return _without_options("".join([*parts, text[done:]]), whole=False)


def mask_url(url: str) -> str:
    """The URL, or the word of a command that holds one, with `***` for whatever SQLAlchemy may read as a password."""
    end = url.rfind("@")
    user = re.compile(_USER).search(url, 0, max(end, 0))
    return _without_options(url if user is None or user.end() == end else f"{url[: user.end()]}{MASK}{url[end:]}", whole=True)


def command_line(words: Sequence[str]) -> str:
    """The shell command line of these words, with passwords masked, and the names of a user's functions, which no database holds."""
    # Imported late, since most records have no password.
    import shlex

    return shlex.join(
        MASK if before in _FILES else f"{word.partition('=')[0]}={MASK}" if word.startswith(_FILES_INLINE) else mask_url(word)
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
    return command_line(words) if any(mask_url(word) != word for word in words) else text


def _without_options(text: str, *, whole: bool) -> str:
    """The text, or `whole` URL, with the values of options with a secret's name masked."""
    parts, done, value = [], 0, re.compile(r"[^&]+" if whole else r"[^&\s]+")
    for option in re.finditer(_OPTION, text):
        if option.start() < done or text[option.end() : option.end() + 1] != "=" or not re.search(_SECRET, _decoded(option[0])):
            continue
        if found := value.match(text, option.end() + 1):
            # Marks at the end are the sentence's around a URL.
            end = found.end() if whole else max(found.start() + 1, found.start() + len(found[0].rstrip("'\"),.;:")))
            parts += [text[done : found.start()], MASK]
            done = end
    return "".join([*parts, text[done:]])


def _decoded(name: str) -> str:
    """The name of an option, as SQLAlchemy decodes it."""
    if "%" not in name:
        return name
    from urllib.parse import unquote

    return unquote(name)
