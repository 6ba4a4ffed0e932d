"""Lines on stderr, from processes that have more important things to do. Edge.

Comes in: what the user should know. Goes out: a line on stderr, if that can be written.

Each rank imports this before its program starts: the standard library only.
"""

from __future__ import annotations

import sys
from contextlib import suppress


def say(text: str) -> None:
    """Write a line in one piece: ranks share stderr. One that is closed or full is no reason to lose the job."""
    with suppress(OSError, ValueError, AttributeError, RuntimeError):  # RuntimeError: a write inside a write
        sys.stderr.write(f"numapin: {text}\n")
        sys.stderr.flush()
