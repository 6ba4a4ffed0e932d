"""A worker's end of the slots: granted ones, and those that it makes."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from tests.data.loopback import ANYWHERE, num_mapped, num_open, slot_descriptors
from tests.unit.data.seam import (
    NO_GRANT,
    BatchMemory,
    CpuSet,
    HandedDown,
    Handover,
    WorkerSlots,
    map_memfd,
    memory,
    placement,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE: Final = mmap.PAGESIZE
SIZE: Final = 4 * PAGE
SERIAL: Final = 3
SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
NEVER_EXECUTED: Final = 0x0008  # MFD_NOEXEC_SEAL


class Rank:
    """The other end: it hands slots over, and takes those that the worker made."""

    def __init__(self, **locality: Any) -> None:
        self.arrivals = Handover()
        handed_down = {number: (slot_of(number), SIZE) for number in (5, 6, 7)}
        self.own = WorkerSlots(self.arrivals, replace(ANYWHERE, **locality), handed_down, serial=SERIAL)

    def grant(self, number: int) -> None:
        """Give a slot to the worker, which has it mapped."""
        self.own.accept(NO_GRANT._replace(slot=number, expected_bytes=SIZE))

    def expect(self, num_bytes: int) -> None:
        """Give the worker a task without a slot."""
        self.own.accept(NO_GRANT._replace(expected_bytes=num_bytes))

    def received(self, number: int) -> tuple[int, int]:
        """Return the size of a slot that the worker has made, and the memory that it takes."""
        fd = self.arrivals.take(number)
        found = os.fstat(fd)
        os.close(fd)
        return found.st_size, found.st_blocks * 512

    def close(self) -> None:
        """Close the socket."""
        self.arrivals.close()


def slot_of(fill: int) -> torch.Tensor:
    """Return the memory of a slot, filled with a byte."""
    fd = os.memfd_create("numapin-slot")
    os.ftruncate(fd, SIZE)
    memory = map_memfd(fd, SIZE).fill_(fill)
    os.close(fd)
    return memory


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Give a rank with one worker."""
    made = Rank()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _no_slot_stays_open() -> Iterator[None]:
    """Close the descriptors of slots that a test has taken and neither sent nor put back."""
    yield
    for fd in slot_descriptors():
        os.close(fd)


def take(own: WorkerSlots, num_bytes: int = SIZE) -> BatchMemory:
    """Return memory for a batch."""
    found = own.take(num_bytes)
    assert found is not None
    return found


def refuse(code: int) -> Callable[..., Any]:
    """Return a function that raises this error of the kernel."""

    def refuse(*_args: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def test_a_slot_is_placed_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is set on the whole slot while it has no page; a refusal is reported once."""
    seen: list[tuple[int, CpuSet, CpuSet]] = []

    def prefer(address: int, num_bytes: int, nodes: CpuSet, *, within: CpuSet) -> Iterator[str]:
        seen.append((num_bytes, nodes, within))
        lines = Path("/proc/self/smaps").read_text(encoding="ascii").split("\n")
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{address:x}-"))
        assert next(line for line in lines[at:] if line.startswith("Rss:")).split()[1] == "0"
        yield "memory on node 1 was refused"

    monkeypatch.setattr(placement, "prefer", prefer)
    rank = Rank(nodes=CpuSet({1}), num_machine_nodes=2)
    rank.expect(SIZE)
    for _ in range(2):
        take(rank.own).reserve(PAGE)
    assert seen == [(SIZE, CpuSet({1}), CpuSet())] * 2
    assert [rank.own.report(0).notes, rank.own.report(0).notes] == [
        ("memory on node 1 was refused",),
        (),
    ]
    rank.close()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kernel", ["this", "older"])
def test_the_size_of_a_slot_is_fixed(rank: Rank, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Otherwise whoever reads the rest of it would end by SIGBUS. Since Linux 6.3 it cannot be made executable."""
    own, asked = os.memfd_create, []

    def memfd_create(name: str, flags: int) -> int:
        asked.append(flags)
        return own(name, _without_noexec(flags) if kernel == "older" else flags)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    made = take(rank.own)
    assert asked[0] & NEVER_EXECUTED
    rank.own.send(made)
    fd = rank.arrivals.take(made.number)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS == SIZE_SEALS
    child = os.fork()
    if not child:
        os._exit(0 if all(is_refused(fd, size) for size in (0, made.capacity + PAGE)) else 1)
    status = os.waitpid(child, 0)[1]
    os.close(fd)
    assert status == 0


def is_refused(fd: int, num_bytes: int) -> bool:
    """Return whether a file's size cannot be changed."""
    try:
        os.ftruncate(fd, num_bytes)
    except PermissionError:
        return True
    return False


def _without_noexec(flags: int) -> int:
    """Refuse what kernels before Linux 6.3 do not know."""
    if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return flags


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT, errno.EINVAL])
def test_a_slot_taken_over_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Writing to it would end the worker: it is left out. Before Linux 5.14 (EINVAL) pages come with a write."""
    fd = os.memfd_create("numapin-slot")
    os.ftruncate(fd, SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "populate", refuse(code))
        assert list(HandedDown(lambda: [(5, SIZE, fd)]).map()) == ([5] if code == errno.EINVAL else [])
    assert num_open() == 0


def test_a_slot_that_cannot_be_cut_to_its_size(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor is closed, and it is not mistaken for a granted slot."""
    made = take(rank.own)
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse(errno.ETOOMANYREFS))
        with pytest.raises(OSError, match="Too many references"):
            rank.own.send(made)
    assert num_open() == 0
    rank.own.put_back(made)
    assert take(rank.own).is_new


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


@pytest.mark.parametrize("is_granted", [True, False], ids=["granted", "made by the worker"])
@pytest.mark.parametrize(
    "refer",
    [lambda view: view[:10], lambda view: torch.frombuffer(view, dtype=torch.int8)],
    ids=["a view", "a tensor"],
)
def test_a_slot_that_is_referred_to_is_not_written_again(
    rank: Rank, refer: Callable[[memoryview], Any], *, is_granted: bool
) -> None:
    """The rank is told, and the worker uses another until the reference is gone, even if it made the slot."""
    if is_granted:
        rank.grant(5)
    else:
        rank.expect(SIZE)
    used = take(rank.own)
    number = used.number
    used.reserve(SIZE)
    used.view[:] = bytes([5]) * len(used.view)
    rank.own.send(used)
    kept = refer(used.view)
    del used
    if not is_granted:
        os.close(rank.arrivals.take(number))
    rank.grant(number)
    assert take(rank.own).number != number
    report = rank.own.report(0)
    refused, still_kept = report.refused, report.kept
    assert (refused, number in still_kept) == ((number,), True)
    assert set(bytes(kept)) == {5}
    del kept
    rank.grant(number)
    assert take(rank.own).number == number
