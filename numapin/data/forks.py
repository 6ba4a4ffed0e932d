"""Whether children that Python forks can hang. Pure.

Comes in: a version of Python. Goes out: yes or no.
"""

from __future__ import annotations

from typing import Final

ISSUE: Final = "github.com/python/cpython/issues/112275"
MENDED: Final = "3.11.10"


def may_hang(version: tuple[int, ...]) -> bool:
    """Return whether a forked child can hang where a thread of C++, as those of gloo, was just asking for the GIL.

    CPython 3.11.0 to 3.11.9 takes the lock of its list of threads in the child before it has reset it; source: `ISSUE`.
    """
    return version < tuple(map(int, MENDED.split(".")))
