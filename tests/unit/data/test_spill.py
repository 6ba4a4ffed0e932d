"""Memory for a batch without a slot, and the transfer of its descriptor to the rank."""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from numapin.data.wire import spill
from numapin.data.wire.spill import Handover, Spill
from numapin.system import memory
from tests.data import child

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S: Final = 20


@pytest.fixture
def handover() -> Iterator[Handover]:
    """Give a socket for descriptors, closed after the test."""
    made = Handover()
    yield made
    made.close()


def send(handover: Handover, worker: int, number: int, text: bytes) -> None:
    """Send memory that begins with a text, and release it."""
    with closing(Spill()) as made:
        made.view[: len(text)] = text
        made.send(handover, worker, number)


def received(handover: Handover, worker: int, number: int) -> bytes:
    """Return the beginning of a batch's memory."""
    fd = handover.take(worker, number)
    try:
        return bytes(memoryview(memory.map_shared(fd, 4096))[:5])
    finally:
        os.close(fd)


def num_open() -> int:
    """Return the number of descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_outlives_its_sender(handover: Handover) -> None:
    """The memory keeps its contents after the worker has released it, or has died."""
    send(handover, 0, 1, b"first")
    assert received(handover, 0, 1) == b"first"


def test_fresh_memory_is_zero_and_costs_nothing() -> None:
    """It reserves 4 GiB of address space; a page exists once it is written."""
    with closing(Spill()) as made:
        assert len(made.view) == spill.SPILL_BYTES
        assert set(made.view[:5000]) == {0}
        made.view[: 1 << 20] = bytes(1 << 20)
        assert os.fstat(made._fd).st_blocks * 512 <= 4 << 20


def test_each_is_found_by_worker_and_number(handover: Handover) -> None:
    """Workers share the socket, so descriptors may arrive in another order than they are taken."""
    for worker, number in ((0, 1), (1, 1), (0, 2), (2, 1)):
        send(handover, worker, number, b"%d and %d" % (worker, number))
    for worker, number in ((2, 1), (0, 2), (0, 1), (1, 1)):
        assert received(handover, worker, number) == b"%d and" % worker
    assert not handover._early


def test_what_was_never_taken_is_closed(handover: Handover) -> None:
    """Descriptors are closed, whether they were received or are still on the way."""
    before = num_open()
    for number in range(3):
        send(handover, 0, number, b"never")
    os.close(handover.take(0, 1))
    assert num_open() == before + 1
    handover.discard()
    assert num_open() == before
    handover.discard()
    send(handover, 0, 0, b"again")
    assert received(handover, 0, 0) == b"again"


def test_a_descriptor_that_was_lost_is_an_error(handover: Handover) -> None:
    """The kernel drops it if the rank has too many open files; `take` must raise and not wait forever."""
    with socket.socket(fileno=os.dup(handover._workers)) as end:
        end.send(spill._TAG.pack(0, 1))
    with pytest.raises(OSError, match="ulimit -n"):
        handover.take(0, 1)


def test_without_address_space_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises an error and leaks no descriptor; torch then sends the batch."""
    before = num_open()
    monkeypatch.setattr(spill, "SPILL_BYTES", 1 << 49)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Spill()
    assert num_open() == before


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_it_travels_to_a_child(handover: Handover, method: str) -> None:
    """It works under every start method, and the memory outlives the child."""
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=child.hand_over, args=(handover,), daemon=True)
    process.start()
    process.join(WAIT_S)
    assert process.exitcode == 0
    assert received(handover, 3, 7) == b"child"
