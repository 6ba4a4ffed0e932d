"""Memory sizes as text."""

from __future__ import annotations

import math
import re
from typing import Final

_UNITS: Final = "KMGT"
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s?(?:([KMGT])(?:i?B)?|B)?", re.ASCII | re.IGNORECASE)


def parse(text: str) -> int:
    """Parse a size in bytes: a number with K, M, G or T, each 1024 times the one before. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    size = 0.0 if match is None else float(match[1]) * 1024 ** (_UNITS.find((match[2] or " ").upper()) + 1)
    is_part_of_a_byte = match is not None and not match[2] and not size.is_integer()  # 38.5: the unit is missing
    if size < 1 or is_part_of_a_byte:
        msg = f"{text!r} is not a size such as 38.5M or 1G"
        raise ValueError(msg)
    return int(size)


def gib(num_bytes: int) -> str:
    """Return a size in GiB, however small or large."""
    return f"{num_bytes / 2**30:.1f} GiB"


def render(num_bytes: int) -> str:
    """Return a size in the largest unit that gives a number of at least 1."""
    power = min(max(num_bytes, 1).bit_length() - 1, 10 * len(_UNITS)) // 10
    return f"{num_bytes / 1024**power:.1f} {_UNITS[power - 1]}iB" if power else f"{num_bytes} B"


def size_label(num_bytes: float) -> str:
    """Return a size up to GiB in the largest unit that leaves at least 1, in short: 4 KiB, 1.5 MiB."""
    power = min(3, int(math.log2(max(num_bytes, 1)) // 10))
    return f"{num_bytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
