"""Another user who acts at a chosen moment, right before one of our calls to the operating system.

If two processes race in a loop, luck decides whether one acts between two calls of the other; here each is tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SYSTEM: Final = frozenset({"posix", "_io"})
_BLIND: Final = frozenset({"fspath", "fstat", "close", "geteuid", "getpid", "urandom"})  # they look at no name


class Calls:
    """The number of calls to the operating system so far, other than those that look at no name."""

    num: int = 0


@contextmanager
def acting(acts: Mapping[int, Callable[[], object]]) -> Iterator[Calls]:
    """Act before calls of the block to the operating system, which are counted from 0."""
    calls = Calls()

    def profile(_frame: FrameType, event: str, called: object) -> None:
        """Act if a C function is about to be called. Calls of the act itself do not get here."""
        if event == "c_call" and _looks_at_names(called):
            calls.num += 1
            act = acts.get(calls.num - 1)
            if act is not None:
                act()

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def _looks_at_names(called: object) -> bool:
    return getattr(called, "__module__", None) in _SYSTEM and getattr(called, "__name__", None) not in _BLIND
