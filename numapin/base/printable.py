"""Text that somebody else wrote becomes text that can be shown. Pure.

Comes in: names and reasons out of files, which may hold a terminal's commands. Goes out: characters that one can see.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace what is no visible character: controls, direction marks, half surrogates, what XML forbids."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
