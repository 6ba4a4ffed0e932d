"""Linux list strings and masks: the valid forms, and the errors for others. Any set: tests/property."""

from __future__ import annotations

from copy import deepcopy

import pytest

from tests.unit.base.seam import CpuSet, cpu_set


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("0,,1", "'' in '0,,1'"),
        ("0-", "'0-'"),
        ("-1", "'-1'"),
        ("a", "'a'"),
        ("1.5", "'1.5'"),
        ("0x1", "'0x1'"),
        ("٣", "'٣'"),  # a digit to int(), not to the kernel
        ("3-1", "runs backwards"),
        ("0-31:0/8", "runs backwards or too far"),
        ("0-31:9/8", "runs backwards or too far"),
        ("0-9999999", "too far"),
        ("12345678", "'12345678'"),
        ("x" * 5000, "'" + "x" * 40),
    ],
)
def test_bad_items_are_named(text: str, quoted: str) -> None:
    """The ValueError quotes the bad item, in a short message."""
    with pytest.raises(ValueError, match=quoted.replace("(", r"\(")) as caught:
        CpuSet.parse(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["g", "123456789", "0x0x1", "-1", "0xf...f", "1 2", "," * 40000])
def test_bad_masks_are_quoted(text: str) -> None:
    """A malformed mask raises a ValueError that quotes it."""
    with pytest.raises(ValueError, match="not a CPU mask"):
        cpu_set.parse_mask(text)


A, B = CpuSet({0, 1, 2, 8}), CpuSet({2, 3})
KEYS = {2: "", 3: ""}.keys()


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (A & B, "2"),
        (A | B, "0-3,8"),
        (A - B, "0-1,8"),
        (A ^ B, "0-1,3,8"),
        (A & KEYS, "2"),
        (A | KEYS, "0-3,8"),
        (A - KEYS, "0-1,8"),
        (A ^ KEYS, "0-1,3,8"),
        (A.intersection([2], B), "2"),
        (A.union([4], [5]), "0-2,4-5,8"),
        (A.difference([0], B), "1,8"),
        (A.symmetric_difference([8, 9]), "0-2,9"),
        (CpuSet(), ""),
        *((CpuSet.parse(blank), "") for blank in ("", "  \n")),
        (CpuSet.parse(" 5 , 2-3,007\n"), "2-3,5,7"),
        (CpuSet.parse("3,1-3,1"), "1-3"),
        (CpuSet.parse("0-31:2/8"), "0-1,8-9,16-17,24-25"),
        (CpuSet.parse("2-10:1/3"), "2,5,8"),
        (CpuSet.parse("4-4:1/1"), "4"),
        (cpu_set.parse_mask("00000001,0000000f"), "0-3,32"),
        (cpu_set.parse_mask("0x00000001,,0x00000080"), "7,64"),  # hwloc's
        *((cpu_set.parse_mask(none), "") for none in ("", "0000,00000000\n")),
        *((cpu_set.from_words(none, word_bits=64), "") for none in ([], [0, 0])),
        (cpu_set.from_words([5, 1 << 63], word_bits=64), "0,2,127"),
        (cpu_set.from_words([1 << 31, 1], word_bits=32), "31-32"),
        (deepcopy(A), "0-2,8"),
        (CpuSet((3, 1, 2, 2)), "1-3"),
    ],
)
def test_sets_stay_cpu_sets(made: CpuSet, text: str) -> None:
    """Set algebra, parsers and copies return a `CpuSet`, whose text is Linux's list; the text is rendered once.

    Lists may have blanks, overlap and have any order; masks are the kernel's; the first word holds the lowest numbers.
    """
    assert type(made) is CpuSet
    assert (str(made), f"{made}", str(made)) == (text, text, text)


def test_operations_without_effect_copy_nothing() -> None:
    """An operator whose result equals the set on the left returns that set, with its text and hash."""
    assert A & (A | B) is A
    assert A - CpuSet({7}) is A
    assert A | CpuSet({8}) is A
    assert [str(made) for made in (A & B, A - B, A | B)] == ["2", "0-1,8", "0-3,8"]


def test_a_cpu_set_is_a_set() -> None:
    """It equals and hashes like any set of its numbers, and the empty set is false."""
    assert {frozenset(A): 1}[A] == 1
    assert not CpuSet()
    with pytest.raises(AttributeError):
        A.add(3)  # type: ignore[attr-defined]
