"""Linux list strings and masks: the valid forms, and the errors for others. Any set: tests/property."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest

from tests.recorded.screens import compare_answers
from tests.unit.base.seam import CpuSet, cpu_set


def _answer(line: str) -> str:
    kind, _, text = line.partition(" ")
    try:
        return str(CpuSet.parse(text) if kind == "list" else cpu_set.parse_mask(text))
    except ValueError as error:
        return f"error: {error}"


def test_lists_and_masks() -> None:
    """Lists may have blanks, overlap and have any order; masks are the kernel's or hwloc's; errors quote the item."""
    compare_answers(Path(__file__).with_name("cpus.txt"), _answer)


def test_long_texts_are_quoted_in_part() -> None:
    """A message stays short, however long the text is."""
    for parse, letter in ((CpuSet.parse, "x"), (cpu_set.parse_mask, ",")):
        with pytest.raises(ValueError, match=f"^'{letter * 57}\\.\\.\\.' is not a ") as caught:
            parse(letter * 40_000)
        assert len(str(caught.value)) < 200


A, B = CpuSet({0, 1, 2, 8}), CpuSet({2, 3})
KEYS = {2: "", 3: ""}.keys()


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (A & B, "2"),
        (A | B, "0-3,8"),
        (A - B, "0-1,8"),
        (A & KEYS, "2"),
        (A | KEYS, "0-3,8"),
        (A - KEYS, "0-1,8"),
        (A.intersection([2], B), "2"),
        (A.union([4], [5]), "0-2,4-5,8"),
        (A.difference([0], B), "1,8"),
        (CpuSet(), ""),
        *((cpu_set.from_words(none, word_bits=64), "") for none in ([], [0, 0])),
        (cpu_set.from_words([5, 1 << 63], word_bits=64), "0,2,127"),
        (cpu_set.from_words([1 << 31, 1], word_bits=32), "31-32"),
        (deepcopy(A), "0-2,8"),
        (CpuSet((3, 1, 2, 2)), "1-3"),
    ],
)
def test_sets_stay_cpu_sets(made: CpuSet, text: str) -> None:
    """Set algebra, parsers and copies return a `CpuSet`, whose text is Linux's list; the text is rendered once.

    The first word of a mask holds the lowest numbers.
    """
    assert type(made) is CpuSet
    assert (str(made), f"{made}", str(made)) == (text, text, text)


def test_operations_without_effect_copy_nothing() -> None:
    """An operator whose result equals the set on the left returns that set, with its text and hash."""
    assert A & (A | B) is A
    assert A - CpuSet({7}) is A
    assert A | CpuSet({8}) is A


def test_a_cpu_set_is_a_set() -> None:
    """It equals and hashes like any set of its numbers, and the empty set is false.

    More texts of large ones than are remembered are rendered, and one that was forgotten is rendered again.
    """
    assert {frozenset(A): 1}[A] == 1
    assert not CpuSet()
    with pytest.raises(AttributeError):
        A.add(3)  # type: ignore[attr-defined]
    for first in (*range(40), 0):
        assert str(CpuSet(range(first, 2000))) == f"{first}-1999"
