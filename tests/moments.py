"""Another user who acts at a chosen moment: right before one of our calls to the operating system.

Comes in: acts, by the number of the call. Goes out: the number of calls. A race that two processes run in a loop is won
by luck; this plays out each of its courses.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

_SYSTEM: Final = frozenset({"posix", "_io", "fcntl"})


class Calls:
    """The number of calls to the operating system so far."""

    num: int = 0


@contextmanager
def acting(acts: Mapping[int, Callable[[], object]]) -> Iterator[Calls]:
    """Act before calls of the block to the operating system, which are counted from 0."""
    calls = Calls()

    def profile(_frame: FrameType, event: str, called: object) -> None:
        """Act if a C function is about to be called. Calls of the act itself do not get here."""
        if event == "c_call" and getattr(called, "__module__", None) in _SYSTEM:
            calls.num += 1
            act = acts.get(calls.num - 1)
            if act is not None:
                act()

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)
