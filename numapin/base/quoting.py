r"""Words as a shell takes them, with nothing in them that a terminal takes for a command. Pure.

Comes in: words with any characters, among them those that stand for bytes that are no UTF-8. Goes out: a line for bash,
zsh or ksh that gives the same words back. Where a word has invisible characters it is written as $'\e[31m'.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAMED: Final = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\x1b": "\\e"}


def quote(word: str) -> str:
    """Return a word as `shlex.quote` does, or in $'…' where it has a character that cannot be seen."""
    return shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_letter, word))}'"


def join(words: Iterable[str]) -> str:
    """Return the words as one line."""
    return " ".join(map(quote, words))


def _letter(letter: str) -> str:
    """Return a letter between $' and '. Three octal digits a byte mean the same in every locale and shell."""
    if letter in _NAMED:
        return _NAMED[letter]
    if letter.isprintable():
        return letter
    return "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogateescape"))
