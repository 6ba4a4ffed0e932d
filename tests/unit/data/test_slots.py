"""A worker's end of the slots, granted ones and those that it makes; their sizes, and which are kept."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.datasets import Raise
from tests.data.loopback import ANYWHERE, make_slot, num_mapped, num_open, slot_descriptors
from tests.unit.data import seam
from tests.unit.data.seam import capacity_for, map_memfd, memory, placement

PAGE: Final = mmap.PAGESIZE
SIZE: Final = 4 * PAGE
SERIAL: Final = 3
SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
NEVER_EXECUTED: Final = 0x0008  # MFD_NOEXEC_SEAL


class Rank:
    def __init__(self, **locality: Any) -> None:
        self.arrivals = seam.Handover()
        handed_down = {number: (slot_of(number), SIZE) for number in (5, 6, 7)}
        self.own = seam.WorkerSlots(self.arrivals, replace(ANYWHERE, **locality), handed_down, serial=SERIAL)

    def grant(self, number: int) -> None:
        self.own.accept(seam.NO_GRANT._replace(slot=number, expected_bytes=SIZE))

    def expect(self, num_bytes: int) -> None:
        self.own.accept(seam.NO_GRANT._replace(expected_bytes=num_bytes))


def slot_of(fill: int) -> torch.Tensor:
    fd = os.memfd_create("numapin-slot")
    os.ftruncate(fd, SIZE)
    memory = map_memfd(fd, SIZE).fill_(fill)
    os.close(fd)
    return memory


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.arrivals.close()


@pytest.fixture(autouse=True)
def _no_slot_stays_open() -> Iterator[None]:
    """Close the descriptors of slots that a test has taken and neither sent nor put back."""
    yield
    for fd in slot_descriptors():
        os.close(fd)


def take(own: seam.WorkerSlots, num_bytes: int = SIZE) -> seam.BatchMemory:
    return own.take(num_bytes)


def test_a_slot_is_placed_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is set on the whole slot while it has no page; a refusal is reported once."""
    seen: list[tuple[int, seam.CpuSet, seam.CpuSet]] = []

    def prefer(address: int, num_bytes: int, nodes: seam.CpuSet, *, within: seam.CpuSet) -> Iterator[str]:
        seen.append((num_bytes, nodes, within))
        lines = Path("/proc/self/smaps").read_text(encoding="ascii").split("\n")
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{address:x}-"))
        assert next(line for line in lines[at:] if line.startswith("Rss:")).split()[1] == "0"
        yield "memory on node 1 was refused"

    monkeypatch.setattr(placement, "prefer", prefer)
    rank = Rank(nodes=seam.CpuSet({1}), num_machine_nodes=2)
    rank.expect(SIZE)
    for _ in range(2):
        take(rank.own).reserve(PAGE)
    assert seen == [(SIZE, seam.CpuSet({1}), seam.CpuSet())] * 2
    assert [rank.own.report(0).notes for _ in range(2)] == [("memory on node 1 was refused",), ()]
    rank.arrivals.close()


@pytest.mark.parametrize("kernel", ["this", "older"])
def test_the_size_of_a_slot_is_fixed(rank: Rank, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Otherwise whoever reads the rest of it would end by SIGBUS. Since Linux 6.3 it cannot be made executable."""
    own, asked = os.memfd_create, []

    def memfd_create(name: str, flags: int) -> int:
        asked.append(flags)
        if kernel == "older" and flags & NEVER_EXECUTED:
            raise OSError(errno.EINVAL, "before Linux 6.3")
        return own(name, flags)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    made = take(rank.own)
    assert asked[0] & NEVER_EXECUTED
    rank.own.send(made)
    fd = rank.arrivals.take(made.number)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS == SIZE_SEALS
    for size in (0, made.capacity + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT, errno.EINVAL])
def test_a_slot_taken_over_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Writing to it would end the worker: it is left out. Before Linux 5.14 (EINVAL) pages come with a write."""
    fd = os.memfd_create("numapin-slot")
    os.ftruncate(fd, SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "populate", Raise(OSError, (code, "a test")))
        mapped = seam.HandedDown(lambda: [(5, SIZE, fd)]).map()
    populated = {number: num_bytes for number, (_memory, num_bytes) in mapped.items()}
    assert populated == ({5: 0} if code == errno.EINVAL else {})
    assert num_open() == 0


def test_a_granted_slot_that_could_not_be_mapped(rank: Rank) -> None:
    """The worker had no memory for it when it started: the rank is told, and the batch gets a new slot."""
    rank.grant(8)
    assert take(rank.own).is_new
    assert rank.own.report(0).refused == (8,)
    assert rank.own.report(0).refused == ()


@pytest.mark.parametrize("expected_bytes", [0, SIZE])
def test_what_it_made_stays_mapped(rank: Rank, expected_bytes: int) -> None:
    """In its size, even if that was unknown; its pages are still faulted in before they are written."""
    rank.expect(expected_bytes)
    made = take(rank.own, SIZE)
    assert made.reserve(PAGE) == 0
    made.view[0] = 9
    rank.own.send(made)
    number = made.number
    del made
    before = num_mapped()
    for _ in range(3):
        rank.grant(number)
        again = take(rank.own, 1)
        assert (again.number, again.is_new, again.view[0]) == (number, False, 9)
        assert again.capacity == len(again.view) == (SIZE if expected_bytes else PAGE)
        assert again.populated == PAGE
        del again
    assert num_mapped() == before


def test_those_that_are_too_small_do_not_pile_up(rank: Rank) -> None:
    """Of several, the oldest is given back to the rank."""
    for number in (5, 6, 7):
        rank.grant(number)
    for refused in ((5,), (6,), ()):
        assert take(rank.own, SIZE + 1).is_new
        assert rank.own.report(0).refused == refused
    assert take(rank.own, SIZE).number == 7


MB: Final = 1 << 20
SLOTS: Final = [make_slot(number) for number in range(10)]


@given(st.integers(0, 1 << 40))
def test_the_batch_fits_and_little_is_wasted(num_bytes: int) -> None:
    """It is in whole pages, and at most an eighth or a page larger than the batch."""
    capacity = capacity_for(num_bytes)
    assert capacity % PAGE == 0
    assert num_bytes <= capacity <= max(num_bytes + num_bytes // 8 + 1, num_bytes + PAGE)
    assert capacity_for(capacity) == capacity


def sizes_of(sizes: Iterable[int]) -> seam.RecentSizes:
    recent = seam.RecentSizes()
    for size in sizes:
        recent.note(size)
    return recent


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


def test_slots_that_are_used_now_and_then_stay() -> None:
    """Every 30 batches the loop keeps nine at once."""
    free = seam.FreeSlots(SLOTS)
    for step in range(1000):
        used = [free.pop() for _ in range(9 if step % 30 == 0 else 1)]
        for one in used:
            assert not free.is_surplus()
            free.append(one)
    assert len(free) == 10
