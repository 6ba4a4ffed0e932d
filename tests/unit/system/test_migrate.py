"""Moving pages, against a model of the kernel's move_pages (mm/migrate.c). The real kernel is in tests/vm."""

from __future__ import annotations

import ctypes
import errno
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.system.seam import CpuSet, Stay, move_pages, pages

HERE, THERE = 0, 1
WITHIN = CpuSet({THERE})
MOVABLE, SHARED, LOCKED, UNTOUCHED = "msl-"


class _Kernel:
    """Pages of 4 KiB from address 0, each with a letter for its kind; `fails` ends every call that moves."""

    def __init__(self, kinds: str, *, fails: int = 0) -> None:
        self.kinds, self.fails = kinds, fails
        self.nodes = [-errno.ENOENT if kind == UNTOUCHED else HERE for kind in kinds]
        self.num_calls = 0

    def nodes_of_pages(self, addresses: list[int], *, pid: int) -> tuple[int, ...]:
        del pid
        return tuple(self.nodes[address >> 12] for address in addresses)

    def call(self, name: str, *arguments: int) -> int:
        """Do what do_pages_move does: queue pages, and flush the queue before a page that cannot be queued."""
        assert name == "move_pages"
        _, count, pages, nodes, statuses, flags = arguments
        assert (flags, set((ctypes.c_int * count).from_address(nodes))) == (2, {THERE})
        self.num_calls += 1
        if self.fails:
            raise OSError(self.fails, "move_pages")
        status, start = (ctypes.c_int * count).from_address(statuses), 0
        numbers = [address >> 12 for address in (ctypes.c_ulong * count).from_address(pages)]
        for at, number in enumerate(numbers):
            if self.nodes[number] == HERE and self.kinds[number] != SHARED:
                continue
            status[at] = -errno.EACCES if self.nodes[number] == HERE else self.nodes[number]
            failed = self._flush(numbers, status, start, at)
            if failed:
                return failed + count - at - 1
            start = at + 1
        return self._flush(numbers, status, start, count)

    def _flush(self, numbers: list[int], status: ctypes.Array[ctypes.c_int], start: int, end: int) -> int:
        """Move a group; return how many of it did not move. Only if all did, their statuses are written."""
        failed = [number for number in numbers[start:end] if self.kinds[number] == LOCKED]
        for number in set(numbers[start:end]) - set(failed):
            self.nodes[number] = THERE
        if not failed:
            status[start:end] = [THERE] * (end - start)
        return len(failed)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> object:
    """Give a function that installs a model of the kernel."""

    def install(kinds: str, *, fails: int = 0) -> _Kernel:
        made = _Kernel(kinds, fails=fails)
        monkeypatch.setattr(pages, "call", made.call)
        monkeypatch.setattr(pages, "nodes_of_pages", made.nodes_of_pages)
        return made

    return install


@given(st.text(alphabet="msl-", min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_everything_that_can_move_moves(kinds: str) -> None:
    """Each movable page arrives, whatever lies between, up to where a huge page's range counts as locked."""
    with pytest.MonkeyPatch.context() as patch:
        made = _Kernel(kinds)
        patch.setattr(pages, "call", made.call)
        patch.setattr(pages, "nodes_of_pages", made.nodes_of_pages)
        moved = move_pages(1, range(0, len(kinds) << 12, 4096), THERE, within=WITHIN)
    assert moved.num_moved == made.nodes.count(THERE)
    assert moved.num_moved + moved.stays.total() == len(kinds) - kinds.count(UNTOUCHED)
    if LOCKED not in kinds:
        assert moved.num_moved == kinds.count(MOVABLE)
        assert moved.stays[Stay.SHARED] == kinds.count(SHARED)
    assert set(moved.stays) <= {Stay.SHARED, Stay.LOCKED}


def test_pages_behind_a_locked_one(kernel: type[_Kernel]) -> None:
    """A call ends at a locked page's group; the pages behind it are tried by the next one."""
    made = kernel(MOVABLE * 8 + LOCKED * 4 + SHARED + MOVABLE * 8 + UNTOUCHED)
    moved = move_pages(1, range(0, 22 << 12, 4096), THERE, within=WITHIN)
    assert moved == (16, Counter({Stay.LOCKED: 4, Stay.SHARED: 1}))
    assert made.num_calls == 2


def test_nothing_to_move(kernel: type[_Kernel]) -> None:
    """Untouched memory, and pages that are there, need no call that moves."""
    made = kernel(UNTOUCHED * 4)
    assert move_pages(1, range(0, 4 << 12, 4096), THERE, within=WITHIN) == (0, Counter())
    assert made.num_calls == 0


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EPERM, Stay.REFUSED), (errno.EACCES, Stay.FORBIDDEN), (errno.ENOMEM, Stay.FULL)],
)
def test_refused_calls(kernel: type[_Kernel], number: int, reason: Stay) -> None:
    """An error of the whole call is the reason of all pages, and holds for all further ones."""
    kernel(MOVABLE * 4, fails=number)
    assert move_pages(1, range(0, 4 << 12, 4096), THERE, within=WITHIN) == (0, Counter({reason: 4}))
    assert reason in pages.FINAL


def test_node_must_be_planned() -> None:
    """A target that is not one of the planned nodes makes no sense."""
    with pytest.raises(OSError, match="node 0 is not one of 1"):
        move_pages(1, [0], HERE, within=WITHIN)
