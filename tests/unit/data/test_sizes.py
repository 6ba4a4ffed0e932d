"""Sizes of slots, and free slots: decisions without memory."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.seam import FreeSlots, RecentSizes, Slot, capacity_for

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE: Final = mmap.PAGESIZE
MB: Final = 1 << 20
SLOTS: Final = [
    Slot(number=number, fd=None, num_bytes=0, address=0, owner=torch.empty(0), worker=0) for number in range(10)
]


@given(st.integers(0, 1 << 40))
def test_the_batch_fits_and_little_is_wasted(num_bytes: int) -> None:
    """It is in whole pages, and at most an eighth or a page larger than the batch."""
    capacity = capacity_for(num_bytes)
    assert capacity % PAGE == 0
    assert num_bytes <= capacity <= max(num_bytes + num_bytes // 8 + 1, num_bytes + PAGE)
    assert capacity_for(capacity) == capacity


def test_batches_of_similar_sizes_share_slots() -> None:
    """Between two powers of two there are eight sizes."""
    assert len({capacity_for(num_bytes) for num_bytes in range(8 * MB + 1, 16 * MB + 1, 5000)}) == 8


def sizes_of(sizes: Iterable[int]) -> RecentSizes:
    """Return what is decided after batches of these sizes."""
    recent = RecentSizes()
    for size in sizes:
        recent.note(size)
    return recent


def test_before_the_first_batch_nothing_is_known() -> None:
    """The worker then takes as much address space as any batch may need; the first batch decides for the next."""
    assert RecentSizes().expected_bytes == 0
    assert sizes_of([5 * MB]).expected_bytes == capacity_for(5 * MB)


@pytest.mark.parametrize("at", [0, 10, 19])
def test_one_outlier_among_twenty_changes_nothing(at: int) -> None:
    """Its slot is not kept, and others do not get its size."""
    sizes = [MB] * 20
    sizes[at] = 200 * MB
    recent = sizes_of(sizes)
    assert recent.expected_bytes == MB
    assert [recent.is_useful(size) for size in (MB, 2 * MB, 3 * MB, 200 * MB)] == [True, True, False, False]


@given(st.lists(st.sampled_from([1, MB, MB + 1, 3 * MB, 50 * MB]), min_size=1, max_size=80))
def test_only_the_last_thirty_two_count(sizes: list[int]) -> None:
    """In any sequence; a new slot is useful at once, and at least nine of ten batches fit into it."""
    recent, late = sizes_of(sizes), sizes_of(sizes[-32:])
    assert recent.expected_bytes == late.expected_bytes
    probes = [PAGE, MB, 2 * MB, 3 * MB, 50 * MB, 100 * MB, 101 * MB]
    assert [recent.is_useful(size) for size in probes] == [late.is_useful(size) for size in probes]
    assert recent.is_useful(recent.expected_bytes)
    last = sizes[-32:]
    assert 10 * sum(size > recent.expected_bytes for size in last) <= len(last)


def test_slots_that_were_never_in_use_are_surplus() -> None:
    """A loop that kept many batches once does not hold their memory forever, but one spare a worker."""
    free = FreeSlots(SLOTS)
    dropped = 0
    for _ in range(1000):
        one = free.pop()
        if free.is_surplus():
            dropped += 1
        else:
            free.append(one)
    assert (dropped, len(free)) == (8, 2)  # one in use, one to spare


def test_slots_that_are_used_now_and_then_stay() -> None:
    """Every 30 batches the loop keeps nine at once."""
    free = FreeSlots(SLOTS)
    for step in range(1000):
        used = [free.pop() for _ in range(9 if step % 30 == 0 else 1)]
        for one in used:
            assert not free.is_surplus()
            free.append(one)
    assert len(free) == 10
