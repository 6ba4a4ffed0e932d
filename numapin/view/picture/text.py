"""Text with an upper bound on its width."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from numapin.base.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST_TITLE: Final = 300  # characters of a tooltip
_MOST_LINES: Final = 6  # of one text; only a name that no machine has needs more
_WORD: Final = re.compile(r"[^ ,/·]*[ ,/·]*")  # lines break after spaces, commas, slashes and dots

# Widths in em, for the widest of the common sans-serif fonts, DejaVu Sans and Verdana.
_NARROW: Final = frozenset(" !'(),-./:;I[]`fijlrt|·")
_BROAD: Final = frozenset("#%&+<=>@GMNOQWmw~…")
_BOLD: Final = 1.13


def title_text(*facts: str) -> str:
    """Return the facts that are known, one per line; a long one is cut."""
    return "\n".join(_cut(printable(fact), _LONGEST_TITLE) for fact in facts if fact)


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """Return an upper bound on the width of the text, in the unit of the font size."""
    return sum(map(_em, text)) * size * (_BOLD if bold else 1)


def wrapped(text: str, width: float, size: float, *, bold: bool = False, first: float | None = None) -> list[str]:
    """Break a text into lines of a width; the first one may be `first` wide, and empty if nothing fits there.

    A word that is wider than a line is broken, too. After six lines the rest is cut.
    """
    shown = printable(text[: (int(width) + 1) * _MOST_LINES])  # every character is at least one unit wide
    room = width if first is None else first
    if shown and width_of(shown, size, bold=bold) <= room:
        return [shown]
    lines = _lines(shown, width, size, bold=bold, room=room)
    if not lines[0] and first is None:
        lines = lines[1:]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [fit("".join(lines[_MOST_LINES - 1 :]), width, size, bold=bold)]
    return [line.rstrip() for line in lines]


def _lines(text: str, width: float, size: float, *, bold: bool, room: float) -> list[str]:
    """Return the lines of a text, the first of which has this room."""
    lines = [""]
    for piece in _pieces(text, width, size, bold=bold):
        if width_of((lines[-1] + piece).rstrip(), size, bold=bold) <= room:
            lines[-1] += piece
        else:
            lines.append(piece)
            room = width
    return lines


def _pieces(text: str, width: float, size: float, *, bold: bool) -> Iterator[str]:
    """Yield the words of a text with what separates them from the next; a word that is too wide comes in parts."""
    for word in _WORD.findall(text):
        while width_of(word.rstrip(), size, bold=bold) > width and len(word) > 1:
            part = _longest(word, width, size, bold=bold)
            yield part
            word = word[len(part) :]  # noqa: PLW2901 - the rest of the word
        if word:
            yield word


def _longest(word: str, width: float, size: float, *, bold: bool) -> str:
    """Return as many characters as fit, at least one."""
    used = 0.0
    for number, char in enumerate(word):
        used += width_of(char, size, bold=bold)
        if used > width:
            return word[: max(number, 1)]
    return word


def fit(text: str, width: float, size: float, *, bold: bool = False) -> str:
    """Cut a text to a width, with "…" at the end; "" if not even two characters and "…" fit."""
    shown = printable(text[: int(width) + 1])  # every character is at least one unit wide
    if shown == printable(text) and width_of(shown, size, bold=bold) <= width:
        return shown
    while shown and width_of(f"{shown}…", size, bold=bold) > width:
        shown = shown[:-1]
    return f"{shown.rstrip(' ,-')}…" if len(shown) > 1 else ""


def _em(char: str) -> float:
    if char in _NARROW:
        return 0.42
    if char in _BROAD:
        return 1.0
    if not char.isascii():
        return 1.3
    return 0.78 if char.isupper() else 0.65


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
