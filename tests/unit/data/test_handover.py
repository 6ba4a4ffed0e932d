"""Descriptors that one process hands to another."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.data import child
from tests.unit.data.seam import Channel, HandedDown, Handover

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 120


@pytest.fixture
def handover() -> Iterator[Handover]:
    """Give a socket for descriptors, closed after the test."""
    made = Handover()
    yield made
    made.close()


def send(handover: Handover, number: int, text: bytes) -> None:
    """Send a file that begins with a text, and close it."""
    fd = os.memfd_create("a test")
    try:
        os.write(fd, text)
        handover.send(number, fd)
    finally:
        os.close(fd)


def received(handover: Handover, number: int) -> bytes:
    """Return the beginning of the file with a number."""
    fd = handover.take(number)
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def num_open() -> int:
    """Return the number of descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_each_is_found_by_its_number(handover: Handover) -> None:
    """Workers share the socket, so descriptors may arrive in another order than they are taken.

    A program that os.system starts does not inherit them: it would keep the memory of a slot that was dropped.
    """
    numbers = [1, 5 << 32, (5 << 32) + 1, (1 << 62)]
    for number in numbers:
        send(handover, number, b"%d" % number)
    for number in (numbers[2], numbers[0], numbers[3], numbers[1]):
        assert received(handover, number) == b"%d" % number
    assert not handover._early
    send(handover, 1, b"a")
    fd = handover.take(1)
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_what_was_never_taken_is_closed() -> None:
    """Descriptors are closed, whether they were received or are still on the way, and the ends at last."""
    at_first = num_open()
    handover = Handover()
    before = num_open()
    for number in range(3):
        send(handover, number, b"never")
    os.close(handover.take(1))
    assert num_open() == before + 1
    handover.discard()
    assert num_open() == before
    handover.discard()
    for number in range(2):
        send(handover, number, b"again")
    assert received(handover, 1) == b"again"
    handover.close()
    assert num_open() == at_first


def test_what_was_not_sent_is_an_error(handover: Handover) -> None:
    """The reader never waits: a descriptor is sent before the message that mentions it."""
    with pytest.raises(BlockingIOError):
        handover.take(1)


@pytest.mark.parametrize("end", ["_sender", "_reader"])
def test_another_end_that_is_gone_is_an_error(end: str) -> None:
    """A worker must not wait for a rank that has ended, nor a signal kill the one that sends."""
    handover = Handover()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, getattr(handover, end).fileno())  # the number stays taken
    os.close(null)
    with pytest.raises(BrokenPipeError):
        handover.take(1) if end == "_sender" else handover.send(1, 0)
    handover.close()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_all_that_a_worker_gets_travels_to_it(handover: Handover, method: str) -> None:
    """Forked or not: channels in both directions, a handover that outlives it, and slots to take over.

    It has the slots mapped, and no descriptor is left; one that cannot be mapped is left out.
    """
    inbox, outbox = Channel(), Channel()
    inbox.send(b"ahead")  # sent before the child is there
    fd, huge = os.memfd_create("numapin-slot"), os.memfd_create("numapin-slot")
    os.write(fd, b"from the parent")
    os.ftruncate(huge, 1 << 49)
    slots = HandedDown(lambda: [(7, 15, fd), (8, 1 << 49, huge)])
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=child.take_all, args=(inbox, outbox, handover, slots), daemon=True)
    process.start()
    assert outbox.receive(WAIT_S) == b"daeha: [7] from the parent, 0 open"
    process.join(WAIT_S)
    assert process.exitcode == 0
    assert received(handover, 7) == b"from a child"
    for each in (fd, huge):
        os.close(each)
    inbox.close()
    outbox.close()
