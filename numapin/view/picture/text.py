"""Text with an upper bound on its width. Pure.

Comes in: text, perhaps from an untrusted file. Goes out: printable text that fits.
"""

from __future__ import annotations

from typing import Final

from numapin.base.printable import printable

_LONGEST_TITLE: Final = 300  # characters of a tooltip

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
