"""Waiting for conditions, so that no test depends on how fast this machine is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def until(condition: Callable[[], T | None], *, timeout_s: float, what: str, tell: Callable[[], str] = str) -> T:
    """Return what `condition` gives once that is true or a number. Raises AssertionError that names `what`, and tells.

    `tell` gives what explains a failure, such as the end of a log.
    """
    end = time.monotonic() + timeout_s
    while True:
        if got := condition():
            return got
        assert time.monotonic() < end, f"no {what} after {timeout_s} s\n{tell()}"
        time.sleep(0.05)
