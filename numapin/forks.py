"""Whether children that Python forks can hang. Pure.

Comes in: a version of Python. Goes out: yes or no.
"""

from __future__ import annotations

import sys
from typing import Final

MENDED: Final = "3.11.10"
THREAD: Final = "github.com/python/cpython/issues/112275"


def may_hang(version: tuple[int, ...] = sys.version_info[:3]) -> bool:
    """Return whether a forked child hangs where a thread of C++, as those of gloo, was just asking for the GIL.

    CPython from 3.8 to 3.11.9 takes a lock in the child before it has reset it; source: `THREAD`.
    """
    return version < (3, 11, 10)
