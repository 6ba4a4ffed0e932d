"""Write a line to stderr; never raise. Each rank imports this before its program starts: the standard library only."""

from __future__ import annotations

import sys

from numapin.base.text import printable


def say(text: str) -> None:
    """Write a line in one piece, because ranks share stderr. A closed or full stderr is ignored.

    Characters that would control a terminal or begin another line are replaced.
    """
    try:
        sys.stderr.write(f"numapin: {printable(text)}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError, RuntimeError):  # RuntimeError: a write inside a write
        pass
