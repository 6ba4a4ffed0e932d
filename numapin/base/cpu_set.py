"""Linux list strings: "0-3,8" <-> frozenset of int. Pure.

Comes in: a string or a mask from the kernel, a user or a file; or a set of CPU or node numbers. Goes out: the other
one.
"""

from __future__ import annotations

from itertools import pairwise

from numapin.base.bounds import MAX_CPUS, MAX_LIST_CHARS, MAX_LISTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

_MAX_DIGITS = 7
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
MAX_ID = MAX_CPUS
"""One more than the highest CPU or node number; a range beyond it is a typo."""
_LARGE = 512
_NUM_LARGE = 32
_TOO_MANY = (
    f"the different CPU and node lists of this file have more than {MAX_LISTED} numbers, more than any machine's"
)
_large: dict[frozenset[int], str] = {}


def parse(text: str) -> frozenset[int]:
    """Parse a Linux list string into a set.

    Accepts single numbers, ranges, and the kernel's grouped ranges ("0-31:2/8" is the first 2 of every 8),
    separated by commas; white space around items and an empty string (the empty set) are fine.
    Raises ValueError that names the bad item.
    Source: Documentation/admin-guide/kernel-parameters.rst, "cpu lists".
    """
    _check_length(text)
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
    if isinstance(numbers, frozenset) and len(numbers) > _LARGE:
        return _render_large(numbers)
    return _render(set(numbers))


def _render_large(numbers: frozenset[int]) -> str:
    """Render a set that a hundred ranks or devices may share; the last ones are kept."""
    text = _large.get(numbers)
    if text is None:
        if len(_large) == _NUM_LARGE:
            _large.pop(next(iter(_large)))
        text = _large[numbers] = _render(numbers)
    return text


def _render(numbers: Collection[int]) -> str:
    ordered = sorted(numbers)
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
    _check_length(text)
    words = [word.strip().removeprefix("0x") for word in text.strip().split(",")]
    if any(len(word) > 8 or not _HEX_DIGITS.issuperset(word) for word in words) or len(words) > MAX_ID // 16:
        msg = f"{_short(text)!r} is not a CPU mask of hexadecimal 32-bit words"
        raise ValueError(msg)
    numbers = from_words((int(word or "0", 16) for word in reversed(words)), word_bits=32)
    if max(numbers, default=0) >= MAX_ID:
        msg = f"{_short(text)!r} has a bit beyond {MAX_ID - 1}, the highest CPU or node number that is accepted"
        raise ValueError(msg)
    return numbers


class Sets:
    """The sets of one file: equal texts are parsed once and share one set, and all together have a bound."""

    __slots__ = ("_known", "_left")

    def __init__(self) -> None:
        self._known: dict[tuple[str, Callable[[str], frozenset[int]]], frozenset[int]] = {}
        self._left = MAX_LISTED

    def get(self, text: str, parse: Callable[[str], frozenset[int]] = parse) -> frozenset[int]:
        """Return what `parse` makes of the text. Raises ValueError as it does, and where the file lists too much."""
        found = self._known.get((text, parse))
        if found is None:
            found = self._known[text, parse] = parse(text)
            self._left -= len(found)
            if self._left < 0:
                raise ValueError(_TOO_MANY)
        return found


class Inside:
    """The parts of sets that lie inside another one; equal sets share one part."""

    __slots__ = ("_around", "_known")

    def __init__(self, around: Iterable[int]) -> None:
        self._around = frozenset(around)
        self._known: dict[frozenset[int], frozenset[int]] = {}

    def of(self, numbers: frozenset[int]) -> frozenset[int]:
        """Return the numbers that lie inside."""
        found = self._known.get(numbers)
        if found is None:
            found = self._known[numbers] = numbers & self._around
        return found


def _check_length(text: str) -> None:
    if len(text) > MAX_LIST_CHARS:
        msg = f"a list of {len(text)} characters is longer than any machine's; at most {MAX_LIST_CHARS} are read"
        raise ValueError(msg)


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
