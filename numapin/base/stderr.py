"""Write a line to stderr; never raise. Edge.

Comes in: what the user should know. Goes out: a line on stderr, if that can be written.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import sys

from numapin.base.printable import printable


def say(text: str) -> None:
    """Write a line in one piece: ranks share stderr. One that is closed or full is no reason to lose the job.

    Names in it may be anybody's: what would control a terminal, or begin another line, is replaced.
    """
    try:
        sys.stderr.write(f"numapin: {printable(text)}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError, RuntimeError):  # RuntimeError: a write inside a write
        pass
