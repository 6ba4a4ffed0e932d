r"""Words quoted for a shell, without characters that control a terminal.

A word with invisible characters is written in the form $'\e[31m'.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAMED: Final = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\x1b": "\\e"}


def quote(word: str) -> str:
    """Return a word as `shlex.quote` does, or in $'…' if it has an invisible character."""
    return shlex.quote(word) if word.isprintable() else f"$'{''.join(map(_letter, word))}'"


def join(words: Iterable[str]) -> str:
    """Return the quoted words as one line."""
    return " ".join(map(quote, words))


def _letter(letter: str) -> str:
    """Write a letter for use in $'…'. Three octal digits per byte mean the same in every locale and shell."""
    if letter in _NAMED:
        return _NAMED[letter]
    if letter.isprintable():
        return letter
    return "".join(f"\\{byte:03o}" for byte in letter.encode("utf-8", "surrogateescape"))
