"""Linux list strings: "0-3,8" <-> frozenset of int. Pure.

Comes in: a string or a mask from the kernel, a user or a file; or a set of CPU or node numbers. Goes out: the other
one.
"""

from __future__ import annotations

from itertools import pairwise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_DIGITS = 7
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
MAX_ID = 1 << 16
"""Larger than any CPU or node number Linux can be built for (NR_CPUS is at most 8192); a range beyond it is a typo."""


def parse(text: str) -> frozenset[int]:
    """Parse a Linux list string into a set.

    Accepts single numbers, ranges, and the kernel's grouped ranges ("0-31:2/8" is the first 2 of every 8),
    separated by commas; white space around items and an empty string (the empty set) are fine.
    Raises ValueError that names the bad item.
    Source: Documentation/admin-guide/kernel-parameters.rst, "cpu lists".
    """
    numbers: set[int] = set()
    left = 4 * MAX_ID  # what repeated ranges may add up to: a file of nothing else must not take minutes
    for item in text.split(","):
        found = _numbers(item.strip(), text)
        left -= len(found)
        if left < 0:
            msg = f"{_short(text)!r} lists the same numbers again and again"
            raise ValueError(msg)
        numbers.update(found)
    return frozenset(numbers)


def render(numbers: Iterable[int]) -> str:
    """Render numbers as the shortest sorted Linux list string; the empty set is the empty string."""
    ordered = sorted(set(numbers))
    if not ordered:
        return ""
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1]
    starts, ends = [0, *breaks], [*breaks, len(ordered)]
    return ",".join(_run(ordered[start], ordered[end - 1]) for start, end in zip(starts, ends, strict=True))


def from_words(words: Iterable[int], *, word_bits: int) -> frozenset[int]:
    """Return the numbers of the set bits of a mask; `words` are non-negative, the least significant first."""
    return frozenset(
        position * word_bits + bit
        for position, word in enumerate(words)
        for bit in range(word.bit_length())
        if word >> bit & 1
    )


def parse_mask(text: str) -> frozenset[int]:
    """Parse a hexadecimal mask of comma-separated 32-bit words, most significant first ("00000001,0000000f").

    The "0x" that hwloc writes before each word is accepted, and so is an empty word, which hwloc writes for zero.
    Raises ValueError that quotes the mask.
    """
    words = [word.strip().removeprefix("0x") for word in text.strip().split(",")]
    if any(len(word) > 8 or not _HEX_DIGITS.issuperset(word) for word in words) or len(words) > MAX_ID // 32:
        msg = f"{_short(text)!r} is not a CPU mask of hexadecimal 32-bit words"
        raise ValueError(msg)
    return from_words((int(word or "0", 16) for word in reversed(words)), word_bits=32)


def _numbers(item: str, text: str) -> range | list[int]:
    if not item and not text.strip():
        return range(0)
    span, has_groups, groups = item.partition(":")
    ends = span.split("-")
    used_of_group = groups.split("/") if has_groups else ["1", "1"]
    is_shaped = len(ends) == 2 or (len(ends) == 1 and not has_groups)
    if not is_shaped or len(used_of_group) != 2 or not all(map(_is_number, (*ends, *used_of_group))):
        msg = f"{_short(item)!r} in {_short(text)!r} is not a number or a range such as 0-3"
        raise ValueError(msg)
    first, last = int(ends[0]), int(ends[-1])
    used, group = map(int, used_of_group)
    if last < first or last >= MAX_ID or not 1 <= used <= group:
        msg = f"range {item!r} in {_short(text)!r} runs backwards or too far"
        raise ValueError(msg)
    return [number for number in range(first, last + 1) if (number - first) % group < used]


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= _MAX_DIGITS


def _run(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
