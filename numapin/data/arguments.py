"""Check arguments that a user gave: shapes and numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Integral, Real

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


def require_number(name: str, value: object, *, unit: str, hint: str, is_whole: bool = True) -> None:
    """Raise UsageError unless an option is a number that is not negative, such as a number of threads."""
    is_special = isinstance(value, bool) or (isinstance(value, float) and math.isnan(value))
    if is_special or not isinstance(value, Integral if is_whole else Real):
        raise UsageError(f"{name}={value!r} is not a number of {unit}", hint)
    if value < 0:
        raise UsageError(f"{name}={value}: a number of {unit} cannot be negative", hint)
