"""Sets of CPUs and of nodes, and their list strings in Linux: "0-3,8".

Each rank imports this before its program starts: built-in types only.
"""

from __future__ import annotations

from itertools import pairwise

from numapin.base.bounds import MAX_CPUS, MAX_LIST_CHARS, MAX_LISTED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet

MAX_ID = MAX_CPUS  # one more than the highest CPU or node number; a range beyond it is a typo
_MAX_DIGITS = 18
_LARGE = 512
_NUM_LARGE = 32
_large: dict[frozenset[int], str] = {}
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_TOO_MANY = f"the distinct CPU and node lists of this file have more than {MAX_LISTED} numbers, more than any machine's"


class CpuSet(frozenset[int]):
    """An immutable set of CPUs or of NUMA nodes; `str` writes it as Linux does, which is also its form in JSON.

    It equals any set of the same numbers. `&`, `|` and `-` with a `CpuSet` on the left, and the methods of their names,
    return a `CpuSet`.
    """

    __slots__ = ("_text",)
    _text: str

    @classmethod
    def parse(cls, text: str) -> CpuSet:
        """Parse a Linux list string.

        Accepts single numbers and ranges, separated by commas. White space around items is accepted, and an empty
        string is the empty set. Raises ValueError that names the bad item.
        """
        _check_length(text)
        numbers: set[int] = set()
        left = 4 * MAX_ID  # bounds what repeated ranges add up to: a file full of them must not take minutes
        for item in map(str.strip, text.split(",") if text.strip() else ()):
            first, dash, last = item.partition("-")
            last = last if dash else first
            if not _is_number(first) or not _is_number(last):
                raise ValueError(f"{_quoted(item, text)} is not a number or a range such as 0-3")
            found = range(int(first), int(last) + 1)
            if not found or found[-1] >= MAX_ID:
                raise ValueError(f"range {_quoted(item, text)} runs backwards or too far")
            left -= len(found)
            if left < 0:
                raise ValueError(f"{_short(text)!r} lists the same numbers again and again")
            numbers.update(found)
        return cls(numbers)

    def __str__(self) -> str:
        """Return the shortest sorted Linux list string; the empty set is the empty string."""
        try:
            return self._text
        except AttributeError:  # the first time; a hundred ranks or devices may share a large set
            self._text = _rendered_large(self) if len(self) > _LARGE else render(self)
            return self._text

    # The operators of a frozenset return plain frozensets, and refuse other kinds of sets, such as the keys of a dict.
    # An operation that changes nothing copies nothing.

    def __and__(self, other: AbstractSet[object]) -> CpuSet:
        """Return the numbers that are in both."""
        found = frozenset.intersection(self, other)
        return self if len(found) == len(self) else CpuSet(found)

    def __or__(self, other: AbstractSet[int]) -> CpuSet:  # type: ignore[override]
        """Return the numbers that are in either."""
        found = frozenset.union(self, other)
        return self if len(found) == len(self) else CpuSet(found)

    def __sub__(self, other: AbstractSet[object]) -> CpuSet:
        """Return the numbers that are not in the other set."""
        found = frozenset.difference(self, other)
        return self if len(found) == len(self) else CpuSet(found)

    def union(self, *others: Iterable[int]) -> CpuSet:  # type: ignore[override]
        """Return the numbers that are in any of the sets."""
        return CpuSet(frozenset.union(self, *others))

    def intersection(self, *others: Iterable[object]) -> CpuSet:
        """Return the numbers that are in all of the sets."""
        return CpuSet(frozenset.intersection(self, *others))

    def difference(self, *others: Iterable[object]) -> CpuSet:
        """Return the numbers that are in none of the others."""
        return CpuSet(frozenset.difference(self, *others))


def _rendered_large(numbers: CpuSet) -> str:
    """Write a large set; the most recent texts are cached, because many intersections yield equal sets."""
    text = _large.get(numbers)
    if text is None:
        if len(_large) == _NUM_LARGE:
            _large.pop(next(iter(_large)))
        text = _large[numbers] = render(numbers)
    return text


def render(numbers: Iterable[int]) -> str:
    """Write any numbers, such as ranks or process ids, in the form of a `CpuSet`: "0-3,8"."""
    ordered = sorted(set(numbers))
    if not ordered:
        return ""
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1]
    starts, ends = [0, *breaks], [*breaks, len(ordered)]
    runs = ((ordered[start], ordered[end - 1]) for start, end in zip(starts, ends, strict=True))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def from_words(words: Iterable[int], *, word_bits: int) -> CpuSet:
    """Return the numbers of the set bits of a mask; `words` are non-negative, the least significant first."""
    return CpuSet(
        position * word_bits + bit
        for position, word in enumerate(words)
        for bit in range(word.bit_length())
        if word >> bit & 1
    )


def parse_mask(text: str) -> CpuSet:
    """Parse a hexadecimal mask of comma-separated 32-bit words, most significant first ("00000001,0000000f").

    As hwloc writes them, a word may begin with "0x", and an empty word is zero. Raises ValueError that quotes the mask.
    """
    _check_length(text)
    words = [word.strip().removeprefix("0x") or "0" for word in text.strip().split(",")]
    are_words = all(len(word) <= 8 and _HEX_DIGITS.issuperset(word) for word in words)
    if len(words) > MAX_ID // 16 or not are_words:
        raise ValueError(f"{_short(text)!r} is not a CPU mask of hexadecimal 32-bit words")
    numbers = from_words((int(word, 16) for word in reversed(words)), word_bits=32)
    if max(numbers, default=0) >= MAX_ID:
        msg = f"{_short(text)!r} has a bit beyond {MAX_ID - 1}, the highest CPU or node number that is accepted"
        raise ValueError(msg)
    return numbers


class Sets:
    """The sets of one file: equal texts are parsed once and share one set, and their total size is bounded."""

    __slots__ = ("_known", "_left")

    def __init__(self) -> None:
        self._known: dict[tuple[str, Callable[[str], CpuSet]], CpuSet] = {}
        self._left = MAX_LISTED

    def get(self, text: str, parse: Callable[[str], CpuSet] = CpuSet.parse) -> CpuSet:
        """Return the parsed text. Raises ValueError as `parse` does, and if the file lists too many numbers."""
        found = self._known.get((text, parse))
        if found is None:
            found = self._known[text, parse] = parse(text)
            self._left -= len(found)
            if self._left < 0:
                raise ValueError(_TOO_MANY)
        return found


def _check_length(text: str) -> None:
    if len(text) > MAX_LIST_CHARS:
        msg = f"a list of {len(text)} characters is longer than any machine's; at most {MAX_LIST_CHARS} are read"
        raise ValueError(msg)


def _quoted(item: str, text: str) -> str:
    """Return the item in quotation marks, with the text around it if there is more."""
    return repr(_short(item)) if item == text else f"{_short(item)!r} in {_short(text)!r}"


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= _MAX_DIGITS


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
