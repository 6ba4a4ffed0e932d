"""Check a shape that a user gave. Pure.

Comes in: a size or several. Goes out: a tuple of sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from numapin.errors import UsageError


def sizes_of(shape: int | Iterable[int]) -> tuple[int, ...]:
    """Return the size of each dimension.

    Raises:
        UsageError: A size is negative.
    """
    sizes = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    if any(size < 0 for size in sizes):
        raise UsageError(f"shape {sizes} has a negative size", "pass the size of each dimension")
    return sizes
