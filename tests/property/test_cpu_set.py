"""Properties of Linux list strings."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tests.property.seam import CpuSet, cpu_set

numbers = st.frozensets(st.integers(0, cpu_set.MAX_ID - 1))


@given(st.lists(st.integers(0, cpu_set.MAX_ID - 1)))
def test_render_is_canonical_and_parses_back(cpus: list[int]) -> None:
    """Whatever the order and number of members, ranges ascend and never touch; a range of one is a number."""
    text = cpu_set.render(cpus)
    assert CpuSet.parse(text) == CpuSet(cpus)
    runs = [tuple(map(int, item.split("-"))) for item in text.split(",") if item]
    flat = [number for run in runs for number in run]
    assert flat == sorted(set(flat))
    assert all(after[0] > before[-1] + 1 for before, after in pairwise(runs))


@given(st.lists(numbers, max_size=4))
def test_a_list_is_the_union_of_its_items(sets: list[frozenset[int]]) -> None:
    """Items may overlap, repeat, be in any order, and have white space around them."""
    text = " ,\t".join(cpu_set.render(cpus) for cpus in sets if cpus)
    assert CpuSet.parse(f" {text}\n") == CpuSet().union(*sets)


@given(st.text() | st.text(alphabet="0123456789-,:/ x٣") | st.text(alphabet="0123456789abcdefx,"))
def test_other_text_is_a_value_error(text: str) -> None:
    """Text either parses or raises ValueError; only ASCII digits, commas and dashes are accepted in lists."""
    with suppress(ValueError):
        accepted = CpuSet.parse(text)
        assert not accepted or re.fullmatch(r"[0-9,\-\s]+", text)
    with suppress(ValueError):
        assert all(0 <= cpu < cpu_set.MAX_ID for cpu in cpu_set.parse_mask(text))


@given(numbers)
def test_masks_name_the_bits(cpus: frozenset[int]) -> None:
    """A kernel mask of any width, with its most significant word first, is the set of its bits."""
    value = sum(1 << cpu for cpu in cpus)
    words = [f"{value >> shift & 0xFFFFFFFF:08x}" for shift in range(0, max(value.bit_length(), 1) + 64, 32)]
    assert cpu_set.parse_mask(",".join(reversed(words)) + "\n") == cpus
