"""Python versions whose forked children can hang."""

from __future__ import annotations

from typing import Final

ISSUE: Final = "github.com/python/cpython/issues/112275"
MENDED: Final = "3.11.10"


def may_hang(version: tuple[int, ...]) -> bool:
    """Return whether a forked child can hang because a C++ thread, such as gloo's, was acquiring the GIL at the fork.

    In the child, CPython 3.11.0 to 3.11.9 takes the lock of its list of threads before it resets it. Source: `ISSUE`.
    """
    return version < tuple(map(int, MENDED.split(".")))
