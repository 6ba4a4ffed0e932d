"""Leaving out None, which stands for an unknown value."""

from __future__ import annotations

from tests.unit.base.seam import not_none, without_none


def test_only_none_is_left_out_and_the_order_stays() -> None:
    """Zero, False and empty text are known values."""
    assert not_none(iter([3, None, 0, None, 1])) == [3, 0, 1]
    assert not_none([False, "", None]) == [False, ""]
    assert not_none([]) == []


def test_entries_without_a_value_are_left_out_and_the_order_stays() -> None:
    """A key may be None; only values are looked at."""
    assert list(without_none({"b": 0, "x": None, None: "", "a": False}).items()) == [("b", 0), (None, ""), ("a", False)]
