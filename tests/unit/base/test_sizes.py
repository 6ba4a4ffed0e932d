"""Sizes with units: what is read, what is refused, and how sizes are shown."""

from __future__ import annotations

import pytest

from tests.unit.base.seam import formats

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("38.5M", 40370176), ("2g", 2 << 30), ("1.5KiB", 1536), (" 7 MB ", 7 * MIB), ("3T", 3 << 40), ("9B", 9)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    """Units are powers of 1024, in any case, with or without B."""
    assert formats.parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "0", "0.5", "-1M", "M", "1X", "1e9", "1,5M", "٣M", "9" * 40, "nan", "1 2M", "38.5", "38.5B"]
)
def test_bad_sizes(text: str) -> None:
    """Text that is not a size of at least one byte, or a part of a byte, is refused with an example."""
    with pytest.raises(ValueError, match=r"is not a size such as 38.5M"):
        formats.parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (64 * MIB, "64.0 MiB"),
        (3 << 40, "3.0 TiB"),
        (1 << 55, "32768.0 TiB"),
    ],
)
def test_sizes_are_shown(num_bytes: int, text: str) -> None:
    """A size has the largest unit, up to TiB, that leaves at least 1 before the point."""
    assert formats.render_size(num_bytes) == text
